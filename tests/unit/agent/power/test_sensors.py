"""Sensors below a root folder: what real boards show, and what a damaged or hostile folder may hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from edgesplit_agent.power.sensors import Readings, Sampler, read

ORIN = {
    "class/hwmon/hwmon1/name": "ina3221",
    "class/hwmon/hwmon1/in1_label": "VDD_IN",
    "class/hwmon/hwmon1/in1_input": "5000",
    "class/hwmon/hwmon1/curr1_input": "1200",
    "class/hwmon/hwmon1/in2_label": "VDD_CPU_GPU_CV",
    "class/hwmon/hwmon1/in2_input": "5000",
    "class/hwmon/hwmon1/curr2_input": "500",
    "class/thermal/thermal_zone0/temp": "51500",
    "class/thermal/thermal_zone1/temp": "48000",
    "class/thermal/thermal_zone0/trip_point_0_type": "passive",
    "class/thermal/thermal_zone0/trip_point_0_temp": "99000",
}
BATTERY = {
    "class/power_supply/BAT0/type": "Battery",
    "class/power_supply/BAT0/status": "Discharging",
    "class/power_supply/BAT0/capacity": "42",
    "class/power_supply/BAT0/voltage_now": "11400000",
    "class/power_supply/BAT0/current_now": "-500000",
    "class/power_supply/AC/type": "Mains",
    "class/power_supply/AC/online": "0",
    "class/power_supply/hidpp_battery_0/type": "Battery",
    "class/power_supply/hidpp_battery_0/scope": "Device",
    "class/power_supply/hidpp_battery_0/capacity": "3",
    "class/power_supply/hidpp_battery_0/status": "Discharging",
}
PI = {
    "devices/platform/soc/soc:firmware/get_throttled": "50005",
    "devices/system/cpu/cpufreq/policy0/cpuinfo_max_freq": "1800000",
    "devices/system/cpu/cpufreq/policy0/scaling_max_freq": "1800000",
    "devices/system/cpu/cpufreq/policy0/scaling_cur_freq": "600000",
    "class/thermal/thermal_zone0/temp": "84000",
    "class/thermal/thermal_zone0/trip_point_0_type": "passive",
    "class/thermal/thermal_zone0/trip_point_0_temp": "80000",
}


def under(root: Path, files: dict[str, str]) -> Path:
    """A folder like /sys with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_input_rail_is_the_boards_power(tmp_path: Path) -> None:
    """The other rails are fed by the input rail and are not added to it; the hottest zone counts."""
    got = read(under(tmp_path, ORIN))
    assert (got.watts, got.watts_source) == (pytest.approx(6.0), "rails")
    assert (got.celsius, got.hot) == (51.5, False)
    assert got.battery_percent is None and got.mains is None and got.under_voltage is None


def test_partial_rails_are_added(tmp_path: Path) -> None:
    """Two ina219, one of which reports microwatts itself."""
    files = {
        "class/hwmon/hwmon0/name": "ina219",
        "class/hwmon/hwmon0/power1_input": "2500000",
        "class/hwmon/hwmon2/name": "ina219",
        "class/hwmon/hwmon2/in1_input": "5000",
        "class/hwmon/hwmon2/curr1_input": "300",
        "class/hwmon/hwmon3/name": "coretemp",
        "class/hwmon/hwmon3/in1_input": "99999",
        "class/hwmon/hwmon3/curr1_input": "99999",
    }
    assert read(under(tmp_path, files)).watts == pytest.approx(4.0)


def test_discharging_battery_gives_the_devices_power(tmp_path: Path) -> None:
    """Whatever sign the driver gives the discharge; a mouse's battery is not the device's."""
    got = read(under(tmp_path, BATTERY))
    assert (got.battery_percent, got.discharging, got.mains) == (42, True, False)
    assert (got.watts, got.watts_source) == (pytest.approx(5.7), "battery")


def test_charging_battery_gives_no_power(tmp_path: Path) -> None:
    """What flows into it is not what the device draws."""
    files = BATTERY | {"class/power_supply/BAT0/status": "Charging", "class/power_supply/AC/online": "1"}
    got = read(under(tmp_path, files))
    assert (got.discharging, got.mains, got.watts) == (False, True, None)


def test_raspberry_pi_with_a_weak_supply(tmp_path: Path) -> None:
    """Bits 0 and 2: under-voltage and throttled now; the clock is reported as it is, because the firmware hides the
    cap."""
    got = read(under(tmp_path, PI))
    assert (got.under_voltage, got.under_voltage_since_boot, got.hot) == (True, True, True)
    assert got.clock_ratio == pytest.approx(1 / 3)
    later = read(under(tmp_path, {"devices/platform/soc/soc:firmware/get_throttled": "0x50000"}))
    assert (later.under_voltage, later.under_voltage_since_boot, later.clock_ratio) == (False, True, 1.0)


def test_low_clock_alone_is_no_throttling(tmp_path: Path) -> None:
    """A governor that lets an idle processor rest is no cap; a lowered ceiling is."""
    idle = PI | {"devices/platform/soc/soc:firmware/get_throttled": "0"}
    assert read(under(tmp_path, idle)).clock_ratio == 1.0
    assert read(under(tmp_path, {"devices/system/cpu/cpufreq/policy0/scaling_max_freq": "900000"})).clock_ratio == 0.5


def test_voltage_monitor_alarm_is_under_voltage(tmp_path: Path) -> None:
    """Where the firmware's bits are not shown."""
    files = {"class/hwmon/hwmon0/name": "rpi_volt", "class/hwmon/hwmon0/in0_lcrit_alarm": "1"}
    assert read(under(tmp_path, files)).under_voltage is True


def test_no_sensors_give_unknown_readings(tmp_path: Path) -> None:
    """And nothing fails."""
    assert read(tmp_path / "nowhere") == Readings()


def test_irregular_sensor_files_are_unknown(tmp_path: Path) -> None:
    """A FIFO without a writer does not block the sampler; a folder and a dangling link are no numbers."""
    root = under(tmp_path, BATTERY)
    capacity, status = root / "class/power_supply/BAT0/capacity", root / "class/power_supply/BAT0/status"
    capacity.unlink()
    os.mkfifo(capacity)
    status.unlink()
    status.mkdir()
    (root / "class/thermal").mkdir()
    (root / "class/thermal/thermal_zone0").symlink_to(root / "gone")
    got = read(root)
    assert got.battery_percent is None and got.discharging is False and got.celsius is None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    some.dictionaries(some.sampled_from(sorted({**ORIN, **BATTERY, **PI})), some.binary(max_size=300), max_size=8),
)
def test_garbage_reads_as_unknown(tmp_path: Path, spoiled: dict[str, bytes]) -> None:
    """Whatever the files hold, reading does not fail, and every value is within plausible bounds."""
    root = under(tmp_path, {**ORIN, **BATTERY, **PI})
    for name, data in spoiled.items():
        (root / name).write_bytes(data)
    got = read(root)
    assert got.battery_percent is None or 0 <= got.battery_percent <= 100
    assert got.watts is None or 0 <= got.watts < 10_000
    assert got.celsius is None or -200 <= got.celsius <= 200
    assert got.clock_ratio is None or 0 < got.clock_ratio <= 1


def test_sampler_survives_a_listener_that_raises(tmp_path: Path) -> None:
    """The error is logged, and the readings stand."""
    told: list[Readings] = []

    def listen(readings: Readings, now: float) -> None:
        told.append(readings)
        raise RuntimeError("listener")

    sampler = Sampler(under(tmp_path, BATTERY), on_readings=listen)
    assert sampler.latest == Readings()
    sampler.read_now()
    assert told == [sampler.latest] and sampler.latest.battery_percent == 42
