"""Phases of one request: how its time was spent. Phases have a begin and an end and may overlap.

All tiers use the same type, which feeds histograms, spans, reports and the `Server-Timing` header (W3C) with which a
server reports its phases to the client. Times are of `perf_counter`; between processes only durations are exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

SERVER_TIMING = "server-timing"
"""Response header with a server's phases."""
MAX_HEADER_CHARS = 512
MAX_PHASE_S = 1e5
_ENTRY = re.compile(r"\s*([a-z_]{1,24});dur=(\d{1,9}(?:\.\d{1,9})?)\s*")

QUEUE, DECODE, LOAD, RUN, NEXT_TIER, ENCODE = "queue", "decode", "load", "run", "next_tier", "encode"
SERVER_PHASES = (QUEUE, DECODE, LOAD, RUN, NEXT_TIER, ENCODE)
"""Phases of an offload server. `load` is loading a model for the first time or after its eviction; `next_tier` is a
gateway's wait for the next tier."""


class Phase(NamedTuple):
    """One phase of a request."""

    name: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Duration of the phase."""
        return self.ended - self.began


@dataclass(slots=True)
class Timeline:
    """The phases of one request so far, in the order in which they ended. Appending is safe from any thread."""

    began: float = field(default_factory=perf_counter)
    phases: list[Phase] = field(default_factory=list)

    def add(self, name: str, began: float, ended: float) -> None:
        """Add a phase that has ended. An end before the begin counts as a duration of 0."""
        self.phases.append(Phase(name, began, ended if ended > began else began))

    def add_until_now(self, name: str, began: float) -> float:
        """Add a phase that began at `began` and ends now; returns the current time."""
        now = perf_counter()
        self.add(name, began, now)
        return now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that records its body as a phase, also if it raises."""
        began = perf_counter()
        try:
            yield
        finally:
            self.add(name, began, perf_counter())

    def seconds_by_phase(self) -> dict[str, float]:
        """Total seconds by phase, in the order in which each first ended."""
        totals: dict[str, float] = {}
        for name, began, ended in tuple(self.phases):
            totals[name] = totals.get(name, 0.0) + (ended - began)
        return totals


def format_server_timing(seconds: Mapping[str, float]) -> str:
    """Value of the `Server-Timing` header: milliseconds by phase, as in `queue;dur=0.120, run;dur=4.518`."""
    return ", ".join(f"{name};dur={1e3 * value:.3f}" for name, value in seconds.items())


def parse_server_timing(value: str) -> dict[str, float]:
    """Parse a `Server-Timing` header into seconds by phase. Only `SERVER_PHASES` with plausible values are
    returned; anything else is ignored."""
    if len(value) > MAX_HEADER_CHARS:
        return {}
    entries = (_ENTRY.fullmatch(match) for match in value.split(","))
    known = (match for match in entries if match is not None and match[1] in SERVER_PHASES)
    seconds_by_phase = {match[1]: float(match[2]) / 1e3 for match in known}
    return {name: seconds for name, seconds in seconds_by_phase.items() if seconds <= MAX_PHASE_S}
