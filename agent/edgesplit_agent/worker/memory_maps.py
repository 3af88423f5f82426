"""Which shared memory one worker has mapped: the agent's own and that of clients, passed when it is first needed and
forgotten when it is gone."""

from __future__ import annotations

import os
import weakref

from edgesplit.runtime import Tensor
from edgesplit.shared_memory.segment import Segment
from edgesplit_agent.worker.ipc import Channel, Forget, Map, ToAgent
from edgesplit_agent.worker.tensor_refs import IN_PLACE

SMALLEST = 4_096
"""Tensors below are written anew: that is less work than looking for them."""
TELLING_S = 60.0
"""A worker that reads nothing for so long is given up sooner by whoever watches it."""


class Shared:
    """Segments by the number that this worker knows them by."""

    def __init__(self, channel: Channel[ToAgent]) -> None:
        self._channel = channel
        self._numbers: weakref.WeakKeyDictionary[Segment, int] = weakref.WeakKeyDictionary()
        self._known: dict[int, tuple[weakref.ref[Segment], int]] = {}
        self._next = 1

    @property
    def bytes(self) -> int:
        """Of all that is mapped."""
        return sum(size for _, size in list(self._known.values()))

    def place_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """The segment's number, and where in it this tensor can be read; None where it must be written first."""
        if tensor.nbytes < SMALLEST or tensor.dtype.hasobject or not tensor.flags.c_contiguous:
            return None
        found = Segment.of(tensor)
        if found is None or found[1] % IN_PLACE:
            return None
        try:
            return self.number(found[0]), found[1]
        except ValueError:  # its client has just closed it; the tensor is whole, for whoever reads it here
            return None

    def number(self, segment: Segment) -> int:
        """What the worker knows it by, from now on. ValueError where it is closed."""
        known = self._numbers.get(segment)
        if known is not None:
            return known
        try:
            descriptor = os.dup(segment.descriptor)
        except OSError as error:
            raise ValueError("closed") from error
        number, self._next = self._next, self._next + 1
        try:
            self._channel.send(Map(number, segment.size), (descriptor,), TELLING_S)
        finally:
            os.close(descriptor)
        self._numbers[segment] = number
        self._known[number] = (weakref.ref(segment), segment.size)
        return number

    def tidy(self) -> None:
        """Have the worker forget what is closed."""
        gone = [number for number, (segment, _) in self._known.items() if _is_closed(segment())]
        if gone:
            self._channel.send(Forget(tuple(gone)), (), TELLING_S)
            for number in gone:
                del self._known[number]


def _is_closed(segment: Segment | None) -> bool:
    return segment is None or segment.descriptor < 0
