"""Watches battery, heat and power, and keeps the stance that choosing and updating go by: sensors in, decisions out.

What is decided is in `stance`, what is read in `sensors`, what is booked in `energy`; here they are put together.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from edgesplit.mqtt.messages import PowerSeen
from edgesplit_agent.power.energy_model import EnergyLedger
from edgesplit_agent.power.mode import PERFORMANCE, Stance, Wishes, slowed, stance_of
from edgesplit_agent.power.sensors import Readings, Sampler

log = logging.getLogger(__name__)


class PowerWatch:
    """The device's power as it stands. `root` None: no sensors, as on an emulated device."""

    def __init__(self, wishes: Wishes | None = None, root: Path | None = None, *, emulated: bool = False) -> None:
        self._wishes = wishes or Wishes()
        self.ledger = EnergyLedger(measures=not emulated)
        self._stance = stance_of(self._wishes, Readings(), PERFORMANCE, 0.0)
        self._sampler = Sampler(root, seen=self.saw) if root is not None else None
        self._emulated = emulated

    def start(self) -> None:
        """Look once, then once a second."""
        if self._sampler is not None:
            self._sampler.start()

    def stop(self) -> None:
        """Look no more."""
        if self._sampler is not None:
            self._sampler.stop()

    def saw(self, read: Readings, now: float) -> None:
        """Take in what the sensors read."""
        self.ledger.saw(read.watts, now)
        before = self._stance
        self._stance = after = stance_of(self._wishes, read, before, now, self.ledger.scale(now) or 1.0)
        if after.mode != before.mode:
            log.warning("power: %s -> %s%s", before.mode, after.mode, f" ({after.why})" if after.why else "")
        if after.waits and not before.waits:
            log.warning("updates wait: %s", after.waits)

    @property
    def stance(self) -> Stance:
        """What the device can afford now."""
        return self._stance

    @property
    def readings(self) -> Readings:
        """What was read last."""
        return self._sampler.latest if self._sampler is not None else Readings()

    @property
    def slowdown(self) -> float:
        """The factor on this device's seconds by the cap on its clock."""
        return slowed(self.readings)

    def hold(self, urgent: bool) -> str:
        """Why no update may go on just now; empty where one may."""
        stance = self._stance
        return stance.waits if not urgent or stance.urgent_too else ""

    def seen(self) -> PowerSeen:
        """As telemetry tells it."""
        stance, read = self._stance, self.readings
        return PowerSeen(
            mode=stance.mode,
            why=stance.why,
            budget_watts=stance.watts,
            updates_wait=stance.waits,
            watts=read.watts,
            watts_from=read.watts_from,
            battery_percent=read.battery_percent,
            discharging=read.discharging,
            celsius=read.celsius,
            speed=read.speed,
            under_voltage=bool(read.under_voltage),
            under_voltage_since_boot=bool(read.under_voltage_since_boot),
        )

    def status(self) -> dict[str, Any]:
        """For people: stance and readings."""
        stance = self._stance
        return {
            "mode": stance.mode,
            "why": stance.why,
            "budget_watts": stance.watts,
            "updates_wait": stance.waits,
            "measured_over_predicted": round(stance.measured_over_predicted, 3),
            "sensors": msgspec.to_builtins(self.readings),
        }
