"""A memory segment shared by a client and its server on one machine: an anonymous file, passed over a Unix socket.

The client creates it with a fixed size and seals the size; the server maps it only after checking the seal, so a client
cannot remove pages that the server is using (SIGBUS). `Segment.containing` finds the segment that an array lies in, so
that a worker process can be given the segment instead of a copy of the bytes.
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
from typing import Any

from edgesplit.errors import UsageError
from edgesplit.lazy_import import np, npt
from edgesplit.limits import LIMITS

_READ_ONLY = 0x8 | 0x10
"""F_SEAL_WRITE and F_SEAL_FUTURE_WRITE."""
SUPPORTED = sys.platform == "linux" and hasattr(os, "memfd_create")
"""Whether this system has anonymous files with seals (memfd_create on Linux)."""


class Segment:
    """One mapped segment. Arrays over it keep the mapping alive after `close`; the descriptor is closed by `close`."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        self.memory = memoryview(self._map)
        self.address = int(np.frombuffer(self._map, np.uint8).__array_interface__["data"][0])
        _register(self)

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new sealed segment of `size` bytes. OSError if memory is short."""
        descriptor = os.memfd_create("edgesplit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Segment:
        """Map a segment that a client passed. UsageError, and the descriptor is closed, if the file could shrink."""
        try:
            return cls(descriptor, _checked_size(descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @staticmethod
    def containing(array: npt.NDArray[Any]) -> tuple[Segment, int] | None:
        """The open segment that holds all of `array`, and the array's offset in it; None for this process's own
        memory."""
        begin = int(array.__array_interface__["data"][0])
        for reference in _open:
            segment = reference()
            if segment is not None and segment.address <= begin:
                offset = begin - segment.address
                if offset + array.nbytes <= segment.size:
                    return segment, offset
        return None

    def write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write `parts` one behind the other from `offset` on."""
        for part in parts:
            self.memory[offset : offset + len(part)] = part
            offset += len(part)

    def close(self) -> None:
        """Close the descriptor. The pages live on until the last array over them is gone."""
        with _LOCK:
            descriptor, self.descriptor = self.descriptor, -1
        _unregister(self)
        if descriptor >= 0:
            os.close(descriptor)


_LOCK = threading.RLock()
"""Reentrant, because garbage collection may run at any moment and the collected objects may close segments."""
_SegmentRefs = tuple["weakref.ref[Segment]", ...]
_open: _SegmentRefs = ()
"""All open segments. Replaced as a whole, never changed: every request's tensors are looked up here without the lock.
"""


def _register(new: Segment) -> None:
    """Register an open segment, and drop those that were collected."""
    _update(lambda known: (*(reference for reference in known if reference() is not None), weakref.ref(new)))


def _unregister(closed: Segment) -> None:
    _update(lambda known: tuple(reference for reference in known if reference() is not closed))


def _update(update: Callable[[_SegmentRefs], _SegmentRefs]) -> None:
    """Replace the open segments by `update(open segments)`; repeated if garbage collection closed others meanwhile."""
    global _open
    with _LOCK:
        while True:
            previous = _open
            updated = update(previous)
            if _open is previous:
                _open = updated
                return


def _checked_size(descriptor: int) -> int:
    """Size of a file that can be mapped safely. UsageError if it is not sealed against shrinking, is read-only, has
    huge pages, or is empty or too large."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise UsageError("not a sealed memory file: only memfd_create with MFD_ALLOW_SEALING makes one") from error
    status = os.fstat(descriptor)
    if not seals & fcntl.F_SEAL_SHRINK or not stat.S_ISREG(status.st_mode):
        raise UsageError("the memory file is not sealed against shrinking (F_SEAL_SHRINK)")
    if seals & _READ_ONLY:
        raise UsageError("the memory file cannot be written to: answers are put there")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:  # huge pages may be missing when they are touched
        raise UsageError("the memory file has huge pages: make it without MFD_HUGETLB")
    if not 0 < status.st_size <= LIMITS.http_body_bytes:
        raise UsageError(f"a memory file of {status.st_size} bytes: at most {LIMITS.http_body_bytes}, and not empty")
    return status.st_size
