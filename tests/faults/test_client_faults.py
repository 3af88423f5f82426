"""Servers that answer wrongly, break off, answer byte by byte or answer twice (faults.md E1 to E3): the client never
returns two results, and raises a typed error in time."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from time import monotonic

import numpy as np
import pytest

from edgesplit.client.client import Answer, Client
from edgesplit.errors import DeadlineExceeded, EdgeError
from support.scripted_server import MARGIN_S, PATIENCE_S, ScriptedServer, X, is_good, reset, response_to


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    running = ScriptedServer()
    yield running
    running.stop()


def ask(server: ScriptedServer, deadline_s: float, request_id: str = "the-one") -> Answer | EdgeError:
    """What the call came to; fails if it came to nothing, or too late."""
    began = monotonic()
    outcome: Answer | EdgeError
    with Client(server.url) as client:
        try:
            outcome = client.infer("m", {"x": X}, deadline_s=deadline_s, request_id=request_id)
        except EdgeError as error:
            outcome = error
    assert monotonic() - began < deadline_s + MARGIN_S
    return outcome


@pytest.mark.parametrize("goodbye", ["close", "reset"])
@pytest.mark.parametrize("part", [0.0, 0.02, 0.1, 0.2, 0.4, 0.6, 0.9, 0.999])
def test_death_at_any_byte_of_the_response_is_retried_under_the_same_id(
    server: ScriptedServer, part: float, goodbye: str
) -> None:
    """E1: before, amid the head, amid the JSON, amid the tensor, one byte before the end: one whole answer at last."""

    def die_twice(sock: socket.socket, good: bytes, n: int) -> None:
        sock.sendall(good if n >= 2 else good[: int(part * len(good))])
        if n < 2:
            reset(sock) if goodbye == "reset" else sock.close()

    server.script = die_twice
    assert is_good(ask(server, PATIENCE_S))
    assert server.ids == ["the-one"] * 3


def test_death_after_the_response_loses_and_repeats_nothing(server: ScriptedServer) -> None:
    """What had arrived whole counts; the next request opens a new connection."""
    server.script = lambda sock, good, n: (sock.sendall(good), sock.close())[0]
    with Client(server.url) as client:
        ids = [client.infer("m", {"x": X}, deadline_s=PATIENCE_S, request_id=str(n)).id for n in range(5)]
    assert ids == server.ids == ["0", "1", "2", "3", "4"]


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
def test_garbage_is_never_an_answer(server: ScriptedServer, garbage: bytes) -> None:
    """E3: whatever else than a good response to this id arrives: a typed error, at the deadline at the latest."""
    server.script = lambda sock, good, n: (sock.sendall(garbage), sock.close())[0]
    assert isinstance(ask(server, 0.2), EdgeError)


@pytest.mark.parametrize("garbage", [b"\x00\xff" * 500 + b"\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"])
def test_a_good_answer_after_garbage_counts(server: ScriptedServer, garbage: bytes) -> None:
    """A server that was dying is given the time that is left."""
    server.script = lambda sock, good, n: sock.sendall(good if n else garbage)
    assert is_good(ask(server, PATIENCE_S))


def test_an_answer_to_another_id_is_refused(server: ScriptedServer) -> None:
    """E3: a replay of what was right for another request is not returned, and the right one after it is."""
    server.script = lambda sock, good, n: sock.sendall(good if n else response_to("another", 9.0))
    assert is_good(ask(server, PATIENCE_S))
    server.script = lambda sock, good, n: sock.sendall(response_to("", 9.0))
    assert isinstance(ask(server, 0.2), DeadlineExceeded)


def test_a_second_answer_to_one_request_is_never_taken_for_the_next(server: ScriptedServer) -> None:
    """E2: each request is answered twice, the second time wrongly; nobody sees the second answers."""

    def twice(sock: socket.socket, good: bytes, n: int) -> None:
        sock.sendall(good + response_to(server.ids[n], -1.0))

    server.script = twice
    with Client(server.url) as client:
        for n in range(20):
            answer = client.infer("m", {"x": X}, deadline_s=PATIENCE_S, request_id=str(n))
            assert (answer.id, answer.outputs["y"][0]) == (str(n), 2.0)


def test_a_late_answer_to_an_earlier_attempt_is_never_returned(server: ScriptedServer) -> None:
    """E2: a request that timed out is answered when the next one is under way; that one gets its own."""
    held: list[tuple[socket.socket, bytes]] = []
    release = threading.Event()

    def late(sock: socket.socket, good: bytes, n: int) -> None:
        if n == 0:
            release.wait(PATIENCE_S)
            held.append((sock, good))
        sock.sendall(good)

    server.script = late
    with Client(server.url) as client:
        with pytest.raises(DeadlineExceeded):
            client.infer("m", {"x": X}, deadline_s=0.2, request_id="first")
        release.set()
        assert client.infer("m", {"x": X}, deadline_s=PATIENCE_S, request_id="second").id == "second"
    assert server.ids == ["first", "second"]


def test_a_server_that_never_answers_is_left_at_the_deadline(server: ScriptedServer) -> None:
    """Accepted, read, and then nothing."""
    server.script = lambda sock, good, n: server.over.wait(PATIENCE_S) and None
    assert isinstance(ask(server, 0.3), DeadlineExceeded)
    assert server.ids == ["the-one"]


def test_a_server_that_never_reads_is_left_at_the_deadline() -> None:
    """The request is larger than every buffer between; nobody takes it."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        began = monotonic()
        with Client(url) as client, pytest.raises(DeadlineExceeded):
            client.infer("m", {"x": np.zeros(8_000_000, np.float32)}, deadline_s=0.3)
        assert monotonic() - began < 0.3 + MARGIN_S


@pytest.mark.parametrize("from_byte", [0, 30, 400])
def test_a_server_that_answers_byte_by_byte_is_left_at_the_deadline(server: ScriptedServer, from_byte: int) -> None:
    """Each byte comes within any time-out of a single read; the deadline is on the whole."""

    def drip(sock: socket.socket, good: bytes, n: int) -> None:
        sock.sendall(good[:from_byte])
        for byte in good[from_byte:]:
            if server.over.wait(0.02):
                return
            sock.sendall(bytes([byte]))

    server.script = drip
    assert isinstance(ask(server, 0.3), DeadlineExceeded)


def test_random_misbehaviour_never_gives_two_results_or_a_wrong_one(server: ScriptedServer) -> None:
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
            server.over.wait(0.05 if fault == "late" else 0)
            sock.sendall({"other": response_to("other", -1.0), "twice": good + good}.get(fault, good))

    server.script = misbehave
    outcomes: dict[str, list[Answer | EdgeError]] = {}

    def many(worker: int) -> None:
        for n in range(8):
            id_ = f"{worker}-{n}"
            outcomes.setdefault(id_, []).append(ask(server, 3.0, id_))

    workers = [threading.Thread(target=many, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(8 * (3.0 + MARGIN_S))
    assert len(outcomes) == 32
    assert all(len(results) == 1 for results in outcomes.values())
    for id_, (outcome,) in outcomes.items():
        assert is_good(outcome, id_) or isinstance(outcome, DeadlineExceeded)
