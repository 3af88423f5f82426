"""Links by name and by figures: `8mbit/40ms`, `8mbit/20mbit/40ms`, `lte`, `lte/10`.

Rates are those of the literature set in FACTS.md (docs/device-profiles.md names the papers); round trips are our
assumptions, for none was published with them. What a link does at run time is measured, never taken from here.
"""

from __future__ import annotations

import math
import re

from edgesplit.errors import UsageError
from edgesplit.plan import Link


def _megabits(up: float, down: float, rtt_ms: float, name: str) -> Link:
    return Link(up_bytes_per_s=up * 1e6 / 8, down_bytes_per_s=down * 1e6 / 8, rtt_s=rtt_ms / 1e3, name=name)


LINKS: dict[str, Link] = {
    # US averages (OpenSignal and others) as used since Neurosurgeon (ASPLOS 2017) by most papers on splitting.
    "wifi": _megabits(18.88, 54.97, 5, "wifi"),  # round trip: assumed
    "lte": _megabits(5.85, 13.76, 60, "lte"),  # round trip: assumed
    "3g": _megabits(1.1, 2.03, 150, "3g"),  # round trip: assumed
}

_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?)"


def parse_link(text: str) -> Link:
    """The link that `text` spells: RATE/RTT, UP/DOWN/RTT, NAME, or NAME/N for an N-th of its rates; else UsageError."""
    parts = [part.strip() for part in text.strip().lower().split("/")]
    if parts[0] in LINKS:
        return _named(parts, text)
    if len(parts) not in (2, 3):
        raise _unreadable(text)
    rates, rtt_s = [_rate(part, text) for part in parts[:-1]], _time(parts[-1], text)
    return Link(up_bytes_per_s=rates[0], down_bytes_per_s=rates[-1], rtt_s=rtt_s, name="/".join(parts))


def parse_rate(text: str) -> float:
    """Bytes per second that `text` spells, as in 2mbit; else UsageError."""
    try:
        return _rate(text.strip().lower(), text)
    except UsageError as error:
        raise UsageError(f"not a rate: {text[:80]!r} (as in 500kbit or 2mbit)") from error


def format_link(link: Link) -> str:
    """The link as `parse_link` reads it, in figures."""
    up, down, rtt = _megabit_text(link.up_bytes_per_s), _megabit_text(link.down_bytes_per_s), link.rtt_s * 1e3
    return f"{up}/{rtt:g}ms" if up == down else f"{up}/{down}/{rtt:g}ms"


def slower(link: Link, factor: float) -> Link:
    """The same link with a `factor`-th of its rates, as when many share it; the round trip stays."""
    return Link(
        up_bytes_per_s=link.up_bytes_per_s / factor,
        down_bytes_per_s=link.down_bytes_per_s / factor,
        rtt_s=link.rtt_s,
        name=f"{link.name}/{factor:g}" if link.name else "",
    )


def _named(parts: list[str], text: str) -> Link:
    link = LINKS[parts[0]]
    if len(parts) == 1:
        return link
    factor = re.fullmatch(_NUMBER, parts[1])
    if len(parts) != 2 or not factor or not 0 < float(factor[1]) < 1e6:
        raise _unreadable(text)
    return slower(link, float(factor[1]))


def _rate(part: str, text: str) -> float:
    """Bytes per second."""
    found = re.fullmatch(_NUMBER + r"\s*([kmg]?bit)(?:/s|ps)?", part)
    rate = float(found[1]) * _BITS_PER_S[found[2]] / 8 if found else 0.0
    if not 0 < rate < 1e12:
        raise _unreadable(text)
    return rate


def _time(part: str, text: str) -> float:
    """Seconds."""
    found = re.fullmatch(_NUMBER + r"\s*(us|ms|s)", part)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else math.inf
    if seconds > 60:
        raise _unreadable(text)
    return seconds


def _unreadable(text: str) -> UsageError:
    return UsageError(f"not a link: {text[:80]!r} (as in 8mbit/40ms, 8mbit/20mbit/40ms, or {', '.join(LINKS)}, lte/10)")


def _megabit_text(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:.6g}mbit"


def host_and_port(text: str, what: str) -> tuple[str, int]:
    """HOST:PORT, as in 10.0.0.2:8883 or [::1]:8883; else UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise UsageError(f"not the address of a {what}: {text[:200]!r} (as in 10.0.0.2:8883)")
    return host.strip("[]"), int(port)
