"""Whose turn it is to run: so many at once, so many waiting, the rest is told to come back; and how loaded that is."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, perf_counter

from edgesplit.errors import Busy, DeadlineExceeded, LinkError

LOOK_UP_S = 0.25
"""How often one that waits looks whether its client is still there."""
SMOOTHING = 0.3


class Turns:
    """A bounded number of concurrent runs with a bounded queue, first come, first served."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._at_once = at_once
        self._most_waiting = waiting
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._running = 0
        self._load = 1.0

    @property
    def load(self) -> float:
        """What waiting makes of a run's seconds, as a factor of at least 1, smoothed."""
        return self._load

    @property
    def running(self) -> int:
        """Runs now."""
        return self._running

    @property
    def waiting(self) -> int:
        """Those that wait now."""
        return len(self._queue)

    @contextmanager
    def take(self, deadline: float | None = None, is_gone: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """One turn. Busy where the queue is full, DeadlineExceeded where it moves too slowly (`deadline` by the
        monotonic clock), LinkError where nobody waits for the result any more."""
        arrived = perf_counter()
        self._enter(deadline, is_gone)
        began = perf_counter()
        try:
            yield
        finally:
            ended = perf_counter()
            with self._changed:
                self._running -= 1
                factor = (ended - arrived) / max(1e-6, ended - began)
                self._load += SMOOTHING * (factor - self._load)
                self._changed.notify_all()

    def _enter(self, deadline: float | None, is_gone: Callable[[], bool]) -> None:
        ticket = object()
        with self._changed:
            if len(self._queue) >= self._most_waiting and self._running >= self._at_once:
                raise Busy(f"{self._running} requests run and {len(self._queue)} wait")
            self._queue.append(ticket)
            try:
                while self._running >= self._at_once or self._queue[0] is not ticket:
                    self._wait(deadline, is_gone)
                if is_gone():
                    raise LinkError("the client has gone")
                self._running += 1
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _wait(self, deadline: float | None, is_gone: Callable[[], bool]) -> None:
        """Wait for a change, for as long as somebody waits for the result."""
        left_s = LOOK_UP_S if deadline is None else deadline - monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the queue moved too slowly for this request")
        self._changed.wait(min(left_s, LOOK_UP_S))
        if is_gone():
            raise LinkError("the client has gone")
