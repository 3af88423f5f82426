"""External weights of an ONNX graph, found by parsing its bytes: devices have no `onnx` package.

Parses only the necessary part of protobuf's wire format (ModelProto.graph = 7, GraphProto.initializer = 5, and five
fields of TensorProto). The bytes were signed; inconsistent ones are refused all the same, and nothing is read beyond
their end.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from edgesplit.errors import ModelRefused
from edgesplit.runtime import Tensor

_GRAPH, _INITIALIZER = 7, 5
_DIMS, _TYPE, _NAME, _EXTERNAL_DATA = 1, 2, 8, 13
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
NUMPY_TYPES = {
    1: "<f4", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8", 12: "<u4",
    13: "<u8",
}  # fmt: skip
"""numpy type by TensorProto.DataType, where numpy has the type."""


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """An initializer whose bytes are in a file beside the graph."""

    name: str
    type: int
    dims: tuple[int, ...]
    offset: int
    bytes: int

    def array(self, file: mmap.mmap) -> Tensor:
        """The weight as an array in place in `file`; ModelRefused where the file does not contain it."""
        if self.offset < 0 or self.bytes < 0 or self.offset + self.bytes > len(file):
            raise ModelRefused(f"the weight {self.name[:80]!r} is not in its file")
        flat = np.frombuffer(file, np.dtype(NUMPY_TYPES[self.type]), prod(self.dims), self.offset)
        return flat.reshape(self.dims)


def is_shareable(weight: ExternalTensor) -> bool:
    """True if numpy can pass the weight to the engine in place."""
    return (
        weight.type in NUMPY_TYPES
        and prod(weight.dims) * np.dtype(NUMPY_TYPES[weight.type]).itemsize == weight.bytes > 0
    )


def external_tensors(graph: bytes) -> list[ExternalTensor]:
    """Every external initializer of the main graph; ModelRefused where the bytes are not an ONNX model."""
    try:
        return [
            weight
            for number, model_part in _iter_fields(memoryview(graph))
            if number == _GRAPH and isinstance(model_part, memoryview)
            for part, tensor in _iter_fields(model_part)
            if part == _INITIALIZER and isinstance(tensor, memoryview)
            for weight in _external_tensor(tensor)
        ]
    except (IndexError, ValueError, UnicodeDecodeError) as error:
        raise ModelRefused(f"the graph is not an ONNX model: {error}") from error


def _external_tensor(tensor: memoryview) -> Iterator[ExternalTensor]:
    """Yield the tensor if its data are external."""
    name, kind, dims, entries = "", 0, [], {}
    for number, value in _iter_fields(tensor):
        if number == _NAME and isinstance(value, memoryview):
            name = bytes(value).decode()
        elif number == _TYPE and isinstance(value, int):
            kind = value
        elif number == _DIMS:
            dims += [value] if isinstance(value, int) else list(_varints(value))
        elif number == _EXTERNAL_DATA and isinstance(value, memoryview):
            entry = {part: bytes(text).decode() for part, text in _iter_fields(value) if isinstance(text, memoryview)}
            entries[entry.get(1, "")] = entry.get(2, "")
    if entries:
        yield ExternalTensor(name, kind, tuple(dims), int(entries.get("offset") or 0), int(entries.get("length") or -1))


def _iter_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Iterate over a message's fields as (number, value)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_EIGHT, _FOUR):
            size = 8 if wire == _EIGHT else 4
        else:
            raise ValueError(f"a field of wire type {wire}")
        if at + size > len(data):
            raise ValueError("it ends in the middle of a field")
        yield number, data[at : at + size]
        at += size


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
