"""Periodic job that runs the telemetry roll-up and deletes old rows, in the process that holds the lease."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from edgesplit_controller.history.rollup import MESSAGES_PER_TRANSACTION, RollUp

EVERY_S = 15.0
"""Shortest pause between two runs."""
LONGEST_PAUSE_S = 60.0
"""Longest pause between two runs."""
PAUSE_FACTOR = 20.0
"""The pause is this many times as long as the run took, up to `LONGEST_PAUSE_S`: with a large fleet, a minute's
messages are then written at once."""
TRIM_EVERY_S = 3_600.0
"""Pause between two deletions of old rows."""


class RollUpJob:
    """A job for `PeriodicThread`. `is_leader` returns whether this process may run it; `trims` delete old rows, once an
    hour."""

    def __init__(
        self, rollup: RollUp, trims: Sequence[Callable[[], None]], is_leader: Callable[[], bool],
        stopping: threading.Event,
    ) -> None:  # fmt: skip
        self._rollup = rollup
        self._trims = trims
        self._is_leader = is_leader
        self._stopping = stopping
        self._trimmed_at = float("-inf")

    def __call__(self) -> float:
        """Write what has accumulated; returns the seconds until the next run."""
        began = monotonic()
        if not self._is_leader():
            return EVERY_S
        while self._rollup.step() >= MESSAGES_PER_TRANSACTION and self._is_leader() and not self._stopping.is_set():
            pass
        if monotonic() - self._trimmed_at >= TRIM_EVERY_S:
            self._trimmed_at = monotonic()
            for trim in self._trims:
                trim()
        return max(EVERY_S, min(LONGEST_PAUSE_S, PAUSE_FACTOR * (monotonic() - began)))
