"""The agent's Unix socket: who may connect, which socket file may be replaced, and what a connection knows of its
peer."""

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


def test_socket_exists_with_its_mode_while_served(short: Path) -> None:
    """Only this user by default; the file is removed with the server."""
    path = short / "agent.sock"
    server = Server(lambda _: Response(), path=path)
    server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and server.port == 0 and server.url == f"unix://{path}"
    assert os.listdir() == ["agent.sock"], "nothing is left of the name that it was made under"
    server.stop()
    assert not path.exists()


def test_group_access_can_be_granted(short: Path) -> None:
    """By mode and by name."""
    import grp

    own = grp.getgrgid(os.getgid()).gr_name
    sock = unix_socket.bind_and_listen(short / "a", 0o660, own)
    assert stat.S_IMODE((short / "a").stat().st_mode) == 0o660
    sock.close()
    with pytest.raises(UsageError, match="cannot listen on the socket"):
        unix_socket.bind_and_listen(short / "b", 0o660, "no-such-group")
    assert not (short / "b").exists()


def test_stale_socket_file_is_replaced(short: Path) -> None:
    """A killed program leaves its socket file behind."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("agent.sock")
    server = Server(lambda _: Response(), path=short / "agent.sock")
    server.start()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect("agent.sock")
    server.stop()


def test_socket_in_use_is_refused_and_stays(short: Path) -> None:
    """The second server's error says what to do; the first goes on, and only removes its own file."""
    first = Server(lambda _: Response(), path=short / "agent.sock")
    first.start()
    with pytest.raises(UsageError, match="another program listens"):
        Server(lambda _: Response(), path=short / "agent.sock").start()
    (short / "agent.sock").unlink()
    other = unix_socket.bind_and_listen(short / "agent.sock")
    first.stop()
    assert (short / "agent.sock").exists()
    other.close()


def test_other_files_are_never_removed(short: Path) -> None:
    """A file of that name that is no socket stays."""
    (short / "agent.sock").write_text("precious")
    with pytest.raises(UsageError, match="is no socket"):
        unix_socket.bind_and_listen(short / "agent.sock")
    assert (short / "agent.sock").read_text() == "precious"


def test_too_long_path_is_refused_with_its_length(tmp_path: Path) -> None:
    """Before the kernel truncates it, or reports something else."""
    with pytest.raises(UsageError, match="at most 107 bytes"):
        unix_socket.bind_and_listen(tmp_path / ("x" * 120))


def test_longest_valid_path_is_served(socket_folder: Path) -> None:
    """It was refused for the length of the temporary name that the socket has before its rename."""
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


def test_peer_user_comes_from_the_kernel() -> None:
    """Over a Unix socket and over localhost alike; never from what the peer sends."""
    here, there = socket.socketpair()
    with here, there:
        assert Peer(here).user == os.getuid()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert Peer(accepted).user == os.getuid()


def test_unclaimed_descriptors_are_closed(pair: tuple[Peer, socket.socket], tmp_path: Path) -> None:
    """However many arrive: a peer cannot fill the descriptor table."""
    channel, there = pair
    (tmp_path / "passed").touch()

    def held() -> int:
        links = (f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd"))
        return sum(os.path.realpath(link) == str((tmp_path / "passed").resolve()) for link in links)

    for _ in range(10):
        passed = [os.open(tmp_path / "passed", os.O_RDONLY) for _ in range(2 * MAX_DESCRIPTORS)]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))
        there.sendmsg([b"x"], [rights])
        for file in passed:
            os.close(file)
        assert channel.receive_into(memoryview(bytearray(100))) == 1
        assert held() <= MAX_DESCRIPTORS
    assert channel.received_fd() is None, "several are nobody's"
    channel.drop_fds()
    assert held() == 0


def test_connection_resources_end_with_it(short: Path) -> None:
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
def test_invalid_socket_mode_is_refused(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that locks the agent itself out; before anything is done."""
    with pytest.raises(SystemExit) as ended:
        main(["run", "--data", "nowhere", "--socket-mode", mode])
    assert ended.value.code == 2 and "mode" in capsys.readouterr().err
