"""Parsers of durations, shares and rates as written on the command line and in faults files: `90s`, `10m`, `2h`, `30d`;
`20%`; `0.5/d`."""

from __future__ import annotations

import re

from edgesplit.errors import UsageError

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def span_s(text: str) -> float:
    """Seconds of a duration such as `10m`, `1.5h`, `30d`; UsageError for anything else."""
    match = _SPAN.fullmatch(text.strip())
    if not match:
        raise UsageError(f"not a span of time: {text[:40]!r} (as in 90s, 10m, 2h or 30d)")
    return float(match[1]) * _SECONDS[match[2]]


def spans_s(text: str) -> tuple[float, float]:
    """Shortest and longest duration of a range such as `1m-10m`, in seconds; a single duration such as `5m` gives the
    same number twice."""
    first, dash, last = text.partition("-")
    shortest = span_s(first)
    longest = span_s(last) if dash else shortest
    if longest < shortest:
        raise UsageError(f"{text[:40]!r} begins with the longer span")
    return shortest, longest


def per_s(text: str) -> float:
    """Events per second of a rate such as `0.5/d` or `3/h`; UsageError for anything else."""
    times, slash, unit = text.strip().partition("/")
    try:
        if not slash or unit not in _SECONDS:
            raise ValueError
        count = float(times)
    except ValueError:
        raise UsageError(f"not a rate: {text[:40]!r} (as in 0.5/d or 3/h)") from None
    if not 0 < count < 1e6:
        raise UsageError(f"a rate of {text[:40]!r}: it must be above 0")
    return count / _SECONDS[unit]


def share(text: str) -> float:
    """The fraction of a percentage such as `20%`; UsageError outside (0, 100]."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not match or not 0 < float(match[1]) <= 100:
        raise UsageError(f"not a share: {text[:40]!r} (as in 5%, 20% or 100%)")
    return float(match[1]) / 100


def span_text(seconds: float) -> str:
    """A duration in its largest fitting unit, with three significant digits."""
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("m", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g}{unit}"
    return f"{seconds:.3g}s"
