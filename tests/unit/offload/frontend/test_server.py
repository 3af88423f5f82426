"""The offload server while a model runs long, or never returns, or clients send and read as they like: everybody else
is served as ever."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic

import msgspec
import pytest

from edgesplit.client.client import Connection
from edgesplit.oip import protocol as oip
from edgesplit_controller.pki.authority import Authority
from edgesplit_offload.server import OffloadServer
from support.agent_engine import eventually
from support.gated_offload_server import Answers, Gate, ask, error, outputs
from support.handmade_release import CUT, MID, HandmadeRelease

PATIENCE_S = 20.0
RIGHT = {"out": [2, 4, 6, 8], "same": [1, 2, 3, 4]}


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def serving(tmp_path: Path, gate: Gate) -> Iterator[Callable[..., OffloadServer]]:
    """Starts servers of the handmade release that run one request at a time, and stops them."""
    release, running = HandmadeRelease(tmp_path), list[OffloadServer]()

    def start(**options: object) -> OffloadServer:
        how = {"open_release": release.open, "runtime": gate, "at_once": 1, **options}
        server = OffloadServer(Path("unused"), b"", **how)  # type: ignore[arg-type]
        server.start()
        running.append(server)
        return server

    yield start
    gate.leave.set()
    for server in running:
        server.stop(1.0)


def live(server: OffloadServer) -> int:
    with closing(Connection("127.0.0.1", server.port)) as connection:
        return connection.exchange("GET", "/v2/health/live", deadline=monotonic() + PATIENCE_S).status


def request(id: str = "i") -> bytes:
    """One inference as it travels."""
    buffers, length = oip.encode_request(oip.InferRequest({"mid": MID}, id=id, binary_outputs=False))
    body = b"".join(buffers)
    sizes = [f"content-length: {len(body)}", f"{oip.HEADER_LENGTH}: {length}"]
    return "\r\n".join([f"POST /v2/models/{CUT}/infer HTTP/1.1", "host: x", *sizes, "", ""]).encode() + body


def hung(server: OffloadServer, gate: Gate) -> threading.Thread:
    """A request whose run does not end before the gate lets it."""
    gate.leave.clear()
    while gate.begun.acquire(blocking=False):
        pass
    thread = threading.Thread(target=ask, args=(server,), daemon=True)
    thread.start()
    assert gate.begun.acquire(timeout=PATIENCE_S)
    return thread


@pytest.mark.parametrize("known", [0, 5])
def test_health_answers_while_a_model_never_returns(
    serving: Callable[..., OffloadServer], gate: Gate, known: int
) -> None:
    """Whether the model never ran before, or was so quick until now that the loop's own thread ran it."""
    server = serving()
    for _ in range(known):
        assert outputs(ask(server)) == RIGHT
    thread = hung(server, gate)
    assert [live(server) for _ in range(3)] == [200] * 3
    assert server.longest_run_s() > 0
    gate.leave.set()
    thread.join(PATIENCE_S)
    assert outputs(ask(server)) == RIGHT


def test_deadlines_and_queue_limit_hold_during_a_run(serving: Callable[..., OffloadServer], gate: Gate) -> None:
    """A late request fails before the run is over, and one too many is refused at once with a retry time."""
    server = serving(waiting=1)
    assert outputs(ask(server)) == RIGHT
    running = hung(server, gate)
    assert error(ask(server, timeout_us=50_000))[0] in (503, 504)
    waiting = threading.Thread(target=ask, args=(server,), daemon=True)
    waiting.start()
    eventually("it waits", lambda: server.scheduler.waiting == 1)
    refused = ask(server)
    assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
    gate.leave.set()
    for thread in (running, waiting):
        thread.join(PATIENCE_S)


def test_a_waiting_request_leaves_the_queue_when_its_client_disconnects(
    serving: Callable[..., OffloadServer], gate: Gate
) -> None:
    """Its place in the queue is free before the active run is over."""
    server = serving()
    assert outputs(ask(server)) == RIGHT
    running = hung(server, gate)
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(request())
        eventually("it waits", lambda: server.scheduler.waiting == 1)
    eventually("its place is free", lambda: server.scheduler.waiting == 0)
    runs = gate.runs
    gate.leave.set()
    running.join(PATIENCE_S)
    assert gate.runs == runs


def test_a_slow_request_body_delays_no_other_request(serving: Callable[..., OffloadServer]) -> None:
    """Cut within its head and within its body: others are answered before the rest comes, and then it is too."""
    server, whole = serving(), request()
    for place in (1, 40, len(whole) - 20, len(whole) - 1):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
            sock.sendall(whole[:place])
            assert outputs(ask(server)) == RIGHT
            sock.sendall(whole[place:])
            assert Answers(sock.recv).next()[0] == 200


def test_pipelined_requests_are_answered_in_order(serving: Callable[..., OffloadServer]) -> None:
    """Each response has its request's id, in order, on each of two connections."""
    server = serving()
    stream = b"".join(request(str(number)) for number in range(20))
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as one,
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as other,
    ):
        for sock in (one, other):
            sock.sendall(stream)
        for sock in (one, other):
            assert ids(sock, 20) == [str(number) for number in range(20)]


def ids(sock: socket.socket, count: int) -> list[str]:
    """Of so many answers."""
    answers = Answers(sock.recv)
    return [msgspec.json.decode(answers.next()[1])["id"] for _ in range(count)]


def test_tls_records_may_be_split_anywhere(serving: Callable[..., OffloadServer], tmp_path: Path) -> None:
    """A byte, half a handshake, half a record, two requests in one: nothing waits for the rest, and all are
    answered."""
    authority = Authority(tmp_path / "ca")
    server = serving(tls=authority.issue_server("offload", ["127.0.0.1"]).server_context())
    context = authority.issue_client("camera-1").client_context()
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        client = Tls(sock, context)
        client.handshake()
        client.write(request("a"))
        client.send(0.5)
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as other:
            beside = Tls(other, context)
            beside.handshake()
            beside.write(request("b"))
            beside.send(1.0)
            assert Answers(beside.read).next()[0] == 200
        client.send(1.0)
        answers = Answers(client.read)
        assert answers.next()[0] == 200
        client.write(request("c") + request("d"))
        client.send(1.0)
        assert [answers.next()[0] for _ in range(2)] == [200, 200]


class Tls:
    """A client whose bytes go out in the pieces that a test wants."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._come, self._go = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._come, self._go, server_hostname="127.0.0.1")
        self._left = b""

    def handshake(self) -> None:
        """Each flight in three pieces."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flights()
                self._come.write(self._sock.recv(65_536))
        self._flights()

    def _flights(self) -> None:
        for share in (0.1, 0.5, 1.0):
            self.send(share)

    def write(self, data: bytes) -> None:
        """To be sent."""
        self._tls.write(data)

    def send(self, share: float) -> None:
        """That share of what there is."""
        self._left += self._go.read()
        count = round(share * len(self._left))
        self._sock.sendall(self._left[:count])
        self._left = self._left[count:]

    def read(self, size: int) -> bytes:
        """What comes, undone."""
        while True:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                self._come.write(self._sock.recv(65_536))
