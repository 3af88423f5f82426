"""A threaded HTTP/1.1 server on blocking sockets: one thread per connection, with bounds on connections, sizes and
times.

The handler only sees complete requests of bounded size; anything else is refused with its reason and the connection is
closed. A handler that raises is answered with an error and the server goes on; `stop` lets running requests finish.
Header blocks are parsed by `edgesplit.http1.head`, bodies are received into one buffer without copies. Not supported:
chunked bodies (411), HTTP/2; content codings and routing are the handler's concern. Why threads: docs/decisions/0004.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from edgesplit.errors import (
    Busy,
    Crowding,
    DeadlineExceeded,
    Dropped,
    EdgeError,
    InferenceFailed,
    LinkError,
    MalformedMessage,
    NotFound,
    UsageError,
)
from edgesplit.http1.head import CONTINUE, END, Head, Refused, encode_head, expects_continue, parse_request_head
from edgesplit.http1.listener import Listener
from edgesplit.http1.peer import Peer
from edgesplit.lazy_import import lazy_import
from edgesplit.limits import LIMITS

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")

log = logging.getLogger(__name__)

RECEIVE = 65_536
_TICK_S = 1.0
"""The kernel's socket timeout, after which the remaining time of the peer is checked."""
_TIME = struct.Struct("ll")
_MAX_PARTS = 512
"""Most parts per `sendmsg` call; the kernel takes 1,024 at most."""
LINGER_S = 1.0
"""How long input of a refused peer is still read, so that the refusal is not lost to a connection reset."""
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
_STATUS: tuple[tuple[type[EdgeError], int], ...] = (
    (NotFound, 404),
    (UsageError, 400),
    (MalformedMessage, 400),
    (Dropped, 410),
    (DeadlineExceeded, 504),
    (Crowding, 429),
    (Busy, 503),
    (LinkError, 502),
    (InferenceFailed, 500),
)


class Request(msgspec.Struct, frozen=True, eq=False):
    """A complete request."""

    method: str
    path: str
    """Percent-decoded, without the query."""
    query: str = ""
    headers: Mapping[str, str] = {}
    """By lower-case name; the values of a repeated header are joined by `, `."""
    body: memoryview | bytes = b""
    peer: str | None = None
    """Common name of the verified client certificate."""
    peer_serial: int | None = None
    """Serial number of that certificate, by which it is revoked."""
    is_closed: Callable[[], bool] = lambda: False
    """Whether the client has disconnected, so that the answer would not be read."""
    connection_peer: Peer | None = None
    """The peer and the resources attached to its connection; None over TLS, where the peer is not on this machine."""


class Response(msgspec.Struct, frozen=True, eq=False):
    """An answer; the parts of the body are sent in order."""

    status: int = 200
    headers: Mapping[str, str] = {}
    body: Sequence[bytes | memoryview] = ()
    after: Callable[[], None] | None = None
    """Called once the answer has been sent, or could not be sent."""


Handler = Callable[[Request], Response]


def json_response(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A response with `value` as JSON."""
    return Response(status, {"content-type": "application/json", **(headers or {})}, [msgspec.json.encode(value)])


def error_response(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the format of the Open Inference Protocol: `{"error": text}`."""
    return json_response(status, {"error": text}, headers)


def response_to(error: EdgeError) -> Response:
    """The error response for `error`; 429 and 503 carry a Retry-After header."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    later = {"retry-after": str(max(1, math.ceil(getattr(error, "retry_after_s", 0.0))))}
    return error_response(status, str(error), later if status in (429, 503) else None)


def call_handler(handler: Handler, request: Request) -> Response:
    """Call the handler; an exception becomes an error response (EdgeErrors by kind, anything else 500)."""
    try:
        return handler(request)
    except EdgeError as error:
        log.info("%s %s: %s", request.method, request.path, error)
        return response_to(error)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return error_response(500, f"internal error: {type(error).__name__}")


def refusal_response(refusal: Refused) -> Response:
    """The response to a refused request."""
    log.info("refused a request (%d): %s", refusal.status, refusal)
    return error_response(refusal.status, str(refusal), {"retry-after": "1"} if refusal.status == 503 else None)


def reject(sock: socket.socket, why: str, *, with_response: bool) -> None:
    """Close a connection for which there is no room. `with_response` first sends a 503 without blocking; over TLS that
    would need a handshake, so it is only closed."""
    response = error_response(503, why, {"retry-after": "1"})
    with sock, contextlib.suppress(OSError):
        if with_response:
            sock.setblocking(False)
            length = sum(len(part) for part in response.body)
            sock.send(b"".join([encode_head(503, response.headers, length, keep_alive=False), *response.body]))
            sock.shutdown(socket.SHUT_WR)


class PeerClosed(Exception):
    """The peer has disconnected, or the server is closing the connection: there is no response to send."""


class _Connection:
    """One accepted connection, from handshake to close; runs in its own thread."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._buffered = bytearray()
        self._last_block = b""
        self._peer = Peer(sock)
        self.peer: str | None = None
        self.peer_serial: int | None = None

    def run(self) -> None:
        """Serve requests one after the other until either side closes."""
        try:
            self._open()
            while self._serve_one():
                pass
        except Refused as refusal:
            self._refuse(refusal)
        except (OSError, PeerClosed) as error:  # ssl.SSLError and TimeoutError are OSErrors
            log.debug("connection ended: %s", error)
        except Exception:
            log.exception("a connection failed")
        finally:
            self.close()
            self._peer.close()

    def close(self) -> None:
        """Close the connection now, from any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()

    def interrupt(self) -> None:
        """Wake the connection's thread from its wait; the thread then closes the connection."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def _open(self) -> None:
        if not self._peer.is_local_socket:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(self._sock, ssl.SSLSocket):
            self._sock.settimeout(LIMITS.handshake_s)
            self._sock.do_handshake()
            self.peer, self.peer_serial = peer_identity(self._sock)
            return
        # Blocking calls with a kernel timeout: one call receives or sends a body, however many packets it takes.
        self._sock.settimeout(None)
        seconds, fraction = divmod(min(_TICK_S, LIMITS.handshake_s), 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(int(seconds), int(fraction * 1e6)))

    def _limit_wait(self, seconds: float) -> None:
        """Set the timeout of the next call over TLS; a plain socket keeps its kernel timeout of one tick, after which
        the caller checks the time."""
        if self._tls:
            self._sock.settimeout(max(0.001, seconds))

    def _serve_one(self) -> bool:
        """Serve one request; False if it was the connection's last."""
        block = self._receive_head()
        if block != self._last_block:  # clients repeat the same header block
            self._last_head, self._last_block = parse_request_head(block), block
        head, length, path, query, keep = self._last_head
        response: Response | None = None
        self._server.begin(length)
        try:
            self._continue(head, length)
            body = self._receive_body(length)
            channel = None if self._tls else self._peer
            request = Request(
                head.method, path, query, head.headers, body, self.peer, self.peer_serial, self._is_closed, channel
            )
            response = self._server.answer(request)
            self._peer.drop_fds()
            keep = keep and not self._server.is_stopping
            self._send(response, keep=keep, with_body=head.method != "HEAD")
        finally:
            self._server.end(length)
            if response is not None and response.after is not None:
                response.after()
        return keep

    def _receive_head(self) -> bytes:
        """The next header block. Its first byte may take as long as an idle connection may live, the rest only the
        handshake time."""
        deadline = monotonic() + LIMITS.handshake_s if self._buffered else None
        searched = 0
        while True:
            while self._buffered[:2] == b"\r\n":  # RFC 9112 2.2: empty lines before a request are ignored
                del self._buffered[:2]
                searched = 0
            end = self._buffered.find(END, searched)
            if end >= 0 and end + len(END) <= LIMITS.http_header_bytes:
                block = bytes(self._buffered[: end + len(END)])
                del self._buffered[: end + len(END)]
                return block
            if end >= 0 or len(self._buffered) > LIMITS.http_header_bytes:
                raise Refused(431, f"a header block of more than {LIMITS.http_header_bytes} bytes")
            searched = max(0, len(self._buffered) - len(END))
            if self._buffered and deadline is None:
                deadline = monotonic() + LIMITS.handshake_s
            self._buffered += self._receive_some(deadline)

    def _receive_some(self, deadline: float | None) -> bytes:
        """The next bytes of a header block. Raises Left for an idle connection, Refused for a header block that takes
        too long."""
        until = monotonic() + LIMITS.idle_connection_s if deadline is None else deadline
        while (remaining := until - monotonic()) > 0:
            self._limit_wait(remaining)
            try:
                received = self._peer.receive(RECEIVE)
            except (TimeoutError, BlockingIOError):
                continue
            if not received:
                raise PeerClosed("closed by the peer")
            return received
        if deadline is None:
            raise PeerClosed("idle")
        raise Refused(408, "the header block took too long")

    def _continue(self, head: Head, length: int) -> None:
        """Send 100 Continue to a client that waits for it (RFC 9110 10.1.1)."""
        if expects_continue(head) and len(self._buffered) < length:
            self._send_all([CONTINUE], LIMITS.handshake_s)

    def _receive_body(self, length: int) -> memoryview | bytes:
        """Exactly `length` bytes; bytes behind them are kept for the next request."""
        if not length:
            return b""
        body = np.empty(length, np.uint8).data
        received = min(length, len(self._buffered))
        if received:
            body[:received] = self._buffered[:received]
            del self._buffered[:received]
        now = progress_at = monotonic()
        deadline = now + LIMITS.handshake_s + length / LIMITS.http_bytes_per_s
        while received < length:
            if now > min(deadline, progress_at + LIMITS.handshake_s):
                raise Refused(408, f"the body came too slowly: {received} of {length} bytes")
            self._limit_wait(min(deadline, progress_at + LIMITS.handshake_s) - now)
            try:
                count = self._sock.recv_into(body[received:], 0, 0 if self._tls else socket.MSG_WAITALL)
            except (TimeoutError, BlockingIOError):
                now = monotonic()
                continue
            if not count:
                raise PeerClosed("the peer left amid a body")
            received += count
            now = progress_at = monotonic()
        return body

    def _is_closed(self) -> bool:
        """Whether the peer has closed its side."""
        descriptor = self._sock.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, _GONE)
        return bool(poll.poll(0))

    def _send(self, response: Response, *, keep: bool, with_body: bool = True) -> None:
        """Send head and body; TimeoutError if the peer reads too slowly."""
        length = sum(map(len, response.body))
        parts = [
            encode_head(response.status, response.headers, length, keep_alive=keep),
            *(response.body if with_body else ()),
        ]
        self._send_all(parts, LIMITS.handshake_s + length / LIMITS.http_bytes_per_s)

    def _send_all(self, parts: Sequence[bytes | memoryview], within_s: float) -> None:
        """Send the parts in order with as few system calls as possible; TimeoutError if the peer reads too slowly."""
        if self._tls:
            self._sock.settimeout(within_s)
            for part in parts if sum(map(len, parts)) > RECEIVE else [b"".join(parts)]:
                self._sock.sendall(part)
            return
        deadline, remaining = monotonic() + within_s, list(parts)
        while remaining:
            try:
                sent = self._sock.sendmsg(remaining[:_MAX_PARTS])
            except BlockingIOError:
                sent = 0
            while remaining and sent >= len(remaining[0]):
                sent -= len(remaining.pop(0))
            if remaining:
                remaining[0] = memoryview(remaining[0])[sent:]
                if monotonic() > deadline:
                    raise TimeoutError("the peer reads too slowly")

    def _refuse(self, refusal: Refused) -> None:
        """Send the refusal, then drain input for a while: closing at once would reset the connection before the peer
        has read it."""
        try:
            self._send(refusal_response(refusal), keep=False)
            self._sock.shutdown(socket.SHUT_WR)
            deadline, drained = monotonic() + LINGER_S, 0
            while drained < LIMITS.http_header_bytes * 32 and (remaining := deadline - monotonic()) > 0:
                self._sock.settimeout(remaining)
                received = len(self._sock.recv(RECEIVE))
                if not received:
                    return
                drained += received
        except OSError as error:
            log.debug("refused peer left: %s", error)


def peer_identity(sock: ssl.SSLSocket) -> tuple[str | None, int | None]:
    """Common name and serial number of the verified client certificate; None without one."""
    certificate: Any = sock.getpeercert() or {}
    names = (value for part in certificate.get("subject", ()) for key, value in part if key == "commonName")
    serial = certificate.get("serialNumber")
    return next(names, None), int(serial, 16) if serial else None


class Server:
    """Serves HTTP/1.1 on one TCP address, or on the Unix socket `path`. `port` and `url` are known after `start`."""

    def __init__(
        self,
        handler: Handler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        max_connections: int = 256,
        on_closed: Callable[[], None] = lambda: None,
        path: Path | None = None,
        mode: int = 0o600,
        group: str | None = None,
    ) -> None:
        self._handler = handler
        self._on_closed = on_closed
        self._listener = Listener(self.admit, host=host, port=port, path=path, mode=mode, group=group)
        self._tls = tls
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._connections: dict[_Connection, threading.Thread] = {}
        self._running = 0
        self._body_bytes = 0
        self._is_drained = False
        self.is_stopping = False

    @property
    def port(self) -> int:
        """The port; 0 for a Unix socket."""
        return self._listener.port

    @property
    def url(self) -> str:
        """The URL under which clients reach the server."""
        return self._listener.url(tls=self._tls is not None)

    def start(self) -> None:
        """Bind and serve. UsageError, in one line, if the address is unavailable."""
        self._listener.start()

    def stop(self, drain_s: float = 5.0) -> None:
        """Stop accepting, let running requests finish for `drain_s` seconds, then close every connection."""
        self.is_stopping = True
        self._listener.stop(drain_s)
        deadline = monotonic() + drain_s
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout=drain_s)
            self._is_drained = True
            open_now = dict(self._connections)
        for connection in open_now:
            connection.interrupt()
        for thread in open_now.values():
            thread.join(max(0.1, deadline - monotonic()))

    def begin(self, length: int = 0) -> None:
        """Count a request with a body of `length` bytes as running until `end`. Raises Left once the server has
        drained, and Refused (503) while the bodies in memory exceed their limit."""
        with self._lock:
            if self._is_drained:
                raise PeerClosed("the server ends")
            if self._body_bytes and self._body_bytes + length > LIMITS.http_bodies_bytes:
                raise Refused(
                    503, f"requests of {self._body_bytes} bytes are being received or answered: come back later"
                )
            self._running += 1
            self._body_bytes += length

    def end(self, length: int = 0) -> None:
        """A request counted by `begin` has finished."""
        with self._lock:
            self._running -= 1
            self._body_bytes -= length
            if self.is_stopping:  # only `stop` waits for this condition
                self._changed.notify_all()

    def answer(self, request: Request) -> Response:
        """Call the handler; an exception becomes an error response."""
        return call_handler(self._handler, request)

    def admit(self, sock: socket.socket) -> None:
        """Serve an accepted connection in a thread of its own, or reject it if there are too many. `on_closed` is
        called when it has ended. The connection may have been accepted by another process."""
        with self._changed:
            has_room = len(self._connections) < self._max_connections
        if self.is_stopping or not has_room:
            self._reject(sock)
            self._on_closed()
            return
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            connection = _Connection(self, sock)
            thread = threading.Thread(target=self._run, args=(connection,), name="http-connection", daemon=True)
            with self._changed:
                self._connections[connection] = thread
            thread.start()
        except (OSError, RuntimeError) as error:  # the peer has disconnected already, or no thread can be started
            log.warning("cannot serve a connection: %s", error)
            sock.close()
            with self._changed:
                self._connections = {
                    open_connection: t for open_connection, t in self._connections.items() if t.is_alive()
                }
            self._on_closed()

    def _run(self, connection: _Connection) -> None:
        try:
            connection.run()
        finally:
            with self._changed:
                self._connections.pop(connection, None)
                self._changed.notify_all()
            self._on_closed()

    def _reject(self, sock: socket.socket) -> None:
        """Reject a connection because there is no room, or the server is stopping."""
        why = "the server ends" if self.is_stopping else "too many connections"
        log.warning("%s, at most %d: turned one away", why, self._max_connections)
        reject(sock, why, with_response=self._tls is None)
