"""The newest lines of this process's log, in memory, bounded, and without secrets: for who asks from afar."""

from __future__ import annotations

import logging
import threading
from collections import deque

from edgesplit.observability import log_format
from edgesplit.observability.redaction import redacted

MOST_BYTES = 512 * 1024
LONGEST_LINE = 4_096


class Logbook(logging.Handler):
    """Keeps what is logged, as JSON lines. Put it on the root logger with `keep_log`."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        super().__init__()
        log_format.equip(self, "json")
        self._most = most_bytes
        self._lines: deque[str] = deque()
        self._size = 0
        self._guard = threading.Lock()
        self.dropped = 0
        """Older lines that gave way."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line more."""
        try:
            line = redacted(self.format(record))[:LONGEST_LINE]
        except Exception:  # a line that cannot be written down must not stop who logged it
            self.handleError(record)
            return
        with self._guard:
            self._lines.append(line)
            self._size += len(line)
            while self._size > self._most:
                self._size -= len(self._lines.popleft())
                self.dropped += 1

    def lines(self) -> list[str]:
        """What is kept, oldest first."""
        with self._guard:
            return list(self._lines)


_book: Logbook | None = None


def keep_log() -> Logbook:
    """This process's logbook, begun with the first call."""
    global _book
    if _book is None:
        _book = Logbook()
        logging.getLogger().addHandler(_book)
    return _book
