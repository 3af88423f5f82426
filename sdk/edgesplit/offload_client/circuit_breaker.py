"""Circuit breaker of the next tier, as an immutable value: no clock, no thread, no socket.

closed: requests may be sent. open: none is sent, and a cheap probe is due at `probe_at`. trial (half-open): a probe
succeeded; one request may be in flight, and after each success twice as many, until the breaker closes, so that a
recovering server is not overrun. A failure on trial opens it again with a longer pause. Requests sent before the
current state began do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from edgesplit.backoff import Backoff

THRESHOLD = 3
"""Consecutive failures that open the breaker; a refused connection, or silence to everything, opens it at once."""
PAUSE = Backoff(first_s=0.25, longest_s=2.0)
"""How long an open breaker waits before it sends a probe."""
MAX_TRIAL_IN_FLIGHT = 8
"""On trial: the breaker closes when more requests than this may be in flight."""


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """The breaker's state."""

    state: Literal["closed", "open", "trial"] = "closed"
    failures: int = 0
    pauses: int = 0
    """How often it has opened since it was last closed; each doubles the pause."""
    since: float = float("-inf")
    """Monotonic time at which it opened, or went on trial."""
    probe_at: float = 0.0
    """While open: monotonic time at which a probe is due."""
    room: int = 0
    """On trial: requests that may be in flight at once."""

    @property
    def is_allowing(self) -> bool:
        """Whether requests may be sent at all."""
        return self.state != "open"

    def has_room(self, in_flight: int) -> bool:
        """Whether one more request may be sent while `in_flight` are."""
        return self.state == "closed" or (self.state == "trial" and in_flight < self.room)

    def after_failure(
        self, now: float, jitter: float, *, refused: bool = False, sent_at: float = float("inf"), probe: bool = False
    ) -> CircuitBreaker:
        """The state after a failed probe, or a failed request that was sent at `sent_at`. `jitter` is uniform in [0,
        1), so that devices do not reconnect in step."""
        if not probe and (self.state == "open" or sent_at < self.since):
            return self
        failures = self.failures + 1
        # Closed: only several failures in a row, or a refused connection, open it. On trial: any failure does.
        if self.state == "closed" and failures < THRESHOLD and not refused:
            return replace(self, failures=failures)
        pause_s = PAUSE.pause_s(self.pauses, jitter)
        return CircuitBreaker("open", failures, min(self.pauses + 1, 10), now, now + pause_s)

    def after_probe(self, now: float) -> CircuitBreaker:
        """The state after a successful probe: open becomes trial."""
        return replace(self, state="trial", since=now, room=1) if self.state == "open" else self

    def after_success(self, now: float) -> CircuitBreaker:
        """The state after a request that was answered completely."""
        if self.state == "open":
            return self.after_probe(now)
        if self.state == "trial" and 2 * self.room <= MAX_TRIAL_IN_FLIGHT:
            return replace(self, room=2 * self.room)
        return CircuitBreaker()
