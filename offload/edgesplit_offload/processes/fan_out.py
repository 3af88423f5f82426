"""A question on its way through all serving processes: who has not answered yet, and when to go on without."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any, Protocol

from edgesplit_offload.processes.ipc import Message, Question, Told

ROUND_S = 5.0
"""How long all have to answer."""


class Asked(Protocol):
    """One who is asked."""

    def say(self, message: Message) -> bool:
        """Whether it went out."""
        ...


@dataclass(eq=False)
class _Round:
    missing: set[Asked]
    until: float
    done: Callable[[list[Any]], None]
    answers: list[Any] = field(default_factory=list)


class Rounds:
    """All that are under way. Thread-safe; `done` is called once, by whoever brought the round to its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._rounds: dict[int, _Round] = {}

    def begin(self, question: str, argument: Any, among: Iterable[Asked], done: Callable[[list[Any]], None]) -> None:
        """Ask all of them; `done` gets what comes in time."""
        everyone = set(among)
        with self._lock:
            number = next(self._numbers)
            self._rounds[number] = _Round(set(everyone), monotonic() + ROUND_S, done)
        unreachable = [one for one in everyone if not one.say(Question(number, question, argument))]
        self._without(number, unreachable)

    def told(self, one: Asked, message: Told) -> None:
        """One's answer."""
        self._without(message.number, [one], [message.answer] if message.known else [])

    def gone(self, one: Asked) -> None:
        """It will not answer any more."""
        with self._lock:
            numbers = [number for number, found in self._rounds.items() if one in found.missing]
        for number in numbers:
            self._without(number, [one])

    def expire(self, now: float) -> None:
        """End the rounds whose time is up."""
        with self._lock:
            late = [number for number, found in self._rounds.items() if now > found.until]
            over = [self._rounds.pop(number) for number in late]
        for found in over:
            found.done(found.answers)

    def _without(self, number: int, ones: Iterable[Asked], answers: Iterable[Any] = ()) -> None:
        with self._lock:
            found = self._rounds.get(number)
            if found is None:
                return
            found.missing.difference_update(ones)
            found.answers.extend(answers)
            if found.missing:
                return
            del self._rounds[number]
        found.done(found.answers)
