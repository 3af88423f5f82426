"""A server that lies, dies, drips or repeats itself (faults.md E1 to E3): never two results, a typed error in time."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from time import monotonic

import numpy as np
import pytest

from edgesplit.client.client import Answer, Client
from edgesplit.errors import DeadlineExceeded, EdgeError
from edgesplit.oip import protocol as oip

PATIENCE_S = 20.0
MARGIN_S = 2.0
"""How late a call may return before this test calls it hung; a busy machine is late, a hung call never comes."""
X = np.arange(64, dtype=np.float32)

Script = Callable[[socket.socket, bytes, int], None]
"""What the server does with one connection: the socket, the good response, the number of the attempt from 0."""


def read_request(sock: socket.socket) -> oip.InferRequest | None:
    """The next request on this connection, or None at its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65_536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    while len(body) < int(lines["content-length"]):
        body += sock.recv(65_536)
    return oip.decode_request(body, oip.header_length(lines))


def response_to(id_: str, value: float = 2.0) -> bytes:
    """A whole, good HTTP response to that id."""
    outputs = {"y": np.full(64, value, np.float32)}
    buffers, length = oip.encode_response(oip.InferResponse("m", outputs, id=id_))
    body = b"".join(buffers)
    lines = ["HTTP/1.1 200 OK", f"content-length: {len(body)}", f"{oip.HEADER_LENGTH}: {length}", "", ""]
    return "\r\n".join(lines).encode() + body


class Liar:
    """A server that answers each request by a script."""

    def __init__(self) -> None:
        self.script: Script = lambda sock, good, n: sock.sendall(good)
        self.ids: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self.over.set()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while (request := read_request(sock)) is not None:
                    self.ids.append(request.id)
                    self.script(sock, response_to(request.id), len(self.ids) - 1)
            except OSError:
                pass


@pytest.fixture
def liar() -> Iterator[Liar]:
    server = Liar()
    yield server
    server.stop()


def ask(liar: Liar, deadline_s: float, request_id: str = "the-one") -> Answer | EdgeError:
    """What the call came to; fails if it came to nothing, or too late."""
    began = monotonic()
    outcome: Answer | EdgeError
    with Client(liar.url) as client:
        try:
            outcome = client.infer("m", {"x": X}, deadline_s=deadline_s, request_id=request_id)
        except EdgeError as error:
            outcome = error
    assert monotonic() - began < deadline_s + MARGIN_S
    return outcome


def is_good(outcome: Answer | EdgeError, request_id: str = "the-one") -> bool:
    return isinstance(outcome, Answer) and outcome.id == request_id and outcome.outputs["y"].tolist() == [2.0] * 64


def reset(sock: socket.socket) -> None:
    """End this connection as a killed process may: by a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("goodbye", ["close", "reset"])
@pytest.mark.parametrize("part", [0.0, 0.02, 0.1, 0.2, 0.4, 0.6, 0.9, 0.999])
def test_death_at_any_byte_of_the_response_is_retried_under_the_same_id(liar: Liar, part: float, goodbye: str) -> None:
    """E1: before, amid the head, amid the JSON, amid the tensor, one byte before the end: one whole answer at last."""

    def die_twice(sock: socket.socket, good: bytes, n: int) -> None:
        sock.sendall(good if n >= 2 else good[: int(part * len(good))])
        if n < 2:
            reset(sock) if goodbye == "reset" else sock.close()

    liar.script = die_twice
    assert is_good(ask(liar, PATIENCE_S))
    assert liar.ids == ["the-one"] * 3


def test_death_after_the_response_loses_and_repeats_nothing(liar: Liar) -> None:
    """What had arrived whole counts; the next request opens a new connection."""
    liar.script = lambda sock, good, n: (sock.sendall(good), sock.close())[0]
    with Client(liar.url) as client:
        ids = [client.infer("m", {"x": X}, deadline_s=PATIENCE_S, request_id=str(n)).id for n in range(5)]
    assert ids == liar.ids == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ninference-header-content-length: 9\r\n\r\n{}{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ninference-header-content-length: x\r\n\r\n{}{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"\x00\xff" * 500,
    ],
)
def test_garbage_is_never_an_answer(liar: Liar, garbage: bytes) -> None:
    """E3: whatever else than a good response to this id arrives: a typed error, at the deadline at the latest."""
    liar.script = lambda sock, good, n: (sock.sendall(garbage), sock.close())[0]
    assert isinstance(ask(liar, 0.2), EdgeError)


@pytest.mark.parametrize("garbage", [b"\x00\xff" * 500 + b"\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"])
def test_a_good_answer_after_garbage_counts(liar: Liar, garbage: bytes) -> None:
    """A server that was dying is given the time that is left."""
    liar.script = lambda sock, good, n: sock.sendall(good if n else garbage)
    assert is_good(ask(liar, PATIENCE_S))


def test_an_answer_to_another_id_is_refused(liar: Liar) -> None:
    """E3: a replay of what was right for another request is not returned, and the right one after it is."""
    liar.script = lambda sock, good, n: sock.sendall(good if n else response_to("another", 9.0))
    assert is_good(ask(liar, PATIENCE_S))
    liar.script = lambda sock, good, n: sock.sendall(response_to("", 9.0))
    assert isinstance(ask(liar, 0.2), DeadlineExceeded)


def test_a_second_answer_to_one_request_is_never_taken_for_the_next(liar: Liar) -> None:
    """E2: each request is answered twice, the second time wrongly; nobody sees the second answers."""

    def twice(sock: socket.socket, good: bytes, n: int) -> None:
        sock.sendall(good + response_to(liar.ids[n], -1.0))

    liar.script = twice
    with Client(liar.url) as client:
        for n in range(20):
            answer = client.infer("m", {"x": X}, deadline_s=PATIENCE_S, request_id=str(n))
            assert (answer.id, answer.outputs["y"][0]) == (str(n), 2.0)


def test_a_late_answer_to_an_earlier_attempt_is_never_returned(liar: Liar) -> None:
    """E2: a request that timed out is answered when the next one is under way; that one gets its own."""
    held: list[tuple[socket.socket, bytes]] = []
    release = threading.Event()

    def late(sock: socket.socket, good: bytes, n: int) -> None:
        if n == 0:
            release.wait(PATIENCE_S)
            held.append((sock, good))
        sock.sendall(good)

    liar.script = late
    with Client(liar.url) as client:
        with pytest.raises(DeadlineExceeded):
            client.infer("m", {"x": X}, deadline_s=0.2, request_id="first")
        release.set()
        assert client.infer("m", {"x": X}, deadline_s=PATIENCE_S, request_id="second").id == "second"
    assert liar.ids == ["first", "second"]


def test_a_server_that_never_answers_is_left_at_the_deadline(liar: Liar) -> None:
    """Accepted, read, and then nothing."""
    liar.script = lambda sock, good, n: liar.over.wait(PATIENCE_S) and None
    assert isinstance(ask(liar, 0.3), DeadlineExceeded)
    assert liar.ids == ["the-one"]


def test_a_server_that_never_reads_is_left_at_the_deadline() -> None:
    """The request is larger than every buffer between; nobody takes it."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        began = monotonic()
        with Client(url) as client, pytest.raises(DeadlineExceeded):
            client.infer("m", {"x": np.zeros(8_000_000, np.float32)}, deadline_s=0.3)
        assert monotonic() - began < 0.3 + MARGIN_S


@pytest.mark.parametrize("from_byte", [0, 30, 400])
def test_a_server_that_drips_is_left_at_the_deadline(liar: Liar, from_byte: int) -> None:
    """Each byte comes within any time-out of a single read; the deadline is on the whole."""

    def drip(sock: socket.socket, good: bytes, n: int) -> None:
        sock.sendall(good[:from_byte])
        for byte in good[from_byte:]:
            if liar.over.wait(0.02):
                return
            sock.sendall(bytes([byte]))

    liar.script = drip
    assert isinstance(ask(liar, 0.3), DeadlineExceeded)


def test_random_misbehaviour_never_gives_two_results_or_a_wrong_one(liar: Liar) -> None:
    """Seeded: each attempt meets a random fault; each call ends once, with its own answer or a typed error in time."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def misbehave(sock: socket.socket, good: bytes, n: int) -> None:
        fault = rng.choice(["good", "good", "cut", "reset", "flip", "other", "twice", "busy", "late"])
        if fault in ("cut", "reset"):
            sock.sendall(good[: rng.randrange(len(good))])
            reset(sock) if fault == "reset" else sock.close()
        elif fault == "flip":  # in the JSON's keys, so that damage is always visible
            at = good.index(b'"id"') + 1
            sock.sendall(good[:at] + bytes([good[at] ^ rng.randrange(1, 256)]) + good[at + 1 :])
        elif fault == "busy":
            sock.sendall(b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n")
        else:
            liar.over.wait(0.05 if fault == "late" else 0)
            sock.sendall({"other": response_to("other", -1.0), "twice": good + good}.get(fault, good))

    liar.script = misbehave
    outcomes: dict[str, list[Answer | EdgeError]] = {}

    def many(worker: int) -> None:
        for n in range(8):
            id_ = f"{worker}-{n}"
            outcomes.setdefault(id_, []).append(ask(liar, 3.0, id_))

    workers = [threading.Thread(target=many, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(8 * (3.0 + MARGIN_S))
    assert len(outcomes) == 32
    assert all(len(results) == 1 for results in outcomes.values())
    for id_, (outcome,) in outcomes.items():
        assert is_good(outcome, id_) or isinstance(outcome, DeadlineExceeded)
