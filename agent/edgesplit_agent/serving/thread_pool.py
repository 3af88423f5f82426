"""Threads for work that may hang: each piece of it begins at once on a thread of its own, or is refused.

A pool with a queue would let one piece wait, unseen, behind others that hang. Threads that are done wait for the next
piece; all are daemons, for work that hangs must not keep the process.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial

log = logging.getLogger(__name__)

Work = Callable[[], None]


class Crew:
    """At most `most` threads."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Work | None]] = []
        self._threads = 0
        self._stopped = False

    @property
    def threads(self) -> int:
        """Threads that work or wait for work."""
        return self._threads

    def start(self, work: Work) -> bool:
        """Begin `work` now, for the request that this thread works for; False where no thread is to be had."""
        with self._lock:
            work = partial(copy_context().run, work)
            if self._idle:
                self._idle.pop().put(work)
                return True
            if self._threads >= self._most:
                return False
            self._threads += 1
        inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        inbox.put(work)
        try:
            threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            log.warning("no thread for more work: %s", error)
            with self._lock:
                self._threads -= 1
            return False
        return True

    def stop(self) -> None:
        """Keep no threads: each ends when its work is done. What is still begun gets one of its own."""
        with self._lock:
            self._stopped = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _serve(self, inbox: queue.SimpleQueue[Work | None]) -> None:
        while (work := inbox.get()) is not None:
            try:
                work()
            except BaseException:
                log.exception("a %s thread's work failed", self._name)
            del work  # and what it holds
            with self._lock:
                if self._stopped:
                    break
                self._idle.append(inbox)
        with self._lock:
            self._threads -= 1
