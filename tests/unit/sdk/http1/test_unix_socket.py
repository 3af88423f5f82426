"""The agent's Unix socket: who may connect, whose place may be taken, and what a connection tells of its peer."""

from __future__ import annotations

import array
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from edgesplit.client.client import Client, Connection
from edgesplit.errors import UsageError
from edgesplit.http1 import unix_socket
from edgesplit.http1.peer import MAX_DESCRIPTORS, Peer
from edgesplit.http1.server import Request, Response, Server, json_response
from edgesplit_agent.main import main

PATIENCE_S = 20.0


@pytest.fixture
def short(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for sockets, entered: relative paths work too."""
    monkeypatch.chdir(socket_folder)
    return Path()


def answered(path: Path) -> bool:
    with Client(f"unix://{path.absolute()}") as client:
        return client.ready()


def test_it_is_there_with_its_mode_while_it_is_served(short: Path) -> None:
    """Nobody but this user by default; the name goes with the server."""
    path = short / "agent.sock"
    server = Server(lambda _: Response(), path=path)
    server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and server.port == 0 and server.url == f"unix://{path}"
    assert os.listdir() == ["agent.sock"], "nothing is left of the name that it was made under"
    server.stop()
    assert not path.exists()


def test_a_group_may_be_let_in(short: Path) -> None:
    """By mode and by name."""
    import grp

    own = grp.getgrgid(os.getgid()).gr_name
    sock = unix_socket.bind_and_listen(short / "a", 0o660, own)
    assert stat.S_IMODE((short / "a").stat().st_mode) == 0o660
    sock.close()
    with pytest.raises(UsageError, match="cannot listen on the socket"):
        unix_socket.bind_and_listen(short / "b", 0o660, "no-such-group")
    assert not (short / "b").exists()


def test_a_dead_programs_socket_is_replaced(short: Path) -> None:
    """One that was killed leaves its name behind."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("agent.sock")
    server = Server(lambda _: Response(), path=short / "agent.sock")
    server.start()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect("agent.sock")
    server.stop()


def test_a_living_programs_socket_is_refused_and_stays(short: Path) -> None:
    """The second says what to do; the first goes on, and takes its own name away only."""
    first = Server(lambda _: Response(), path=short / "agent.sock")
    first.start()
    with pytest.raises(UsageError, match="another program listens"):
        Server(lambda _: Response(), path=short / "agent.sock").start()
    (short / "agent.sock").unlink()
    other = unix_socket.bind_and_listen(short / "agent.sock")
    first.stop()
    assert (short / "agent.sock").exists()
    other.close()


def test_what_is_no_socket_is_never_taken_away(short: Path) -> None:
    """A file of that name is somebody's."""
    (short / "agent.sock").write_text("precious")
    with pytest.raises(UsageError, match="is no socket"):
        unix_socket.bind_and_listen(short / "agent.sock")
    assert (short / "agent.sock").read_text() == "precious"


def test_a_path_that_is_too_long_is_said_with_its_length(tmp_path: Path) -> None:
    """Before the kernel cuts it, or says something else."""
    with pytest.raises(UsageError, match="at most 107 bytes"):
        unix_socket.bind_and_listen(tmp_path / ("x" * 120))


def test_a_path_that_just_fits_is_served(socket_folder: Path) -> None:
    """It was refused for the length of the name that the socket has for a moment before."""
    path = socket_folder / ("x" * (unix_socket.MAX_PATH_BYTES - len(str(socket_folder)) - 1))
    server = Server(lambda _: Response(), path=path)
    server.start()
    assert answered(path)
    server.stop()


@pytest.fixture
def pair() -> Iterator[tuple[Peer, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        channel = Peer(here)
        yield channel, there
        channel.close()


def test_the_kernel_says_who_asks() -> None:
    """Over a Unix socket and over localhost alike; never what the peer says."""
    here, there = socket.socketpair()
    with here, there:
        assert Peer(here).user == os.getuid()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert Peer(accepted).user == os.getuid()


def test_descriptors_that_nobody_takes_are_closed(pair: tuple[Peer, socket.socket], tmp_path: Path) -> None:
    """However many come: a peer cannot fill the table."""
    channel, there = pair
    (tmp_path / "passed").touch()

    def held() -> int:
        links = (f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd"))
        return sum(os.path.realpath(link) == str((tmp_path / "passed").resolve()) for link in links)

    for _ in range(10):
        passed = [os.open(tmp_path / "passed", os.O_RDONLY) for _ in range(2 * MAX_DESCRIPTORS)]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))
        there.sendmsg([b"x"], [rights])
        for one in passed:
            os.close(one)
        assert channel.receive_into(memoryview(bytearray(100))) == 1
        assert held() <= MAX_DESCRIPTORS
    assert channel.received_fd() is None, "several are nobody's"
    channel.drop_fds()
    assert held() == 0


def test_what_a_connection_keeps_ends_with_it(short: Path) -> None:
    """A client that is gone leaves nothing behind."""
    ended = threading.Event()

    class Kept:
        def close(self) -> None:
            ended.set()

    def handler(request: Request) -> Response:
        assert request.connection_peer is not None
        request.connection_peer.attach("a", Kept())
        return json_response(200, request.connection_peer.user)

    server = Server(handler, path=short / "agent.sock")
    server.start()
    connection = Connection("", 0, path="agent.sock")
    assert bytes(connection.exchange("GET", "/", deadline=monotonic() + PATIENCE_S).body) == str(os.getuid()).encode()
    assert not ended.is_set()
    connection.close()
    assert ended.wait(PATIENCE_S)
    server.stop()


@pytest.mark.parametrize("mode", ["999", "rw", "0", "440", "77777"])
def test_a_mode_that_is_none_or_locks_the_agent_out_is_refused(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is done."""
    with pytest.raises(SystemExit) as ended:
        main(["run", "--data", "nowhere", "--socket-mode", mode])
    assert ended.value.code == 2 and "mode" in capsys.readouterr().err
