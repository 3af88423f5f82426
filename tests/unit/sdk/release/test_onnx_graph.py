"""The small reader of a slice's graph: what onnx wrote it reads as onnx does, and nothing else gets past it."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from edgesplit.errors import TrustError
from edgesplit.limits import LIMITS
from edgesplit.release.onnx_graph import SliceGraph, read_external_weight, read_graph
from edgesplit_partitioner.slicing import atoms, cut_slices
from support import onnx_models as tiny

SETTINGS = settings(max_examples=300, deadline=None, derandomize=True)


def graph_of(name: str) -> bytes:
    """A slice's graph file: everything but the model's last layer."""
    model = tiny.prepared(name)
    layers = [layer.name for layer in model.graph.layers]
    return cut_slices(model, model.graph, atoms(model.graph, [frozenset(layers[:-1])]), None)[0].files["graph.onnx"]


@pytest.mark.parametrize("name", tiny.MODELS)
def test_it_reads_what_onnx_wrote_as_onnx_does(name: str) -> None:
    """Every operator, tensor and declaration comes out as the bytes that onnx has for it, in its order."""
    raw = graph_of(name)
    model = onnx.load_model_from_string(raw)
    read = read_graph(raw)
    assert read.ir_version == model.ir_version
    assert read.opsets == tuple((one.domain, one.version) for one in model.opset_import)
    for ours, theirs in (
        (read.nodes, model.graph.node),
        (read.initializers, model.graph.initializer),
        (read.sparse_initializers, model.graph.sparse_initializer),
        (read.inputs, model.graph.input),
        (read.outputs, model.graph.output),
        (read.functions, model.functions),
    ):
        assert [bytes(one) for one in ours] == [one.SerializeToString(deterministic=True) for one in theirs]


def test_a_pointer_is_read_as_onnx_reads_it() -> None:
    """Name, type, shape and place of a weight beside the graph."""
    raw = graph_of("chain")
    for ours, theirs in zip(
        read_graph(raw).initializers, onnx.load_model_from_string(raw).graph.initializer, strict=True
    ):
        if not theirs.external_data:
            continue
        read = read_external_weight(ours)
        said = {one.key: one.value for one in theirs.external_data}
        assert (read.name, read.data_type, read.dims) == (theirs.name, theirs.data_type, tuple(theirs.dims))
        assert (read.location, str(read.offset), str(read.length)) == (said["location"], said["offset"], said["length"])


def test_every_prefix_of_a_graph_is_refused() -> None:
    """A file that was cut off anywhere is not half a model: nothing at its ends is taken for nothing."""
    raw = graph_of("chain")
    whole = read_graph(raw)
    for length in range(len(raw)):
        try:
            assert read_graph(raw[:length]) != whole
        except TrustError:
            continue


@given(st.binary(max_size=200))
@SETTINGS
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    """No other error, no endless work."""
    for read in (read_graph, lambda one: read_external_weight(memoryview(one))):
        try:
            read(raw)
        except TrustError:
            continue


@given(st.data())
@SETTINGS
def test_what_it_accepts_onnx_reads_the_same_way(data: st.DataObject) -> None:
    """Bytes changed, put in and left out: what still passes means to onnx exactly what it means here, so that what was
    checked is what runs."""
    raw = bytearray(graph_of(data.draw(st.sampled_from(["chain", "captured"]))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        change = data.draw(st.sampled_from(["flip", "put", "cut"]))
        if change == "flip":
            raw[at] = data.draw(st.integers(0, 255))
        elif change == "put":
            raw[at:at] = data.draw(st.binary(max_size=4))
        else:
            del raw[at : at + data.draw(st.integers(1, 4))]
    try:
        read = read_graph(bytes(raw))
    except TrustError:
        return
    model = onnx.ModelProto()
    try:
        model.ParseFromString(bytes(raw))
    except Exception:  # what onnx cannot read does not run
        return
    assert same(read, model)


def same(read: SliceGraph, model: onnx.ModelProto) -> bool:
    """As many of everything, with the same operators: parts that both know are parts that both have."""
    counts = [len(model.graph.node), len(model.graph.initializer), len(model.graph.input), len(model.graph.output)]
    ours = [len(read.nodes), len(read.initializers), len(read.inputs), len(read.outputs)]
    types = [onnx.NodeProto.FromString(bytes(one)).op_type for one in read.nodes]
    return counts == ours and types == [one.op_type for one in model.graph.node]


def field(number: int, wire: int, body: bytes = b"") -> bytes:
    tag, out = number << 3 | wire, b""
    while tag > 0x7F:
        out, tag = out + bytes([tag & 0x7F | 0x80]), tag >> 7
    return out + bytes([tag]) + body


def inside(body: bytes) -> bytes:
    return bytes([len(body)]) + body


EMPTY = field(7, 2, inside(b""))
REFUSED: dict[str, tuple[bytes, str]] = {
    "no graph": (b"", "no graph"),
    "a group": (EMPTY + field(1, 3) + field(1, 4), "unexpected encoding"),
    "a fixed number": (EMPTY + field(1, 5, b"\0" * 4), "unexpected encoding"),
    "field number 0": (EMPTY + b"\0\0", "unexpected encoding"),
    "a long form of a number": (EMPTY + field(1, 0, b"\x89\x00"), "shortest form"),
    "a number beyond 63 bits": (EMPTY + field(1, 0, b"\xff" * 9 + b"\x01"), "too large"),
    "a number without an end": (EMPTY + field(1, 0, b"\x80"), "truncated"),
    "a length beyond the end": (EMPTY + field(2, 2, b"\x05abc"), "truncated"),
    "a graph twice": (EMPTY + EMPTY, "repeats"),
    "a version twice": (EMPTY + field(1, 0, b"\x09") * 2, "repeats"),
    "a version as text": (EMPTY + field(1, 2, inside(b"9")), "an unexpected field"),
    "a graph as a number": (field(7, 0, b"\x01"), "an unexpected field"),
    "a field that nobody knows": (EMPTY + field(99, 0, b"\x01"), "an unexpected field"),
    "a domain that is no text": (EMPTY + field(8, 2, inside(field(1, 2, inside(b"\xff")))), "not UTF-8"),
    "too many fields": (field(7, 2, b"\x82\xb5\x18" + field(1, 2, b"\0") * 200_001), "too many fields"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_two_readers_could_read_differently_is_refused(what: str) -> None:
    """Each by its own reason."""
    raw, why = REFUSED[what]
    with pytest.raises(TrustError, match=why):
        read_graph(raw)
    assert LIMITS.graph_parts == 200_000


POINTERS: dict[str, Callable[[onnx.TensorProto], object]] = {
    "data in the graph too": lambda one: setattr(one, "raw_data", b"1234"),
    "no place": lambda one: one.external_data.pop(),
    "a place twice": lambda one: one.external_data.add(key="offset", value="0"),
    "a checksum": lambda one: one.external_data.add(key="checksum", value="0"),
    "an octal place": lambda one: setattr(one.external_data[1], "value", "010"),
    "a place with a sign": lambda one: setattr(one.external_data[1], "value", "+1"),
    "a negative length": lambda one: setattr(one.external_data[2], "value", "-1"),
    "a negative dimension": lambda one: one.dims.append(-1),
    "not external": lambda one: setattr(one, "data_location", onnx.TensorProto.DEFAULT),
    "a segment": lambda one: one.segment.CopyFrom(onnx.TensorProto.Segment(begin=0, end=1)),
    "a comment": lambda one: setattr(one, "doc_string", "x"),
}


@pytest.mark.parametrize("what", POINTERS)
def test_a_pointer_is_nothing_but_a_pointer(what: str) -> None:
    """Three entries, each once, each in its one spelling."""
    tensor = numpy_helper.from_array(tiny.feeds_of(tiny.prepared("chain"))["image"], "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", "3072")):
        tensor.external_data.add(key=key, value=value)
    assert read_external_weight(memoryview(tensor.SerializeToString())).length == 3072
    POINTERS[what](tensor)
    with pytest.raises(TrustError):
        read_external_weight(memoryview(tensor.SerializeToString()))


def test_a_scalar_weight_has_no_dimensions() -> None:
    """Its list of dimensions is empty, not a list of nothing."""
    tensor = helper.make_tensor("s", onnx.TensorProto.FLOAT, [], [1.0])
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "64"), ("length", "4")):
        tensor.external_data.add(key=key, value=value)
    assert read_external_weight(memoryview(tensor.SerializeToString())).dims == ()
