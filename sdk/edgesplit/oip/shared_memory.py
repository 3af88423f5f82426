"""Where a tensor lies that is not in the body: a part of a shared memory region, as Triton's extension words it.

    {"shared_memory_region": "name", "shared_memory_byte_size": 600000, "shared_memory_offset": 0}

as parameters of an input, of a requested output, and of an output in the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgesplit.errors import MalformedMessage

REGION, BYTE_SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_LARGEST = 2**53


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a region."""

    region: str
    size: int
    offset: int = 0

    def parameters(self) -> dict[str, str | int]:
        """As it travels."""
        offset = {OFFSET: self.offset} if self.offset else {}
        return {REGION: self.region, BYTE_SIZE: self.size, **offset}


class Memory(Protocol):
    """The regions that one request may name. Each call raises UsageError for a place that cannot be had."""

    def check(self, place: Place) -> None:
        """Is it there, and that large, now?"""
        ...

    def read(self, place: Place, *, settled: bool) -> memoryview:
        """What lies there: bytes that nobody can change any more if `settled`, else perhaps the memory itself."""
        ...

    def write(self, place: Place, parts: Sequence[bytes | memoryview]) -> None:
        """Put `parts` there, one behind the other; they fit."""
        ...


def place_of(name: str, parameters: Mapping[str, object]) -> Place | None:
    """Where the tensor `name` lies by its parameters; None where it does not lie in a region. MalformedMessage."""
    region = parameters.get(REGION)
    if region is None:
        return None
    size, offset = parameters.get(BYTE_SIZE), parameters.get(OFFSET, 0)
    if not isinstance(region, str) or not region or len(region) > 255:
        raise MalformedMessage(f"tensor {name[:80]!r}: {REGION} is not a name")
    for word, number in ((BYTE_SIZE, size), (OFFSET, offset)):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= _LARGEST:
            raise MalformedMessage(f"tensor {name[:80]!r}: {word} {str(number)[:80]!r} is not a number of bytes")
    assert isinstance(size, int) and isinstance(offset, int)
    return Place(region, size, offset)
