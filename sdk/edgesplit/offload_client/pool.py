"""The far half of a row: one request over a persistent connection that can be dropped at any moment.

Says what came back and what it took, or why nothing did (`RemoteFailure.cause`); never raises for what a network or a
server does. Answers are checked against what the manifest promises: another model, id, tensor or shape is refused. Who
waits how long, and what happens then, is the asker's: the agent's engine, or a gateway that asks the next tier.
"""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal
from urllib.parse import urlsplit

import zstandard

from edgesplit.errors import EdgeError, UsageError
from edgesplit.limits import LIMITS
from edgesplit.observability import trace_context
from edgesplit.observability.phases import SERVER_TIMING, read_server_timing
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
"""By which rounding may make a server's phases longer than its seconds."""
IDLE_CONNECTIONS = 4
CONNECT_S = 5.0
"""For the handshakes of a new connection: a call cannot be dropped before TCP's is through."""
RESET = struct.pack("ii", 1, 0)
"""Of SO_LINGER: closing throws away what is not sent yet, and tells the other side at once."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request sends and what must come back."""

    name: str
    """The server's model: `oip.remote_name` of release, device class and row."""
    id: str
    tensors: Mapping[str, Tensor]
    receives: tuple[TensorSpec, ...]
    body: Sequence[bytes | memoryview]
    header_length: int
    coding: Coding = ""
    """Of the body."""
    planned_s: float = 0.0
    """What the server should take, by the plan: believed where it does not say."""

    @property
    def up_bytes(self) -> int:
        """Of the body as it travels."""
        return sum(len(part) for part in self.body)


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """What came back in time to be looked at."""

    outputs: Mapping[str, Tensor]
    elapsed_s: float
    """From the first byte sent to the last received, on a connection that was open."""
    server_s: float
    load: float
    up_bytes: int
    down_bytes: int
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase of `server_s`, as the server tells them (`edgesplit.observability.phases.SERVER_PHASES`)."""
    decode_s: float = 0.0
    """Making tensors of what came, after `elapsed_s`."""
    hop_s: float = 0.0
    """Of `server_s`: what a gateway waited for the tier beyond it, their link included."""
    hop_server_s: float = 0.0
    """Of `hop_s`: in that tier's server."""
    hop_cause: str = ""
    """Why a gateway did not get that tier's help, and finished itself."""

    @property
    def link_s(self) -> float:
        """What the link took of it."""
        return max(0.0, self.elapsed_s - self.server_s)


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """Why nothing usable came back."""

    cause: Cause
    text: str
    elapsed_s: float = 0.0
    status: int = 0
    """HTTP's, where there was an answer."""


Outcome = RemoteAnswer | RemoteFailure


@dataclass(frozen=True, slots=True)
class Relayed:
    """A response as it came, for somebody else to judge."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    elapsed_s: float
    server_s: float


def ask(
    name: str,
    request_id: str,
    tensors: Mapping[str, Tensor],
    receives: tuple[TensorSpec, ...],
    *,
    left_s: float,
    coding: Coding = "",
    planned_s: float = 0.0,
) -> Ask:
    """The request's body, encoded and, where the row says so, compressed. After `left_s` nobody wants the answer."""
    request = oip.InferRequest(
        inputs=dict(tensors),
        outputs=tuple(spec.name for spec in receives),
        id=request_id,
        parameters={"timeout": max(1, int(left_s * 1e6))},
    )
    body, header_length = oip.encode_request(request)
    if coding:
        body = [_PACK[coding](b"".join(body))]
    return Ask(name, request_id, tensors, receives, body, header_length, coding, planned_s)


_PACK: Mapping[str, Callable[[bytes], bytes]] = {
    "zstd": lambda body: zstandard.ZstdCompressor(level=1).compress(body),
    "gzip": lambda body: gzip.compress(body, compresslevel=1, mtime=0),
}


@dataclass(eq=False)
class Call:
    """One request in flight. `drop` may be called from any thread, at any time, more than once."""

    dropped: bool = False
    _connection: _Connection | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, connection: _Connection) -> None:
        """The request travels on this connection from now on."""
        with self._lock:
            self._connection = connection
            if self.dropped:
                connection.abort()

    def off(self) -> bool:
        """It is on no connection any more. False where it was dropped: then what it travelled on is no use."""
        with self._lock:
            self._connection = None
            return not self.dropped

    def drop(self) -> None:
        """Nobody waits any more: close the connection under it, so that the server and the link are free."""
        with self._lock:
            self.dropped = True
            if self._connection is not None:
                self._connection.abort()


class _Connection(http.client.HTTPConnection):
    """HTTP over TCP or TLS; the certificate must carry the name of the server asked for, wherever a proxy sits."""

    def __init__(
        self, address: tuple[str, int], tls: ssl.SSLContext | None, name: str, path: str, timeout_s: float
    ) -> None:
        super().__init__(address[0], address[1], timeout=timeout_s)
        self.path = path
        """Before that of every request."""
        self._tls = tls
        self._name = name
        self.used = False
        self.outdated = False
        """It was opened with a certificate that we have replaced since."""

    def connect(self) -> None:
        super().connect()
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)

    def set_timeout(self, seconds: float) -> None:
        """For every further send and receive."""
        self.timeout = seconds
        if self.sock is not None:
            self.sock.settimeout(seconds)

    def abort(self) -> None:
        """Wake whoever waits on this connection, with an error. What of the request is not under way yet stays here: a
        goodbye would be sent only behind all of it."""
        if self.sock is not None:
            try:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
            except OSError:
                return


class Remote:
    """A pool of connections to one offload server."""

    def __init__(
        self,
        url: str,
        tls: ssl.SSLContext | None = None,
        *,
        via: tuple[str, int] | None = None,
        idle: int = IDLE_CONNECTIONS,
    ) -> None:
        """`via`: connect there instead (a shaped link in front of the server), but still expect the server's name.
        `idle` connections are kept open."""
        self._own_tls = tls
        self._most_idle = idle
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False
        self._point_at(url, via)

    def _point_at(self, url: str, via: tuple[str, int] | None) -> None:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"not the address of an offload server: {url[:200]!r}")
        self.url = parts.geturl()
        self._path = parts.path.rstrip("/")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self._name = parts.hostname
        self._address = via or (parts.hostname, port)
        self._tls = self._own_tls if parts.scheme == "https" else None

    def lead_to(self, url: str, via: tuple[str, int] | None = None) -> None:
        """Ask that server from now on; requests in flight are finished where they are."""
        with self._lock:
            self._point_at(url, via)
        self.renew()

    @property
    def is_closed(self) -> bool:
        """`close` was called: it is of no use any more."""
        return self._closed

    @property
    def is_warm(self) -> bool:
        """A connection is open and free: the next request pays no handshake."""
        return bool(self._idle)

    def infer(self, asked: Ask, call: Call, timeout_s: float) -> Outcome:
        """Send it and wait; the answer is checked. A connection that went stale while idle is replaced once."""
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(asked.up_bytes),
            oip.HEADER_LENGTH: str(asked.header_length),
        }
        if asked.coding:
            headers["content-encoding"] = asked.coding
        wish = Wish("POST", infer_path(asked.name), headers | trace_context.outgoing(), asked.body)
        return self._asked(asked, wish, call, timeout_s)

    def _asked(self, asked: Ask, wish: Wish, call: Call, timeout_s: float) -> Outcome:
        outcome = self._exchange(wish, call, timeout_s)
        return outcome if isinstance(outcome, RemoteFailure) else self._judged(asked, outcome)

    def relay(
        self, path: str, headers: Mapping[str, str], body: Body, call: Call, timeout_s: float
    ) -> Relayed | RemoteFailure:
        """Hand somebody else's request on as it is; nothing of it or of the answer is looked at."""
        sent = {"content-length": str(len(body)), **headers, **trace_context.outgoing()}
        outcome = self._exchange(Wish("POST", path, sent, [memoryview(body)]), call, timeout_s)
        if isinstance(outcome, RemoteFailure):
            return outcome
        server_s = min(outcome.number(SECONDS_HEADER, 0.0), outcome.elapsed_s)
        return Relayed(outcome.status, outcome.headers, outcome.body, outcome.elapsed_s, server_s)

    def warm(self, timeout_s: float) -> None:
        """See that a connection is open, so that the next request pays no handshake; nothing is sent on it. A server
        that cannot be reached is the next request's to find out."""
        if self._idle or self._closed:
            return
        connection = self._take(timeout_s)
        reached = False
        try:
            if connection.sock is None:
                connection.set_timeout(timeout_s)
                connection.connect()
            reached = True
        except (OSError, ValueError) as error:
            log.debug("no connection ahead of the next request: %s", error)
        finally:
            self._give(connection, reached)

    def ping(self, timeout_s: float) -> float | RemoteFailure:
        """Seconds of the smallest exchange there is, the server's own time taken off."""
        outcome = self._exchange(Wish("GET", HEALTH, {}, ()), Call(), timeout_s)
        if isinstance(outcome, RemoteFailure):
            return outcome
        if outcome.status != 200:
            return RemoteFailure("server", f"health says {outcome.status}", outcome.elapsed_s)
        return max(0.0, outcome.elapsed_s - outcome.number(SECONDS_HEADER, 0.0))

    def probe(self, timeout_s: float) -> RemoteAnswer | RemoteFailure:
        """What the link does with a body large enough to tell its rate."""
        headers = {"content-length": str(PROBE_BYTES), "content-type": "application/octet-stream"}
        wish = Wish("POST", "/v2/edgesplit/probe", headers, [os.urandom(PROBE_BYTES)])
        outcome = self._exchange(wish, Call(), timeout_s)
        if isinstance(outcome, RemoteFailure):
            return outcome
        if outcome.status != 200:
            return RemoteFailure("server", f"the probe was answered {outcome.status}", outcome.elapsed_s)
        return RemoteAnswer(
            {}, outcome.elapsed_s, outcome.number(SECONDS_HEADER, 0.0), 1.0, PROBE_BYTES, len(outcome.body)
        )

    def renew(self) -> None:
        """Open connections anew from now on, for our certificate has changed; requests in flight are finished."""
        with self._lock:
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.outdated = True
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

    def _judged(self, asked: Ask, reply: _Reply) -> Outcome:
        """The answer, if it is one to what was asked."""
        if reply.status != 200:
            text = f"{reply.status}: {_error_text(reply.body)}"
            return RemoteFailure(self._cause(reply.status), text, reply.elapsed_s, reply.status)
        if len(reply.body) > LIMITS.http_body_bytes:
            return RemoteFailure("server", "the answer is larger than any may be", reply.elapsed_s)
        began = perf_counter()
        try:
            response = oip.decode_response(reply.body, oip.header_length(reply.headers))
            if response.model != asked.name:
                raise UsageError(f"an answer of {response.model[:80]!r}, asked was {asked.name!r}")
            if response.id != asked.id and not self._may_lack(response.id):
                raise UsageError(f"an answer to {response.id[:80]!r}, asked was {asked.id!r}")
            oip.check_tensors(response.outputs, asked.receives)
        except EdgeError as error:
            return RemoteFailure("server", f"refused: {error}", reply.elapsed_s)
        server_s = min(reply.number(SECONDS_HEADER, asked.planned_s), reply.elapsed_s)
        load = max(1.0, reply.number(LOAD_HEADER, 1.0))
        hop_s = min(reply.number(HOP_HEADER, 0.0), server_s)
        return RemoteAnswer(
            response.outputs,
            reply.elapsed_s,
            server_s,
            load,
            reply.up_bytes,
            len(reply.body),
            hop_s=hop_s,
            hop_server_s=min(reply.number(HOP_SERVER_HEADER, 0.0), hop_s),
            hop_cause=reply.headers.get(HOP_CAUSE_HEADER, "")[:80],
            phases=_phases(reply, server_s),
            decode_s=perf_counter() - began,
        )

    def _cause(self, status: int) -> Cause:
        """What an answer of this status means: ours says 400 to what it was given, and to nothing else."""
        return "rejected" if status == 400 else "server"

    def _may_lack(self, answered_id: str) -> bool:
        """Ours always says which request it answers."""
        return False

    def _exchange(self, wish: Wish, call: Call, timeout_s: float) -> _Reply | RemoteFailure:
        start = perf_counter()
        while True:
            left_s = timeout_s - (perf_counter() - start)
            if left_s <= 0 or call.dropped or self._closed:
                return RemoteFailure("timeout", "no time left", perf_counter() - start)
            connection = self._take(left_s)
            reused = connection.used
            outcome = _try(connection, wish, call, left_s)
            self._give(connection, call.off() and isinstance(outcome, _Reply))
            if isinstance(outcome, _Reply) or not (reused and outcome.cause == "link"):
                return outcome

    def _take(self, timeout_s: float) -> _Connection:
        with self._lock:
            connection = (
                self._idle.pop()
                if self._idle
                else _Connection(self._address, self._tls, self._name, self._path, timeout_s)
            )
            self._busy.add(connection)
            return connection

    def _give(self, connection: _Connection, good: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            usable = connection.sock is not None and not connection.outdated
            keep = good and usable and not self._closed and len(self._idle) < self._most_idle
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()


@dataclass(frozen=True, slots=True)
class Wish:
    """An HTTP request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Sequence[bytes | memoryview]


def infer_path(model: str) -> str:
    """Where a model is asked."""
    return f"/v2/models/{model}/infer"


def _try(connection: _Connection, wish: Wish, call: Call, timeout_s: float) -> _Reply | RemoteFailure:
    """One exchange on one connection, opened first if it is not."""
    start = perf_counter()
    try:
        call.on(connection)
        if connection.sock is None:
            connection.set_timeout(min(timeout_s, CONNECT_S))
            connection.connect()
            call.on(connection)  # it may have been dropped before there was a socket to shut
        connection.set_timeout(max(0.001, timeout_s - (perf_counter() - start)))
        begun = perf_counter()
        connection.request(wish.method, connection.path + wish.path, body=wish.body or None, headers=dict(wish.headers))
        response = connection.getresponse()
        data = response.read(LIMITS.http_body_bytes + 1)
        elapsed_s = perf_counter() - begun
        connection.used = True
        headers = {name.lower(): value for name, value in response.getheaders()}
        return _Reply(response.status, headers, data, elapsed_s, sum(len(part) for part in wish.body))
    except ConnectionRefusedError as error:
        return RemoteFailure("refused", str(error), perf_counter() - start)
    except TimeoutError:
        return RemoteFailure("timeout", f"no answer within {timeout_s:.2f} s", perf_counter() - start)
    except ssl.SSLCertVerificationError as error:
        return RemoteFailure("server", f"not our offload server: {error.verify_message}", perf_counter() - start)
    except ValueError as error:  # http.client reads a chunk of negative length as it is told
        return RemoteFailure("server", f"no HTTP response: {error}", perf_counter() - start)
    except (OSError, http.client.HTTPException) as error:
        return RemoteFailure("link", f"{type(error).__name__}: {error}", perf_counter() - start)


@dataclass(frozen=True, slots=True)
class _Reply:
    """An HTTP response, whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    elapsed_s: float
    up_bytes: int

    def number(self, header: str, default: float) -> float:
        """A header's value where it is a sane number."""
        try:
            value = float(self.headers.get(header, default))
        except ValueError:
            return default
        return value if 0.0 <= value < 1e6 else default


def _phases(reply: _Reply, server_s: float) -> Mapping[str, float]:
    """What the server says it did in its seconds; nothing where it claims more than they are."""
    told = read_server_timing(reply.headers.get(SERVER_TIMING, ""))
    return told if sum(told.values()) <= server_s + CLAIM_SLACK_S else {}


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body[:2000])["error"])[:200]
    except (ValueError, KeyError, TypeError):
        return body[:80].decode("utf-8", "replace")
