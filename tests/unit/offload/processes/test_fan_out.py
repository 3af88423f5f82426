"""What the supervisor and its processes say to each other: questions that go round, words on the wire, a bad start."""

from __future__ import annotations

import socket
import struct
import sys
from typing import Any

import msgspec
import pytest

from edgesplit.errors import UsageError
from edgesplit_offload.processes.fan_out import TIMEOUT_S, FanOut
from edgesplit_offload.processes.ipc import (
    BATCHER_LINK,
    PEER_LINK,
    Alive,
    Answers,
    Ask,
    BatcherSocket,
    IpcConnection,
    Message,
    Question,
    Ready,
    Reply,
    WantBatcher,
)
from edgesplit_offload.processes.supervisor import ChildProcess, Supervisor


class Peer:
    """One who is asked, and what it heard."""

    def __init__(self, *, reachable: bool = True) -> None:
        self.heard: list[Message] = []
        self._reachable = reachable

    def send(self, message: Message) -> bool:
        self.heard.append(message)
        return self._reachable


def begin_fan_out(*peers: Peer) -> tuple[FanOut, list[tuple[list[Any], int]], int]:
    """A round among these, the answers and the number of missing ones that it ended with, and its number."""
    rounds, ended = FanOut(), list[tuple[list[Any], int]]()
    rounds.begin("how many", None, peers, lambda answers, missing: ended.append((answers, missing)))
    number = next((one.number for peer in peers for one in peer.heard if isinstance(one, Question)), 0)
    return rounds, ended, number


def test_a_fan_out_ends_with_the_last_answer() -> None:
    """Once; answers that come later change nothing."""
    a, b = Peer(), Peer()
    rounds, ended, number = begin_fan_out(a, b)
    rounds.on_answer(a, Reply(number, True, 1))
    assert ended == []
    rounds.on_answer(b, Reply(number, True, 2))
    rounds.on_answer(b, Reply(number, True, 3))
    assert ended == [([1, 2], 0)]


def test_a_fan_out_ends_without_processes_that_cannot_answer() -> None:
    """One that does not know, one that has gone, one that cannot be reached, one that is late; the first and the last
    are missing, because they live on without having done what they were asked."""
    a, b, c, far = Peer(), Peer(), Peer(), Peer(reachable=False)
    rounds, ended, number = begin_fan_out(a, b, c, far)
    rounds.on_answer(a, Reply(number, False))
    rounds.remove(b)
    rounds.expire(0.0)
    assert ended == []
    rounds.on_answer(c, Reply(number, True, 3))
    assert ended == [([3], 1)]
    late, ended, number = begin_fan_out(Peer(), a)
    late.on_answer(a, Reply(max(number, 1), True, 1))
    late.expire(float("inf"))
    assert ended == [([1], 1)]
    assert TIMEOUT_S > 0


def test_a_fan_out_without_processes_ends_at_once() -> None:
    """There is nothing to wait for."""
    _, ended, _ = begin_fan_out()
    assert ended == [([], 0)]


def both_ends() -> tuple[IpcConnection, socket.socket]:
    ours, theirs = socket.socketpair()
    return IpcConnection(ours), theirs


def test_messages_arrive_whole_and_in_order() -> None:
    """Of every type, until the other end closes."""
    one, raw = both_ends()
    other = IpcConnection(raw)
    said: list[Message] = [
        Ready(), Alive(), Ask(1, "series", None, 5.0), Question(2, "load", "model"),
        Reply(3, True, {"a": [1, 2.5, None]}), Answers(4, ["x" * 100_000], 0),
    ]  # fmt: skip
    heard = other.messages()
    for message in said:
        assert one.send(message)
        assert next(heard) == message
    one.close()
    assert list(heard) == []
    assert not one.send(Alive())


@pytest.mark.parametrize(
    "spoilt",
    [
        b"\x00\x00",
        struct.pack("!I", 2**31),
        struct.pack("!I", 5) + b"abc",
        struct.pack("!I", 3) + b"\xff\xff\xff",
        struct.pack("!I", 5) + msgspec.msgpack.encode("text"),
        struct.pack("!I", 14) + msgspec.msgpack.encode({"type": "stranger"})[:14],
    ],
)
def test_a_malformed_message_closes_the_connection_to_a_process(spoilt: bytes) -> None:
    """Nothing is raised, and no memory is reserved for a length that the peer claims."""
    one, raw = both_ends()
    raw.sendall(spoilt)
    raw.close()
    assert list(one.messages()) == []


class Child:
    """A serving process as the supervisor holds it, and our end of what it is handed."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        talk, self._other = socket.socketpair()
        self.serving = ChildProcess(None, IpcConnection(talk), ours)  # type: ignore[arg-type]

    def handed(self) -> bytes:
        """With which mark a socket came."""
        self.theirs.settimeout(20.0)
        mark, descriptors, _, _ = socket.recv_fds(self.theirs, 80, 1)
        for one in descriptors:
            socket.socket(fileno=one).close()
        return mark

    def received(self) -> Message:
        """What it was told."""
        return next(IpcConnection(self._other).messages())


def test_the_first_process_that_asks_becomes_the_batcher_of_a_kind() -> None:
    """It is told so; for any other process both get a link; where the batcher has gone, the next that asks becomes
    it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor = Supervisor(listener, [], 0, hung_after_s=60.0)
        a, b = Child(), Child()
        supervisor._serving = [a.serving, b.serving]
        supervisor._on_message(a.serving, WantBatcher("kind"))
        assert a.received() == BatcherSocket("kind")
        supervisor._on_message(b.serving, WantBatcher("kind"))
        assert (a.handed(), b.handed()) == (PEER_LINK, BATCHER_LINK + b"kind")
        supervisor._on_message(b.serving, WantBatcher("other"))
        assert b.received() == BatcherSocket("other")
        supervisor._serving = [b.serving]
        supervisor._on_message(b.serving, WantBatcher("kind"))
        assert b.received() == BatcherSocket("kind")


def test_serving_processes_that_die_at_the_start_are_an_error() -> None:
    """After a few tries; the port is free again."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    supervisor = Supervisor(listener, [sys.executable, "-c", "raise SystemExit(1)"], 2, hung_after_s=60.0)
    with pytest.raises(UsageError, match="could be started"):
        supervisor.start()
    with socket.create_server(("127.0.0.1", port)):
        pass
