"""Writes a release bundle to a folder, which may be on a USB stick, or to a tar file.

`bundle.json` is written last in both, so that an interrupted write leaves no valid bundle. A folder keeps files that
are already complete; a tar file is renamed into place once complete.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Protocol

from edgesplit.errors import UsageError
from edgesplit.release.bundle_format import FOLDERS, INDEX_FILE, KIT_FOLDER

RESERVE_BYTES = 4 << 20
"""Free space that must remain after the bundle is written."""
_PART_SUFFIX = ".part"


class Sink(Protocol):
    """Where a bundle's files are written, by their paths in it."""

    def has(self, path: str, size: int, sha256: str) -> bool:
        """True where the file is already there with this size and digest."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a file with this content."""
        ...

    def put_file(self, path: str, file: Path) -> None:
        """Copy a local file."""
        ...

    def begin(self, needed_bytes: int) -> None:
        """Prepare for writing. UsageError where `need` more bytes do not fit; nothing is changed then."""
        ...

    def finish(self, keep: Collection[str], index: bytes) -> None:
        """Remove files of an older bundle not in `keep`, then write the index, which makes the bundle valid."""
        ...

    def __enter__(self) -> Sink: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_sink(to: Path) -> Sink:
    """A `TarSink` where the name ends in .tar, else a `FolderSink`."""
    return TarSink(to) if to.suffix == ".tar" else FolderSink(to)


class FolderSink:
    """Writes a bundle to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> FolderSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.sync()

    def has(self, path: str, size: int, sha256: str) -> bool:
        """True where the file is already there with this size and digest."""
        target = self._folder / path
        try:
            if target.stat().st_size != size:
                return False
            with target.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == sha256
        except OSError:
            return False

    def put(self, path: str, data: bytes) -> None:
        """Write a file with this content; the file is replaced atomically."""
        target = self._folder / path
        part = target.with_name(target.name + _PART_SUFFIX)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            os.replace(part, target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise _to_usage_error(error, self._folder) from error

    def put_file(self, path: str, file: Path) -> None:
        """Copy a local file; the file is replaced atomically."""
        target = self._folder / path
        part = target.with_name(target.name + _PART_SUFFIX)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, part)
            os.replace(part, target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise _to_usage_error(error, self._folder) from error

    def begin(self, needed_bytes: int) -> None:
        """Make the folder, check its free space and remove the old index."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _check_free_space(self._folder, needed_bytes)
            (self._folder / INDEX_FILE).unlink(missing_ok=True)  # the bundle is invalid until `finish` writes the index
        except OSError as error:
            raise _to_usage_error(error, self._folder) from error

    def finish(self, keep: Collection[str], index: bytes) -> None:
        """Remove files of an older bundle, only within the folders of a bundle, then write the index."""
        keep_paths = set(keep)
        for top in (*FOLDERS, KIT_FOLDER):
            for path in sorted((self._folder / top).rglob("*"), reverse=True):
                if path.is_dir() and not path.is_symlink():
                    if not any(path.iterdir()):
                        path.rmdir()
                elif str(path.relative_to(self._folder)) not in keep_paths:
                    path.unlink(missing_ok=True)
        os.sync()
        self.put(INDEX_FILE, index)


class TarSink:
    """Writes a bundle to an uncompressed tar file: its content is compressed already or does not shrink."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._part = file.with_name(file.name + _PART_SUFFIX)
        self._archive: tarfile.TarFile | None = None

    def __enter__(self) -> TarSink:
        try:
            self._archive = tarfile.open(self._part, "w", format=tarfile.GNU_FORMAT)
        except OSError as error:
            raise _to_usage_error(error, self._file) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._archive is not None and self._archive.fileobj is not None:
            self._archive.fileobj.close()  # do not close the archive itself: that would write its end marker
        self._part.unlink(missing_ok=True)

    def has(self, path: str, size: int, sha256: str) -> bool:
        """Always False: a tar file is written anew."""
        return False

    def put(self, path: str, data: bytes) -> None:
        """Append a file with this content."""
        assert self._archive is not None
        entry = tarfile.TarInfo(path)
        entry.size, entry.mode = len(data), 0o644
        try:
            self._archive.addfile(entry, io.BytesIO(data))
        except OSError as error:
            raise _to_usage_error(error, self._file) from error

    def put_file(self, path: str, file: Path) -> None:
        """Append a local file."""
        assert self._archive is not None
        entry = tarfile.TarInfo(path)
        entry.size, entry.mode = file.stat().st_size, 0o644
        try:
            with file.open("rb") as opened:
                self._archive.addfile(entry, opened)
        except OSError as error:
            raise _to_usage_error(error, self._file) from error

    def begin(self, needed_bytes: int) -> None:
        """Check the free space and open the archive."""
        try:
            _check_free_space(self._file.absolute().parent, needed_bytes)
            self._archive = tarfile.open(self._part, "w", format=tarfile.GNU_FORMAT)  # noqa: SIM115
        except OSError as error:
            raise _to_usage_error(error, self._file) from error

    def finish(self, keep: Collection[str], index: bytes) -> None:
        """Append the index, close the archive, sync it and rename it into place."""
        assert self._archive is not None
        self.put(INDEX_FILE, index)
        try:
            self._archive.close()
            with self._part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(self._part, self._file)
        except OSError as error:
            raise _to_usage_error(error, self._file) from error


def _check_free_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + RESERVE_BYTES:
        raise UsageError(f"no room in {folder}: {free / 1e6:.0f} MB are free, {needed_bytes / 1e6:.0f} MB are needed")


def _to_usage_error(error: OSError, where: Path) -> UsageError:
    """A UsageError for an OSError; full disks have a message of their own."""
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return UsageError(f"{where} is full: take a larger medium, or fewer devices and releases")
    return UsageError(f"cannot write {where}: {error.strerror}")
