"""How soon clients ask again once they were answered: who is worth waiting for when runs are shared.

A client in a loop asks again the moment it has its answer, so all that were in a run come back together a little later.
A run that begins before they have done so leaves them to one more run, and where a model's weights are larger than the
caches each run reads all of them again. How soon each connection asks again is learned from what it did before; one
that does so irregularly, or late, is never waited for. Decisions over plain values: no threads, no clock of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

SMOOTHING = 0.3
LONGEST_S = 0.05
"""Whoever takes longer is not expected, however long it takes: one pause is soon forgotten."""
SLACK = 1.5
"""So many times as long as it usually takes somebody is expected."""


@dataclass(eq=False, slots=True)
class Habit:
    """One connection's."""

    number: int = 0
    """By which the process that reads its requests knows it; 0 is nobody."""
    again_s: float = math.inf
    """From the end of the run that answered it to its next request, smoothed."""
    left_at: float = -math.inf


class Expected(NamedTuple):
    """Who is about to ask again."""

    clients: int
    usually_by: float
    """All of them are usually back by then."""
    until: float
    """Nobody is expected any longer then."""


NOBODY = Expected(0, -math.inf, -math.inf)


class Returning:
    """The clients of one model that were answered and have not asked again."""

    def __init__(self) -> None:
        self._away: dict[Habit, float] = {}
        """When each is usually back."""

    def left(self, habit: Habit, now: float) -> None:
        """A run that answers this one is over."""
        habit.left_at = now
        if habit.again_s < LONGEST_S:
            self._away[habit] = now + habit.again_s

    def came(self, habit: Habit, now: float) -> None:
        """It asks."""
        self._away.pop(habit, None)
        if habit.left_at > -math.inf:
            taken_s = min(now - habit.left_at, LONGEST_S)
            habit.left_at = -math.inf
            first = habit.again_s == math.inf
            habit.again_s = taken_s if first else habit.again_s + SMOOTHING * (taken_s - habit.again_s)

    def expected(self, now: float) -> Expected:
        """Who is expected still."""
        if not self._away:
            return NOBODY
        usually_by = until = now
        for habit, back_at in list(self._away.items()):
            end = habit.left_at + SLACK * habit.again_s
            if now >= end:
                del self._away[habit]
            else:
                usually_by, until = max(usually_by, back_at), max(until, end)
        return Expected(len(self._away), usually_by, until)
