"""Where a backup is written to and read from: a file, or an object in an S3-compatible store.

Either appears whole under its name or not at all. What was written to an object store is read back and compared.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast

from edgesplit.atomic_files import sync_folder
from edgesplit.errors import MediumFailed, NotFound, UsageError
from edgesplit_controller.storage.object_store import SCHEME, ObjectStore, ObjectUrl

_BLOCK: Final = 1 << 20


class BackupLocation(Protocol):
    """A place for one backup; its text is its name for people."""

    def size(self) -> int | None:
        """Bytes of the backup there; None if there is none."""
        ...

    def writing(self) -> AbstractContextManager[BinaryIO]:
        """A context manager with a binary stream, whose bytes become the backup if the context ends without an
        exception."""
        ...

    def reading(self) -> BinaryIO:
        """A stream of the backup, which tells its position; UsageError if it cannot be read."""
        ...


@dataclass(frozen=True)
class BackupFile:
    """A backup in a file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def size(self) -> int | None:
        """Bytes of the file; None if there is none."""
        return self.path.stat().st_size if self.path.exists() else None

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """Write the file durably. UsageError if the disk fails."""
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            with open(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as raw:
                yield raw
                raw.flush()
                os.fsync(raw.fileno())
            os.replace(part, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}") from error
        finally:
            part.unlink(missing_ok=True)

    def reading(self) -> BinaryIO:
        """Open the file."""
        try:
            return self.path.open("rb")
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}") from error


class BackupObject:
    """A backup in an object store."""

    def __init__(self, folder: ObjectStore, name: str) -> None:
        self._folder = folder
        self._name = name

    def __str__(self) -> str:
        return f"{self._folder.url}/{self._name}"

    def size(self) -> int | None:
        """Bytes of the object; None if there is none."""
        found = self._folder.find(self._name)
        return None if found is None else found.bytes

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """Upload the object while it is written, then read it back. MediumFailed if the store returns other bytes."""
        with self._folder.writer(self._name) as upload:
            hashing = _HashingWriter(upload)
            yield cast(BinaryIO, hashing)
        returned = hashlib.sha256()
        with self.reading() as stored:
            while block := stored.read(_BLOCK):
                returned.update(block)
        if returned.digest() != hashing.sha256.digest():
            raise MediumFailed(f"{self} is not what was written: the store returns other bytes. Do not rely on it")

    def reading(self) -> BinaryIO:
        """Open the object."""
        try:
            return self._folder.reader(self._name)
        except NotFound as error:
            raise UsageError(f"there is no {self}") from error


def parse_location(text: str) -> BackupLocation:
    """The location that an operator names: a path, or s3://BUCKET/PATH."""
    if not text.startswith(SCHEME):
        return BackupFile(Path(text))
    url = ObjectUrl.parse(text)
    folder, _, name = url.path.rpartition("/")
    if not name:
        raise UsageError(f"{text} names no object for the backup: {url}/NAME.backup")
    return BackupObject(ObjectStore(ObjectUrl(url.bucket, folder)), name)


class _HashingWriter(io.RawIOBase):
    """Computes the SHA-256 of what is written to a stream."""

    def __init__(self, target: io.RawIOBase) -> None:
        self._target = target
        self.sha256 = hashlib.sha256()

    def writable(self) -> bool:
        """True: this is a writable stream."""
        return True

    def write(self, data: Any) -> int:
        """Write and hash bytes."""
        self.sha256.update(data)
        return self._target.write(data) or 0
