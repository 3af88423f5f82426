"""Accounting of finished requests, deferred: a record is queued before its answer is sent and delivered afterwards.

Delivery runs on the thread that answered, once the answer is on its way, so it adds nothing to the latency. Records are
delivered in the order of queueing, each once. `Engine.observe` delivers what is queued before an observer is read.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from edgesplit_agent.telemetry.request_record import RequestObserver, RequestRecord

log = logging.getLogger(__name__)


class RequestAccounting:
    """Queue of records for the observers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._due: deque[Callable[[], None]] = deque()
        self._observers: tuple[RequestObserver, ...] = ()

    def add(self, observer: RequestObserver) -> None:
        """Deliver all records to `observer` too."""
        self._observers = (*self._observers, observer)

    def finished(self, record: RequestRecord) -> None:
        """Queue the record of a request for all observers."""
        self._due.extend(partial(observer.finished, record) for observer in self._observers)

    def defer(self, action: Callable[[], None]) -> None:
        """Queue an action of another kind, in order with the records."""
        self._due.append(action)

    def deliver(self) -> None:
        """Deliver everything queued; returns when that is done, by this thread or by another that was already at it."""
        with self._lock:
            while self._due:
                action = self._due.popleft()
                try:
                    action()
                except Exception:
                    log.exception("a finished request could not be recorded")
