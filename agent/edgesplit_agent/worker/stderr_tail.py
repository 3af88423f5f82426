"""What a worker writes to its standard output and error: into the agent's log, some of it, and its last words."""

from __future__ import annotations

import logging
import os
from typing import IO

log = logging.getLogger(__name__)
MOST_LINES = 200
"""That one worker may put into the log."""
_LONGEST = 300


class LastWords:
    """Reads a pipe without ever waiting for it."""

    def __init__(self, name: str, stream: IO[bytes] | None) -> None:
        assert stream is not None
        self._name = name
        self._stream = stream
        self._lines = 0
        self.last = ""
        """The last line so far."""
        os.set_blocking(stream.fileno(), False)

    def fileno(self) -> int:
        """For poll."""
        return self._stream.fileno()

    def read(self) -> bool:
        """Take in what is there; False once nothing can come any more."""
        try:
            raw = os.read(self.fileno(), 65_536)
        except BlockingIOError:
            return True
        for line in raw.decode("utf-8", "replace").splitlines():
            self._take("".join(one if one.isprintable() else " " for one in line[:_LONGEST]).strip())
        return bool(raw)

    def read_rest(self) -> None:
        """What is left when its process has ended. Not to the end of the pipe: a grandchild may hold it open."""
        for _ in range(16):
            if not self.read():
                break

    def close(self) -> None:
        """Give the descriptor back."""
        self._stream.close()

    def _take(self, line: str) -> None:
        if not line:
            return
        self.last = line
        self._lines += 1
        if self._lines <= MOST_LINES:
            log.warning("%s: %s", self._name, line)
        if self._lines == MOST_LINES:
            log.warning("%s: says too much, the rest is not logged", self._name)
