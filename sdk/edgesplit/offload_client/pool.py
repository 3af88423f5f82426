"""Connection pool to one offload server: runs the remote half of a row over persistent connections.

Results are values: the checked answer with its timings, or `OffloadFailure` with the cause; network and server faults
never raise. Answers are checked against the manifest: another model, id, tensor or shape is refused. Timeouts and
fallbacks are the caller's decision: the agent's engine, or a gateway that offloads to the next tier.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter
from typing import Literal

from edgesplit.errors import DeadlineExceeded, EdgeError, LinkError, MalformedMessage, UsageError
from edgesplit.http1.address import Address
from edgesplit.http1.client_connection import ClientConnection
from edgesplit.http1.content_coding import encode_body
from edgesplit.observability import trace_context
from edgesplit.observability.phases import SERVER_TIMING, parse_server_timing
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensor

log = logging.getLogger(__name__)

Body = bytes | bytearray | memoryview
Coding = Literal["", "zstd", "gzip"]
Cause = Literal["timeout", "refused", "link", "server", "rejected", "open"]
SECONDS_HEADER = "edgesplit-seconds"
LOAD_HEADER = "edgesplit-load"
HOP_HEADER = "edgesplit-hop-seconds"
HOP_SERVER_HEADER = "edgesplit-hop-server-seconds"
HOP_CAUSE_HEADER = "edgesplit-hop-cause"
HEALTH = "/v2/health/live"
PROBE_BYTES = 16_384
CLAIM_SLACK_S = 1e-4
"""Rounding error by which a server's phases may exceed its total seconds."""
IDLE_CONNECTIONS = 4
CONNECT_S = 5.0
"""Timeout of the handshakes of a new connection: a call cannot be cancelled before TCP's is complete."""


@dataclass(frozen=True, slots=True)
class OffloadRequest:
    """One offload request, encoded, and the tensors that must come back."""

    name: str
    """Name of the model on the server: `oip.remote_name` of release, device class and row."""
    id: str
    tensors: Mapping[str, Tensor]
    receives: tuple[TensorSpec, ...]
    body: Sequence[bytes | memoryview]
    header_length: int
    coding: Coding = ""
    """Content coding of the body."""
    planned_s: float = 0.0
    """Server time predicted by the plan; used if the server does not report its own."""

    @property
    def up_bytes(self) -> int:
        """Size of the body as sent."""
        return sum(len(part) for part in self.body)


@dataclass(frozen=True, slots=True)
class OffloadAnswer:
    """An answer that arrived in time and passed the checks."""

    outputs: Mapping[str, Tensor]
    elapsed_s: float
    """From the first byte sent to the last received, on an open connection."""
    server_s: float
    load: float
    up_bytes: int
    down_bytes: int
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase of `server_s`, as reported by the server (`edgesplit.observability.phases.SERVER_PHASES`)."""
    decode_s: float = 0.0
    """Decoding the answer's tensors, after `elapsed_s`."""
    hop_s: float = 0.0
    """Part of `server_s`: a gateway's wait for the next tier, including their link."""
    hop_server_s: float = 0.0
    """Part of `hop_s`: in that tier's server."""
    hop_cause: str = ""
    """Why a gateway finished without the next tier; empty if it did not."""

    @property
    def link_s(self) -> float:
        """Time on the link: `elapsed_s` without the server's time."""
        return max(0.0, self.elapsed_s - self.server_s)


@dataclass(frozen=True, slots=True)
class OffloadFailure:
    """Why there is no usable answer."""

    cause: Cause
    text: str
    elapsed_s: float = 0.0
    status: int = 0
    """HTTP status if there was a response, else 0."""


OffloadResult = OffloadAnswer | OffloadFailure


@dataclass(frozen=True, slots=True)
class RelayedResponse:
    """An unchecked response to a relayed request."""

    status: int
    headers: Mapping[str, str]
    body: memoryview
    elapsed_s: float
    server_s: float


def encode_offload_request(
    name: str,
    request_id: str,
    tensors: Mapping[str, Tensor],
    receives: tuple[TensorSpec, ...],
    *,
    left_s: float,
    coding: Coding = "",
    planned_s: float = 0.0,
) -> OffloadRequest:
    """Encode an offload request, compressed with `coding` if given. `left_s` is sent to the server as the timeout."""
    request = oip.InferRequest(
        inputs=dict(tensors), outputs=tuple(spec.name for spec in receives), id=request_id,
        parameters={"timeout": max(1, int(left_s * 1e6))},
    )  # fmt: skip
    body, header_length = oip.encode_request(request)
    if coding:
        body = [encode_body(body, coding)]
    return OffloadRequest(name, request_id, tensors, receives, body, header_length, coding, planned_s)


@dataclass(eq=False)
class CancellableCall:
    """One request in flight, which can be cancelled. `cancel` may be called from any thread, at any time,
    repeatedly."""

    is_cancelled: bool = False
    _connection: _Connection | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def attach(self, connection: _Connection) -> None:
        """The request travels on `connection` from now on; if it was cancelled already, the connection is aborted."""
        with self._lock:
            self._connection = connection
            if self.is_cancelled:
                connection.abort()

    def detach(self) -> bool:
        """The request has left its connection. False if it was cancelled: the connection cannot be reused then."""
        with self._lock:
            self._connection = None
            return not self.is_cancelled

    def cancel(self) -> None:
        """Cancel the request: abort its connection, so that the server and the link are free."""
        with self._lock:
            self.is_cancelled = True
            if self._connection is not None:
                self._connection.abort()


class _Connection(ClientConnection):
    """A connection of the pool."""

    was_used = False
    is_outdated = False
    """Whether it was opened with a certificate that has been replaced since."""

    @property
    def prefix(self) -> str:
        """Prepended to the path of every request."""
        return self._address.prefix


class OffloadClient:
    """A pool of connections to one offload server. Thread-safe."""

    def __init__(
        self, url: str, tls: ssl.SSLContext | None = None, *,
        via: tuple[str, int] | None = None, idle: int = IDLE_CONNECTIONS,
    ) -> None:  # fmt: skip
        """`via`: connect to that address instead (a shaped link in front of the server), but still expect the server's
        name. At most `idle` idle connections are kept open."""
        self._own_tls = tls
        self._max_idle = idle
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False
        self._set_target(url, via)

    def _set_target(self, url: str, via: tuple[str, int] | None) -> None:
        address = Address.parse(url if "://" in url else f"https://{url}")
        if address.socket:
            raise UsageError(f"not the address of an offload server: {url[:200]!r}")
        self.url = url if "://" in url else f"https://{url}"
        self._name = address.host
        self._tls = self._own_tls if address.tls else None
        self._address = address if via is None else replace(address, host=via[0], port=via[1])

    def retarget(self, url: str, via: tuple[str, int] | None = None) -> None:
        """Use the server at `url` from now on; requests in flight finish on their old connections."""
        with self._lock:
            self._set_target(url, via)
        self.renew()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def is_warm(self) -> bool:
        """Whether an idle connection is open, so that the next request needs no handshake."""
        return bool(self._idle)

    def infer(self, request: OffloadRequest, call: CancellableCall, timeout_s: float) -> OffloadResult:
        """Send the request and wait for the checked answer. A connection that went stale while idle is replaced
        once."""
        headers = {"content-type": "application/octet-stream", oip.HEADER_LENGTH: str(request.header_length)}
        headers |= {"content-encoding": request.coding} if request.coding else {}
        headers |= trace_context.outgoing_headers()
        http_request = HttpRequest("POST", infer_path(request.name), headers, request.body)
        return self._exchange_checked(request, http_request, call, timeout_s)

    def _exchange_checked(
        self, request: OffloadRequest, http_request: HttpRequest, call: CancellableCall, timeout_s: float
    ) -> OffloadResult:
        outcome = self._exchange(http_request, call, timeout_s)
        return outcome if isinstance(outcome, OffloadFailure) else self._check_answer(request, outcome)

    def relay(
        self, path: str, headers: Mapping[str, str], body: Body, call: CancellableCall, timeout_s: float
    ) -> RelayedResponse | OffloadFailure:
        """Forward a request unchanged; neither it nor the response is checked."""
        sent = {**headers, **trace_context.outgoing_headers()}
        outcome = self._exchange(HttpRequest("POST", path, sent, [memoryview(body)]), call, timeout_s)
        if isinstance(outcome, OffloadFailure):
            return outcome
        server_s = min(outcome.number(SECONDS_HEADER, 0.0), outcome.elapsed_s)
        return RelayedResponse(outcome.status, outcome.headers, outcome.body, outcome.elapsed_s, server_s)

    def warm(self, timeout_s: float) -> None:
        """Open a connection ahead of the next request; nothing is sent on it. A failure is only logged."""
        if self._idle or self._closed:
            return
        connection = self._acquire()
        try:
            connection.open(monotonic() + timeout_s)
        except EdgeError as error:
            log.debug("no connection ahead of the next request: %s", error)
        finally:
            self._release(connection, True)  # one that could not be opened is not kept

    def ping(self, timeout_s: float) -> float | OffloadFailure:
        """Round-trip time of the smallest exchange in seconds, without the server's own time."""
        outcome = self._exchange(HttpRequest("GET", HEALTH, {}, ()), CancellableCall(), timeout_s)
        if isinstance(outcome, OffloadFailure):
            return outcome
        if outcome.status != 200:
            return OffloadFailure("server", f"the health check was answered {outcome.status}", outcome.elapsed_s)
        return max(0.0, outcome.elapsed_s - outcome.number(SECONDS_HEADER, 0.0))

    def probe(self, timeout_s: float) -> OffloadAnswer | OffloadFailure:
        """Exchange a body large enough to measure the link's rate."""
        headers = {"content-type": "application/octet-stream"}
        http_request = HttpRequest("POST", "/v2/edgesplit/probe", headers, [os.urandom(PROBE_BYTES)])
        outcome = self._exchange(http_request, CancellableCall(), timeout_s)
        if isinstance(outcome, OffloadFailure):
            return outcome
        if outcome.status != 200:
            return OffloadFailure("server", f"the probe was answered {outcome.status}", outcome.elapsed_s)
        server_s = outcome.number(SECONDS_HEADER, 0.0)
        return OffloadAnswer({}, outcome.elapsed_s, server_s, 1.0, PROBE_BYTES, len(outcome.body))

    def renew(self) -> None:
        """Replace all connections, because the certificate has changed; requests in flight are finished."""
        with self._lock:
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.is_outdated = True
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close every connection; requests in flight fail."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            connection.abort()

    def _check_answer(self, request: OffloadRequest, reply: _Reply) -> OffloadResult:
        """The checked answer, or the failure that the response is."""
        if reply.status != 200:
            text = f"{reply.status}: {_error_text(reply.body)}"
            return OffloadFailure(self._cause(reply.status), text, reply.elapsed_s, reply.status)
        began = perf_counter()
        try:
            response = oip.decode_response(reply.body, oip.header_length(reply.headers))
            if response.model != request.name:
                raise UsageError(f"an answer of model {response.model[:80]!r}, not of {request.name!r}")
            if response.id != request.id and not self._is_id_optional(response.id):
                raise UsageError(f"an answer to request {response.id[:80]!r}, not to {request.id!r}")
            oip.check_tensors(response.outputs, request.receives)
        except EdgeError as error:
            return OffloadFailure("server", f"refused: {error}", reply.elapsed_s)
        server_s = min(reply.number(SECONDS_HEADER, request.planned_s), reply.elapsed_s)
        load = max(1.0, reply.number(LOAD_HEADER, 1.0))
        hop_s = min(reply.number(HOP_HEADER, 0.0), server_s)
        return OffloadAnswer(
            response.outputs, reply.elapsed_s, server_s, load, reply.up_bytes, len(reply.body),
            hop_s=hop_s, hop_server_s=min(reply.number(HOP_SERVER_HEADER, 0.0), hop_s),
            hop_cause=reply.headers.get(HOP_CAUSE_HEADER, "")[:80], phases=_phases(reply, server_s),
            decode_s=perf_counter() - began,
        )  # fmt: skip

    def _cause(self, status: int) -> Cause:
        """The cause that a response status stands for: an edgesplit server answers 400 only for a malformed request."""
        return "rejected" if status == 400 else "server"

    def _is_id_optional(self, answered_id: str) -> bool:
        """Whether an answer may come without the request's id; edgesplit servers always send it."""
        return False

    def _exchange(self, http_request: HttpRequest, call: CancellableCall, timeout_s: float) -> _Reply | OffloadFailure:
        start = perf_counter()
        while True:
            left_s = timeout_s - (perf_counter() - start)
            if left_s <= 0 or call.is_cancelled or self._closed:
                return OffloadFailure("timeout", "no time left", perf_counter() - start)
            connection = self._acquire()
            reused = connection.was_used
            outcome = _exchange_once(connection, http_request, call, left_s)
            self._release(connection, call.detach() and isinstance(outcome, _Reply))
            if isinstance(outcome, _Reply) or not (reused and outcome.cause == "link"):
                return outcome

    def _acquire(self) -> _Connection:
        with self._lock:
            connection = self._idle.pop() if self._idle else _Connection(self._address, self._tls, self._name)
            self._busy.add(connection)
            return connection

    def _release(self, connection: _Connection, is_reusable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            usable = connection.is_open and not connection.is_outdated
            keep = is_reusable and usable and not self._closed and len(self._idle) < self._max_idle
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """An HTTP request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Sequence[bytes | memoryview]


def infer_path(model: str) -> str:
    """Path of a model's inference endpoint."""
    return f"/v2/models/{model}/infer"


def _exchange_once(
    connection: _Connection, http_request: HttpRequest, call: CancellableCall, timeout_s: float
) -> _Reply | OffloadFailure:
    """One exchange on one connection, which is opened first if needed."""
    start, deadline = perf_counter(), monotonic() + timeout_s
    try:
        call.attach(connection)
        if not connection.is_open:
            connection.open(min(deadline, monotonic() + CONNECT_S))
            call.attach(connection)  # it may have been cancelled while there was no socket to shut down
        begun = perf_counter()
        reply = connection.exchange(
            http_request.method, connection.prefix + http_request.path, deadline=deadline, body=http_request.body,
            headers={"accept-encoding": "identity", **http_request.headers}, reopen=False,
        )  # fmt: skip
        elapsed_s = perf_counter() - begun
        connection.was_used = True
        return _Reply(reply.status, reply.headers, reply.body, elapsed_s, sum(len(part) for part in http_request.body))
    except DeadlineExceeded:
        return OffloadFailure("timeout", f"no answer within {timeout_s:.2f} s", perf_counter() - start)
    except (LinkError, MalformedMessage, ValueError) as error:
        cause: Cause = "link" if isinstance(error, LinkError) else "server"
        text = str(error)
        if isinstance(error.__cause__, ConnectionRefusedError):
            cause = "refused"
        elif isinstance(error.__cause__, ssl.SSLCertVerificationError):
            cause, text = "server", f"the offload server's certificate is not trusted: {error.__cause__.verify_message}"
        return OffloadFailure(cause, text, perf_counter() - start)


@dataclass(frozen=True, slots=True)
class _Reply:
    """A complete HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: memoryview
    elapsed_s: float
    up_bytes: int

    def number(self, header: str, default: float) -> float:
        """The header's value if it is a number in [0, 1e6), else `default`."""
        try:
            value = float(self.headers.get(header, default))
        except ValueError:
            return default
        return value if 0.0 <= value < 1e6 else default


def _phases(reply: _Reply, server_s: float) -> Mapping[str, float]:
    """The server's phases; empty if they exceed the server's total time."""
    phases = parse_server_timing(reply.headers.get(SERVER_TIMING, ""))
    return phases if sum(phases.values()) <= server_s + CLAIM_SLACK_S else {}


def _error_text(body: memoryview) -> str:
    try:
        return str(json.loads(bytes(body[:2000]))["error"])[:200]
    except (ValueError, KeyError, TypeError):
        return bytes(body[:80]).decode("utf-8", "replace")
