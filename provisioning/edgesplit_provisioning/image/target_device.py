"""The medium that an image is written to, a card or a file: one open file, locked exclusively while it is open.

All access goes through the `Medium` protocol, so that tests can simulate a card that is pulled out or returns wrong
data.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Protocol

from edgesplit.errors import MediumFailed, UsageError

BLKFLSBUF = 0x1261
"""ioctl that drops the cached blocks of a block device (linux/fs.h)."""


class Medium(Protocol):
    """Random access to a card or file. Every method may raise OSError."""

    name: str
    size: int | None
    """Size in bytes; None for a file, which grows with what is written."""
    is_blank: bool
    """True where unwritten bytes read as zeros."""

    @property
    def path(self) -> str:
        """Path by which other programs of this machine can open it while it is open here."""
        ...

    def write(self, data: memoryview, offset: int) -> int:
        """Write at `offset`; returns the number of bytes accepted."""
        ...

    def read(self, count: int, offset: int) -> bytes:
        """Read up to `count` bytes at `offset`."""
        ...

    def sync(self) -> None:
        """Wait until everything written is on the medium."""
        ...

    def drop_cache(self) -> None:
        """Drop cached blocks, so that the next read comes from the medium itself."""
        ...


class OpenedMedium:
    """A file or disk that is open for writing by this process only."""

    def __init__(self, name: str, descriptor: int, size: int | None) -> None:
        self.name, self.size, self.is_blank = name, size, False
        self._descriptor = descriptor
        self._is_disk = stat.S_ISBLK(os.fstat(descriptor).st_mode)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def write(self, data: memoryview, offset: int) -> int:
        return os.pwrite(self._descriptor, data, offset)

    def read(self, count: int, offset: int) -> bytes:
        return os.pread(self._descriptor, count, offset)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def drop_cache(self) -> None:
        if self._is_disk:
            fcntl.ioctl(self._descriptor, BLKFLSBUF, 0)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def set_size(self, size: int) -> None:
        """Empty a file and extend it with zeros to `size`, so that it reads as a blank card."""
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, size)
        self.is_blank = True

    def close(self) -> None:
        """Close it and release its lock."""
        os.close(self._descriptor)


def open_file(file: Path) -> OpenedMedium:
    """Open an image file for writing, creating it if needed."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error
    return _lock(OpenedMedium(str(file), descriptor, None), descriptor)


def open_disk(node: Path, size: int) -> OpenedMedium:
    """Open a disk with O_EXCL: the kernel refuses to mount it meanwhile, and udev leaves it alone."""
    try:
        descriptor = os.open(node, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    except PermissionError as error:
        raise UsageError(
            f"you may not write {node}: run edgectl as root (sudo -E), or join the group `disk`"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot write {node}: {error.strerror}. Is something on it mounted?") from error
    return _lock(OpenedMedium(str(node), descriptor, size), descriptor)


def _lock(medium: OpenedMedium, descriptor: int) -> OpenedMedium:
    """Take an exclusive lock; UsageError where another program holds one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        medium.close()
        raise UsageError(f"{medium.name} is being written to by another program") from error
    return medium


def medium_failed(medium: Medium, doing: str, error: OSError | str) -> MediumFailed:
    """The error for a medium that fails while it is written or read back."""
    reason = error if isinstance(error, str) else f"{error.strerror or error}"
    return MediumFailed(
        f"{medium.name} failed while {doing}: {reason}. It is NOT usable: nothing boots from it. Check the card and its"
        " reader and flash it again"
    )
