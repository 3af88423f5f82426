"""Foreign servers as offload targets: servers of other operators that speak the Open Inference Protocol over HTTP.

The release's signed plan names the server. Differences from an edgesplit offload server:

- No device certificate is presented; TLS is verified by the system's authorities or a configured one.
- Request ids need not be echoed (an answer with another id is refused all the same).
- The server does not report its own seconds, so the plan's figures are used.
- A server without binary tensors is sent JSON from then on.
- Every refusal counts as a server error, because the request was computed and checked by the agent.
"""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import msgspec

from edgesplit.errors import UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.offload_client.pool import (
    HEALTH,
    PROBE_BYTES,
    CancellableCall,
    Cause,
    Coding,
    HttpRequest,
    OffloadAnswer,
    OffloadClient,
    OffloadFailure,
    OffloadRequest,
    OffloadResult,
    infer_path,
)
from edgesplit.oip import protocol as oip
from edgesplit.plan import Link, Plan, Row
from edgesplit_agent.releases.loaded_release import LoadedRelease

if TYPE_CHECKING:
    from edgesplit.link_emulation import ShapedLink


log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 60.0
"""Minimum seconds between two probes: the substitute for a probe is refused by the server and may be written to its
log."""
NOT_UNDERSTOOD = (400, 415, 422, 500)
"""HTTP statuses of servers that cannot read binary tensors; MLServer answers 500."""
BINARY_EXTENSION = "binary_tensor_data"
"""Name of the binary tensor extension in a server's metadata."""
PROBE_MODEL = "edgesplit-link-probe"
"""Name of a model that no server has, used to measure the link."""


def coding_of(row: Row, plan: Plan) -> Coding:
    """Compression of the row's request body: zstd for an edgesplit server, gzip for Triton, empty for none."""
    if not row.compress:
        return ""
    return "gzip" if plan.offload else "zstd"


@dataclass(frozen=True, kw_only=True)
class ForeignTls:
    """TLS settings for foreign servers; all None: the system's authorities and no client certificate."""

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """The TLS context. UsageError names a file that cannot be used."""
        if (self.certificate_file is None) != (self.key_file is None):
            raise UsageError("--foreign-cert and --foreign-key go together")
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(str(file) for file in (self.ca_file, self.certificate_file, self.key_file) if file)
            raise UsageError(f"cannot set up TLS to foreign servers with {files}: {error}") from error
        return context


class ForeignOffloadClient(OffloadClient):
    """Connection pool to one foreign server."""

    def __init__(
        self, server: ForeignServer, tls: ssl.SSLContext | None = None, *, via: tuple[str, int] | None = None
    ) -> None:
        super().__init__(server.url, tls, via=via)
        self._needs_json: bool | None = None
        """Whether the server needs tensors as JSON; None until an answer shows it."""
        self._probed_at = float("-inf")

    def infer(self, request: OffloadRequest, call: CancellableCall, timeout_s: float) -> OffloadResult:
        """Send one request; a first request that the server refuses is sent once more as JSON. See
        `OffloadClient.infer`."""
        start = perf_counter()
        if not self._needs_json:
            outcome = super().infer(request, call, timeout_s)
            refused = isinstance(outcome, OffloadFailure) and outcome.status in NOT_UNDERSTOOD
            understood = isinstance(outcome, OffloadAnswer) or (
                refused and self._needs_json is None and self._lists_binary(timeout_s)
            )
            # An answer, or metadata that lists the extension, settles that binary tensors are understood.
            if understood and self._needs_json is None:
                self._needs_json = False
            if self._needs_json is False or not refused:
                return outcome
        left_s = timeout_s - (perf_counter() - start)
        body = oip.encode_json_request(
            oip.InferRequest(request.tensors, tuple(spec.name for spec in request.receives), request.id)
        )
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        answer = self._exchange_checked(
            request, HttpRequest("POST", infer_path(request.name), headers, [body]), call, left_s
        )
        if isinstance(answer, OffloadAnswer) and self._needs_json is None:
            log.warning(
                "%s does not support binary tensors: requests are sent as JSON, several times as long", self.url
            )
            self._needs_json = True
        return answer

    def ping(self, timeout_s: float) -> float | OffloadFailure:
        """Seconds of the smallest exchange. Any answer below status 500 counts as alive, whatever it reports about its
        health."""
        outcome = self._exchange(HttpRequest("GET", HEALTH, {}, ()), CancellableCall(), timeout_s)
        if isinstance(outcome, OffloadFailure):
            return outcome
        if outcome.status >= 500:
            return OffloadFailure(
                "server", f"the health check was answered {outcome.status}", outcome.elapsed_s, outcome.status
            )
        return outcome.elapsed_s

    def probe(self, timeout_s: float) -> OffloadAnswer | OffloadFailure:
        """Measure the link with a body large enough to determine its rate: a request for a model that does not exist.

        At most once per `PROBE_INTERVAL_S`; in between the result is a failure of cause `rejected`, from which nothing
        is learnt.
        """
        if monotonic() - self._probed_at < PROBE_INTERVAL_S:
            return OffloadFailure("rejected", "probes of a foreign server are rate-limited")
        self._probed_at = monotonic()
        body = msgspec.json.encode({"id": "probe", "inputs": [_PROBE_TENSOR]})
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        outcome = self._exchange(
            HttpRequest("POST", infer_path(PROBE_MODEL), headers, [body]), CancellableCall(), timeout_s
        )
        if isinstance(outcome, OffloadFailure):
            return outcome
        return OffloadAnswer({}, outcome.elapsed_s, 0.0, 1.0, len(body), len(outcome.body))

    def _lists_binary(self, timeout_s: float) -> bool:
        """Whether the server's metadata lists binary tensors, as Triton's does: then a refusal has another reason."""
        outcome = self._exchange(HttpRequest("GET", "/v2", {}, ()), CancellableCall(), timeout_s)
        if isinstance(outcome, OffloadFailure) or outcome.status != 200:
            return False
        try:
            return BINARY_EXTENSION in msgspec.json.decode(outcome.body, type=_ServerMetadata).extensions
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False

    def _cause(self, status: int) -> Cause:
        """Every refusal is the server's: Triton answers 400 to many errors, in some versions also for an unknown
        model."""
        return "server"

    def _is_id_optional(self, answered_id: str) -> bool:
        """An answer without an id is accepted: one connection carries one request at a time."""
        return not answered_id


class _ServerMetadata(msgspec.Struct):
    """The part of a server's metadata that is read."""

    extensions: list[str] = []


_PROBE_TENSOR = {"name": "x", "datatype": "UINT8", "shape": [PROBE_BYTES // 2], "data": [0] * (PROBE_BYTES // 2)}


class ForeignServers:
    """Connection pools to all foreign servers named by the releases served; kept while in use. Thread-safe."""

    def __init__(self, trust: ForeignTls, link: Link | None = None) -> None:
        """`link`: emulate this link to each server."""
        self._trust = trust
        self._link = link
        self._lock = threading.Lock()
        self._clients: dict[str, OffloadClient] = {}
        self._shaped: dict[str, ShapedLink] = {}

    def for_release(self, release: LoadedRelease) -> OffloadClient | None:
        """The pool for the release's server; None where the device's own offload target is used."""
        return self.client_for(release.plan.offload) if release.plan.offload else None

    def client_for(self, address: str) -> OffloadClient:
        """The pool for the server at `address`, shared by all callers."""
        with self._lock:
            remote = self._clients.get(address)
            if remote is None or remote.is_closed:
                remote = self._clients[address] = self._connect(address)
            return remote

    def stop(self) -> None:
        """Close all connections and emulated links."""
        with self._lock:
            for remote in self._clients.values():
                remote.close()
            for link in self._shaped.values():
                link.stop()

    def _connect(self, address: str) -> OffloadClient:
        server = ForeignServer.parse(address)
        if not server.tls:
            log.warning("%s does not use TLS: anyone on the network path can read requests and forge answers", address)
        tls = self._trust.context() if server.tls else None
        if self._link is None:
            return ForeignOffloadClient(server, tls)
        if address not in self._shaped:
            from edgesplit.link_emulation import ShapedLink

            self._shaped[address] = ShapedLink(server.host, server.port, self._link)
            self._shaped[address].start()
            log.warning("the link to %s is emulated", address)
        return ForeignOffloadClient(server, tls, via=("127.0.0.1", self._shaped[address].port))


warm_up_structs(__name__)
