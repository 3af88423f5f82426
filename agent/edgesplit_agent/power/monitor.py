"""Power monitor: reads the sensors once a second and keeps the power mode that row selection and updates follow.

The decision is in `mode`, reading in `sensors`, accounting in `energy_model`; this module connects them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from edgesplit.mqtt.messages import PowerState
from edgesplit_agent.power.energy_model import EnergyMeter
from edgesplit_agent.power.mode import PERFORMANCE, PowerSettings, clock_slowdown, decide_power_mode
from edgesplit_agent.power.sensors import Readings, Sampler

log = logging.getLogger(__name__)


class PowerMonitor:
    """The device's current power mode, readings and energy meter. `root` None: no sensors, as on an emulated device."""

    def __init__(
        self, settings: PowerSettings | None = None, root: Path | None = None, *, emulated: bool = False
    ) -> None:
        self._settings = settings or PowerSettings()
        self.energy = EnergyMeter(measures=not emulated)
        self.mode = decide_power_mode(self._settings, Readings(), PERFORMANCE, 0.0)
        """The current power mode."""
        self._sampler = Sampler(root, on_readings=self.on_readings) if root is not None else None

    def start(self) -> None:
        """Read the sensors now, then once a second on a background thread."""
        if self._sampler is not None:
            self._sampler.start()

    def stop(self) -> None:
        """Stop reading the sensors."""
        if self._sampler is not None:
            self._sampler.stop()

    def on_readings(self, readings: Readings, now: float) -> None:
        """Process one set of readings taken at monotonic time `now`."""
        self.energy.on_reading(readings.watts, now)
        before = self.mode
        self.mode = after = decide_power_mode(self._settings, readings, before, now, self.energy.scale(now) or 1.0)
        if after.mode != before.mode:
            log.warning("power: %s -> %s%s", before.mode, after.mode, f" ({after.reason})" if after.reason else "")
        if after.update_hold and not before.update_hold:
            log.warning("updates wait: %s", after.update_hold)

    @property
    def readings(self) -> Readings:
        """The latest readings."""
        return self._sampler.latest if self._sampler is not None else Readings()

    @property
    def slowdown(self) -> float:
        """Factor on this device's seconds caused by the cap on its clock."""
        return clock_slowdown(self.readings)

    def update_hold(self, urgent: bool) -> str:
        """Reason why no update (urgent or not) may proceed now; empty if one may."""
        mode = self.mode
        return mode.update_hold if not urgent or mode.holds_urgent else ""

    def to_telemetry(self) -> PowerState:
        """Mode and readings as telemetry sends them."""
        mode, readings = self.mode, self.readings
        return PowerState(
            mode=mode.mode, mode_reason=mode.reason, budget_watts=mode.watts, updates_deferred_reason=mode.update_hold,
            watts=readings.watts, watts_source=readings.watts_source, battery_percent=readings.battery_percent,
            discharging=readings.discharging, celsius=readings.celsius, clock_ratio=readings.clock_ratio,
            under_voltage=bool(readings.under_voltage),
            under_voltage_since_boot=bool(readings.under_voltage_since_boot),
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Mode and readings for the status page."""
        mode = self.mode
        return {
            "mode": mode.mode,
            "mode_reason": mode.reason,
            "budget_watts": mode.watts,
            "updates_deferred_reason": mode.update_hold,
            "measured_over_predicted": round(mode.measured_over_predicted, 3),
            "sensors": msgspec.to_builtins(self.readings),
        }
