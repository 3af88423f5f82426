"""A connection as its server sees it: who is at the other end, which file descriptors came by it, what ends with it.

Promises that a descriptor is closed with the connection unless somebody took it, and that who asks is told by the
kernel, never by the peer. Linux only; elsewhere nobody is known and no descriptor comes.
"""

from __future__ import annotations

import array
import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Protocol

_CREDENTIALS = struct.Struct("3i")
DESCRIPTORS = 4
"""File descriptors that may come with one request; the kernel closes further ones."""
TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


class Closeable(Protocol):
    """What a connection can keep."""

    def close(self) -> None:
        """Give it up."""
        ...


class Channel:
    """One accepted connection. Used by the connection's own thread, except `close`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_local_socket = sock.family == getattr(socket, "AF_UNIX", None)
        self._descriptors: list[int] = []
        self._kept: dict[str, Closeable] = {}
        self._user: int | None = None

    @property
    def user(self) -> int | None:
        """The uid of the program at the other end, by the kernel; None where it does not say."""
        if self._user is None:
            self._user = self._asked_of_the_kernel()
        return self._user

    def receive(self, size: int) -> bytes:
        """As `socket.recv`; file descriptors that come along are held until they are taken or dropped."""
        if not self.is_local_socket:
            return self._sock.recv(size)
        width = array.array("i").itemsize
        data, ancillary, _, _ = self._sock.recvmsg(size, socket.CMSG_SPACE(DESCRIPTORS * width))
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                came = array.array("i")
                came.frombytes(content[: len(content) - len(content) % width])
                self._descriptors += came
        while len(self._descriptors) > DESCRIPTORS:
            os.close(self._descriptors.pop(0))
        return data

    def only_descriptor(self) -> int | None:
        """The one that came with this request, which is the caller's now; None where none came, or several."""
        return self._descriptors.pop() if len(self._descriptors) == 1 else None

    def drop_descriptors(self) -> None:
        """Close those that came and that nobody took."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def keep(self, name: str, thing: Closeable) -> None:
        """Hold on to `thing` for as long as the connection lives; what had that name is closed."""
        before, self._kept[name] = self._kept.get(name), thing
        if before is not None:
            before.close()

    def kept(self, name: str) -> Closeable | None:
        """What was kept by that name."""
        return self._kept.get(name)

    def close(self) -> None:
        """The connection has ended: so does all that it kept."""
        self.drop_descriptors()
        kept, self._kept = self._kept, {}
        for thing in kept.values():
            thing.close()

    def _asked_of_the_kernel(self) -> int | None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self.is_local_socket:
                raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                return int(_CREDENTIALS.unpack(raw)[1])
            return _owner(self._sock.getpeername(), self._sock.getsockname())
        return None


def _owner(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """Whose the socket at `peer` is that is connected to `here`, if it is one of this machine's."""
    wanted = (_as_in_table(peer), _as_in_table(here))
    for table in TCP_TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
            columns = line.split()
            if (columns[1], columns[2]) == wanted:
                return int(columns[7])
    return None


def _as_in_table(address: tuple[str, int]) -> str:
    """An address as /proc/net/tcp writes it: words in the machine's order, in hexadecimal."""
    raw = ipaddress.ip_address(address[0]).packed
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    return "".join(f"{struct.unpack('=I', word)[0]:08X}" for word in words) + f":{address[1]:04X}"
