"""An HTTP/1.1 server on blocking sockets: a thread per connection, bounded in number, sizes and time.

Promises: the handler sees only whole requests of bounded size; whatever else arrives is refused with its reason and
its connection is closed; a handler that raises answers with an error and the server lives on; `stop` lets running
requests finish. Header blocks are parsed by httptools, bodies are received into one buffer without copies. Leaves to
others: chunked bodies (411), content codings, HTTP/2, routing. Why threads: docs/decisions/0004.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import httptools
import msgspec

from edgesplit import local_socket
from edgesplit.channel import Channel
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
from edgesplit.later import later
from edgesplit.limits import LIMITS

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

log = logging.getLogger(__name__)

_END = b"\r\n\r\n"
_RECEIVE = 65_536
_TICK_S = 1.0
"""How long the kernel waits for a peer before we look whether it has any time left."""
_TIME = struct.Struct("ll")
_TOGETHER = 512
"""Parts handed to the kernel by one call; it takes 1,024 at most."""
_LINGER_S = 1.0
"""How long a refused peer is listened to, so that the refusal is not lost in a connection reset."""
_REASONS = {int(status): status.phrase for status in HTTPStatus}
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


class _Refused(Exception):
    """This peer gets `status` and is left."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Left(Exception):
    """The peer has gone, or the server is closing this connection: nothing is left to say."""


@dataclass
class _Head:
    """A request's header block, as httptools reports it."""

    method: str = ""
    url: bytes = b""
    version: str = "1.1"
    headers: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    complete: bool = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text
        self.seen.append(key)

    def on_headers_complete(self) -> None:
        self.complete = True

    @property
    def keep_alive(self) -> bool:
        """Does the client want another request on this connection?"""
        words = {word.strip().lower() for word in self.headers.get("connection", "").split(",")}
        return "close" not in words and (self.version == "1.1" or "keep-alive" in words)


def parse_head(block: bytes) -> _Head:
    """The header block `block`, which ends with its empty line; raises the refusal that it deserves."""
    head = _Head()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(block)
    except httptools.HttpParserUpgrade:
        pass  # RFC 9110 7.8: a server may ignore Upgrade
    except httptools.HttpParserError as error:
        raise _Refused(400, f"not an HTTP request: {error}") from error
    if not head.complete:
        raise _Refused(400, "not an HTTP request")
    head.method, head.version = parser.get_method().decode("latin-1"), parser.get_http_version()
    if head.version not in ("1.0", "1.1"):
        raise _Refused(505, f"HTTP/{head.version} is not spoken here")
    return head


def body_length(head: _Head) -> int:
    """How many bytes follow this header block; raises the refusal where that is unsure or too much."""
    lengths, chunked = head.seen.count("content-length"), "transfer-encoding" in head.seen
    if lengths > 1 or (lengths and chunked):  # RFC 9112 6.3: request smuggling
        raise _Refused(400, "the length of the body is given twice")
    if chunked:
        raise _Refused(411, "send a Content-Length: chunked bodies are not taken")
    text = head.headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _Refused(400, "Content-Length is not a number")
    length = int(text)
    if length > LIMITS.http_body_bytes:
        raise _Refused(413, f"a body of {length} bytes, at most {LIMITS.http_body_bytes}")
    return length


def split_target(url: bytes) -> tuple[str, str]:
    """Decoded path and raw query of a request target, in origin or absolute form."""
    if url[:1] == b"/" and b"%" not in url:
        plain, _, rest = url.partition(b"?")
        if plain.isascii():
            return plain.decode("ascii"), rest.decode("latin-1")
    target = re.sub(r"^https?://[^/?]*", "", url.decode("latin-1"), flags=re.IGNORECASE)
    path, _, query = target.partition("?")
    try:
        decoded = unquote(path, errors="strict") or "/"
    except UnicodeDecodeError as error:
        raise _Refused(400, "the path is not UTF-8") from error
    if not decoded.startswith("/"):
        raise _Refused(400, "the path does not begin with /")
    return decoded, query


class _Asked(NamedTuple):
    """What a header block asks."""

    head: _Head
    length: int
    path: str
    query: str
    keep_alive: bool


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
        except _Refused as refusal:
            self._refuse(refusal)
        except (OSError, _Left) as error:  # ssl.SSLError and TimeoutError are OSErrors
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
            self.peer, self.peer_serial = _shown_by(self._sock)
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
            head = parse_head(block)
            self._asked = _Asked(head, body_length(head), *split_target(head.url), head.keep_alive)
            self._block = block
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
            end = self._left.find(_END, searched)
            if end >= 0 and end + len(_END) <= LIMITS.http_header_bytes:
                block = bytes(self._left[: end + len(_END)])
                del self._left[: end + len(_END)]
                return block
            if end >= 0 or len(self._left) > LIMITS.http_header_bytes:
                raise _Refused(431, f"a header block of more than {LIMITS.http_header_bytes} bytes")
            searched = max(0, len(self._left) - len(_END))
            if self._left and deadline is None:
                deadline = monotonic() + LIMITS.handshake_s
            self._left += self._receive_some(deadline)

    def _receive_some(self, deadline: float | None) -> bytes:
        """The next bytes of a header block; a silent connection is left, a dawdling one refused."""
        until = monotonic() + LIMITS.idle_connection_s if deadline is None else deadline
        while (remaining := until - monotonic()) > 0:
            self._may_wait(remaining)
            try:
                received = self._channel.receive(_RECEIVE)
            except (TimeoutError, BlockingIOError):
                continue
            if not received:
                raise _Left("closed by the peer")
            return received
        if deadline is None:
            raise _Left("idle")
        raise _Refused(408, "the header block took too long")

    def _continue(self, head: _Head, length: int) -> None:
        """RFC 9110 10.1.1: a client that waits for leave to send its body gets it."""
        expected = head.headers.get("expect")
        if expected is None or head.version == "1.0":
            return
        if expected.lower() != "100-continue":
            raise _Refused(417, "only 100-continue can be expected")
        if len(self._left) < length:
            self._send_all([b"HTTP/1.1 100 Continue\r\n\r\n"], LIMITS.handshake_s)

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
                raise _Refused(408, f"the body came too slowly: {got} of {length} bytes")
            self._may_wait(min(deadline, moved + LIMITS.handshake_s) - now)
            try:
                count = self._sock.recv_into(body[got:], 0, 0 if self._tls else socket.MSG_WAITALL)
            except (TimeoutError, BlockingIOError):
                now = monotonic()
                continue
            if not count:
                raise _Left("the peer left amid a body")
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
        parts = [_head_bytes(response, length, keep=keep), *(response.body if with_body else ())]
        self._send_all(parts, LIMITS.handshake_s + length / LIMITS.http_bytes_per_s)

    def _send_all(self, parts: Sequence[bytes | memoryview], within_s: float) -> None:
        """These, one behind the other, by as few calls as may be; TimeoutError where the peer reads too slowly."""
        if self._tls:
            self._sock.settimeout(within_s)
            for part in parts if sum(map(len, parts)) > _RECEIVE else [b"".join(parts)]:
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

    def _refuse(self, refusal: _Refused) -> None:
        """Say why, then listen a while: closing at once would reset the connection before the peer has read it."""
        log.info("refused a request (%d): %s", refusal.status, refusal)
        try:
            later = {"retry-after": "1"} if refusal.status == 503 else None
            self._send(error_response(refusal.status, str(refusal), later), keep=False)
            self._sock.shutdown(socket.SHUT_WR)
            deadline, drained = monotonic() + _LINGER_S, 0
            while drained < LIMITS.http_header_bytes * 32 and (remaining := deadline - monotonic()) > 0:
                self._sock.settimeout(remaining)
                received = len(self._sock.recv(_RECEIVE))
                if not received:
                    return
                drained += received
        except OSError as error:
            log.debug("refused peer left: %s", error)


def _shown_by(sock: ssl.SSLSocket) -> tuple[str | None, int | None]:
    """Whom the verified client certificate names, and its serial number; None for a client without one."""
    certificate: Any = sock.getpeercert() or {}
    names = (value for part in certificate.get("subject", ()) for key, value in part if key == "commonName")
    serial = certificate.get("serialNumber")
    return next(names, None), int(serial, 16) if serial else None


def _head_bytes(response: Response, length: int, *, keep: bool) -> bytes:
    """Status line and headers. A header with a line break in it is a programming error and is never sent."""
    lines = [f"HTTP/1.1 {response.status} {_REASONS.get(response.status, 'Unknown')}"]
    for name, value in response.headers.items():
        line = f"{name}: {value}"
        if "\r" in line or "\n" in line:
            raise ValueError(f"line break in header {name!r}")
        lines.append(line)
    lines += [f"content-length: {length}", f"connection: {'keep-alive' if keep else 'close'}", "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace")


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there. UsageError, in one line, where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host} port {port}: {reason}") from error


def server_url(host: str, port: int, *, tls: bool) -> str:
    """Where clients reach what listens there."""
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


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
        self._path = path
        self._mode = mode
        self._group = group
        self._at_path = (0, 0)
        self._on_closed = on_closed
        self._host = host
        self._wanted_port = port
        self._tls = tls
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._connections: dict[_Connection, threading.Thread] = {}
        self._running = 0
        self._bodies = 0
        self._is_over = False
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self.is_stopping = False

    @property
    def port(self) -> int:
        """The port that it listens on; 0 for a Unix socket."""
        if self._listener is None:
            raise UsageError("the server has not been started")
        if self._path is not None:
            return 0
        return int(self._listener.getsockname()[1]) if self._listener.fileno() >= 0 else self._wanted_port

    @property
    def url(self) -> str:
        """Where clients reach it."""
        if self._path is not None:
            return f"unix://{self._path}"
        return server_url(self._host, self.port, tls=self._tls is not None)

    def start(self) -> None:
        """Listen. UsageError, in one line, where the address cannot be had."""
        self._listener = self._at(self._path) if self._path else listening_socket(self._host, self._wanted_port)
        self._wanted_port = self.port
        self._accepting = threading.Thread(target=self._accept, name=f"http-{self.port}", daemon=True)
        self._accepting.start()

    def _at(self, path: Path) -> socket.socket:
        sock = local_socket.listening(path, self._mode, self._group)
        self._at_path = local_socket.identity(path)
        return sock

    def stop(self, drain_s: float = 5.0) -> None:
        """Accept no more, let running requests finish for `drain_s`, then end every connection."""
        self.is_stopping = True
        if self._path is not None:
            local_socket.remove(self._path, self._at_path)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._accepting is not None:
            self._accepting.join(drain_s)
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
                raise _Left("the server ends")
            if self._bodies and self._bodies + length > LIMITS.http_bodies_bytes:
                raise _Refused(503, f"requests of {self._bodies} bytes are being received or answered: come back later")
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
        """What the handler makes of `request`; an error becomes the answer that tells of it."""
        try:
            return self._handler(request)
        except EdgeError as error:
            log.info("%s %s: %s", request.method, request.path, error)
            return response_to(error)
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            return error_response(500, f"internal error: {type(error).__name__}")

    def _accept(self) -> None:
        """Hand each connection to a thread of its own until the listener is closed."""
        listener = self._listener
        assert listener is not None
        while not self.is_stopping:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self.is_stopping and listener.fileno() >= 0:
                    log.warning("cannot accept: %s", error)
                    with self._changed:  # out of file descriptors: until a connection ends, or a moment passes
                        self._changed.wait(0.1)
                continue
            self.admit(sock)

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
        """No room. In plain text that can be said without waiting; over TLS only a close is that cheap."""
        why = "the server ends" if self.is_stopping else "too many connections"
        log.warning("%s, at most %d: turned one away", why, self._max_connections)
        response = error_response(503, why, {"retry-after": "1"})
        with sock, contextlib.suppress(OSError):
            if self._tls is None:
                sock.setblocking(False)
                length = sum(len(part) for part in response.body)
                sock.send(b"".join([_head_bytes(response, length, keep=False), *response.body]))
                sock.shutdown(socket.SHUT_WR)
