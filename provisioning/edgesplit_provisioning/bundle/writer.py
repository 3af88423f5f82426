"""Writes a release bundle to a folder, which may be on a USB stick, or to a tar file.

`bundle.json` is written last in both, so that an interrupted write leaves no valid bundle. A folder keeps files that
are already complete; a tar file is renamed into place once complete.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from edgesplit.errors import UsageError
from edgesplit.file_hash import file_sha256
from edgesplit.release.bundle_format import FOLDERS, INDEX_FILE, KIT_FOLDER

RESERVE_BYTES = 4 << 20
"""Free space that must remain after the bundle is written."""
_PART_SUFFIX = ".part"


def open_sink(to: Path) -> FolderSink | TarSink:
    """A `TarSink` where the name ends in .tar, else a `FolderSink`."""
    return TarSink(to) if to.suffix == ".tar" else FolderSink(to)


class FolderSink:
    """Writes a bundle to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> FolderSink:
        return self

    def __exit__(self, *_: object) -> None:
        os.sync()

    def has(self, path: str, size: int, sha256: str) -> bool:
        """True where the file is already there with this size and digest."""
        target = self._folder / path
        try:
            return target.stat().st_size == size and file_sha256(target) == sha256
        except OSError:
            return False

    def put(self, path: str, data: bytes) -> None:
        """Write a file with this content; the file is replaced atomically."""
        self._replace(path, lambda part: part.write_bytes(data))

    def put_file(self, path: str, file: Path) -> None:
        """Copy a local file; the file is replaced atomically."""
        self._replace(path, lambda part: shutil.copyfile(file, part))

    def _replace(self, path: str, write: Callable[[Path], object]) -> None:
        target = self._folder / path
        part = target.with_name(target.name + _PART_SUFFIX)
        with _usage_errors(self._folder):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                write(part)
                os.replace(part, target)
            except OSError:
                part.unlink(missing_ok=True)
                raise

    def begin(self, needed_bytes: int) -> None:
        """Make the folder, check its free space and remove the old index."""
        with _usage_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            _check_free_space(self._folder, needed_bytes)
            (self._folder / INDEX_FILE).unlink(missing_ok=True)  # the bundle is invalid until `finish` writes the index

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

    def __enter__(self) -> TarSink:
        with _usage_errors(self._file):
            self._archive = tarfile.open(self._part, "w", format=tarfile.GNU_FORMAT)
        return self

    def __exit__(self, *_: object) -> None:
        if self._archive.fileobj is not None:
            self._archive.fileobj.close()  # do not close the archive itself: that would write its end marker
        self._part.unlink(missing_ok=True)

    def has(self, path: str, size: int, sha256: str) -> bool:
        """Always False: a tar file is written anew."""
        return False

    def put(self, path: str, data: bytes) -> None:
        """Append a file with this content."""
        self._append(path, len(data), io.BytesIO(data))

    def put_file(self, path: str, file: Path) -> None:
        """Append a local file."""
        with _usage_errors(self._file), file.open("rb") as opened:
            self._append(path, file.stat().st_size, opened)

    def _append(self, path: str, size: int, content: IO[bytes]) -> None:
        entry = tarfile.TarInfo(path)
        entry.size, entry.mode = size, 0o644
        with _usage_errors(self._file):
            self._archive.addfile(entry, content)

    def begin(self, needed_bytes: int) -> None:
        """Check the free space."""
        with _usage_errors(self._file):
            _check_free_space(self._file.absolute().parent, needed_bytes)

    def finish(self, keep: Collection[str], index: bytes) -> None:
        """Append the index, close the archive, sync it and rename it into place."""
        self.put(INDEX_FILE, index)
        with _usage_errors(self._file):
            self._archive.close()
            with self._part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(self._part, self._file)


Sink = FolderSink | TarSink
"""Where a bundle's files are written, by their paths in it."""


def _check_free_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + RESERVE_BYTES:
        raise UsageError(f"no room in {folder}: {free / 1e6:.0f} MB are free, {needed_bytes / 1e6:.0f} MB are needed")


@contextmanager
def _usage_errors(where: Path) -> Iterator[None]:
    """Turn OSErrors into UsageErrors; full disks have a message of their own."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise UsageError(f"{where} is full: take a larger medium, or fewer devices and releases") from error
        raise UsageError(f"cannot write {where}: {error.strerror}") from error
