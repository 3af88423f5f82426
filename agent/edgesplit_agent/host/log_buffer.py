"""In-memory buffer of the newest log lines, bounded and redacted, for remote diagnosis."""

from __future__ import annotations

import logging
import threading
from collections import deque

from edgesplit.observability import log_format
from edgesplit.observability.redaction import redact

MAX_BYTES = 512 * 1024
"""Maximum number of characters kept."""
MAX_LINE_LENGTH = 4_096
"""Maximum length of a line."""


class LogBuffer(logging.Handler):
    """Logging handler that keeps the newest records as JSON lines. Install it on the root logger with
    `install_log_buffer`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        super().__init__()
        log_format.install_format(self, "json")
        self._max_bytes = max_bytes
        self._lines: deque[str] = deque()
        self._size = 0
        self._lines_lock = threading.Lock()
        self.dropped = 0
        """Number of older lines that were dropped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Add one record."""
        try:
            line = redact(self.format(record))[:MAX_LINE_LENGTH]
        except Exception:  # logging must not fail the code that logs
            self.handleError(record)
            return
        with self._lines_lock:
            self._lines.append(line)
            self._size += len(line)
            while self._size > self._max_bytes:
                self._size -= len(self._lines.popleft())
                self.dropped += 1

    def lines(self) -> list[str]:
        """The lines kept, oldest first."""
        with self._lines_lock:
            return list(self._lines)


_buffer: LogBuffer | None = None


def install_log_buffer() -> LogBuffer:
    """This process's log buffer, installed on the first call."""
    global _buffer
    if _buffer is None:
        _buffer = LogBuffer()
        logging.getLogger().addHandler(_buffer)
    return _buffer
