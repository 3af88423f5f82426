"""Memory that the agent and one worker both see: sealed against shrinking, handed out in pieces that come back by
themselves once nobody looks at them any more.

The agent alone makes it and hands it out: a worker writes where it is told to, and nothing it does can make the agent's
own reading fail.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

from edgesplit.errors import Busy
from edgesplit.runtime import Tensor
from edgesplit_agent.worker.placing import Memory, aligned
from edgesplit_agent.worker.talk import Room

SMALLEST_SEGMENT = 2**20
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NUMBERS = itertools.count(1)


@dataclass(eq=False)
class Segment:
    """One piece of memory that another process can map. It goes when nothing refers to it."""

    number: int
    file: int
    memory: Memory

    @property
    def bytes(self) -> int:
        """Its size."""
        return len(self.memory)

    def __post_init__(self) -> None:
        self.address = int(self.memory.ctypes.data)

    def place_of(self, tensor: Tensor) -> int | None:
        """Where in here this tensor's bytes lie, or None."""
        offset = int(tensor.ctypes.data) - self.address
        return offset if offset >= 0 and offset + tensor.nbytes <= self.bytes else None

    def __del__(self) -> None:
        os.close(self.file)


def make_segment(size: int) -> Segment:
    """New memory, of a size that never changes."""
    file = os.memfd_create("edgesplit:tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        return map_segment(file, size)
    except BaseException:
        os.close(file)
        raise


def map_segment(file: int, size: int) -> Segment:
    """That file's memory, which somebody else shares; the descriptor is the segment's from now on."""
    return Segment(next(_NUMBERS), file, np.frombuffer(mmap.mmap(file, size), np.uint8))


class TensorRoom:
    """Pieces of shared memory, at most so many bytes in all. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._free: dict[int, list[tuple[int, int]]] = {}
        """By segment: (offset, bytes) in order, no two touching."""
        self._returned: deque[tuple[int, int, int]] = deque()
        """What came back. Whoever lets go of the last view may hold any lock: it only writes this down."""

    def take(self, size: int) -> tuple[Room, Memory]:
        """Room for so many bytes, and its memory. It is given back when that array and all views of it are gone.
        Busy where there is none."""
        size = max(aligned(size), aligned(1))
        with self._lock:
            self._collect()
            room = self._cut(size)
            if room is None:
                self._grow(size)
                room = self._cut(size)
            assert room is not None
            segment = self._segments[room.segment]
            base = segment.memory.base
            assert base is not None
            memory = np.frombuffer(base, np.uint8, room.bytes, room.offset)
        weakref.finalize(memory, self._returned.append, (room.segment, room.offset, room.bytes)).atexit = False
        return room, memory

    def segment(self, number: int) -> Segment:
        """The segment of that number; KeyError."""
        return self._segments[number]

    def find(self, tensor: Tensor) -> tuple[Segment, int] | None:
        """The segment in which this tensor's bytes lie, and where; None where they lie elsewhere."""
        for segment in list(self._segments.values()):
            if (offset := segment.place_of(tensor)) is not None:
                return segment, offset
        return None

    @property
    def numbers(self) -> frozenset[int]:
        """Of the segments there are."""
        return frozenset(self._segments)

    @property
    def held_bytes(self) -> int:
        """Shared memory in all."""
        return sum(one.bytes for one in list(self._segments.values()))

    def _cut(self, size: int) -> Room | None:
        for number, spans in self._free.items():
            for place, (offset, length) in enumerate(spans):
                if length >= size:
                    rest = [(offset + size, length - size)] if length > size else []
                    spans[place : place + 1] = rest
                    return Room(number, offset, size)
        return None

    def _grow(self, size: int) -> None:
        """Another segment; those of which nothing is used give way to it."""
        for number in [number for number in self._segments if self._is_idle(number)]:
            del self._segments[number], self._free[number]
        left = self._most_bytes - self.held_bytes
        wanted = min(max(2 * size, SMALLEST_SEGMENT), left)
        if wanted < size:
            raise Busy(f"no room for {size} bytes of tensors beside those in use: at most {self._most_bytes} in all")
        try:
            made = make_segment(-(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE)
        except OSError as error:
            raise Busy(f"no memory for {size} bytes of tensors: {error.strerror}") from error
        self._segments[made.number] = made
        self._free[made.number] = [(0, made.bytes)]

    def _is_idle(self, number: int) -> bool:
        return self._free[number] == [(0, self._segments[number].bytes)]

    def _collect(self) -> None:
        while self._returned:
            number, offset, size = self._returned.popleft()
            spans = sorted([*self._free[number], (offset, size)])
            self._free[number] = _joined(spans)


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
