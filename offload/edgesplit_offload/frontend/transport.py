"""Non-blocking byte transport of a connection, plain or TLS: None, or unsent parts, mean "not now"."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from edgesplit.http1.server import peer_identity
from edgesplit.http1.server_connection import Part
from edgesplit.socket_send import send_some

_RECORD_BYTES = 16_384
"""Small parts are joined into TLS records of up to this many bytes."""


class PlainTransport:
    """A plain socket."""

    peer: str | None = None
    """Common name of the verified client certificate."""
    peer_serial: int | None = None

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_drained = False
        """Whether the last `receive` took everything there was; another event announces more."""

    def handshake(self) -> bool:
        """Perform the handshake: True once requests can be read, False to try again at the next event. OSError if it
        fails."""
        return True

    def receive(self, *buffers: memoryview) -> int | None:
        """Number of bytes received, 0 at end of stream, None if there are none now. They fill the first buffer and may
        go on into the next. OSError."""
        # One system call, which returns less than there is room for if there is no more.
        try:
            count = self._sock.recvmsg_into(buffers)[0]
        except BlockingIOError:
            self.is_drained = True
            return None
        self.is_drained = count < sum(map(len, buffers))
        return count

    def send(self, parts: Sequence[Part]) -> list[Part]:
        """Send `parts`, by as few system calls as possible; returns what could not be sent now. OSError."""
        unsent = list(parts)
        while unsent:
            try:
                send_some(self._sock, unsent)
            except BlockingIOError:
                break
        return unsent


class TlsTransport:
    """A TLS socket. TLS may need to write before it can read and vice versa (handshake, key update): both directions
    are tried again at every event."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self.peer: str | None = None
        self.peer_serial: int | None = None
        self.is_drained = False

    def handshake(self) -> bool:
        """True once the handshake is complete; sets `peer` and `peer_serial`."""
        try:
            self._sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        self.peer, self.peer_serial = peer_identity(self._sock)
        return True

    def receive(self, *buffers: memoryview) -> int | None:
        """At most one TLS record into the first buffer. Only when nothing could be read is the transport drained."""
        try:
            count = self._sock.recv_into(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):  # the last: after its own end
            self.is_drained = True
            return None
        self.is_drained = False
        return count

    def send(self, parts: Sequence[Part]) -> list[Part]:
        """Record by record."""
        unsent: list[Part] = [b"".join(parts)] if sum(map(len, parts)) <= _RECORD_BYTES else list(parts)
        while unsent:
            try:
                sent = self._sock.send(unsent[0])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return unsent
            if sent < len(unsent[0]):
                unsent[0] = memoryview(unsent[0])[sent:]
            else:
                del unsent[0]
        return unsent
