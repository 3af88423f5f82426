"""One connection of the offload server on a non-blocking socket: read, dispatch, write, step by step.

The protocol is `edgesplit.http1.server_connection`. Each step advances the connection, or returns False because it
needs an event first: input, room to write, or the response. One request is handled at a time; a refused peer receives
the reason and is disconnected. Everything here is called by the event loop's leader.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from edgesplit.http1.admission import AdmittedConnection
from edgesplit.http1.head import CONTINUE, ParsedHead, Refused
from edgesplit.http1.server import Request, Response, refusal_response
from edgesplit.http1.server_connection import HEAD, NEED_DATA, REQUEST, Part, PeerClosed, ServerConnection
from edgesplit.limits import LIMITS
from edgesplit_offload.frontend.event_loop import GONE, READABLE
from edgesplit_offload.frontend.transport import PlainTransport, TlsTransport
from edgesplit_offload.scheduling.arrivals import ArrivalStats

log = logging.getLogger(__name__)


class ConnectionOwner(Protocol):
    """The server that owns a connection."""

    scratch: memoryview
    """Buffer for header blocks, shared by all connections because only the leader uses it."""
    is_stopping: bool

    def on_handshake(self, connection: HttpConnection) -> None:
        """The handshake is complete: the peer has shown its certificate, if any. Raises Refused."""
        ...

    def begin(self, connection: HttpConnection, parsed: ParsedHead, route: object) -> None:
        """Judge a request by its head, before its body is let in, and count it as running. Raises Refused or
        PeerClosed."""
        ...

    def on_body(self, connection: HttpConnection, received: int, length: int) -> None:
        """`received` of the `length` bytes of a large body are here. Raises Refused."""
        ...

    def end(self, connection: HttpConnection) -> None:
        """A request counted by `begin` has finished."""
        ...

    def route(self, parsed: ParsedHead) -> object:
        """What can be derived from the head alone; computed once while a connection repeats its head, and passed to
        `on_request`."""
        ...

    def on_request(self, connection: HttpConnection, request: Request, route: object) -> None:
        """A complete request has arrived; `respond` must be called on the connection some time."""
        ...

    def on_refused(self, connection: HttpConnection, refusal: Refused) -> None:
        """The peer was refused."""
        ...

    def on_closed(self, connection: HttpConnection) -> None:
        """The connection is closing; its socket is still open."""
        ...

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call `call` after what else is ready."""
        ...


class HttpConnection:
    """One connection, from handshake to close."""

    def __init__(
        self, owner: ConnectionOwner, sock: socket.socket, transport: PlainTransport | TlsTransport, client: str
    ) -> None:
        """`client`: who it is counted for until its peer has shown a certificate."""
        self._owner = owner
        self._sock = sock
        self._transport = transport
        self._protocol = ServerConnection(owner.scratch, monotonic(), prepares_bodies=True)
        self.arrival_stats = ArrivalStats(sock.fileno())
        self.admitted = AdmittedConnection(client, monotonic(), on_displaced=self.close)
        self._step: Callable[[], bool] = self._handshake
        self._is_readable = True
        self._routed: ParsedHead | None = None
        self._route: object = None
        self._is_counted = False
        self._unsent: list[Part] = []
        self._on_sent: Callable[[], None] | None = None
        self.is_peer_gone = False
        """Whether the peer has closed its side, so that the response would not be read."""
        self.is_closed = False

    @property
    def peer(self) -> str | None:
        """Common name of the verified client certificate."""
        return self._transport.peer

    @property
    def peer_serial(self) -> int | None:
        """Serial number of that certificate."""
        return self._transport.peer_serial

    def on_event(self, event: int = READABLE) -> None:
        """Event loop callback: `event` are epoll's flags for the socket."""
        if event & READABLE:
            self._is_readable = True
            if event & GONE:
                self.is_peer_gone = True
        self.advance()

    def advance(self) -> None:
        """Take steps until one needs to wait."""
        try:
            while not self.is_closed and self._step():
                pass
        except Refused as refusal:
            self._refuse(refusal)
        except (OSError, PeerClosed) as error:  # ssl.SSLError is an OSError
            log.debug("connection ended: %s", error)
            self.close()
        except Exception:  # a defect ends this connection, and no other
            log.exception("a connection failed")
            self.close()

    def respond(self, response: Response) -> None:
        """Set the response to the dispatched request; `advance` sends it."""
        self._on_sent = response.after
        if self.is_closed:  # closed while the request was being answered
            self._finish_request()
            return
        self._step = self._write
        try:
            self._unsent = self._protocol.encode_response(
                response.status, response.headers, response.body, monotonic(), keep_alive=not self._owner.is_stopping
            )
        except ValueError:
            log.exception("an answer that cannot be sent")
            self.close()

    def check_deadline(self, now: float) -> bool:
        """Enforce the connection's deadline: True if it was exceeded, and the connection is now closed or being
        refused."""
        if now <= self._protocol.deadline:
            return False
        # Input that has arrived but was not read yet counts as progress.
        if self._step == self._read:
            self._is_readable = True
            self.advance()
            if self.is_closed or monotonic() <= self._protocol.deadline:
                return False
        try:
            self._protocol.on_timeout()
        except Refused as refusal:
            self._refuse(refusal)
        except PeerClosed as error:
            log.debug("connection ended: %s", error)
            self.close()
        return True

    def close(self) -> None:
        """Close the connection now."""
        if self.is_closed:
            return
        self.is_closed = True
        self._owner.on_closed(self)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()
        if self._step != self._await_response:  # a request being answered is finished by `respond`
            self._finish_request()
        self._unsent = []

    # Steps of the state machine: True if the next step may be taken at once, False to wait for an event. In order:
    # _handshake, _read, _await_response, _write, and again _read; _linger after a refusal.

    def _handshake(self) -> bool:
        if not self._transport.handshake():
            return False
        self._protocol.start(monotonic())
        self._step = self._read
        self._owner.on_handshake(self)
        return True

    def _read(self) -> bool:
        """Step: the next request."""
        protocol, owner = self._protocol, self._owner
        while (event := protocol.next_event()) is not REQUEST:
            if event is NEED_DATA:
                if not self._is_readable or not self._receive():
                    return False
            elif event is HEAD:
                parsed = protocol.parsed
                assert parsed is not None
                if parsed is not self._routed:
                    self._routed, self._route = parsed, owner.route(parsed)
                owner.begin(self, parsed, self._route)
                self._is_counted = True
            elif self._transport.send([CONTINUE]):
                raise PeerClosed("the peer does not read its last answer")
        self.admitted.is_receiving = False
        self._step = self._await_response
        assert self._routed is not None
        head, _, path, query, _ = self._routed
        owner.on_request(
            self,
            Request(
                head.method, path, query, head.headers, protocol.body, self._transport.peer,
                self._transport.peer_serial, lambda: self.is_peer_gone,
            ),
            self._route,
        )  # fmt: skip
        return True

    def _await_response(self) -> bool:
        """Step: await the response. The next request is not read meanwhile (back-pressure)."""
        return False

    def _write(self) -> bool:
        """Step: send the response, as far as the socket takes it."""
        self._unsent = self._transport.send(self._unsent)
        if self._unsent:
            return False
        self._finish_request()
        if not self._protocol.keep_alive:
            self.close()
            return False
        self._step = self._read
        # The next request is here, or it is unknown whether it is: read it after the other connections (fairness).
        if self._protocol.on_sent(monotonic()) or self._is_readable:
            self._owner.call_soon(self.advance)
        return False

    def _linger(self) -> bool:
        """Step: discard what a refused peer still sends."""
        return self._receive()

    def _receive(self) -> bool:
        """Receive what is there into the protocol's buffers; False if there is nothing now. PeerClosed at end of
        stream."""
        # Edge-triggered events: the socket stays readable until a read has drained it. After the peer has closed, no
        # further event comes, so it stays readable until the end of stream has been read.
        count = self._transport.receive(*self._protocol.buffers())
        self._is_readable = count is not None and (self.is_peer_gone or not self._transport.is_drained)
        if count is None:
            return False
        protocol = self._protocol
        protocol.on_received(count, monotonic())
        if protocol.is_in_body and (length := len(protocol.body)) > LIMITS.http_body_step_bytes:
            self._owner.on_body(self, protocol.received_bytes, length)
        return True

    def _finish_request(self) -> None:
        """The request is finished, whether its response was sent or not."""
        if self._is_counted:
            self._is_counted = False
            self._owner.end(self)
        after, self._on_sent = self._on_sent, None
        if after is not None:
            after()

    def _refuse(self, refusal: Refused) -> None:
        """Send the refusal, then receive for a while what the peer still sends."""
        self._owner.on_refused(self, refusal)
        response = refusal_response(refusal)
        parts = self._protocol.encode_refusal(response.status, response.headers, response.body, monotonic())
        try:
            self._transport.send(parts)
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            log.debug("refused peer left: %s", error)
            self.close()
            return
        self._finish_request()
        self._step = self._linger
        self._owner.call_soon(self.advance)
