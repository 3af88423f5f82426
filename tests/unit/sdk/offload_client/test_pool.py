"""The connection pool: how each failure is classified, stale connections, and what a cancelled request leaves
behind."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from edgesplit.offload_client.pool import CancellableCall, OffloadClient, OffloadFailure, OffloadRequest, OffloadResult
from support.agent_engine import eventually

BYTES = 64 << 20
"""More than the kernel takes on its way."""
ROOM = 1 << 16
"""Of the other end, which reads nothing."""


def test_cancelled_request_sends_no_more() -> None:
    """Its connection was closed in order, behind all that the kernel still held: on a slow uplink the next request
    waited for the whole of a cancelled one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
        remote, call = OffloadClient(f"http://127.0.0.1:{listener.getsockname()[1]}"), CancellableCall()
        ended: list[OffloadResult] = []
        asked = OffloadRequest("m", "1", {}, (), [bytes(BYTES)], 0)
        asking = threading.Thread(target=lambda: ended.append(remote.infer(asked, call, 60.0)))
        asking.start()
        server, _ = listener.accept()
        with server:
            server.settimeout(60)
            eventually("more waits than there is room for", lambda: held_by_the_kernel(call) > 4 * ROOM)
            call.cancel()
            asking.join(60)
            assert isinstance(ended[0], OffloadFailure)
            came = 0
            with pytest.raises(ConnectionResetError):
                while piece := server.recv(1 << 16):
                    came += len(piece)
            assert came < 4 * ROOM
        remote.close()


def held_by_the_kernel(call: CancellableCall) -> int:
    """Bytes that were sent on its connection and have not arrived."""
    connection = call._connection
    if connection is None or connection._sock is None:
        return 0
    (held,) = struct.unpack("i", fcntl.ioctl(connection._sock, termios.TIOCOUTQ, b"\0" * 4))
    return int(held)


Script = Callable[[socket.socket], object]


@contextmanager
def scripted(*scripts: Script) -> Iterator[OffloadClient]:
    """A client of a server that does this on one connection after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for script in scripts:
                sock, _ = listener.accept()
                with sock:
                    script(sock)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        client = OffloadClient(f"http://127.0.0.1:{listener.getsockname()[1]}/prefix")
        yield client
        client.close()
        serving.join(60)


def answer(raw: bytes) -> Script:
    """Receive a request without a body, and answer it with these bytes."""

    def script(sock: socket.socket) -> None:
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            request += sock.recv(1 << 16)
        assert request.startswith(b"GET /prefix/v2/health/live HTTP/1.1\r\n")
        sock.sendall(raw)

    return script


HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"", "link"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "link"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "server"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "server"),
    ],
)
def test_failures_are_classified(raw: bytes, cause: str) -> None:
    """Nothing is raised: a truncated answer is the link's failure, a malformed one is the server's."""
    with scripted(answer(raw)) as client:
        outcome = client.ping(60.0)
        assert isinstance(outcome, OffloadFailure) and outcome.cause == cause


def test_refused_connection_is_reported_at_once() -> None:
    """Without waiting for the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    outcome = OffloadClient(f"http://127.0.0.1:{port}").ping(60.0)
    assert isinstance(outcome, OffloadFailure) and outcome.cause == "refused"


def test_silent_server_is_a_timeout() -> None:
    """It has accepted, and sends nothing."""
    with scripted(lambda sock: [sock.recv(1 << 16) for _ in range(2)]) as client:
        outcome = client.ping(0.05)
        assert isinstance(outcome, OffloadFailure) and outcome.cause == "timeout"


def test_stale_connection_is_replaced_once() -> None:
    """The server closed it after its answer; the next request has a connection of its own, which is then reused."""
    with scripted(answer(HEALTHY), lambda sock: [answer(HEALTHY)(sock) for _ in range(2)]) as client:
        for _ in range(3):
            assert isinstance(client.ping(60.0), float)
        assert client.is_warm


def test_request_head_with_a_line_break_is_not_sent() -> None:
    """A header or a path from elsewhere cannot smuggle another request in."""
    with scripted(lambda sock: sock.recv(1)) as client:
        outcome = client.relay("/x", {"a": "b\r\n\r\nGET / HTTP/1.1"}, b"", CancellableCall(), 60.0)
        assert isinstance(outcome, OffloadFailure) and "line break" in outcome.text
