"""Types of the tensors between layers, in the Open Inference Protocol's words, whatever the model's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
}
"""Bytes of one element."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """What is known of one tensor of a model."""

    datatype: str
    """Of the Open Inference Protocol; empty for what cannot leave a layer (sequences, strings, 8-bit floats)."""
    shape: tuple[int, ...]
    """-1 is a length that depends on the data."""
    seen: tuple[int, ...]
    """The same with lengths from a trial run in place of -1: for sizes and prices."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element; 1 where that is unknown."""
        return ITEM_BYTES.get(self.datatype, 1)

    @property
    def bytes(self) -> int:
        """Size of the tensor as it was seen."""
        count = 1
        for length in self.seen:
            count *= length
        return count * self.item_bytes
