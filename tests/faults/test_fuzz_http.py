"""Spoiled HTTP over real sockets: to our server, and to our clients from a server that sends what it likes.

Our server answers a 4xx or hangs up, and serves the next connection; our clients raise their own errors by their
deadline. tests/unit/sdk/http1/test_server.py and test_client.py have the protocol's own cases.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
import pytest
from hypothesis import strategies as st

from edgesplit.client.client import Connection, error_of
from edgesplit.errors import EdgeError
from edgesplit.http1.head import Refused, body_length, parse_head, split_target
from edgesplit.http1.server import Request, Response, Server
from edgesplit.offload_client.pool import (
    CancellableCall,
    OffloadAnswer,
    OffloadClient,
    OffloadFailure,
    encode_offload_request,
)
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec
from edgesplit_offload.server import OffloadServer
from support.fuzzing import fuzzed, spoiled
from support.handmade_release import CUT, MID, HandmadeRelease

PATIENCE_S = 30.0
BODY, LENGTH = oip.encode_request(oip.InferRequest({"mid": MID}, (), "id-1"))
INFER = (
    f"POST /v2/models/{CUT}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {sum(map(len, BODY))}\r\n"
    f"{oip.HEADER_LENGTH}: {LENGTH}\r\nContent-Encoding: identity\r\nConnection: close\r\n\r\n"
).encode() + b"".join(BODY)
GETS = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
INDEX = b"POST /v2/repository/index?q=%20 HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n{}"
REQUESTS = [INFER, GETS, INDEX]
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@fuzzed(spoiled(REQUESTS))
def test_a_spoiled_head_is_refused_by_the_protocol_alone(raw: bytes) -> None:
    """Parsed without a socket: a request of bounded size, or a refusal that has its status."""
    block = raw.split(b"\r\n\r\n")[0] + b"\r\n\r\n"
    try:
        head = parse_head(block)
        assert body_length(head) >= 0
        assert split_target(head.url)[0].startswith("/")
    except Refused as refusal:
        assert 400 <= refusal.status < 600


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OffloadServer]:
    """An offload server with one release, in this process."""
    release = HandmadeRelease(tmp_path_factory.mktemp("release"))
    server = OffloadServer(tmp_path_factory.mktemp("none"), b"", open_release=release.open)
    server.start()
    yield server
    server.stop(0.1)


def said(port: int, raw: bytes, *, more_may_come: bool = False) -> bytes:
    """Everything that the server answers to these bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as link:
        answer = b""
        with suppress(ConnectionError):
            link.sendall(raw)
            if not more_may_come:
                link.shutdown(socket.SHUT_WR)
            while piece := link.recv(65_536):
                answer += piece
        return answer


def test_a_spoiled_request_is_answered_4xx_or_left_and_the_server_lives(serving: OffloadServer) -> None:
    """Bytes over a real socket to the offload server, down to the tensors: never a 500; a good one works afterwards.

    (We close our side behind each: a server that notices says 502 to nobody.)"""

    @fuzzed(spoiled(REQUESTS), share=0.7)
    def tried(raw: bytes) -> None:
        for status in STATUS.findall(said(serving.port, raw)):
            assert int(status) < 500 or int(status) in (502, 503, 504, 505), status

    tried()
    assert said(serving.port, INFER, more_may_come=True).startswith(b"HTTP/1.1 200")


@dataclass
class Parrot:
    """A server that answers every connection with the same bytes, whatever it is asked."""

    answer: bytes = b""
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def start(self) -> Parrot:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link, suppress(OSError):
                link.settimeout(PATIENCE_S)
                link.recv(65_536)
                link.sendall(self.answer)
                link.shutdown(socket.SHUT_WR)
                while link.recv(65_536):
                    pass

    def close(self) -> None:
        self._listener.close()


OUT = {"out": MID, "same": MID}
ANSWER, ANSWER_LENGTH = oip.encode_response(oip.InferResponse(CUT, OUT, "1", "id-1"))
GOOD = (
    f"HTTP/1.1 200 OK\r\nContent-Length: {sum(map(len, ANSWER))}\r\n{oip.HEADER_LENGTH}: {ANSWER_LENGTH}\r\n"
    "edgesplit-seconds: 0.001\r\nedgesplit-load: 1.5\r\n\r\n"
).encode() + b"".join(ANSWER)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
BUSY = b'HTTP/1.1 503 No\r\nRetry-After: 3\r\nContent-Length: 15\r\n\r\n{"error":"busy"}'
ODD = [
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nabc",
    b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000 + b"\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 200 + GOOD,
    b"HTTP/1.1 99999999999 Odd\r\n\r\n",
    b"HTTP/2.0 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nedgesplit-seconds: nan\r\nedgesplit-load: -inf\r\nContent-Length: 0\r\n\r\n",
    b"\r\n" * 5_000,
    b"",
]
ANSWERS = [GOOD, CHUNKED, BUSY]


@pytest.fixture(scope="module")
def parrot() -> Iterator[Parrot]:
    made = Parrot().start()
    yield made
    made.close()


def test_a_spoiled_answer_is_an_error_of_the_clients_own(parrot: Parrot) -> None:
    """`edgesplit.Client`'s connection: whole answers, or LinkError, MalformedMessage, DeadlineExceeded."""

    @fuzzed(st.one_of(spoiled(ANSWERS), st.sampled_from(ODD)), share=0.7)
    def tried(raw: bytes) -> None:
        parrot.answer = raw
        connection = Connection(*parrot.address)
        with suppress(EdgeError):
            reply = connection.exchange("GET", "/", deadline=monotonic() + PATIENCE_S)
            error = error_of(reply)
            assert error is None or len(str(error)) < 1_000
        connection.close()

    tried()


def test_a_forged_offload_answer_is_a_failure_and_never_an_exception(parrot: Parrot) -> None:
    """The agent's half: whatever a false offload server sends is an answer that fits what was asked, or a failure."""
    host, port = parrot.address
    receives = (TensorSpec("out", "FP32", (1, 4)), TensorSpec("same", "FP32", (1, 4)))

    @fuzzed(st.one_of(spoiled(ANSWERS), st.sampled_from(ODD)), share=0.7)
    def tried(raw: bytes) -> None:
        parrot.answer = raw
        remote = OffloadClient(f"http://{host}:{port}")
        asked = encode_offload_request(CUT, "id-1", {"mid": MID}, receives, left_s=PATIENCE_S)
        outcome = remote.infer(asked, CancellableCall(), PATIENCE_S)
        if isinstance(outcome, OffloadAnswer):
            assert {name: tensor.shape for name, tensor in outcome.outputs.items()} == {"out": (1, 4), "same": (1, 4)}
            assert outcome.server_s >= 0 and outcome.load >= 1
        else:
            assert isinstance(outcome, OffloadFailure)
        remote.close()

    tried()


def test_a_handler_sees_only_whole_requests() -> None:
    """What arrives at a handler has the length that it said, however its bytes were cut."""
    seen: list[tuple[int, str]] = []

    def handle(request: Request) -> Response:
        seen.append((len(request.body), request.headers.get("content-length", "0")))
        return Response()

    server = Server(handle)
    server.start()

    @fuzzed(spoiled([INFER, INFER + GETS, GETS + INFER]), share=0.5)
    def tried(raw: bytes) -> None:
        seen.clear()
        said(server.port, raw)
        assert all(str(length) == told.lstrip("0").rjust(1, "0") for length, told in seen)

    try:
        tried()
    finally:
        server.stop(0.1)


def test_a_chunk_of_negative_length_was_an_exception_in_the_agent(parrot: Parrot) -> None:
    """It ended the thread that asked, and its connection was never given back; now it is a failure like others."""
    parrot.answer = CHUNKED.replace(b"\r\n5\r\n", b"\r\n-5\r\n")
    host, port = parrot.address
    outcome = OffloadClient(f"http://{host}:{port}").ping(PATIENCE_S)
    assert isinstance(outcome, OffloadFailure) and outcome.cause == "server"


def test_numbers_that_a_false_server_tells_of_itself_are_bounded() -> None:
    """Seconds and load are believed only as sane numbers: they decide which row is the cheapest."""
    fake = Parrot(GOOD.replace(b"edgesplit-load: 1.5", b"edgesplit-load: 1e300").replace(b"0.001", b"-9e9")).start()
    host, port = fake.address
    wanted = (TensorSpec("out", "FP32", (1, 4)), TensorSpec("same", "FP32", (1, 4)))
    asked = encode_offload_request(CUT, "id-1", {"mid": MID}, wanted, left_s=PATIENCE_S)
    outcome = OffloadClient(f"http://{host}:{port}").infer(asked, CancellableCall(), PATIENCE_S)
    fake.close()
    assert isinstance(outcome, OffloadAnswer) and outcome.load == 1.0 and outcome.server_s == 0.0
    assert np.array_equal(outcome.outputs["out"], MID)
