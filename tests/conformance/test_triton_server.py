"""What `edgectl export` writes, in Triton itself, asked by the agent; skipped where its server binary is not there."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgesplit.offload_client.pool import CancellableCall, OffloadAnswer, OffloadFailure, encode_offload_request
from edgesplit.plan import Row
from edgesplit.release import boundary_codecs
from edgesplit_agent.offload.foreign_server import ForeignServers, ForeignTls
from edgesplit_cli.export_files import triton_config, write_model
from edgesplit_partitioner.onnx_format.export import SlicePart, merge_slices, remote_signature, wire_signature
from support import REPOSITORY
from support import onnx_models as tiny
from support.edgesplit_processes import eventually
from support.recut_repository import CLASS, build_release

PROGRAM = """
import numpy as np
import onnxruntime
import triton_python_backend_utils as backend

class TritonPythonModel:
    def initialize(self, args):
        self.session = onnxruntime.InferenceSession(args["model_repository"] + "/1/model.onnx")

    def execute(self, requests):
        names = [one.name for one in self.session.get_outputs()]
        answers = []
        for request in requests:
            feeds = {one.name(): one.as_numpy() for one in request.inputs()}
            values = self.session.run(names, feeds)
            answers.append(backend.InferenceResponse([backend.Tensor(*one) for one in zip(names, values)]))
        return answers
"""
"""The wheel's Triton has the Python backend alone: this stands for its ONNX backend, on the same onnxruntime."""


def packages() -> Path:
    """Where the `nvidia-pytriton` wheel is installed, by `bench/offload.py` or elsewhere; skips where it is not."""
    given = os.environ.get("EDGESPLIT_PYTRITON")
    home = Path(given) if given else REPOSITORY / "out" / "bench-env" / "triton"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = home / "lib" / version / "site-packages"
    if not (found / "pytriton" / "tritonserver" / "bin" / "tritonserver").is_file():
        pytest.skip(f"no nvidia-pytriton for this Python in {home}; set EDGESPLIT_PYTRITON to a virtual environment")
    return found


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Triton over an empty repository, which it looks into each time it is asked for a model; port and repository."""
    whole = packages() / "pytriton" / "tritonserver"
    folder = tmp_path_factory.mktemp("triton")
    (folder / "models").mkdir()
    shutil.copytree(whole / "backends", folder / "backends")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = folder / "backends" / "python" / "triton_python_backend_stub"
    shutil.copy(whole / "python_backend_stubs" / version / stub.name, stub)
    stub.chmod(0o755)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
    libraries = (str(sysconfig.get_config_var("LIBDIR")), str(packages() / "nvidia_pytriton.libs"))
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}
    environment["PATH"] = f"{packages().parents[2] / 'bin'}:{environment['PATH']}"
    argv = [str(whole / "bin" / "tritonserver"), "--model-repository", str(folder / "models"), "--log-info=false"]
    argv += ["--backend-directory", str(folder / "backends"), "--http-port", str(port), "--allow-grpc=false"]
    argv += ["--allow-metrics=false", "--model-control-mode=explicit"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
    try:
        remote = ForeignServers(ForeignTls()).client_for(f"triton://127.0.0.1:{port}")
        eventually("Triton answers", lambda: isinstance(remote.ping(1.0), float))
        yield port, folder / "models"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("codec", ["raw", "int8", "fp16"])
@pytest.mark.parametrize("coding", ["", "gzip"])
def test_an_exported_half_answers_in_triton_as_our_slices_do(triton: tuple[int, Path], codec: str, coding: str) -> None:
    """By the agent's own connections: tensors raw and by lossy codecs, bodies plain and in gzip; the id comes back."""
    port, repository = triton
    layers = [layer.name for layer in tiny.prepared("chain").graph.layers]
    one = build_release("chain", layers[:2])
    (cut, _) = one.manifest.plans[CLASS].rows
    row: Row = msgspec.structs.replace(cut, codecs=dict.fromkeys(cut.sends, codec))
    parts = [
        SlicePart(each.slice, each.files["graph.onnx"], each.files.get("weights.bin", b""))
        for each in one.cut
        if each.slice.name in row.remote
    ]
    model, name = merge_slices(one.manifest, row, parts, "half").SerializeToString(), f"{one.digest}.pi3b+.{codec}"
    inputs, outputs = wire_signature(one.manifest, row)
    config = triton_config(name, msgspec.to_builtins(inputs), msgspec.to_builtins(outputs))
    home = write_model(repository, name, config.replace('"onnxruntime"', '"python"'), model)
    (home / "1" / "model.py").write_text(PROGRAM)
    load(port, name)
    (spec,) = remote_signature(one.manifest, row)[0]
    sample = np.random.default_rng(3).standard_normal(spec.shape).astype(np.float32)
    travels = boundary_codecs.encode(spec.name, sample, codec)

    asked = encode_offload_request(name, "id-7", travels, outputs, left_s=60.0, coding=coding)  # type: ignore[arg-type]
    answer = ForeignServers(ForeignTls()).client_for(f"triton://127.0.0.1:{port}").infer(asked, CancellableCall(), 60.0)

    assert isinstance(answer, OffloadAnswer), answer
    expected = tiny.run_whole(model, travels)
    for output, tensor in expected.items():
        assert np.allclose(answer.outputs[output], tensor, rtol=1e-4, atol=1e-6)


def test_a_model_missing_in_triton_is_a_server_failure(triton: tuple[int, Path]) -> None:
    """By its version it says 400 or 404; 400 would mean of our own server that the input is wrong."""
    remote = ForeignServers(ForeignTls()).client_for(f"triton://127.0.0.1:{triton[0]}")
    failure = remote.infer(
        encode_offload_request("not.there.cut-1", "i", {"x": np.zeros(1, np.float32)}, (), left_s=20.0),
        CancellableCall(),
        20.0,
    )
    assert isinstance(failure, OffloadFailure) and failure.cause == "server"
    assert failure.status in (400, 404)


def load(port: int, model: str) -> None:
    """By Triton's model repository extension; Triton's own client would escape the plus, which Triton does not undo."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", f"/v2/repository/models/{model}/load", body="{}")
    response = connection.getresponse()
    assert response.status == 200, response.read()
    connection.close()
