"""Triton's own HTTP client against the agent's local endpoint: every call it has, errors included.

The calls go to a real agent process with a deployed model. The reference models' stored tensors go through the same
endpoint in this process, as bytes and through system shared memory.
"""

from __future__ import annotations

import asyncio
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

import edgesplit
from support.edgesplit_processes import Cloud, eventually, frames
from support.reference_models import reference_file
from support.served_models import Served, loaded

MODEL = "digits"
PATIENCE = {"timeout": 60_000_000}
"""Microseconds: what is asked here is not how fast a busy machine is."""
Client = triton.InferenceServerClient
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def socket_path() -> Iterator[Path]:
    """Where the agent's Unix socket is: a short path, wherever the test's folder lies."""
    with tempfile.TemporaryDirectory(prefix="es-", dir="/tmp") as folder:
        yield Path(folder) / "agent.sock"


@pytest.fixture(scope="module")
def address(cloud: Cloud, socket_path: Path) -> str:
    """HOST:PORT of a real agent, on which the digits model runs alone."""
    cloud.push_digits()
    agent = cloud.agent("triton-cam", "raspberrypi4", "--socket", str(socket_path), "--socket-mode", "660")
    cloud.edgectl("deploy", MODEL, "--partition", "device", "--to", "triton-cam", "--wait", "60")
    return agent.url.removeprefix("http://")


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Client]:
    """Triton's, of that agent."""
    with triton.InferenceServerClient(address, concurrency=4) as own:
        eventually("the model is ready", lambda: own.is_model_ready(MODEL))
        yield own


def tensor(name: str, value: Array, **how: bool) -> triton.InferInput:
    given = triton.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    given.set_data_from_numpy(value, **how)
    return given


@pytest.fixture(scope="module")
def frame() -> Array:
    return np.frombuffer(frames(1)[0][0], np.uint8)


@pytest.fixture(scope="module")
def output(client: Client) -> str:
    """The name of the model's one output."""
    return str(client.get_model_metadata(MODEL)["outputs"][0]["name"])


@pytest.fixture(scope="module")
def expected(client: Client, frame: Array, output: str) -> Array:
    result: Array = client.infer(MODEL, [tensor("frame", frame)], **PATIENCE).as_numpy(output)
    return result


def test_health_and_metadata(client: Client) -> None:
    """Live, ready, who it is, what it runs, in which versions."""
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(MODEL) and client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready(MODEL, "9") and not client.is_model_ready("nothing")
    server = client.get_server_metadata()
    assert server["name"] == "edgesplit" and "system_shared_memory" in server["extensions"]
    assert client.get_model_repository_index() == [{"name": MODEL, "version": "1", "state": "READY"}]
    metadata = client.get_model_metadata(MODEL, "1")
    assert metadata["inputs"] == [{"name": "frame", "datatype": "UINT8", "shape": [-1]}]
    config = client.get_model_config(MODEL)
    assert config["name"] == MODEL and config["max_batch_size"] == 0
    assert config["input"] == [{"name": "frame", "data_type": "TYPE_UINT8", "dims": [-1]}]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_infer(
    client: Client, frame: Array, output: str, expected: Array, binary_in: bool, binary_out: bool | None,
    coding: str | None,
) -> None:  # fmt: skip
    """Bytes and JSON each way, compressed each way or not; all outputs as bytes where none is named."""
    wanted = None if binary_out is None else [triton.InferRequestedOutput(output, binary_data=binary_out)]
    result = client.infer(
        MODEL, [tensor("frame", frame, binary_data=binary_in)], outputs=wanted, request_id="id-1", model_version="1",
        request_compression_algorithm=coding, response_compression_algorithm=coding, priority=3, **PATIENCE,
        parameters={"mine": 1},
    )  # fmt: skip
    np.testing.assert_allclose(result.as_numpy(output), expected, rtol=1e-5, atol=1e-6)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("id-1", MODEL, "1")


def test_asynchronous_requests(client: Client, frame: Array, output: str, expected: Array) -> None:
    """Several in flight, each with its own answer and id."""
    calls = [client.async_infer(MODEL, [tensor("frame", frame)], request_id=f"é中{n}", **PATIENCE) for n in range(8)]
    for n, call in enumerate(calls):
        result = call.get_result()
        assert result.get_response()["id"] == f"é中{n}"
        np.testing.assert_array_equal(result.as_numpy(output), expected)


def test_the_asyncio_client(address: str, frame: Array, output: str, expected: Array) -> None:
    """Triton's other HTTP client, which is aiohttp's."""

    async def run() -> Array:
        async with triton_aio.InferenceServerClient(address) as own:
            assert await own.is_server_ready()
            result: Array = (await own.infer(MODEL, [tensor("frame", frame)], **PATIENCE)).as_numpy(output)
            return result

    np.testing.assert_array_equal(asyncio.run(run()), expected)


def test_our_client_over_the_agents_unix_socket(
    address: str, socket_path: Path, frame: Array, output: str, expected: Array
) -> None:
    """The same answers as by TCP; the socket has the mode that was asked for."""
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o660
    with edgesplit.Client(f"unix://{socket_path}") as own:
        assert own.models() == (MODEL,)
        large = np.concatenate([frame, np.zeros(100_000, np.uint8)])  # what follows a JPEG's end is nobody's
        for one in (frame, large):
            answer = own.infer(MODEL, {"frame": one}, deadline_s=60)
            np.testing.assert_allclose(answer.outputs[output], expected, rtol=1e-5, atol=1e-6)


def test_statistics_count_what_was_asked(client: Client, frame: Array) -> None:
    """By model, by version, and of all models; successes and failures, with their times."""

    def counts() -> tuple[int, int]:
        told = client.get_inference_statistics(MODEL, "1")["model_stats"][0]
        assert (told["name"], told["version"]) == (MODEL, "1")
        ends = told["inference_stats"]
        assert ends["success"]["count"] == told["inference_count"]
        assert ends["success"]["ns"] >= ends["compute_infer"]["ns"]
        return ends["success"]["count"], ends["fail"]["count"]

    good, bad = counts()
    client.infer(MODEL, [tensor("frame", frame)], **PATIENCE)
    with pytest.raises(InferenceServerException):
        client.infer(MODEL, [tensor("other", frame)], **PATIENCE)
    assert counts() == (good + 1, bad + 1)
    assert client.get_inference_statistics()["model_stats"] == client.get_inference_statistics(MODEL)["model_stats"]
    with pytest.raises(InferenceServerException, match="nothing runs here"):
        client.get_inference_statistics("nothing")


def test_settings_are_told_and_not_changed_by_clients(client: Client) -> None:
    """Of logs and traces: asking is answered, also by a POST that changes nothing; a change is refused, with why."""
    assert client.get_log_settings()["log_info"] is True
    assert client.update_log_settings({"log_info": True})["log_warning"] is True
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_trace_settings(MODEL)["trace_level"] == ["OFF"]
    assert client.update_trace_settings(settings={"trace_level": ["OFF"]})["trace_level"] == ["OFF"]
    refused: list[Callable[[], object]] = [
        lambda: client.update_log_settings({"log_verbose_level": 1}),
        lambda: client.update_trace_settings(MODEL, {"trace_level": ["TIMESTAMPS"]}),
    ]
    for change in refused:
        with pytest.raises(InferenceServerException, match="cannot be changed here"):
            change()


def test_models_come_by_deployments(client: Client) -> None:
    """Loading and unloading by a client is refused; the model stays."""
    for call in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="edgectl deploy") as raised:
            call(MODEL)
        assert raised.value.status() == "400"
    assert client.is_model_ready(MODEL)


def test_cuda_shared_memory_is_refused(client: Client) -> None:
    """Each of its calls, in words."""
    refused: list[Callable[[], object]] = [
        client.get_cuda_shared_memory_status,
        lambda: client.register_cuda_shared_memory("r", b"handle", 0, 64),
        client.unregister_cuda_shared_memory,
    ]
    for call in refused:
        with pytest.raises(InferenceServerException, match="CUDA shared memory is not served here"):
            call()


def test_errors_carry_their_status_and_reason(client: Client, frame: Array) -> None:
    """The client raises its own exception, with our words."""
    cases: list[tuple[str, list[triton.InferInput], list[str], str, str]] = [
        ("nothing", [tensor("frame", frame)], [], "404", "no model nothing runs here"),
        (MODEL, [tensor("frame", frame.astype(np.float32))], [], "400", "is FP32, but must be UINT8"),
        (MODEL, [tensor("frame", frame.reshape(1, -1))], [], "400", "has shape"),
        (MODEL, [tensor("other", frame)], [], "400", "missing input 'frame'"),
        (MODEL, [], [], "400", "missing input"),
        (MODEL, [tensor("frame", frame)], ["nothing"], "400", "unknown output 'nothing'"),
        (MODEL, [tensor("frame", frame[:20])], [], "400", ""),
    ]
    for model, inputs, outputs, status, words in cases:
        wanted = [triton.InferRequestedOutput(name) for name in outputs] or None
        with pytest.raises(InferenceServerException) as raised:
            client.infer(model, inputs, outputs=wanted, **PATIENCE)
        assert raised.value.status() == status and words in raised.value.message()


class Regions:
    """System shared memory of Triton's client, registered with a server, and both taken back in the end."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.handles: dict[str, Any] = {}

    def made(self, name: str, size: int, content: Array | None = None, offset: int = 0) -> str:
        """A region of that name."""
        key = f"/edgesplit-test-{uuid.uuid4().hex[:12]}"
        self.handles[name] = handle = shm.create_shared_memory_region(name, key, size + offset, create_only=True)
        if content is not None:
            shm.set_shared_memory_region(handle, [content], offset=offset)
        self.client.register_system_shared_memory(name, key, size, offset=offset)
        return key

    def content(self, name: str, dtype: Any, shape: Any, offset: int = 0) -> Array:
        """A copy of what lies there."""
        found: Array = shm.get_contents_as_numpy(self.handles[name], dtype, shape, offset).copy()
        return found

    def close(self) -> None:
        self.client.unregister_system_shared_memory()
        for handle in self.handles.values():
            shm.destroy_shared_memory_region(handle)


@pytest.fixture
def regions(client: Client) -> Iterator[Regions]:
    own = Regions(client)
    yield own
    own.close()


def test_shared_memory_carries_inputs_and_outputs(
    client: Client, regions: Regions, frame: Array, output: str, expected: Array
) -> None:
    """Both ways, with offsets; the answer says where it put what; status tells what is registered."""
    key = regions.made("in", frame.nbytes + 32, frame, offset=0)
    regions.made("out", expected.nbytes + 64)
    assert client.get_system_shared_memory_status("in") == [
        {"name": "in", "key": key, "offset": 0, "byte_size": frame.nbytes + 32}
    ]
    assert [one["name"] for one in client.get_system_shared_memory_status()] == ["in", "out"]
    given = triton.InferInput("frame", list(frame.shape), "UINT8")
    given.set_shared_memory("in", frame.nbytes)
    wanted = triton.InferRequestedOutput(output)
    wanted.set_shared_memory("out", expected.nbytes, offset=64)
    result = client.infer(MODEL, [given], outputs=[wanted], **PATIENCE)
    told = result.get_output(output)
    assert told["parameters"]["shared_memory_region"] == "out"
    assert told["parameters"]["shared_memory_byte_size"] == expected.nbytes
    np.testing.assert_allclose(
        regions.content("out", expected.dtype, told["shape"], 64), expected, rtol=1e-5, atol=1e-6
    )
    mixed = client.infer(MODEL, [given], **PATIENCE)
    np.testing.assert_allclose(mixed.as_numpy(output), expected, rtol=1e-5, atol=1e-6)
    client.unregister_system_shared_memory("in")
    assert [one["name"] for one in client.get_system_shared_memory_status()] == ["out"]
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'in'"):
        client.infer(MODEL, [given], **PATIENCE)


def test_shared_memory_errors_are_tritons(
    client: Client, regions: Regions, frame: Array, output: str, expected: Array
) -> None:
    """In its words, where it has some; each is a 400, and the agent answers on."""
    regions.made("in", frame.nbytes, frame)
    regions.made("small", 8)
    too_far = triton.InferInput("frame", list(frame.shape), "UINT8")
    too_far.set_shared_memory("in", frame.nbytes, offset=1)
    too_short = triton.InferInput("frame", list(frame.shape), "UINT8")
    too_short.set_shared_memory("in", frame.nbytes - 1)
    no_room = triton.InferRequestedOutput(output)
    no_room.set_shared_memory("small", 8)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("already in manager", lambda: client.register_system_shared_memory("in", "/other", 8)),
        ("Unable to open shared memory region", lambda: client.register_system_shared_memory("x", "/not-there", 8)),
        ("not the key of shared memory", lambda: client.register_system_shared_memory("x", "/../etc/passwd", 8)),
        ("Unable to find system shared memory", lambda: client.get_system_shared_memory_status("nothing")),
        ("Invalid offset", lambda: client.infer(MODEL, [too_far], **PATIENCE)),
        ("do not fill shape", lambda: client.infer(MODEL, [too_short], **PATIENCE)),
        ("bytes of shared memory, and 8 are provided",
         lambda: client.infer(MODEL, [tensor("frame", frame)], outputs=[no_room], **PATIENCE)),
    ]  # fmt: skip
    for words, call in cases:
        with pytest.raises(InferenceServerException, match=words) as raised:
            call()
        assert raised.value.status() == "400"
    client.unregister_system_shared_memory("never-there")
    np.testing.assert_allclose(
        client.infer(MODEL, [tensor("frame", frame)], **PATIENCE).as_numpy(output), expected, rtol=1e-5, atol=1e-6
    )


TOLERANCE = 1e-4
"""Of the largest absolute value of each floating-point output."""
STEPS = 2
"""Integer kernels differ by a step between processors."""
REFERENCES: dict[str, tuple[str, dict[str, int]]] = {
    "squeezenet_fp32.onnx": ("squeezenet_fp32.onnx__cat", {}),
    "squeezenet_fp16.onnx": ("squeezenet_fp16.onnx__n01440764", {}),
    "yolox_nano.onnx": ("yolox_nano.onnx__kite_and_cold", {}),
    "ultraface_rfb_320.onnx": ("ultraface_rfb_320.onnx__face", {}),
    "mnist_cnn.onnx": ("mnist_cnn.onnx__mnist0", {}),
    "silero_vad_16k.onnx": ("silero_vad_16k.onnx__frame10", {"batch": 1, "sequence": 576}),
    "dtln_1.onnx": ("dtln_1_onnx__rand", {}),
    "dtln_2.onnx": ("dtln_2_onnx__rand", {}),
    "gesture_mlp.onnx": ("gesture_mlp.onnx__row0", {"batch": 1}),
    "mobilenet_v1_0.25_224_float.tflite": ("mobilenet_v1_0.25_224_float.tflite__cat", {}),
    "mobilenet_v1_0.75_192_quant.tflite": ("mobilenet_v1_0.75_192_quant.tflite__cat", {}),
    "resnet8_cifar10_float.tflite": ("resnet8_cifar10_float.tflite__cifar0", {}),
    "resnet8_cifar10_int8.tflite": ("resnet8_cifar10_int8.tflite__cifar0", {}),
    "dtln_1.tflite": ("dtln_1_tflite__rand", {}),
    "dtln_2.tflite": ("dtln_2_tflite__rand", {}),
    "gesture_mlp.tflite": ("gesture_mlp.tflite__row0", {}),
}


@pytest.mark.parametrize("file", REFERENCES)
def test_reference_models_answer_as_stored(tmp_path: Path, file: str) -> None:
    """Each output within 1e-4, as bytes and in shared memory, whichever way the inputs came."""
    reference, bindings = REFERENCES[file]
    raw = reference_file("models", file).read_bytes()
    with np.load(reference_file("ref", f"{reference}.npz")) as stored:
        inputs = {key[3:]: stored[key] for key in stored.files if key.startswith("in:")}
        wanted = {key[4:]: stored[key] for key in stored.files if key.startswith("out:")}
    assert inputs and wanted
    with Served({"m": loaded(raw, tmp_path / "slices", bindings)}) as served, Client(served.host) as client:
        result = client.infer("m", [tensor(name, value) for name, value in inputs.items()], **PATIENCE)
        for name, value in wanted.items():
            assert is_close(result.as_numpy(name), value), name
        regions = Regions(client)
        try:
            check_through_shared_memory(client, regions, inputs, wanted)
        finally:
            regions.close()


def check_through_shared_memory(
    client: Client, regions: Regions, inputs: dict[str, Array], wanted: dict[str, Array]
) -> None:
    """All inputs in one region each, all outputs in another each."""
    given, asked = [], []
    for number, (name, value) in enumerate(inputs.items()):
        regions.made(f"in {number}", value.nbytes, np.ascontiguousarray(value))
        given.append(triton.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype)))
        given[-1].set_shared_memory(f"in {number}", value.nbytes)
    for number, (name, value) in enumerate(wanted.items()):
        regions.made(f"out {number}", value.nbytes)
        asked.append(triton.InferRequestedOutput(name))
        asked[-1].set_shared_memory(f"out {number}", value.nbytes)
    client.infer("m", given, outputs=asked, **PATIENCE)
    for number, (name, value) in enumerate(wanted.items()):
        assert is_close(regions.content(f"out {number}", value.dtype, value.shape), value), name


def is_close(got: Array, want: Array) -> bool:
    """Within what another processor explains."""
    apart = float(np.abs(got.astype(np.float64) - want).max())
    return apart <= (TOLERANCE * max(float(np.abs(want).max()), 1e-30) if want.dtype.kind == "f" else STEPS)
