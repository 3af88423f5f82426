"""What the device can afford: policies over readings, with thresholds that a trembling sensor does not turn over."""

from __future__ import annotations

import math

import pytest

from edgesplit.errors import UsageError
from edgesplit_agent.power.mode import (
    PERFORMANCE,
    UNDER_VOLTAGE_S,
    PowerMode,
    PowerSettings,
    clock_slowdown,
    decide_power_mode,
    parse_watts,
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
def test_auto_goes_by_the_battery(read: Readings, mode: str) -> None:
    """Mains or unknown: fast. Below a half: seconds and joules. Below 15 %: joules."""
    assert decide_power_mode(AUTO, read, PERFORMANCE, 0.0).mode == mode


@pytest.mark.parametrize("policy", ["performance", "balanced", "saver"])
def test_a_policy_that_is_named_holds(policy: str) -> None:
    """Whatever the battery says; but an under-voltage goes before it."""
    wishes = PowerSettings(policy)  # type: ignore[arg-type]
    assert decide_power_mode(wishes, battery(5), PERFORMANCE, 0.0).mode == policy
    assert decide_power_mode(wishes, Readings(under_voltage=True), PERFORMANCE, 0.0).mode == "saver"


def test_a_battery_around_a_threshold_turns_nothing_over() -> None:
    """Down at 49, and back only at 53; down at 14, and back only at 18."""
    stance, modes = PERFORMANCE, []
    for percent in (51, 49, 51, 52.9, 49, 53.1, 49, 16, 14, 16, 17.9, 18.1, 60):
        stance = decide_power_mode(AUTO, battery(percent), stance, 0.0)
        modes.append(stance.mode[:1])
    assert "".join(modes) == "pbbbbpbbsssbp"


def test_under_voltage_is_thrifty_for_a_while_and_holds_updates() -> None:
    """A brown-out follows such a sign: no update begins, urgent or not, until a minute after the last one."""
    stance = decide_power_mode(AUTO, Readings(under_voltage=True), PERFORMANCE, 100.0)
    assert stance.mode == "saver" and "under-voltage" in stance.update_hold and stance.holds_urgent
    still = decide_power_mode(AUTO, Readings(under_voltage=False), stance, 100.0 + UNDER_VOLTAGE_S - 1)
    assert still.mode == "saver" and still.update_hold
    after = decide_power_mode(AUTO, Readings(under_voltage=False), still, 100.0 + UNDER_VOLTAGE_S)
    assert (after.mode, after.update_hold) == ("performance", "")


def test_a_low_battery_holds_updates_that_are_not_urgent() -> None:
    """An operator who wants one at once gets it; on mains nothing waits."""
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
def test_what_may_be_done_twice(stance: PowerMode, races: bool, hedges: bool, part: float) -> None:
    """On mains everything, on a battery a tenth, under a budget or in need nothing but what a deadline demands."""
    assert (stance.can_race, stance.can_hedge, stance.hedge_ratio) == (races, hedges, part)


@pytest.mark.parametrize(("text", "watts"), [("4W", 4.0), ("3500mW", 3.5), (" 2.5 w ", 2.5), ("0.5W", 0.5)])
def test_watts_as_people_write_them(text: str, watts: float) -> None:
    """With their unit."""
    assert parse_watts(text) == pytest.approx(watts)


@pytest.mark.parametrize("text", ["4", "0W", "-1W", "nanW", "1e3W", "2000W", "W", "4 V", "٤W"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    """With an example of one."""
    with pytest.raises(UsageError, match="as in 4W"):
        parse_watts(text)


def test_a_capped_clock_is_known_at_once() -> None:
    """Half the clock, twice the seconds; unknown or free: none; never absurd."""
    assert clock_slowdown(Readings(clock_ratio=0.5)) == pytest.approx(2.0)
    assert clock_slowdown(Readings()) == 1.0 and clock_slowdown(Readings(clock_ratio=1.0)) == 1.0
    assert math.isfinite(clock_slowdown(Readings(clock_ratio=1e-9)))
