"""An agent process and the smallest controller that it can talk to, over real mosquitto, TUF metadata and TLS.

The controller consists of its repository, its authority, its broker, its delivery workers and an offload server,
without planner and database.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgesplit import Client
from edgesplit.http1.server import Request, Response, Server, json_response
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import ModelState, Reported
from edgesplit.mqtt.session import Session
from edgesplit.oip import protocol as oip
from edgesplit.plan import Plan, Row
from edgesplit.release import manifest
from edgesplit.release.manifest import Chunk, DesiredRelease, GoldenExample, Manifest, Slice, SliceFile, Statement
from edgesplit.release_store import write_release
from edgesplit.trust.identity import Claim, Enrolled, EnrolmentRequest, decode_document, encode_document
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_controller.messaging.broker import Broker
from edgesplit_controller.messaging.delivery import SUBSCRIPTIONS, Delivery, Sources
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.tuf.repository import Repository
from edgesplit_offload.server import OffloadServer
from support.agent_engine import INPUT, LINK, H, X, Y, eventually

HERE = "127.0.0.1"
DEVICE = "cam-1"


class Release(Protocol):
    """What can be released: a signed manifest and the bytes of its chunks by digest."""

    @property
    def raw(self) -> bytes: ...

    @property
    def digest(self) -> str: ...

    @property
    def chunks(self) -> Mapping[str, bytes]: ...


def one_operator_model(source: str, target: str, operator: str, constant: npt.NDArray[np.float32]) -> bytes:
    """A one-operator ONNX model."""
    node = helper.make_node(operator, [source, "c"], [target])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 4)) for name in (source, target)]
    graph = helper.make_graph([node], "slice", ends[:1], ends[1:], [numpy_helper.from_array(constant, "c")])
    return onnx.ModelProto(
        ir_version=8, opset_import=[helper.make_opsetid("", 17)], graph=graph, producer_name="test"
    ).SerializeToString()


def chunk_of(data: bytes) -> Chunk:
    return Chunk(hashlib.sha256(data).hexdigest(), len(data))


class TinyRelease:
    """A release of y = (x + 1) * factor, cut between the two, with a golden input."""

    def __init__(
        self, version: int, factor: float = 2.0, golden: npt.NDArray[np.float32] | None = None, forced_row: str = ""
    ) -> None:
        files = {
            "a": one_operator_model("x", "h", "Add", np.ones(4, np.float32)),
            "b": one_operator_model("h", "y", "Mul", np.full(4, factor, np.float32)),
        }
        answer = (INPUT + 1) * np.float32(factor) if golden is None else golden
        request = b"".join(oip.encode_request(oip.InferRequest({"x": INPUT}, id="golden"))[0])
        response = b"".join(oip.encode_response(oip.InferResponse("tiny", {"y": answer}, id="golden"))[0])
        self.chunks = {chunk_of(data).sha256: data for data in (*files.values(), request, response)}
        slices = tuple(
            Slice(name, "onnx", (name,), (ends[0],), (ends[1],), (file_of(files[name]),))
            for name, ends in (("a", (X, H)), ("b", (H, Y)))
        )
        rows = (
            Row(
                name="cut-1", split_after="a", device=("a",), remote=("b",), sends=("h",), receives=("y",), up_bytes=200
            ),
            Row(name="local", device=("a", "b"), device_s=0.05),
        )
        plan = Plan(
            model=f"tiny@{version}", device_class="pi4", rows=rows, link=LINK, slice_s={"a": 0.001, "b": 0.03},
            forced_row=forced_row,
        )  # fmt: skip
        self.raw = manifest.encode_manifest(
            Manifest(
                model=f"tiny@{version}", model_sha256="0" * 64, created="2025-06-15T00:00:00Z", input_spec=None,
                inputs=(X,), outputs=(Y,), slices=slices, plans={"pi4": plan},
                golden=(GoldenExample(chunk_of(request), chunk_of(response)),),
            )
        )  # fmt: skip
        self.digest = manifest.release_digest(self.raw)


def file_of(data: bytes) -> SliceFile:
    return SliceFile("graph.onnx", len(data), chunk_of(data).sha256, (chunk_of(data),))


class SmallController:
    """Everything that an agent talks to. In a `with` statement it runs until the end of the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "ca")
        self.repository = Repository(folder / "repository")
        self.releases: dict[str, Release] = {}
        self.received: list[tuple[str, messages.Message]] = []
        self.statement: bytes | None = None
        self.counter = 0
        self.enrolments = 0
        self.chunks_sent: list[str] = []
        credentials = self.authority.issue_server("controller", ["localhost", HERE])
        self.broker = Broker(folder / "broker", credentials, 0)
        self.enrolling = Server(self._enrol, tls=credentials.server_context(client_required=False))
        self.offload = self._offload(0)
        self.delivery = Delivery(
            Sources(self.repository.read, self._chunk, self._chunks_of, self.ingest, self._statements)
        )

    def __enter__(self) -> Self:
        if shutil.which("mosquitto") is None and not Path("/usr/sbin/mosquitto").exists():
            pytest.skip("mosquitto is not installed: apt-get install mosquitto")
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        self.broker.start()
        self.enrolling.start()
        self.offload.start()
        self.session = Session(
            HERE, self.broker.port, "controller", self.authority.issue_client("controller").client_context(),
            on_message=self.delivery.on_message, on_connect=self.delivery.on_connect,
        )  # fmt: skip
        self.session.subscribe(SUBSCRIPTIONS)
        self.delivery.start(self.session)
        self.session.start()
        assert self.session.wait_connected(20)

    def stop(self) -> None:
        self.session.stop()
        self.delivery.stop()
        self.offload.stop(0.5)
        self.enrolling.stop(0.5)
        self.broker.stop()

    def _offload(self, port: int) -> OffloadServer:
        tls = self.authority.issue_server("offload", ["localhost", HERE]).server_context()
        return OffloadServer(self.folder / "offload", self.repository.root_bytes, port=port, tls=tls)

    def ingest(self, received: Sequence[tuple[str, messages.Message]]) -> None:
        """Record the messages of devices."""
        self.received.extend(received)

    def restart_offload(self) -> None:
        self.offload = self._offload(self.offload.port)
        self.offload.start()

    def _enrol(self, request: Request) -> Response:
        asked = decode_document(bytes(request.body), EnrolmentRequest)
        self.enrolments += 1
        if asked.token != "good":
            return json_response(403, {"error": "this claim token is unknown, used or expired"})
        pem = self.authority.sign_request(asked.csr_pem.encode(), DEVICE).decode()
        return json_response(
            200,
            Enrolled(
                device=DEVICE, certificate_pem=pem, ca_pem=self.authority.ca_pem, broker_host=HERE,
                broker_port=self.broker.port, offload_url=f"https://{HERE}:{self.offload.port}",
            ),
        )  # fmt: skip

    def _chunk(self, sha256: str) -> bytes:
        self.chunks_sent.append(sha256)
        return next(release.chunks[sha256] for release in self.releases.values() if sha256 in release.chunks)

    def _chunks_of(self, digest: str) -> tuple[str, ...]:
        release = self.releases.get(digest)
        return tuple(manifest.decode_manifest(release.raw).chunk_list()) if release else ()

    def _statements(self, devices: object) -> Mapping[str, bytes]:
        return {DEVICE: self.statement} if self.statement else {}

    def claim(self, token: str = "good") -> Claim:
        return Claim(
            device=DEVICE, device_class="pi4", token=token, controller_url=f"https://{HERE}:{self.enrolling.port}",
            ca_pem=self.authority.ca_pem, tuf_root=self.repository.root_bytes.decode(), expires=int(time.time()) + 3600,
        )  # fmt: skip

    def deploy(self, release: Release, *, sign: bool = True, now: bool = False) -> None:
        """Add the release to metadata (or not), give the offload server its half, and state it."""
        self.releases[release.digest] = release
        if sign:
            self.repository.add_release(release.raw)
            self.store_remote_half(release)
        self.state(DesiredRelease("tiny", release.digest, now))

    def store_remote_half(self, release: Release) -> Path:
        """The folder in which the offload server finds this release."""
        return write_release(
            self.folder / "offload", release.digest, release.raw, self.repository.proof(release.digest),
            release.chunks.__getitem__, bootstrap_root=self.repository.root_bytes,
        ).folder  # fmt: skip

    def state(self, *desired: DesiredRelease) -> None:
        """Sign and publish the device's desired releases under a higher counter."""
        self.counter = max(self.counter + 1, int(time.time()))
        expires = int(time.time()) + 3600
        self.statement = self.repository.sign_statement(
            Statement(device=DEVICE, releases=desired, counter=self.counter, expires=expires)
        )
        self.delivery.publish_statements([DEVICE])

    def last(self, *kinds: type) -> Any:
        """The newest message of these kinds."""
        return next((message for _, message in reversed(self.received) if isinstance(message, kinds)), None)

    def reported(self) -> Reported | None:
        """The device's newest reported state."""
        newest: Reported | None = self.last(Reported)
        return newest

    def reported_models(self) -> tuple[ModelState, ...]:
        """The models in the device's newest reported state."""
        newest = self.reported()
        return newest.models if newest is not None else ()

    def has_reported(self, release: Release, state: str, detail: str) -> bool:
        """The device reported that this desired release is in that state, with that text in its detail."""
        return any(
            (model.desired_release, model.state) == (release.digest, state) and detail in model.detail
            for model in self.reported_models()
        )

    def has_reported_running(self, release: Release) -> bool:
        """The device reported that this release runs."""
        return (release.digest, "running") in [(model.release, model.state) for model in self.reported_models()]


class AgentProcess:
    """`edgesplit-agent run`. A `with` statement kills it at the end of its block."""

    def __init__(self, controller: SmallController, folder: Path, *extra: str) -> None:
        self.controller = controller
        self.data = folder / DEVICE
        self.claim = folder / "claim.json"
        self.claim.write_bytes(encode_document(controller.claim()))
        self.extra = extra
        self.log = folder / "agent.log"
        self.child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(signal.SIGKILL)

    def start(self) -> None:
        """Start it and wait until it has written its address."""
        self.spawn()
        eventually("the agent has written its address", self._has_written_address, 30)

    def spawn(self) -> None:
        """Start it."""
        argv = [sys.executable, "-m", "edgesplit_agent.main", "run", "--data", str(self.data)]
        argv += ["--claim", str(self.claim)]
        argv += ["--port", "0", "--die-with-parent", "--log-level", "debug", "--health-seconds", "0.2", *self.extra]
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(argv, stdout=log, stderr=log, env=agent_environment())

    def _has_written_address(self) -> bool:
        assert self.child is not None and self.child.poll() is None, self.log.read_text()
        address = DataFolder(self.data).read_address()
        return address is not None and address.pid == self.child.pid

    @property
    def client(self) -> Client:
        address = DataFolder(self.data).read_address()
        assert address is not None
        return Client(address.url)

    def status(self) -> Any:
        """What `edgesplit-agent status` prints."""
        argv = [sys.executable, "-m", "edgesplit_agent.main", "status", "--data", str(self.data)]
        printed = subprocess.run(argv, env=agent_environment(), capture_output=True, check=True, timeout=60).stdout
        return json.loads(printed)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.child is None:
            return 0
        self.child.send_signal(number)
        code = self.child.wait(30)
        self.child = None
        return code

    def is_running(self, release: Release) -> bool:
        """The controller received a report that this release runs, and no other."""
        models = self.controller.reported_models()
        return [(model.release, model.state) for model in models] == [(release.digest, "running")]

    def infer(self, deadline_s: float = 20.0) -> Any:
        return self.client.infer("tiny", {"x": INPUT}, deadline_s=deadline_s)


def agent_environment(*packages: str) -> dict[str, str]:
    """Environment in which a child process imports these sources, those in `packages` first."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*packages, *filter(None, sys.path)])}
