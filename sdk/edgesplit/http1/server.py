"""A threaded HTTP/1.1 server on blocking sockets: one thread per connection, with bounds on connections, sizes and
times.

The handler only sees complete requests of bounded size; anything else is refused with its reason and the connection is
closed. A handler that raises is answered with an error and the server goes on; `stop` lets running requests finish.
The protocol is `edgesplit.http1.server_connection`, bodies are received into one buffer without copies. Not supported:
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
from typing import Any

import msgspec

from edgesplit import errors
from edgesplit.errors import EdgeError
from edgesplit.http1.admission import (
    CONNECTIONS,
    DISPLACED,
    AdmissionControl,
    AdmittedConnection,
    RefusalLog,
    Refusals,
    client_of,
    reason_of,
)
from edgesplit.http1.head import CONTINUE, ParsedHead, Refused, encode_head
from edgesplit.http1.listener import Listener
from edgesplit.http1.peer import Peer
from edgesplit.http1.server_connection import NEED_DATA, REQUEST, Event, Part, PeerClosed, ServerConnection, new_scratch
from edgesplit.limits import LIMITS
from edgesplit.socket_send import send_some

log = logging.getLogger(__name__)

_JOINED_BYTES = 65_536
"""Parts of up to this many bytes together are sent as one over TLS."""
_TICK_S = 1.0
"""The kernel's socket timeout, after which the remaining time of the peer is checked."""
_TIME = struct.Struct("ll")
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
_STATUS: tuple[tuple[type[EdgeError], int], ...] = (
    (errors.NotFound, 404), (errors.UsageError, 400), (errors.MalformedMessage, 400), (errors.Dropped, 410),
    (errors.InfeasibleLimits, 422), (errors.DeadlineExceeded, 504), (errors.FairShareExceeded, 429), (errors.Busy, 503),
    (errors.Unsure, 424), (errors.LinkError, 502), (errors.InferenceFailed, 500),
)  # fmt: skip


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
HeadCheck = Callable[[Request], None]
"""Judges a request by its head, before its body is let in: raises Refused or an EdgeError. Its `body` is empty."""


def json_response(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """A response with `value` as JSON."""
    return Response(status, {"content-type": "application/json", **(headers or {})}, [msgspec.json.encode(value)])


def error_response(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the format of the Open Inference Protocol: `{"error": text}`."""
    return json_response(status, {"error": text}, headers)


def status_of(error: EdgeError) -> int:
    """The HTTP status for `error`."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def response_to(error: EdgeError) -> Response:
    """The error response for `error`; 429 and 503 carry a Retry-After header."""
    status = status_of(error)
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
    later = {"retry-after": "1"} if refusal.status in (429, 503) else None
    return error_response(refusal.status, str(refusal), later)


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


class _Connection:
    """One accepted connection, from handshake to close; runs in its own thread."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._protocol = ServerConnection(new_scratch(), monotonic())
        self._peer = Peer(sock)
        self.admitted = AdmittedConnection(
            client_of(sock, self._peer, tls=self._tls), monotonic(), on_displaced=self.interrupt
        )
        self._judged: ParsedHead | None = None
        """The last head that the handler's check let pass."""
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
            if self.peer is not None:
                self._server.identify(self.admitted, self.peer)
            self._protocol.start(monotonic())
            return
        # Blocking calls with a kernel timeout: one call receives or sends a body, however many packets it takes.
        self._sock.settimeout(None)
        seconds, fraction = divmod(min(_TICK_S, LIMITS.handshake_s), 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(int(seconds), int(fraction * 1e6)))
        self._protocol.start(monotonic())

    def _limit_wait(self, seconds: float) -> None:
        """Set the timeout of the next call over TLS; a plain socket keeps its kernel timeout of one tick, after which
        the caller checks the time."""
        if self._tls:
            self._sock.settimeout(max(0.001, seconds))

    def _serve_one(self) -> bool:
        """Serve one request; False if it was the connection's last."""
        protocol = self._protocol
        while protocol.next_event() is NEED_DATA:
            self._receive()
        assert protocol.parsed is not None
        head, length, path, query, _ = protocol.parsed
        response: Response | None = None
        channel = None if self._tls else self._peer

        def request(body: Part) -> Request:
            return Request(
                head.method, path, query, head.headers, body, self.peer, self.peer_serial, self._is_closed, channel
            )  # fmt: skip

        if length and protocol.parsed is not self._judged:  # a client repeats its head: judged once
            self._server.check_head(request(b""))
            self._judged = protocol.parsed
        self._server.begin(self.admitted, length)
        try:
            while (event := protocol.next_event()) is not REQUEST:
                if event is Event.CONTINUE:
                    self._send_all([CONTINUE], LIMITS.handshake_s)
                else:
                    self._receive()
                    if length > LIMITS.http_body_step_bytes:
                        self._server.receive(self.admitted, protocol.received_bytes, length)
            self.admitted.is_receiving = False
            response = self._server.answer(request(protocol.body))
            self._peer.drop_fds()
            now = monotonic()
            parts = protocol.encode_response(
                response.status, response.headers, response.body, now, keep_alive=not self._server.is_stopping
            )
            self._send_all(parts, protocol.deadline - now)
            protocol.on_sent(monotonic())
        finally:
            self._server.end(self.admitted)
            if response is not None and response.after is not None:
                response.after()
        return protocol.keep_alive

    def _receive(self) -> None:
        """Receive some bytes. Raises PeerClosed or Refused once the time for them is over."""
        protocol = self._protocol
        # A large body step by step: each step is counted before the next one is received.
        buffer = protocol.buffers()[0][: LIMITS.http_body_step_bytes]
        while (remaining := protocol.deadline - monotonic()) > 0:
            self._limit_wait(remaining)
            try:
                # Of a body, one call receives as much as the buffer takes, however many packets it takes.
                if protocol.is_in_body and not self._tls:
                    count = self._sock.recv_into(buffer, 0, socket.MSG_WAITALL)
                else:
                    count = self._peer.receive_into(buffer)
            except (TimeoutError, BlockingIOError):
                continue
            protocol.on_received(count, monotonic())
            return
        protocol.on_timeout()

    def _is_closed(self) -> bool:
        """Whether the peer has closed its side."""
        descriptor = self._sock.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, _GONE)
        return bool(poll.poll(0))

    def _send_all(self, parts: Sequence[Part], within_s: float) -> None:
        """Send the parts in order with as few system calls as possible; TimeoutError if the peer reads too slowly."""
        if self._tls:
            self._sock.settimeout(within_s)
            for part in parts if sum(map(len, parts)) > _JOINED_BYTES else [b"".join(parts)]:
                self._sock.sendall(part)
            return
        deadline, unsent = monotonic() + within_s, list(parts)
        while unsent:
            with contextlib.suppress(BlockingIOError):
                send_some(self._sock, unsent)
            if unsent and monotonic() > deadline:
                raise TimeoutError("the peer reads too slowly")

    def _refuse(self, refusal: Refused) -> None:
        """Send the refusal, then receive for a while what the peer still sends."""
        self._server.record_refusal(self.admitted, reason_of(refusal.status), str(refusal))
        response, now = refusal_response(refusal), monotonic()
        parts = self._protocol.encode_refusal(response.status, response.headers, response.body, now)
        try:
            self._send_all(parts, self._protocol.deadline - now)
            self._sock.shutdown(socket.SHUT_WR)
            while True:
                self._receive()
        except (OSError, PeerClosed) as error:
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
        check_head: HeadCheck = lambda _: None,
    ) -> None:
        self._handler = handler
        self._check_head = check_head
        self._on_closed = on_closed
        self._listener = Listener(self.admit, host=host, port=port, path=path, mode=mode, group=group)
        self._tls = tls
        self._admission = AdmissionControl(max_connections)
        self._refusals = RefusalLog()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._connections: dict[_Connection, threading.Thread] = {}
        self._running = 0
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

    def identify(self, connection: AdmittedConnection, certificate: str) -> None:
        """Count the connection for the client whose certificate has this name. Raises Refused if it has too many."""
        with self._lock:
            displaced = self._admission.identify(connection, certificate)
        self._displace(displaced)

    def check_head(self, request: Request) -> None:
        """Judge a request whose body has not been received. Raises Refused."""
        try:
            self._check_head(request)
        except EdgeError as error:
            raise Refused(status_of(error), str(error)) from error

    def begin(self, connection: AdmittedConnection, length: int) -> None:
        """Count a request with a body of `length` bytes as running until `end`. Raises PeerClosed once the server has
        drained, and Refused (429, 503) while the client's or all bodies in memory exceed their limit."""
        with self._lock:
            if self._is_drained:
                raise PeerClosed("the server is stopping")
            displaced = self._admission.begin(connection, length)
            self._running += 1
        self._displace(displaced)

    def receive(self, connection: AdmittedConnection, received: int, length: int) -> None:
        """Count the bytes of a large body as they arrive. Raises Refused (429, 503) if there is no room for more."""
        with self._lock:
            displaced = self._admission.receive(connection, received, length)
        self._displace(displaced)

    def end(self, connection: AdmittedConnection) -> None:
        """A request counted by `begin` has finished."""
        with self._lock:
            self._running -= 1
            self._admission.finish(connection, monotonic())
            if self.is_stopping:  # only `stop` waits for this condition
                self._changed.notify_all()

    def recent_refusals(self) -> Refusals:
        """The recent refusals by client and reason."""
        with self._lock:
            return self._refusals.recent(monotonic())

    def record_refusal(self, connection: AdmittedConnection, reason: str, text: str) -> None:
        """Log that the connection's client was refused something."""
        with self._lock:
            self._refusals.record(connection.client, reason, text, monotonic())

    def answer(self, request: Request) -> Response:
        """Call the handler; an exception becomes an error response."""
        return call_handler(self._handler, request)

    def admit(self, sock: socket.socket) -> None:
        """Serve an accepted connection in a thread of its own, or reject it if there are too many. `on_closed` is
        called when it has ended. The connection may have been accepted by another process."""
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            connection = _Connection(self, sock)
        except OSError as error:  # the peer has disconnected already
            log.warning("cannot serve a connection: %s", error)
            sock.close()
            self._on_closed()
            return
        if self.is_stopping:
            self._reject(sock, "the server is stopping")
            return
        try:
            with self._changed:
                displaced = self._admission.admit(connection.admitted)
        except Refused as refusal:
            self.record_refusal(connection.admitted, CONNECTIONS, str(refusal))
            self._reject(sock, str(refusal))
            return
        self._displace(displaced)
        try:
            thread = threading.Thread(target=self._run, args=(connection,), name="http-connection", daemon=True)
            with self._changed:
                self._connections[connection] = thread
            thread.start()
        except RuntimeError as error:  # no thread can be started
            log.warning("cannot serve a connection: %s", error)
            sock.close()
            with self._changed:
                self._connections.pop(connection, None)
                self._admission.remove(connection.admitted)
            self._on_closed()

    def _run(self, connection: _Connection) -> None:
        try:
            connection.run()
        finally:
            with self._changed:
                self._connections.pop(connection, None)
                self._admission.remove(connection.admitted)
                self._changed.notify_all()
            self._on_closed()

    def _displace(self, displaced: AdmittedConnection | None) -> None:
        """Close the connection that gives way, if any."""
        if displaced is not None:
            self.record_refusal(displaced, DISPLACED, "its connection gave way to another client's request")
            displaced.on_displaced()

    def _reject(self, sock: socket.socket, why: str) -> None:
        """Reject a connection because there is no room, or the server is stopping."""
        reject(sock, why, with_response=self._tls is None)
        self._on_closed()
