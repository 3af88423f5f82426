"""One look at a part, by a process that has to do with it: good or bad, and in words why."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, Protocol
from urllib.parse import urlsplit

State = Literal["good", "bad"]
PATIENCE_S = 3.0
READY = "/v2/health/ready"


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look found."""

    name: str
    state: State
    text: str


Look = Callable[[], Seen]


class Connected(Protocol):
    """A session at a broker, as far as a look needs it."""

    @property
    def connected(self) -> bool:
        """Is it?"""
        ...

    problem: str
    """Why it is not."""


class Supervised(Protocol):
    """A child that is started again when it dies."""

    restarts: int


def broker_look(session: Connected, where: str, own: Supervised | None = None) -> Look:
    """At the broker, by our own session there; `own` where it is a child of ours."""
    whose = "our own mosquitto" if own is not None else f"the broker {where}"

    def look() -> Seen:
        if not session.connected:
            return Seen("broker", "bad", f"{whose} does not let us in: {session.problem or 'it does not answer'}")
        return Seen("broker", "good", f"connected to {whose}{_restarted(own)}")

    return look


def offload_look(url: str, tls: ssl.SSLContext, own: Supervised | None = None) -> Look:
    """At the offload server, by asking it whether it is ready, as a device would."""

    def look() -> Seen:
        try:
            status, seconds = _asked(url, tls)
        except (OSError, http.client.HTTPException) as error:
            late = f"nothing came within {PATIENCE_S:g} s" if isinstance(error, TimeoutError) else ""
            why = late or getattr(error, "strerror", None) or str(error) or type(error).__name__
            return Seen("offload server", "bad", f"{url} does not answer: {why}{_restarted(own)}")
        if status != 200:
            return Seen("offload server", "bad", f"{url} is not ready (status {status}){_restarted(own)}")
        return Seen("offload server", "good", f"{url} is ready, in {_spelt(seconds)}{_restarted(own)}")

    return look


def _asked(url: str, tls: ssl.SSLContext) -> tuple[int, float]:
    """Status and seconds of one question."""
    place = urlsplit(url)
    began = perf_counter()
    connection = http.client.HTTPSConnection(
        place.hostname or "", place.port or 443, timeout=PATIENCE_S, context=tls
    )  # fmt: skip
    with closing(connection):
        connection.request("GET", f"{place.path.rstrip('/')}{READY}")
        answer = connection.getresponse()
        answer.read(1_000)
        return answer.status, perf_counter() - began


def _restarted(own: Supervised | None) -> str:
    if own is None or not own.restarts:
        return ""
    return f"; started again {own.restarts} time{'s' * (own.restarts != 1)} since `edgectl up`"


def _spelt(seconds: float) -> str:
    """To two digits: a text that changes with every look would be a change with every look."""
    return "less than 10 ms" if seconds < 0.01 else "less than 0.1 s" if seconds < 0.1 else f"{seconds:.1f} s"
