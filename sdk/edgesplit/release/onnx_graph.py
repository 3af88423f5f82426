"""The ONNX file of one slice, read as far as needed to know what is in it: a small reader of protobuf's wire format.

It is stricter than protobuf: a field that no slice of ours has, one that repeats where it may not, a number that is not
written in its shortest form, a group, a byte left over, are TrustErrors. For where two readers could understand the
same bytes differently, what was checked would not be what runs. Nodes, tensors and declarations are handed out as the
bytes that they are. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from edgesplit.errors import TrustError
from edgesplit.limits import LIMITS

Kind = Literal["one number", "numbers", "one", "many"]
"""A varint or bytes, once at most or repeated."""
_VARINT, _BYTES = 0, 2
_MODEL: Final[Mapping[int, Kind]] = {
    1: "one number",  # ir_version
    2: "one",  # producer_name
    7: "one",  # graph
    8: "many",  # opset_import
    25: "many",  # functions
}
_GRAPH: Final[Mapping[int, Kind]] = {
    1: "many",  # node
    2: "one",  # name
    5: "many",  # initializer
    11: "many",  # input
    12: "many",  # output
    15: "many",  # sparse_initializer
}
_OPSET: Final[Mapping[int, Kind]] = {1: "one", 2: "one number"}  # domain, version
_TENSOR: Final[Mapping[int, Kind]] = {
    1: "numbers",  # dims
    2: "one number",  # data_type
    8: "one",  # name
    13: "many",  # external_data
    14: "one number",  # data_location
}
_ENTRY: Final[Mapping[int, Kind]] = {1: "one", 2: "one"}  # key, value
_EXTERNAL = 1
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclass(slots=True)
class _Fields:
    """The fields of one message, by number."""

    numbers: dict[int, list[int]] = field(default_factory=dict)
    parts: dict[int, list[memoryview]] = field(default_factory=dict)

    def number(self, which: int) -> int:
        """A varint field; 0 where it is not given."""
        return self.numbers.get(which, [0])[0]

    def text(self, which: int) -> str:
        """A string field; empty where it is not given."""
        try:
            return bytes(self.parts.get(which, [memoryview(b"")])[0]).decode()
        except UnicodeDecodeError as error:
            raise TrustError("a slice's graph holds text that is none") from error

    def many(self, which: int) -> tuple[memoryview, ...]:
        """A repeated field of bytes."""
        return tuple(self.parts.get(which, ()))


@dataclass(frozen=True, slots=True)
class SliceGraph:
    """What one slice's `graph.onnx` holds."""

    ir_version: int
    opsets: tuple[tuple[str, int], ...]
    functions: tuple[memoryview, ...]
    nodes: tuple[memoryview, ...]
    initializers: tuple[memoryview, ...]
    sparse_initializers: tuple[memoryview, ...]
    inputs: tuple[memoryview, ...]
    outputs: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Pointer:
    """An initializer whose data lie in a file beside the graph."""

    name: str
    data_type: int
    dims: tuple[int, ...]
    location: str
    offset: int
    length: int
    """Bytes."""


def read_graph(raw: bytes | memoryview) -> SliceGraph:
    """The slice in these bytes; TrustError where anything in them is not expected there."""
    model = _read(memoryview(raw), _MODEL)
    if 7 not in model.parts:
        raise TrustError("a slice's file holds no graph")
    graph = _read(model.parts[7][0], _GRAPH)
    opsets = [_read(one, _OPSET) for one in model.many(8)]
    return SliceGraph(
        ir_version=model.number(1),
        opsets=tuple((one.text(1), one.number(2)) for one in opsets),
        functions=model.many(25),
        nodes=graph.many(1),
        initializers=graph.many(5),
        sparse_initializers=graph.many(15),
        inputs=graph.many(11),
        outputs=graph.many(12),
    )


def read_pointer(raw: memoryview) -> Pointer:
    """The initializer in these bytes, if it is nothing but a pointer; TrustError if not."""
    tensor = _read(raw, _TENSOR)
    entries = [_read(one, _ENTRY) for one in tensor.many(13)]
    said = {one.text(1): one.text(2) for one in entries}
    if tensor.number(14) != _EXTERNAL or len(said) != len(entries) or said.keys() != {"location", "offset", "length"}:
        raise TrustError(f"the weight {tensor.text(8)[:80]!r} is not one of the model that was released")
    if not _DECIMAL.fullmatch(said["offset"]) or not _DECIMAL.fullmatch(said["length"]):
        raise TrustError(f"the weight {tensor.text(8)[:80]!r} is at no place in its file")
    dims = tuple(tensor.numbers.get(1, ()))
    place = int(said["offset"]), int(said["length"])
    return Pointer(tensor.text(8), tensor.number(2), dims, said["location"], *place)


def tensor_name(raw: memoryview) -> str:
    """The name in a TensorProto whose bytes are known to be the model's."""
    return _part(raw, 8).tobytes().decode()


def value_name(raw: memoryview) -> str:
    """The name in a ValueInfoProto (an input or output); TrustError where it is no text."""
    try:
        return _part(raw, 1).tobytes().decode()
    except UnicodeDecodeError as error:
        raise TrustError("a slice's graph holds text that is none") from error


def sparse_name(raw: memoryview) -> str:
    """The same of a SparseTensorProto: that of its values."""
    return tensor_name(_part(raw, 1))


def _part(raw: memoryview, wanted: int) -> memoryview:
    """That field of a message, empty where it is not given."""
    found = [value for number, value in fields(raw) if number == wanted and not isinstance(value, int)]
    return found[0] if found else memoryview(b"")


def _read(raw: memoryview, known: Mapping[int, Kind]) -> _Fields:
    found = _Fields()
    for number, value in fields(raw):
        kind = known.get(number)
        if kind is None or isinstance(value, int) != (kind in ("one number", "numbers")):
            raise TrustError(f"a slice's graph holds a field (number {number}) that no slice of ours has")
        many = found.numbers.setdefault(number, []) if isinstance(value, int) else found.parts.setdefault(number, [])
        if many and kind in ("one number", "one"):
            raise TrustError(f"a slice's graph says the same thing twice (field number {number})")
        many.append(value)  # type: ignore[arg-type]
    return found


def fields(raw: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Each field's number with its value: a varint, or the bytes of anything that has a length."""
    at, count = 0, 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, wire = tag >> 3, tag & 7
        value, at = _varint(raw, at)
        count += 1
        if not 0 < number < 1 << 29 or wire not in (_VARINT, _BYTES) or count > LIMITS.graph_parts:
            raise TrustError("a slice's graph is not written as ours are, or has too many parts")
        if wire == _VARINT:
            yield number, value
            continue
        if value > len(raw) - at:
            raise TrustError("a slice's graph is cut off")
        yield number, raw[at : at + value]
        at += value


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    """The number at that place, below 2^63, and where it ends."""
    value = 0
    for place in range(9):
        if at + place >= len(raw):
            raise TrustError("a slice's graph is cut off")
        byte = raw[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if place and not byte:
                raise TrustError("a slice's graph holds a number that is not in its shortest form")
            return value, at + place + 1
    raise TrustError("a slice's graph holds a number that is too large")
