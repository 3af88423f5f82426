"""What telemetry adds up to in a minute, an hour, a day or a month: the arithmetic. Pure.

A content is sums, extremes and counts by name, so that two of them make one by `merged`, whatever they are of: the
messages of a minute, the hours of a day, the devices of a fleet.
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
"""Models that a device was never told to run, together; and rows beyond `MOST_CUTS`."""
MOST_CUTS = 64
_SUMS = ("requests", "failed", "fallbacks", "switches", "late", "up_bytes")
_MEANS = ("device_s", "link_s", "remote_s", "latency_p50_s", "latency_p95_s", "predicted_s")
_WEIGHED_BY: Mapping[str, str] = {"joules_sum": "weighed", "watts_sum": "watts_samples"}


@dataclass(frozen=True, slots=True)
class Kept:
    """How long a bucket is, how long it is kept, and how much of them one answer may have."""

    seconds: int
    """Of a month 30 days, its name: it begins on the first of its month."""
    kept_s: float
    answer_s: float


SPANS: Mapping[Span, Kept] = {
    "minute": Kept(60, 7 * DAY_S, 2 * DAY_S),
    "hour": Kept(3_600, 100 * DAY_S, 100 * DAY_S),
    "day": Kept(86_400, 1_100 * DAY_S, 1_100 * DAY_S),
    "month": Kept(2_592_000, 3_700 * DAY_S, 3_700 * DAY_S),
}


def begin_of(span: Span, at: float) -> float:
    """Where the bucket begins in which that moment lies, in UTC."""
    if span == "month":
        moment = datetime.fromtimestamp(at, UTC)
        return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    seconds = SPANS[span].seconds
    return float(at // seconds * seconds)


def of_window(window: Mapping[str, Any]) -> Content:
    """One window of a model's requests."""
    requests = int(window.get("requests", 0))
    weighed = requests if window.get("joules_basis") else 0
    return {
        **{name: int(window.get(name, 0)) for name in _SUMS},
        **{f"{name}_sum": float(window.get(name, 0.0)) * requests for name in _MEANS},
        "latency_p95_worst_s": float(window.get("latency_p95_s", 0.0)),
        "joules_sum": float(window.get("joules", 0.0)) * weighed,
        "weighed": weighed,
        "cuts": {str(window.get("row", "")): requests} if requests else {},
    }


def of_message(message: Mapping[str, Any], *, late: bool) -> Content:
    """What one message says that is the device's and no model's."""
    power = message.get("power") or {}
    queue = message.get("queue") or {}
    board = message.get("board") or {}
    speed, watts = power.get("speed"), power.get("watts")
    return {
        "samples": 1,
        "late": int(late),
        "up_bytes_per_s_sum": float(message.get("up_bytes_per_s", 0.0)),
        "rtt_s_sum": float(message.get("rtt_s", 0.0)),
        "remote_ok": int(bool(message.get("remote_ok"))),
        "under_voltage": int(bool(power.get("under_voltage"))),
        "throttled": int(speed is not None and speed < 0.99),
        "watts_sum": float(watts or 0.0),
        "watts_samples": int(watts is not None),
        "celsius_max": power.get("celsius"),
        "battery_percent_min": power.get("battery_percent"),
        "disk_free_bytes_min": board.get("disk_free_bytes"),
        "queue_max": queue.get("here", 0),
    }


def merged(one: Content, other: Content) -> Content:
    """Both together."""
    made = dict(one)
    for name, value in other.items():
        before = made.get(name)
        if before is None or value is None:
            made[name] = value if before is None else before
        elif isinstance(value, dict):
            made[name] = _counted(before, value)
        elif (choose := _extreme_of(name)) is not None:
            made[name] = choose(before, value)
        else:
            made[name] = before + value
    return made


def shown(begins: float, span: Span, content: Content) -> dict[str, Any]:
    """A bucket with means in place of sums."""
    told: dict[str, Any] = {"at": begins, "span_s": SPANS[span].seconds}
    usual = content.get("samples", content.get("requests", 0))
    for name, value in content.items():
        if name.endswith("_sum"):
            over = content.get(_WEIGHED_BY[name], 0) if name in _WEIGHED_BY else usual
            told[name.removesuffix("_sum")] = value / over if over else None
        elif name not in _WEIGHED_BY.values():
            told[name] = value
    return told


def _extreme_of(name: str) -> Callable[..., Any] | None:
    if name.endswith(("_max", "_worst_s")):
        return max
    return min if name.endswith("_min") else None


def _counted(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Counts by names that others chose, few of them."""
    made = dict(counts)
    for name, count in more.items():
        kept = name if name in made or len(made) < MOST_CUTS else OTHER
        made[kept] = made.get(kept, 0) + count
    return made
