"""Layer times from onnxruntime's profile (its `enable_profiling` JSON). Pure: events in, seconds out.

The profile has one event per node and run. Events inside another event are a subgraph's and already included in it; an
event of a node that the runtime inserted (a cast around a half-precision kernel) is attributed to the node before it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KERNEL_SUFFIX = "_kernel_time"
"""Suffix of the names of events that time a node's kernel."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of a layer over several runs."""

    median_s: float
    p95_s: float

    @classmethod
    def from_seconds(cls, seconds: Sequence[float]) -> LayerTime:
        """Median and 95th percentile (nearest rank) of at least one measurement."""
        ordered = sorted(seconds)
        # Nearest-rank percentile: the ceil(0.95 n)-th smallest value.
        return cls(statistics.median(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1])


@dataclass(frozen=True, slots=True)
class ProfileEvent:
    """One timed interval, in microseconds since the session began."""

    name: str
    start: int
    duration: int

    @property
    def end(self) -> int:
        """End of the interval."""
        return self.start + self.duration


def layer_times(events: Sequence[Mapping[str, Any]], layer_of: Mapping[str, str], warmup: int) -> dict[str, LayerTime]:
    """Seconds of each layer over all runs but the first `warmup`. `layer_of` maps each node's name to its layer."""
    kernels = _top_level(_matching_events(events, "Node", KERNEL_SUFFIX))
    runs = _matching_events(events, "Session", "model_run")[warmup:]
    per_run = [_seconds_of_run(run, kernels, layer_of) for run in runs]
    return {
        layer: LayerTime.from_seconds([seconds.get(layer, 0.0) for seconds in per_run] or [0.0])
        for layer in dict.fromkeys(layer_of.values())
    }


def _matching_events(profile: Sequence[Mapping[str, Any]], category: str, suffix: str) -> list[ProfileEvent]:
    """Events of a category whose names end with `suffix` (removed), in order of their start; an enclosing event comes
    before those inside it."""
    events = [
        ProfileEvent(str(fields["name"])[: -len(suffix)], int(fields["ts"]), int(fields["dur"]))
        for fields in profile
        if fields.get("cat") == category and str(fields.get("name", "")).endswith(suffix)
    ]
    return sorted(events, key=lambda event: (event.start, -event.duration))


def _top_level(events: Iterable[ProfileEvent]) -> list[ProfileEvent]:
    """The events that do not lie inside an earlier one."""
    top_level: list[ProfileEvent] = []
    for event in events:
        if not top_level or event.start >= top_level[-1].end:
            top_level.append(event)
    return top_level


def _seconds_of_run(
    run: ProfileEvent, kernels: Iterable[ProfileEvent], layer_of: Mapping[str, str]
) -> dict[str, float]:
    """Seconds by layer within one run of the model."""
    seconds: dict[str, float] = {}
    layer = ""
    pending_s = 0.0
    for event in kernels:
        if not run.start <= event.start < run.end:
            continue
        pending_s += event.duration / 1e6
        layer = layer_of.get(event.name, layer)
        if layer:  # what the runtime inserted before the first layer waits for that layer
            seconds[layer] = seconds.get(layer, 0.0) + pending_s
            pending_s = 0.0
    return seconds
