"""Memory that the agent and one worker both see, handed out in pieces that come back by themselves once nobody looks
at them any more.

The agent alone makes it (`edgesplit.segments`: sealed against shrinking) and hands it out: a worker writes where it is
told to, and nothing it does can make the agent's own reading fail.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

from edgesplit.errors import Busy
from edgesplit.segments import Segment
from edgesplit_agent.worker.placing import Memory, aligned

SMALLEST_SEGMENT = 2**20


@dataclass(frozen=True)
class Piece:
    """Part of a segment."""

    segment: Segment
    offset: int
    memory: Memory


class TensorRoom:
    """Pieces of shared memory, at most so many bytes in all. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._segments: dict[int, Segment] = {}
        self._free: dict[int, list[tuple[int, int]]] = {}
        """By segment: (offset, bytes) in order, no two touching."""
        self._returned: deque[tuple[int, int, int]] = deque()
        """What came back. Whoever lets go of the last view may hold any lock: it only writes this down."""

    def take(self, size: int) -> Piece:
        """So many bytes. They are given back when the piece's memory and all views of it are gone. Busy where there is
        no room."""
        size = max(aligned(size), aligned(1))
        with self._lock:
            self._collect()
            place = self._cut(size)
            if place is None:
                self._grow(size)
                place = self._cut(size)
            assert place is not None
            number, offset = place
            segment = self._segments[number]
            memory = np.frombuffer(segment.memory, np.uint8, size, offset)
        weakref.finalize(memory, self._returned.append, (number, offset, size)).atexit = False
        return Piece(segment, offset, memory)

    @property
    def held_bytes(self) -> int:
        """Shared memory in all."""
        return sum(one.size for one in list(self._segments.values()))

    def _cut(self, size: int) -> tuple[int, int] | None:
        for number, spans in self._free.items():
            for place, (offset, length) in enumerate(spans):
                if length >= size:
                    rest = [(offset + size, length - size)] if length > size else []
                    spans[place : place + 1] = rest
                    return number, offset
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
