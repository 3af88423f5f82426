"""What is noted of requests once their answers are on their way: nobody waits for statistics.

Whoever asked has it noted after the answer was sent. Whoever reads what is noted calls `catch_up` first, and so never
finds less than what was answered before.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)


class Afterwards:
    """Notes that are due. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._due: deque[Callable[[], None]] = deque()

    def later(self, note: Callable[[], None]) -> None:
        """Have it noted some time, before whoever catches up reads."""
        self._due.append(note)

    def catch_up(self) -> None:
        """Everything that was due is noted now, by this thread or by the one that was at it."""
        with self._lock:
            while self._due:
                note = self._due.popleft()
                try:
                    note()
                except Exception:
                    log.exception("something could not be noted")
