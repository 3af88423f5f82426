"""Tensors in shared memory: written once, described by segment and offset, read in place.

Text (BYTES) is laid out as in the Open Inference Protocol: each element after its length. Reading checks every bound,
because the description may come from a process that a malicious model has taken over.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgesplit.errors import MalformedMessage
from edgesplit.lazy_import import lazy_import
from edgesplit.oip import protocol as oip
from edgesplit.runtime import Tensor
from edgesplit_agent.worker.ipc import SharedBuffer, SharedTensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Memory = npt.NDArray[np.uint8]
else:
    np = lazy_import("numpy")
    Memory = Any

ALIGN = 64
"""Tensors begin at multiples of this many bytes."""
IN_PLACE_ALIGN = 8
"""A tensor is read in place if its offset is a multiple of this."""
_LENGTH = struct.Struct("<I")


def aligned(size: int) -> int:
    """`size` rounded up to the next offset at which a tensor may begin."""
    return -(-size // ALIGN) * ALIGN


def pack(tensor: Tensor) -> Tensor:
    """The tensor as its bytes are laid out: contiguous, text as bytes after their lengths."""
    if tensor.dtype == object:
        raws = [element.encode() if isinstance(element, str) else bytes(element) for element in tensor.ravel().tolist()]
        return np.frombuffer(b"".join(_LENGTH.pack(len(raw)) + raw for raw in raws), np.uint8)
    return np.ascontiguousarray(tensor)


def packed_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that these packed tensors take one after another."""
    return sum(aligned(tensor.nbytes) for tensor in tensors.values())


def write_tensors(tensors: Mapping[str, Tensor], buffer: SharedBuffer, memory: Memory) -> tuple[SharedTensor, ...]:
    """Write the tensors into `memory`, the memory of buffer `buffer`, which must be large enough; return their
    references."""
    placed, at = [], 0
    for name, tensor in tensors.items():
        flat = pack(tensor)
        size = flat.nbytes
        if size:
            memory[at : at + size] = flat.reshape(-1).view(np.uint8)
        placed.append(SharedTensor(name, buffer.segment, buffer.offset + at, size, oip.datatype(tensor), tensor.shape))
        at += aligned(size)
    return tuple(placed)


def read_tensor(ref: SharedTensor, memory: Memory, base_offset: int = 0) -> Tensor:
    """The referenced tensor, in place and read-only (text is copied), from `memory`, which starts at `base_offset`.

    MalformedMessage where the reference exceeds the memory or contradicts its shape.
    """
    at = ref.offset - base_offset
    if at < 0 or at + ref.bytes > len(memory) or ref.offset % IN_PLACE_ALIGN:
        raise MalformedMessage(f"the tensor {ref.name[:80]!r} lies outside of its buffer")
    raw = memory[at : at + ref.bytes]
    count = math.prod(ref.shape)
    if ref.datatype == "BYTES":
        return _read_text(ref, raw.tobytes(), count)
    dtype = oip.DTYPES.get(ref.datatype)
    if dtype is None or count * dtype.itemsize != ref.bytes:
        raise MalformedMessage(f"the tensor {ref.name[:80]!r} does not have the size of its shape")
    tensor = raw.view(dtype).reshape(ref.shape)
    tensor.flags.writeable = False
    return tensor


def _read_text(ref: SharedTensor, raw: bytes, count: int) -> Tensor:
    elements: list[bytes] = []
    at = 0
    if count * _LENGTH.size > len(raw):
        raise MalformedMessage(f"the text {ref.name[:80]!r} does not have the size of its shape")
    while len(elements) < count and at + _LENGTH.size <= len(raw):
        size = _LENGTH.unpack_from(raw, at)[0]
        at += _LENGTH.size + size
        elements.append(raw[at - size : at])
    if len(elements) != count or at != len(raw):
        raise MalformedMessage(f"the text {ref.name[:80]!r} does not have the size of its shape")
    array = np.empty(count, object)
    array[:] = elements
    return array.reshape(ref.shape)
