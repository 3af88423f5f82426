"""Codecs: what they preserve, what they refuse, and that ONNX's own operators decode them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper

from edgesplit.errors import UsageError
from edgesplit.oip import protocol as oip
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import TensorSpec

FLOATS = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=0, max_dims=3, max_side=6),
    elements=st.floats(allow_nan=True, allow_infinity=True, width=32),
)


def there_and_back(tensor: np.ndarray[Any, Any], codec: str, clip: float = 1.0) -> np.ndarray[Any, Any]:
    """Encoded, through a real body, decoded by the row's specs."""
    spec = TensorSpec("t", oip.datatype(tensor), tensor.shape)
    body, length = oip.encode_request(
        oip.InferRequest(boundary_codecs.encode_tensors({"t": tensor}, {"t": codec}, {"t": clip}))
    )
    asked = oip.decode_request(b"".join(body), length)
    tensors = boundary_codecs.decode_tensors(asked.inputs, [spec], {"t": codec})
    oip.check_tensors(tensors, [spec])
    return tensors["t"]


@given(FLOATS, st.sampled_from(boundary_codecs.CODECS))
def test_float_tensors_round_trip_within_the_codecs_step(tensor: np.ndarray[Any, Any], codec: str) -> None:
    """Raw is exact; fp16 keeps 11 bits; the others are off by at most a step; what none can hold stays as it is."""
    back = there_and_back(tensor, codec)

    if codec == "raw" or not np.isfinite(tensor).all():
        assert np.array_equal(back, tensor, equal_nan=True)
    elif codec == "fp16":
        assert np.allclose(back, tensor, rtol=2**-11, atol=2**-25)
    elif tensor.size:
        step = (max(float(tensor.max()), 0) - min(float(tensor.min()), 0)) / boundary_codecs.STEPS[codec]
        assert np.max(np.abs(back.astype(np.float64) - tensor)) <= step * 1.001 or np.array_equal(back, tensor)


@pytest.mark.parametrize(
    ("value", "codec"),
    [
        (65505.0, "fp16"),
        (-7e4, "fp16"),
        (np.nan, "fp16"),
        (np.inf, "int8"),
        (3.4028235e38, "int8"),
        (np.nan, "int6"),
        (np.inf, "int6"),
        (3.4028235e38, "int6"),
        (np.nan, "int4"),
        (-np.inf, "int4"),
        (3.4028235e38, "int4"),
    ],
)
def test_tensor_a_codec_cannot_hold_is_sent_raw(value: float, codec: str) -> None:
    """One value beyond fp16's largest, a NaN, a range that FP32 cannot hold: the tensor is sent unencoded."""
    tensor = np.array([1.0, value, -1e38 if value > 1e38 else 0.5], np.float32)

    sent = boundary_codecs.encode("t", tensor, codec)

    assert list(sent) == ["t"] and sent["t"].dtype == np.float32
    assert np.array_equal(there_and_back(tensor, codec), tensor, equal_nan=True)


def test_largest_fp16_value_is_encoded() -> None:
    """65504 is the last that fits."""
    assert boundary_codecs.encode("t", np.array([65504.0], np.float32), "fp16")["t"].dtype == np.float16


def test_only_floats_are_encoded() -> None:
    """Whole numbers, truth values and text are sent as they are, whatever the row says."""
    for tensor in (np.arange(4), np.array([True]), np.array([b"a"], object), np.zeros((0, 3), np.float32)):
        for codec in boundary_codecs.CODECS:
            assert boundary_codecs.encode("t", tensor, codec) == {"t": tensor} or not tensor.size
    assert boundary_codecs.lossy_codecs("INT8") == () and boundary_codecs.lossy_codecs("FP16") == (
        "int8",
        "int6",
        "int4",
    )


@pytest.mark.parametrize("shift", [0.0, -1.0, 1.0, 5.0])
def test_onnx_operators_encode_and_decode_alike(shift: float) -> None:
    """A foreign server needs no code of ours: ONNX's own operators give the same bits, and the same values back."""
    tensor = (np.random.default_rng(7).standard_normal((1, 8, 5)) + shift).astype(np.float32)
    sent = boundary_codecs.encode("t", tensor, "int8")

    bits, scale, zero_point = run_node("DynamicQuantizeLinear", {"t": tensor}, ["q", "s", "z"])
    assert np.array_equal(bits, sent["t"])
    assert scale == sent["t:scale"][0] and zero_point == sent["t:zero_point"][0]
    (back,) = run_node("DequantizeLinear", sent, ["y"])
    assert np.array_equal(back, boundary_codecs.decode_like("t", sent, tensor, "int8"))
    half = boundary_codecs.encode("t", tensor, "fp16")
    (cast,) = run_node("Cast", half, ["y"], to=TensorProto.FLOAT)
    assert np.array_equal(cast, boundary_codecs.decode_like("t", half, tensor, "fp16"))


def run_node(
    operator: str, feeds: dict[str, np.ndarray[Any, Any]], outputs: list[str], **attributes: int
) -> list[np.ndarray[Any, Any]]:
    """One ONNX operator on onnxruntime."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    node = helper.make_node(operator, list(feeds), outputs, **attributes)
    graph = helper.make_graph([node], "one", inputs, [onnx.ValueInfoProto(name=name) for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values: list[np.ndarray[Any, Any]] = session.run(None, feeds)
    return values


@pytest.mark.parametrize(
    "companions",
    [
        {},
        {"t:scale": np.array([1.0], np.float32)},
        {"t:scale": np.array([0.0], np.float32), "t:zero_point": np.array([0], np.uint8)},
        {"t:scale": np.array([np.nan], np.float32), "t:zero_point": np.array([0], np.uint8)},
        {"t:scale": np.array([np.inf], np.float32), "t:zero_point": np.array([0], np.uint8)},
        {"t:scale": np.array([-1.0], np.float32), "t:zero_point": np.array([0], np.uint8)},
        {"t:scale": np.array(1.0, np.float32), "t:zero_point": np.array([0], np.uint8)},
        {"t:scale": np.array([1.0], np.float32), "t:zero_point": np.array([0], np.int8)},
        {"t:scale": np.array([1.0], np.float32), "t:zero_point": np.zeros((1, 1), np.uint8)},
        {"t:scale": np.array([1.0], np.float64), "t:zero_point": np.array([0], np.uint8)},
        {"t:scale": np.array([1.0, 2.0], np.float32), "t:zero_point": np.array([0], np.uint8)},
    ],
)
def test_invalid_scale_and_zero_point_are_refused(companions: dict[str, np.ndarray[Any, Any]]) -> None:
    """Eight bits without a scale, or with one that is not a positive number, are the sender's error."""
    sent = {"t": np.zeros(3, np.uint8), **companions}

    with pytest.raises(UsageError, match="t:"):
        boundary_codecs.decode_tensors(sent, [TensorSpec("t", "FP32", (3,))], {"t": "int8"})


@pytest.mark.parametrize(("codec", "dtype"), [("fp16", np.float16), ("int8", np.uint8), ("int6", np.uint8)])
def test_tensor_of_another_size_is_refused_before_decoding(codec: str, dtype: type) -> None:
    """The row knows the shape: a tensor without that shape is not expanded. A free dimension takes any length."""
    companions = boundary_codecs.encode("t", np.ones(1, np.float32), "int8")
    sent = {**companions, "t": np.zeros((4, 1000), dtype)}

    with pytest.raises(UsageError, match=r"'t' has shape \[4, 1000\], but must have \[4, 3\]"):
        boundary_codecs.decode_tensors(sent, [TensorSpec("t", "FP32", (4, 3))], {"t": codec})
    assert boundary_codecs.decode_tensors(sent, [TensorSpec("t", "FP32", (4, -1))], {"t": codec})["t"].shape == (
        4,
        1000,
    )


@pytest.mark.parametrize("codec", ["int8", "int6", "int4"])
def test_quantised_half_precision_never_becomes_infinite(codec: str) -> None:
    """The lowest step may lie below the lowest value, and beyond the range of FP16: then it is sent raw."""
    tensor = np.array([65504.0, -65504.0], np.float16)

    assert np.array_equal(there_and_back(tensor, codec), tensor)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 3, 5, 7), (4, 4), (1, 1001)])
@pytest.mark.parametrize("codec", ["int6", "int4"])
def test_coarse_codecs_keep_every_type_and_shape(codec: str, shape: tuple[int, ...], dtype: type) -> None:
    """Odd counts, scalars and all float types come back in their type and shape, within half a step, zero exactly."""
    tensor = np.random.default_rng(3).standard_normal(shape).astype(dtype)
    tensor.reshape(-1)[-1] = 0.0

    back = there_and_back(tensor, codec)

    step = (max(float(tensor.max()), 0) - min(float(tensor.min()), 0)) / boundary_codecs.STEPS[codec]
    assert back.dtype == dtype and back.shape == shape and back.reshape(-1)[-1] == 0.0
    assert np.max(np.abs(back.astype(np.float64) - tensor)) <= step * 1.01


@pytest.mark.parametrize("value", [0.0, 5.0, -0.25, 1e-30])
@pytest.mark.parametrize("codec", ["int6", "int4"])
def test_constant_tensors_survive_coarse_codecs(codec: str, value: float) -> None:
    """One value throughout is the end of its own range, which a level stands for."""
    tensor = np.full((1, 9), value, np.float32)

    assert np.allclose(there_and_back(tensor, codec), tensor, rtol=1e-6)


def test_int6_is_int8_on_the_wire() -> None:
    """A receiver of int8 decodes int6 unchanged: same types, same companions; only 64 levels occur."""
    tensor = np.random.default_rng(4).standard_normal((1, 8, 5)).astype(np.float32)
    spec = TensorSpec("t", "FP32", tensor.shape)
    sent = boundary_codecs.encode("t", tensor, "int6")

    assert int(sent["t"].max()) == 63
    assert boundary_codecs.wire_specs(spec, "int6") == boundary_codecs.wire_specs(spec, "int8")
    (by_onnx,) = run_node("DequantizeLinear", sent, ["y"])
    assert np.array_equal(boundary_codecs.decode_tensors(sent, [spec], {"t": "int8"})["t"], by_onnx)
    assert np.array_equal(there_and_back(tensor, "int6"), by_onnx)


def test_int4_takes_half_a_byte_and_saturates_at_its_clip() -> None:
    """Two values to a byte; what lies beyond the clipped share of the range takes its end, the rest a finer step."""
    tensor = np.linspace(-1.0, 3.0, 401, dtype=np.float32).reshape(1, 401)

    sent = boundary_codecs.encode("t", tensor, "int4", 0.5)
    back = there_and_back(tensor, "int4", 0.5)

    assert sent["t"].dtype == np.uint8 and sent["t"].shape == (201,)
    scale = float(sent["t:scale"][0])
    assert scale == pytest.approx(2.0 / 15)
    within = (tensor > -0.5) & (tensor < 1.5)
    assert np.max(np.abs(back - tensor)[within]) <= scale
    assert np.unique(back[tensor > 1.6]).tolist() == [back.max()] and back.max() == pytest.approx(1.5, abs=scale)


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), (0,), ()])
def test_packed_tensor_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    """Three values take two bytes in one dimension; anything else, or a model without fixed shape, is refused."""
    sent = {**boundary_codecs.encode("t", np.ones(3, np.float32), "int4"), "t": np.zeros(shape, np.uint8)}

    with pytest.raises(UsageError, match=r"must have \[2\]"):
        boundary_codecs.decode_tensors(sent, [TensorSpec("t", "FP32", (3,))], {"t": "int4"})
    with pytest.raises(UsageError, match="no fixed shape"):
        boundary_codecs.decode_tensors(sent, [TensorSpec("t", "FP32", (-1,))], {"t": "int4"})
    assert boundary_codecs.wire_specs(TensorSpec("t", "FP32", (-1, 2)), "int4")[0].shape == (-1,)


@given(st.binary(min_size=1, max_size=40), st.floats(width=32), st.integers(0, 255), st.sampled_from(["int6", "int4"]))
def test_any_bytes_decode_to_the_models_shape_or_are_refused(body: bytes, scale: float, zero: int, codec: str) -> None:
    """Whatever levels, scale and zero point are sent, the tensor has the model's shape and type, or UsageError."""
    sent: dict[str, Any] = {
        "t": np.frombuffer(body, np.uint8), "t:scale": np.array([scale], np.float32),
        "t:zero_point": np.array([zero], np.uint8),
    }  # fmt: skip
    count = 2 * len(body) - 1 if codec == "int4" else len(body)
    specs = [TensorSpec("t", "FP32", (1, count))]
    sent["t"] = sent["t"] if codec == "int4" else sent["t"].reshape(1, count)

    try:
        decoded = boundary_codecs.decode_tensors(sent, specs, {"t": codec})["t"]
    except UsageError:
        assert not (np.isfinite(scale) and scale > 0)
    else:
        assert decoded.shape == (1, count) and decoded.dtype == np.float32


def test_codec_other_than_the_rows_is_refused() -> None:
    """FP16 where the row says raw stays FP16, and the check against the row's inputs refuses it."""
    spec = TensorSpec("t", "FP32", (2,))
    tensors = boundary_codecs.decode_tensors({"t": np.zeros(2, np.float16)}, [spec], {})

    with pytest.raises(UsageError, match="FP16"):
        oip.check_tensors(tensors, [spec])
    with pytest.raises(UsageError, match="not known"):
        boundary_codecs.encode("t", np.zeros(2, np.float32), "int2")


def test_metadata_describes_the_encoded_tensors() -> None:
    """A server's metadata names what `encode` sends, and the size includes scale and zero point."""
    tensor = np.ones((1, 5), np.float32)
    for codec in boundary_codecs.CODECS:
        sent = boundary_codecs.encode("t", tensor, codec)
        specs = boundary_codecs.wire_specs(TensorSpec("t", "FP32", (1, 5)), codec)
        oip.check_tensors(sent, specs)
        assert boundary_codecs.wire_bytes("t", sent) >= sum(tensor.nbytes for tensor in sent.values())
    assert boundary_codecs.split_codec_name("int8+zstd") == ("int8", True) and boundary_codecs.split_codec_name(
        "raw"
    ) == ("raw", False)
