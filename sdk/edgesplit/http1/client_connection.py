"""One persistent HTTP/1.1 connection of a client on a blocking socket: TCP, TLS, or a Unix socket.

Every wait is bounded by the time left until the deadline, also when the server sends its answer byte by byte or does
not read the request. Responses are parsed by `edgesplit.http1.response`. Retries are the caller's decision.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic

from edgesplit.errors import DeadlineExceeded, LinkError, MalformedMessage, Unreachable
from edgesplit.http1.address import Address
from edgesplit.http1.response import IncomingResponse, KnownHead, Reply, new_scratch

_SEND_BYTES = 262_144
_LONGEST_WAIT_S = 3600.0
_RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER: closing discards unsent data and resets the connection at once."""
_NOTHING_LISTENS = (ConnectionRefusedError, FileNotFoundError, PermissionError)
"""Errors of connecting, to a port or a Unix socket, that do not pass by themselves."""
Body = Sequence[bytes | memoryview]


def request_head(address: Address, method: str, path: str, headers: Mapping[str, str], body: Body) -> bytes:
    """The header block of a request; ValueError for a header that cannot be sent."""
    length = {"content-length": str(sum(len(part) for part in body))} if method != "GET" else {}
    fields = {"host": address.host_header, **length, **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    block = "\r\n".join(lines)
    if not block.count("\r") == block.count("\n") == len(lines) - 1:
        raise ValueError(f"line break in the head of a request to {path[:200]!r}")
    return block.encode("latin-1")


@contextlib.contextmanager
def translate_failures(address: Address, close: Callable[[], None]) -> Iterator[None]:
    """Translate the errors of an exchange and close its connection: DeadlineExceeded for a timeout, Unreachable where
    nothing listens or this user may not connect, LinkError for any other OSError, MalformedMessage for a response that
    is not HTTP, each naming `address`. Any other exception closes the connection too and is raised unchanged."""
    try:
        yield
    except TimeoutError as error:
        close()
        raise DeadlineExceeded(f"{address}: no answer in time") from error
    except OSError as error:
        close()
        kind = Unreachable if isinstance(error, _NOTHING_LISTENS) else LinkError
        raise kind(f"{address}: {error or type(error).__name__}") from error
    except (LinkError, MalformedMessage) as error:
        close()
        raise type(error)(f"{address}: {error}") from error
    except BaseException:
        close()
        raise


class ClientConnection:
    """One connection. Not thread-safe, except that `close` and `abort` end an exchange running in another thread."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None = None, server_name: str | None = None) -> None:
        """To `address`, over TLS if `tls` is given, where the certificate must carry `server_name` (default: the
        address's host). Nothing is connected yet."""
        self._address = address
        self._tls = tls
        self._server_name = server_name or address.host
        self._sock: socket.socket | None = None
        self._is_shut_down = False
        self._scratch = new_scratch()
        self._last_head: KnownHead | None = None
        """The header block of the last reply, which need not be parsed again when it repeats."""

    @property
    def is_open(self) -> bool:
        """Whether a connection is left from the last exchange. The server may have closed it since."""
        return self._sock is not None

    def open(self, deadline: float) -> None:
        """Connect by `deadline` (monotonic clock), where there is no connection. Raises like `exchange`."""
        with translate_failures(self._address, self.close):
            self._ensure_open(deadline, reopen=True)

    def exchange(
        self,
        method: str,
        path: str,
        *,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        body: Body = (),
        descriptor: int | None = None,
        reopen: bool = True,
    ) -> Reply:
        """Send one request and return its response by `deadline` (monotonic clock); connects first if needed.

        `descriptor` is passed along with the request. With `reopen=False` only the present connection is used.
        DeadlineExceeded, LinkError, or MalformedMessage if the response is not HTTP; the connection is then closed.
        """
        response = IncomingResponse(self._scratch, self._last_head)
        with translate_failures(self._address, self.close):
            sock = self._ensure_open(deadline, reopen)
            head = request_head(self._address, method, path, headers or {}, body)
            self._send(sock, head, body, deadline, descriptor)
            reply = self._receive(sock, response, deadline)
        self._last_head = response.known_head
        if not response.keep_alive:
            self.close()
        return reply

    def close(self) -> None:
        """Close the connection; the next exchange opens a new one."""
        sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            sock.close()

    def abort(self) -> None:
        """Fail the exchange that another thread waits for, and discard unsent data: an orderly close would be sent only
        behind all of it."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _ensure_open(self, deadline: float, reopen: bool) -> socket.socket:
        """The open socket, connected first where there is none."""
        # A plain socket readable between two exchanges was closed by the server, or holds an unsolicited answer.
        if self._sock is not None and not (self._tls is None and _is_ready(self._sock, select.POLLIN, 0.0)):
            return self._sock
        self.close()
        if self._is_shut_down:
            raise LinkError("this client was closed")
        if not reopen:
            raise LinkError("closed meanwhile")
        self._sock = sock = self._connect(deadline)
        if self._tls is not None:
            sock.settimeout(_remaining(deadline))
            self._sock = sock = self._tls.wrap_socket(sock, server_hostname=self._server_name)
        else:
            sock.setblocking(False)
        if self._is_shut_down:  # closed for good by another thread while connecting
            self.close()
            raise LinkError("this client was closed")
        return sock

    def _connect(self, deadline: float) -> socket.socket:
        if self._address.socket:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(_remaining(deadline))
                sock.connect(self._address.socket)
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((self._address.host, self._address.port), timeout=_remaining(deadline))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _send(self, sock: socket.socket, head: bytes, body: Body, deadline: float, descriptor: int | None) -> None:
        """Send head and body piece by piece, so that the deadline also bounds a peer that reads too slowly."""
        small = sum(len(part) for part in body) <= _SEND_BYTES
        parts = [b"".join([head, *body])] if small else [head, *body]
        for part in parts:
            view = memoryview(part)
            while len(view):
                try:
                    self._limit_wait(sock, deadline)
                    if descriptor is None:
                        view = view[sock.send(view[:_SEND_BYTES]) :]
                    else:
                        view, descriptor = view[sock.sendmsg([view], [descriptor_message(descriptor)]) :], None
                except BlockingIOError:
                    _wait(sock, select.POLLOUT, deadline)

    def _receive(self, sock: socket.socket, incoming: IncomingResponse, deadline: float) -> Reply:
        """The whole response; each wait is bounded by the deadline."""
        while True:
            if self._tls is None:
                _wait(sock, select.POLLIN, deadline)
            try:
                self._limit_wait(sock, deadline)
                reply = incoming.on_received(sock.recv_into(incoming.buffer()))
            except BlockingIOError:  # spurious readiness
                continue
            if reply is not None:
                return reply

    def _limit_wait(self, sock: socket.socket, deadline: float) -> None:
        """Set the time left as the socket's timeout over TLS, where calls block. A plain socket is non-blocking and
        polled instead."""
        if self._tls is not None:
            sock.settimeout(_remaining(deadline))


def descriptor_message(descriptor: int) -> tuple[int, int, array.array[int]]:
    """Ancillary data (SCM_RIGHTS) that sends a file descriptor along with a message."""
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])


def _remaining(deadline: float) -> float:
    """Seconds left until `deadline`; TimeoutError if it has passed."""
    left_s = deadline - monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline has passed")
    return left_s


def _wait(sock: socket.socket, events: int, deadline: float) -> None:
    """Wait until the socket is ready for `events` (of poll). TimeoutError at the deadline."""
    while not _is_ready(sock, events, _remaining(deadline)):
        pass


def _is_ready(sock: socket.socket, events: int, timeout_s: float) -> bool:
    """Whether the socket becomes ready for `events`, closed or broken within `timeout_s` seconds."""
    descriptor = sock.fileno()
    if descriptor < 0:  # closed by another thread
        raise LinkError("closed meanwhile")
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(1e3 * min(timeout_s, _LONGEST_WAIT_S)))
