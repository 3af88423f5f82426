"""Retry policy of the clients: when a request is sent again, and when to give up. No sockets, no clocks."""

from __future__ import annotations

import random

from edgesplit.backoff import Backoff
from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, LinkError, MalformedMessage, Unreachable

RETRY = Backoff(first_s=0.01, longest_s=0.25)


class RetryState:
    """The attempts at one request, with exponential back-off and jitter. A server's Retry-After is honoured up to half
    a second; the last obstacle is named in the final error.

    A server that this client has `reached` before may be restarting, so a refused connection is retried; one that was
    never reached is not waited for.
    """

    def __init__(self, deadline_s: float, *, reached: bool = True) -> None:
        self.reached = reached
        self._deadline_s = deadline_s
        self._failures = 0
        self._last = "the deadline left no time"
        self._last_refusal = ""

    def on_failure(self, error: EdgeError) -> float:
        """Back-off in seconds before the next attempt. Raises `error` itself if retrying cannot help."""
        if isinstance(error, Unreachable) and not self.reached:
            raise never_reached(error) from error
        self.reached = True
        at_least_s = 0.0
        if isinstance(error, DeadlineExceeded):  # cut short by the deadline: keep the reason of the attempt before
            self._last = f"{error}; before that: {self._last_refusal}" if self._last_refusal else str(error)
        elif isinstance(error, LinkError | MalformedMessage):
            self._last = self._last_refusal = str(error)
            at_least_s = error.retry_after_s if isinstance(error, Busy) else 0.0
        else:
            raise error
        pause_s = RETRY.pause_s(self._failures, random.random())
        self._failures += 1
        # Jitter over [0.1, 0.5) of Retry-After (capped at 1 s): clients that were refused together do not return
        # together.
        return max(pause_s, min(at_least_s, 1.0) * random.uniform(0.1, 0.5))

    def deadline_error(self) -> DeadlineExceeded:
        """The error to raise once the deadline has passed."""
        return DeadlineExceeded(f"no answer within {self._deadline_s:g} s; last: {self._last}")


def never_reached(error: Unreachable) -> Unreachable:
    """The error with what to do about it, for a client whose very first connection is refused."""
    return Unreachable(
        f"{error}; nothing has answered there yet. Start the agent (`edgesplit-agent run`, or `systemctl start"
        " edgesplit-agent`), and use the address that it prints; other users than its own need --socket-mode 660 there"
    )
