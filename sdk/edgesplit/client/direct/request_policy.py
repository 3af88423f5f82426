"""When a client uses or requests a direct lane; no sockets, shared by the threaded and the asyncio client.

Never for a first request, because a program that sends a single one needs no lane. After refusals the requests for a
lane back off exponentially.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgesplit.backoff import Backoff
from edgesplit.observability.trace_context import application_headers
from edgesplit.oip.options import NONE, InferOptions

REFUSED = Backoff(first_s=0.5, longest_s=60.0)
"""Pauses before a lane is requested again."""
LONG_LIVED_S = 10.0
"""A lane that lived this long was worth having: the next one is requested without back-off."""
GRANT_TIMEOUT_S = 1.0
"""Most seconds of a request's time spent on requesting a lane; never more than a quarter of that time."""


@dataclass
class LaneRequestPolicy:
    """The policy's state for one model. All times are of the monotonic clock."""

    has_agent_answered: bool = False
    """Whether the agent has answered a request since the last lane ended."""
    retry_at: float = 0.0
    """When a lane may be requested again."""
    refusals: int = 0
    """Requests in a row that gave no lane, or one that did not live long."""
    granted_at: float = 0.0
    """When the last lane was granted."""

    def should_request(self, now: float) -> bool:
        """Whether the next request should request a lane first."""
        return self.has_agent_answered and now >= self.retry_at

    def on_granted(self, now: float) -> None:
        """The lane was granted."""
        self.has_agent_answered, self.granted_at = False, now

    def on_ended(self, now: float) -> None:
        """The lane has ended; back off if it did not live long."""
        if now - self.granted_at >= LONG_LIVED_S:
            self.refusals, self.retry_at = 0, now
        else:
            self.on_refused(now)

    def on_refused(self, now: float) -> None:
        """No lane was granted: back off."""
        self.has_agent_answered = False
        self.retry_at = now + REFUSED.pause_s(self.refusals)
        self.refusals += 1


def may_use_lane(request_id: str | None, options: InferOptions) -> bool:
    """Whether nothing about a request needs the agent: no id or options of its own, and no trace that it belongs to."""
    return request_id is None and options is NONE and not application_headers()


def grant_timeout_s(left_s: float) -> float:
    """Timeout in seconds of the request for a lane, given the time left."""
    return min(GRANT_TIMEOUT_S, left_s / 4)
