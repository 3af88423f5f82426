"""Arithmetic of telemetry buckets: sums over a minute, an hour, a day or a month (pure functions).

A bucket's content maps names to sums, extremes and counts, so any two contents can be combined by `merged`: the
messages of a minute, the hours of a day, or the devices of a fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

Content = dict[str, Any]
Span = Literal["minute", "hour", "day", "month"]
DAY_S = 86_400.0
OTHER = "(other)"
"""Key under which traffic of models that are not assigned to the device is collected, and split points beyond
`MOST_CUTS`."""
MOST_CUTS = 64
"""Distinct split points counted by name in one bucket."""
_SUMS = ("requests", "failed", "fallbacks", "switches", "emulation_overruns", "up_bytes")
_CASCADE = ("sure", "escalated", "unsure", "audited", "changed", "unaudited", "alarms")
_STILL = ("repeated", "audited_same", "changed", "unaudited", "alarms")
_MEANS = ("device_s", "link_s", "remote_s", "latency_p50_s", "latency_p95_s", "predicted_s")
_WEIGHT_OF: Mapping[str, str] = {"joules_sum": "weighed", "watts_sum": "watts_samples"}
"""Sums that are averaged over a count of their own (the value) instead of over all samples or requests."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Length of a bucket, how long buckets are stored, and how long a period one query may return."""

    bucket_s: int
    """Length of the bucket. A month counts as 30 days here, although its bucket begins on the first of the calendar
    month."""
    retention_s: float
    """Age in seconds after which the bucket is deleted."""
    max_query_s: float
    """Longest period in seconds that one API response may cover."""


SPANS: Mapping[Span, Retention] = {
    "minute": Retention(60, 7 * DAY_S, 2 * DAY_S),
    "hour": Retention(3_600, 100 * DAY_S, 100 * DAY_S),
    "day": Retention(86_400, 1_100 * DAY_S, 1_100 * DAY_S),
    "month": Retention(2_592_000, 3_700 * DAY_S, 3_700 * DAY_S),
}


def bucket_start(span: Span, at: float) -> float:
    """Start of the bucket that contains the Unix time `at`, as a Unix time in UTC."""
    if span == "month":
        moment = datetime.fromtimestamp(at, UTC)
        return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    seconds = SPANS[span].bucket_s
    return float(at // seconds * seconds)


def content_of_window(window: Mapping[str, Any]) -> Content:
    """Bucket content of one telemetry window of one model."""
    requests = int(window.get("requests", 0))
    weighed = requests if window.get("joules_basis") else 0
    return {
        **{name: int(window.get(name, 0)) for name in _SUMS},
        **{f"{name}_sum": float(window.get(name, 0.0)) * requests for name in _MEANS},
        "latency_p95_worst_s": float(window.get("latency_p95_s", 0.0)),
        "joules_sum": float(window.get("joules", 0.0)) * weighed,
        "weighed": weighed,
        "cuts": {str(window.get("row", "")): requests} if requests else {},
        **_content_of_cascade(window.get("cascade")), **_content_of_still(window.get("still")),
    }  # fmt: skip


def _content_of_cascade(counts: Mapping[str, Any] | None) -> Content:
    """Counts of a cascade, answers by variant, and the strictest threshold in force."""
    if counts is None:
        return {}
    return {
        "cascade": {name: int(counts.get(name, 0)) for name in _CASCADE},
        "answered": {str(variant): int(count) for variant, count in counts.get("answered", {}).items()},
        "cascade_threshold_max": float(counts.get("threshold", 0.0)),
        "cascade_allowed_max": float(counts.get("allowed", 0.0)),
    }


def _content_of_still(counts: Mapping[str, Any] | None) -> Content:
    """Counts of repeated answers."""
    if counts is None:
        return {}
    return {
        "still": {name: int(counts.get(name, 0)) for name in _STILL},
        "still_allowed_max": float(counts.get("allowed", 0.0)),
    }


def content_of_message(message: Mapping[str, Any], *, from_backlog: bool) -> Content:
    """Bucket content of the fields of a telemetry message that concern the device as a whole, not one model."""
    power = message.get("power") or {}
    queue = message.get("queue") or {}
    machine = message.get("machine") or {}
    clock_ratio, watts = power.get("clock_ratio"), power.get("watts")
    return {
        "samples": 1, "from_backlog": int(from_backlog),
        "up_bytes_per_s_sum": float(message.get("up_bytes_per_s", 0.0)), "rtt_s_sum": float(message.get("rtt_s", 0.0)),
        "remote_usable": int(bool(message.get("remote_usable"))),
        "under_voltage": int(bool(power.get("under_voltage"))),
        "throttled": int(clock_ratio is not None and clock_ratio < 0.99), "watts_sum": float(watts or 0.0),
        "watts_samples": int(watts is not None), "celsius_max": power.get("celsius"),
        "battery_percent_min": power.get("battery_percent"), "disk_free_bytes_min": machine.get("disk_free_bytes"),
        "queue_max": queue.get("in_flight", 0),
    }  # fmt: skip


def merged(first: Content, second: Content) -> Content:
    """Combine two bucket contents; neither is changed. A value that is None counts as missing."""
    result = dict(first)
    for name, value in second.items():
        before = result.get(name)
        if before is None or value is None:
            result[name] = value if before is None else before
        elif isinstance(value, dict):
            result[name] = _add_counts(before, value)
        elif (extreme := _extreme_for(name)) is not None:
            result[name] = extreme(before, value)
        else:
            result[name] = before + value
    return result


def bucket_view(start: float, span: Span, content: Content) -> dict[str, Any]:
    """The bucket as the API returns it, with means in place of sums."""
    view: dict[str, Any] = {"at": start, "span_s": SPANS[span].bucket_s}
    default_weight = content.get("samples", content.get("requests", 0))
    for name, value in content.items():
        if name.endswith("_sum"):
            weight = content.get(_WEIGHT_OF[name], 0) if name in _WEIGHT_OF else default_weight
            view[name.removesuffix("_sum")] = value / weight if weight else None
        elif name not in _WEIGHT_OF.values():
            view[name] = value
    return view


def _extreme_for(name: str) -> Callable[..., Any] | None:
    if name.endswith(("_max", "_worst_s")):
        return max
    return min if name.endswith("_min") else None


def _add_counts(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Add counts by name; names beyond `MOST_CUTS` are counted as `OTHER`, because devices choose the names."""
    total = dict(counts)
    for name, count in more.items():
        key = name if name in total or len(total) < MOST_CUTS else OTHER
        total[key] = total.get(key, 0) + count
    return total
