"""Link descriptions: `8mbit/40ms`, `8mbit/20mbit/40ms`, `lte`, `lte/10`.

The rates of named links are those of the literature set in FACTS.md (docs/device-profiles.md names the papers); the
round-trip times are our assumptions, because none was published with the rates. At run time a link is measured; these
figures are not used then.
"""

from __future__ import annotations

import math
import re

from edgesplit.errors import UsageError
from edgesplit.plan import Link


def _link_in_megabits(up: float, down: float, rtt_ms: float, name: str) -> Link:
    return Link(up_bytes_per_s=up * 1e6 / 8, down_bytes_per_s=down * 1e6 / 8, rtt_s=rtt_ms / 1e3, name=name)


LINKS: dict[str, Link] = {
    # US averages (OpenSignal and others) as used since Neurosurgeon (ASPLOS 2017) by most papers on splitting.
    "wifi": _link_in_megabits(18.88, 54.97, 5, "wifi"),  # round trip: assumed
    "lte": _link_in_megabits(5.85, 13.76, 60, "lte"),  # round trip: assumed
    "3g": _link_in_megabits(1.1, 2.03, 150, "3g"),  # round trip: assumed
}
"""Named links."""

_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?)"


def parse_link(text: str) -> Link:
    """Parse a link: RATE/RTT, UP/DOWN/RTT, NAME, or NAME/N for an N-th of its rates; UsageError otherwise."""
    parts = [part.strip() for part in text.strip().lower().split("/")]
    if parts[0] in LINKS:
        return _parse_named_link(parts, text)
    if len(parts) not in (2, 3):
        raise _bad_link(text)
    rates, rtt_s = [_parse_rate(part, text) for part in parts[:-1]], _parse_duration(parts[-1], text)
    return Link(up_bytes_per_s=rates[0], down_bytes_per_s=rates[-1], rtt_s=rtt_s, name="/".join(parts))


def parse_rate(text: str) -> float:
    """Parse a rate such as 2mbit into bytes per second; UsageError otherwise."""
    try:
        return _parse_rate(text.strip().lower(), text)
    except UsageError as error:
        raise UsageError(f"not a rate: {text[:80]!r} (as in 500kbit or 2mbit)") from error


def format_link(link: Link) -> str:
    """The link in figures, as `parse_link` reads it."""
    up, down, rtt = _format_rate(link.up_bytes_per_s), _format_rate(link.down_bytes_per_s), link.rtt_s * 1e3
    return f"{up}/{rtt:g}ms" if up == down else f"{up}/{down}/{rtt:g}ms"


def divide_rates(link: Link, factor: float) -> Link:
    """The link with its rates divided by `factor`, as when several devices share it; the round-trip time stays."""
    return Link(
        up_bytes_per_s=link.up_bytes_per_s / factor,
        down_bytes_per_s=link.down_bytes_per_s / factor,
        rtt_s=link.rtt_s,
        name=f"{link.name}/{factor:g}" if link.name else "",
    )


def _parse_named_link(parts: list[str], text: str) -> Link:
    link = LINKS[parts[0]]
    if len(parts) == 1:
        return link
    factor = re.fullmatch(_NUMBER, parts[1])
    if len(parts) != 2 or not factor or not 0 < float(factor[1]) < 1e6:
        raise _bad_link(text)
    return divide_rates(link, float(factor[1]))


def _parse_rate(part: str, text: str) -> float:
    """Parse a rate into bytes per second."""
    match = re.fullmatch(_NUMBER + r"\s*([kmg]?bit)(?:/s|ps)?", part)
    rate = float(match[1]) * _BITS_PER_S[match[2]] / 8 if match else 0.0
    if not 0 < rate < 1e12:
        raise _bad_link(text)
    return rate


def _parse_duration(part: str, text: str) -> float:
    """Parse a duration into seconds, at most 60."""
    match = re.fullmatch(_NUMBER + r"\s*(us|ms|s)", part)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else math.inf
    if seconds > 60:
        raise _bad_link(text)
    return seconds


def _bad_link(text: str) -> UsageError:
    return UsageError(f"not a link: {text[:80]!r} (as in 8mbit/40ms, 8mbit/20mbit/40ms, or {', '.join(LINKS)}, lte/10)")


def _format_rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:.6g}mbit"


def parse_host_and_port(text: str, what: str, *, first_port: int = 1) -> tuple[str, int]:
    """Parse HOST:PORT, as in 10.0.0.2:8883 or [::1]:8883; UsageError otherwise, with `what` as the kind of address.
    Ports begin with `first_port`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or not first_port <= int(port) < 65_536:
        raise UsageError(f"not the address of a {what}: {text[:200]!r} (as in 10.0.0.2:8883)")
    return host.strip("[]"), int(port)


def parse_metrics_address(text: str) -> tuple[str, int]:
    """Parse the ADDRESS:PORT at which metrics are served; port 0 means any."""
    return parse_host_and_port(text, "metrics server", first_port=0)
