"""Memory that a client and its server on one machine both see: a file without a name, passed over a Unix socket.

The client makes it, of a fixed size, and seals the size; the server maps it only after it has seen the seal, so no
client can take pages away from under the server's feet (SIGBUS). `Segment.of` tells which segment an array lies in, so
that a worker process can be given the segment itself instead of the array's bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from edgesplit.errors import UsageError
from edgesplit.lazy_import import later
from edgesplit.limits import LIMITS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = later("numpy")

_READ_ONLY = 0x8 | 0x10
"""F_SEAL_WRITE and F_SEAL_FUTURE_WRITE."""
SUPPORTED = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether this system has sealed files without a name."""


class Segment:
    """One segment, mapped. Arrays over it keep the mapping alive after `close`; the descriptor ends with `close`."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        self.memory = memoryview(self._map)
        self.address = int(np.frombuffer(self._map, np.uint8).__array_interface__["data"][0])
        _know(self)

    @classmethod
    def made(cls, size: int) -> Segment:
        """A new one of `size` bytes, sealed. OSError where there is no memory for it."""
        descriptor = os.memfd_create("edgesplit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def received(cls, descriptor: int) -> Segment:
        """The one that a client passed. UsageError, and the descriptor closed, for a file that could shrink."""
        try:
            return cls(descriptor, _checked_size(descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @staticmethod
    def of(array: npt.NDArray[Any]) -> tuple[Segment, int] | None:
        """The open segment that holds all of `array`, and where in it; None for memory of this process's own."""
        begin = int(array.__array_interface__["data"][0])
        for known in _open:
            segment = known()
            if segment is not None and segment.address <= begin:
                offset = begin - segment.address
                if offset + array.nbytes <= segment.size:
                    return segment, offset
        return None

    def write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """Put `parts` there, one behind the other."""
        for part in parts:
            self.memory[offset : offset + len(part)] = part
            offset += len(part)

    def close(self) -> None:
        """No more from outside: the pages live on until the last array over them is gone."""
        with _LOCK:
            descriptor, self.descriptor = self.descriptor, -1
        _forget(self)
        if descriptor >= 0:
            os.close(descriptor)


_LOCK = threading.RLock()
"""One that its holder may take again: garbage is collected at any moment, and what is collected may close segments."""
_Known = tuple["weakref.ref[Segment]", ...]
_open: _Known = ()
"""Replaced whole, never changed: every request's tensors are looked up here, without the lock."""


def _know(new: Segment) -> None:
    """It is open; those that are gone are forgotten on the way."""
    _change(lambda known: (*(one for one in known if one() is not None), weakref.ref(new)))


def _forget(closed: Segment) -> None:
    _change(lambda known: tuple(one for one in known if one() is not closed))


def _change(changed: Callable[[_Known], _Known]) -> None:
    """Make the open ones what `changed` makes of them; again where others were closed while it did."""
    global _open
    with _LOCK:
        while True:
            before = _open
            after = changed(before)
            if _open is before:
                _open = after
                return


def _checked_size(descriptor: int) -> int:
    """The size of a file that can be mapped without fear."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise UsageError("not a sealed memory file: only memfd_create with MFD_ALLOW_SEALING makes one") from error
    found = os.fstat(descriptor)
    if not seals & fcntl.F_SEAL_SHRINK or not stat.S_ISREG(found.st_mode):
        raise UsageError("the memory file is not sealed against shrinking (F_SEAL_SHRINK)")
    if seals & _READ_ONLY:
        raise UsageError("the memory file cannot be written to: answers are put there")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:  # huge pages may be missing when they are touched
        raise UsageError("the memory file has huge pages: make it without MFD_HUGETLB")
    if not 0 < found.st_size <= LIMITS.http_body_bytes:
        raise UsageError(f"a memory file of {found.st_size} bytes: at most {LIMITS.http_body_bytes}, and not empty")
    return found.st_size
