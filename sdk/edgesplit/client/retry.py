"""When a request is tried again, and when that is over: decided without sockets or clocks, for every client of ours."""

from __future__ import annotations

import random

from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, LinkError, MalformedMessage

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.25


class Attempts:
    """The attempts at one request. Pauses double, with jitter; a server that asks to be left alone is, for up to half a
    second; what stood in the way is told in the end."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._pause_s = FIRST_PAUSE_S
        self._last = "no time was given"
        self._refused = ""

    def failed(self, error: EdgeError) -> float:
        """Seconds to wait before the next attempt. Raises `error` itself where no retry mends it."""
        at_least_s = 0.0
        if isinstance(error, DeadlineExceeded):  # an attempt that the end cut short hides nothing said before it
            self._last = f"{error}; before that: {self._refused}" if self._refused else str(error)
        elif isinstance(error, LinkError | MalformedMessage):
            self._last = self._refused = str(error)
            at_least_s = error.retry_after_s if isinstance(error, Busy) else 0.0
        else:
            raise error
        jittered_s = max(self._pause_s * random.uniform(0.5, 1.0), min(at_least_s, 1.0) * random.uniform(0.1, 0.5))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return jittered_s

    def over(self) -> DeadlineExceeded:
        """The error once the time is up."""
        return DeadlineExceeded(f"no answer within {self._deadline_s:g} s; last: {self._last}")
