"""Triton's own HTTP client against our offload server: what it asks is answered as Triton would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from edgesplit import codecs
from edgesplit_offload.server import OffloadServer
from handmade_release import CODEC, CUT, DIGEST, MID, REMOTE, HandmadeRelease


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton.InferenceServerClient]:
    release = HandmadeRelease(tmp_path_factory.mktemp("release"))
    server = OffloadServer(Path("unused"), b"", open_release=release.open)
    server.start()
    with triton.InferenceServerClient(server.url.removeprefix("http://"), concurrency=4) as own:
        yield own
    server.stop()


def tensor(name: str, value: np.ndarray[Any, Any], datatype: str = "FP32", **how: bool) -> triton.InferInput:
    given = triton.InferInput(name, list(value.shape), datatype)
    given.set_data_from_numpy(value, **how)
    return given


def mid(**how: bool) -> list[triton.InferInput]:
    return [tensor("mid", MID, **how)]


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    """Live, ready, who it is, and which models there are once their release was opened."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(CUT)
    assert client.is_model_ready(CUT, "1")
    assert client.get_server_metadata()["name"] == "edgesplit"
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert {"name": CUT, "version": "1", "state": "READY"} in client.get_model_repository_index()


def test_model_metadata_and_configuration(client: triton.InferenceServerClient) -> None:
    """The row's sends are the model's inputs, its receives the outputs."""
    metadata = client.get_model_metadata(REMOTE)
    assert metadata["inputs"] == [{"name": n, "datatype": "FP32", "shape": [1, 4]} for n in ("a", "b")]
    assert [one["name"] for one in metadata["outputs"]] == ["out", "same"]
    config = client.get_model_config(CUT, "1")
    assert config["name"] == CUT
    assert config["max_batch_size"] == 0
    assert config["input"] == [{"name": "mid", "data_type": "TYPE_FP32", "dims": [1, 4]}]


@pytest.mark.parametrize("binary", [True, False])
def test_eight_bits_travel_as_ordinary_tensors(client: triton.InferenceServerClient, binary: bool) -> None:
    """A row's codec needs nothing that Triton's client does not have: the metadata says what to send."""
    sent = codecs.encode("mid", MID, "int8")
    told = client.get_model_metadata(CODEC)["inputs"]
    inputs = [tensor(one["name"], sent[one["name"]], one["datatype"], binary_data=binary) for one in told]
    np.testing.assert_allclose(client.infer(CODEC, inputs).as_numpy("out"), 2 * MID, atol=8 / 255)


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_infer(
    client: triton.InferenceServerClient, binary_in: bool, binary_out: bool | None, coding: str | None
) -> None:
    """Binary and JSON tensors each way, compressed or not; None asks for no output by name and gets all, as bytes."""
    wanted = None if binary_out is None else [triton.InferRequestedOutput("out", binary_data=binary_out)]
    result = client.infer(
        CUT, mid(binary_data=binary_in), outputs=wanted, request_compression_algorithm=coding, request_id="id-1"
    )
    np.testing.assert_array_equal(result.as_numpy("out"), 2 * MID)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("id-1", CUT, "1")
    assert [one["name"] for one in response["outputs"]] == (["out", "same"] if wanted is None else ["out"])


def test_a_client_that_would_take_a_compressed_answer_gets_a_plain_one(client: triton.InferenceServerClient) -> None:
    """Accept-Encoding is an offer, not a demand."""
    result = client.infer(CUT, mid(), response_compression_algorithm="gzip")
    np.testing.assert_array_equal(result.as_numpy("same"), MID)


def test_several_inputs_and_outputs_mixed(client: triton.InferenceServerClient) -> None:
    """Two inputs, one as bytes and one as JSON, two outputs, one as bytes and one as JSON."""
    inputs = [tensor("b", 10 * MID, binary_data=False), tensor("a", MID)]
    wanted = [triton.InferRequestedOutput("same", binary_data=False), triton.InferRequestedOutput("out")]
    result = client.infer(REMOTE, inputs, outputs=wanted, model_version="1")
    np.testing.assert_array_equal(result.as_numpy("out"), 22 * MID)
    np.testing.assert_array_equal(result.as_numpy("same"), 11 * MID)


def test_asynchronous_requests(client: triton.InferenceServerClient) -> None:
    """Several in flight, each with its own answer and id; ids may be any text."""
    calls = [client.async_infer(CUT, [tensor("mid", n * MID)], request_id=f"é中{n}") for n in range(12)]
    for n, call in enumerate(calls):
        result = call.get_result()
        assert result.get_response()["id"] == f"é中{n}"
        np.testing.assert_array_equal(result.as_numpy("out"), 2 * n * MID)


def test_parameters_and_timeout_are_taken(client: triton.InferenceServerClient) -> None:
    """Parameters that mean nothing to us are no error."""
    client.infer(CUT, mid(), timeout=5_000_000, priority=3, parameters={"mine": 1})


@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "status", "words"),
    [
        ("digits", mid(), [], "404", "unknown model"),
        (f"{'cd' * 32}.x.cut-1", mid(), [], "404", "not here"),
        (f"{DIGEST}.x.cut-9", mid(), [], "404", "no row"),
        (CUT, [tensor("mid", MID[:, :3])], [], "400", "[1, 3], but must have [1, 4]"),
        (CUT, [tensor("mid", MID.astype(np.float64), "FP64")], [], "400", "is FP64, but must be FP32"),
        (CUT, [tensor("mid", np.array([b"x"], object), "BYTES")], [], "400", "is BYTES, but must be FP32"),
        (CUT, [tensor("other", MID)], [], "400", "missing input 'mid'"),
        (CUT, [*mid(), tensor("other", MID)], [], "400", "unknown input 'other'"),
        (CUT, [], [], "400", "missing input"),
        (CUT, mid(), ["nothing"], "400", "unknown output 'nothing'"),
    ],
)
def test_errors_carry_their_status_and_reason(
    client: triton.InferenceServerClient,
    model: str,
    inputs: list[triton.InferInput],
    outputs: list[str],
    status: str,
    words: str,
) -> None:
    """The client raises its own exception, with our words."""
    wanted = [triton.InferRequestedOutput(name) for name in outputs] or None
    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, inputs, outputs=wanted)
    assert raised.value.status() == status
    assert words in raised.value.message()


def test_what_is_not_there_is_not_ready(client: triton.InferenceServerClient) -> None:
    """An unknown model, an unknown version, and the metadata of either."""
    assert not client.is_model_ready("digits")
    assert not client.is_model_ready(CUT, "2")
    with pytest.raises(InferenceServerException, match="no version"):
        client.get_model_metadata(CUT, "2")
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.get_model_config("digits")
    with pytest.raises(InferenceServerException, match="no version"):
        client.get_inference_statistics(CUT, "2")
