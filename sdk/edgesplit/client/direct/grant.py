"""Wire format of direct lanes: a lane is a channel from an application straight to one model's worker process.

The agent grants and closes lanes. A lane is a stream socket, and memory with a fixed place for each tensor. A request
on it is `REQUEST`, an answer `ANSWER`; the tensors lie in shared memory, or follow as bytes in the places that the
grant names. Both sides are described in docs/protocol.md; nothing here waits or maps memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec

LANE_PATH = "/v2/edgesplit/lane"
REQUEST = struct.Struct("<QQ")
"""Sequence number of the request, from 1; microseconds left until its deadline."""
ANSWER = struct.Struct("<QQddd")
"""Sequence number of the request; status; seconds that the slices ran; seconds that the plan expects now; measured
power divided by predicted power (0: unmeasured)."""
ANSWERED, CLOSED, FAILED = 1, 2, 3
"""Statuses of an answer: the tensors are there; the lane has ended (`CLOSED`); the model failed. After the last two the
request must go through the agent."""
READY = b"\x01"
"""First byte on a lane, sent by the agent, with the descriptor of the shared memory if there is any."""
ALIGN = 64
MAX_BYTES = 64 * 2**20
"""Most bytes of one lane's tensors."""
MAX_TENSORS = 64
MAX_TIME_US = 2**40
Count = Annotated[int, Meta(ge=0, le=2**40)]


class LaneTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's place in a lane's memory."""

    name: str
    datatype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=32)]
    offset: Count

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * oip.DTYPES[self.datatype].itemsize


class LaneRequest(msgspec.Struct, frozen=True):
    """A client's request for a lane: the body sent to `LANE_PATH`. The worker's end of the socket pair is passed along
    with it."""

    model: str
    shared: bool = True
    """Whether tensors lie in shared memory; otherwise they travel as bytes on the lane."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's answer: what the lane runs, and the layout of its memory."""

    release: str
    row: str
    split_after: str = ""
    inputs: Annotated[tuple[LaneTensor, ...], Meta(max_length=MAX_TENSORS)]
    outputs: Annotated[tuple[LaneTensor, ...], Meta(max_length=MAX_TENSORS)]
    outputs_offset: Count
    """Offset of the first output, behind all inputs."""
    bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    busy_watts: float | None = None
    idle_watts: float | None = None
    """None if the plan has no power figures."""

    @property
    def is_valid(self) -> bool:
        """Whether every tensor lies in its part of the memory and has a known data type."""
        if not self.outputs_offset <= self.bytes:
            return False
        return _lie_within(self.inputs, 0, self.outputs_offset) and _lie_within(
            self.outputs, self.outputs_offset, self.bytes
        )


def _lie_within(tensors: Iterable[LaneTensor], begin: int, end: int) -> bool:
    for tensor in tensors:
        dtype = oip.DTYPES.get(tensor.datatype)
        if dtype is None or dtype.hasobject or tensor.offset % ALIGN:
            return False
        if not begin <= tensor.offset <= tensor.offset + tensor.bytes <= end:
            return False
    return True


def layout_tensors(specs: Iterable[TensorSpec], begin: int) -> tuple[tuple[LaneTensor, ...], int] | None:
    """A place for each tensor from offset `begin` on, and the offset behind the last; None if a size is known only at
    run time or a limit is exceeded."""
    tensors: list[LaneTensor] = []
    offset = begin
    for spec in specs:
        dtype = oip.DTYPES.get(spec.datatype)
        if dtype is None or dtype.hasobject or min(spec.shape, default=1) < 1 or len(tensors) == MAX_TENSORS:
            return None
        tensor = LaneTensor(spec.name, spec.datatype, tuple(spec.shape), offset)
        tensors.append(tensor)
        offset += -(-tensor.bytes // ALIGN) * ALIGN
        if offset > MAX_BYTES:
            return None
    return tuple(tensors), offset


warm_up_structs(__name__)
