"""Layer times from onnxruntime's own profile. Pure: events in, seconds out.

The profile has one event per node and run. Events inside another one are a subgraph's and already counted in it; an
event of a node that the runtime inserted (a cast around a half-precision kernel) belongs to the node before it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KERNEL = "_kernel_time"


@dataclass(frozen=True, slots=True)
class LayerTime:
    """What a layer took over several runs."""

    median_s: float
    p95_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LayerTime:
        """Median and 95th percentile (nearest rank) of at least one measurement."""
        ordered = sorted(seconds)
        return cls(statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1])


@dataclass(frozen=True, slots=True)
class Event:
    """One stretch of time, in microseconds since the session began."""

    name: str
    start: int
    duration: int

    @property
    def end(self) -> int:
        """When it was over."""
        return self.start + self.duration


def layer_times(trace: Sequence[Mapping[str, Any]], layer_of: Mapping[str, str], warmup: int) -> dict[str, LayerTime]:
    """Seconds of each layer over all runs but the first `warmup`. `layer_of` gives a node's layer by its name."""
    kernels = _top_level(_events(trace, "Node", KERNEL))
    runs = _events(trace, "Session", "model_run")[warmup:]
    per_run = [_one_run(run, kernels, layer_of) for run in runs]
    return {
        layer: LayerTime.of([seconds.get(layer, 0.0) for seconds in per_run] or [0.0])
        for layer in dict.fromkeys(layer_of.values())
    }


def _events(trace: Sequence[Mapping[str, Any]], category: str, suffix: str) -> list[Event]:
    """Those of a category whose names end so, in order of their start; what surrounds others comes before them."""
    found = [
        Event(str(raw["name"])[: -len(suffix)], int(raw["ts"]), int(raw["dur"]))
        for raw in trace
        if raw.get("cat") == category and str(raw.get("name", "")).endswith(suffix)
    ]
    return sorted(found, key=lambda event: (event.start, -event.duration))


def _top_level(events: Iterable[Event]) -> list[Event]:
    """Without those that lie inside an earlier one."""
    kept: list[Event] = []
    for event in events:
        if not kept or event.start >= kept[-1].end:
            kept.append(event)
    return kept


def _one_run(run: Event, kernels: Iterable[Event], layer_of: Mapping[str, str]) -> dict[str, float]:
    """Seconds by layer within one run of the model."""
    seconds: dict[str, float] = {}
    layer = ""
    waiting = 0.0
    for event in kernels:
        if not run.start <= event.start < run.end:
            continue
        waiting += event.duration / 1e6
        layer = layer_of.get(event.name, layer)
        if layer:  # what the runtime inserted before the first layer waits for that layer
            seconds[layer] = seconds.get(layer, 0.0) + waiting
            waiting = 0.0
    return seconds
