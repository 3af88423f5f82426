"""The circuit breaker that guards the next tier, as a value: no clock, no thread, no socket.

closed: requests may go. open: none goes, and a cheap probe is due at `probe_at`. trial: a probe came back; one request
may be out, and after each success twice as many, until it closes: a server that comes back is not run over by all that
waited for it. A failure on trial opens it anew with a longer pause. What was sent before the state began says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

THRESHOLD = 3
"""Failures in a row that open it; a refused connection, or silence to everything, opens it at once."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0
FULL_ROOM = 8
"""On trial: with more room than this it closes."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """What is known of the other side's health."""

    state: Literal["closed", "open", "trial"] = "closed"
    failures: int = 0
    pauses: int = 0
    """How often it opened since it was last closed; doubles the pause."""
    since: float = float("-inf")
    """The monotonic time at which it opened, or went on trial."""
    probe_at: float = 0.0
    """When open: the monotonic time at which a probe is due."""
    room: int = 0
    """On trial: requests that may be out at once."""

    @property
    def lets_through(self) -> bool:
        """Whether any request may go to the cloud."""
        return self.state != "open"

    def has_room(self, out: int) -> bool:
        """Whether one more may, `out` being there already."""
        return self.state == "closed" or (self.state == "trial" and out < self.room)

    def failed(
        self, now: float, jitter: float, *, refused: bool = False, sent_at: float = float("inf"), probe: bool = False
    ) -> Breaker:
        """After a request, sent at `sent_at`, or a probe that failed. `jitter` is uniform in [0, 1): devices must not
        come back in step."""
        if not probe and (self.state == "open" or sent_at < self.since):
            return self
        failures = self.failures + 1
        if self.state == "closed" and failures < THRESHOLD and not refused:
            return replace(self, failures=failures)
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self.pauses) * (0.5 + 0.5 * jitter)
        return Breaker("open", failures, min(self.pauses + 1, 10), now, now + pause_s)

    def probed(self, now: float) -> Breaker:
        """After a probe that came back: let a request try, unless requests may already."""
        return replace(self, state="trial", since=now, room=1) if self.state == "open" else self

    def succeeded(self, now: float) -> Breaker:
        """After a request that was answered in full."""
        if self.state == "open":
            return self.probed(now)
        if self.state == "trial" and 2 * self.room <= FULL_ROOM:
            return replace(self, room=2 * self.room)
        return Breaker()
