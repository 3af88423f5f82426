"""Where a bundle is written: a folder, which may be a USB stick's, or a tar file. `bundle.json` comes last in both, so
that what was cut off is no bundle; a folder keeps what is there already and right, and a tar file appears whole."""

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
from edgesplit.release.bundle_format import FOLDERS, INDEX, KIT

RESERVE_BYTES = 4 << 20
_PART = ".part"


class Sink(Protocol):
    """Takes a bundle's files by their paths in it."""

    def has(self, path: str, size: int, sha256: str) -> bool:
        """Is that file there already, whole?"""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write one."""
        ...

    def put_file(self, path: str, file: Path) -> None:
        """Write one that lies here."""
        ...

    def begin(self, need: int) -> None:
        """From now on it is written; UsageError where so many more bytes do not fit, and then all is as it was."""
        ...

    def finish(self, keep: Collection[str], index: bytes) -> None:
        """Drop what is of an older bundle, and make this a whole one."""
        ...

    def __enter__(self) -> Sink: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def sink(to: Path) -> Sink:
    """By what `to` is called."""
    return TarSink(to) if to.suffix == ".tar" else FolderSink(to)


class FolderSink:
    """In a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> FolderSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.sync()

    def has(self, path: str, size: int, sha256: str) -> bool:
        """As `Sink` says."""
        there = self._folder / path
        try:
            if there.stat().st_size != size:
                return False
            with there.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == sha256
        except OSError:
            return False

    def put(self, path: str, data: bytes) -> None:
        """As `Sink` says."""
        there = self._folder / path
        part = there.with_name(there.name + _PART)
        try:
            there.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            os.replace(part, there)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise _meaning(error, self._folder) from error

    def put_file(self, path: str, file: Path) -> None:
        """As `Sink` says."""
        there = self._folder / path
        part = there.with_name(there.name + _PART)
        try:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, part)
            os.replace(part, there)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise _meaning(error, self._folder) from error

    def begin(self, need: int) -> None:
        """As `Sink` says."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _check_room(self._folder, need)
            (self._folder / INDEX).unlink(missing_ok=True)  # until it is whole again
        except OSError as error:
            raise _meaning(error, self._folder) from error

    def finish(self, keep: Collection[str], index: bytes) -> None:
        """As `Sink` says. Only in the folders that a bundle is made of is anything dropped."""
        kept = set(keep)
        for top in (*FOLDERS, KIT):
            for path in sorted((self._folder / top).rglob("*"), reverse=True):
                if path.is_dir() and not path.is_symlink():
                    if not any(path.iterdir()):
                        path.rmdir()
                elif str(path.relative_to(self._folder)) not in kept:
                    path.unlink(missing_ok=True)
        os.sync()
        self.put(INDEX, index)


class TarSink:
    """In a tar file that is not compressed: what is in it is, or does not shrink."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._part = file.with_name(file.name + _PART)
        self._archive: tarfile.TarFile | None = None

    def __enter__(self) -> TarSink:
        try:
            self._archive = tarfile.open(self._part, "w", format=tarfile.GNU_FORMAT)
        except OSError as error:
            raise _meaning(error, self._file) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._archive is not None and self._archive.fileobj is not None:
            self._archive.fileobj.close()  # not the archive, which would write its end
        self._part.unlink(missing_ok=True)

    def has(self, path: str, size: int, sha256: str) -> bool:
        """As `Sink` says."""
        return False

    def put(self, path: str, data: bytes) -> None:
        """As `Sink` says."""
        assert self._archive is not None
        entry = tarfile.TarInfo(path)
        entry.size, entry.mode = len(data), 0o644
        try:
            self._archive.addfile(entry, io.BytesIO(data))
        except OSError as error:
            raise _meaning(error, self._file) from error

    def put_file(self, path: str, file: Path) -> None:
        """As `Sink` says."""
        assert self._archive is not None
        entry = tarfile.TarInfo(path)
        entry.size, entry.mode = file.stat().st_size, 0o644
        try:
            with file.open("rb") as opened:
                self._archive.addfile(entry, opened)
        except OSError as error:
            raise _meaning(error, self._file) from error

    def begin(self, need: int) -> None:
        """As `Sink` says."""
        try:
            _check_room(self._file.absolute().parent, need)
            self._archive = tarfile.open(self._part, "w", format=tarfile.GNU_FORMAT)  # noqa: SIM115
        except OSError as error:
            raise _meaning(error, self._file) from error

    def finish(self, keep: Collection[str], index: bytes) -> None:
        """As `Sink` says."""
        assert self._archive is not None
        self.put(INDEX, index)
        try:
            self._archive.close()
            with self._part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(self._part, self._file)
        except OSError as error:
            raise _meaning(error, self._file) from error


def _check_room(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need + RESERVE_BYTES:
        raise UsageError(f"no room in {folder}: {free / 1e6:.0f} MB are free, {need / 1e6:.0f} MB are needed")


def _meaning(error: OSError, where: Path) -> UsageError:
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return UsageError(f"{where} is full: take a larger medium, or fewer devices and releases")
    return UsageError(f"cannot write {where}: {error.strerror}")
