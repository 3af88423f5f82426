"""Where one request's time went: phases with their begin and end, one after the other or side by side.

The same on every tier, so that one thing feeds histograms, spans, reports and the `Server-Timing` header (W3C) by
which a server tells its client of the phases it had. Times are of `perf_counter`; they leave a process as durations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

SERVER_TIMING = "server-timing"
"""The response header with a server's phases."""
LONGEST_HEADER = 512
LONGEST_S = 1e5
_ENTRY = re.compile(r"\s*([a-z_]{1,24});dur=(\d{1,9}(?:\.\d{1,9})?)\s*")

QUEUE, DECODE, LOAD, RUN, HOP, ENCODE = "queue", "decode", "load", "run", "hop", "encode"
SERVER_PHASES = (QUEUE, DECODE, LOAD, RUN, HOP, ENCODE)
"""What an offload server does with a request; `load` is a model's first, or first after its eviction; `hop` a gateway's
wait for the next tier."""


class Phase(NamedTuple):
    """One stretch of a request."""

    name: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


@dataclass(slots=True)
class Timeline:
    """The phases of one request so far, in the order in which they ended. Appending is safe from any thread."""

    began: float = field(default_factory=perf_counter)
    phases: list[Phase] = field(default_factory=list)

    def add(self, name: str, began: float, ended: float) -> None:
        """A phase is over. One that ended before it began took no time."""
        self.phases.append(Phase(name, began, ended if ended > began else began))

    def since(self, name: str, began: float) -> float:
        """What began then was this phase, and it is over; the moment that it is now."""
        now = perf_counter()
        self.add(name, began, now)
        return now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is this phase, also where it fails."""
        began = perf_counter()
        try:
            yield
        finally:
            self.add(name, began, perf_counter())

    def total(self, name: str) -> float:
        """Seconds in phases of this name."""
        return sum(one.seconds for one in tuple(self.phases) if one.name == name)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in the order in which each first ended."""
        totals: dict[str, float] = {}
        for name, began, ended in tuple(self.phases):
            totals[name] = totals.get(name, 0.0) + (ended - began)
        return totals


def server_timing(seconds: Mapping[str, float]) -> str:
    """The header's value: milliseconds by phase, as in `queue;dur=0.120, run;dur=4.518`."""
    return ", ".join(f"{name};dur={1e3 * value:.3f}" for name, value in seconds.items())


def read_server_timing(value: str, known: Iterable[str] = SERVER_PHASES) -> dict[str, float]:
    """Seconds of the `known` phases in a header's value; what else stands there is passed over, never believed."""
    if len(value) > LONGEST_HEADER:
        return {}
    wanted = frozenset(known)
    entries = (_ENTRY.fullmatch(one) for one in value.split(","))
    found = {one[1]: float(one[2]) / 1e3 for one in entries if one is not None and one[1] in wanted}
    return {name: seconds for name, seconds in found.items() if seconds <= LONGEST_S}
