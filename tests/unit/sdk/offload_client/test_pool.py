"""What a request that nobody waits for any more leaves behind on the link."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading

import pytest

from edgesplit.offload_client.pool import CancellableCall, OffloadClient, OffloadFailure, OffloadRequest, OffloadResult
from support.agent_engine import eventually

BYTES = 64 << 20
"""More than the kernel takes on its way."""
ROOM = 1 << 16
"""Of the other end, which reads nothing."""


def test_a_dropped_request_sends_no_more() -> None:
    """Its connection was closed with a goodbye, which is sent behind all that the kernel holds: on a slow uplink the
    next request waited for the whole of one that nobody wanted."""
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
    if connection is None or connection.sock is None:
        return 0
    (held,) = struct.unpack("i", fcntl.ioctl(connection.sock, termios.TIOCOUTQ, b"\0" * 4))
    return int(held)
