"""`AsyncClient` against the servers of test_client_faults.py, which answer wrongly, break off, answer byte by byte or
twice, or do not read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from time import monotonic

import numpy as np
import pytest

from edgesplit import AsyncClient
from edgesplit.client.client import Answer
from edgesplit.errors import DeadlineExceeded, EdgeError, Unreachable
from support.scripted_server import MARGIN_S, PATIENCE_S, ScriptedServer, X, is_good, reset, response_to


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    running = ScriptedServer()
    yield running
    running.stop()


def ask(server: ScriptedServer, deadline_s: float, *ids: str) -> list[Answer | EdgeError]:
    """What the calls came to, one after the other, by one client; fails if one came too late."""

    async def run() -> list[Answer | EdgeError]:
        outcomes: list[Answer | EdgeError] = []
        async with AsyncClient(server.url) as client:
            for request_id in ids or ("the-one",):
                began = monotonic()
                try:
                    outcomes.append(await client.infer("m", {"x": X}, deadline_s=deadline_s, request_id=request_id))
                except EdgeError as error:
                    outcomes.append(error)
                assert monotonic() - began < deadline_s + MARGIN_S
        return outcomes

    return asyncio.run(run())


@pytest.mark.parametrize("goodbye", ["close", "reset"])
@pytest.mark.parametrize("part", [0.0, 0.05, 0.2, 0.6, 0.999])
def test_death_at_any_byte_of_the_response_is_retried_under_the_same_id(
    server: ScriptedServer, part: float, goodbye: str
) -> None:
    """One whole answer at last."""

    def die_twice(sock: socket.socket, good: bytes, n: int) -> None:
        sock.sendall(good if n >= 2 else good[: int(part * len(good))])
        if n < 2:
            reset(sock) if goodbye == "reset" else sock.close()

    server.script = die_twice
    assert is_good(ask(server, PATIENCE_S)[0])
    assert server.ids == ["the-one"] * 3


@pytest.mark.parametrize(
    "garbage",
    [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"\x00\xff" * 500,
     b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000],
)  # fmt: skip
def test_garbage_is_never_an_answer_and_a_good_one_after_it_counts(server: ScriptedServer, garbage: bytes) -> None:
    """While there is time."""
    server.script = lambda sock, good, n: sock.sendall(good) if n else (sock.sendall(garbage), sock.close())[0]
    assert is_good(ask(server, PATIENCE_S)[0])
    server.script = lambda sock, good, n: (sock.sendall(garbage), sock.close())[0]
    assert isinstance(ask(server, 0.2)[0], DeadlineExceeded)


def test_answers_to_other_ids_and_second_answers_are_never_taken(server: ScriptedServer) -> None:
    """A replay before the right one, and a wrong one behind each."""

    def spoil(sock: socket.socket, good: bytes, n: int) -> None:
        sock.sendall(response_to("another", 9.0) if n == 0 else good + response_to(server.ids[n], -1.0))

    server.script = spoil
    ids = [str(n) for n in range(10)]
    outcomes = ask(server, PATIENCE_S, *ids)
    assert all(is_good(one, id_) for one, id_ in zip(outcomes, ids, strict=True))


@pytest.mark.parametrize("from_byte", [0, 30, 400])
def test_a_slow_or_silent_server_is_left_at_the_deadline(server: ScriptedServer, from_byte: int) -> None:
    """Each byte comes within any time-out of a single read; the deadline is on the whole."""

    def drip(sock: socket.socket, good: bytes, n: int) -> None:
        sock.sendall(good[:from_byte])
        for byte in good[from_byte:]:
            if server.over.wait(0.02):
                return
            sock.sendall(bytes([byte]))

    server.script = drip
    assert isinstance(ask(server, 0.3)[0], DeadlineExceeded)


def test_a_server_that_never_reads_is_left_at_the_deadline() -> None:
    """The request is larger than every buffer between; nobody takes it."""

    async def run(url: str) -> None:
        async with AsyncClient(url) as client:
            with pytest.raises(DeadlineExceeded):
                await client.infer("m", {"x": np.zeros(8_000_000, np.float32)}, deadline_s=0.3)

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        began = monotonic()
        asyncio.run(run(f"http://127.0.0.1:{deaf.getsockname()[1]}"))
        assert monotonic() - began < 0.3 + MARGIN_S


def test_a_server_that_was_never_there_is_not_waited_for() -> None:
    """By TCP, and by a socket that is not there."""

    async def run(url: str) -> None:
        async with AsyncClient(url) as client:
            with pytest.raises(Unreachable):
                await client.infer("m", {"x": X}, deadline_s=PATIENCE_S)
            assert not await client.ready()

    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    for one in (url, "unix:///nowhere/agent.sock"):
        asyncio.run(run(one))
