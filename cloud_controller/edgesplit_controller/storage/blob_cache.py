"""A bounded folder of verified copies of blobs whose store is elsewhere.

A copy is verified again whenever it is read, so nothing here needs to survive a power cut, and processes may share the
folder. When the copies exceed the bound, those that were not read for longest are deleted.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

from edgesplit_controller.storage.blobs import BlobLost, BlobStore

LISTED_AFTER = 16
"""The folder is listed again after this fraction of the bound was added: 16 means a sixteenth."""


class BlobCache:
    """Copies of blobs in `folder`, of `max_bytes` at most (and what was added since the last listing)."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._files = BlobStore(folder)
        self._max_bytes = max_bytes
        self._added_bytes = 0
        self._lock = threading.Lock()
        self._trim()

    def incoming_file(self) -> Path:
        """A new path to write to before `adopt`. The folder is made again where it was deleted."""
        part = self._files.incoming_file()
        part.parent.mkdir(parents=True, exist_ok=True)
        return part

    def clear_incoming(self, older_than_s: float) -> None:
        """Delete incomplete copies and uploads that were not written to for so long."""
        self._files.clear_incoming(older_than_s)

    def mapped(self, sha256: str) -> bytes | mmap.mmap | None:
        """A blob's bytes, verified; None if there is no sound copy."""
        try:
            data = self._files.mapped(sha256)
        except BlobLost:
            return None
        with suppress(OSError):
            os.utime(self._files.path(sha256))  # the time of the last use
        return data

    def add(self, sha256: str, data: bytes | memoryview) -> None:
        """Keep a copy, as far as bound and disk allow."""
        if len(data) <= self._max_bytes:
            with suppress(OSError):
                part = self.incoming_file()
                try:
                    part.write_bytes(data)
                    self.adopt(sha256, part)
                finally:
                    part.unlink(missing_ok=True)

    def adopt(self, sha256: str, part: Path) -> None:
        """Keep the file `part`, which is moved away or deleted, as the copy of that blob if the bound allows it."""
        target, size = self._files.path(sha256), part.stat().st_size
        if size > self._max_bytes:
            part.unlink()
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, target)
        with self._lock:
            self._added_bytes += size
            is_due = self._added_bytes > self._max_bytes // LISTED_AFTER
        if is_due:
            self._trim()

    def discard(self, sha256: str) -> None:
        """Delete the copy of a blob that was deleted."""
        self._files.path(sha256).unlink(missing_ok=True)

    def _trim(self) -> None:
        with self._lock:
            self._added_bytes = 0
            copies = sorted(self._files.list_blobs(), key=lambda copy: copy.stored)
            excess = sum(copy.bytes for copy in copies) - self._max_bytes
            for copy in copies:
                if excess <= 0:
                    return
                self.discard(copy.sha256)
                excess -= copy.bytes
