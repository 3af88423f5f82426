"""A bundle's files by name, from a folder or a tar file, as from a stranger: regular files only, no link followed on
the way, never more bytes than asked for. Nothing is ever unpacked, so no name in it leads anywhere.

FileNotFoundError: the bundle lacks it. LinkError: the medium is gone or fails. TrustError: no correct bundle is so.
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
from edgesplit.release.bundle_format import INDEX

_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._-]{0,127}){0,3}")
MOST_MEMBERS = 2_000_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


class Source(Protocol):
    """A bundle that can be read."""

    def read(self, path: str, most: int) -> bytes:
        """The file, at most so long."""
        ...

    def close(self) -> None:
        """Let the medium go."""
        ...


def open_bundle(path: Path) -> Source:
    """The bundle in that folder or tar file. LinkError where it is not there (now), UsageError where it is none."""
    try:
        found = path.stat()
    except OSError as error:
        raise LinkError(f"there is no bundle at {path} now: {error.strerror}") from error
    return FolderSource(path) if stat.S_ISDIR(found.st_mode) else TarSource(path)


class FolderSource:
    """In a folder, which stays the same one however the path to it may change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise LinkError(f"cannot read the bundle {path}: {error.strerror}") from error
        if not (path / INDEX).is_file():
            self.close()
            raise UsageError(f"{path} holds no whole bundle: {INDEX}, which is written last, is missing")

    def read(self, path: str, most: int) -> bytes:
        """As `Source` says."""
        *folders, name = _checked(path).split("/")
        at, opened = self._top, list[int]()
        try:
            for folder in folders:
                at = os.open(folder, _FOLDER, dir_fd=at)
                opened.append(at)
            descriptor = os.open(name, _FILE, dir_fd=at)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise TrustError(f"{path} in the bundle is no regular file")
                return _bounded(file, path, most)
        except OSError as error:
            raise self._meaning(error, path, len(folders) > len(opened)) from error
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def close(self) -> None:
        """As `Source` says."""
        if self._top >= 0:
            os.close(self._top)
            self._top = -1

    def _meaning(self, error: OSError, path: str, in_folders: bool) -> Exception:
        """A link is not followed; a stick that was pulled has no files any more, and no top either."""
        if error.errno == errno.ELOOP:
            return TrustError(f"{path} in the bundle is a link")
        if error.errno in _ABSENT and not self._is_link(path, in_folders):
            try:
                os.stat(INDEX, dir_fd=self._top, follow_symlinks=False)
            except OSError:
                return LinkError(f"the bundle at {self._path} is gone: bring it back, and it goes on")
            return FileNotFoundError(errno.ENOENT, "not in the bundle", path)
        if error.errno in _ABSENT:
            return TrustError(f"{path} in the bundle is behind a link")
        return LinkError(f"cannot read {path} in the bundle at {self._path}: {error.strerror}")

    def _is_link(self, path: str, in_folders: bool) -> bool:
        """O_DIRECTORY with O_NOFOLLOW says ENOTDIR of a link."""
        parts = path.split("/")
        try:
            return in_folders and any(
                stat.S_ISLNK(os.stat("/".join(parts[:end]), dir_fd=self._top, follow_symlinks=False).st_mode)
                for end in range(1, len(parts))
            )
        except OSError:
            return False


class TarSource:
    """In a tar file: its regular files by name, the first where a name is there twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = tarfile.open(path, "r:")  # noqa: SIM115 - closed by `close`
        except tarfile.TarError as error:
            raise MalformedMessage(f"{path} is no bundle: {error}") from error
        except OSError as error:
            raise LinkError(f"cannot read the bundle {path}: {error.strerror}") from error
        try:
            self._files = self._listed()
        except BaseException:
            self.close()
            raise
        if INDEX not in self._files:
            self.close()
            raise UsageError(f"{path} holds no whole bundle: there is no {INDEX}")

    def _listed(self) -> dict[str, tarfile.TarInfo]:
        files: dict[str, tarfile.TarInfo] = {}
        try:
            for count, member in enumerate(self._archive):
                if count >= MOST_MEMBERS:
                    raise TrustError(f"{self._path} has more than {MOST_MEMBERS} files: that is no bundle")
                if member.isreg() and not member.issparse() and _PATH.fullmatch(member.name):
                    files.setdefault(member.name, member)
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise MalformedMessage(f"{self._path} is cut off or spoilt: {error}") from error
        except OSError as error:
            raise LinkError(f"cannot read the bundle {self._path}: {error.strerror}") from error
        return files

    def read(self, path: str, most: int) -> bytes:
        """As `Source` says."""
        member = self._files.get(_checked(path))
        if member is None:
            raise FileNotFoundError(errno.ENOENT, "not in the bundle", path)
        try:
            opened = self._archive.extractfile(member)
            if opened is None:
                raise TrustError(f"{path} in the bundle is no regular file")
            with opened:
                return _bounded(opened, path, most)
        except (tarfile.TarError, OSError) as error:
            raise LinkError(f"cannot read {path} in the bundle {self._path}: {error}") from error

    def close(self) -> None:
        """As `Source` says."""
        self._archive.close()


def _bounded(file: IO[bytes], path: str, most: int) -> bytes:
    raw = file.read(most + 1)
    if len(raw) > most:
        raise TrustError(f"{path} in the bundle: more than {most} bytes")
    return raw


def _checked(path: str) -> str:
    if not _PATH.fullmatch(path):
        raise TrustError(f"not the name of a file in a bundle: {path[:80]!r}")
    return path
