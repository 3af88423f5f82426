"""Memory that the agent and one worker both see, handed out in pieces that come back by themselves once nobody looks
at them any more.

The agent alone makes it (`edgesplit.shared_memory.segment`: sealed against shrinking) and hands it out: a worker writes
where it is told to, and nothing it does can make the agent's own reading fail.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from edgesplit.errors import Busy
from edgesplit.lazy_import import later
from edgesplit.shared_memory.segment import Segment
from edgesplit_agent.worker.tensor_refs import Memory, aligned

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

SMALLEST_SEGMENT = 2**20


class Piece(NamedTuple):
    """Part of a segment."""

    segment: Segment
    offset: int
    memory: Memory


class _Place(NamedTuple):
    segment: int
    offset: int
    bytes: int


class _Watched(weakref.ref[Memory]):
    """Knows which place is free when that memory is gone."""

    place: _Place


class TensorRoom:
    """Pieces of shared memory, at most so many bytes in all. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._segments: dict[int, Segment] = {}
        self._free: dict[int, list[tuple[int, int]]] = {}
        """By segment: (offset, bytes) in order, no two touching."""
        self._out: dict[_Place, _Watched] = {}
        self._back: defaultdict[int, deque[_Place]] = defaultdict(deque)
        """What came back, by size: the next of that size takes it. Whoever lets go of the last view may hold any lock,
        this one too, so that nothing but an append happens then."""

    def take(self, size: int) -> Piece:
        """So many bytes. They are given back when the piece's memory and all views of it are gone. Busy where there is
        no room."""
        size = max(aligned(size), aligned(1))
        with self._lock:
            place = self._back[size].pop() if self._back.get(size) else self._found(size)
            segment = self._segments[place.segment]
            memory = np.frombuffer(segment.memory, np.uint8, size, place.offset)
            watched = _Watched(memory, self._gone)
            watched.place = place
            self._out[place] = watched
        return Piece(segment, place.offset, memory)

    @property
    def held_bytes(self) -> int:
        """Shared memory in all."""
        return sum(one.size for one in list(self._segments.values()))

    def _gone(self, watched: weakref.ref[Memory]) -> None:
        assert isinstance(watched, _Watched)
        del self._out[watched.place]
        self._back[watched.place.bytes].append(watched.place)

    def _found(self, size: int) -> _Place:
        place = self._cut(size)
        if place is None:
            self._collect()
            place = self._cut(size)
        if place is None:
            self._grow(size)
            place = self._cut(size)
        assert place is not None
        return place

    def _cut(self, size: int) -> _Place | None:
        for number, spans in self._free.items():
            for at, (offset, length) in enumerate(spans):
                if length >= size:
                    spans[at : at + 1] = [(offset + size, length - size)] if length > size else []
                    return _Place(number, offset, size)
        return None

    def _grow(self, size: int) -> None:
        """Another segment; those of which nothing is used give way to it."""
        for number in [number for number in self._segments if self._is_idle(number)]:
            del self._free[number]
            self._segments.pop(number).close()
        left = self._most_bytes - self.held_bytes
        wanted = min(max(2 * size, SMALLEST_SEGMENT), left)
        if wanted < size:
            raise Busy(f"no room for {size} bytes of tensors beside those in use: at most {self._most_bytes} in all")
        try:
            made = Segment.made(-(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE)
        except OSError as error:
            raise Busy(f"no memory for {size} bytes of tensors: {error.strerror}") from error
        number = next(self._numbers)
        self._segments[number] = made
        self._free[number] = [(0, made.size)]

    def __del__(self) -> None:
        for segment in self._segments.values():
            segment.close()

    def _is_idle(self, number: int) -> bool:
        return self._free[number] == [(0, self._segments[number].size)]

    def _collect(self) -> None:
        """Join what came back to what is free."""
        returned: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for place in _emptied(self._back):
            returned[place.segment].append((place.offset, place.bytes))
        for number, spans in returned.items():
            self._free[number] = _joined(sorted([*self._free[number], *spans]))


def _emptied(back: defaultdict[int, deque[_Place]]) -> Iterator[_Place]:
    for places in list(back.values()):
        while places:
            yield places.pop()


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring spans as one."""
    joined = spans[:1]
    for offset, size in spans[1:]:
        before, length = joined[-1]
        if before + length == offset:
            joined[-1] = (before, length + size)
        else:
            joined.append((offset, size))
    return joined
