"""How spans of time, shares and rates are written: `90s`, `10m`, `2h`, `30d`; `20%`; `3`; `0.5/d`."""

from __future__ import annotations

import re

from edgesplit.errors import UsageError

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def span_s(text: str) -> float:
    """Seconds of `10m`, `1.5h`, `30d`; UsageError for anything else."""
    found = _SPAN.fullmatch(text.strip())
    if not found:
        raise UsageError(f"not a span of time: {text[:40]!r} (as in 90s, 10m, 2h or 30d)")
    return float(found[1]) * _SECONDS[found[2]]


def spans_s(text: str) -> tuple[float, float]:
    """The shortest and the longest of `1m-10m`, or twice the same of `5m`."""
    first, dash, last = text.partition("-")
    shortest = span_s(first)
    longest = span_s(last) if dash else shortest
    if longest < shortest:
        raise UsageError(f"{text[:40]!r} begins with the longer span")
    return shortest, longest


def per_s(text: str) -> float:
    """Times a second of `0.5/d`, `3/h`; UsageError for anything else."""
    times, slash, unit = text.strip().partition("/")
    try:
        if not slash or unit not in _SECONDS:
            raise ValueError
        found = float(times)
    except ValueError:
        raise UsageError(f"not a rate: {text[:40]!r} (as in 0.5/d or 3/h)") from None
    if not 0 < found < 1e6:
        raise UsageError(f"a rate of {text[:40]!r}: it must be above 0")
    return found / _SECONDS[unit]


def share(text: str) -> float:
    """The part of one that `20%` is."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not found or not 0 < float(found[1]) <= 100:
        raise UsageError(f"not a share: {text[:40]!r} (as in 5%, 20% or 100%)")
    return float(found[1]) / 100


def span_text(seconds: float) -> str:
    """The span as people write it."""
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("m", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g}{unit}"
    return f"{seconds:.3g}s"
