"""A worker's standard output and error: a bounded part is logged, and the last line is kept to explain its end."""

from __future__ import annotations

import logging
import os
from typing import IO

log = logging.getLogger(__name__)
MAX_LINES = 200
"""Maximum number of lines of one worker that are logged."""
_MAX_LINE_LENGTH = 300


class StderrTail:
    """Non-blocking reader of the worker's output pipe."""

    def __init__(self, name: str, stream: IO[bytes] | None) -> None:
        assert stream is not None
        self._name = name
        self._stream = stream
        self._lines = 0
        self.last = ""
        """The last line so far; empty before the first."""
        os.set_blocking(stream.fileno(), False)

    def fileno(self) -> int:
        """The descriptor, for poll."""
        return self._stream.fileno()

    def read(self) -> bool:
        """Read what is available; False once the pipe has ended."""
        try:
            raw = os.read(self.fileno(), 65_536)
        except BlockingIOError:
            return True
        for line in raw.decode("utf-8", "replace").splitlines():
            self._add_line(
                "".join(character if character.isprintable() else " " for character in line[:_MAX_LINE_LENGTH]).strip()
            )
        return bool(raw)

    def read_rest(self) -> None:
        """Read what a process left when it ended. Not to the end of the pipe, which a grandchild may hold open."""
        for _ in range(16):
            if not self.read():
                break

    def close(self) -> None:
        """Close the pipe."""
        self._stream.close()

    def _add_line(self, line: str) -> None:
        if not line:
            return
        self.last = line
        self._lines += 1
        if self._lines <= MAX_LINES:
            log.warning("%s: %s", self._name, line)
        if self._lines == MAX_LINES:
            log.warning("%s: too much output, the rest is not logged", self._name)
