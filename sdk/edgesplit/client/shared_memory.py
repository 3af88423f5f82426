"""The client's side of shared memory: one segment per connection, lent to one exchange at a time.

Inputs lie in front, the answer's room behind them. A connection carries one exchange at a time, and an exchange that is
given up ends its connection: so no memory is ever used for the next while a server may still look at it. Where the
server takes no segments the tensors travel as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from edgesplit.client.request import Question
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.http1.response import Reply
from edgesplit.lazy_import import later
from edgesplit.limits import LIMITS
from edgesplit.oip.protocol import SHARED_FROM, Tensor
from edgesplit.oip.shared_memory import Place
from edgesplit.shared_memory.segment import SUPPORTED, Segment

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

SEGMENT_PATH = "/v2/edgesplit/segment"
_ALIGN = 64
_LEAST = 1 << 20


@dataclass
class Arena:
    """What one connection has to lend. `memory` for `Question.answer`: its `read` finds outputs that were put here."""

    room: int = _LEAST
    """Bytes for answers."""
    segment: Segment | None = None
    region: str = ""
    refused: bool = not SUPPORTED
    _wants: int = field(default=0)

    def begin(self, question: Question) -> Segment | None:
        """A new segment that must be offered to the server before `lend`, or None where none is needed."""
        self._wants = sum(_span(one) for one in _shareable(question.inputs).values())
        needed = self._wants + self.room
        big = self._wants >= SHARED_FROM or self.room > _LEAST
        if self.refused or not big or needed > LIMITS.http_body_bytes:
            return None
        if self.segment is not None and self.segment.size >= needed:
            return None
        self.close()
        self.segment = None
        try:
            return Segment.made(1 << (needed - 1).bit_length() if needed < LIMITS.http_body_bytes // 2 else needed)
        except OSError:
            self.refused = True
            return None

    def offered(self, segment: Segment, reply: Reply) -> None:
        """The server's reply to the offer of `segment`."""
        region = _region_in(reply)
        if region:
            self.segment, self.region = segment, region
        else:
            segment.close()
            self.refused = True

    def lend(self, question: Question) -> tuple[Mapping[str, Place], Place | None]:
        """Put the inputs there: their places, and the room for the answer. Nothing where there is no segment."""
        if self.segment is None or self.segment.size < self._wants + self.room:
            return {}, None
        places: dict[str, Place] = {}
        offset = 0
        for name, tensor in _shareable(question.inputs).items():
            places[name] = Place(self.region, tensor.nbytes, offset)
            whole = np.frombuffer(self.segment.memory, np.uint8, tensor.nbytes, offset)
            np.copyto(whole.view(tensor.dtype.newbyteorder("<")).reshape(tensor.shape), tensor)
            offset += _span(tensor)
        return places, Place(self.region, self.segment.size - offset, offset)

    def learn(self, outputs: Mapping[str, Tensor]) -> None:
        """Make room, from the next exchange on, for answers as large as these."""
        size = sum(_span(one) for one in _shareable(outputs).values())
        self.room = max(self.room, size)

    def close(self) -> None:
        """Lend it no more. The last answer can still be read."""
        if self.segment is not None:
            self.segment.close()

    # What `Question.answer` wants of a Memory

    def check(self, place: Place) -> None:
        """UsageError unless it is there."""
        if self.segment is None or place.region != self.region or place.offset + place.size > self.segment.size:
            raise MalformedMessage(f"the answer says it lies in {place}, which was not lent")

    def read(self, place: Place, *, settled: bool) -> memoryview:
        """A copy: the memory is lent again soon."""
        self.check(place)
        assert self.segment is not None
        return memoryview(bytearray(self.segment.memory[place.offset : place.offset + place.size]))

    def write(self, place: Place, parts: Sequence[bytes | memoryview]) -> None:
        """Only servers write answers."""
        raise UsageError("a client writes no answers")


def offer(segment: Segment) -> bytes:
    """The body of the request that passes the segment's descriptor."""
    return msgspec.json.encode({"byte_size": segment.size})


def _region_in(reply: Reply) -> str:
    if reply.status != 200:
        return ""
    try:
        told = msgspec.json.decode(reply.body, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return ""
    region = told.get("region", "")
    return region if isinstance(region, str) else ""


def _shareable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that are worth a place."""
    return {name: one for name, one in tensors.items() if one.nbytes >= SHARED_FROM and one.dtype.kind in "biuf"}


def _span(tensor: Tensor) -> int:
    """Its bytes, up to where the next may begin."""
    return tensor.nbytes + -tensor.nbytes % _ALIGN
