"""Tensors in shared memory: written once, described by where they lie, read in place.

Text (BYTES) lies as the Open Inference Protocol has it: each element after its length. Reading checks every bound: the
description may come from a process that a model has taken over.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgesplit.errors import MalformedMessage
from edgesplit.lazy_import import later
from edgesplit.oip import protocol as oip
from edgesplit.runtime import Tensor
from edgesplit_agent.worker.ipc import Placed, Room

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Memory = npt.NDArray[np.uint8]
else:
    np = later("numpy")
    Memory = Any

ALIGN = 64
IN_PLACE = 8
"""A tensor is read where it lies if it begins at a multiple of this."""
_LENGTH = struct.Struct("<I")


def aligned(size: int) -> int:
    """The next size at which another tensor may begin."""
    return -(-size // ALIGN) * ALIGN


def packed(tensor: Tensor) -> Tensor:
    """The tensor as its bytes will lie: contiguous, text as bytes after their lengths."""
    if tensor.dtype == object:
        raws = [one.encode() if isinstance(one, str) else bytes(one) for one in tensor.ravel().tolist()]
        return np.frombuffer(b"".join(_LENGTH.pack(len(raw)) + raw for raw in raws), np.uint8)
    return np.ascontiguousarray(tensor)


def room_for(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that these tensors, packed, take one after another."""
    return sum(aligned(tensor.nbytes) for tensor in tensors.values())


def put(tensors: Mapping[str, Tensor], room: Room, memory: Memory) -> tuple[Placed, ...]:
    """Write them into that room, whose memory this is, and which is large enough."""
    placed, at = [], 0
    for name, tensor in tensors.items():
        flat = packed(tensor)
        size = flat.nbytes
        if size:
            memory[at : at + size] = flat.reshape(-1).view(np.uint8)
        placed.append(Placed(name, room.segment, room.offset + at, size, oip.datatype(tensor), tensor.shape))
        at += aligned(size)
    return tuple(placed)


def get(placed: Placed, memory: Memory, begins: int = 0) -> Tensor:
    """The tensor there, in place and read-only (text is copied), in memory that `begins` at that place of its segment.
    MalformedMessage where it does not lie in it."""
    at = placed.offset - begins
    if at < 0 or at + placed.bytes > len(memory) or placed.offset % IN_PLACE:
        raise MalformedMessage(f"the tensor {placed.name[:80]!r} does not lie where it should")
    raw = memory[at : at + placed.bytes]
    count = math.prod(placed.shape)
    if placed.datatype == "BYTES":
        return _text(placed, raw.tobytes(), count)
    dtype = oip.DTYPES.get(placed.datatype)
    if dtype is None or count * dtype.itemsize != placed.bytes:
        raise MalformedMessage(f"the tensor {placed.name[:80]!r} is not what its shape says")
    found = raw.view(dtype).reshape(placed.shape)
    found.flags.writeable = False
    return found


def _text(placed: Placed, raw: bytes, count: int) -> Tensor:
    found: list[bytes] = []
    at = 0
    if count * _LENGTH.size > len(raw):
        raise MalformedMessage(f"the text {placed.name[:80]!r} is not what its shape says")
    while len(found) < count and at + _LENGTH.size <= len(raw):
        size = _LENGTH.unpack_from(raw, at)[0]
        at += _LENGTH.size + size
        found.append(raw[at - size : at])
    if len(found) != count or at != len(raw):
        raise MalformedMessage(f"the text {placed.name[:80]!r} is not what its shape says")
    array = np.empty(count, object)
    array[:] = found
    return array.reshape(placed.shape)
