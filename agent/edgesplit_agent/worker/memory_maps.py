"""Shared-memory segments mapped by one worker: the agent's own and those of clients.

A segment is passed to the worker when it is first needed, and unmapped when it is closed.
"""

from __future__ import annotations

import os
import weakref

from edgesplit.runtime import Tensor
from edgesplit.shared_memory.segment import Segment
from edgesplit_agent.worker.ipc import Channel, MapSegment, ToAgent, UnmapSegments
from edgesplit_agent.worker.tensor_refs import IN_PLACE_ALIGN

MIN_IN_PLACE_BYTES = 4_096
"""Smaller tensors are copied: that costs less than finding their segment."""
SEND_TIMEOUT_S = 60.0
"""Send timeout in seconds; a worker that reads nothing for so long is killed sooner by its watchdog."""


class MemoryMaps:
    """Segments mapped by this worker, by the number under which it knows them."""

    def __init__(self, channel: Channel[ToAgent]) -> None:
        self._channel = channel
        self._numbers: weakref.WeakKeyDictionary[Segment, int] = weakref.WeakKeyDictionary()
        self._known: dict[int, tuple[weakref.ref[Segment], int]] = {}
        self._next = 1

    @property
    def bytes(self) -> int:
        """Bytes of all mapped segments."""
        return sum(size for _, size in list(self._known.values()))

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Segment number and offset at which the worker can read this tensor; None where it must be copied first."""
        if tensor.nbytes < MIN_IN_PLACE_BYTES or tensor.dtype.hasobject or not tensor.flags.c_contiguous:
            return None
        located = Segment.containing(tensor)
        if located is None or located[1] % IN_PLACE_ALIGN:
            return None
        try:
            return self.number(located[0]), located[1]
        except ValueError:  # its client has just closed it; the tensor itself can still be read here
            return None

    def number(self, segment: Segment) -> int:
        """The segment's number, mapping it in the worker first if needed. ValueError where the segment is closed."""
        known = self._numbers.get(segment)
        if known is not None:
            return known
        try:
            descriptor = os.dup(segment.descriptor)
        except OSError as error:
            raise ValueError("closed") from error
        number, self._next = self._next, self._next + 1
        try:
            self._channel.send(MapSegment(number, segment.size), (descriptor,), SEND_TIMEOUT_S)
        finally:
            os.close(descriptor)
        self._numbers[segment] = number
        self._known[number] = (weakref.ref(segment), segment.size)
        return number

    def unmap_closed(self) -> None:
        """Have the worker unmap the segments that were closed."""
        closed = [number for number, (segment, _) in self._known.items() if _is_closed(segment())]
        if closed:
            self._channel.send(UnmapSegments(tuple(closed)), (), SEND_TIMEOUT_S)
            for number in closed:
                del self._known[number]


def _is_closed(segment: Segment | None) -> bool:
    return segment is None or segment.descriptor < 0
