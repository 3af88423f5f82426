"""One HTTP/1.1 connection of the offload server as a non-blocking state machine: read, dispatch, write, step by step.

Each step advances the connection, or returns False because it needs an event first: input, room to write, or the
response. Request handlers only see complete requests of bounded size, one at a time; anything else is refused with its
reason and the connection is closed; reading and writing are bounded in time by `LIMITS`. Everything here is called by
the event loop's leader.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

import numpy as np

from edgesplit.http1.head import CONTINUE, END, ParsedHead, Refused, encode_head, expects_continue, parse_request_head
from edgesplit.http1.server import PeerClosed, Request, Response, refusal_response
from edgesplit.limits import LIMITS
from edgesplit_offload.frontend.event_loop import GONE, READABLE
from edgesplit_offload.frontend.transport import Part, Transport
from edgesplit_offload.scheduling.arrivals import ArrivalStats

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""How long input of a refused peer is still read, so that the refusal is not lost to a connection reset."""
_LINGER_BYTES = 32 * LIMITS.http_header_bytes
HEAD_BYTES = 16_384
"""Bytes read at once while a header block is expected: small requests arrive whole."""
_EXPECTED_BYTES = 1 << 20
"""Largest body for which memory is allocated before its header block has arrived, because the previous request was
alike."""


class ConnectionOwner(Protocol):
    """The server that owns a connection."""

    scratch: memoryview
    """Buffer for header blocks, shared by all connections because only the leader uses it."""
    is_stopping: bool

    def begin(self, length: int) -> None:
        """Count a request with a body of `length` bytes as running. Raises Refused or PeerClosed."""
        ...

    def end(self, length: int) -> None:
        """A request counted by `begin` has finished."""
        ...

    def route(self, parsed: ParsedHead) -> object:
        """What can be derived from the head alone; computed once while a connection repeats its head, and passed to
        `on_request`."""
        ...

    def on_request(self, connection: HttpConnection, request: Request, route: object) -> None:
        """A complete request has arrived; `respond` must be called on the connection some time."""
        ...

    def on_closed(self, connection: HttpConnection) -> None:
        """The connection is closing; its socket is still open."""
        ...

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call `call` after what else is ready."""
        ...


class HttpConnection:
    """One connection, from handshake to close."""

    def __init__(self, owner: ConnectionOwner, sock: socket.socket, transport: Transport) -> None:
        self._owner = owner
        self._sock = sock
        self._transport = transport
        self.arrival_stats = ArrivalStats(sock.fileno())
        self._step: Callable[[], bool] = self._handshake
        self._is_readable = True
        self._buffered = bytearray()
        self._searched = 0
        self._last_block = b""
        self._expects_repeat = False
        """Whether the next request is received into prepared memory, as if it repeated the last head."""
        self._parsed: ParsedHead | None = None
        self._route: object = None
        self._body = memoryview(b"")
        self._body_received = 0
        self._counted_bytes: int | None = None
        self._unsent: Sequence[Part] = ()
        self._on_sent: Callable[[], None] | None = None
        self._keep_alive = True
        self._deadline = monotonic() + LIMITS.handshake_s
        self._body_deadline = math.inf
        self._drained = 0
        self.is_peer_gone = False
        """Whether the peer has closed its side, so that the response would not be read."""
        self.is_closed = False

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
        assert self._parsed is not None
        keep = self._keep_alive = self._parsed.keep_alive and not self._owner.is_stopping
        self._step = self._write
        length = sum(map(len, response.body))
        try:
            head = encode_head(response.status, response.headers, length, keep_alive=keep)
        except ValueError:
            log.exception("an answer that cannot be sent")
            self.close()
            return
        self._unsent = [head] if self._parsed.head.method == "HEAD" else [head, *response.body]
        self._deadline = monotonic() + LIMITS.handshake_s + length / LIMITS.http_bytes_per_s

    def check_deadline(self, now: float) -> bool:
        """Enforce the connection's deadline: True if it was exceeded, and the connection is now closed or being
        refused."""
        if now <= self._deadline:
            return False
        # Input that has arrived but was not read yet counts as progress.
        if self._step == self._read_body and self._has_progressed():
            return False
        # In the middle of a request the peer receives the reason (408); an idle connection is just closed.
        if self._step in (self._read_head, self._read_body) and (self._buffered or self._counted_bytes is not None):
            reason = "the header block took too long" if self._counted_bytes is None else "the body came too slowly"
            self._refuse(Refused(408, reason))
        else:
            log.debug("connection ended: idle, or too slow")
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
        self._unsent = ()

    # Steps of the state machine: True if the next step may be taken at once, False to wait for an event. In order:
    # _handshake, _read_head, (_read_body), _await_response, _write, and again _read_head; _linger after a refusal.

    def _handshake(self) -> bool:
        if not self._transport.handshake():
            return False
        self._deadline = monotonic() + LIMITS.idle_connection_s
        self._step = self._read_head
        return True

    def _read_head(self) -> bool:
        """Step: the next header block. Its first byte may take as long as an idle connection may live, the rest only
        the handshake time."""
        block = self._next_block() if self._buffered else None
        if block is None:
            return self._receive_head()
        if block != self._last_block:  # clients repeat the same header block
            self._parsed = parse_request_head(block)
            self._route, self._last_block = self._owner.route(self._parsed), block
            self._expects_repeat = (
                0 < self._parsed.length <= _EXPECTED_BYTES and len(block) < HEAD_BYTES // 2
                and "expect" not in self._parsed.head.headers
            )  # fmt: skip
        assert self._parsed is not None
        length, waits = self._parsed.length, expects_continue(self._parsed.head)
        self._owner.begin(length)
        self._counted_bytes = length
        if not length:
            self._dispatch(b"")
            return True
        if waits and len(self._buffered) < length and self._transport.send([CONTINUE]):
            raise PeerClosed("it has not read its last answer")
        self._begin_body(length)
        return True

    def _next_block(self) -> bytes | None:
        """Remove the next header block from the buffered bytes; None if it is incomplete."""
        buffered = self._buffered
        while buffered[:2] == b"\r\n":  # RFC 9112 2.2: empty lines before a request are ignored
            del buffered[:2]
            self._searched = 0
        end = buffered.find(END, self._searched)
        if end >= 0 and end + len(END) <= LIMITS.http_header_bytes:
            block = bytes(buffered[: end + len(END)])
            del buffered[: end + len(END)]
            self._searched = 0
            return block
        if end >= 0 or len(buffered) > LIMITS.http_header_bytes:
            raise Refused(431, f"a header block of more than {LIMITS.http_header_bytes} bytes")
        self._searched = max(0, len(buffered) - len(END))
        return None

    def _receive_head(self) -> bool:
        if not self._is_readable:
            return False
        if self._expects_repeat and not self._buffered:
            return self._receive_repeated()
        scratch = self._owner.scratch
        count = self._receive(scratch)
        if count is None:
            return False
        if not self._buffered:
            self._deadline = monotonic() + LIMITS.handshake_s
        self._buffered += scratch[:count]
        return True

    def _receive_repeated(self) -> bool:
        """Receive a request whose head is expected to repeat: the body goes straight into its own memory, by one system
        call."""
        block, parsed, scratch = self._last_block, self._parsed, self._owner.scratch
        assert parsed is not None
        begin, body = len(block), np.empty(parsed.length, np.uint8).data
        head, beyond = scratch[:begin], scratch[begin:]
        count = self._receive(head, body, beyond)
        if count is None:
            return False
        body_bytes = count - begin
        # Not a repetition: what was received, in whichever buffer it lies, is parsed as usual.
        if body_bytes < 0 or bytes(head) != block:
            self._deadline = monotonic() + LIMITS.handshake_s
            for room in (head, body, beyond):
                self._buffered += room[:count]
                count = max(0, count - len(room))
            return True
        if body_bytes > len(body):
            self._buffered += beyond[: body_bytes - len(body)]
        self._owner.begin(len(body))
        self._counted_bytes = len(body)
        self._expect_body(body, min(body_bytes, len(body)))
        return True

    def _begin_body(self, length: int) -> None:
        body = np.empty(length, np.uint8).data
        received = min(length, len(self._buffered))
        if received:
            body[:received] = self._buffered[:received]
            del self._buffered[:received]
        self._expect_body(body, received)

    def _expect_body(self, body: memoryview, received: int) -> None:
        """Expect the rest of `body`, of which `received` bytes are there."""
        length = len(body)
        self._body, self._body_received = body, received
        now = monotonic()
        self._body_deadline = now + LIMITS.handshake_s + length / LIMITS.http_bytes_per_s
        self._deadline = min(self._body_deadline, now + LIMITS.handshake_s)
        self._step = self._read_body

    def _read_body(self) -> bool:
        """Step: exactly the announced bytes, into memory of their own; bytes behind them belong to the next request."""
        body, received, beyond = self._body, self._body_received, self._owner.scratch
        while received < len(body):
            count = self._receive(body[received:] if received else body, beyond) if self._is_readable else None
            if count is None:
                if received > self._body_received:  # progress extends the deadline, up to that of the whole body
                    self._body_received = received
                    self._deadline = min(self._body_deadline, monotonic() + LIMITS.handshake_s)
                return False
            received += count
        if received > len(body):
            self._buffered += beyond[: received - len(body)]
        self._body = memoryview(b"")
        self._dispatch(body)
        return True

    def _has_progressed(self) -> bool:
        """Read what has arrived of the body; True if that was progress, which extends the deadline."""
        before = self._body_received
        self._is_readable = True
        self.advance()
        return (
            self.is_closed
            or self._step != self._read_body
            or (self._body_received > before and monotonic() <= self._body_deadline)
        )

    def _dispatch(self, body: memoryview | bytes) -> None:
        """Pass the complete request to the owner."""
        parsed = self._parsed
        assert parsed is not None
        self._step, self._deadline = self._await_response, math.inf
        request = Request(
            parsed.head.method, parsed.path, parsed.query, parsed.head.headers, body, self._transport.peer,
            self._transport.peer_serial, self._is_peer_gone,
        )  # fmt: skip
        self._owner.on_request(self, request, self._route)

    def _await_response(self) -> bool:
        """Step: await the response. The next request is not read meanwhile (back-pressure)."""
        return False

    def _write(self) -> bool:
        """Step: send the response, as far as the socket takes it."""
        self._unsent = self._transport.send(self._unsent)
        if self._unsent:
            return False
        self._finish_request()
        if not self._keep_alive:
            self.close()
            return False
        self._step = self._read_head
        self._deadline = monotonic() + (LIMITS.handshake_s if self._buffered else LIMITS.idle_connection_s)
        # The next request is here, or it is unknown whether it is: read it after the other connections (fairness).
        if self._buffered or self._is_readable:
            self._owner.call_soon(self.advance)
        return False

    def _linger(self) -> bool:
        """Step: discard what a refused peer still sends."""
        count = self._transport.receive(self._owner.scratch)
        if count is None:
            return False
        self._drained += count
        if not count or self._drained > _LINGER_BYTES:
            self.close()
            return False
        return True

    def _receive(self, *buffers: memoryview) -> int | None:
        """Bytes received into `buffers`, None if there are none now; updates `_is_readable`. PeerClosed at end of
        stream."""
        # Edge-triggered events: the socket stays readable until a read has drained it. After the peer has closed, no
        # further event comes, so it stays readable until the end of stream has been read.
        count = self._transport.receive(*buffers)
        self._is_readable = count is not None and (self.is_peer_gone or not self._transport.is_drained)
        if count == 0:
            raise PeerClosed("closed by the peer")
        return count

    def _is_peer_gone(self) -> bool:
        return self.is_peer_gone

    def _finish_request(self) -> None:
        """The request is finished, whether its response was sent or not."""
        if self._counted_bytes is not None:
            self._owner.end(self._counted_bytes)
            self._counted_bytes = None
        after, self._on_sent = self._on_sent, None
        if after is not None:
            after()

    def _refuse(self, refusal: Refused) -> None:
        """Send the refusal, then drain input for a while: closing at once would reset the connection before the peer
        has read it."""
        response = refusal_response(refusal)
        length = sum(map(len, response.body))
        try:
            self._transport.send(
                [encode_head(response.status, response.headers, length, keep_alive=False), *response.body]
            )
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            log.debug("refused peer left: %s", error)
            self.close()
            return
        self._finish_request()
        self._step, self._deadline = self._linger, monotonic() + LINGER_S
        self._owner.call_soon(self.advance)
