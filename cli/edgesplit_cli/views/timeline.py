"""The phases of requests as bars in text: one request as a waterfall, many as their means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from edgesplit.observability.histogram import SECONDS_BOUNDS, quantile
from edgesplit.oip.report import PHASES
from edgesplit_cli.output import ms

WIDTH = 48
_STYLE = {
    **dict.fromkeys(("queue", "decode", "device", "encode"), "green"),
    **dict.fromkeys(("link", "remote_wait"), "yellow"),
    **dict.fromkeys(
        ("remote_queue", "remote_decode", "remote_load", "remote", "next_tier_link", "next_tier", "remote_encode"),
        "cyan",
    ),
    **dict.fromkeys(("answer_decode", "local_finish"), "green"),
}
_NAME = max(len(name) for name in PHASES)


def waterfall(seconds: Mapping[str, float], width: int = WIDTH) -> list[Text]:
    """One line for each phase, with a bar where the phase lay if each began when the one before it ended."""
    whole = sum(seconds.values())
    lines, start = [], 0.0
    for name, duration in seconds.items():
        begin, end = _cells(start, whole, width), _cells(start + duration, whole, width)
        bar = " " * min(begin, width - 1) + ("█" * (end - begin) or "▏")
        lines.append(_line(name, bar, f"{ms(duration):>9} ms", width))
        start += duration
    return lines


def mean_bars(windows: Sequence[Sequence[Any]], requests: int, width: int = WIDTH) -> list[Text]:
    """One line for each phase of a telemetry window: its mean over all requests, its p95 among those that had it."""
    phases = {str(name): (float(total), _pairs(counts)) for name, total, counts in windows}
    whole = sum(total for total, _ in phases.values())
    return [
        _line(
            name,
            "█" * max(0, _cells(total, whole, width)) or "▏",
            f"{ms(total / max(1, requests)):>9} ms  p95 {_rounded_ms(quantile(SECONDS_BOUNDS, counts, 0.95)):>8} ms",
            width,
        )
        for name, (total, counts) in phases.items()
    ]


def _line(name: str, bar: str, figures: str, width: int) -> Text:
    label = name.replace("_", " ")
    return Text.assemble(f"  {label:<{_NAME}} ", (f"{bar:<{width}}", _STYLE.get(name, "dim")), figures)


def _cells(seconds: float, whole: float, width: int) -> int:
    return round(width * min(1.0, seconds / whole)) if whole > 0 else 0


def _rounded_ms(seconds: float) -> str:
    """A figure from a histogram bucket, with two digits, since it is not more precise."""
    if seconds <= 0:
        return "0"
    digits = max(0, 1 - math.floor(math.log10(seconds * 1e3)))
    return f"~{seconds * 1e3:.{digits}f}"


def _pairs(counts: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Histogram buckets limited to this version's bounds; those that a newer agent adds count in the last."""
    return [(min(index, len(SECONDS_BOUNDS)), count) for index, count in counts]
