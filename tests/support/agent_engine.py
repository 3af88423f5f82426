"""A tiny split model and an offload server that does as it is told, for tests of the agent's engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgesplit.http1.server import Request, Response, Server, error_response
from edgesplit.observability.tracing import TRACING_OFF, Tracer
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.oip import protocol as oip
from edgesplit.oip.report import Report
from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import Manifest, Slice, TensorSpec
from edgesplit.runtime import Tensor, Tensors
from edgesplit.runtime.emulated import EmulatedProgram
from edgesplit_agent.policy.hedge_timing import DELIVERY_MARGIN_S
from edgesplit_agent.releases.loaded_release import LoadedRelease, plan_for
from edgesplit_agent.serving.engine import Engine, Settings
from edgesplit_agent.telemetry.request_record import RequestRecord
from edgesplit_agent.worker.host import InProcess

DIGEST = "a" * 64
CLASS = "pi4"
X, H, Y = (TensorSpec(name, "FP32", (1, 4)) for name in ("x", "h", "y"))
LINK = Link(up_bytes_per_s=1e7, down_bytes_per_s=1e7, rtt_s=0.001)
LOCAL = Row(name="local", device=("a", "b"), device_s=0.02)
CUT = Row(name="cut-1", device=("a",), remote=("b",), sends=("h",), receives=("y",), up_bytes=300, device_s=0.01)
REMOTE = Row(name="remote", remote=("a", "b"), sends=("x",), receives=("y",), up_bytes=300)
INPUT = np.arange(4, dtype=np.float32).reshape(1, 4)
EXPECTED = (INPUT + 1) * 2
_TICK = threading.Event()


class Step:
    """One slice: a function from one tensor to another, which a test may hold up or break."""

    def __init__(self, source: str, target: str, of: Callable[[Tensor], Tensor]) -> None:
        self._source, self._target, self._of = source, target, of
        self.may_run = threading.Event()
        self.may_run.set()
        self.entered = threading.Event()
        self.runs = 0
        self.inputs: list[Tensor] = []
        self.error: Exception | None = None

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        self.runs += 1
        self.inputs.append(tensors[self._source].copy())  # not the segment that it may lie in
        self.entered.set()
        assert self.may_run.wait(20)
        if self.error is not None:
            raise self.error
        return {self._target: self._of(tensors[self._source])}


def programs() -> dict[str, Step]:
    """x -> h = x + 1 -> y = 2 h."""
    return {"a": Step("x", "h", lambda x: x + np.float32(1)), "b": Step("h", "y", lambda h: h * np.float32(2))}


def manifest(
    *rows: Row,
    private_tensors: tuple[str, ...] = (),
    required_local_layers: tuple[str, ...] = (),
    model: str = "tiny@1",
    offload: str = "",
) -> Manifest:
    """A release of that model with these rows."""
    slices = (Slice("a", "onnx", ("a",), (X,), (H,)), Slice("b", "onnx", ("b",), (H,), (Y,)))
    plan = Plan(
        model=model, device_class=CLASS, rows=rows, link=LINK, slice_s={"a": 0.01, "b": 0.01},
        private_tensors=private_tensors, required_local_layers=required_local_layers,
        offload=offload,
    )  # fmt: skip
    return Manifest(
        model=model, model_sha256="0" * 64, created="2025-06-15T00:00:00Z", input_spec=None,
        inputs=(X,), outputs=(Y,), slices=slices, plans={CLASS: plan},
    )  # fmt: skip


class Loaded(LoadedRelease):
    """A release whose programs a test can get at."""

    @property
    def programs(self) -> Mapping[str, Any]:
        """As they were given."""
        assert isinstance(self.host, InProcess)
        return self.host.programs


def active(*rows: Row, steps: Mapping[str, Any] | None = None, digest: str = DIGEST, emulated: bool = False) -> Loaded:
    """A release that is loaded."""
    described = manifest(*rows)
    loaded: Mapping[str, Any] = steps if steps is not None else programs()
    if emulated:
        lock = threading.Lock()
        loaded = {name: EmulatedProgram(step, 0.005, lock) for name, step in loaded.items()}
    return Loaded(digest, described, plan_for(described, CLASS), InProcess(loaded), emulated)


class RecordList:
    """An observer that keeps every record."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def finished(self, record: RequestRecord) -> None:
        self.records.append(record)


def record(
    outcome: Report | Exception, *, model: str = "tiny", version: str = "tiny@1", digest: str = DIGEST
) -> RequestRecord:
    """The record of a request to a release of which nothing but its names is known."""
    release: Any = SimpleNamespace(digest=digest, manifest=SimpleNamespace(model=version))
    return RequestRecord(model, release, outcome)


Script = Callable[[Request, "Response"], Response]


class ScriptedCloud:
    """An offload server for the tiny model. Set `script` to spoil what it would answer."""

    def __init__(self) -> None:
        self.script: Script = lambda request, good: good
        self.unpack: Callable[[Request], Request] = lambda request: request
        """Applied to each inference request before it is decoded."""
        self.probes = 0
        self.healthy = True
        """What the agent's probes find; a breaker that is open stays so while this is False."""
        self.asked: list[str] = []
        self.ids: list[str] = []
        self.steps = programs()
        self.holding = threading.Event()
        self.let_go = threading.Event()
        self.server = Server(self._handle)

    def start(self, port: int = 0) -> None:
        self.server = Server(self._handle, port=port)
        self.server.start()

    def _handle(self, request: Request) -> Response:
        if not request.path.endswith("/infer"):
            self.probes += 1
            return Response(200 if self.healthy else 503, {"edgesplit-seconds": "0"}, [])
        request = self.unpack(request)
        asked = oip.decode_request(request.body, oip.header_length(request.headers))
        name = request.path.split("/")[3]
        self.asked.append(name)
        self.ids.append(asked.id)
        live: dict[str, Tensor] = dict(asked.inputs)
        for step in ("a", "b") if "x" in live else ("b",):
            live.update(self.steps[step].run(live))
        return self.script(request, reply(name, asked.id, {"y": live["y"]}))

    def hold(self, request: Request, good: Response) -> Response:
        """A script: answer only when let go."""
        self.holding.set()
        self.let_go.wait(20)
        return good

    def stop(self) -> None:
        self.let_go.set()
        self.server.stop(drain_s=0.5)


def reply(name: str, request_id: str, outputs: Mapping[str, Tensor]) -> Response:
    """What an offload server says."""
    body, length = oip.encode_response(oip.InferResponse(model=name, outputs=outputs, id=request_id))
    headers = {oip.HEADER_LENGTH: str(length), "edgesplit-seconds": "0.0001", "edgesplit-load": "1.0"}
    return Response(200, headers, body)


def unavailable(request: Request, good: Response) -> Response:
    """A script: there is a server, and it fails."""
    return error_response(500, "broken")


@contextmanager
def world(
    *rows: Row,
    idle_probe_s: float = 3600.0,
    margin_s: float = DELIVERY_MARGIN_S,
    tracer: Tracer = TRACING_OFF,
    **kind: Any,
) -> Iterator[tuple[Engine, ScriptedCloud, Loaded]]:
    """An engine that serves the tiny model by these rows, with a scripted cloud behind it."""
    cloud = ScriptedCloud()
    cloud.start()
    settings = Settings(idle_probe_s=idle_probe_s, margin_s=margin_s)
    engine = Engine(CLASS, OffloadClient(cloud.server.url), settings=settings, tracer=tracer)
    release = active(*rows, **kind)
    engine.serve("tiny", release)
    engine.start()
    try:
        yield engine, cloud, release
    finally:
        engine.stop()
        cloud.stop()


def eventually(what: str, holds: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until `holds()`."""
    until = monotonic() + seconds
    while not holds():
        assert monotonic() < until, f"never came: {what}"
        _TICK.wait(0.01)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
