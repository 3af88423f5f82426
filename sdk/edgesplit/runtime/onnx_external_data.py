"""External weights of a slice's ONNX graph as arrays in place in their file.

The bytes were signed; inconsistent ones are refused all the same, and nothing is read beyond their end.
"""

from __future__ import annotations

import mmap
from math import prod

import numpy as np

from edgesplit.errors import ModelRefused, TrustError
from edgesplit.release.onnx_graph import ExternalWeight, is_external, read_external_weight, read_graph
from edgesplit.runtime import Tensor

NUMPY_TYPES = {
    1: "<f4", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8", 12: "<u4",
    13: "<u8",
}  # fmt: skip
"""numpy type by TensorProto.DataType, where numpy has the type."""


def weight_array(weight: ExternalWeight, file: mmap.mmap) -> Tensor:
    """The weight as an array in place in `file`; ModelRefused where the file does not contain it."""
    if weight.offset + weight.length > len(file):
        raise ModelRefused(f"the weight {weight.name[:80]!r} is not in its file")
    flat = np.frombuffer(file, np.dtype(NUMPY_TYPES[weight.data_type]), prod(weight.dims), weight.offset)
    return flat.reshape(weight.dims)


def is_shareable(weight: ExternalWeight) -> bool:
    """True if numpy can pass the weight to the engine in place."""
    return (
        weight.data_type in NUMPY_TYPES
        and prod(weight.dims) * np.dtype(NUMPY_TYPES[weight.data_type]).itemsize == weight.length > 0
    )


def external_weights(graph: bytes) -> list[ExternalWeight]:
    """Every external weight of the graph; ModelRefused where the bytes are not a slice's graph."""
    try:
        return [read_external_weight(weight) for weight in read_graph(graph).initializers if is_external(weight)]
    except TrustError as error:
        raise ModelRefused(f"the graph is not a slice's: {error}") from error
