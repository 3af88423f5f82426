"""Power modes: policies over sensor readings, with hysteresis around each threshold."""

from __future__ import annotations

import math

import pytest

from edgesplit_agent.power.mode import (
    PERFORMANCE,
    UNDER_VOLTAGE_S,
    PowerMode,
    PowerSettings,
    clock_slowdown,
    decide_power_mode,
)
from edgesplit_agent.power.sensors import Readings

AUTO = PowerSettings()


def battery(percent: float, discharging: bool = True) -> Readings:
    return Readings(battery_percent=percent, discharging=discharging, mains=not discharging)


@pytest.mark.parametrize(
    ("read", "mode"),
    [
        (Readings(), "performance"),
        (battery(5, discharging=False), "performance"),
        (battery(90), "performance"),
        (battery(49.9), "balanced"),
        (battery(14.9), "saver"),
        (Readings(battery_percent=10, mains=False), "saver"),  # a battery that does not say whether it is emptied
        (Readings(battery_percent=10), "performance"),
        (Readings(discharging=True), "performance"),  # nobody knows how full it is
    ],
)
def test_auto_policy_follows_the_battery(read: Readings, mode: str) -> None:
    """Mains or unknown: performance. Below one half: balanced. Below 15 %: saver."""
    assert decide_power_mode(AUTO, read, PERFORMANCE, 0.0).mode == mode


@pytest.mark.parametrize("policy", ["performance", "balanced", "saver"])
def test_explicit_policy_overrides_the_battery(policy: str) -> None:
    """Whatever the battery's charge; but under-voltage overrides the policy."""
    wishes = PowerSettings(policy)  # type: ignore[arg-type]
    assert decide_power_mode(wishes, battery(5), PERFORMANCE, 0.0).mode == policy
    assert decide_power_mode(wishes, Readings(under_voltage=True), PERFORMANCE, 0.0).mode == "saver"


def test_battery_thresholds_have_hysteresis() -> None:
    """Down at 49, and back only at 53; down at 14, and back only at 18."""
    stance, modes = PERFORMANCE, []
    for percent in (51, 49, 51, 52.9, 49, 53.1, 49, 16, 14, 16, 17.9, 18.1, 60):
        stance = decide_power_mode(AUTO, battery(percent), stance, 0.0)
        modes.append(stance.mode[:1])
    assert "".join(modes) == "pbbbbpbbsssbp"


def test_under_voltage_saves_power_for_a_while_and_defers_updates() -> None:
    """A brown-out follows such a sign: no update starts, urgent or not, until a minute after the last one."""
    stance = decide_power_mode(AUTO, Readings(under_voltage=True), PERFORMANCE, 100.0)
    assert stance.mode == "saver" and "under-voltage" in stance.update_hold and stance.holds_urgent
    still = decide_power_mode(AUTO, Readings(under_voltage=False), stance, 100.0 + UNDER_VOLTAGE_S - 1)
    assert still.mode == "saver" and still.update_hold
    after = decide_power_mode(AUTO, Readings(under_voltage=False), still, 100.0 + UNDER_VOLTAGE_S)
    assert (after.mode, after.update_hold) == ("performance", "")


def test_low_battery_defers_updates_that_are_not_urgent() -> None:
    """An operator who marks one as urgent gets it; on mains none is deferred."""
    low = decide_power_mode(AUTO, battery(10), PERFORMANCE, 0.0)
    assert low.update_hold and not low.holds_urgent
    assert not decide_power_mode(AUTO, battery(10, discharging=False), PERFORMANCE, 0.0).update_hold
    assert not decide_power_mode(PowerSettings("saver"), Readings(), PERFORMANCE, 0.0).update_hold


@pytest.mark.parametrize(
    ("stance", "races", "hedges", "part"),
    [
        (PowerMode("performance"), True, True, 1.0),
        (PowerMode("balanced"), False, True, 0.1),
        (PowerMode("saver"), False, False, 0.0),
        (PowerMode("performance", watts=4.0), False, False, 0.0),
    ],
)
def test_hedge_budget_by_power_mode(stance: PowerMode, races: bool, hedges: bool, part: float) -> None:
    """On mains every hedge, on a battery a tenth, under a budget or in saver only those that a deadline demands."""
    assert (stance.can_race, stance.can_hedge, stance.hedge_ratio) == (races, hedges, part)


def test_capped_clock_gives_the_slowdown_at_once() -> None:
    """Half the clock, twice the seconds; unknown or uncapped: none; always within bounds."""
    assert clock_slowdown(Readings(clock_ratio=0.5)) == pytest.approx(2.0)
    assert clock_slowdown(Readings()) == 1.0 and clock_slowdown(Readings(clock_ratio=1.0)) == 1.0
    assert math.isfinite(clock_slowdown(Readings(clock_ratio=1e-9)))
