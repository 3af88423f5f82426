"""A connection's bytes, in plain text or over TLS, never waiting: None, or less than all, is "not now"."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Protocol

from edgesplit.http1.server import shown_by

Part = bytes | memoryview
_TOGETHER = 512
"""Parts handed to the kernel by one call; it takes 1,024 at most."""
_RECORD = 16_384
"""Small parts are joined to records of TLS, up to so many bytes."""


class Wire(Protocol):
    """What a conversation needs of its socket."""

    peer: str | None
    """Common name of the verified client certificate."""
    peer_serial: int | None
    is_drained: bool
    """Was that all there is, as far as the last `receive` knows? Another event tells of more."""

    def opened(self) -> bool:
        """Whether requests may be read now; False: try again at the next event. OSError where it cannot be."""
        ...

    def receive(self, *rooms: memoryview) -> int | None:
        """How many bytes came, 0 at the end of all; None where there is nothing now. They are in the first room, and
        where that is full they may be in the next. OSError."""
        ...

    def send(self, parts: Sequence[Part]) -> list[Part]:
        """What could not be sent now. OSError."""
        ...


class Plain:
    """A socket as it is."""

    peer: str | None = None
    peer_serial: int | None = None

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_drained = False

    def opened(self) -> bool:
        """At once."""
        return True

    def receive(self, *rooms: memoryview) -> int | None:
        """By one call of the kernel, which gives less than there is room for where there is no more."""
        try:
            count = self._sock.recvmsg_into(rooms)[0]
        except BlockingIOError:
            self.is_drained = True
            return None
        self.is_drained = count < sum(map(len, rooms))
        return count

    def send(self, parts: Sequence[Part]) -> list[Part]:
        """By as few calls of the kernel as may be."""
        left = list(parts)
        while left:
            try:
                sent = self._sock.sendmsg(left if len(left) <= _TOGETHER else left[:_TOGETHER])
            except BlockingIOError:
                return left
            if sent == sum(map(len, left)):
                return []
            done = 0
            while done < len(left) and sent >= len(left[done]):
                sent -= len(left[done])
                done += 1
            del left[:done]
            if sent:
                left[0] = memoryview(left[0])[sent:]
        return left


class Tls:
    """The same over TLS. A handshake or a new key may want to write before it reads, and the other way round: whatever
    it wants, both are tried again at the next event."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self.peer: str | None = None
        self.peer_serial: int | None = None
        self.is_drained = False

    def opened(self) -> bool:
        """Once the handshake is done."""
        try:
            self._sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        self.peer, self.peer_serial = shown_by(self._sock)
        return True

    def receive(self, *rooms: memoryview) -> int | None:
        """Of one record at most, of which more may be left: only what has nothing more to give is drained."""
        try:
            count = self._sock.recv_into(rooms[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):  # the last: after its own end
            self.is_drained = True
            return None
        self.is_drained = False
        return count

    def send(self, parts: Sequence[Part]) -> list[Part]:
        """Record by record."""
        left: list[Part] = [b"".join(parts)] if sum(map(len, parts)) <= _RECORD else list(parts)
        while left:
            try:
                sent = self._sock.send(left[0])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return left
            if sent < len(left[0]):
                left[0] = memoryview(left[0])[sent:]
            else:
                del left[0]
        return left
