"""What a request that nobody waits for any more leaves behind on the link."""

from __future__ import annotations

import socket
import threading

import pytest

from edgesplit.remote import Ask, Call, Outcome, Remote, RemoteFailure

BYTES = 64 << 20
"""More than the kernel takes on its way."""


def test_a_dropped_request_sends_no_more() -> None:
    """Its connection was closed with a goodbye, which is sent behind all that the kernel holds: on a slow uplink the
    next request waited for the whole of one that nobody wanted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        remote, call = Remote(f"http://127.0.0.1:{listener.getsockname()[1]}"), Call()
        ended: list[Outcome] = []
        asked = Ask("m", "1", {}, (), [bytes(BYTES)], 0)
        asking = threading.Thread(target=lambda: ended.append(remote.infer(asked, call, 60.0)))
        asking.start()
        server, _ = listener.accept()
        with server:
            server.settimeout(60)
            assert server.recv(1), "the request is under way"
            call.drop()
            asking.join(60)
            assert isinstance(ended[0], RemoteFailure)
            came = 0
            with pytest.raises(ConnectionResetError):
                while piece := server.recv(1 << 16):
                    came += len(piece)
            assert came < BYTES
        remote.close()
