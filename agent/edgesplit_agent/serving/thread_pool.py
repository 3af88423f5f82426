"""Threads for work that may hang: each piece of work starts at once on a thread of its own, or is refused.

A pool with a queue would let work wait, unseen, behind other work that hangs. Finished threads wait for the next piece
of work; all are daemons, so that work that hangs does not keep the process alive.
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


class BoundedThreads:
    """At most `max_threads` threads. Thread-safe."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Work | None]] = []
        self.threads = 0
        """Number of threads that work or wait for work."""
        self._stopped = False

    @property
    def busy(self) -> int:
        """Number of threads that work."""
        return self.threads - len(self._idle)

    def start(self, work: Work) -> bool:
        """Start `work` now, in the caller's context variables; False if no thread is available."""
        with self._lock:
            work = partial(copy_context().run, work)
            if self._idle:
                self._idle.pop().put(work)
                return True
            if self.threads >= self._max_threads:
                return False
            self.threads += 1
        inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        inbox.put(work)
        try:
            threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            log.warning("no thread for more work: %s", error)
            with self._lock:
                self.threads -= 1
            return False
        return True

    def stop(self) -> None:
        """End each thread when its work is done. Work that is started afterwards gets a thread of its own."""
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
            del work  # releases what it refers to while this thread waits
            with self._lock:
                if self._stopped:
                    break
                self._idle.append(inbox)
        with self._lock:
            self.threads -= 1
