"""Joules per inference: by the plan's figures, and scaled to the measured power where the board has sensors."""

from __future__ import annotations

import pytest

from edgesplit.plan import Link, Plan, Power, Row, energy_j
from edgesplit_agent.power.energy_model import EnergyMeter, actual_joules

LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.05)
LOCAL = Row(name="local", device=("a",), device_s=0.3, device_joules=1.5)
REMOTE = Row(name="remote", remote=("a",), up_bytes=60_000, encode_s=0.01)
POWER = Power(idle_watts=2.0, busy_watts=5.0, radio_watts=1.0, up_joules_per_byte=1e-6, wake_joules=0.02)
PLAN = Plan(model="m@1", device_class="pi", rows=(REMOTE, LOCAL), link=LINK, power=POWER)


def test_request_as_planned_costs_the_planned_joules() -> None:
    """The same arithmetic on measured times; the radio's base power counts while the answer is awaited."""
    from edgesplit.plan import Conditions

    now = Conditions(link=LINK)
    assert actual_joules(LOCAL, POWER, 0.3, 0.3, 0.0) == pytest.approx(energy_j(LOCAL, now, POWER))
    assert actual_joules(REMOTE, POWER, 0.01, 0.12, 0.06) == pytest.approx(energy_j(REMOTE, now, POWER))


def test_joules_are_predicted_without_power_sensors() -> None:
    """And marked as predicted; a plan without figures gives no joules at all."""
    ledger = EnergyMeter()
    assert ledger.record_answer(PLAN, 1.5, 0.3, 1.0) == (1.5, "predicted")
    bare = Plan(model="m@1", device_class="pi", rows=(LOCAL,), link=LINK)
    assert ledger.record_answer(bare, 1.5, 0.3, 1.0) == (0.0, "")


def watched(ledger: EnergyMeter, watts: float, seconds: int = 30) -> None:
    """One request a second of 0.9 J beyond idling, beside rails that show so many watts."""
    for second in range(seconds):
        ledger.on_reading(watts, float(second))
        ledger.record_answer(PLAN, 1.5, 0.3, second + 0.5)


def test_measured_power_scales_the_prediction() -> None:
    """Predicted are 2 W idle and 0.9 J a second; the sensors show 4.35 W: half as much again."""
    ledger = EnergyMeter()
    watched(ledger, 4.35)
    joules, basis = ledger.record_answer(PLAN, 1.5, 0.3, 29.6)
    assert basis == "measured" and joules == pytest.approx(1.5 * 1.5, rel=0.05)


@pytest.mark.parametrize("watts", [0.01, 500.0])
def test_implausible_sensor_readings_are_ignored(watts: float) -> None:
    """A factor of five and more: the rail of another part of the board, or none at all."""
    ledger = EnergyMeter()
    watched(ledger, watts)
    assert ledger.record_answer(PLAN, 1.5, 0.3, 29.6) == (1.5, "predicted")


def test_emulated_device_measures_no_power() -> None:
    """Its host's sensors do not describe it."""
    ledger = EnergyMeter(measures=False)
    watched(ledger, 4.35)
    assert ledger.record_answer(PLAN, 1.5, 0.3, 29.6)[1] == "predicted"


def test_stale_sensor_readings_expire() -> None:
    """A sensor that went away, a device that slept: the joules are predicted again."""
    ledger = EnergyMeter()
    watched(ledger, 4.35)
    assert ledger.scale(29.6) is not None
    ledger.on_reading(None, 30.0)
    assert ledger.scale(60.0) is None
    ledger.on_reading(4.0, 1_000.0)
    assert ledger.scale(1_000.0) is None
