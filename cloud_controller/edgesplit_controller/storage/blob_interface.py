"""What a store of blobs does, wherever it keeps them: `blobs` in a folder, `s3_blobs` in an object store."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from edgesplit_controller.storage.blobs import StoredBlob


class Blobs(Protocol):
    """Content-addressed blobs, safe from any thread and process."""

    def put(self, data: bytes) -> str:
        """Store `data`; return its SHA-256."""
        ...

    def put_all(self, many: Iterable[bytes | memoryview]) -> list[str]:
        """Store each of `many`; return their SHA-256, in order."""
        ...

    def put_file(self, part: Path) -> str:
        """Move a file created with `incoming_file` into the store; return its SHA-256."""
        ...

    def incoming_file(self) -> Path:
        """A new path to write to before `put_file`."""
        ...

    def clear_incoming(self, older_than_s: float = 0.0) -> None:
        """Delete incomplete uploads that were not written to for so long."""
        ...

    def get(self, sha256: str) -> bytes:
        """The blob's bytes, verified; BlobLost if it is missing or damaged."""
        ...

    def mapped(self, sha256: str) -> bytes | mmap.mmap:
        """The blob's bytes, verified and memory-mapped; BlobLost if it is missing or damaged."""
        ...

    def touch(self, sha256: str) -> bool:
        """Whether the blob is there; it counts as stored now."""
        ...

    def list_blobs(self) -> Iterator[StoredBlob]:
        """Every blob, in no order."""
        ...

    def delete_stored_before(self, sha256: str, before: float) -> bool:
        """Delete the blob, unless it was stored at or after the Unix time `before`; whether it was deleted."""
        ...
