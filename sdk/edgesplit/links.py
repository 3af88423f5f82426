"""Link descriptions: `8mbit/40ms`, `8mbit/20mbit/40ms`, `lte`, `lte/10`.

The rates of named links are those of the literature set in FACTS.md (docs/device-profiles.md names the papers); the
round-trip times are our assumptions, because none was published with the rates. At run time a link is measured; these
figures are not used then.
"""

from __future__ import annotations

import re

from edgesplit.errors import UsageError
from edgesplit.plan import Link
from edgesplit.quantities import ABOVE_ZERO, NUMBER, parse_duration, parse_rate


def _link_in_megabits(up: float, down: float, rtt_ms: float, name: str) -> Link:
    return Link(up_bytes_per_s=up * 1e6 / 8, down_bytes_per_s=down * 1e6 / 8, rtt_s=rtt_ms / 1e3, name=name)


LINKS: dict[str, Link] = {
    # US averages (OpenSignal and others) as used since Neurosurgeon (ASPLOS 2017) by most papers on splitting.
    "wifi": _link_in_megabits(18.88, 54.97, 5, "wifi"),  # round trip: assumed
    "lte": _link_in_megabits(5.85, 13.76, 60, "lte"),  # round trip: assumed
    "3g": _link_in_megabits(1.1, 2.03, 150, "3g"),  # round trip: assumed
}
"""Named links."""

MAX_RTT_S = 60.0


def parse_link(text: str) -> Link:
    """Parse a link: RATE/RTT, UP/DOWN/RTT, NAME, or NAME/N for an N-th of its rates; UsageError otherwise."""
    name, *parts = [part.strip() for part in text.strip().lower().split("/")]
    try:
        if name in LINKS and len(parts) < 2:
            factor = NUMBER.parse(parts[0], least=ABOVE_ZERO, most=1e6) if parts else 1.0
            return divide_rates(LINKS[name], factor) if parts else LINKS[name]
        if len(parts) in (1, 2):
            rates = [parse_rate(part) for part in (name, *parts[:-1])]
            rtt_s = parse_duration(parts[-1], most=MAX_RTT_S)
            return Link(up_bytes_per_s=rates[0], down_bytes_per_s=rates[-1], rtt_s=rtt_s, name="/".join((name, *parts)))
        reason = ""
    except UsageError as error:
        reason = f"; {error}"
    raise UsageError(
        f"not a link: {text[:80]!r} (as in 8mbit/40ms, 8mbit/20mbit/40ms, or {', '.join(LINKS)}, lte/10){reason}"
    )


def divide_rates(link: Link, factor: float) -> Link:
    """The link with its rates divided by `factor`, as when several devices share it; the round-trip time stays."""
    return Link(
        up_bytes_per_s=link.up_bytes_per_s / factor, down_bytes_per_s=link.down_bytes_per_s / factor, rtt_s=link.rtt_s,
        name=f"{link.name}/{factor:g}" if link.name else "",
    )  # fmt: skip


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
