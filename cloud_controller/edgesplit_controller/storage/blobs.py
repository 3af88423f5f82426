"""Content-addressed blob store: bytes by their SHA-256, in a folder. Stored blobs survive a power cut, and are verified
when read.

An object store could provide the same methods. Nothing is ever overwritten. A blob has the time at which it was stored
last, also where it was there already; one is deleted only by that time (`delete_stored_before`), so that a blob that is
being stored again is never deleted by a collector that found it unused.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edgesplit.atomic_files import sync_folder
from edgesplit.errors import EdgeError, UsageError
from edgesplit.file_hash import file_sha256
from edgesplit.identifiers import sha256_hex

T = TypeVar("T", bound=bytes | mmap.mmap)


class BlobLost(EdgeError):
    """A stored blob is missing or damaged (a fault of the disk); reported to the operator."""


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob as it is listed."""

    sha256: str
    bytes: int
    stored: float
    """Unix time at which it was stored last."""


class BlobStore:
    """The blobs of one data folder. Safe from any thread and process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Path of that blob, whether it exists or not."""
        return self._folder / sha256_hex(sha256)[:2] / sha256

    def put(self, data: bytes) -> str:
        """Store `data`; return its SHA-256."""
        return self.put_all([data])[0]

    def put_all(self, many: Iterable[bytes | memoryview]) -> list[str]:
        """Store each of `many`; return their SHA-256, in order. Folders are synced once, after the last."""
        digests: list[str] = []
        touched: set[Path] = set()
        for data in many:
            digest = hashlib.sha256(data).hexdigest()
            digests.append(digest)
            if not self._has_whole(digest, len(data)):
                part = self.incoming_file()
                part.write_bytes(data)
                touched.add(self._adopt(part, digest))
        for folder in touched:
            sync_folder(folder)
        return digests

    def put_file(self, part: Path) -> str:
        """Move a file created with `incoming_file` into the store; return its SHA-256."""
        digest = file_sha256(part)
        if self._has_whole(digest, part.stat().st_size):
            part.unlink()
        else:
            sync_folder(self._adopt(part, digest))
        return digest

    def incoming_file(self) -> Path:
        """A new path on the same file system, to write to before `put_file`."""
        return self._incoming / uuid.uuid4().hex

    def touch(self, sha256: str) -> bool:
        """Whether the blob is there; it counts as stored now."""
        with self._locked(fcntl.LOCK_SH):
            try:
                os.utime(self.path(sha256))
            except FileNotFoundError:
                return False
            return True

    def list_blobs(self) -> Iterator[StoredBlob]:
        """Every blob, in no order."""
        for folder in self._folder.glob("[0-9a-f][0-9a-f]"):
            for file in os.scandir(folder):
                try:
                    status = file.stat()
                except FileNotFoundError:
                    continue
                yield StoredBlob(file.name, status.st_size, status.st_mtime)

    def delete_stored_before(self, sha256: str, before: float) -> bool:
        """Delete the blob, unless it was stored at or after the Unix time `before`; whether it was deleted."""
        path = self.path(sha256)
        # Excludes `touch`: otherwise a blob could be deleted between the time being read and the blob being touched.
        with self._locked(fcntl.LOCK_EX):
            try:
                if path.stat().st_mtime >= before:
                    return False
                path.unlink()
            except FileNotFoundError:
                return False
            return True

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)

    def clear_incoming(self, older_than_s: float = 0.0) -> None:
        """Delete incomplete uploads left by a killed process; with `older_than_s` only those not written to for so
        long, where other processes use the folder too."""
        for upload in self._incoming.iterdir():
            try:
                if time.time() - upload.stat().st_mtime >= older_than_s:
                    upload.unlink()
            except FileNotFoundError:
                continue

    def get(self, sha256: str) -> bytes:
        """The blob's bytes, verified; BlobLost if it is missing or damaged."""
        return self._verified(sha256, Path.read_bytes)

    def mapped(self, sha256: str) -> bytes | mmap.mmap:
        """The blob's bytes, verified and memory-mapped, so that the kernel can reclaim their memory; BlobLost if it is
        missing or damaged."""
        return self._verified(sha256, map_file)

    def _verified(self, sha256: str, read: Callable[[Path], T]) -> T:
        try:
            data = read(self.path(sha256))
        except OSError as error:
            raise BlobLost(f"blob {sha256[:12]} cannot be read: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise BlobLost(f"blob {sha256[:12]} is damaged on disk")
        return data

    def _has_whole(self, sha256: str, size: int) -> bool:
        """Whether the blob is there in full; then it counts as stored now."""
        try:
            return self.path(sha256).stat().st_size == size and self.touch(sha256)
        except FileNotFoundError:
            return False

    def _adopt(self, part: Path, digest: str) -> Path:
        """Sync the file's bytes and rename it to its digest; return its folder, which still has to be synced."""
        try:
            with part.open("rb") as file:
                os.fsync(file.fileno())
            target = self.path(digest)
            if not target.parent.is_dir():
                target.parent.mkdir(exist_ok=True)
                sync_folder(self._folder)
            os.replace(part, target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise UsageError(f"cannot store a blob in {self._folder}: {error.strerror}") from error
        return target.parent


def map_file(path: Path) -> bytes | mmap.mmap:
    """A file's bytes, memory-mapped; they stay valid when it is renamed or deleted."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""
