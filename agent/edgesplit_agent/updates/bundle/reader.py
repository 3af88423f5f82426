"""Reads a release bundle's files by name, from a folder or a tar file, without trusting it: regular files only, no
links followed, never more bytes than requested. Nothing is ever unpacked, so no name in the bundle can reach outside of
it.

FileNotFoundError: the bundle lacks the file. LinkError: the medium is missing or fails. TrustError: no correct bundle
looks like this.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tarfile
from pathlib import Path
from typing import IO, Protocol

from edgesplit.errors import LinkError, MalformedMessage, TrustError, UsageError
from edgesplit.release.bundle_format import INDEX_FILE

_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,3}")
MOST_MEMBERS = 2_000_000
"""Maximum number of files in a tar file."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


class BundleReader(Protocol):
    """A release bundle that can be read."""

    def read(self, path: str, max_bytes: int) -> bytes:
        """Content of the file at `path`; TrustError where it is longer than `max_bytes`."""
        ...

    def close(self) -> None:
        """Close the medium."""


def open_bundle(path: Path) -> BundleReader:
    """Open the bundle in that folder or tar file. LinkError where it is not there at present, UsageError where it is no
    complete bundle."""
    try:
        status = path.stat()
    except OSError as error:
        raise LinkError(f"there is no bundle at {path} now: {error.strerror}") from error
    return FolderReader(path) if stat.S_ISDIR(status.st_mode) else TarReader(path)


class FolderReader:
    """A bundle in a folder. The folder is opened once, so a later change of its path leads nowhere else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise LinkError(f"cannot read the bundle {path}: {error.strerror}") from error
        if not (path / INDEX_FILE).is_file():
            self.close()
            raise UsageError(f"{path} is no complete bundle: {INDEX_FILE}, which is written last, is missing")

    def read(self, path: str, max_bytes: int) -> bytes:
        """Content of the file at `path`; TrustError where it is longer than `max_bytes`, or behind a link."""
        *folders, name = _checked_path(path).split("/")
        parent, opened = self._descriptor, list[int]()
        try:
            for folder in folders:
                parent = os.open(folder, _FOLDER, dir_fd=parent)
                opened.append(parent)
            descriptor = os.open(name, _FILE, dir_fd=parent)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise TrustError(f"{path} in the bundle is no regular file")
                return _read_bounded(file, path, max_bytes)
        except OSError as error:
            raise self._translated(error, path, len(folders) > len(opened)) from error
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def close(self) -> None:
        """Close the folder."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _translated(self, error: OSError, path: str, in_folders: bool) -> Exception:
        """The error to raise for an OSError: TrustError for a link, LinkError for a medium that was removed or fails,
        FileNotFoundError for a file that the bundle lacks."""
        if error.errno == errno.ELOOP:
            return TrustError(f"{path} in the bundle is a link")
        if error.errno in _ABSENT and not self._is_link(path, in_folders):
            try:
                os.stat(INDEX_FILE, dir_fd=self._descriptor, follow_symlinks=False)
            except OSError:
                return LinkError(f"the bundle at {self._path} is missing: connect its medium again to continue")
            return FileNotFoundError(errno.ENOENT, "not in the bundle", path)
        if error.errno in _ABSENT:
            return TrustError(f"{path} in the bundle is behind a link")
        return LinkError(f"cannot read {path} in the bundle at {self._path}: {error.strerror}")

    def _is_link(self, path: str, in_folders: bool) -> bool:
        """Whether a parent folder of `path` is a link: opening one with O_DIRECTORY and O_NOFOLLOW fails with
        ENOTDIR."""
        parts = path.split("/")
        try:
            return in_folders and any(
                stat.S_ISLNK(os.stat("/".join(parts[:end]), dir_fd=self._descriptor, follow_symlinks=False).st_mode)
                for end in range(1, len(parts))
            )
        except OSError:
            return False


class TarReader:
    """A bundle in an uncompressed tar file: its regular files by name, the first where a name occurs twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = tarfile.open(path, "r:")  # noqa: SIM115 - closed by `close`
        except tarfile.TarError as error:
            raise MalformedMessage(f"{path} is no bundle: {error}") from error
        except OSError as error:
            raise LinkError(f"cannot read the bundle {path}: {error.strerror}") from error
        try:
            self._files = self._list_files()
        except BaseException:
            self.close()
            raise
        if INDEX_FILE not in self._files:
            self.close()
            raise UsageError(f"{path} is no complete bundle: there is no {INDEX_FILE}")

    def _list_files(self) -> dict[str, tarfile.TarInfo]:
        """Regular files with a permitted name, by name. TrustError beyond `MOST_MEMBERS`, MalformedMessage for a
        damaged archive."""
        files: dict[str, tarfile.TarInfo] = {}
        try:
            for count, member in enumerate(self._archive):
                if count >= MOST_MEMBERS:
                    raise TrustError(f"{self._path} has more than {MOST_MEMBERS} files: that is no bundle")
                if member.isreg() and not member.issparse() and _PATH.fullmatch(member.name):
                    files.setdefault(member.name, member)
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise MalformedMessage(f"{self._path} is truncated or corrupt: {error}") from error
        except OSError as error:
            raise LinkError(f"cannot read the bundle {self._path}: {error.strerror}") from error
        return files

    def read(self, path: str, max_bytes: int) -> bytes:
        """Content of the file at `path`; TrustError where it is longer than `max_bytes`."""
        member = self._files.get(_checked_path(path))
        if member is None:
            raise FileNotFoundError(errno.ENOENT, "not in the bundle", path)
        try:
            opened = self._archive.extractfile(member)
            if opened is None:
                raise TrustError(f"{path} in the bundle is no regular file")
            with opened:
                return _read_bounded(opened, path, max_bytes)
        except (tarfile.TarError, OSError) as error:
            raise LinkError(f"cannot read {path} in the bundle {self._path}: {error}") from error

    def close(self) -> None:
        """Close the archive."""
        self._archive.close()


def _read_bounded(file: IO[bytes], path: str, max_bytes: int) -> bytes:
    raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise TrustError(f"{path} in the bundle: more than {max_bytes} bytes")
    return raw


def _checked_path(path: str) -> str:
    if not _PATH.fullmatch(path):
        raise TrustError(f"not the name of a file in a bundle: {path[:80]!r}")
    return path
