"""Allocator of shared memory for tensors: blocks return by themselves when no view of them is left.

Only the agent creates segments (`edgesplit.shared_memory.segment`: sealed against shrinking) and hands out blocks.
Nothing that a worker writes or does can make the agent's own reads fail.
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
from edgesplit.lazy_import import lazy_import
from edgesplit.shared_memory.segment import Segment
from edgesplit_agent.worker.tensor_refs import Memory, aligned

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")

MIN_SEGMENT_BYTES = 2**20
"""Minimum size of a segment in bytes."""


class TensorBlock(NamedTuple):
    """A block of a segment."""

    segment: Segment
    offset: int
    memory: Memory


class _Span(NamedTuple):
    segment: int
    offset: int
    bytes: int


class _BlockRef(weakref.ref[Memory]):
    """Weak reference to a block's memory that holds the span to be freed with it."""

    span: _Span


class TensorAllocator:
    """Allocates blocks of shared memory, at most `max_bytes` in all. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._segments: dict[int, Segment] = {}
        self._free: dict[int, list[tuple[int, int]]] = {}
        """By segment: (offset, bytes) in order, no two touching."""
        self._allocated: dict[_Span, _BlockRef] = {}
        self._returned: defaultdict[int, deque[_Span]] = defaultdict(deque)
        """Freed spans by size; the next allocation of that size takes one. The last view may be dropped by a thread
        that holds any lock, this one included (garbage collection), so freeing only appends here and takes no lock."""

    def allocate(self, size: int) -> TensorBlock:
        """Allocate a block; it is freed when its memory and all views of it are gone. Busy where there is no room."""
        size = max(aligned(size), aligned(1))
        with self._lock:
            span = self._returned[size].pop() if self._returned.get(size) else self._find_span(size)
            segment = self._segments[span.segment]
            memory = np.frombuffer(segment.memory, np.uint8, size, span.offset)
            reference = _BlockRef(memory, self._on_freed)
            reference.span = span
            self._allocated[span] = reference
        return TensorBlock(segment, span.offset, memory)

    @property
    def held_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in list(self._segments.values()))

    def _on_freed(self, reference: weakref.ref[Memory]) -> None:
        """Callback of the weak reference: queue the span for reuse."""
        assert isinstance(reference, _BlockRef)
        del self._allocated[reference.span]
        self._returned[reference.span.bytes].append(reference.span)

    def _find_span(self, size: int) -> _Span:
        """A free span of this size: cut from what is free, then from what was returned, then from a new segment."""
        # Merging is deferred until first fit fails: equal sizes recur, and are served from `_returned` without it.
        span = self._cut_span(size)
        if span is None:
            self._collect()
            span = self._cut_span(size)
        if span is None:
            self._grow(size)
            span = self._cut_span(size)
        assert span is not None
        return span

    def _cut_span(self, size: int) -> _Span | None:
        """First fit among the free spans; None where none is large enough."""
        for number, spans in self._free.items():
            for index, (offset, length) in enumerate(spans):
                if length >= size:
                    spans[index : index + 1] = [(offset + size, length - size)] if length > size else []
                    return _Span(number, offset, size)
        return None

    def _grow(self, size: int) -> None:
        """Create a segment, after closing those that are entirely unused. Busy where the limit or the machine has no
        room."""
        for number in [number for number in self._segments if self._is_unused(number)]:
            del self._free[number]
            self._segments.pop(number).close()
        left_bytes = self._max_bytes - self.held_bytes
        wanted_bytes = min(max(2 * size, MIN_SEGMENT_BYTES), left_bytes)
        if wanted_bytes < size:
            raise Busy(f"no room for {size} bytes of tensors beside those in use: at most {self._max_bytes} in all")
        try:
            segment = Segment.create(-(-wanted_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except OSError as error:
            raise Busy(f"no memory for {size} bytes of tensors: {error.strerror}") from error
        number = next(self._numbers)
        self._segments[number] = segment
        self._free[number] = [(0, segment.size)]

    def __del__(self) -> None:
        for segment in self._segments.values():
            segment.close()

    def _is_unused(self, number: int) -> bool:
        return self._free[number] == [(0, self._segments[number].size)]

    def _collect(self) -> None:
        """Merge the returned spans into the free lists."""
        returned: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for span in _drain(self._returned):
            returned[span.segment].append((span.offset, span.bytes))
        for number, spans in returned.items():
            self._free[number] = _merge_spans(sorted([*self._free[number], *spans]))


def _drain(returned: defaultdict[int, deque[_Span]]) -> Iterator[_Span]:
    for spans in list(returned.values()):
        while spans:
            yield spans.pop()


def _merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted spans with neighbours merged."""
    joined = spans[:1]
    for offset, size in spans[1:]:
        before, length = joined[-1]
        if before + length == offset:
            joined[-1] = (before, length + size)
        else:
            joined.append((offset, size))
    return joined
