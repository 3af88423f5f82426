"""References to tensors in shared memory, in the format of Triton's extension.

    {"shared_memory_region": "name", "shared_memory_byte_size": 600000, "shared_memory_offset": 0}

They are parameters of an input, of a requested output, and of an output in the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgesplit.errors import MalformedMessage

REGION, BYTE_SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_MAX_NUMBER = 2**53


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A part of a shared memory region: `size` bytes at `offset`."""

    region: str
    size: int
    offset: int = 0

    def to_parameters(self) -> dict[str, str | int]:
        """The reference as request or response parameters."""
        offset = {OFFSET: self.offset} if self.offset else {}
        return {REGION: self.region, BYTE_SIZE: self.size, **offset}


class Memory(Protocol):
    """The shared memory that one request may use. Each method raises UsageError for a reference that is not
    available."""

    def check(self, reference: TensorRef) -> None:
        """Raise unless the referenced bytes exist now."""
        ...

    def read(self, reference: TensorRef, *, stable: bool) -> memoryview:
        """The referenced bytes: with `stable` bytes that no other program can change any more, else perhaps a view of
        the memory itself."""
        ...

    def write(self, reference: TensorRef, parts: Sequence[bytes | memoryview]) -> None:
        """Write `parts` one behind the other to the referenced bytes; they fit."""
        ...


def parse_reference(name: str, parameters: Mapping[str, object]) -> TensorRef | None:
    """The reference in the parameters of tensor `name`; None if the tensor does not lie in shared memory.
    MalformedMessage if the reference is invalid."""
    region = parameters.get(REGION)
    if region is None:
        return None
    size, offset = parameters.get(BYTE_SIZE), parameters.get(OFFSET, 0)
    if not isinstance(region, str) or not region or len(region) > 255:
        raise MalformedMessage(f"tensor {name[:80]!r}: {REGION} is not a name")
    for word, number in ((BYTE_SIZE, size), (OFFSET, offset)):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _MAX_NUMBER:
            raise MalformedMessage(f"tensor {name[:80]!r}: {word} {str(number)[:80]!r} is not a number of bytes")
    assert isinstance(size, int) and isinstance(offset, int)
    return TensorRef(region, size, offset)
