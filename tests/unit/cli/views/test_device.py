"""Power figures for operators: `edgectl device show`, and the agent's options."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgesplit.errors import MalformedMessage
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import PowerState, Telemetry, TelemetryWindow
from edgesplit_agent.main import main
from edgesplit_agent.power.mode import PowerSettings
from edgesplit_agent.power.monitor import PowerMonitor
from edgesplit_agent.power.sensors import Readings
from edgesplit_cli.views.device import joules_text, power_line, reason_lines


def test_battery_and_budget_are_printed_on_one_line() -> None:
    """Only known values."""
    watch = PowerMonitor(PowerSettings("auto", 4.0))
    told = msgspec.to_builtins(watch.to_telemetry())
    assert power_line(told) == "power: performance, budget 4 W, by the plan's figures"
    seen = PowerState(
        mode="saver", mode_reason="battery at 10 %", budget_watts=4.0,
        updates_deferred_reason="the battery is at 10 %", watts=3.217,
        watts_source="battery", battery_percent=10.0, discharging=True, celsius=71.2, clock_ratio=0.6,
        under_voltage=True,
    )  # fmt: skip
    assert power_line(msgspec.to_builtins(seen)) == (
        "power: saver (battery at 10 %), battery 10 % and falling, 3.22 W by its battery of 4 W, 71 °C, "
        "clock capped at 60%, UNDER-VOLTAGE: check its supply and cable, updates wait: the battery is at 10 %"
    )


def test_device_shows_why_a_cut_was_chosen() -> None:
    """The agent's sentence as it is, of models that have one; also of the last telemetry of a device that is off."""
    windows = [
        {"model": "digits", "reason": "the cloud: as planned"},
        {"model": "idle", "reason": ""},
        {"model": "old"},
    ]
    for name in ("telemetry", "last_telemetry"):
        assert [line.plain for line in reason_lines({name: {"models": windows}})] == ["digits the cloud: as planned"]
    assert reason_lines({}) == []


def test_predicted_joules_are_labelled() -> None:
    """Predicted is not measured, and unknown is neither."""
    assert joules_text({"joules": 0.7123, "joules_basis": "predicted"}) == "0.712 (predicted)"
    assert joules_text({"joules": 0.7123, "joules_basis": "measured"}) == "0.712"
    assert joules_text({}) == joules_text({"joules": 0.0, "joules_basis": ""}) == "-"


def telemetry(power: PowerState | None) -> Telemetry:
    window = TelemetryWindow(model="m", release="r", row="local")
    return Telemetry(
        session=1, sequence=1, emulated=False, up_bytes_per_s=1.0, rtt_s=0.0, remote_usable=True, models=(window,),
        power=power,
    )  # fmt: skip


def test_extreme_sensor_values_decode() -> None:
    """Also telemetry without power values, as an older agent sends it."""
    watch = PowerMonitor(PowerSettings("auto", 0.001))
    watch.on_readings(
        Readings(under_voltage=True, battery_percent=0.0, discharging=True, celsius=-200.0, clock_ratio=1e-9), 1.0
    )
    for power in (None, watch.to_telemetry()):
        message = telemetry(power)
        assert messages.decode(messages.encode(message), Telemetry) == message


@pytest.mark.parametrize(
    "change", [{"clock_ratio": 2.0}, {"battery_percent": 101.0}, {"watts": -1.0}, {"mode_reason": "x" * 200}]
)
def test_impossible_sensor_values_are_malformed(change: dict[str, object]) -> None:
    """The decoder has the bounds."""
    spoiled = msgspec.to_builtins(telemetry(PowerState()))
    spoiled["power"] = {"mode": "saver", **change}
    with pytest.raises(MalformedMessage):
        messages.decode(msgspec.msgpack.encode(spoiled), Telemetry)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--power-budget", "4"], "as in 4W"),
        (["--battery-policy", "turbo"], "invalid choice"),
    ],
)
def test_invalid_power_options_are_refused_first(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the valid spelling."""
    with pytest.raises(SystemExit) as ended:
        main(["run", "--data", str(tmp_path), *options])
    assert ended.value.code == 2 and said in capsys.readouterr().err
