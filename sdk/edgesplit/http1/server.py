"""An HTTP/1.1 server on blocking sockets: a thread per connection, bounded in number, sizes and time.

Promises: the handler sees only whole requests of bounded size; whatever else arrives is refused with its reason and
its connection is closed; a handler that raises answers with an error and the server lives on; `stop` lets running
requests finish. Header blocks are read by `http_head`, bodies are received into one buffer without copies. Leaves to
others: chunked bodies (411), content codings, HTTP/2, routing. Why threads: docs/decisions/0004.
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
from edgesplit.http1.head import CONTINUE, END, Head, Refused, asked_by, head_bytes, waits_for_leave
from edgesplit.http1.listener import Accepting
from edgesplit.http1.peer import Channel
from edgesplit.lazy_import import later
from edgesplit.limits import LIMITS

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

log = logging.getLogger(__name__)

RECEIVE = 65_536
_TICK_S = 1.0
"""How long the kernel waits for a peer before we look whether it has any time left."""
_TIME = struct.Struct("ll")
_TOGETHER = 512
"""Parts handed to the kernel by one call; it takes 1,024 at most."""
LINGER_S = 1.0
"""How long a refused peer is listened to, so that the refusal is not lost in a connection reset."""
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
    """One whole request."""

    method: str
    path: str
    """Percent-decoded, without the query."""
    query: str = ""
    headers: Mapping[str, str] = {}
    """By lower-case name; of a header that is there several times, the values joined by `, `."""
    body: memoryview | bytes = b""
    peer: str | None = None
    """Common name of the verified client certificate."""
    peer_serial: int | None = None
    """Its serial number, by which one is revoked."""
    closed: Callable[[], bool] = lambda: False
    """Has the client gone, so that nobody will read the answer?"""
    channel: Channel | None = None
    """The connection that it came by, and what lives as long; None over TLS, which may come from anywhere."""


class Response(msgspec.Struct, frozen=True, eq=False):
    """One answer; the body is sent part after part."""

    status: int = 200
    headers: Mapping[str, str] = {}
    body: Sequence[bytes | memoryview] = ()
    after: Callable[[], None] | None = None
    """Done when the answer has been sent, or could not be."""


Handler = Callable[[Request], Response]


def json_response(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as JSON."""
    return Response(status, {"content-type": "application/json", **(headers or {})}, [msgspec.json.encode(value)])


def error_response(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as the Open Inference Protocol words it: `{"error": text}`."""
    return json_response(status, {"error": text}, headers)


def response_to(error: EdgeError) -> Response:
    """The answer that tells a client of `error`; one that may pass by itself says when to come back."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    later = {"retry-after": str(max(1, math.ceil(getattr(error, "retry_after_s", 0.0))))}
    return error_response(status, str(error), later if status in (429, 503) else None)


def answer_of(handler: Handler, request: Request) -> Response:
    """What the handler makes of `request`; an error becomes the answer that tells of it."""
    try:
        return handler(request)
    except EdgeError as error:
        log.info("%s %s: %s", request.method, request.path, error)
        return response_to(error)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return error_response(500, f"internal error: {type(error).__name__}")


def refusal_response(refusal: Refused) -> Response:
    """The answer to a peer that is refused."""
    log.info("refused a request (%d): %s", refusal.status, refusal)
    return error_response(refusal.status, str(refusal), {"retry-after": "1"} if refusal.status == 503 else None)


def turn_away(sock: socket.socket, why: str, *, in_words: bool) -> None:
    """Close a connection that there is no room for. In plain text that can be said without waiting; over TLS only a
    close is that cheap."""
    response = error_response(503, why, {"retry-after": "1"})
    with sock, contextlib.suppress(OSError):
        if in_words:
            sock.setblocking(False)
            length = sum(len(part) for part in response.body)
            sock.send(b"".join([head_bytes(503, response.headers, length, keep=False), *response.body]))
            sock.shutdown(socket.SHUT_WR)


class Left(Exception):
    """The peer has gone, or the server is closing this connection: nothing is left to say."""


class _Connection:
    """One accepted connection, from handshake to close. Runs in its own thread."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._left = bytearray()
        self._block = b""
        self._channel = Channel(sock)
        self.peer: str | None = None
        self.peer_serial: int | None = None

    def run(self) -> None:
        """Serve requests one after the other until either side is done."""
        try:
            self._open()
            while self._serve_one():
                pass
        except Refused as refusal:
            self._refuse(refusal)
        except (OSError, Left) as error:  # ssl.SSLError and TimeoutError are OSErrors
            log.debug("connection ended: %s", error)
        except Exception:
            log.exception("a connection failed")
        finally:
            self.close()
            self._channel.close()

    def close(self) -> None:
        """End the connection now, whatever it is doing, from any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()

    def interrupt(self) -> None:
        """Wake the connection's thread out of its wait; it then closes by itself."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def _open(self) -> None:
        if not self._channel.is_local_socket:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(self._sock, ssl.SSLSocket):
            self._sock.settimeout(LIMITS.handshake_s)
            self._sock.do_handshake()
            self.peer, self.peer_serial = shown_by(self._sock)
            return
        # The kernel waits, not Python: one call receives a body, or sends one, however many packets it takes.
        self._sock.settimeout(None)
        seconds, part = divmod(min(_TICK_S, LIMITS.handshake_s), 1)
        for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, way, _TIME.pack(int(seconds), int(part * 1e6)))

    def _may_wait(self, seconds: float) -> None:
        """Over TLS a call waits so long; otherwise one tick, and whoever calls looks at the clock."""
        if self._tls:
            self._sock.settimeout(max(0.001, seconds))

    def _serve_one(self) -> bool:
        """One request and its answer; False when the connection has had its last."""
        block = self._receive_head()
        if block != self._block:  # clients ask the same thing again and again
            self._asked, self._block = asked_by(block), block
        head, length, path, query, keep = self._asked
        response: Response | None = None
        self._server.begin(length)
        try:
            self._continue(head, length)
            body = self._receive_body(length)
            channel = None if self._tls else self._channel
            request = Request(
                head.method, path, query, head.headers, body, self.peer, self.peer_serial, self._is_closed, channel
            )
            response = self._server.answer(request)
            self._channel.drop_descriptors()
            keep = keep and not self._server.is_stopping
            self._send(response, keep=keep, with_body=head.method != "HEAD")
        finally:
            self._server.end(length)
            if response is not None and response.after is not None:
                response.after()
        return keep

    def _receive_head(self) -> bytes:
        """The next header block. Its first byte may take as long as a connection may idle, the whole block may not."""
        deadline = monotonic() + LIMITS.handshake_s if self._left else None
        searched = 0
        while True:
            while self._left[:2] == b"\r\n":  # RFC 9112 2.2: empty lines before a request are ignored
                del self._left[:2]
                searched = 0
            end = self._left.find(END, searched)
            if end >= 0 and end + len(END) <= LIMITS.http_header_bytes:
                block = bytes(self._left[: end + len(END)])
                del self._left[: end + len(END)]
                return block
            if end >= 0 or len(self._left) > LIMITS.http_header_bytes:
                raise Refused(431, f"a header block of more than {LIMITS.http_header_bytes} bytes")
            searched = max(0, len(self._left) - len(END))
            if self._left and deadline is None:
                deadline = monotonic() + LIMITS.handshake_s
            self._left += self._receive_some(deadline)

    def _receive_some(self, deadline: float | None) -> bytes:
        """The next bytes of a header block; a silent connection is left, a dawdling one refused."""
        until = monotonic() + LIMITS.idle_connection_s if deadline is None else deadline
        while (remaining := until - monotonic()) > 0:
            self._may_wait(remaining)
            try:
                received = self._channel.receive(RECEIVE)
            except (TimeoutError, BlockingIOError):
                continue
            if not received:
                raise Left("closed by the peer")
            return received
        if deadline is None:
            raise Left("idle")
        raise Refused(408, "the header block took too long")

    def _continue(self, head: Head, length: int) -> None:
        """RFC 9110 10.1.1: a client that waits for leave to send its body gets it."""
        if waits_for_leave(head) and len(self._left) < length:
            self._send_all([CONTINUE], LIMITS.handshake_s)

    def _receive_body(self, length: int) -> memoryview | bytes:
        """Exactly `length` bytes; what lies behind them is kept for the next request."""
        if not length:
            return b""
        body = np.empty(length, np.uint8).data
        got = min(length, len(self._left))
        if got:
            body[:got] = self._left[:got]
            del self._left[:got]
        now = moved = monotonic()
        deadline = now + LIMITS.handshake_s + length / LIMITS.http_bytes_per_s
        while got < length:
            if now > min(deadline, moved + LIMITS.handshake_s):
                raise Refused(408, f"the body came too slowly: {got} of {length} bytes")
            self._may_wait(min(deadline, moved + LIMITS.handshake_s) - now)
            try:
                count = self._sock.recv_into(body[got:], 0, 0 if self._tls else socket.MSG_WAITALL)
            except (TimeoutError, BlockingIOError):
                now = monotonic()
                continue
            if not count:
                raise Left("the peer left amid a body")
            got += count
            now = moved = monotonic()
        return body

    def _is_closed(self) -> bool:
        """Has the peer closed its side?"""
        descriptor = self._sock.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, _GONE)
        return bool(poll.poll(0))

    def _send(self, response: Response, *, keep: bool, with_body: bool = True) -> None:
        """Head and body; a peer that reads too slowly is left."""
        length = sum(map(len, response.body))
        parts = [
            head_bytes(response.status, response.headers, length, keep=keep),
            *(response.body if with_body else ()),
        ]
        self._send_all(parts, LIMITS.handshake_s + length / LIMITS.http_bytes_per_s)

    def _send_all(self, parts: Sequence[bytes | memoryview], within_s: float) -> None:
        """These, one behind the other, by as few calls as may be; TimeoutError where the peer reads too slowly."""
        if self._tls:
            self._sock.settimeout(within_s)
            for part in parts if sum(map(len, parts)) > RECEIVE else [b"".join(parts)]:
                self._sock.sendall(part)
            return
        deadline, left = monotonic() + within_s, list(parts)
        while left:
            try:
                sent = self._sock.sendmsg(left[:_TOGETHER])
            except BlockingIOError:
                sent = 0
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = memoryview(left[0])[sent:]
                if monotonic() > deadline:
                    raise TimeoutError("the peer reads too slowly")

    def _refuse(self, refusal: Refused) -> None:
        """Say why, then listen a while: closing at once would reset the connection before the peer has read it."""
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


def shown_by(sock: ssl.SSLSocket) -> tuple[str | None, int | None]:
    """Whom the verified client certificate names, and its serial number; None for a client without one."""
    certificate: Any = sock.getpeercert() or {}
    names = (value for part in certificate.get("subject", ()) for key, value in part if key == "commonName")
    serial = certificate.get("serialNumber")
    return next(names, None), int(serial, 16) if serial else None


class Server:
    """Answers HTTP/1.1 on one address, or on the Unix socket `path`. `start` binds; from then on `port` and `url` are
    known."""

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
        self._accepting = Accepting(self.admit, host=host, port=port, path=path, mode=mode, group=group)
        self._tls = tls
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._connections: dict[_Connection, threading.Thread] = {}
        self._running = 0
        self._bodies = 0
        self._is_over = False
        self.is_stopping = False

    @property
    def port(self) -> int:
        """The port that it listens on; 0 for a Unix socket."""
        return self._accepting.port

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self._accepting.url(tls=self._tls is not None)

    def start(self) -> None:
        """Listen. UsageError, in one line, where the address cannot be had."""
        self._accepting.start()

    def stop(self, drain_s: float = 5.0) -> None:
        """Accept no more, let running requests finish for `drain_s`, then end every connection."""
        self.is_stopping = True
        self._accepting.stop(drain_s)
        deadline = monotonic() + drain_s
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout=drain_s)
            self._is_over = True
            open_now = dict(self._connections)
        for connection in open_now:
            connection.interrupt()
        for thread in open_now.values():
            thread.join(max(0.1, deadline - monotonic()))

    def begin(self, length: int = 0) -> None:
        """A request with a body of `length` runs, until its `end`. Once the last one was waited for, none begins; and
        none while there is no memory for its body."""
        with self._lock:
            if self._is_over:
                raise Left("the server ends")
            if self._bodies and self._bodies + length > LIMITS.http_bodies_bytes:
                raise Refused(503, f"requests of {self._bodies} bytes are being received or answered: come back later")
            self._running += 1
            self._bodies += length

    def end(self, length: int = 0) -> None:
        """One that had begun is over."""
        with self._lock:
            self._running -= 1
            self._bodies -= length
            if self.is_stopping:  # else nobody waits for it
                self._changed.notify_all()

    def answer(self, request: Request) -> Response:
        """What the handler makes of `request`."""
        return answer_of(self._handler, request)

    def admit(self, sock: socket.socket) -> None:
        """Serve a connection that was accepted, here or by another process, in a thread of its own; or turn it away
        where there are too many already. `on_closed` is called when it has ended."""
        with self._changed:
            has_room = len(self._connections) < self._max_connections
        if self.is_stopping or not has_room:
            self._turn_away(sock)
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
        except (OSError, RuntimeError) as error:  # the peer left already; or no thread is to be had
            log.warning("cannot serve a connection: %s", error)
            sock.close()
            with self._changed:
                self._connections = {one: t for one, t in self._connections.items() if t.is_alive()}
            self._on_closed()

    def _run(self, connection: _Connection) -> None:
        try:
            connection.run()
        finally:
            with self._changed:
                self._connections.pop(connection, None)
                self._changed.notify_all()
            self._on_closed()

    def _turn_away(self, sock: socket.socket) -> None:
        """No room."""
        why = "the server ends" if self.is_stopping else "too many connections"
        log.warning("%s, at most %d: turned one away", why, self._max_connections)
        turn_away(sock, why, in_words=self._tls is None)
