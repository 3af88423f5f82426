"""When a client asks for a lane: decided without sockets, the same for threads and for asyncio.

Not for a first request, for a program that asks once needs none; and the longer not, the more often it was refused.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
STAYED_S = 10.0
"""A lane that was there so long was worth having: the next is asked for at once."""
GRANTING_S = 1.0
"""Of a request's time, at most, and never more than a quarter of it."""


@dataclass
class Hope:
    """One model's. Times of the monotonic clock."""

    answered: bool = False
    """By the agent, once since the last lane ended."""
    again_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    since: float = 0.0
    """When the last lane was granted."""

    def may_ask(self, now: float) -> bool:
        """Whether the next request asks for a lane first."""
        return self.answered and now >= self.again_at

    def got(self, now: float) -> None:
        """It was granted."""
        self.answered, self.since = False, now

    def lost(self, now: float) -> None:
        """It has ended."""
        if now - self.since >= STAYED_S:
            self.pause_s, self.again_at = FIRST_PAUSE_S, now
        else:
            self.refused(now)

    def refused(self, now: float) -> None:
        """None was to be had."""
        self.answered = False
        self.again_at = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


def granting_s(left_s: float) -> float:
    """How long the agent is waited for when it is asked for a lane."""
    return min(GRANTING_S, left_s / 4)
