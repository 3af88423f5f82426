"""Forecast of returning clients: how soon connections send their next request after an answer.

A client in a loop sends its next request the moment it has its answer, so the clients of one run return together a
little later. A run that begins before they are back leaves them to one more run, and where a model's weights are larger
than the processor's caches, each run reads all of them again. How soon each connection returns is learned from its
past; a connection that returns late or irregularly is never waited for. Plain values: no threads, no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

SMOOTHING = 0.3
LONGEST_S = 0.05
"""A connection that takes longer to return is not waited for. Longer pauses count as this long, so one pause is soon
forgotten."""
SLACK = 1.5
"""A connection is waited for at most this multiple of its typical return time."""


@dataclass(eq=False, slots=True)
class ArrivalStats:
    """Return times of one connection."""

    connection_number: int = 0
    """Number of the connection in the process that reads its requests; 0: none."""
    return_s: float = math.inf
    """Seconds from the end of the run that answered it to its next request, smoothed exponentially."""
    answered_at: float = -math.inf
    """When the run that answered it ended; -inf before the first and while a request is in flight."""


class ReturnForecast(NamedTuple):
    """The clients that are expected to return soon."""

    clients: int
    typically_by: float
    """When all of them have typically returned."""
    until: float
    """When the last of them is given up."""


NO_RETURNS = ReturnForecast(0, -math.inf, -math.inf)


class ExpectedReturns:
    """The answered clients of one model that have not returned yet."""

    def __init__(self) -> None:
        self._due: dict[ArrivalStats, float] = {}
        """When each of them typically returns (monotonic time)."""

    def on_answered(self, stats: ArrivalStats, now: float) -> None:
        """A run that answers this connection has ended."""
        stats.answered_at = now
        if stats.return_s < LONGEST_S:
            self._due[stats] = now + stats.return_s

    def on_request(self, stats: ArrivalStats, now: float) -> None:
        """This connection sends a request: learn its return time."""
        self._due.pop(stats, None)
        if stats.answered_at > -math.inf:
            # Exponential moving average; long pauses are capped, so that a client that paused once is soon waited for
            # again.
            return_s = min(now - stats.answered_at, LONGEST_S)
            stats.answered_at = -math.inf
            is_first = stats.return_s == math.inf
            stats.return_s = return_s if is_first else stats.return_s + SMOOTHING * (return_s - stats.return_s)

    def forecast(self, now: float) -> ReturnForecast:
        """The clients that are still expected; those that are overdue are given up."""
        if not self._due:
            return NO_RETURNS
        usually_by = until = now
        for habit, due_at in list(self._due.items()):
            # Expected until half as long again as it typically takes (SLACK), then given up (docs/decisions/0044).
            give_up_at = habit.answered_at + SLACK * habit.return_s
            if now >= give_up_at:
                del self._due[habit]
            else:
                usually_by, until = max(usually_by, due_at), max(until, give_up_at)
        return ReturnForecast(len(self._due), usually_by, until)
