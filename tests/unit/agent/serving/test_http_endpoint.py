"""The local endpoint over real sockets, before programs on the device that take what they can."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from edgesplit.client.client import Client
from edgesplit.errors import NotFound, UsageError
from edgesplit.http1.admission import FLOOD_REFUSALS
from edgesplit.http1.server import Server
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import ENDPOINT_FLOODED
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.http_endpoint import Endpoint
from edgesplit_agent.telemetry.conditions import reported_conditions
from support.agent_engine import EXPECTED, INPUT, LOCAL, active

PATIENCE_S = 20.0
DECLARED = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n."


@pytest.fixture(params=["tcp", "unix"])
def server(request: pytest.FixtureRequest, socket_folder: Path) -> Iterator[Server]:
    """An agent's endpoint, on TCP and on its Unix socket."""
    engine = Engine("pi4", None)
    engine.serve("tiny", active(LOCAL))
    endpoint = Endpoint(engine, dict)
    path = socket_folder / "a.sock" if request.param == "unix" else None
    running = Server(endpoint, path=path, check_head=endpoint.check_head)
    running.start()
    yield running
    running.stop(0.5)
    engine.stop()
    endpoint.close()


def opened(server: Server) -> socket.socket:
    if server.url.startswith("unix://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(server.url.removeprefix("unix://"))
    else:
        sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(PATIENCE_S)
    return sock


def test_four_declared_lengths_stopped_the_endpoint_for_every_application(server: Server) -> None:
    """Sixteen sockets that declare 256 MiB each, of the same user even: every inference is answered."""
    with ExitStack() as stack, Client(server.url) as client:
        for _ in range(16):
            stack.enter_context(opened(server)).sendall(DECLARED % LIMITS.http_body_bytes)
        for _ in range(5):
            answer = client.infer("tiny", {"x": INPUT}, deadline_s=PATIENCE_S)
            assert np.array_equal(answer.outputs["y"], EXPECTED)


def test_idle_connections_locked_every_application_out(server: Server) -> None:
    """Three hundred that say nothing: the oldest give way."""
    with ExitStack() as stack, Client(server.url) as client:
        for _ in range(300):
            stack.enter_context(opened(server))
        answer = client.infer("tiny", {"x": INPUT}, deadline_s=PATIENCE_S)
        assert np.array_equal(answer.outputs["y"], EXPECTED)


@pytest.mark.parametrize(
    ("line", "host", "status"),
    [
        (b"POST /v2/models/huge/infer", b"localhost", 404),
        (b"PUT /v2/models/tiny/infer", b"localhost", 405),
        (b"POST /v2/repository/index", b"localhost", 413),
        (b"POST /nothing", b"localhost", 413),
        (b"POST /v2/models/tiny/infer\r\nOrigin: https://evil.example", b"localhost", 403),
    ],
)
def test_a_body_is_refused_by_its_head(server: Server, line: bytes, host: bytes, status: int) -> None:
    """Model, method, origin and length are judged before a byte of the body is sent."""
    start, _, more = line.partition(b"\r\n")
    head = [start + b" HTTP/1.1", b"Host: " + host, *([more] if more else []), b"Content-Length: 99999999", b"", b""]
    with opened(server) as sock:
        sock.sendall(b"\r\n".join(head))
        assert sock.recv(65_536).startswith(b"HTTP/1.1 %d " % status)


def test_a_large_input_for_a_model_that_is_not_here_gets_the_reason(server: Server) -> None:
    """The refusal reaches a client that is still sending."""
    with Client(server.url) as client, pytest.raises(NotFound, match="no model huge runs here"):
        client.infer("huge", {"x": np.zeros((1, 1_500_000), np.float32)}, deadline_s=PATIENCE_S)


def test_nothing_named_the_user_who_attacked_the_endpoint(server: Server) -> None:
    """A user who is refused again and again is a condition of the device; a few refusals are none."""
    for number in range(FLOOD_REFUSALS):
        with opened(server) as sock:
            sock.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")
            assert sock.recv(65_536).startswith(b"HTTP/1.1 413")
        assert bool(reported_conditions([server.recent_refusals()])) is (number + 1 >= FLOOD_REFUSALS)
    (condition,) = reported_conditions([server.recent_refusals(), {}])
    assert condition.kind == ENDPOINT_FLOODED
    assert condition.text == f"user {os.getuid()} was refused {FLOOD_REFUSALS} times in two minutes: malformed"


def test_a_model_with_its_version_was_not_found(server: Server) -> None:
    """NAME@VERSION, the protocol's own path, metadata and readiness; another version is refused, with the reason."""
    with Client(server.url) as client:
        answer = client.infer("tiny@1", {"x": INPUT}, deadline_s=PATIENCE_S)
        assert np.array_equal(answer.outputs["y"], EXPECTED)
        assert client.metadata("tiny@1")["name"] == "tiny" and client.ready("tiny@1") and not client.ready("tiny@2")
        with pytest.raises(NotFound, match=r"version 2 of tiny does not run here, but tiny@1: .* deploy tiny@2"):
            client.infer("tiny@2", {"x": INPUT}, deadline_s=PATIENCE_S)
        with pytest.raises(NotFound, match="version 7 of tiny does not run here, but tiny@1"):
            client.metadata("tiny@7")


def test_a_picture_for_a_model_of_tensors_was_called_a_missing_input(server: Server) -> None:
    """The model was pushed without --input: that is said, with the inputs and what to do."""
    with Client(server.url) as client, pytest.raises(UsageError, match="pushed without --input") as refused:
        client.infer("tiny", {"frame": b"\xff\xd8\xff"}, deadline_s=PATIENCE_S)
    assert "'x' (FP32" in str(refused.value) and ".npy" in str(refused.value)
