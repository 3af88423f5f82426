"""How failures are slowed down, and how little they may fill: who guesses waits longer each time, and nobody else does.

The right credential is always let in, however many wrong ones came from the same place, so that nobody can lock an
operator out. What waits is the wrong one: it is answered with a time to stay away, twice as long at each failure, up to
a minute. Kept per process, in bounded memory: what is forgotten at a restart is only a delay.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from edgesplit_controller.access.request_limits import ADDRESSES, RateLimit

FREE = 5
"""Failures that are answered at once."""
LONGEST_S = 60.0
CALM_S = 900.0
"""After so long without a failure the next one is the first again."""


class Failures:
    """Failed tries, by where they came from."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counted: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._lock = threading.Lock()

    def failed(self, place: str) -> float:
        """One more; how long that place shall stay away, in seconds: 0 for the first few."""
        with self._lock:
            now = self._now()
            count, at = self._counted.pop(place, (0, now))
            count = 1 if now - at > CALM_S else count + 1
            self._counted[place] = count, now
            while len(self._counted) > ADDRESSES:
                self._counted.popitem(last=False)
            return delay_s(count)

    def succeeded(self, place: str) -> None:
        """Whoever is there knows the right one."""
        with self._lock:
            self._counted.pop(place, None)


class Trickle:
    """Lets so many of a kind through, and counts what it holds back, so that the next one let through can say so."""

    def __init__(self, each: RateLimit, together: RateLimit) -> None:
        self._each = each
        self._together = together
        self._held = 0
        self._lock = threading.Lock()

    def let_through(self, place: str) -> int | None:
        """How many were held back since the last that was let through; None: this one is held back too."""
        with self._lock:
            if not (self._each.allow(place) and self._together.allow("")):
                self._held += 1
                return None
            held, self._held = self._held, 0
            return held


def delay_s(failures: int) -> float:
    """How long to stay away after so many failures in a row."""
    return 0.0 if failures <= FREE else min(LONGEST_S, 2.0 ** min(failures - FREE - 1, 10))


def place_of(address: str) -> str:
    """What counts as one place: an IPv4 address, or an IPv6 network of 64 bits, which one host may have to itself."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
