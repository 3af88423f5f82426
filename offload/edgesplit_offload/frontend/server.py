"""The offload server's HTTP front end: accepts connections and serves all of them in the event loop's leader.

Bounds connections, bodies and times as `edgesplit.http1.server.Server` does, with the same interface to start and stop
it; running requests finish at `stop`. The difference is the handler: the leader calls it with each complete request, it
must not block, and it answers later through a callback, from any thread.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Protocol

from edgesplit.errors import EdgeError
from edgesplit.http1.admission import (
    CONNECTIONS,
    DISPLACED,
    REVOKED,
    AdmissionControl,
    AdmittedConnection,
    OnRefused,
    RefusalLog,
    Refusals,
    client_of,
    reason_of,
)
from edgesplit.http1.head import ParsedHead, Refused
from edgesplit.http1.listener import Listener
from edgesplit.http1.peer import Peer
from edgesplit.http1.server import Request, Response, error_response, reject, status_of
from edgesplit.http1.server_connection import PeerClosed, new_scratch
from edgesplit.limits import LIMITS
from edgesplit_offload.frontend.connection import HttpConnection
from edgesplit_offload.frontend.event_loop import EventLoop
from edgesplit_offload.frontend.transport import PlainTransport, TlsTransport
from edgesplit_offload.scheduling.arrivals import ArrivalStats

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Interval in seconds at which connections are checked for exceeded deadlines."""
Answer = Callable[[Response], None]


class Handler(Protocol):
    """The application behind the front end."""

    def route(self, parsed: ParsedHead) -> object:
        """What can be derived from the head of a request alone; computed once while a connection repeats its head."""
        ...

    def check_head(self, parsed: ParsedHead, route: object, peer: str | None) -> None:
        """Judge a request by its head, before its body is let in: raises Refused or an EdgeError. Not called for
        requests without a body."""
        ...

    def is_revoked(self, serial: int) -> bool:
        """Whether the certificate with this serial number was revoked. Its connections are refused and closed."""
        ...

    def handle(self, request: Request, route: object, arrival_stats: ArrivalStats, answer: Answer) -> None:
        """Answer the request without blocking: `answer` must be called once, from any thread. `arrival_stats`: return
        times of its connection."""
        ...


class RevokedCertificate(Refused):
    """The peer's certificate was revoked."""

    def __init__(self) -> None:
        super().__init__(403, "this certificate was revoked")


class HttpServer:
    """Serves HTTP/1.1 on one TCP address, and the connections passed to `admit`."""

    def __init__(
        self,
        handler: Handler,
        loop: EventLoop,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        max_connections: int = 256,
        on_closed: Callable[[], None] = lambda: None,
        on_refused: OnRefused = lambda certificate, reason: None,
    ) -> None:
        """`on_refused` is called for each refusal, with the name in the peer's certificate (empty without one) and the
        reason, one of `edgesplit.http1.admission.REASONS`."""
        self._handler = handler
        self._loop = loop
        self._tls = tls
        self._admission = AdmissionControl(max_connections)
        self._refusals = RefusalLog()
        self._count_refused = on_refused
        self._on_closed = on_closed
        self._listener = Listener(self.admit, host=host, port=port)
        self._connections: dict[HttpConnection, int] = {}
        """Open connections, with their sockets' descriptors."""
        self._running = 0
        self._is_drained = False
        self._finished = threading.Event()
        self._timer_at = math.inf
        self._handling: HttpConnection | None = None
        """The connection whose request is being passed to the handler right now."""
        self.scratch = new_scratch()
        self.is_stopping = False

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._listener.port

    @property
    def url(self) -> str:
        """The URL under which clients reach the server."""
        return self._listener.url(tls=self._tls is not None)

    def start(self) -> None:
        """Bind and accept. UsageError, in one line, if the address is unavailable."""
        self._listener.start()

    def stop(self, drain_s: float = 5.0) -> None:
        """Stop accepting, let running requests finish for `drain_s` seconds, then close every connection."""
        self.is_stopping = True
        self._listener.stop(drain_s)
        self._loop.call_soon(self._check_finished)
        self._finished.wait(drain_s)
        ended = threading.Event()
        self._loop.call_soon(partial(self._close_all, ended))
        ended.wait(CHECK_INTERVAL_S)

    def admit(self, sock: socket.socket) -> None:
        """Serve an accepted connection, or reject it if there are too many. `on_closed` is called when it has ended.
        From any thread; the connection may have been accepted by another process."""
        self._loop.call_soon(partial(self._admit, sock))

    def on_timer(self, now: float) -> float:
        """Timer callback: close connections whose deadline has passed; returns when to check again. Leader only."""
        if now >= self._timer_at:
            for connection in list(self._connections):
                if not self._close_revoked(connection, now):
                    connection.check_deadline(now)
            self._timer_at = now + min(CHECK_INTERVAL_S, LIMITS.handshake_s) if self._connections else math.inf
        return self._timer_at

    def recent_refusals(self) -> Refusals:
        """The recent refusals by client and reason. From any thread."""
        return self._refusals.recent(monotonic())

    # The connections' owner (`ConnectionOwner`)

    def on_handshake(self, connection: HttpConnection) -> None:
        """Count the connection for the client whose certificate it has shown. Raises Refused if it has too many."""
        if connection.peer is not None:
            try:
                self._displace(self._admission.identify(connection.admitted, connection.peer))
            except Refused as refusal:
                self._record(connection.admitted, CONNECTIONS, str(refusal))
                raise PeerClosed(str(refusal)) from refusal

    def begin(self, connection: HttpConnection, parsed: ParsedHead, route: object) -> None:
        """Judge a request by its head, and count it as running until `end`. Raises PeerClosed once the server has
        drained, and Refused (403 to 413) for what the handler would not take, (429, 503) while the client's or all
        bodies in memory exceed their limit."""
        if self._is_drained:
            raise PeerClosed("the server is stopping")
        if connection.peer_serial is not None and self._handler.is_revoked(connection.peer_serial):
            connection.admitted.silent_since = monotonic()  # it has a moment to read the reason
            self._record(connection.admitted, REVOKED, "its certificate was revoked")
            raise RevokedCertificate
        if parsed.length:
            try:
                self._handler.check_head(parsed, route, connection.peer)
            except EdgeError as error:
                raise Refused(status_of(error), str(error)) from error
        self._displace(self._admission.begin(connection.admitted, parsed.length))
        self._running += 1

    def on_body(self, connection: HttpConnection, received: int, length: int) -> None:
        """Count the bytes of a large body as they arrive. Raises Refused (429, 503) if there is no room for more."""
        self._displace(self._admission.receive(connection.admitted, received, length))

    def end(self, connection: HttpConnection) -> None:
        """A request counted by `begin` has finished."""
        self._running -= 1
        self._admission.finish(connection.admitted, monotonic())
        self._check_finished()

    def route(self, parsed: ParsedHead) -> object:
        """The handler's route for requests with this head."""
        return self._handler.route(parsed)

    def on_request(self, connection: HttpConnection, request: Request, route: object) -> None:
        """Pass the request to the handler; an exception becomes a 500 response."""
        self._handling = connection
        try:
            self._handler.handle(request, route, connection.arrival_stats, partial(self._respond, connection))
        except Exception as error:  # any failure is answered
            log.exception("%s %s failed", request.method, request.path)
            connection.respond(error_response(500, f"internal error: {type(error).__name__}"))
        finally:
            self._handling = None

    def on_refused(self, connection: HttpConnection, refusal: Refused) -> None:
        """Log and count the refusal."""
        if not isinstance(refusal, RevokedCertificate):  # recorded already
            self._record(connection.admitted, reason_of(refusal.status), str(refusal))

    def on_closed(self, connection: HttpConnection) -> None:
        """Remove the closing connection from the loop."""
        self._admission.remove(connection.admitted)
        descriptor = self._connections.pop(connection, None)
        if descriptor is not None:
            self._loop.unwatch(descriptor)
            self._on_closed()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call `call` after what else is ready."""
        self._loop.call_soon(call)

    def _respond(self, connection: HttpConnection, response: Response) -> None:
        """Deliver the handler's response to the connection. From any thread."""
        # Connections are only touched by the leader. During `handle` the connection advances by itself once `handle`
        # returns; advancing it here as well would recurse.
        if not self._loop.is_leader:
            self._loop.call_soon(partial(_respond_and_advance, connection, response))
        elif self._handling is connection:
            connection.respond(response)
        else:
            _respond_and_advance(connection, response)

    def _admit(self, sock: socket.socket) -> None:
        if self.is_stopping:
            self._reject(sock, "the server is stopping")
            return
        try:
            connection, sock = self._connection(sock)
        except OSError as error:  # the peer has disconnected already
            log.warning("cannot serve a connection: %s", error)
            sock.close()
            self._on_closed()
            return
        try:
            self._displace(self._admission.admit(connection.admitted))
            self._loop.watch(sock.fileno(), connection.on_event)
        except Refused as refusal:
            self._record(connection.admitted, CONNECTIONS, str(refusal))
            self._reject(sock, str(refusal))
            return
        except OSError as error:  # epoll has no room
            log.warning("cannot serve a connection: %s", error)
            self._admission.remove(connection.admitted)
            sock.close()
            self._on_closed()
            return
        self._connections[connection] = sock.fileno()
        if self._timer_at == math.inf:
            self._timer_at = monotonic() + min(CHECK_INTERVAL_S, LIMITS.handshake_s)
            self._loop.wake_by(self._timer_at)

    def _connection(self, sock: socket.socket) -> tuple[HttpConnection, socket.socket]:
        """The connection on an accepted socket, and the socket that it uses. OSError if the peer has gone."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = client_of(sock, Peer(sock), tls=self._tls is not None)
        if self._tls is not None:
            wrapped = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            return HttpConnection(self, wrapped, TlsTransport(wrapped), client), wrapped
        return HttpConnection(self, sock, PlainTransport(sock), client), sock

    def _reject(self, sock: socket.socket, why: str) -> None:
        """Close a connection that is not admitted."""
        reject(sock, why, with_response=self._tls is None)
        self._on_closed()

    def _displace(self, displaced: AdmittedConnection | None) -> None:
        """Close the connection that gives way, if any."""
        if displaced is not None:
            self._record(displaced, DISPLACED, "its connection gave way to another one")
            displaced.on_displaced()

    def _close_revoked(self, connection: HttpConnection, now: float) -> bool:
        """Close the connection if its certificate was revoked; whether it was. A new one has a moment for its first
        request, whose answer gives the reason."""
        admitted = connection.admitted
        if connection.peer_serial is None or not self._handler.is_revoked(connection.peer_serial):
            return False
        if admitted.is_silent and now - admitted.silent_since < CHECK_INTERVAL_S:
            return False
        self._record(admitted, REVOKED, "its certificate was revoked: closed its connection")
        connection.close()
        return True

    def _record(self, admitted: AdmittedConnection, reason: str, text: str) -> None:
        """Log and count that a client was refused something."""
        self._refusals.record(admitted.client, reason, text, monotonic())
        self._count_refused(admitted.certificate, reason)

    def _check_finished(self) -> None:
        if self.is_stopping and not self._running:
            self._finished.set()

    def _close_all(self, ended: threading.Event) -> None:
        self._is_drained = True
        for connection in list(self._connections):
            connection.close()
        ended.set()


def _respond_and_advance(connection: HttpConnection, response: Response) -> None:
    connection.respond(response)
    connection.advance()
