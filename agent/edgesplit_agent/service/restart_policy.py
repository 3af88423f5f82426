"""Decides when a supervised program that ended is restarted, and when a running one counts as hung; pure functions.
`supervisor` acts on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edgesplit.backoff import Backoff

RESTART = Backoff(first_s=1.0, longest_s=60.0)
"""Back-off before a restart, by the number of unsuccessful runs in a row; its jitter keeps devices that lost the same
server from restarting together."""
STEADY_S = 60.0
"""A run of at least this many seconds counts as successful and resets the back-off."""
START_S = 900.0
"""Timeout of a start, which may load models from a slow card."""
STOP_S = 30.0
"""Timeout of an orderly end."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """State of one run of the program, as far as its notifications tell. Times are of one monotonic clock, in
    seconds."""

    since: float
    """When it was started."""
    watchdog_s: float
    """Longest time between two watchdog notifications; 0: none are expected."""
    ready: bool = False
    """It has reported that it is ready."""
    heard: float = 0.0
    """When its last watchdog notification came."""
    stop_requested_at: float = math.inf
    """When it was first asked to end; infinity if never."""
    was_killed: bool = False
    """It was killed and needs no further deadline."""

    def after_notification(self, message: bytes, now: float) -> ProgramRun:
        """The state after a notification of the program (sd_notify(3))."""
        lines = set(message.split(b"\n"))
        if b"READY=1" in lines:
            return replace(self, ready=True, heard=now)
        return replace(self, heard=now) if b"WATCHDOG=1" in lines else self

    def after_stop_request(self, now: float) -> ProgramRun:
        """The state after a request to end; the first one counts."""
        return replace(self, stop_requested_at=min(now, self.stop_requested_at))

    def after_kill(self) -> ProgramRun:
        """The state after it was killed."""
        return replace(self, was_killed=True)

    @property
    def deadline(self) -> float:
        """When it is to be killed, unless a notification comes before; infinity for never."""
        if self.was_killed:
            return math.inf
        if self.stop_requested_at < math.inf:
            return self.stop_requested_at + STOP_S
        if not self.ready:
            return self.since + START_S
        return self.heard + self.watchdog_s if self.watchdog_s else math.inf

    def missed_deadline(self) -> str:
        """Which deadline it missed, for people."""
        if self.stop_requested_at < math.inf:
            return f"did not end within {STOP_S:g} s"
        return (
            f"sent no watchdog notification for {self.watchdog_s:g} s"
            if self.ready
            else f"was not ready within {START_S:g} s"
        )


def failures_after(failures: int, ran_s: float) -> int:
    """Number of unsuccessful runs in a row, after one that lasted `ran_s` seconds."""
    return 0 if ran_s >= STEADY_S else failures + 1
