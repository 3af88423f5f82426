"""Probes of components: each returns good or bad, and the reason in words."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Literal, Protocol
from urllib.parse import urlsplit

from edgesplit.errors import EdgeError, LinkError

State = Literal["good", "bad", "unknown"]
PROBE_TIMEOUT_S = 3.0
"""Timeout of a probe, in seconds."""
STORE_INTERVAL_S = 60.0
"""Seconds between two requests to an object store that answers."""
READY_PATH = "/v2/health/ready"
"""Path of the offload server's readiness check."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe."""

    name: str
    state: State
    text: str
    event: str = ""
    """Action of the event that is recorded when the component becomes bad; empty: none."""


Probe = Callable[[], ProbeResult | None]
"""A probe of one component; may block for `PROBE_TIMEOUT_S`. None: nothing new is known."""


class BrokerSession(Protocol):
    """The part of an MQTT session that a probe reads."""

    @property
    def connected(self) -> bool:
        """Whether the session is connected."""
        ...

    problem: str
    """Why the session is not connected."""


class Supervised(Protocol):
    """A child process that is restarted when it dies."""

    restarts: int


def broker_probe(session: BrokerSession, where: str, own: Supervised | None = None) -> Probe:
    """Probe of the broker by this process's own MQTT session; `own` is the child process if the controller runs the
    broker."""
    whose = "our own mosquitto" if own is not None else f"the broker {where}"

    def probe() -> ProbeResult:
        if not session.connected:
            problem = session.problem or "it does not answer"
            return ProbeResult("broker", "bad", f"{whose} refuses the connection: {problem}")
        return ProbeResult("broker", "good", f"connected to {whose}{_restarts_text(own)}")

    return probe


def offload_probe(url: str, tls: ssl.SSLContext, own: Supervised | None = None) -> Probe:
    """Probe of the offload server by its readiness check, over TLS as a device calls it; `own` is the child process if
    the controller runs the server."""

    def probe() -> ProbeResult:
        try:
            status, _, seconds = get(url, READY_PATH, tls)
        except LinkError as error:
            return ProbeResult("offload server", "bad", f"{url} does not answer: {error}{_restarts_text(own)}")
        if status != 200:
            return ProbeResult("offload server", "bad", f"{url} is not ready (status {status}){_restarts_text(own)}")
        text = f"{url} is ready, in {_duration_text(seconds)}{_restarts_text(own)}"
        return ProbeResult("offload server", "good", text)

    return probe


def blobs_probe(check: Callable[[], str], now: Callable[[], float] = monotonic) -> Probe:
    """Probe of the object store with models and chunks. While it answers it is asked every `STORE_INTERVAL_S` only,
    because stores charge for requests."""
    result, next_s = ProbeResult("object store", "bad", "not checked yet"), 0.0

    def probe() -> ProbeResult:
        nonlocal result, next_s
        if result.state == "bad" or now() >= next_s:
            try:
                result = ProbeResult("object store", "good", f"{check()} answers")
            except EdgeError as error:
                result = ProbeResult("object store", "bad", str(error))
            next_s = now() + STORE_INTERVAL_S
        return result

    return probe


def get(url: str, path: str, tls: ssl.SSLContext, max_bytes: int = 1_000) -> tuple[int, bytes, float]:
    """HTTP status, body (`max_bytes` at most) and duration in seconds of a request; LinkError without an
    answer."""
    parts = urlsplit(url)
    started_s = perf_counter()
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port or 443, timeout=PROBE_TIMEOUT_S, context=tls
    )  # fmt: skip
    try:
        with closing(connection):
            connection.request("GET", f"{parts.path.rstrip('/')}{path}")
            response = connection.getresponse()
            return response.status, response.read(max_bytes), perf_counter() - started_s
    except (OSError, http.client.HTTPException) as error:
        timeout_text = f"no answer within {PROBE_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else ""
        reason = timeout_text or getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise LinkError(reason) from error


def _restarts_text(own: Supervised | None) -> str:
    if own is None or not own.restarts:
        return ""
    return f"; started again {own.restarts} time{'s' * (own.restarts != 1)} since `edgectl up`"


def _duration_text(seconds: float) -> str:
    """The duration in coarse steps: a text that differed at every probe would be written to the database at every
    probe."""
    return "less than 10 ms" if seconds < 0.01 else "less than 0.1 s" if seconds < 0.1 else f"{seconds:.1f} s"
