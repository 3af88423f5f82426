"""The servers that are compared: how each is started for one model, and how requests to it are made.

Each runs one thread per inference and as many inferences at once as there are cores, by its own options. Each has a
process group of its own, and stopping it kills the whole group.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import ours, wires
from .environments import Environment, NotMeasured
from .suffixes import INPUT, OUTPUT, Suffix
from .wires import Request

PROGRAMS = Path(__file__).parent / "programs"
WORKERS = os.cpu_count() or 1
LARGEST_BATCH = 32
BATCHER_WAIT_US = 500


@dataclass(frozen=True)
class ServerCommand:
    """A server's command line, and the requests for it."""

    argv: Sequence[str]
    requests: Mapping[str, tuple[int, Request]]
    """Port and request by name of the wire; the name is empty where there is only one wire."""
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


@dataclass(frozen=True)
class Job:
    """One model for one contender, with a folder for its files."""

    suffix: Suffix
    model: Path
    folder: Path


@dataclass(frozen=True)
class Contender:
    """A kind of server."""

    name: str
    prepare: Callable[[Job, Environment | None], ServerCommand]
    environment: str = ""
    """Name of the virtual environment in which it is installed; empty for the project's own."""
    suffixes: tuple[str, ...] = ()
    """Names of the suffixes that it is measured with; empty for all."""


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ours(*options: str) -> Callable[[Job, Environment | None], ServerCommand]:
    """Our offload server as a process with a signed release; without TLS, because no other contender has it."""

    def prepare(job: Job, _: Environment | None) -> ServerCommand:
        served, port = ours.release(job.model, job.folder), free_port()
        argv = [sys.executable, "-m", "edgesplit_offload.main", "--releases", str(served.releases)]
        argv += ["--root", str(served.root), "--port", str(port), "--log", "warning", *options]
        return ServerCommand(argv, {"": (port, wires.oip_http(job.suffix.sample(), served.model))})

    return prepare


def _ours_unbatched(job: Job, environment: Environment | None) -> ServerCommand:
    """Our server with batching turned off."""
    prepared = subprocess.run(
        [sys.executable, "-m", "edgesplit_offload.main", "--help"], capture_output=True, text=True, timeout=60
    )
    if "--batching" not in prepared.stdout:
        raise NotMeasured(f"{OURS_UNBATCHED}: this version of the server has no --batching")
    return _ours("--mode", "fast", "--batching", "off")(job, environment)


def _triton(*, batching: bool) -> Callable[[Job, Environment | None], ServerCommand]:
    """The server binary of the pytriton wheel, its Python backend, and the stub of this Python's version."""

    def prepare(job: Job, environment: Environment | None) -> ServerCommand:
        assert environment is not None
        packages, version = environment.packages, f"{sys.version_info.major}.{sys.version_info.minor}"
        whole = packages / "pytriton" / "tritonserver"
        stub = whole / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.is_file():
            raise NotMeasured(f"triton: the wheel has no Python backend for Python {version}")
        backends = job.folder / "backends"
        shutil.copytree(whole / "backends", backends)
        shutil.copy(stub, backends / "python" / stub.name)
        (backends / "python" / stub.name).chmod(0o755)
        _triton_repository(job, batching=batching)
        http, grpc = free_port(), free_port()
        argv = [str(whole / "bin" / "tritonserver"), "--model-repository", str(job.folder / "models")]
        argv += ["--backend-directory", str(backends), "--http-port", str(http), "--grpc-port", str(grpc)]
        argv += ["--allow-metrics=false", "--log-error=true", "--log-info=false", "--log-warning=false"]
        libraries = (str(sysconfig.get_config_var("LIBDIR")), str(packages / "nvidia_pytriton.libs"))
        environment_variables = {
            "LD_LIBRARY_PATH": ":".join(libraries),
            "PATH": _path_with_first(environment.python.parent),
        }
        sample = job.suffix.sample()
        return ServerCommand(
            argv,
            {"HTTP": (http, wires.oip_http(sample)), "gRPC": (grpc, wires.oip_grpc(sample))},
            environment_variables,
        )

    return prepare


def _path_with_first(folder: Path) -> str:
    """PATH with `folder` first: an embedded Python takes its packages from the environment whose `python3` comes
    first."""
    return f"{folder}:{os.environ.get('PATH', '')}"


def _triton_repository(job: Job, *, batching: bool) -> None:
    """The model beside its program, in Triton's repository layout."""
    home = job.folder / "models" / wires.MODEL
    (home / "1").mkdir(parents=True)
    shutil.copy(job.model, home / "1" / "model.onnx")
    shutil.copy(PROGRAMS / "triton_model.py", home / "1" / "model.py")
    batch = [] if batching else [1]

    def end(kind: str, name: str, shape: Sequence[int]) -> str:
        return f'{kind} [{{ name: "{name}" data_type: TYPE_FP32 dims: {[*batch, *shape]} }}]\n'

    config = f'name: "{wires.MODEL}"\nbackend: "python"\nmax_batch_size: {LARGEST_BATCH if batching else 0}\n'
    config += end("input", INPUT, job.suffix.shape) + end("output", OUTPUT, job.suffix.output_shape)
    config += f"instance_group [{{ kind: KIND_CPU count: {WORKERS} }}]\n"
    if batching:
        config += f"dynamic_batching {{ max_queue_delay_microseconds: {BATCHER_WAIT_US} }}\n"
    (home / "config.pbtxt").write_text(config, encoding="utf-8")


def _kserve(job: Job, environment: Environment | None) -> ServerCommand:
    assert environment is not None
    http, grpc, sample = free_port(), free_port(), job.suffix.sample()
    argv = [str(environment.python), str(PROGRAMS / "kserve_server.py"), str(job.model), str(http), str(grpc)]
    wire = {"gRPC": (grpc, wires.oip_grpc(sample)), "HTTP": (http, wires.oip_http(sample))}
    return ServerCommand([*argv, str(WORKERS)], wire)


def _mlserver(job: Job, environment: Environment | None) -> ServerCommand:
    assert environment is not None
    http, grpc = free_port(), free_port()
    shutil.copy(PROGRAMS / "mlserver_model.py", job.folder / "mlserver_model.py")
    settings = {
        "debug": False, "host": "127.0.0.1", "http_port": http, "grpc_port": grpc, "metrics_endpoint": None,
        "parallel_workers": WORKERS, "grpc_max_message_length": 1 << 26, "environments_dir": str(job.folder / "envs"),
    }  # fmt: skip
    model = {"name": wires.MODEL, "implementation": "mlserver_model.Suffix", "parameters": {"uri": str(job.model)}}
    (job.folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    (job.folder / "model-settings.json").write_text(json.dumps(model), encoding="utf-8")
    argv = [str(environment.folder / "bin" / "mlserver"), "start", str(job.folder)]
    return ServerCommand(argv, {"gRPC": (grpc, wires.oip_grpc(job.suffix.sample()))}, folder=job.folder)


def _bentoml(job: Job, environment: Environment | None) -> ServerCommand:
    assert environment is not None
    port, sample = free_port(), job.suffix.sample()
    environment_variables = {
        "SUFFIX": str(job.model),
        "SUFFIX_WORKERS": str(WORKERS),
        "SUFFIX_SHAPE": json.dumps(sample.shape),
    }
    environment_variables |= {"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(job.folder / "home")}
    shutil.copy(PROGRAMS / "bento_service.py", job.folder / "bento_service.py")
    argv = [str(environment.python), "-m", "bentoml", "serve", "bento_service:Suffix", "--host", "127.0.0.1"]
    wire = {"": (port, wires.raw_http(sample, "/raw/infer"))}
    return ServerCommand([*argv, "--port", str(port)], wire, environment_variables, folder=job.folder)


def _litserve(job: Job, environment: Environment | None) -> ServerCommand:
    assert environment is not None
    port, sample = free_port(), job.suffix.sample()
    argv = [str(environment.python), str(PROGRAMS / "litserve_server.py"), str(job.model), str(port), str(WORKERS)]
    return ServerCommand([*argv, json.dumps(sample.shape)], {"": (port, wires.base64_http(sample, "/predict"))})


def _floor(kind: str, processes: int) -> Callable[[Job, Environment | None], ServerCommand]:
    def prepare(job: Job, environment: Environment | None) -> ServerCommand:
        assert environment is not None
        port = free_port()
        argv = [str(environment.python), str(PROGRAMS / "floors.py"), kind, str(job.model), str(port), str(processes)]
        return ServerCommand(argv, {"": (port, wires.oip_http(job.suffix.sample()))})

    return prepare


OURS, OURS_UNBATCHED, OURS_EXACT = "edgesplit", "edgesplit, batching off", "edgesplit, exact"
"""The first two fuse as all the others do (`--mode fast`)."""
TRITON, TRITON_BATCHER = "Triton", "Triton, batcher"
CONTENDERS = (
    Contender(OURS, _ours("--mode", "fast")),
    Contender(OURS_EXACT, _ours(), "", ("conv-1ms", "conv-10ms")),
    Contender(OURS_UNBATCHED, _ours_unbatched, "", ("conv-1ms", "conv-10ms", "dense")),
    Contender(TRITON, _triton(batching=False), "triton"),
    Contender(TRITON_BATCHER, _triton(batching=True), "triton", ("dense",)),
    Contender("KServe", _kserve, "kserve"),
    Contender("MLServer", _mlserver, "mlserver"),
    Contender("BentoML", _bentoml, "bentoml"),
    Contender("LitServe", _litserve, "litserve"),
    Contender("floor: threads", _floor("threads", 1), "floors"),
    Contender("floor: asyncio", _floor("asyncio", 1), "floors"),
    Contender(f"floor: {WORKERS} asyncio processes", _floor("asyncio", WORKERS), "floors"),
)
