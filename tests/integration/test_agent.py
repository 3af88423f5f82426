"""The agent as a process against real mosquitto, real TUF metadata, real TLS and a real offload server.

The controller here is the smallest that can be: its repository, its authority, its broker and its delivery workers,
without planner and database. tests/integration/test_chain.py has the whole product.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgesplit import Client
from edgesplit.errors import LinkError
from edgesplit.http1.server import Request, Response, Server, json_response
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Reported
from edgesplit.mqtt.session import Session
from edgesplit.oip import protocol as oip
from edgesplit.plan import Plan, Row
from edgesplit.release import manifest
from edgesplit.release.manifest import Chunk, DesiredRelease, GoldenExample, Manifest, Slice, SliceFile, Statement
from edgesplit.release_store import write_release
from edgesplit.trust.identity import Claim, Enrolled, EnrolmentRequest, decode_document, encode_document
from edgesplit_agent.control.enrolment import enrol
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_controller.messaging.broker import Broker
from edgesplit_controller.messaging.delivery import SUBSCRIPTIONS, Delivery, Sources
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.tuf.repository import Repository
from edgesplit_offload.server import OffloadServer
from support.agent_engine import EXPECTED, INPUT, LINK, H, X, Y, eventually

HERE = "127.0.0.1"
DEVICE = "cam-1"


def graph(source: str, target: str, operator: str, constant: npt.NDArray[np.float32]) -> bytes:
    """A one-operator ONNX model."""
    node = helper.make_node(operator, [source, "c"], [target])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 4)) for name in (source, target)]
    made = helper.make_graph([node], "slice", ends[:1], ends[1:], [numpy_helper.from_array(constant, "c")])
    return onnx.ModelProto(
        ir_version=8, opset_import=[helper.make_opsetid("", 17)], graph=made, producer_name="test"
    ).SerializeToString()


def chunk(data: bytes) -> Chunk:
    return Chunk(hashlib.sha256(data).hexdigest(), len(data))


class Made:
    """A release of y = (x + 1) * factor, cut between the two, with a golden input."""

    def __init__(self, version: int, factor: float = 2.0, golden: npt.NDArray[np.float32] | None = None) -> None:
        files = {
            "a": graph("x", "h", "Add", np.ones(4, np.float32)),
            "b": graph("h", "y", "Mul", np.full(4, factor, np.float32)),
        }
        answer = (INPUT + 1) * np.float32(factor) if golden is None else golden
        request = b"".join(oip.encode_request(oip.InferRequest({"x": INPUT}, id="golden"))[0])
        response = b"".join(oip.encode_response(oip.InferResponse("tiny", {"y": answer}, id="golden"))[0])
        self.chunks = {chunk(data).sha256: data for data in (*files.values(), request, response)}
        slices = tuple(
            Slice(name, "onnx", (name,), (ends[0],), (ends[1],), (one_file(files[name]),))
            for name, ends in (("a", (X, H)), ("b", (H, Y)))
        )
        rows = (
            Row(
                name="cut-1", split_after="a", device=("a",), remote=("b",), sends=("h",), receives=("y",), up_bytes=200
            ),
            Row(name="local", device=("a", "b"), device_s=0.05),
        )
        plan = Plan(model=f"tiny@{version}", device_class="pi4", rows=rows, link=LINK, slice_s={"a": 0.001, "b": 0.03})
        self.raw = manifest.encode_manifest(
            Manifest(
                model=f"tiny@{version}", model_sha256="0" * 64, created="2025-06-15T00:00:00Z", input_spec=None,
                inputs=(X,), outputs=(Y,), slices=slices, plans={"pi4": plan},
                golden=(GoldenExample(chunk(request), chunk(response)),),
            )
        )  # fmt: skip
        self.digest = manifest.release_digest(self.raw)


def one_file(data: bytes) -> SliceFile:
    return SliceFile("graph.onnx", len(data), chunk(data).sha256, (chunk(data),))


class SmallController:
    """Everything an agent talks to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "ca")
        self.repository = Repository(folder / "repository")
        self.made: dict[str, Made] = {}
        self.heard: list[tuple[str, messages.Message]] = []
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

    def ingest(self, heard: Sequence[tuple[str, messages.Message]]) -> None:
        """Record what devices said."""
        self.heard.extend(heard)

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
        return next(made.chunks[sha256] for made in self.made.values() if sha256 in made.chunks)

    def _chunks_of(self, digest: str) -> tuple[str, ...]:
        return tuple(manifest.decode_manifest(self.made[digest].raw).chunk_list()) if digest in self.made else ()

    def _statements(self, devices: object) -> Mapping[str, bytes]:
        return {DEVICE: self.statement} if self.statement else {}

    def claim(self, token: str = "good") -> Claim:
        return Claim(
            device=DEVICE, device_class="pi4", token=token, controller_url=f"https://{HERE}:{self.enrolling.port}",
            ca_pem=self.authority.ca_pem, tuf_root=self.repository.root_bytes.decode(), expires=int(time.time()) + 3600,
        )  # fmt: skip

    def deploy(self, made: Made, *, sign: bool = True, now: bool = False) -> None:
        """Add the release to metadata (or not), give the offload server its half, and state it."""
        self.made[made.digest] = made
        if sign:
            self.repository.add_release(made.raw)
            proof = self.repository.proof(made.digest)
            write_release(
                self.folder / "offload", made.digest, made.raw, proof, made.chunks.__getitem__,
                bootstrap_root=self.repository.root_bytes,
            )  # fmt: skip
        self.counter = max(self.counter + 1, int(time.time()))
        wanted = (DesiredRelease("tiny", made.digest, now),)
        expires = int(time.time()) + 3600
        self.statement = self.repository.sign_statement(
            Statement(device=DEVICE, releases=wanted, counter=self.counter, expires=expires)
        )
        self.delivery.publish_statements([DEVICE])

    def reported(self) -> Reported | None:
        """What the device said last of what it runs."""
        said = [message for _, message in self.heard if isinstance(message, Reported)]
        return said[-1] if said else None

    def last(self, *kinds: type) -> Any:
        return next((message for _, message in reversed(self.heard) if isinstance(message, kinds)), None)


class Process:
    """`edgesplit-agent run`."""

    def __init__(self, controller: SmallController, folder: Path, *extra: str) -> None:
        self.controller = controller
        self.data = folder / DEVICE
        self.claim = folder / "claim.json"
        self.claim.write_bytes(encode_document(controller.claim()))
        self.extra = extra
        self.log = folder / "agent.log"
        self.child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it says where it is."""
        self.spawn()
        eventually("the agent says where it is", self._is_here, 30)

    def spawn(self) -> None:
        """Start it."""
        argv = [
            sys.executable,
            "-m",
            "edgesplit_agent.main",
            "run",
            "--data",
            str(self.data),
            "--claim",
            str(self.claim),
        ]
        argv += ["--port", "0", "--die-with-parent", "--log-level", "debug", "--health-seconds", "0.2", *self.extra]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)

    def _is_here(self) -> bool:
        assert self.child is not None and self.child.poll() is None, self.log.read_text()
        here = DataFolder(self.data).read_address()
        return here is not None and here.pid == self.child.pid

    @property
    def client(self) -> Client:
        here = DataFolder(self.data).read_address()
        assert here is not None
        return Client(here.url)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.child is None:
            return 0
        self.child.send_signal(number)
        code = self.child.wait(30)
        self.child = None
        return code

    def runs(self, made: Made) -> bool:
        """The controller heard that this release runs."""
        said = self.controller.reported()
        return said is not None and [(m.release, m.state) for m in said.models] == [(made.digest, "running")]

    def infer(self, deadline_s: float = 20.0) -> Any:
        return self.client.infer("tiny", {"x": INPUT}, deadline_s=deadline_s)


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallController]:
    if shutil.which("mosquitto") is None and not Path("/usr/sbin/mosquitto").exists():
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    made = SmallController(tmp_path_factory.mktemp("controller"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def agent(controller: SmallController, tmp_path: Path) -> Iterator[Process]:
    process = Process(controller, tmp_path)
    controller.heard.clear()
    yield process
    if process.child is not None:
        process.end(signal.SIGKILL)


def test_from_claim_to_a_split_answer(controller: SmallController, agent: Process) -> None:
    """Enrols, fetches signed slices over MQTT, checks its golden input, answers with the cloud; stops cleanly."""
    made = Made(1)
    controller.deploy(made)
    agent.start()
    eventually("it runs", lambda: agent.runs(made), 60)

    def finished_by_the_cloud() -> bool:
        answer = agent.infer()
        assert np.array_equal(answer.outputs["y"], EXPECTED) and answer.report.release == made.digest
        return (answer.report.row, answer.report.fallback) == ("cut-1", False)

    eventually("an answer for which the cloud was in time", finished_by_the_cloud)
    birth = controller.last(messages.Birth)
    assert birth.device_class == "pi4" and not birth.emulated and birth.local_url.startswith("http://127.0.0.1:")
    eventually("telemetry of it", lambda: _requests(controller) >= 1)

    assert agent.end() == 0
    eventually(
        "it said goodbye", lambda: controller.last(messages.Birth, messages.Death) == messages.Death(birth.session)
    )
    assert DataFolder(agent.data).read_address() is None


def _requests(controller: SmallController) -> int:
    said = [message for _, message in controller.heard if isinstance(message, messages.Telemetry)]
    return sum(window.requests for one in said for window in one.models)


def test_a_restart_without_any_network_serves_what_it_had(controller: SmallController, agent: Process) -> None:
    """Killed, restarted with broker and offload server out of reach: verified offline, answered alone."""
    made = Made(2)
    controller.deploy(made)
    agent.start()
    eventually("it runs", lambda: agent.runs(made), 60)
    agent.end(signal.SIGKILL)

    agent.extra = ("--broker", "127.0.0.1:9", "--offload", "127.0.0.1:9")
    agent.start()
    answer = agent.infer()
    assert np.array_equal(answer.outputs["y"], EXPECTED)
    assert answer.report.fallback or answer.report.row == "local"
    status = json.loads(_run(agent, "status"))
    assert status["broker"]["connected"] is False and status["models"][0]["release"] == made.digest
    assert agent.end() == 0


def _run(agent: Process, command: str) -> str:
    argv = [sys.executable, "-m", "edgesplit_agent.main", command, "--data", str(agent.data)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_flipped_bit_in_the_running_slice_costs_one_chunk(controller: SmallController, agent: Process) -> None:
    """A9: found at load, fetched again as soon as the controller is there, and only what was spoilt."""
    made = Made(3)
    controller.deploy(made)
    agent.start()
    eventually("it runs", lambda: agent.runs(made), 60)
    spoilt = agent.data / "releases" / made.digest / "slices" / "b" / "graph.onnx"
    its_chunk = hashlib.sha256(spoilt.read_bytes()).hexdigest()
    eventually("the chunk is only in the slice", lambda: not list((agent.data / "chunks").rglob(its_chunk)))
    agent.end(signal.SIGKILL)
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"\x00")
    controller.heard.clear()
    controller.chunks_sent.clear()

    agent.start()
    eventually("it runs again", lambda: agent.runs(made), 60)
    assert np.array_equal(agent.infer().outputs["y"], EXPECTED)
    assert hashlib.sha256(spoilt.read_bytes()).hexdigest() in controller.chunks_sent
    golden = {
        chunk_.sha256 for one in manifest.decode_manifest(made.raw).golden for chunk_ in (one.request, one.response)
    }
    assert set(controller.chunks_sent) - golden == {hashlib.sha256(spoilt.read_bytes()).hexdigest()}


def test_a_release_that_must_not_run_does_not_and_the_old_one_goes_on(
    controller: SmallController, agent: Process
) -> None:
    """C15 and an unsigned release: both reported as failed with their reason; the good one keeps answering."""
    good, wrong, unsigned = Made(4), Made(5, golden=EXPECTED + np.float32(9)), Made(6)
    controller.deploy(good)
    agent.start()
    eventually("it runs", lambda: agent.runs(good), 60)

    for bad, reason, sign in ((wrong, "golden", True), (unsigned, "not one that the release key signed", False)):
        controller.deploy(bad, sign=sign)
        eventually("it failed", lambda bad=bad, reason=reason: _failed(controller, bad, reason), 60)
        report = agent.infer().report
        assert report.release == good.digest
    newer = Made(7, factor=3.0)
    controller.deploy(newer)
    eventually("the newer one runs", lambda: agent.runs(newer), 60)
    assert np.array_equal(agent.infer().outputs["y"], (INPUT + 1) * 3)
    eventually("the old one is gone from disk", lambda: not (agent.data / "releases" / good.digest).exists())


def _failed(controller: SmallController, made: Made, reason: str) -> bool:
    said = controller.reported()
    return said is not None and any(
        model.desired_release == made.digest and model.state == "failed" and reason in model.detail
        for model in said.models
    )


def _told(controller: SmallController, made: Made, state: str, detail: str) -> bool:
    said = controller.reported()
    return said is not None and any(
        (model.desired_release, model.state) == (made.digest, state) and detail in model.detail for model in said.models
    )


def test_a_release_that_does_not_fit_is_told_and_what_runs_goes_on(controller: SmallController, agent: Process) -> None:
    """A8: over --store-quota nothing is fetched, the operator reads why and what to do; a larger quota lets it in."""
    good, large = Made(20), Made(21)
    controller.deploy(good)
    agent.start()
    eventually("it runs", lambda: agent.runs(good), 60)
    agent.end()
    agent.extra = ("--store-quota", "200kB")
    controller.chunks_sent.clear()
    controller.deploy(large)
    agent.start()
    eventually("it is refused", lambda: _told(controller, large, "failed", "--store-quota"), 60)
    assert agent.infer().report.release == good.digest and not controller.chunks_sent
    agent.end()
    agent.extra = ("--store-quota", "50MB")
    agent.start()
    eventually("it runs", lambda: agent.runs(large), 60)


def test_outside_its_hours_a_device_waits_unless_the_operator_says_now(
    controller: SmallController, agent: Process
) -> None:
    """--download-window: metadata comes, chunks do not,
    the operator reads why; `now` in the statement fetches at once."""
    made = Made(22)
    controller.chunks_sent.clear()
    controller.deploy(made)
    begins, ends = (time.strftime("%H:%M", time.localtime(time.time() + hours * 3600)) for hours in (2, 3))
    agent.extra = ("--download-window", f"{begins}-{ends}")
    agent.start()
    eventually(
        "it says that it waits", lambda: _told(controller, made, "fetching", "waiting for the download window"), 60
    )
    waiting = json.loads(_run(agent, "status"))["desired"]
    assert [one["detail"] for one in waiting] == [f"waiting for the download window ({begins}-{ends})"]
    assert not controller.chunks_sent
    controller.deploy(made, now=True)
    eventually("it runs", lambda: agent.runs(made), 60)


def test_on_an_empty_battery_updates_wait_and_the_operator_reads_why(
    controller: SmallController, agent: Process, tmp_path: Path
) -> None:
    """Sensors under a root folder: at 10 % nothing is fetched; on the charger it goes on by itself; both are told."""
    battery = tmp_path / "sys/class/power_supply/BAT0"
    battery.mkdir(parents=True)
    for name, text in (("type", "Battery"), ("status", "Discharging"), ("capacity", "10")):
        (battery / name).write_text(text + "\n")
    made = Made(23)
    controller.chunks_sent.clear()
    controller.deploy(made)
    agent.extra = ("--sensors-root", str(tmp_path / "sys"), "--power-budget", "4W")
    agent.start()
    eventually("it says that it waits", lambda: _told(controller, made, "fetching", "the battery is at 10 %"), 60)
    power = json.loads(_run(agent, "status"))["power"]
    assert (power["mode"], power["budget_watts"], power["sensors"]["battery_percent"]) == ("saver", 4.0, 10.0)
    assert not controller.chunks_sent
    (battery / "status").write_text("Charging\n")
    eventually("it runs", lambda: agent.runs(made), 60)
    eventually("telemetry tells of the charger", lambda: _power(controller) == ("performance", False), 30)
    assert json.loads(_run(agent, "status"))["models"][0]["reason"].startswith("the plan has no power figures")


def _power(controller: SmallController) -> tuple[str, bool | None] | None:
    told = controller.last(messages.Telemetry)
    return (told.power.mode, told.power.discharging) if told is not None and told.power is not None else None


def test_a_killed_agent_loses_no_request_and_the_broker_tells(controller: SmallController, agent: Process) -> None:
    """SIGKILL in the middle of a stream: each id of the client is answered once, the last will is this session's."""
    made = Made(8)
    controller.deploy(made)
    agent.extra = ("--port", str(_free_port()))
    agent.start()
    eventually("it runs", lambda: agent.runs(made), 60)
    client, answers = agent.client, []
    done = threading.Event()

    def stream() -> None:
        for _ in range(60):
            answers.append(client.infer("tiny", {"x": INPUT}, deadline_s=30).outputs["y"])
        done.set()

    session = controller.last(messages.Birth).session
    thread = threading.Thread(target=stream)
    thread.start()
    eventually("some are answered", lambda: len(answers) >= 5)
    agent.end(signal.SIGKILL)
    eventually("the broker tells", lambda: messages.Death(session) in [message for _, message in controller.heard])
    agent.start()
    thread.join(60)
    assert done.is_set() and all(np.array_equal(answer, EXPECTED) for answer in answers) and len(answers) == 60
    eventually("a newer session was born", lambda: controller.last(messages.Birth).session > session)


def _free_port() -> int:
    import socket

    with socket.create_server((HERE, 0)) as listener:
        return int(listener.getsockname()[1])


def test_the_offload_server_goes_and_comes(controller: SmallController, agent: Process) -> None:
    """Answered alone while it is gone, with its help again soon after it is back; nothing fails."""
    made = Made(9)
    controller.deploy(made)
    agent.extra = ("--emulate",)  # as slow as its plan says: else it wins its races against the cloud
    agent.start()
    eventually("it runs", lambda: agent.runs(made), 60)
    eventually("the cloud helps", lambda: not _alone(agent))
    controller.offload.stop(0.2)
    eventually("it is alone", lambda: _alone(agent))
    controller.restart_offload()
    eventually("the cloud helps again", lambda: not _alone(agent))


def _alone(agent: Process) -> bool:
    answer = agent.infer()
    assert np.array_equal(answer.outputs["y"], EXPECTED)
    return bool(answer.report.fallback or answer.report.row == "local")


def test_an_emulated_device_behind_an_emulated_link_says_so(controller: SmallController, agent: Process) -> None:
    """--emulate and --link: in every report, in its birth, in its telemetry, and in the times."""
    made = Made(10)
    controller.deploy(made)
    agent.extra = ("--emulate", "--link", "50mbit/2ms")
    agent.start()
    eventually("it runs", lambda: agent.runs(made), 60)
    answer = agent.infer()
    assert answer.report.emulated and answer.report.device_s >= 0.001
    assert controller.last(messages.Birth).emulated
    eventually(
        "telemetry", lambda: controller.last(messages.Telemetry) and controller.last(messages.Telemetry).emulated
    )
    assert json.loads(_run(agent, "status"))["link_emulated"] == "50mbit/2ms"


def test_a_second_agent_on_the_same_folder_is_refused(controller: SmallController, agent: Process) -> None:
    """One clear line, exit code 2, and the first one is not disturbed."""
    agent.start()
    argv = [sys.executable, "-m", "edgesplit_agent.main", "run", "--data", str(agent.data), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    second = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert second.returncode == 2 and "another edgesplit-agent runs" in second.stderr
    assert second.stderr.count("\n") == 1
    assert agent.client.ready()


@pytest.mark.parametrize("lost_at", ["key.pem", "certificate.pem", "ca.pem", "enrolled.json"])
def test_enrolment_killed_at_any_point_finishes_at_the_next_start(
    controller: SmallController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_at: str
) -> None:
    """A4: power fails just before each file is written; the next start enrols with the same key and token."""
    import edgesplit_agent.control.enrolment as enrolment
    import edgesplit_agent.state.data_folder as folder_module
    from edgesplit.atomic_files import write_durably
    from edgesplit.crypto import private_key

    def dying(path: Path, data: bytes, mode: int = 0o644) -> None:
        if path.name == lost_at:
            raise KeyboardInterrupt
        write_durably(path, data, mode)

    with monkeypatch.context() as patch:
        for module in (enrolment, folder_module, private_key):
            patch.setattr(module, "write_durably", dying)
        with pytest.raises(KeyboardInterrupt):
            enrol(DataFolder(tmp_path), controller.claim())
    folder = DataFolder(tmp_path)
    assert folder.read_identity() is None
    key = folder.key_file.read_bytes() if folder.key_file.exists() else None
    assert enrol(folder, controller.claim()).device == DEVICE
    assert key is None or folder.key_file.read_bytes() == key
    assert folder.key_file.stat().st_mode & 0o777 == 0o600
    again = controller.enrolments
    assert enrol(folder, controller.claim()).device == DEVICE and controller.enrolments == again


def test_a_bad_claim_and_a_false_controller_are_told_apart(controller: SmallController, tmp_path: Path) -> None:
    """D7, D9: a refused token and a server of another authority are final; one that is not there may come."""
    from edgesplit.errors import TrustError

    with pytest.raises(TrustError, match="refused the claim"):
        enrol(DataFolder(tmp_path / "one"), controller.claim("stolen"))
    stranger = Authority(tmp_path / "other-ca").issue_server("controller", ["localhost", HERE])
    false = Server(lambda request: json_response(200, {}), tls=stranger.server_context(client_required=False))
    false.start()
    with pytest.raises(TrustError, match="does not present a certificate"):
        enrol(DataFolder(tmp_path / "two"), controller.claim(), f"https://{HERE}:{false.port}")
    false.stop(0.2)
    with pytest.raises(LinkError):
        enrol(DataFolder(tmp_path / "three"), controller.claim(), f"https://{HERE}:9")


KILLED_AT = (
    "identity/key.pem", "identity/enrolled.json", "session.json", "trust/counters.json", "chunks/*/*",
    "chunks/*/slices/*/*", "chunks/*/manifest.json", "releases/*/manifest.json", "current.json",
)  # fmt: skip


def test_killed_at_every_stage_of_a_first_update_it_still_gets_there(
    controller: SmallController, tmp_path: Path
) -> None:
    """A1 in processes: SIGKILL when each file first appears, on one folder; no cleaning by hand."""
    made = Made(11)
    controller.deploy(made)
    controller.heard.clear()
    agent = Process(controller, tmp_path)
    for pattern in KILLED_AT:
        agent.spawn()
        try:
            eventually(f"{pattern} or the end of it", lambda p=pattern: any(agent.data.glob(p)) or agent.runs(made), 60)
        finally:
            agent.end(signal.SIGKILL)
    agent.start()
    eventually("it runs", lambda: agent.runs(made), 60)
    assert np.array_equal(agent.infer().outputs["y"], EXPECTED)
    eventually("nothing is left of the ways there", lambda: not list(agent.data.glob("chunks/*/*")))
    assert agent.end() == 0
