"""Power and temperature sensors of the device, read from sysfs.

`read` returns one frozen `Readings` in well under a millisecond, whatever lies under the root folder: a sensor that is
missing, garbled, implausible or not a plain file reads as unknown, without affecting the others. Decisions from the
readings are made in `mode`.

    class/power_supply/*                    battery and mains
    class/thermal/thermal_zone*             temperatures, and the trip points at which the kernel slows the device down
    devices/system/cpu/cpufreq/policy*      the highest clock allowed now, and the highest possible
    class/hwmon/*                           ina219, ina226, ina3221 and similar: rails; rpi_volt: under-voltage alarm
    devices/platform/soc/soc:firmware/get_throttled    Raspberry Pi: bits 0 to 3 now, 16 to 19 since boot
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec

from edgesplit.msgspec_warmup import warm_up_structs

log = logging.getLogger(__name__)

ROOT = Path("/sys")
PERIOD_S = 1.0
MAX_ENTRIES = 64
"""Maximum number of entries read of one folder."""
MAX_BYTES = 256
"""Maximum number of bytes read of one file: it contains a number or a word."""
MAX_WATTS = 2_000.0
MAX_CELSIUS = 200.0
INA_PREFIXES = ("ina2", "ina3")
"""Prefixes of the names of INA power meters."""
BOARD_RAIL = re.compile(r"(^|_)IN$")
"""Label of a rail that feeds all others (VDD_IN, POM_5V_IN on NVIDIA's boards): the others are not added to it."""
UNDER_VOLTAGE, CAPPED, THROTTLED, SOFT_LIMIT = 1, 2, 4, 8
SINCE_BOOT = 16
"""Shift from a bit for now to the bit for since boot."""


class Readings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reading of all sensors. None: unknown on this device."""

    battery_percent: float | None = None
    """Mean charge of all batteries that feed the device."""
    discharging: bool | None = None
    """A battery reports that it is discharging."""
    mains: bool | None = None
    """A supply other than a battery is online."""
    watts: float | None = None
    """Power drawn by the whole device: from its rails, else the discharge power of the battery."""
    watts_source: str = ""
    """`rails` or `battery`; empty if unknown."""
    celsius: float | None = None
    """Temperature of the hottest zone."""
    hot: bool = False
    """A zone has reached a trip point at which the kernel slows the device down."""
    clock_ratio: float | None = None
    """Highest clock that the processor may use now, as a ratio of the highest possible."""
    under_voltage: bool | None = None
    under_voltage_since_boot: bool | None = None


def read(root: Path = ROOT) -> Readings:
    """Read all sensors once."""
    firmware = _throttled_bits(root)
    supplies = _supplies(root)
    batteries = [supply for supply in supplies if supply.kind == "Battery"]
    percents = [_number(supply.folder / "capacity", 0, 100) for supply in batteries]
    rails = _board_watts(root)
    battery_watts = _battery_watts(batteries)
    celsius, hot = _temperatures(root)
    alarm = _under_voltage_alarm(root)
    return Readings(
        battery_percent=_mean([charge for charge in percents if charge is not None]),
        discharging=any(supply.status == "Discharging" for supply in batteries) if batteries else None,
        mains=_mains(supplies),
        watts=rails if rails is not None else battery_watts,
        watts_source="rails" if rails is not None else ("battery" if battery_watts is not None else ""),
        celsius=celsius,
        hot=hot,
        clock_ratio=_clock_ratio(root, bool(firmware and firmware & (CAPPED | THROTTLED | SOFT_LIMIT))),
        under_voltage=_any_known(alarm, None if firmware is None else bool(firmware & UNDER_VOLTAGE)),
        under_voltage_since_boot=None if firmware is None else bool(firmware >> SINCE_BOOT & UNDER_VOLTAGE),
    )


class Sampler:
    """Reads the sensors once per period on a background thread and keeps the latest readings."""

    def __init__(
        self,
        root: Path = ROOT,
        *,
        period_s: float = PERIOD_S,
        on_readings: Callable[[Readings, float], None] | None = None,
    ) -> None:
        """`on_readings` is called with each set of readings and the monotonic time; its exceptions are logged."""
        self._root, self._period_s = root, period_s
        self._on_readings = on_readings or (lambda readings, now: None)
        self.latest = Readings()
        """The latest readings; all unknown before the first."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sensors", daemon=True)

    def start(self) -> None:
        """Read once, then start the background thread."""
        self.read_now()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, without waiting for a read that the kernel blocks."""
        self._stop.set()

    def read_now(self) -> Readings:
        """Read the sensors now; on an unexpected error it is logged and all-unknown readings are returned."""
        readings = Readings()
        try:
            self.latest = readings = read(self._root)
            self._on_readings(readings, monotonic())
        except Exception:
            log.exception("the sensors cannot be read")
        return readings

    def _loop(self) -> None:
        while not self._stop.wait(self._period_s):
            self.read_now()


class _Supply(NamedTuple):
    folder: Path
    kind: str
    status: str


def _supplies(root: Path) -> list[_Supply]:
    """All supplies that feed the device itself; a mouse's battery (scope Device) is excluded."""
    return [
        _Supply(entry, _word(entry / "type"), _word(entry / "status"))
        for entry in _folders(root / "class/power_supply")
        if _word(entry / "scope") != "Device"
    ]


def _mains(supplies: list[_Supply]) -> bool | None:
    """Whether any supply other than a battery is online; None if unknown."""
    readings = [_number(supply.folder / "online", 0, 100) for supply in supplies if supply.kind != "Battery"]
    known = [online for online in readings if online is not None]
    return any(online > 0 for online in known) if known else None


def _battery_watts(batteries: list[_Supply]) -> float | None:
    """Discharge power of the batteries in watts; None unless one discharges and reports how fast."""
    total = 0.0
    for battery in batteries:
        folder = battery.folder
        if battery.status != "Discharging":
            continue
        micro = _number(folder / "power_now", -1e12, 1e12)
        if micro is None:
            volts, amperes = _number(folder / "voltage_now", 0, 1e9), _number(folder / "current_now", -1e12, 1e12)
            micro = None if volts is None or amperes is None else volts * amperes / 1e6
        total += abs(micro) / 1e6 if micro is not None else 0.0
    return total if 0.0 < total <= MAX_WATTS else None


def _board_watts(root: Path) -> float | None:
    """Power of the whole board in watts; None where it has no power meter."""
    rails: dict[str, float] = {}
    for folder in _folders(root / "class/hwmon"):
        if not _word(folder / "name").startswith(INA_PREFIXES):
            continue
        for channel in (1, 2, 3):
            watts = _channel_watts(folder, channel)
            if watts is not None:
                label = _word(folder / f"in{channel}_label") or f"{folder.name}.{channel}"
                rails[label] = watts
    whole = [watts for label, watts in rails.items() if BOARD_RAIL.search(label)]
    if not rails:
        return None
    return sum(whole) if whole else sum(rails.values())


def _channel_watts(folder: Path, channel: int) -> float | None:
    """Power of one channel in watts: as reported, else voltage times current."""
    micro = _number(folder / f"power{channel}_input", 0, MAX_WATTS * 1e6)
    if micro is not None:
        return micro / 1e6
    milli_v = _number(folder / f"in{channel}_input", 0, 1e6)
    milli_a = _number(folder / f"curr{channel}_input", -1e6, 1e6)
    if milli_v is None or milli_a is None or milli_v * abs(milli_a) > MAX_WATTS * 1e6:
        return None
    return milli_v * abs(milli_a) / 1e6


def _temperatures(root: Path) -> tuple[float | None, bool]:
    """Temperature of the hottest zone, and whether any zone has reached a passive trip point."""
    hottest, hot = None, False
    for folder in _folders(root / "class/thermal"):
        milli = _number(folder / "temp", -MAX_CELSIUS * 1e3, MAX_CELSIUS * 1e3)
        if milli is None or not folder.name.startswith("thermal_zone"):
            continue
        hottest = milli / 1e3 if hottest is None else max(hottest, milli / 1e3)
        hot = hot or any(milli >= trip for trip in _trip_points(folder))
    return hottest, hot


def _trip_points(folder: Path) -> Iterator[float]:
    """Temperatures of the zone's passive trip points, in thousandths of a degree."""
    for index in range(12):
        trip_type = _word(folder / f"trip_point_{index}_type")
        if not trip_type:
            return
        trip = _number(folder / f"trip_point_{index}_temp", 1, MAX_CELSIUS * 1e3)
        if trip_type == "passive" and trip is not None:
            yield trip


def _clock_ratio(root: Path, throttled: bool) -> float | None:
    """Lowest clock ratio of all cores. Where the firmware throttles, the current clock counts: it hides its cap."""
    ratios = []
    for folder in _folders(root / "devices/system/cpu/cpufreq"):
        highest = _number(folder / "cpuinfo_max_freq", 1, 1e9)
        allowed = _number(folder / ("scaling_cur_freq" if throttled else "scaling_max_freq"), 1, 1e9)
        if highest is not None and allowed is not None:
            ratios.append(min(1.0, allowed / highest))
    return min(ratios) if ratios else None


def _throttled_bits(root: Path) -> int | None:
    """The Raspberry Pi's throttling bits; None on other boards."""
    word = _word(root / "devices/platform/soc/soc:firmware/get_throttled")
    return int(word, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", word) else None


def _under_voltage_alarm(root: Path) -> bool | None:
    """The under-voltage alarm of the rpi_volt monitor; None without it."""
    for folder in _folders(root / "class/hwmon"):
        if _word(folder / "name") == "rpi_volt":
            alarm = _number(folder / "in0_lcrit_alarm", 0, 1)
            return None if alarm is None else alarm > 0
    return None


def _any_known(first: bool | None, second: bool | None) -> bool | None:
    known = [value for value in (first, second) if value is not None]
    return any(known) if known else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _folders(folder: Path) -> list[Path]:
    """The entries of a folder, sorted and bounded; empty where it cannot be listed."""
    try:
        return [folder / name for name in sorted(os.listdir(folder))[:MAX_ENTRIES]]
    except OSError:
        return []


def _number(path: Path, least: float, most: float) -> float | None:
    """The number in a file if it lies within the range, else None."""
    word = _word(path)
    if not re.fullmatch(r"[+-]?\d{1,15}(\.\d{1,9})?", word):
        return None
    value = float(word)
    return value if least <= value <= most else None


def _word(path: Path) -> str:
    """The text of a file, bounded and stripped; empty where it is not a plain file or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold it up
    except (OSError, ValueError):
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return os.read(descriptor, MAX_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


warm_up_structs(__name__)
