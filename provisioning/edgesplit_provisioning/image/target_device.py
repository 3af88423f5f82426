"""What an image is written to, a card or a file, and how: one open file, held alone while it lasts.

Everything goes through `Medium`, so that a card which is pulled out, or lies, is a few lines in a test.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Protocol

from edgesplit.errors import MediumFailed, UsageError

BLKFLSBUF = 0x1261
"""linux/fs.h: forget what is cached of a block device."""


class Medium(Protocol):
    """Bytes by their place. Everything may raise OSError."""

    name: str
    size: int | None
    """None: as large as what is written to it."""
    is_blank: bool
    """What was not written reads as zeros."""

    @property
    def path(self) -> str:
        """Where other programs of this machine find it while it is open."""
        ...

    def write(self, data: memoryview, offset: int) -> int:
        """How many bytes it took."""
        ...

    def read(self, count: int, offset: int) -> bytes:
        """Up to so many."""
        ...

    def sync(self) -> None:
        """What was written is on it."""
        ...

    def forget(self) -> None:
        """The next read asks the medium, not the memory of this machine."""
        ...


class OpenedMedium:
    """A file or a disk that is open for writing, by this process alone."""

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

    def forget(self) -> None:
        if self._is_disk:
            fcntl.ioctl(self._descriptor, BLKFLSBUF, 0)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def set_size(self, size: int) -> None:
        """Empty, and so large: a file's way to be a blank card."""
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, size)
        self.is_blank = True

    def close(self) -> None:
        """Let others in again."""
        os.close(self._descriptor)


def open_file(file: Path) -> OpenedMedium:
    """An image file, made or emptied."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error
    return _alone(OpenedMedium(str(file), descriptor, None), descriptor)


def open_disk(node: Path, size: int) -> OpenedMedium:
    """A disk: the kernel gives it to nobody who would mount it meanwhile, and udev leaves it alone."""
    try:
        descriptor = os.open(node, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    except PermissionError as error:
        raise UsageError(
            f"you may not write {node}: run edgectl as root (sudo -E), or join the group `disk`"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot write {node}: {error.strerror}. Is something on it mounted?") from error
    return _alone(OpenedMedium(str(node), descriptor, size), descriptor)


def _alone(medium: OpenedMedium, descriptor: int) -> OpenedMedium:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        medium.close()
        raise UsageError(f"{medium.name} is being written to by another program") from error
    return medium


def failed(medium: Medium, doing: str, error: OSError | str) -> MediumFailed:
    """What is said when a card lets us down in the middle."""
    why = error if isinstance(error, str) else f"{error.strerror or error}"
    return MediumFailed(
        f"{medium.name} failed while {doing}: {why}. It is NOT usable: nothing boots from it. Check the card and its"
        " reader and flash it again"
    )
