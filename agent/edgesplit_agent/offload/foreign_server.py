"""Servers that are not ours, as far halves are asked there: any that speaks the Open Inference Protocol over HTTP.

Which one a release uses its signed plan says. What differs from our own server: no certificate of ours is shown, TLS is
checked by the system's authorities or a given one; request ids need not be echoed (another's is refused all the same);
nobody tells the seconds spent there, so the plan's are believed; a server that takes no binary tensors is asked in JSON
from then on; and every refusal is the server's, because what is sent was computed here and checked.
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
from edgesplit.msgspec_warmup import settle
from edgesplit.offload_client.pool import (
    HEALTH,
    PROBE_BYTES,
    Ask,
    Call,
    Cause,
    Coding,
    Outcome,
    Remote,
    RemoteAnswer,
    RemoteFailure,
    Wish,
    infer_path,
)
from edgesplit.oip import protocol as oip
from edgesplit.plan import Link, Plan, Row
from edgesplit_agent.releases.loaded_release import ActiveRelease

if TYPE_CHECKING:
    from edgesplit.link_emulation import ShapedLink


log = logging.getLogger(__name__)

PROBE_EVERY_S = 60.0
"""A foreign server has no place for probes: what it is sent instead is refused, and may be written to its log."""
NOT_UNDERSTOOD = (400, 415, 422, 500)
"""What servers say that cannot read binary tensors; MLServer says 500."""
BINARY = "binary_tensor_data"
"""The extension, as servers name it that list what they have."""
PROBED_MODEL = "edgesplit-link-probe"


def coding_of(row: Row, plan: Plan) -> Coding:
    """How the body of the row's request is compressed: by zstd for our server, by gzip for Triton."""
    if not row.compress:
        return ""
    return "gzip" if plan.offload else "zstd"


@dataclass(frozen=True, kw_only=True)
class Trust:
    """How foreign servers are met over TLS; all None: by the system's authorities, without a certificate."""

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """UsageError names the file that is no use."""
        if (self.certificate_file is None) != (self.key_file is None):
            raise UsageError("--foreign-cert and --foreign-key go together")
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except OSError as error:  # ssl.SSLError is one
            shown = ", ".join(str(one) for one in (self.ca_file, self.certificate_file, self.key_file) if one)
            raise UsageError(f"cannot meet foreign servers by {shown}: {error}") from error
        return context


class ForeignRemote(Remote):
    """A pool of connections to one such server."""

    def __init__(
        self, server: ForeignServer, tls: ssl.SSLContext | None = None, *, via: tuple[str, int] | None = None
    ) -> None:
        super().__init__(server.url, tls, via=via)
        self._json: bool | None = None
        """Whether it wants tensors in JSON; None while nobody knows."""
        self._probed_at = float("-inf")

    def infer(self, asked: Ask, call: Call, timeout_s: float) -> Outcome:
        """As `Remote.infer`. Where a first request is refused, it is asked once more in JSON."""
        start = perf_counter()
        if not self._json:
            outcome = super().infer(asked, call, timeout_s)
            refused = isinstance(outcome, RemoteFailure) and outcome.status in NOT_UNDERSTOOD
            understood = isinstance(outcome, RemoteAnswer) or (
                refused and self._json is None and self._lists_binary(timeout_s)
            )
            if understood and self._json is None:
                self._json = False
            if self._json is False or not refused:
                return outcome
        left_s = timeout_s - (perf_counter() - start)
        body = oip.encode_json_request(
            oip.InferRequest(asked.tensors, tuple(spec.name for spec in asked.receives), asked.id)
        )
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        answer = self._asked(asked, Wish("POST", infer_path(asked.name), headers, [body]), call, left_s)
        if isinstance(answer, RemoteAnswer) and self._json is None:
            log.warning("%s takes no binary tensors: it is asked in JSON, which is several times as long", self.url)
            self._json = True
        return answer

    def ping(self, timeout_s: float) -> float | RemoteFailure:
        """Seconds of the smallest exchange there is. Whoever answers lives, whatever it says of its health."""
        outcome = self._exchange(Wish("GET", HEALTH, {}, ()), Call(), timeout_s)
        if isinstance(outcome, RemoteFailure):
            return outcome
        if outcome.status >= 500:
            return RemoteFailure("server", f"health says {outcome.status}", outcome.elapsed_s, outcome.status)
        return outcome.elapsed_s

    def probe(self, timeout_s: float) -> RemoteAnswer | RemoteFailure:
        """What the link does with a body large enough to tell its rate: a request for a model that is not there. Seldom
        sent; in between, nothing is learnt."""
        if monotonic() - self._probed_at < PROBE_EVERY_S:
            return RemoteFailure("rejected", "a foreign server is probed seldom")
        self._probed_at = monotonic()
        body = msgspec.json.encode({"id": "probe", "inputs": [_PROBE]})
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        outcome = self._exchange(Wish("POST", infer_path(PROBED_MODEL), headers, [body]), Call(), timeout_s)
        if isinstance(outcome, RemoteFailure):
            return outcome
        return RemoteAnswer({}, outcome.elapsed_s, 0.0, 1.0, len(body), len(outcome.body))

    def _lists_binary(self, timeout_s: float) -> bool:
        """Does the server say of itself that it takes binary tensors? Triton does: then a refusal is about the rest."""
        outcome = self._exchange(Wish("GET", "/v2", {}, ()), Call(), timeout_s)
        if isinstance(outcome, RemoteFailure) or outcome.status != 200:
            return False
        try:
            return BINARY in msgspec.json.decode(outcome.body, type=_About).extensions
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False

    def _cause(self, status: int) -> Cause:
        """Triton says 400 of much, by its version also of a model that it has not."""
        return "server"

    def _may_lack(self, answered_id: str) -> bool:
        """One connection carries one request at a time, so an answer without an id is still this request's."""
        return not answered_id


class _About(msgspec.Struct):
    """What a server says of itself, as far as it is asked."""

    extensions: list[str] = []


_PROBE = {"name": "x", "datatype": "UINT8", "shape": [PROBE_BYTES // 2], "data": [0] * (PROBE_BYTES // 2)}


class ForeignServers:
    """The connections to every foreign server that a release here names; kept while they are in use."""

    def __init__(self, trust: Trust, link: Link | None = None) -> None:
        """`link`: emulate such a link to each of them."""
        self._trust = trust
        self._link = link
        self._lock = threading.Lock()
        self._remotes: dict[str, Remote] = {}
        self._shaped: dict[str, ShapedLink] = {}

    def of(self, release: ActiveRelease) -> Remote | None:
        """That of the release's plan; None where the device's own server finishes it."""
        return self.at(release.plan.offload) if release.plan.offload else None

    def at(self, address: str) -> Remote:
        """Connections to that server, shared by all who ask for it."""
        with self._lock:
            remote = self._remotes.get(address)
            if remote is None or remote.is_closed:
                remote = self._remotes[address] = self._make(address)
            return remote

    def stop(self) -> None:
        """Close what is open."""
        with self._lock:
            for remote in self._remotes.values():
                remote.close()
            for link in self._shaped.values():
                link.stop()

    def _make(self, address: str) -> Remote:
        server = ForeignServer.parse(address)
        if not server.tls:
            log.warning("%s is not TLS: whoever is on the way may read, and answer in its place", address)
        tls = self._trust.context() if server.tls else None
        if self._link is None:
            return ForeignRemote(server, tls)
        if address not in self._shaped:
            from edgesplit.link_emulation import ShapedLink

            self._shaped[address] = ShapedLink(server.host, server.port, self._link)
            self._shaped[address].start()
            log.warning("the link to %s is emulated", address)
        return ForeignRemote(server, tls, via=("127.0.0.1", self._shaped[address].port))


settle(__name__)
