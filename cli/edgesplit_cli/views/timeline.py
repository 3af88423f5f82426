"""Where requests' time went, as pictures in text: one request as a waterfall, many as bars of their means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from edgesplit.observability.histogram import SECONDS, quantile
from edgesplit.oip.report import PHASES
from edgesplit_cli.output import ms

WIDTH = 48
_STYLE = {
    **dict.fromkeys(("queue", "decode", "device", "encode"), "green"),
    **dict.fromkeys(("link", "waited"), "yellow"),
    **dict.fromkeys(
        ("remote_queue", "remote_decode", "remote_load", "remote", "hop_link", "hop", "remote_encode"), "cyan"
    ),
    **dict.fromkeys(("answer_decode", "tail"), "green"),
}
_NAME = max(len(name) for name in PHASES)


def waterfall(seconds: Mapping[str, float], width: int = WIDTH) -> list[Text]:
    """A line for each phase, its bar where the phase lay if each began when the one before it ended."""
    whole = sum(seconds.values())
    lines, before = [], 0.0
    for name, took in seconds.items():
        begin, end = _cells(before, whole, width), _cells(before + took, whole, width)
        bar = " " * min(begin, width - 1) + ("█" * (end - begin) or "▏")
        lines.append(_line(name, bar, f"{ms(took):>9} ms", width))
        before += took
    return lines


def means(windows: Sequence[Sequence[Any]], requests: int, width: int = WIDTH) -> list[Text]:
    """A line for each phase of a telemetry window: its mean over all requests, its p95 among those that had it."""
    found = {str(name): (float(total), _pairs(counts)) for name, total, counts in windows}
    whole = sum(total for total, _ in found.values())
    return [
        _line(
            name,
            "█" * max(0, _cells(total, whole, width)) or "▏",
            f"{ms(total / max(1, requests)):>9} ms  p95 {_about(quantile(SECONDS, counts, 0.95)):>8} ms",
            width,
        )
        for name, (total, counts) in found.items()
    ]


def _line(name: str, bar: str, figures: str, width: int) -> Text:
    shown = name.replace("_", " ")
    return Text.assemble(f"  {shown:<{_NAME}} ", (f"{bar:<{width}}", _STYLE.get(name, "dim")), figures)


def _cells(seconds: float, whole: float, width: int) -> int:
    return round(width * min(1.0, seconds / whole)) if whole > 0 else 0


def _about(seconds: float) -> str:
    """A figure that came out of a bucket has two digits, not more."""
    if seconds <= 0:
        return "0"
    digits = max(0, 1 - math.floor(math.log10(seconds * 1e3)))
    return f"~{seconds * 1e3:.{digits}f}"


def _pairs(counts: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Buckets as this version's bounds have them; a newer agent's further ones are beyond the last."""
    return [(min(place, len(SECONDS)), count) for place, count in counts]
