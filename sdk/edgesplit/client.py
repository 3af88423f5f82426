"""The Python way in: `Client.infer` returns one answer or raises a typed error by its deadline, whatever happens.

One request id is retried over lost connections, restarts and "no room just now" until the deadline; an answer counts
only under that id, so a late or duplicate one of an earlier attempt is never returned. Every wait on the socket is
bounded by what is left of the deadline, also when the server drips its answer byte by byte. Works with any server of
the Open Inference Protocol that echoes ids; what only the agent tells (`Answer.report`) is None elsewhere.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import math
import random
import select
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import numpy as np

from edgesplit import oip, report
from edgesplit.errors import (
    Busy,
    DeadlineExceeded,
    Dropped,
    EdgeError,
    InferenceFailed,
    LinkError,
    MalformedMessage,
    NotFound,
    UsageError,
)
from edgesplit.limits import LIMITS

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.25
_SEND = 262_144
_PLAIN = {"accept": "application/json", "accept-encoding": "identity"}


@dataclass(frozen=True)
class Answer:
    """The one result of a request."""

    outputs: Mapping[str, oip.Tensor]
    report: report.Report | None
    """How the agent made it, or None where another server answered."""
    id: str


@dataclass(frozen=True)
class Reply:
    """An HTTP response, whole."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: memoryview


class _BoundedReader(io.RawIOBase):
    """Reads a socket, each time for no longer than is left of the deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Bytes read; TimeoutError once the deadline has passed."""
        _bound(self._sock, self._deadline)
        return self._sock.recv_into(buffer)


class _Incoming:
    """What http.client wants of a socket: a file to read a response from."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._reader = _BoundedReader(sock, deadline)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """The response's bytes."""
        return io.BufferedReader(self._reader, 65_536)


class Connection:
    """One persistent HTTP/1.1 connection; not thread-safe, except that `close` ends a running exchange."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None, server_name: str | None = None) -> None:
        self._address = (host, port)
        self._tls = tls
        self._server_name = server_name or host
        self._sock: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        """Is there a connection left over from the last exchange? The other side may have closed it since."""
        return self._sock is not None

    def exchange(
        self,
        method: str,
        path: str,
        *,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        body: Sequence[bytes | memoryview] = (),
    ) -> Reply:
        """One request and its response by `deadline` (of the monotonic clock).

        DeadlineExceeded, LinkError, or MalformedMessage where the response is none; the connection is closed then.
        """
        try:
            sock = self._opened(deadline)
            self._send(sock, self._head(method, path, headers or {}, body), body, deadline)
            reply, keep = self._receive(sock, method, deadline)
        except TimeoutError as error:
            self.close()
            raise DeadlineExceeded(f"{self._where}: no answer in time") from error
        except (http.client.IncompleteRead, http.client.RemoteDisconnected, OSError) as error:
            self.close()
            raise LinkError(f"{self._where}: {error or type(error).__name__}") from error
        except (http.client.HTTPException, ValueError, UnicodeError) as error:
            self.close()
            raise MalformedMessage(f"{self._where} sent no HTTP response: {error!r}"[:300]) from error
        except BaseException:
            self.close()
            raise
        if not keep:
            self.close()
        return reply

    def close(self) -> None:
        """End the connection; the next exchange opens another."""
        sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            sock.close()

    @property
    def _where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def _opened(self, deadline: float) -> socket.socket:
        """The connection, made where there is none."""
        if self._sock is not None and not (self._tls is None and _is_readable(self._sock)):
            return self._sock
        self.close()
        sock = socket.create_connection(self._address, timeout=_remaining(deadline))
        self._sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            _bound(sock, deadline)
            self._sock = sock = self._tls.wrap_socket(sock, server_hostname=self._server_name)
        return sock

    def _head(self, method: str, path: str, headers: Mapping[str, str], body: Sequence[bytes | memoryview]) -> bytes:
        length = {"content-length": str(sum(len(part) for part in body))} if method != "GET" else {}
        lines = [f"{name}: {value}" for name, value in {"host": self._where, **length, **headers}.items()]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1")

    @staticmethod
    def _send(sock: socket.socket, head: bytes, body: Sequence[bytes | memoryview], deadline: float) -> None:
        """All of it, piece by piece, so that the deadline also bounds a peer that reads too slowly."""
        small = sum(len(part) for part in body) <= _SEND
        for part in [b"".join([head, *body])] if small else [head, *body]:
            view = memoryview(part)
            while len(view):
                _bound(sock, deadline)
                view = view[sock.send(view[:_SEND]) :]

    @staticmethod
    def _receive(sock: socket.socket, method: str, deadline: float) -> tuple[Reply, bool]:
        """The response, and whether the connection may be used again."""
        incoming: Any = _Incoming(sock, deadline)
        with http.client.HTTPResponse(incoming, method=method) as response:
            response.begin()
            length = response.length
            if length is not None and length > LIMITS.http_body_bytes:
                raise ValueError(f"a body of {length} bytes")
            body = _body(response, length)
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, body), not response.will_close


def _body(response: http.client.HTTPResponse, length: int | None) -> memoryview:
    """The whole body, of bounded size; http.client.IncompleteRead where it is cut short."""
    if length is None:
        whole = response.read(LIMITS.http_body_bytes + 1)
        if len(whole) > LIMITS.http_body_bytes:
            raise ValueError("an endless body")
        return memoryview(whole)
    body = memoryview(bytearray(length))
    got = 0
    while got < length:
        count = response.readinto(body[got:])
        if not count:
            raise http.client.IncompleteRead(bytes(body[:got]), length - got)
        got += count
    return body


def _remaining(deadline: float) -> float:
    """Seconds left; TimeoutError if none is."""
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def _is_readable(sock: socket.socket) -> bool:
    """Between two exchanges that means: closed by the other side, or an answer that nobody asked for."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _bound(sock: socket.socket, deadline: float) -> None:
    sock.settimeout(_remaining(deadline))


def error_of(reply: Reply) -> EdgeError | None:
    """The error that a response tells of, or None for a good one."""
    if reply.status == 200:
        return None
    text = f"{_error_text(reply)} (HTTP {reply.status})"
    if reply.status == 404:
        return NotFound(text)
    if reply.status in (429, 503):
        busy = Busy(text)
        busy.retry_after_s = _retry_after_s(reply)
        return busy
    if reply.status == 410:
        return Dropped(text)
    if reply.status in (408, 502):
        return LinkError(text)
    if reply.status == 504:
        return DeadlineExceeded(text)
    return UsageError(text) if 400 <= reply.status < 500 else InferenceFailed(text)


def _error_text(reply: Reply) -> str:
    """The server's own words, cut to a line's length."""
    try:
        said = msgspec.json.decode(reply.body[: LIMITS.http_header_bytes], type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        said = {}
    text = said.get("error")
    return " ".join(text.split())[:500] if isinstance(text, str) and text else "no reason given"


def _retry_after_s(reply: Reply) -> float:
    """How long the server asks to be left alone; 0 where it does not say."""
    text = reply.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0


class Client:
    """Inference on an agent, or on any server of the Open Inference Protocol. Usable from any number of threads."""

    def __init__(
        self, url: str = "http://127.0.0.1:8600", timeout_s: float = 10.0, *, tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise UsageError(f"not an address: {url[:200]!r} ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"not an address: {url[:200]!r} (as in http://127.0.0.1:8600)")
        self._address = (parts.hostname, port)
        self._prefix = parts.path.rstrip("/")
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        self._own = threading.local()
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, Connection] = {}
        self._closed = threading.Event()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, oip.Tensor | bytes],
        *,
        deadline_s: float = 2.0,
        request_id: str | None = None,
        outputs: Sequence[str] = (),
    ) -> Answer:
        """The model's answer to `inputs` (bytes, such as a JPEG, are one UINT8 tensor), within `deadline_s`.

        Raises NotFound or UsageError for what no retry mends, InferenceFailed where the model failed, and
        DeadlineExceeded, which says what stood in the way, once the time is up.
        """
        if math.isnan(deadline_s):
            raise UsageError(f"a deadline of {deadline_s} s")
        deadline = monotonic() + deadline_s
        tensors = {name: _tensor(name, value) for name, value in inputs.items()}
        asked = oip.InferRequest(tensors, tuple(outputs), request_id or uuid.uuid4().hex)
        path = f"/v2/models/{quote(model, safe='')}/infer"
        return self._until(deadline, deadline_s, lambda: self._infer_once(path, asked, deadline))

    def models(self) -> tuple[str, ...]:
        """Names of the models that can be asked for now."""
        entries = self._get("POST", "/v2/repository/index", list[_IndexEntry])
        return tuple(sorted({entry.name for entry in entries if entry.state in ("", "READY")}))

    def metadata(self, model: str) -> dict[str, Any]:
        """The model's inputs and outputs, as the Open Inference Protocol words them. NotFound if there is no such."""
        found: dict[str, Any] = self._get("GET", f"/v2/models/{quote(model, safe='')}", dict[str, Any])
        return found

    def ready(self, model: str | None = None) -> bool:
        """Could the server, or this model on it, answer now?"""
        path = "/v2/health/ready" if model is None else f"/v2/models/{quote(model, safe='')}/ready"
        try:
            return self._attempt("GET", path, monotonic() + self._timeout_s).status == 200
        except EdgeError:
            return False

    def close(self) -> None:
        """End all connections. A call that waits raises LinkError."""
        self._closed.set()
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close()

    def _infer_once(self, path: str, asked: oip.InferRequest, deadline: float) -> Answer:
        """One attempt; the server is told how much time is left of the request's."""
        left_us = max(1, int((deadline - monotonic()) * 1e6))
        buffers, length = oip.encode_request(
            oip.InferRequest(asked.inputs, asked.outputs, asked.id, {"timeout": left_us}, asked.binary_outputs)
        )
        headers = {"content-type": "application/octet-stream", oip.HEADER_LENGTH: str(length), **_PLAIN}
        reply = self._attempt("POST", path, deadline, headers, buffers)
        if error := error_of(reply):
            raise error
        response = oip.decode_response(reply.body, oip.header_length(reply.headers))
        if response.id != asked.id:
            raise MalformedMessage(f"an answer to request {response.id[:80]!r}, not to {asked.id[:80]!r}")
        missing = set(asked.outputs) - set(response.outputs)
        if missing:
            raise MalformedMessage(f"the answer lacks output {sorted(missing)[0]!r}")
        return Answer(response.outputs, report.from_parameters(dict(response.parameters)), response.id)

    def _until(self, deadline: float, deadline_s: float, attempt: Callable[[], Answer]) -> Answer:
        """Repeat `attempt` until it answers, fails for good, or the time is up."""
        pause_s, last, refused = FIRST_PAUSE_S, "no time was given", ""
        while monotonic() < deadline:
            at_least_s = 0.0
            try:
                return attempt()
            except DeadlineExceeded as error:  # an attempt that the end cut short hides nothing said before it
                last = f"{error}; before that: {refused}" if refused else str(error)
            except Busy as error:
                last = refused = str(error)
                at_least_s = error.retry_after_s
            except (LinkError, MalformedMessage) as error:
                if self._closed.is_set():
                    raise
                last = refused = str(error)
                log.debug("attempt failed, trying again: %s", error)
                self._connection().close()  # whatever else arrives on it belongs to the past
            jittered_s = max(pause_s * random.uniform(0.5, 1.0), min(at_least_s, 1.0) * random.uniform(0.1, 0.5))
            self._closed.wait(max(0.0, min(jittered_s, deadline - monotonic())))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise DeadlineExceeded(f"no answer within {deadline_s:g} s; last: {last}")

    def _get(self, method: str, path: str, kind: Any) -> Any:
        """What the server says at `path`."""
        reply = self._attempt(method, path, monotonic() + self._timeout_s, _PLAIN)
        if error := error_of(reply):
            raise error
        try:
            return msgspec.json.decode(reply.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise MalformedMessage(f"{path}: {error}") from error

    def _attempt(
        self,
        method: str,
        path: str,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        body: Sequence[bytes | memoryview] = (),
    ) -> Reply:
        """One exchange on this thread's connection; one that the server had closed meanwhile is replaced at once."""
        if self._closed.is_set():
            raise LinkError("this client was closed")
        connection = self._connection()
        was_open, target = connection.is_open, self._prefix + path
        try:
            return connection.exchange(method, target, deadline=deadline, headers=headers, body=body)
        except LinkError:
            if not was_open or self._closed.is_set():
                raise
        return connection.exchange(method, target, deadline=deadline, headers=headers, body=body)

    def _connection(self) -> Connection:
        """This thread's own. Those of threads that have ended are closed on the way."""
        own: Connection | None = getattr(self._own, "connection", None)
        if own is None:
            own = self._own.connection = Connection(*self._address, self._tls)
            with self._lock:
                self._connections[threading.current_thread()] = own
                ended = [thread for thread in self._connections if not thread.is_alive()]
                for thread in ended:
                    self._connections.pop(thread).close()
        return own


class _IndexEntry(msgspec.Struct):
    name: str
    state: str = ""


def _tensor(name: str, value: oip.Tensor | bytes) -> oip.Tensor:
    """As an array; UsageError for what is none."""
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    raise UsageError(f"input {name[:80]!r} is a {type(value).__name__}, not a numpy array or bytes")
