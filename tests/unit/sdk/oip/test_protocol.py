"""The Open Inference Protocol codec: round trips, hostile bodies, and MalformedMessage as the only error."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from edgesplit.errors import InferenceFailed, MalformedMessage, UsageError
from edgesplit.limits import LIMITS
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec

NUMBERS = [name for name in oip.DTYPES if name != "BYTES"]


def joined(buffers: oip.Buffers) -> bytes:
    return b"".join(buffers)


def request_of(**tensor: Any) -> bytes:
    """A JSON request with one tensor of these fields."""
    return msgspec.json.encode({"inputs": [{"name": "a", "datatype": "INT32", "shape": [2], **tensor}]})


def good_request() -> tuple[bytes, int]:
    """A request with several tensors, one of them of text, as it travels."""
    inputs = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([b"text\0", b""], object),
        "c": np.array([[True], [False]]),
    }
    request = oip.InferRequest(inputs, ("out",), "id-é", {"timeout": 5_000_000}, frozenset({"out"}))
    buffers, length = oip.encode_request(request)
    return joined(buffers), length


arrays = st.sampled_from(NUMBERS).flatmap(
    lambda name: npst.arrays(oip.DTYPES[name], npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)


def same(left: oip.Tensor, right: oip.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


@given(st.dictionaries(st.text(max_size=8), arrays, max_size=4), st.text(max_size=20))
def test_binary_request_round_trips(inputs: dict[str, oip.Tensor], id_: str) -> None:
    """Any tensors of any data type and shape, under any id, NaN payloads included."""
    buffers, length = oip.encode_request(oip.InferRequest(inputs, id=id_))
    request = oip.decode_request(joined(buffers), length)
    assert request.id == id_
    assert request.inputs.keys() == inputs.keys()
    assert all(same(request.inputs[name], tensor) for name, tensor in inputs.items())


@given(arrays)
def test_json_response_round_trips(tensor: oip.Tensor) -> None:
    """With NaN where JSON has no number."""
    buffers, length = oip.encode_response(oip.InferResponse("m", {"t": tensor}, id="7"), binary=False)
    assert length is None
    got = oip.decode_response(joined(buffers), None).outputs["t"]
    wanted = np.where(np.isfinite(tensor), tensor, np.nan).astype(tensor.dtype) if tensor.dtype.kind == "f" else tensor
    assert got.dtype == tensor.dtype
    np.testing.assert_array_equal(got, wanted)


@given(st.lists(st.binary(max_size=6), max_size=5))
def test_bytes_elements_round_trip(elements: list[bytes]) -> None:
    """Elements of a BYTES tensor keep trailing zeros and may be empty."""
    tensor = np.empty(len(elements), object)
    tensor[:] = elements
    buffers, length = oip.encode_response(oip.InferResponse("m", {"t": tensor}))
    assert oip.decode_response(joined(buffers), length).outputs["t"].tolist() == elements


def test_cut_through_many_tensors_of_many_dimensions_round_trips() -> None:
    """A cut that a plan may choose was refused by the server: 256 tensors and 16 dimensions were the most."""
    inputs = {f"t{number}": np.full((1,) * 32, number, np.int32) for number in range(1_000)}
    buffers, length = oip.encode_request(oip.InferRequest(inputs))
    decoded = oip.decode_request(b"".join(buffers), length)
    assert decoded.inputs.keys() == inputs.keys()
    assert all(np.array_equal(decoded.inputs[name], tensor) for name, tensor in inputs.items())


def test_tensors_are_views_of_the_body_and_aligned() -> None:
    """A large activation is not copied on its way in; an unaligned one is."""
    inputs = {"a": np.arange(3, dtype=np.uint8), "b": np.arange(4, dtype=np.float64)}
    first, length = oip.encode_request(oip.InferRequest({"b": inputs["b"]}))
    body = bytearray(joined(first))
    got = oip.decode_request(body, length).inputs["b"]
    assert np.shares_memory(got, np.frombuffer(body, np.uint8))
    both, length = oip.encode_request(oip.InferRequest(inputs))
    got = oip.decode_request(bytearray(joined(both)), length).inputs["b"]
    assert got.flags.aligned
    assert got.tolist() == [0, 1, 2, 3]


def test_views_transposes_and_foreign_byte_order_are_sent_by_value() -> None:
    """The array as NumPy reads it is sent, however it lies in memory."""
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    inputs = {"t": base.T, "s": base[:, ::2], "be": base.astype(">f4")}
    buffers, length = oip.encode_request(oip.InferRequest(inputs))
    got = oip.decode_request(joined(buffers), length).inputs
    assert all(np.array_equal(got[name], tensor) for name, tensor in inputs.items())


def test_nested_and_flat_json_data_are_equal() -> None:
    """The protocol allows both; nesting must follow the shape."""
    flat = oip.decode_request(request_of(shape=[2, 2], data=[1, 2, 3, 4]), None).inputs["a"]
    nested = oip.decode_request(request_of(shape=[2, 2], data=[[1, 2], [3, 4]]), None).inputs["a"]
    assert np.array_equal(flat, nested)
    assert flat.dtype == np.int32
    with pytest.raises(MalformedMessage, match="nested"):
        oip.decode_request(request_of(shape=[2, 2], data=[[1, 2, 3], [4]]), None)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        ({"shape": [-1], "data": [1]}, "not a shape"),
        ({"shape": [2**62, 2**62], "data": [1]}, "too large"),
        ({"shape": [0, 2**62], "data": []}, "too large"),
        ({"shape": [1] * 40, "data": [1]}, "not a shape"),
        ({"shape": [10**30], "data": [1]}, "out of range|too large"),
        ({"shape": [3], "data": [1, 2]}, "2 elements"),
        ({"shape": ["2"], "data": [1, 2]}, "inference body"),
        ({"data": [1, 2.5]}, "inference body"),
        ({"data": [1, "2"]}, "inference body"),
        ({"data": [1, True]}, "inference body"),
        ({"data": [1, None]}, "inference body"),
        ({"data": [1, 2**31]}, "does not fit"),
        ({"data": {"0": 1}}, "inference body"),
        ({"datatype": "UINT8", "data": [0, -1]}, "does not fit"),
        ({"datatype": "UINT64", "data": [0, -1]}, "does not fit"),
        ({"datatype": "INT64", "data": [0, 2**63]}, "does not fit"),
        ({"datatype": "FP32", "data": [0, 1e300]}, "does not fit"),
        ({"datatype": "FP16", "data": [0, 65_520]}, "does not fit"),
        ({"datatype": "BOOL", "data": [0, 1]}, "inference body"),
        ({"datatype": "BYTES", "data": [0, 1]}, "inference body"),
        ({"datatype": "BF16", "data": [0, 1]}, "unknown datatype"),
        ({"datatype": "float32", "data": [0, 1]}, "unknown datatype"),
        ({}, "neither data nor"),
        ({"parameters": {"binary_data_size": 8}}, "binary_data_size 8 of 0"),
        ({"parameters": {"binary_data_size": -8}}, "binary_data_size"),
        ({"parameters": {"binary_data_size": True}}, "binary_data_size"),
        ({"parameters": {"binary_data_size": "8"}}, "binary_data_size"),
        ({"parameters": {"x": [1]}}, "inference body"),
    ],
)
def test_inconsistent_tensor_is_refused(tensor: dict[str, Any], why: str) -> None:
    """Each way for shape, data type and data to disagree is MalformedMessage, and says which."""
    with pytest.raises(MalformedMessage, match=why):
        oip.decode_request(request_of(**tensor), None)


@pytest.mark.parametrize("name", ["BYTES", "FP32"])
@pytest.mark.parametrize("raw", [b"", b"\x01", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00" * 3])
def test_binary_data_that_does_not_fill_the_shape_is_refused(name: str, raw: bytes) -> None:
    """Two elements were promised; anything else is refused, and a length inside the data is not trusted."""
    head = request_of(datatype=name, parameters={"binary_data_size": len(raw)})
    with pytest.raises(MalformedMessage):
        oip.decode_request(head + raw, len(head))


def test_duplicates_and_trailing_bytes_are_refused() -> None:
    """A tensor given twice, an output requested twice, a tensor with two sets of data, bytes behind the last tensor."""
    one = {"name": "a", "datatype": "INT8", "shape": [1], "data": [1]}
    for body in (
        {"inputs": [one, one]},
        {"inputs": [one], "outputs": [{"name": "o"}, {"name": "o"}]},
        {"inputs": [{**one, "parameters": {"binary_data_size": 0}}]},
        {"inputs": [one] * (LIMITS.inference_tensors + 1)},
        {"inputs": [one], "id": 7},
        {},
        [],
    ):
        with pytest.raises(MalformedMessage):
            oip.decode_request(msgspec.json.encode(body), None)
    raw, length = good_request()
    for body, given_length in ((raw + b"x", length), (raw, None), (raw, length + 1), (raw, len(raw) + 1), (raw, 0)):
        with pytest.raises(MalformedMessage):
            oip.decode_request(body, given_length)


def test_bool_must_be_zero_or_one() -> None:
    """A BOOL byte of 2 would be undefined behaviour inside a kernel."""
    head = request_of(datatype="BOOL", parameters={"binary_data_size": 2})
    with pytest.raises(MalformedMessage, match="neither 0 nor 1"):
        oip.decode_request(head + b"\x01\x02", len(head))


@pytest.mark.parametrize("nest", [b"[", b'{"a":'])
def test_deep_nesting_is_malformed(nest: bytes) -> None:
    """A bomb of brackets, in a field we read and in one we skip, does not overflow the stack."""
    for body in (nest * 100_000, b'{"inputs":[],"x":' + nest * 100_000):
        with pytest.raises(MalformedMessage):
            oip.decode_request(body, None)
    with pytest.raises(MalformedMessage):
        oip.decode_request(b'{"inputs":[{"name":"a","shape":[1],"datatype":"FP32","data":' + nest * 100_000, None)


def test_too_much_json_is_refused_before_it_is_parsed() -> None:
    """JSON costs many times its size in memory, so it is bounded more tightly than binary data."""
    with pytest.raises(MalformedMessage, match="send binary"):
        oip.decode_request(b" " * (LIMITS.inference_json_bytes + 1), None)


def test_every_prefix_of_a_request_is_malformed() -> None:
    """However short the connection was cut, what is left is refused, by the length in the header or without it."""
    raw, length = good_request()
    for end in range(len(raw)):
        for given_length in {min(length, end), length, None}:
            with pytest.raises(MalformedMessage):
                oip.decode_request(raw[:end], given_length)


@settings(max_examples=400)
@given(st.data())
def test_mutated_message_is_valid_or_malformed(data: st.DataObject) -> None:
    """Random damage to a request or a response leaves one, or is MalformedMessage; nothing else is raised."""
    raw, length = good_request()
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
        damaged = damaged or bytearray(b"{")
    new_length = data.draw(st.sampled_from([length, None, len(damaged), 0]) | st.integers(-5, len(raw) + 5))
    for decode in (oip.decode_request, oip.decode_response):
        with contextlib.suppress(MalformedMessage):
            decode(damaged, new_length)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.just("a") | json_values,
            "datatype": st.sampled_from(sorted(oip.DTYPES)) | json_values,
            "shape": st.lists(st.integers(-2, 4), max_size=3) | json_values,
            "parameters": st.fixed_dictionaries({"binary_data_size": json_values}) | json_values,
            "data": json_values,
        },
    ),
    st.binary(max_size=16),
)
def test_json_of_the_wrong_kind_is_valid_or_malformed(tensor: dict[str, Any], rest: bytes) -> None:
    """Well-formed JSON of the wrong kind in any field is MalformedMessage, or a request; nothing else is raised."""
    import json

    head = json.dumps({"inputs": [tensor]}).encode()
    with contextlib.suppress(MalformedMessage):
        oip.decode_request(head + rest, len(head))


def test_each_output_may_choose_binary_or_json() -> None:
    """`binary_data` of an output overrides `binary_data_output` of the request, and the answer follows."""
    body = {
        "inputs": [],
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "a", "parameters": {"binary_data": False}}, {"name": "b"}],
    }
    request = oip.decode_request(msgspec.json.encode(body), None)
    assert request.binary_outputs == frozenset({"b"})
    outputs = {"a": np.array([1.5]), "b": np.array([2.5])}
    buffers, length = oip.encode_response(oip.InferResponse("m", outputs), request.binary_outputs)
    entries = msgspec.json.decode(joined(buffers)[:length])["outputs"]
    assert entries[0]["data"] == [1.5]
    assert entries[1]["parameters"] == {"binary_data_size": 8}


def test_unsendable_tensor_is_refused() -> None:
    """Complex numbers have no data type; bytes that are not text have no JSON."""
    with pytest.raises(UsageError, match="complex128"):
        oip.encode_request(oip.InferRequest({"a": np.array([1j])}))
    with pytest.raises(InferenceFailed, match="binary"):
        oip.encode_response(oip.InferResponse("m", {"a": np.array([b"\xff"], object)}), binary=False)


def test_tensors_are_checked_against_the_models_inputs() -> None:
    """A missing, unknown, wrongly typed or wrongly shaped input is named together with what is expected."""
    specs = (TensorSpec("x", "FP32", (1, -1, 4)),)
    oip.check_tensors({"x": np.zeros((1, 9, 4), np.float32)}, specs)
    for tensors, why in (
        ({}, "missing input 'x'"),
        ({"x": np.zeros((1, 9, 4), np.float32), "y": np.zeros(1)}, "unknown input 'y'"),
        ({"x": np.zeros((1, 9, 4))}, "is FP64, but must be FP32"),
        ({"x": np.zeros((1, 9, 5), np.float32)}, r"\[1, 9, 5\], but must have \[1, -1, 4\]"),
        ({"x": np.zeros((1, 9), np.float32)}, "shape"),
    ):
        with pytest.raises(UsageError, match=why):
            oip.check_tensors(tensors, specs)


def test_header_length_and_timeout_must_be_numbers() -> None:
    """Both arrive as text or JSON from the network."""
    assert oip.header_length({}) is None
    assert oip.header_length({oip.HEADER_LENGTH: "12"}) == 12
    for text in ("-1", "1e3", "", "٣", "9" * 13):
        with pytest.raises(MalformedMessage):
            oip.header_length({oip.HEADER_LENGTH: text})
    assert oip.timeout_s({"timeout": 1_500_000}) == 1.5
    assert oip.timeout_s({}) is None
    for value in (0, -1, True, "5", 1e16, float("nan")):
        with pytest.raises(MalformedMessage):
            oip.timeout_s({"timeout": value})


def test_remote_model_names_round_trip() -> None:
    """Device classes may hold dots and plus signs."""
    name = oip.remote_name("ab" * 32, "raspberrypi3b+.v2", "cut-1")
    assert oip.parse_remote_name(name) == ("ab" * 32, "raspberrypi3b+.v2", "cut-1")
    for bad in ("", "digits", "a.b", "..", "a..b"):
        with pytest.raises(MalformedMessage):
            oip.parse_remote_name(bad)
