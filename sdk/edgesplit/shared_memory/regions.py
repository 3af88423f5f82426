"""Shared memory that clients on this machine register, and the access of requests to it.

There are two kinds. A *region* is POSIX shared memory that a client names (Triton's system shared memory extension).
Its owner can shorten it at any moment, so it is never mapped: each use reads or writes it as a file, and a region that
has become too short is an error, not a SIGBUS. A *segment* (`edgesplit.shared_memory.segment`) belongs to one
connection, cannot shrink, is mapped, and ends with its connection.

Access is decided by the user id that the kernel reports: a region is opened only for programs of the user who owns it,
and visible only to that user's programs.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError
from edgesplit.http1.peer import Peer
from edgesplit.limits import LIMITS
from edgesplit.oip.shared_memory import TensorRef
from edgesplit.shared_memory.segment import Segment

SEGMENT = "@connection"
"""The region name that means the segment of the request's own connection."""
FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?(?P<name>[^/\0]{1,255})")


@dataclass(frozen=True)
class Region:
    """One registered region; its descriptor is open while it is registered."""

    name: str
    key: str
    offset: int
    size: int
    descriptor: int

    def to_dict(self) -> dict[str, str | int]:
        """The region as Triton's status call reports it."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.size}


class Regions:
    """The registered regions of all users. Thread-safe."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._regions: dict[tuple[int, str], Region] = {}

    def register(self, peer: Peer | None, name: str, key: str, offset: int, size: int) -> None:
        """Open the shared memory `key` under `name` for the user of `peer`. UsageError if it does not exist, is too
        short or belongs to another user."""
        user = _user_of(peer)
        self._check_free(user, name)
        descriptor = self._open_key(key, user)
        try:
            _check_size(descriptor, key, offset + size)
            with self._lock:
                self._check_free(user, name)
                self._regions[user, name] = Region(name, key, offset, size, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def unregister(self, peer: Peer | None, name: str | None) -> None:
        """Unregister the user's region `name`, or all of the user's regions if None. Idempotent."""
        user = _user_of(peer)
        with self._lock:
            keys = [key for key in self._regions if key[0] == user and name in (None, key[1])]
            for key in keys:
                os.close(self._regions.pop(key).descriptor)

    def status(self, peer: Peer | None, name: str | None) -> list[dict[str, str | int]]:
        """The user's regions, or the one called `name`; UsageError if there is none of that name."""
        user = _user_of(peer)
        with self._lock:
            regions = [region for key, region in sorted(self._regions.items()) if key[0] == user]
        if name is None:
            return [region.to_dict() for region in regions]
        named = [region.to_dict() for region in regions if region.name == name]
        if not named:
            raise UsageError(f"Unable to find system shared memory region: '{name[:255]}'")
        return named

    def view_for(self, peer: Peer | None) -> MemoryView:
        """The shared memory that requests on the connection of `peer` may use."""
        return MemoryView(self, peer)

    def close(self) -> None:
        """Unregister everything."""
        with self._lock:
            regions, self._regions = list(self._regions.values()), {}
        for region in regions:
            os.close(region.descriptor)

    @contextlib.contextmanager
    def open_region(self, peer: Peer | None, reference: TensorRef) -> Iterator[tuple[int, int]]:
        """A descriptor of the region, open within the block even if the region is unregistered meanwhile, and the
        offset of `reference` in it. UsageError if the region is unknown or too short."""
        user = _user_of(peer)
        with self._lock:
            region = self._regions.get((user, reference.region))
            if region is None:
                raise UsageError(f"Unable to find shared memory region: '{reference.region[:255]}'")
            _check_range(reference, region.size)
            descriptor = os.dup(region.descriptor)
        try:
            begin = region.offset + reference.offset
            _check_size(descriptor, region.key, begin + reference.size)
            yield descriptor, begin
        finally:
            os.close(descriptor)

    def _check_free(self, user: int, name: str) -> None:
        if (user, name) in self._regions:
            raise UsageError(f"shared memory region '{name[:255]}' already in manager")
        if sum(owner == user for owner, _ in self._regions) >= LIMITS.shared_regions:
            raise UsageError(f"{LIMITS.shared_regions} shared memory regions are registered already: unregister some")

    def _open_key(self, key: str, user: int) -> int:
        """A descriptor of the shared memory `key`. UsageError unless it is a regular file owned by `user`."""
        match = _KEY.fullmatch(key)
        if match is None or match["name"] in (".", ".."):
            raise UsageError(f"not the key of shared memory: {key[:255]!r}")
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._folder / match["name"], flags)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"Unable to open shared memory region: '{key[:255]}' ({reason})") from error
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == user:
            return descriptor
        os.close(descriptor)
        raise UsageError(f"Unable to open shared memory region: '{key[:255]}' (it is not this program's user's)")


class MemoryView:
    """The shared memory that the requests of one connection may use; implements
    `edgesplit.oip.shared_memory.Memory`."""

    def __init__(self, regions: Regions, peer: Peer | None) -> None:
        self._regions = regions
        self._peer = peer

    def check(self, reference: TensorRef) -> None:
        """UsageError unless `reference` exists and lies within its region now."""
        if reference.region == SEGMENT:
            self._segment(reference)
            return
        with self._regions.open_region(self._peer, reference):
            pass

    def read(self, reference: TensorRef, *, stable: bool) -> memoryview:
        """The bytes at `reference`: a copy for a region or if `stable`, else a read-only view of the segment."""
        if reference.region != SEGMENT:
            with self._regions.open_region(self._peer, reference) as (descriptor, begin):
                return _read(descriptor, begin, reference)
        part = self._segment(reference).memory[reference.offset : reference.offset + reference.size]
        return memoryview(bytearray(part)) if stable else part.toreadonly()

    def write(self, reference: TensorRef, parts: Sequence[bytes | memoryview]) -> None:
        """Write `parts` one behind the other at `reference`."""
        if reference.region == SEGMENT:
            self._segment(reference).write(reference.offset, parts)
            return
        with self._regions.open_region(self._peer, reference) as (descriptor, begin):
            for part in parts:
                begin += _write(descriptor, begin, part)

    def _segment(self, reference: TensorRef) -> Segment:
        segment = self._peer.attached(SEGMENT) if self._peer is not None else None
        if not isinstance(segment, Segment):
            raise UsageError("this connection has passed no segment of shared memory")
        _check_range(reference, segment.size)
        return segment


def _user_of(peer: Peer | None) -> int:
    """User id of the requesting program. UsageError if it is not on this machine."""
    user = peer.user if peer is not None else None
    if user is None:
        raise UsageError("shared memory is for programs on this machine: send the tensors' bytes")
    return user


def _check_range(reference: TensorRef, size: int) -> None:
    if reference.offset + reference.size > size:
        raise UsageError(f"Invalid offset + byte size for shared memory region: '{reference.region[:255]}'")


def _check_size(descriptor: int, key: str, end: int) -> None:
    """UsageError if the shared memory is shorter than `end` bytes: its owner may have shortened it since it was
    registered."""
    size = os.fstat(descriptor).st_size
    if end > size:
        raise UsageError(f"the shared memory '{key[:255]}' has {size} bytes now, and {end} are asked for")


def _read(descriptor: int, begin: int, reference: TensorRef) -> memoryview:
    """A copy of the bytes; UsageError if the region shrinks meanwhile."""
    content = memoryview(bytearray(reference.size))
    read_bytes = 0
    while read_bytes < reference.size:
        count = os.preadv(descriptor, [content[read_bytes:]], begin + read_bytes)
        if not count:
            raise UsageError(f"the shared memory region '{reference.region[:255]}' became shorter while it was read")
        read_bytes += count
    return content


def _write(descriptor: int, begin: int, part: bytes | memoryview) -> int:
    """Write all of `part` at offset `begin`; returns its length."""
    view, written = memoryview(part), 0
    while written < len(view):
        try:
            written += os.pwrite(descriptor, view[written:], begin + written)
        except OSError as error:
            raise UsageError(f"cannot write to shared memory: {error.strerror}") from error
    return written
