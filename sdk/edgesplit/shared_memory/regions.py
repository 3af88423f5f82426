"""Shared memory that clients of this machine register, and what a request may read and write of it.

Two kinds. A *region* is POSIX shared memory that a client names (Triton's system shared memory extension). Its owner
can shorten it at any moment, so it is never mapped: each use reads or writes it as a file, and a region that has become
too short is an error, not a signal. A *segment* (`edgesplit.shared_memory.segment`) belongs to one connection, cannot
shrink, is mapped, and ends with its connection.

Who may use what is told by the kernel: a region is opened only for a program of the user who owns it, and seen by that
user's programs alone.
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
from edgesplit.http1.peer import Channel
from edgesplit.limits import LIMITS
from edgesplit.oip.shared_memory import Place
from edgesplit.shared_memory.segment import Segment

SEGMENT = "@connection"
"""The region's name by which a request means its own connection's segment."""
FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?(?P<name>[^/\0]{1,255})")


@dataclass(frozen=True)
class Region:
    """One region, whose descriptor is open while it is registered."""

    name: str
    key: str
    offset: int
    size: int
    descriptor: int

    def described(self) -> dict[str, str | int]:
        """As Triton's status call words it."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.size}


class Regions:
    """All that is registered. Thread-safe."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._regions: dict[tuple[int, str], Region] = {}

    def register(self, channel: Channel | None, name: str, key: str, offset: int, size: int) -> None:
        """Open the shared memory `key` under `name`. UsageError where it cannot be, or must not."""
        user = _user(channel)
        self._check_free(user, name)
        descriptor = self._opened(key, user)
        try:
            _check_size(descriptor, key, offset + size)
            with self._lock:
                self._check_free(user, name)
                self._regions[user, name] = Region(name, key, offset, size, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def unregister(self, channel: Channel | None, name: str | None) -> None:
        """Forget that region, or all of this user's; one that is not there is forgotten already."""
        user = _user(channel)
        with self._lock:
            gone = [key for key in self._regions if key[0] == user and name in (None, key[1])]
            for key in gone:
                os.close(self._regions.pop(key).descriptor)

    def status(self, channel: Channel | None, name: str | None) -> list[dict[str, str | int]]:
        """This user's regions, or the one of that name; UsageError where there is none."""
        user = _user(channel)
        with self._lock:
            found = [region for key, region in sorted(self._regions.items()) if key[0] == user]
        if name is None:
            return [region.described() for region in found]
        named = [region.described() for region in found if region.name == name]
        if not named:
            raise UsageError(f"Unable to find system shared memory region: '{name[:255]}'")
        return named

    def seen_by(self, channel: Channel | None) -> Reach:
        """What a request that came by `channel` may name."""
        return Reach(self, channel)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            regions, self._regions = list(self._regions.values()), {}
        for region in regions:
            os.close(region.descriptor)

    @contextlib.contextmanager
    def opened(self, channel: Channel | None, place: Place) -> Iterator[tuple[int, int]]:
        """A descriptor that is open meanwhile, whoever unregisters the region, and where in it `place` begins."""
        user = _user(channel)
        with self._lock:
            region = self._regions.get((user, place.region))
            if region is None:
                raise UsageError(f"Unable to find shared memory region: '{place.region[:255]}'")
            _check_range(place, region.size)
            descriptor = os.dup(region.descriptor)
        try:
            begin = region.offset + place.offset
            _check_size(descriptor, region.key, begin + place.size)
            yield descriptor, begin
        finally:
            os.close(descriptor)

    def _check_free(self, user: int, name: str) -> None:
        if (user, name) in self._regions:
            raise UsageError(f"shared memory region '{name[:255]}' already in manager")
        if sum(owner == user for owner, _ in self._regions) >= LIMITS.shared_regions:
            raise UsageError(f"{LIMITS.shared_regions} shared memory regions are registered already: unregister some")

    def _opened(self, key: str, user: int) -> int:
        """A descriptor of the shared memory `key`, which is `user`'s."""
        found = _KEY.fullmatch(key)
        if found is None or found["name"] in (".", ".."):
            raise UsageError(f"not the key of shared memory: {key[:255]!r}")
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._folder / found["name"], flags)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"Unable to open shared memory region: '{key[:255]}' ({reason})") from error
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == user:
            return descriptor
        os.close(descriptor)
        raise UsageError(f"Unable to open shared memory region: '{key[:255]}' (it is not this program's user's)")


class Reach:
    """The `Memory` of the requests of one connection."""

    def __init__(self, regions: Regions, channel: Channel | None) -> None:
        self._regions = regions
        self._channel = channel

    def check(self, place: Place) -> None:
        """Is it there, and that large, now?"""
        if place.region == SEGMENT:
            self._segment(place)
            return
        with self._regions.opened(self._channel, place):
            pass

    def read(self, place: Place, *, settled: bool) -> memoryview:
        """What lies there; a view of a segment unless `settled`."""
        if place.region != SEGMENT:
            with self._regions.opened(self._channel, place) as (descriptor, begin):
                return _read(descriptor, begin, place)
        part = self._segment(place).memory[place.offset : place.offset + place.size]
        return memoryview(bytearray(part)) if settled else part.toreadonly()

    def write(self, place: Place, parts: Sequence[bytes | memoryview]) -> None:
        """Put `parts` there, one behind the other."""
        if place.region == SEGMENT:
            self._segment(place).write(place.offset, parts)
            return
        with self._regions.opened(self._channel, place) as (descriptor, begin):
            for part in parts:
                begin += _write(descriptor, begin, part)

    def _segment(self, place: Place) -> Segment:
        segment = self._channel.kept(SEGMENT) if self._channel is not None else None
        if not isinstance(segment, Segment):
            raise UsageError("this connection has passed no segment of shared memory")
        _check_range(place, segment.size)
        return segment


def _user(channel: Channel | None) -> int:
    """Whose the program is that asks."""
    user = channel.user if channel is not None else None
    if user is None:
        raise UsageError("shared memory is for programs on this machine: send the tensors' bytes")
    return user


def _check_range(place: Place, size: int) -> None:
    if place.offset + place.size > size:
        raise UsageError(f"Invalid offset + byte size for shared memory region: '{place.region[:255]}'")


def _check_size(descriptor: int, key: str, end: int) -> None:
    """Its owner may have shortened it since it was registered."""
    size = os.fstat(descriptor).st_size
    if end > size:
        raise UsageError(f"the shared memory '{key[:255]}' has {size} bytes now, and {end} are asked for")


def _read(descriptor: int, begin: int, place: Place) -> memoryview:
    """A copy."""
    content = memoryview(bytearray(place.size))
    got = 0
    while got < place.size:
        count = os.preadv(descriptor, [content[got:]], begin + got)
        if not count:
            raise UsageError(f"the shared memory region '{place.region[:255]}' became shorter while it was read")
        got += count
    return content


def _write(descriptor: int, begin: int, part: bytes | memoryview) -> int:
    view, done = memoryview(part), 0
    while done < len(view):
        try:
            done += os.pwrite(descriptor, view[done:], begin + done)
        except OSError as error:
            raise UsageError(f"cannot write to shared memory: {error.strerror}") from error
    return done
