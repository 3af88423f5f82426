"""Clients that misuse shared memory or do not read: the agent's endpoint neither dies, nor hangs, nor keeps anything.

A region's owner can shorten it at any moment, and a process that touches what is gone from a mapping is killed by
SIGBUS: a test here that fails may take its worker with it.
"""

from __future__ import annotations

import array
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

from edgesplit import Client
from edgesplit.client.client import Connection, Reply
from edgesplit.http1.server import Server
from edgesplit.oip import protocol as oip
from edgesplit.oip_server.triton_extensions import SEGMENT_PATH
from edgesplit.release.manifest import TensorSpec
from edgesplit.shared_memory.regions import FOLDER, SEGMENT
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.http_endpoint import Endpoint
from support.agent_engine import LOCAL, Step, active, eventually

PATIENCE_S = 30.0
COUNT = 262_144
SIZE = 4 * COUNT
X = np.ones((1, COUNT), np.float32)
SLOW_READERS = 100


class EndpointHarness:
    """The endpoint on a Unix socket, before a model that doubles a megabyte."""

    def __init__(self) -> None:
        import dataclasses

        import msgspec

        self.first = Step("x", "h", lambda x: x)
        release = active(LOCAL, steps={"a": self.first, "b": Step("h", "y", lambda h: 2 * h)})
        specs = {name: (TensorSpec(name, "FP32", (1, COUNT)),) for name in ("x", "y")}
        described = msgspec.structs.replace(release.manifest, inputs=specs["x"], outputs=specs["y"])
        self.engine = Engine("pi4", None)
        self.engine.serve("big", dataclasses.replace(release, manifest=described))
        self.endpoint = Endpoint(self.engine, dict)
        self.server = Server(self.endpoint, path=Path("a.sock"))
        self.server.start()
        self.url = f"unix://{Path('a.sock').absolute()}"
        self.regions: list[str] = []

    def region(self, size: int = SIZE) -> str:
        """POSIX shared memory of that size; its key."""
        key = f"edgesplit-test-{uuid.uuid4().hex[:12]}"
        (FOLDER / key).write_bytes(b"\0" * size)
        self.regions.append(key)
        return key

    def say(self, method: str, path: str, body: Any = None, connection: Connection | None = None) -> Reply:
        """One exchange on a connection of its own."""
        own = connection or Connection("", 0, path="a.sock")
        raw = [] if body is None else [json.dumps(body).encode()]
        reply = own.exchange(method, path, deadline=monotonic() + PATIENCE_S, body=raw)
        if connection is None:
            own.close()
        return reply

    def infer_at(self, place: dict[str, Any], out: dict[str, Any] | None = None) -> Reply:
        """A request whose input, and perhaps whose output, lie there."""
        entry = {"name": "x", "datatype": "FP32", "shape": [1, COUNT], "parameters": place}
        wanted = {"outputs": [{"name": "y", "parameters": out or {"binary_data": True}}]}
        return self.say("POST", "/v2/models/big/infer", {"inputs": [entry], **wanted})

    def answers(self) -> bool:
        """Does it serve a client that behaves?"""
        with Client(self.url) as client:
            return bool((client.infer("big", {"x": X}, deadline_s=PATIENCE_S).outputs["y"] == 2).all())

    def stop(self) -> None:
        self.first.may_run.set()
        self.server.stop(0.5)
        self.engine.stop()
        self.endpoint.close()
        for key in self.regions:
            (FOLDER / key).unlink(missing_ok=True)


@pytest.fixture
def harness(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndpointHarness]:
    if not FOLDER.is_dir():
        pytest.skip(f"no {FOLDER}: this system has no POSIX shared memory")
    monkeypatch.chdir(socket_folder)
    own = EndpointHarness()
    yield own
    own.stop()


def at(region: str, size: int = SIZE, offset: int = 0) -> dict[str, Any]:
    return {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}


def test_resizing_a_shared_region_during_requests_crashes_nothing(harness: EndpointHarness) -> None:
    """Each request is answered or refused; no SIGBUS, no hang, and the file never grows by what we write."""
    key = harness.region(2 * SIZE)
    path = "/v2/systemsharedmemory/region/r/register"
    assert harness.say("POST", path, {"key": key, "byte_size": 2 * SIZE}).status == 200
    seed = os.environ["EDGESPLIT_SEED"]
    print(f"seed {seed}")
    rng, over = random.Random(seed), threading.Event()

    def shake() -> None:
        while not over.is_set():
            os.truncate(FOLDER / key, rng.choice([0, 1, 4096, SIZE - 1, SIZE, 2 * SIZE]))

    shaker = threading.Thread(target=shake)
    shaker.start()
    try:
        for _ in range(60):
            assert harness.infer_at(at("r"), at("r", SIZE, SIZE)).status in (200, 400)
    finally:
        over.set()
        shaker.join(PATIENCE_S)
    assert (FOLDER / key).stat().st_size <= 2 * SIZE
    assert harness.answers()


def test_overlapping_shared_regions_are_answered_in_bounds(harness: EndpointHarness) -> None:
    """Input and output in one place, and two names for one memory: answered, in bounds."""
    key = harness.region()
    for name in ("r", "s"):
        path = f"/v2/systemsharedmemory/region/{name}/register"
        assert harness.say("POST", path, {"key": key, "byte_size": SIZE}).status == 200
    (FOLDER / key).write_bytes(X.tobytes())
    assert harness.infer_at(at("r"), at("s")).status == 200
    assert np.frombuffer((FOLDER / key).read_bytes(), np.float32).tolist() == [2.0] * COUNT


@pytest.mark.parametrize("place", [
    at("r", SIZE, 1), at("r", SIZE, 2**53), at("r", 2**53), at("r", -SIZE), at("r", SIZE, -1), at("r", 2**70),
    at("gone"), at(SEGMENT), at(""), at("../r"), {**at("r"), "shared_memory_byte_size": None},
    {**at("r"), "shared_memory_offset": "0"},
])  # fmt: skip
def test_invalid_offsets_into_shared_regions_are_refused(harness: EndpointHarness, place: dict[str, Any]) -> None:
    """Huge, negative, unknown, of the wrong type: a 400 that says so, as input and as output."""
    key = harness.region()
    assert (
        harness.say("POST", "/v2/systemsharedmemory/region/r/register", {"key": key, "byte_size": SIZE}).status == 200
    )
    assert harness.infer_at(place).status == 400
    assert harness.infer_at(at("r"), place).status == 400
    assert harness.answers()


@pytest.mark.parametrize("body", [
    {}, [], None, {"key": "k"}, {"key": 5, "byte_size": 5}, {"key": "KEY", "byte_size": -1},
    {"key": "KEY", "byte_size": 2**63}, {"key": "KEY", "byte_size": SIZE + 1}, {"key": "KEY", "byte_size": 0},
    {"key": "KEY", "byte_size": 1, "offset": SIZE}, {"key": "KEY", "byte_size": 1, "offset": -1},
])  # fmt: skip
def test_invalid_region_registrations_are_refused(harness: EndpointHarness, body: Any) -> None:
    """And nothing is registered by them."""
    key = harness.region()
    if isinstance(body, dict) and body.get("key") == "KEY":
        body = {**body, "key": key}
    assert harness.say("POST", "/v2/systemsharedmemory/region/r/register", body).status == 400
    assert json.loads(bytes(harness.say("GET", "/v2/systemsharedmemory/status").body)) == []


def offered(descriptors: list[int], extra: bytes = b"") -> tuple[socket.socket, bytes]:
    """These descriptors sent with an offer of a segment; the connection, and the beginning of what was answered."""
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(PATIENCE_S)
    link.connect("a.sock")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    link.sendmsg([f"POST {SEGMENT_PATH} HTTP/1.1\r\ncontent-length: 2\r\n\r\n{{}}".encode() + extra], rights)
    return link, link.recv(65_536)


def test_descriptors_that_are_no_sealed_memory_are_refused(harness: EndpointHarness, tmp_path: Path) -> None:
    """A file that could shrink, a socket, a terminal, several, none: refused and closed; the connection serves on."""
    (tmp_path / "file").write_bytes(b"x" * SIZE)
    unsealed = os.memfd_create("t", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    file, null = os.open(tmp_path / "file", os.O_RDWR), os.open("/dev/null", os.O_RDWR)
    other, end = socket.socketpair()

    def held() -> int:
        links = (f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd"))
        return sum(os.path.realpath(link) == str((tmp_path / "file").resolve()) for link in links)

    for passed in ([unsealed], [file], [null], [other.fileno()], [file, file], [], [file] * 20):
        link, said = offered(passed)
        assert said.startswith(b"HTTP/1.1 400"), (passed, said)
        link.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n")
        assert link.recv(65_536).startswith(b"HTTP/1.1 200")
        link.close()
    eventually("all but ours are closed again", lambda: held() == 1)
    for one in (unsealed, file, null):
        os.close(one)
    other.close()
    end.close()
    assert harness.answers()


KILLED = f"""
import sys, numpy as np
from edgesplit import Client
Client(sys.argv[1]).infer("big", {{"x": np.ones((1, {COUNT}), np.float32)}}, deadline_s=600)
"""


def test_a_client_that_is_killed_amid_its_exchange_leaves_nothing_behind(harness: EndpointHarness) -> None:
    """SIGKILL while its request runs: segment and connection are given back when the run has ended."""

    def held() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("memfd:edgesplit" in line for line in lines)

    assert harness.answers()
    harness.first.entered.clear()
    gc.collect()  # what earlier tests left behind would go at any moment
    eventually("the first client's segment was given back", lambda: not harness.server._connections)
    before = held()
    harness.first.may_run.clear()
    child = subprocess.Popen([sys.executable, "-c", KILLED, harness.url], stdout=subprocess.PIPE)
    assert harness.first.entered.wait(PATIENCE_S)
    assert held() > before
    child.send_signal(signal.SIGKILL)
    child.communicate()
    harness.first.may_run.set()
    eventually("the segment was given back", lambda: held() <= before)
    assert harness.answers()


def test_a_hundred_clients_that_do_not_read_delay_no_other_client(harness: EndpointHarness) -> None:
    """Each has asked for a megabyte and takes none of it: others are answered, memory is bounded by what was asked, and
    the connections end with their clients."""
    buffers, length = oip.encode_request(oip.InferRequest({"x": X}))
    body = b"".join(buffers)
    head = f"POST /v2/models/big/infer HTTP/1.1\r\ncontent-length: {len(body)}\r\n{oip.HEADER_LENGTH}: {length}\r\n\r\n"
    slow: list[socket.socket] = []
    for _ in range(SLOW_READERS):
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(PATIENCE_S)
        link.connect("a.sock")
        link.sendall(head.encode() + body)
        assert link.recv(20).startswith(b"HTTP/1.1 200")  # its answer has begun; the rest is never read
        slow.append(link)
    assert harness.answers()
    assert len(harness.server._connections) >= SLOW_READERS
    for link in slow:
        link.close()
    eventually("their connections have ended", lambda: not harness.server._connections)
    assert harness.answers()
