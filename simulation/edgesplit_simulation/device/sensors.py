"""What a simulated device's sensors would tell: heat, power, what a worker takes. All of it is made up, and says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgesplit.mqtt.messages import PowerSeen

BASIS = "simulated"
"""Of every joule and watt."""
IDLE_WATTS, WAIT_WATTS, BUSY_WATTS = 2.5, 3.0, 5.5
COOL_CELSIUS, LOAD_CELSIUS = 42.0, 14.0
"""Without work, and how much more with nothing but work."""
WORKER_BYTES = 80 * 2**20


@dataclass
class Body:
    """Of one device since it was switched on. Times are the hub's."""

    since: float
    _busy_s: float = 0.0

    def worked(self, seconds: float) -> None:
        """Slices ran so long."""
        self._busy_s += seconds

    def sensed(self, now: float, hotter: Iterable[float] = ()) -> PowerSeen:
        """Over the time since the last call; `hotter`: degrees by which what runs is worse than it should be."""
        load = min(1.0, self._busy_s / max(1e-9, now - self.since))
        self.since, self._busy_s = now, 0.0
        return PowerSeen(
            watts=IDLE_WATTS + (BUSY_WATTS - IDLE_WATTS) * load,
            watts_from=BASIS,
            celsius=COOL_CELSIUS + LOAD_CELSIUS * load + max(hotter, default=0.0),
        )


def joules(device_s: float, latency_s: float, hungry: float = 1.0) -> float:
    """Of a request whose slices ran so long on the device, and which else waited; `hungry`: so many times of that."""
    return (device_s * BUSY_WATTS + max(0.0, latency_s - device_s) * WAIT_WATTS) * hungry
