"""The peer of an accepted connection: its user id, received file descriptors, and resources tied to the connection.

A received descriptor is closed with the connection unless the request's handler took it. The user id comes from the
kernel, never from the peer. Linux only; on other systems the user is unknown and no descriptors arrive.
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
MAX_DESCRIPTORS = 4
"""File descriptors that may come with one request; further ones are closed."""
TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


class Closeable(Protocol):
    """A resource that a connection can own."""

    def close(self) -> None:
        """Release the resource."""
        ...


class Peer:
    """The peer of one accepted connection. Only `close` may be called from a thread other than the connection's own."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_local_socket = sock.family == getattr(socket, "AF_UNIX", None)
        self._descriptors: list[int] = []
        self._resources: dict[str, Closeable] = {}
        self._user: int | None = None

    @property
    def user(self) -> int | None:
        """User id of the program at the other end, from the kernel; None if it is unknown."""
        if self._user is None:
            self._user = self._query_user()
        return self._user

    def receive_into(self, buffer: memoryview) -> int:
        """Number of bytes received, 0 at end of stream; file descriptors that arrive along are held until taken or
        dropped."""
        if not self.is_local_socket:
            return self._sock.recv_into(buffer)
        width = array.array("i").itemsize
        count, ancillary, _, _ = self._sock.recvmsg_into([buffer], socket.CMSG_SPACE(MAX_DESCRIPTORS * width))
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % width])
                self._descriptors += received
        while len(self._descriptors) > MAX_DESCRIPTORS:
            os.close(self._descriptors.pop(0))
        return count

    def received_fd(self) -> int | None:
        """The file descriptor that came with this request, now owned by the caller; None if none or several came."""
        return self._descriptors.pop() if len(self._descriptors) == 1 else None

    def drop_fds(self) -> None:
        """Close the received descriptors that were not taken."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def attach(self, name: str, resource: Closeable) -> None:
        """Attach `resource` to the connection under `name`; it is closed with the connection. A previous resource of
        that name is closed now."""
        previous, self._resources[name] = self._resources.get(name), resource
        if previous is not None:
            previous.close()

    def attached(self, name: str) -> Closeable | None:
        """The resource attached under `name`, or None."""
        return self._resources.get(name)

    def close(self) -> None:
        """Close everything that the connection owns."""
        self.drop_fds()
        resources, self._resources = self._resources, {}
        for resource in resources.values():
            resource.close()

    def _query_user(self) -> int | None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self.is_local_socket:
                raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                return int(_CREDENTIALS.unpack(raw)[1])
            return _socket_owner(self._sock.getpeername(), self._sock.getsockname())
        return None


def _socket_owner(peer: tuple[str, int], local: tuple[str, int]) -> int | None:
    """User id that owns the socket at `peer` connected to `local`, if it is a socket of this machine."""
    wanted = (_to_proc_notation(peer), _to_proc_notation(local))
    for table in TCP_TABLES:
        for line in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
            columns = line.split()
            if (columns[1], columns[2]) == wanted:
                return int(columns[7])
    return None


def _to_proc_notation(address: tuple[str, int]) -> str:
    """An address in the notation of /proc/net/tcp: hexadecimal words in the machine's byte order."""
    raw = ipaddress.ip_address(address[0]).packed
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    return "".join(f"{struct.unpack('=I', word)[0]:08X}" for word in words) + f":{address[1]:04X}"
