"""Triton's own HTTP client against our offload server: what it asks is answered as Triton would."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from edgesplit.release import boundary_codecs
from edgesplit_cli.demo.run import free_port
from edgesplit_offload.server import OffloadServer
from support.handmade_release import CODEC, CUT, DIGEST, MID, REMOTE, HandmadeRelease
from support.offload_processes import Serving, signed_release


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
def test_eight_bit_codecs_use_ordinary_tensors(client: triton.InferenceServerClient, binary: bool) -> None:
    """A row's codec needs nothing that Triton's client does not have: the metadata says what to send."""
    sent = boundary_codecs.encode("mid", MID, "int8")
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


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_large_answer_comes_in_the_coding_that_is_asked_for(
    client: triton.InferenceServerClient, coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And both ways at once; a small one comes plain, which the client takes as well."""
    monkeypatch.setattr("edgesplit_offload.inference.pipeline.MIN_COMPRESSED_BYTES", 1)
    result = client.infer(CUT, mid(), request_compression_algorithm=coding, response_compression_algorithm=coding)
    np.testing.assert_array_equal(result.as_numpy("out"), 2 * MID)
    np.testing.assert_array_equal(result.as_numpy("same"), MID)


def test_bodies_made_and_read_without_the_client(client: triton.InferenceServerClient) -> None:
    """What the client's static methods make is what we take, and they read what we answer."""
    body, length = triton.InferenceServerClient.generate_request_body(mid())
    headers = {"Inference-Header-Content-Length": str(length)} if length else {}
    response = client._post(f"v2/models/{CUT}/infer", body, headers, None)
    told = response.get("Inference-Header-Content-Length")
    result = triton.InferenceServerClient.parse_response_body(
        bytes(response.read()), header_length=int(told) if told else None
    )
    np.testing.assert_array_equal(result.as_numpy("out"), 2 * MID)


def test_models_are_loaded_and_unloaded(client: triton.InferenceServerClient) -> None:
    """The index says which run without loading; unloading lets go of memory, and the next request loads again."""
    client.load_model(CUT)
    assert entry(client, CUT) == {"name": CUT, "version": "1", "state": "READY"}
    client.unload_model(CUT)
    assert entry(client, CUT)["reason"] == "loaded on demand"
    np.testing.assert_array_equal(client.infer(CUT, mid()).as_numpy("out"), 2 * MID)
    client.unload_model(CUT, unload_dependents=True)
    assert client.is_model_ready(CUT)
    assert "reason" not in entry(client, CUT)
    for refused in (
        lambda: client.load_model("digits"),
        lambda: client.unload_model("digits"),
        lambda: client.load_model(CUT, config='{"max_batch_size": 8}'),
    ):
        with pytest.raises(InferenceServerException, match=r"unknown model|signed release"):
            refused()


def entry(client: triton.InferenceServerClient, model: str) -> dict[str, str]:
    (found,) = (one for one in client.get_model_repository_index() if one["name"] == model)
    return found


def test_statistics_count_what_was_asked(client: triton.InferenceServerClient) -> None:
    """Of one model, of one version, and of all: as many as were answered and failed, with their times."""

    def of(told: dict[str, Any]) -> dict[str, Any]:
        (found,) = (one for one in told["model_stats"] if one["name"] == REMOTE)
        return found

    client.infer(REMOTE, [tensor("a", MID), tensor("b", MID)])
    before = of(client.get_inference_statistics(REMOTE))
    for _ in range(3):
        client.infer(REMOTE, [tensor("a", MID), tensor("b", MID)])
    with pytest.raises(InferenceServerException):
        client.infer(REMOTE, mid())
    for told in (client.get_inference_statistics(REMOTE, "1"), client.get_inference_statistics()):
        after = of(told)
        assert after["inference_count"] - before["inference_count"] == 3
        assert after["execution_count"] - before["execution_count"] == 3
        assert after["last_inference"] >= before["last_inference"] > 0
        stats, was = after["inference_stats"], before["inference_stats"]
        assert stats["success"]["count"] - was["success"]["count"] == 3
        assert stats["fail"]["count"] - was["fail"]["count"] == 1
        assert stats["success"]["ns"] > was["success"]["ns"]
        for phase in ("queue", "compute_input", "compute_infer", "compute_output"):
            assert stats[phase]["count"] - was[phase]["count"] == 3
        assert [one["batch_size"] for one in after["batch_stats"]] == [1]
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.get_inference_statistics("digits")


def test_trace_and_log_settings(client: triton.InferenceServerClient) -> None:
    """They are told; log levels can be set, and what cannot be set says so."""
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_trace_settings(CUT) == client.update_trace_settings(CUT, {"trace_level": ["OFF"]})
    root = logging.getLogger()
    level = root.level
    try:
        assert client.update_log_settings({"log_info": False})["log_info"] is False
        assert (root.level, client.get_log_settings()["log_warning"]) == (logging.WARNING, True)
        assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    finally:
        root.setLevel(level)
    for refused in (
        lambda: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}),
        lambda: client.update_trace_settings(settings={"trace_colour": "red"}),
        lambda: client.update_log_settings({"log_file": "/tmp/x"}),
        lambda: client.update_log_settings({"log_info": "no"}),
        lambda: client.get_trace_settings("digits"),
    ):
        with pytest.raises(InferenceServerException):
            refused()


def test_shared_memory_is_refused_with_its_reason(client: triton.InferenceServerClient) -> None:
    """None is registered and none can be: clients are elsewhere. Unregistering what is not there is no error."""
    assert client.get_system_shared_memory_status() == []
    assert client.get_cuda_shared_memory_status() == []
    for unregister in (client.unregister_system_shared_memory, client.unregister_cuda_shared_memory):
        unregister()
        unregister("mine")
    for refused in (
        lambda: client.register_system_shared_memory("mine", "/mine", 64),
        lambda: client.register_cuda_shared_memory("mine", b"handle", 0, 64),
    ):
        with pytest.raises(InferenceServerException, match="shared memory is not supported"):
            refused()
    for status in (client.get_system_shared_memory_status, client.get_cuda_shared_memory_status):
        with pytest.raises(InferenceServerException, match="no shared memory region 'mine'"):
            status("mine")
    inside = triton.InferInput("mid", [1, 4], "FP32")
    inside.set_shared_memory("mine", 16)
    with pytest.raises(InferenceServerException):
        client.infer(CUT, [inside])


CALLS_TESTED_HERE = {
    "async_infer", "close", "generate_request_body", "get_cuda_shared_memory_status", "get_inference_statistics",
    "get_log_settings", "get_model_config", "get_model_metadata", "get_model_repository_index", "get_server_metadata",
    "get_system_shared_memory_status", "get_trace_settings", "infer", "is_model_ready", "is_server_live",
    "is_server_ready", "load_model", "parse_response_body", "plugin", "register_cuda_shared_memory",
    "register_plugin", "register_system_shared_memory", "unload_model", "unregister_cuda_shared_memory",
    "unregister_plugin", "unregister_system_shared_memory", "update_log_settings", "update_trace_settings",
}  # fmt: skip


def test_every_call_of_the_client_is_tested() -> None:
    """A call that a later version brings fails this, and is then looked at."""
    assert {name for name in dir(triton.InferenceServerClient) if not name.startswith("_")} == CALLS_TESTED_HERE


def test_a_plugin_of_the_client_adds_its_headers(client: triton.InferenceServerClient) -> None:
    """Headers that mean nothing to us are no error."""
    from tritonclient.http.auth import BasicAuth

    client.register_plugin(BasicAuth("user", "password"))
    assert client.plugin() is not None
    assert client.is_server_live()
    client.unregister_plugin()


def test_several_processes_answer_as_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Statistics and metrics are summed over all of them, loading reaches each, and their index is one."""
    signed, scraped = signed_release(tmp_path_factory.mktemp("signed")), free_port()
    options = ("--processes", 2, "--metrics", f"127.0.0.1:{scraped}")
    with Serving(signed, *options) as serving, ExitStack() as stack:
        clients = [
            stack.enter_context(triton.InferenceServerClient(f"127.0.0.1:{serving.port}", concurrency=1))
            for _ in range(4)
        ]
        for one in clients:
            assert one.is_server_ready()
        clients[0].load_model(signed.model)
        for n, one in enumerate(clients):
            np.testing.assert_array_equal(
                one.infer(signed.model, [tensor("mid", n * MID)]).as_numpy("out"), 2 * n * MID
            )
        for one in clients:
            (told,) = one.get_inference_statistics(signed.model)["model_stats"]
            assert told["inference_count"] == 4
            assert "reason" not in entry(one, signed.model)
        with urllib.request.urlopen(f"http://127.0.0.1:{scraped}/metrics") as page:
            lines = page.read().decode().splitlines()
        assert "edgesplit_offload_processes 2.0" in lines
        answered = [line for line in lines if line.startswith("edgesplit_offload_requests_total{")]
        assert [(line.split()[-1], 'outcome="answered"' in line) for line in answered] == [("4.0", True)]
        clients[1].unload_model(signed.model)
        assert all(entry(one, signed.model)["reason"] == "loaded on demand" for one in clients)


def test_unknown_models_and_versions_are_not_ready(client: triton.InferenceServerClient) -> None:
    """An unknown model, an unknown version, and the metadata of either."""
    assert not client.is_model_ready("digits")
    assert not client.is_model_ready(CUT, "2")
    with pytest.raises(InferenceServerException, match="no version"):
        client.get_model_metadata(CUT, "2")
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.get_model_config("digits")
    with pytest.raises(InferenceServerException, match="no version"):
        client.get_inference_statistics(CUT, "2")
