"""Delays repeated authentication failures per client, and limits how many audit log entries they may cause.

Valid credentials are always accepted, however many failures came from the same client, so that an attacker cannot lock
an operator out. A failure is answered with a time to wait, which doubles with each failure up to a minute. The state is
kept per process in bounded memory: a restart loses only delays.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from edgesplit.backoff import Backoff
from edgesplit_controller.access.request_limits import MAX_CLIENTS, RateLimit

FREE_FAILURES = 5
"""Failures in a row that are answered without a delay."""
DELAY = Backoff(first_s=1.0, longest_s=60.0)
"""Delay of further failures."""
RESET_AFTER_S = 900.0
"""Seconds without a failure after which the count starts again."""


class FailureCounter:
    """Counts authentication failures per client. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._lock = threading.Lock()

    def on_failure(self, client: str) -> float:
        """Count a failure; returns the seconds that this client must wait, 0 for the first few."""
        with self._lock:
            now = self._now()
            count, at = self._counts.pop(client, (0, now))
            count = 1 if now - at > RESET_AFTER_S else count + 1
            self._counts[client] = count, now
            while len(self._counts) > MAX_CLIENTS:
                self._counts.popitem(last=False)
            return delay_s(count)

    def on_success(self, client: str) -> None:
        """Reset the count of this client."""
        with self._lock:
            self._counts.pop(client, None)


class EntryLimiter:
    """Limits a stream of log entries, per client and in total, and counts what it suppresses. Thread-safe."""

    def __init__(self, each: RateLimit, together: RateLimit) -> None:
        self._per_client = each
        self._total = together
        self._suppressed = 0
        self._lock = threading.Lock()

    def try_pass(self, client: str) -> int | None:
        """If an entry for this client may be written: the number of entries suppressed since the last one; otherwise
        None, and this entry is counted as suppressed."""
        with self._lock:
            if not (self._per_client.allow(client) and self._total.allow("")):
                self._suppressed += 1
                return None
            suppressed, self._suppressed = self._suppressed, 0
            return suppressed


def delay_s(failures: int) -> float:
    """Seconds to wait after this many failures in a row: 0 up to `FREE_FAILURES`, then as `DELAY` says."""
    return 0.0 if failures <= FREE_FAILURES else DELAY.pause_s(failures - FREE_FAILURES - 1)


def client_key(address: str) -> str:
    """Key that identifies a client by address: an IPv4 address, or the /64 network of an IPv6 address, which one host
    may own as a whole."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
