"""Deferred accounting: statistics of a request are recorded after its response has been sent.

The thread that answered runs the deferred actions once the answer is on its way. A reader of statistics calls `flush`
first and therefore sees everything that was answered before.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)


class DeferredAccounting:
    """Queue of deferred accounting actions. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._due: deque[Callable[[], None]] = deque()

    def defer(self, action: Callable[[], None]) -> None:
        """Queue an action, to be run by the next `flush` of any thread."""
        self._due.append(action)

    def flush(self) -> None:
        """Run all queued actions; returns when they have run, on this thread or on another that was already
        flushing."""
        with self._lock:
            while self._due:
                action = self._due.popleft()
                try:
                    action()
                except Exception:
                    log.exception("something could not be noted")
