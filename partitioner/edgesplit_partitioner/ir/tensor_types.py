"""Types of the tensors of a model in the Open Inference Protocol's notation, independent of the model's format."""

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
"""Bytes of one element by datatype."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Datatype and shape of one tensor of a model."""

    datatype: str
    """Datatype in the Open Inference Protocol's notation; empty for types that cannot cross a cut (sequences, strings,
    8-bit floats)."""
    shape: tuple[int, ...]
    """Declared shape; -1 is a length that depends on the data."""
    concrete_shape: tuple[int, ...]
    """The shape with lengths from a trial run in place of -1, for sizes and costs."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element; 1 where that is unknown."""
        return ITEM_BYTES.get(self.datatype, 1)

    @property
    def bytes(self) -> int:
        """Size in bytes, with the lengths of the trial run."""
        count = 1
        for length in self.concrete_shape:
            count *= length
        return count * self.item_bytes
