"""Rate limiting of devices by a token bucket each (units refilled at a steady rate). Sans I/O: no threads, no clock of
its own.

A device that empties its bucket floods. It is limited until the bucket is half full again, and reported anew every
`REPORT_EVERY_S` while it goes on. The rates are far above those of an agent that fetches at 140 MB/s (decision 18), and
a full bucket pays for a burst: only a sustained flood is limited.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

UNITS_PER_S = 1_000.0
"""Units refilled per second."""
CAPACITY = 10_000.0
"""Capacity of a bucket, in units."""
REPORT_EVERY_S = 5.0
"""Interval between two reports of a flood that goes on."""
MESSAGE_UNITS: Mapping[str, float] = {"fetch": 0.25}
"""Units that a message costs, by its kind; any other kind costs 1. A fast fetch sends hundreds of requests a second, so
these are cheaper."""
MALFORMED_UNITS = 10.0
"""Units that a malformed message costs; a correct agent sends none."""
REPEATED_CHUNK_UNITS = 4.0
"""Units that a chunk costs which the same device requested within `REPEAT_WINDOW_S`. Some chunks are lost on the way,
but not all."""
CONNECTION_UNITS = 100.0
"""Units that a connection costs: a handshake costs the broker as much as many messages, and an agent backs off before
it reconnects."""
BYTES_PER_UNIT = 4_096
"""Bytes per unit, of messages sent by a device and of the metadata it requests."""
REPEAT_WINDOW_S = 30.0
"""Time within which a repeated chunk request is charged."""
REMEMBERED_REQUESTS = 65_536
"""Chunk requests remembered, of all devices together."""


@dataclass(slots=True)
class TokenBucket:
    """The bucket of one device."""

    units: float
    refilled_at: float
    flooding: bool = False
    reported_at: float = float("-inf")


@dataclass(slots=True)
class TokenBuckets:
    """Token buckets of the devices that sent messages lately; full ones are dropped from memory."""

    buckets: dict[str, TokenBucket] = field(default_factory=dict)
    _requested_at: OrderedDict[tuple[str, str], float] = field(default_factory=OrderedDict)

    def consume(self, device: str, units: float, now: float) -> bool:
        """Charge a device. True if its flood is to be reported now."""
        bucket = self.buckets.get(device)
        if bucket is None:
            self._drop_full(now)
            bucket = self.buckets[device] = TokenBucket(CAPACITY, now)
        # Token bucket: refill for the time since the last charge, up to the capacity, then pay. The debt is cut at
        # zero, so that a device recovers CAPACITY / 2 / UNITS_PER_S seconds after its flood ends, however large it was.
        bucket.units = min(CAPACITY, bucket.units + (now - bucket.refilled_at) * UNITS_PER_S) - units
        bucket.refilled_at = now
        if bucket.units < 0:
            bucket.units, bucket.flooding = 0.0, True
        elif bucket.units >= CAPACITY / 2:  # hysteresis: limited until half full, so that the state does not flap
            bucket.flooding = False
        if bucket.flooding and now - bucket.reported_at >= REPORT_EVERY_S:
            bucket.reported_at = now
            return True
        return False

    def is_limited(self, device: str) -> bool:
        """Whether messages of this device are dropped now."""
        bucket = self.buckets.get(device)
        return bucket is not None and bucket.flooding

    def count_repeated(self, device: str, chunks: tuple[str, ...], now: float) -> int:
        """How many of these chunks the device requested within `REPEAT_WINDOW_S`; notes this request."""
        repeated = 0
        for chunk in chunks:
            before = self._requested_at.pop((device, chunk), None)
            repeated += before is not None and now - before < REPEAT_WINDOW_S
            self._requested_at[device, chunk] = now
        while len(self._requested_at) > REMEMBERED_REQUESTS:
            self._requested_at.popitem(last=False)
        return repeated

    def _drop_full(self, now: float) -> None:
        full = [
            name
            for name, bucket in self.buckets.items()
            if bucket.units + (now - bucket.refilled_at) * UNITS_PER_S >= CAPACITY
        ]
        for name in full:
            del self.buckets[name]
