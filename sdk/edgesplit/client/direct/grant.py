"""What a lane is: an application's own way to the worker process of one model, which the agent grants and ends.

A lane is a stream socket, and memory with a fixed place for each tensor. A request on it is `REQUEST`, an answer
`ANSWER`; the tensors lie in shared memory, or follow as bytes, in the places that the grant names. The agent's side and
the client's are in docs/protocol.md; nothing here waits or maps anything.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from edgesplit.msgspec_warmup import settle
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec

LANE_PATH = "/v2/edgesplit/lane"
REQUEST = struct.Struct("<QQ")
"""The request's number, from 1, one more each time; microseconds that are left of it."""
ANSWER = struct.Struct("<QQddd")
"""The request's number; a status; seconds that the slices ran, seconds that the plan expects now, and measured over
predicted power (0: unmeasured)."""
ANSWERED, OVER, FAILED = 1, 2, 3
"""The tensors are there; this lane has ended; the model could not. After the last two the agent is to be asked."""
READY = b"\x01"
"""What comes first on a lane, from the agent, with the descriptor of the shared memory if there is any."""
ALIGN = 64
LARGEST = 64 * 2**20
"""Bytes of one lane's tensors."""
MOST_TENSORS = 64
LONGEST_US = 2**40
Count = Annotated[int, Meta(ge=0, le=2**40)]


class LaneTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's place in a lane's memory."""

    name: str
    datatype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=32)]
    offset: Count

    @property
    def bytes(self) -> int:
        """That it takes."""
        return math.prod(self.shape) * oip.DTYPES[self.datatype].itemsize


class LaneWish(msgspec.Struct, frozen=True):
    """What a client asks for: the body of its request to `LANE_PATH`, beside which its end for the worker comes."""

    model: str
    shared: bool = True
    """Tensors in shared memory; else as bytes on the lane."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What it gets."""

    release: str
    row: str
    after: str = ""
    inputs: Annotated[tuple[LaneTensor, ...], Meta(max_length=MOST_TENSORS)]
    outputs: Annotated[tuple[LaneTensor, ...], Meta(max_length=MOST_TENSORS)]
    answers_at: Count
    """Where the outputs begin: behind all inputs."""
    bytes: Annotated[int, Meta(ge=1, le=LARGEST)]
    busy_watts: float | None = None
    idle_watts: float | None = None
    """None: the plan has no power figures."""

    @property
    def is_sound(self) -> bool:
        """Whether every tensor lies where it should, of a type that is known."""
        if not self.answers_at <= self.bytes:
            return False
        return _within(self.inputs, 0, self.answers_at) and _within(self.outputs, self.answers_at, self.bytes)


def _within(tensors: Iterable[LaneTensor], begin: int, end: int) -> bool:
    for one in tensors:
        dtype = oip.DTYPES.get(one.datatype)
        if dtype is None or dtype.hasobject or one.offset % ALIGN:
            return False
        if not begin <= one.offset <= one.offset + one.bytes <= end:
            return False
    return True


def laid_out(specs: Iterable[TensorSpec], begin: int) -> tuple[tuple[LaneTensor, ...], int] | None:
    """A place for each of these from `begin` on, and where they end; None where a size is known only at run time."""
    places: list[LaneTensor] = []
    at = begin
    for spec in specs:
        dtype = oip.DTYPES.get(spec.datatype)
        if dtype is None or dtype.hasobject or min(spec.shape, default=1) < 1 or len(places) == MOST_TENSORS:
            return None
        place = LaneTensor(spec.name, spec.datatype, tuple(spec.shape), at)
        places.append(place)
        at += -(-place.bytes // ALIGN) * ALIGN
        if at > LARGEST:
            return None
    return tuple(places), at


settle(__name__)
