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

from edgesplit.http1.head import ParsedHead, Refused
from edgesplit.http1.listener import Listener
from edgesplit.http1.server import Request, Response, error_response, reject
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

    def handle(self, request: Request, route: object, arrival_stats: ArrivalStats, answer: Answer) -> None:
        """Answer the request without blocking: `answer` must be called once, from any thread. `arrival_stats`: return
        times of its connection."""
        ...


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
    ) -> None:
        self._handler = handler
        self._loop = loop
        self._tls = tls
        self._max_connections = max_connections
        self._on_closed = on_closed
        self._listener = Listener(self.admit, host=host, port=port)
        self._connections: dict[HttpConnection, int] = {}
        """Open connections, with their sockets' descriptors."""
        self._running = 0
        self._body_bytes = 0
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
                connection.check_deadline(now)
            self._timer_at = now + min(CHECK_INTERVAL_S, LIMITS.handshake_s) if self._connections else math.inf
        return self._timer_at

    # The connections' owner (`ConnectionOwner`)

    def begin(self, length: int) -> None:
        """Count a request with a body of `length` bytes as running until `end`. Raises PeerClosed once the server has
        drained, and Refused (503) while the bodies in memory exceed their limit."""
        if self._is_drained:
            raise PeerClosed("the server is stopping")
        if self._body_bytes and self._body_bytes + length > LIMITS.http_bodies_bytes:
            raise Refused(503, f"requests of {self._body_bytes} bytes are being received or answered: retry later")
        self._running += 1
        self._body_bytes += length

    def end(self, length: int) -> None:
        """A request counted by `begin` has finished."""
        self._running -= 1
        self._body_bytes -= length
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

    def on_closed(self, connection: HttpConnection) -> None:
        """Remove the closing connection from the loop."""
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
        if self.is_stopping or len(self._connections) >= self._max_connections:
            why = "the server is stopping" if self.is_stopping else "too many connections"
            log.warning("%s, at most %d: rejected one", why, self._max_connections)
            reject(sock, why, with_response=self._tls is None)
            self._on_closed()
            return
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            transport = TlsTransport(sock) if isinstance(sock, ssl.SSLSocket) else PlainTransport(sock)
            connection = HttpConnection(self, sock, transport)
            self._loop.watch(sock.fileno(), connection.on_event)
        except OSError as error:  # the peer has disconnected already
            log.warning("cannot serve a connection: %s", error)
            sock.close()
            self._on_closed()
            return
        self._connections[connection] = sock.fileno()
        if self._timer_at == math.inf:
            self._timer_at = monotonic() + min(CHECK_INTERVAL_S, LIMITS.handshake_s)
            self._loop.wake_by(self._timer_at)

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
