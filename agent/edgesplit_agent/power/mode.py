"""What the device can afford just now: fast, even or thrifty, how much power, and whether an update may begin.

`stance_of` is the whole decision, over what the operator wished, what the sensors read, and what was before, so that a
reading that trembles around a threshold turns nothing over. Answering comes first: no stance refuses a request.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from edgesplit.errors import UsageError
from edgesplit_agent.power.sensors import Readings

Mode = Literal["performance", "balanced", "saver"]
BatteryPolicy = Literal["auto", "performance", "balanced", "saver"]
POLICIES: tuple[str, ...] = get_args(BatteryPolicy)

BALANCED_BELOW = 50.0
"""Per cent of the battery: below, and not on mains, `auto` weighs joules as much as seconds."""
SAVER_BELOW = 15.0
"""Per cent: below, `auto` takes the fewest joules that meet the deadline."""
BACK = 3.0
"""Per cent above a threshold at which `auto` goes back."""
UNDER_VOLTAGE_S = 60.0
"""So long after the last sign of under-voltage the device stays thrifty and begins no update."""
SURE: dict[Mode, float] = {"performance": 0.98, "balanced": 0.9, "saver": 0.0}
"""Where the cloud is less likely than this to be in time, the device starts beside it."""
HEDGE_PART: dict[Mode, float] = {"performance": 1.0, "balanced": 0.1, "saver": 0.0}
"""Energy for early hedges: on mains everything may be done twice, on a battery that runs down a tenth."""
MOST_BUDGET_W = 1_000.0
SLOWEST = 20.0
"""A cap is believed to slow the device down by no more than this."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the operator asked for."""

    battery: BatteryPolicy = "auto"
    watts: float | None = None
    """At most so many on average."""


@dataclass(frozen=True, slots=True)
class Stance:
    """What choosing and updating go by."""

    mode: Mode = "performance"
    watts: float | None = None
    why: str = ""
    """For people: what made it so."""
    waits: str = ""
    """Why no update may begin; empty where one may."""
    urgent_too: bool = False
    """Not even one that an operator wants at once."""
    thrifty_until: float = -math.inf
    """Of the monotonic clock: the end of what an under-voltage brings."""
    measured_over_predicted: float = 1.0
    """What the rails say of this device's power, relative to the plan's figures."""

    @property
    def races(self) -> bool:
        """Work may be done twice to be done sooner."""
        return self.mode == "performance" and self.watts is None

    @property
    def hedges(self) -> bool:
        """The device may start beside a cloud that is probably late. The deadline's hedge is always there."""
        return self.mode != "saver" and self.watts is None

    @property
    def sure(self) -> float:
        """How sure the cloud must be to be waited for."""
        return SURE[self.mode]

    @property
    def hedge_part(self) -> float:
        """What early hedges may cost, as a part of answering everything alone, where the operator names none."""
        return HEDGE_PART[self.mode] if self.watts is None else 0.0


PERFORMANCE = Stance()


def stance_of(wishes: Wishes, read: Readings, before: Stance, now: float, scale: float = 1.0) -> Stance:
    """The stance for what was read `now` (monotonic). `scale` is measured over predicted power, 1 where unmeasured."""
    until = now + UNDER_VOLTAGE_S if read.under_voltage else before.thrifty_until
    mode, why = _mode(wishes.battery, read, before.mode)
    waits = ""
    if mode == "saver" and _runs_down(read) and read.battery_percent is not None:
        waits = f"the battery is at {read.battery_percent:.0f} %"
    thrifty = now < until
    if thrifty:
        mode, why = "saver", "under-voltage"
        waits = "under-voltage: a power cut may follow"
    return Stance(mode, wishes.watts, why, waits, thrifty, until, scale)


def _mode(policy: BatteryPolicy, read: Readings, before: Mode) -> tuple[Mode, str]:
    if policy != "auto":
        return policy, f"--battery-policy {policy}"
    percent = read.battery_percent
    if percent is None or not _runs_down(read):
        return "performance", ""
    if percent < SAVER_BELOW + (BACK if before == "saver" else 0.0):
        return "saver", f"battery at {percent:.0f} %"
    if percent < BALANCED_BELOW + (BACK if before in ("balanced", "saver") else 0.0):
        return "balanced", f"battery at {percent:.0f} %"
    return "performance", ""


def _runs_down(read: Readings) -> bool:
    """On its battery, and that is being emptied as far as anybody says."""
    return read.discharging is True or (read.discharging is None and read.mains is False)


def parse_watts(text: str) -> float:
    """Watts that `text` spells, as in 4W or 3500mW; else UsageError."""
    found = re.fullmatch(r"\s*([0-9]{1,7}(?:\.[0-9]{1,6})?)\s*(m?)W\s*", text, re.IGNORECASE)
    watts = float(found[1]) / (1e3 if found[2] else 1.0) if found else 0.0
    if not 0 < watts <= MOST_BUDGET_W:
        raise UsageError(f"not a power budget: {text[:80]!r} (as in 4W or 3500mW)")
    return watts


def slowed(read: Readings) -> float:
    """The factor on this device's seconds because its clock is capped: known the moment that the cap is, so that the
    first request after throttling is predicted right, and not the third. 1 where nothing caps it, or nobody says."""
    return 1.0 if read.speed is None else min(SLOWEST, 1.0 / max(read.speed, 1.0 / SLOWEST))
