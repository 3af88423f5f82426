"""Strict reader of a slice's ONNX file, as far as needed to identify its content.

It is stricter than protobuf: an unexpected field, a repeated singular field, and what
`edgesplit.release.protobuf` refuses, is a TrustError. Nodes, tensors and declarations are returned as raw bytes. Field
numbers are those of onnx.proto.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from edgesplit.errors import TrustError
from edgesplit.release.protobuf import iter_fields

FieldKind = Literal["one number", "numbers", "one", "many"]
"""Type of a field: a varint or bytes, singular or repeated."""
_MODEL: Final[Mapping[int, FieldKind]] = {
    1: "one number",  # ir_version
    2: "one",  # producer_name
    7: "one",  # graph
    8: "many",  # opset_import
    25: "many",  # functions
}
_GRAPH: Final[Mapping[int, FieldKind]] = {
    1: "many",  # node
    2: "one",  # name
    5: "many",  # initializer
    11: "many",  # input
    12: "many",  # output
    15: "many",  # sparse_initializer
}
_OPSET: Final[Mapping[int, FieldKind]] = {1: "one", 2: "one number"}  # domain, version
_TENSOR: Final[Mapping[int, FieldKind]] = {
    1: "numbers",  # dims
    2: "one number",  # data_type
    8: "one",  # name
    13: "many",  # external_data
    14: "one number",  # data_location
}
_ENTRY: Final[Mapping[int, FieldKind]] = {1: "one", 2: "one"}  # key, value
_EXTERNAL = 1
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(slots=True)
class _Fields:
    """The fields of one message, by number."""

    numbers: dict[int, list[int]] = field(default_factory=dict)
    parts: dict[int, list[memoryview]] = field(default_factory=dict)

    def number(self, field_number: int) -> int:
        """A varint field; 0 where it is absent."""
        return self.numbers.get(field_number, [0])[0]

    def text(self, field_number: int) -> str:
        """A string field; empty where it is absent. TrustError where it is not UTF-8."""
        try:
            return bytes(self.parts.get(field_number, [memoryview(b"")])[0]).decode()
        except UnicodeDecodeError as error:
            raise TrustError("a slice's graph contains text that is not UTF-8") from error

    def all_of(self, field_number: int) -> tuple[memoryview, ...]:
        """A repeated field of bytes."""
        return tuple(self.parts.get(field_number, ()))


@dataclass(frozen=True, slots=True)
class SliceGraph:
    """Contents of a slice's `graph.onnx`."""

    ir_version: int
    opsets: tuple[tuple[str, int], ...]
    functions: tuple[memoryview, ...]
    nodes: tuple[memoryview, ...]
    initializers: tuple[memoryview, ...]
    sparse_initializers: tuple[memoryview, ...]
    inputs: tuple[memoryview, ...]
    outputs: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class ExternalWeight:
    """An initializer whose data are in a file beside the graph."""

    name: str
    data_type: int
    dims: tuple[int, ...]
    location: str
    offset: int
    length: int
    """Bytes."""


def read_graph(raw: bytes | memoryview) -> SliceGraph:
    """Parse a slice's graph; TrustError where it contains anything unexpected."""
    model = _read_message(memoryview(raw), _MODEL)
    if 7 not in model.parts:
        raise TrustError("a slice's file holds no graph")
    graph = _read_message(model.parts[7][0], _GRAPH)
    opsets = [_read_message(message, _OPSET) for message in model.all_of(8)]
    return SliceGraph(
        ir_version=model.number(1), opsets=tuple((message.text(1), message.number(2)) for message in opsets),
        functions=model.all_of(25), nodes=graph.all_of(1), initializers=graph.all_of(5),
        sparse_initializers=graph.all_of(15), inputs=graph.all_of(11), outputs=graph.all_of(12),
    )  # fmt: skip


def read_external_weight(raw: memoryview) -> ExternalWeight:
    """Parse an initializer that only refers to external data; TrustError for any other."""
    tensor = _read_message(raw, _TENSOR)
    entries = [_read_message(entry, _ENTRY) for entry in tensor.all_of(13)]
    values = {entry.text(1): entry.text(2) for entry in entries}
    if (
        tensor.number(14) != _EXTERNAL
        or len(values) != len(entries)
        or values.keys() != {"location", "offset", "length"}
    ):
        raise TrustError(f"the weight {tensor.text(8)[:80]!r} is not one of the model that was released")
    if not _DECIMAL.fullmatch(values["offset"]) or not _DECIMAL.fullmatch(values["length"]):
        raise TrustError(f"the weight {tensor.text(8)[:80]!r} has no location in its file")
    dims = tuple(tensor.numbers.get(1, ()))
    range_ = int(values["offset"]), int(values["length"])
    return ExternalWeight(tensor.text(8), tensor.number(2), dims, values["location"], *range_)


def is_external(raw: memoryview) -> bool:
    """Whether the data of a TensorProto are in another file."""
    return bool(_bytes_field(raw, 13))


def tensor_name(raw: memoryview) -> str:
    """Name in a TensorProto whose bytes are known to be the model's."""
    return _bytes_field(raw, 8).tobytes().decode()


def value_name(raw: memoryview) -> str:
    """Name in a ValueInfoProto (an input or output); TrustError where it is not UTF-8."""
    try:
        return _bytes_field(raw, 1).tobytes().decode()
    except UnicodeDecodeError as error:
        raise TrustError("a slice's graph contains text that is not UTF-8") from error


def sparse_name(raw: memoryview) -> str:
    """Name in a SparseTensorProto: that of its values."""
    return tensor_name(_bytes_field(raw, 1))


def _bytes_field(raw: memoryview, wanted: int) -> memoryview:
    """The first bytes field with this number; empty where it is absent."""
    values = [value for number, value in iter_fields(raw) if number == wanted and not isinstance(value, int)]
    return values[0] if values else memoryview(b"")


def _read_message(raw: memoryview, known: Mapping[int, FieldKind]) -> _Fields:
    message = _Fields()
    for number, value in iter_fields(raw):
        kind = known.get(number)
        if kind is None or isinstance(value, int) != (kind in ("one number", "numbers")):
            raise TrustError(f"a slice's graph contains an unexpected field (number {number})")
        table: dict[int, list[Any]] = message.numbers if isinstance(value, int) else message.parts
        many = table.setdefault(number, [])
        if many and kind in ("one number", "one"):
            raise TrustError(f"a slice's graph repeats a singular field (number {number})")
        many.append(value)
    return message
