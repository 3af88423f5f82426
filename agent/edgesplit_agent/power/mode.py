"""The power mode: what the device can afford now, how much power it may draw, and whether an update may begin.

`decide_power_mode` is the whole decision and a pure function of the operator's settings, the sensor readings and the
previous mode, so that a reading that oscillates around a threshold changes nothing. Answering comes first: no mode
refuses a request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from edgesplit_agent.power.sensors import Readings

Mode = Literal["performance", "balanced", "saver"]
BatteryPolicy = Literal["auto", "performance", "balanced", "saver"]
POLICIES: tuple[str, ...] = get_args(BatteryPolicy)

BALANCED_BELOW = 50.0
"""Battery percentage below which, on battery, `auto` weighs joules as much as seconds."""
SAVER_BELOW = 15.0
"""Battery percentage below which `auto` takes the row with the fewest joules that meets the deadline."""
HYSTERESIS = 3.0
"""Hysteresis in per cent: `auto` returns to the previous mode this much above a threshold."""
UNDER_VOLTAGE_S = 60.0
"""Seconds after the last under-voltage during which the device stays in `saver` and begins no update."""
REQUIRED_PROBABILITY: dict[Mode, float] = {"performance": 0.98, "balanced": 0.9, "saver": 0.0}
"""By mode, the probability of an answer in time below which the device starts an early hedge."""
HEDGE_RATIO: dict[Mode, float] = {"performance": 1.0, "balanced": 0.1, "saver": 0.0}
"""By mode, the energy for optional hedges as a ratio of answering everything locally: all of it on mains, a tenth on a
discharging battery."""
MAX_SLOWDOWN = 20.0
"""Upper bound of the slowdown attributed to a clock cap."""


@dataclass(frozen=True, slots=True)
class PowerSettings:
    """Power settings of the operator."""

    battery: BatteryPolicy = "auto"
    watts: float | None = None
    """Power budget in watts, as an average; None: no budget."""


@dataclass(frozen=True, slots=True)
class PowerMode:
    """What the device can afford now; read by row selection, hedging and updates."""

    mode: Mode = "performance"
    watts: float | None = None
    """Power budget in watts; None: no budget."""
    reason: str = ""
    """Reason for this mode, for operators."""
    update_hold: str = ""
    """Reason why no update may begin; empty if one may."""
    holds_urgent: bool = False
    """Not even an urgent update may begin."""
    saver_until: float = -math.inf
    """Monotonic time until which an under-voltage keeps the device in `saver`."""
    measured_over_predicted: float = 1.0
    """Measured power relative to the plan's figures; 1 where it is not measured."""

    @property
    def can_race(self) -> bool:
        """Whether work may be done twice to finish sooner."""
        return self.mode == "performance" and self.watts is None

    @property
    def can_hedge(self) -> bool:
        """Whether the device may start early beside an offload that is probably late. The forced hedge is always
        allowed."""
        return self.mode != "saver" and self.watts is None

    @property
    def required_probability(self) -> float:
        """Probability with which the offload target must answer in time to be waited for."""
        return REQUIRED_PROBABILITY[self.mode]

    @property
    def hedge_ratio(self) -> float:
        """Credit for optional hedges as a ratio of answering everything locally, unless the operator sets one."""
        return HEDGE_RATIO[self.mode] if self.watts is None else 0.0


PERFORMANCE = PowerMode()


def decide_power_mode(
    settings: PowerSettings, readings: Readings, before: PowerMode, now: float, scale: float = 1.0
) -> PowerMode:
    """The power mode for the readings taken at monotonic time `now`.

    `before` is the previous mode; `scale` is measured over predicted power, 1 where unmeasured. An under-voltage
    overrides settings and battery: it means `saver` and no update for `UNDER_VOLTAGE_S`.
    """
    saver_until = now + UNDER_VOLTAGE_S if readings.under_voltage else before.saver_until
    mode, why = _mode(settings.battery, readings, before.mode)
    waits = ""
    if mode == "saver" and _is_discharging(readings) and readings.battery_percent is not None:
        waits = f"the battery is at {readings.battery_percent:.0f} %"
    under_voltage = now < saver_until
    # A falling supply voltage precedes a power cut: an update under way could be the one it interrupts.
    if under_voltage:
        mode, why = "saver", "under-voltage"
        waits = "under-voltage: a power cut may follow"
    return PowerMode(mode, settings.watts, why, waits, under_voltage, saver_until, scale)


def _mode(policy: BatteryPolicy, readings: Readings, before: Mode) -> tuple[Mode, str]:
    if policy != "auto":
        return policy, f"--battery-policy {policy}"
    percent = readings.battery_percent
    if percent is None or not _is_discharging(readings):
        return "performance", ""
    # Leaving a mode takes HYSTERESIS per cent more than entering it, so a trembling reading changes nothing.
    if percent < SAVER_BELOW + (HYSTERESIS if before == "saver" else 0.0):
        return "saver", f"battery at {percent:.0f} %"
    if percent < BALANCED_BELOW + (HYSTERESIS if before in ("balanced", "saver") else 0.0):
        return "balanced", f"battery at {percent:.0f} %"
    return "performance", ""


def _is_discharging(readings: Readings) -> bool:
    """Whether the battery is discharging; where that is unknown, whether the mains are off."""
    return readings.discharging is True or (readings.discharging is None and readings.mains is False)


def clock_slowdown(readings: Readings) -> float:
    """Factor on the device's seconds caused by the cap on its clock; 1 where there is no cap or it is unknown.

    It applies as soon as the cap does, so that the first request after throttling is predicted right, and not the
    third.
    """
    clock_ratio = 1.0 if readings.clock_ratio is None else readings.clock_ratio
    return min(MAX_SLOWDOWN, 1.0 / max(clock_ratio, 1.0 / MAX_SLOWDOWN))
