"""Who sends more than any correct agent does: a purse of units for each device, filled at a steady rate.

A device that empties its purse floods. It stays so until the purse is half full again, and is told of anew every
`RETELL_S` while it goes on. The rates are far above what an agent does that fetches at 140 MB/s (decision 18), and the
purse pays for a burst: only a sustained flood is one. No threads, no clock of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

PER_S = 1_000.0
"""Units that a device earns, each second."""
PURSE = 10_000.0
RETELL_S = 5.0
MESSAGE: Mapping[str, float] = {"fetch": 0.25}
"""Units that a message costs, by its kind: a fast fetch asks hundreds of times a second. Any other kind costs 1."""
MALFORMED = 10.0
"""No correct agent sends one."""
AGAIN = 4.0
"""For a chunk that the same device asked for within `LATELY_S`: some are lost on the way, not all of them."""
CONNECTION = 100.0
"""A handshake costs the broker as much as many messages; an agent waits before it comes back."""
BYTES_PER_UNIT = 4_096
"""Of what a device sends, and of the metadata that it asks for."""
LATELY_S = 30.0
REMEMBERED = 65_536
"""Chunks, of all devices together."""


@dataclass(slots=True)
class _Purse:
    units: float
    at: float
    flooding: bool = False
    told: float = float("-inf")


@dataclass(slots=True)
class Purses:
    """One purse per device that was heard lately; a full one is forgotten."""

    _of: dict[str, _Purse] = field(default_factory=dict)
    _asked: OrderedDict[tuple[str, str], float] = field(default_factory=OrderedDict)

    def spend(self, device: str, units: float, now: float) -> bool:
        """Take these units. True if it is time to tell that the device floods."""
        purse = self._of.get(device)
        if purse is None:
            self._forget_full(now)
            purse = self._of[device] = _Purse(PURSE, now)
        purse.units = min(PURSE, purse.units + (now - purse.at) * PER_S) - units
        purse.at = now
        if purse.units < 0:
            purse.units, purse.flooding = 0.0, True
        elif purse.units >= PURSE / 2:
            purse.flooding = False
        if purse.flooding and now - purse.told >= RETELL_S:
            purse.told = now
            return True
        return False

    def flooding(self, device: str) -> bool:
        """Nothing of this device is taken in now."""
        purse = self._of.get(device)
        return purse is not None and purse.flooding

    def again(self, device: str, chunks: tuple[str, ...], now: float) -> int:
        """How many of these chunks the device asked for a moment ago."""
        repeated = 0
        for chunk in chunks:
            before = self._asked.pop((device, chunk), None)
            repeated += before is not None and now - before < LATELY_S
            self._asked[device, chunk] = now
        while len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)
        return repeated

    def _forget_full(self, now: float) -> None:
        full = [name for name, one in self._of.items() if one.units + (now - one.at) * PER_S >= PURSE]
        for name in full:
            del self._of[name]
