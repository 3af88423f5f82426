"""Simulated sensors: temperature, power and worker memory of a device, computed from its load and labelled as
simulated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgesplit.mqtt.messages import PowerState

BASIS = "simulated"
"""The basis that is reported with every energy and power figure."""
IDLE_WATTS, WAIT_WATTS, BUSY_WATTS = 2.5, 3.0, 5.5
COOL_CELSIUS, LOAD_CELSIUS = 42.0, 14.0
"""Temperature without load, and what full load adds to it, in degrees Celsius."""
WORKER_BYTES = 80 * 2**20


@dataclass
class PowerModel:
    """Load of one device, from which its power and temperature follow. Times are the hub's."""

    since: float
    _busy_s: float = 0.0

    def add_busy_time(self, seconds: float) -> None:
        """Add seconds of slice run time."""
        self._busy_s += seconds

    def sample(self, now: float, extra_celsius: Iterable[float] = ()) -> PowerState:
        """Power and temperature over the time since the last call; `extra_celsius` lists degrees that faulty releases
        add."""
        load = min(1.0, self._busy_s / max(1e-9, now - self.since))
        self.since, self._busy_s = now, 0.0
        return PowerState(
            watts=IDLE_WATTS + (BUSY_WATTS - IDLE_WATTS) * load,
            watts_source=BASIS,
            celsius=COOL_CELSIUS + LOAD_CELSIUS * load + max(extra_celsius, default=0.0),
        )


def joules(device_s: float, latency_s: float, energy_factor: float = 1.0) -> float:
    """Energy of a request in joules: `device_s` seconds of computing and the rest of `latency_s` waiting, times
    `energy_factor`."""
    return (device_s * BUSY_WATTS + max(0.0, latency_s - device_s) * WAIT_WATTS) * energy_factor
