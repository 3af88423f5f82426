"""Types of the tensors of a model in the Open Inference Protocol's notation, independent of the model's format, and
random tensors of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgesplit.oip.datatypes import DTYPES
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensor

NUMBER_DTYPES: Mapping[str, np.dtype[Any]] = {name: dtype for name, dtype in DTYPES.items() if dtype.kind != "O"}
"""numpy's dtype of every datatype that may exist between layers."""
ORT_DATATYPES: Mapping[str, str] = {
    **{dtype.name: name for name, dtype in NUMBER_DTYPES.items()},
    "float": "FP32",
    "double": "FP64",
}
"""Datatypes by onnxruntime's names of tensor element types, which are numpy's names but for two."""


def item_bytes(datatype: str) -> int:
    """Bytes of one element; 1 where that is unknown."""
    return NUMBER_DTYPES[datatype].itemsize if datatype in NUMBER_DTYPES else 1


def noise(specs: Iterable[TensorSpec], seed: int) -> dict[str, Tensor]:
    """Random tensors from `seed`: floats between 0 and 1, bytes of all values, ones for other integers, which may be
    lengths or indices. Open lengths are 1."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for spec in specs:
        shape, dtype = [max(length, 1) for length in spec.shape], NUMBER_DTYPES[spec.datatype]
        if dtype.kind == "f":
            tensors[spec.name] = rng.random(shape).astype(dtype)
        elif dtype in (np.uint8, np.int8):
            tensors[spec.name] = rng.integers(0, 256, shape, dtype=np.uint8).view(dtype)
        else:
            tensors[spec.name] = np.ones(shape, dtype)
    return tensors


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
        return item_bytes(self.datatype)

    @property
    def bytes(self) -> int:
        """Size in bytes, with the lengths of the trial run."""
        count = 1
        for length in self.concrete_shape:
            count *= length
        return count * self.item_bytes
