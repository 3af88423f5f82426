"""Requests and answers that are recognised by their bytes: the same as when every word is looked at, or not at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec
from edgesplit_offload.models.fast_codec import FastCodec

INPUTS = (TensorSpec("a", "FP32", (1, 4)), TensorSpec("b", "INT64", (2,)))
OUTPUTS = (TensorSpec("y", "FP32", (1, 3)), TensorSpec("z", "UINT8", (2, 2)))
A, B = np.array([[1, 2, 3, 4]], np.float32), np.array([-5, 6], np.int64)


def codec(inputs: tuple[TensorSpec, ...] = INPUTS) -> FastCodec:
    return FastCodec("m", "1", inputs, OUTPUTS)


def body(request: oip.InferRequest) -> tuple[bytes, int]:
    buffers, length = oip.encode_request(request)
    return b"".join(buffers), length


def changed(change: Any) -> tuple[bytes, int]:
    """The plain request with its JSON changed."""
    raw, length = body(oip.InferRequest({"a": A, "b": B}, id="i"))
    told = msgspec.json.decode(raw[:length])
    change(told)
    json = msgspec.json.encode(told)
    json += b" " * (-len(json) % 64)
    return json + raw[length:], len(json)


@pytest.mark.parametrize(
    "request_",
    [
        oip.InferRequest({"a": A, "b": B}),
        oip.InferRequest({"b": B, "a": A}, id="1"),
        oip.InferRequest({"a": A, "b": B}, ("z",), 'ü"', {"timeout": 5_000, "word": "w"}),
        oip.InferRequest({"a": A, "b": B}, ("z", "y"), binary_outputs=frozenset({"y"})),
        oip.InferRequest({"a": A, "b": B}, binary_outputs=False),
    ],
)
def test_a_recognised_request_decodes_as_by_the_general_decoder(request_: oip.InferRequest) -> None:
    """Inputs, outputs, id, parameters: as `oip` reads them, and the inputs are views of the body; also when the same
    words come again, with other numbers behind them."""
    mine = codec()
    for times in range(4):
        raw, length = body(dataclasses.replace(request_, inputs={n: times * t for n, t in request_.inputs.items()}))
        found, whole = mine.decode_request(raw, length), oip.decode_request(raw, length)
        assert found is not None
        assert {name: one.tolist() for name, one in found.inputs.items()} == {
            name: one.tolist() for name, one in whole.inputs.items()
        }
        assert [one.dtype for one in found.inputs.values()] == [one.dtype for one in whole.inputs.values()]
        assert not any(one.flags.owndata for one in found.inputs.values())
        told = (found.outputs, found.id, found.parameters, found.binary_outputs)
        assert told == (whole.outputs, whole.id, whole.parameters, whole.binary_outputs)


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["inputs"].pop(),
        lambda told: told["inputs"].append(told["inputs"][0]),
        lambda told: told["inputs"][0].update(name="c"),
        lambda told: told["inputs"][0].update(name="b"),
        lambda told: told["inputs"][0].update(shape=[4, 1]),
        lambda told: told["inputs"][0].update(datatype="INT32"),
        lambda told: told["inputs"][0].update(data=[1, 2, 3, 4]),
        lambda told: told["inputs"][0]["parameters"].update(binary_data_size=8),
        lambda told: told["inputs"][0]["parameters"].update(shared_memory_region="r"),
        lambda told: told["parameters"].update(shared_memory_region="r"),
        lambda told: told.update(outputs=[{"name": "nobody"}]),
        lambda told: told.update(outputs=[{"name": "y"}, {"name": "y"}]),
        lambda told: told.update(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r"}}]),
        lambda told: told.update(id=7),
    ],
)
def test_any_other_request_is_left_to_the_general_decoder(change: Any) -> None:
    """One word that is different, and it is looked at as a whole."""
    assert codec().decode_request(*changed(lambda told: None)) is not None
    assert codec().decode_request(*changed(change)) is None


def test_wrong_lengths_and_alignment_are_left_to_the_general_decoder() -> None:
    """No byte beyond the body is looked at, whatever lengths are told."""
    raw, length = changed(lambda told: None)
    knowing = codec()
    for _ in range(3):
        assert knowing.decode_request(raw, length) is not None
    for spoilt, told in ((raw[:-1], length), (raw + b"x", length), (raw, None), (raw, len(raw) + 1), (b"", 0)):
        assert codec().decode_request(spoilt, told) is None
        assert knowing.decode_request(spoilt, told) is None
    json = raw[:length].rstrip()
    odd = json + b" " * (1 + -len(json) % 8)
    assert codec().decode_request(odd + raw[length:], len(odd)) is None
    for cut in range(len(raw)):
        assert codec().decode_request(raw[:cut], length) is None
        assert knowing.decode_request(raw[:cut], length) is None


def test_heads_that_never_repeat_do_not_fill_the_cache() -> None:
    """Requests with an id of their own, or with heads of any length: the cache of known heads stays small."""
    mine = codec()
    for number in range(1_000):
        raw, length = body(oip.InferRequest({"a": A, "b": B}, id=str(number)))
        assert mine.decode_request(raw, length) is not None
    long, length = body(oip.InferRequest({"a": A, "b": B}, id="x" * 10_000))
    for _ in range(3):
        assert mine.decode_request(long, length) is not None
    assert sum(map(len, mine._heads)) < 50_000


@pytest.mark.parametrize("kind", ["BYTES", "BOOL"])
def test_types_checked_by_element_are_left_to_the_general_decoder(kind: str) -> None:
    """Nor is a tensor without a fixed shape."""
    for spec in (TensorSpec("a", kind, (1,)), TensorSpec("a", "FP32", (-1,))):
        raw, length = body(oip.InferRequest({"a": np.array([1], np.float32)}))
        assert codec((spec,)).decode_request(raw, length) is None


@pytest.mark.parametrize("id", ["", "1", 'ü"\\'])
def test_a_fast_response_equals_the_general_encoders(id: str) -> None:
    """Twice, as the second has the words of the first; and with other shapes."""
    mine = codec()
    for shape in ((1, 3), (1, 3), (2, 3)):
        outputs = {"y": np.arange(3 * shape[0], dtype=np.float32).reshape(shape), "z": np.eye(2, dtype=np.uint8)}
        written = mine.encode_response(outputs, id)
        assert written is not None
        found = oip.decode_response(b"".join(written[0]), written[1])
        buffers, length = oip.encode_response(oip.InferResponse("m", outputs, "1", id))
        whole = oip.decode_response(b"".join(buffers), length)
        assert (found.model, found.version, found.id) == (whole.model, whole.version, whole.id)
        assert {name: one.tolist() for name, one in found.outputs.items()} == {
            name: one.tolist() for name, one in whole.outputs.items()
        }


def test_other_responses_are_left_to_the_general_encoder() -> None:
    """Text, no elements, or elements that do not lie in order."""
    for tensor in (np.array([b"x"], object), np.empty((0, 2), np.float32), np.ones((2, 3), np.float32).T):
        assert codec().encode_response({"y": tensor}, "") is None
