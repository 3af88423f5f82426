"""The circuit breaker that guards the next tier, as a value: no clock, no thread, no socket.

closed: requests may go. open: none goes, and a cheap probe is due at `probe_at`. trial: a probe came back, requests go
again, but the first failure opens it anew with a longer pause; the first success closes it for good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

THRESHOLD = 3
"""Failures in a row that open it; a refused connection opens it at once."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Breaker:
    """What is known of the other side's health."""

    state: Literal["closed", "open", "trial"] = "closed"
    failures: int = 0
    pauses: int = 0
    """How often it opened since the last real success; doubles the pause."""
    probe_at: float = 0.0
    """When open: the monotonic time at which a probe is due."""

    @property
    def lets_through(self) -> bool:
        """Whether a request may go to the cloud."""
        return self.state != "open"

    def failed(self, now: float, jitter: float, *, refused: bool = False) -> Breaker:
        """After a request or a probe that failed. `jitter` is uniform in [0, 1): devices must not come back in step."""
        failures = self.failures + 1
        if self.state == "closed" and failures < THRESHOLD and not refused:
            return replace(self, failures=failures)
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**self.pauses) * (0.5 + 0.5 * jitter)
        return Breaker("open", failures, min(self.pauses + 1, 10), now + pause_s)

    def probed(self) -> Breaker:
        """After a probe that came back: let requests try, unless they may already."""
        return replace(self, state="trial") if self.state == "open" else self

    def succeeded(self) -> Breaker:
        """After a request that was answered in full."""
        return Breaker()
