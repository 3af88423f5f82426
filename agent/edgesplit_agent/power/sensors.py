"""What the device knows of its own power and heat, read from sysfs.

Promises one frozen `Readings` in well under a millisecond, whatever lies under the root folder: a sensor that is
missing, garbled, out of all reason or no plain file reads as unknown, alone. What follows from it is `stance`'s.

  class/power_supply/*                    battery and mains
  class/thermal/thermal_zone*             temperatures, and the trip points at which the kernel slows the device down
  devices/system/cpu/cpufreq/policy*      what the clock may reach, of what it could
  class/hwmon/*                           ina219, ina226, ina3221 and their kin: rails; rpi_volt: under-voltage alarm
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

from edgesplit.msgspec_warmup import settle

log = logging.getLogger(__name__)

ROOT = Path("/sys")
PERIOD_S = 1.0
MOST_ENTRIES = 64
"""Of one folder that are looked at."""
MOST_BYTES = 256
"""Of one file: a number or a word."""
MOST_WATTS = 2_000.0
MOST_CELSIUS = 200.0
INA = ("ina2", "ina3")
WHOLE_BOARD = re.compile(r"(^|_)IN$")
"""A rail of that name (VDD_IN, POM_5V_IN: NVIDIA's boards) feeds all others: they are not added to it."""
UNDER_VOLTAGE, CAPPED, THROTTLED, SOFT_LIMIT = 1, 2, 4, 8
SINCE_BOOT = 16


class Readings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One look at all sensors. None: unknown here."""

    battery_percent: float | None = None
    """The mean of all batteries that feed the device."""
    discharging: bool | None = None
    """A battery says that it is being emptied."""
    mains: bool | None = None
    """Some supply that is no battery is on line."""
    watts: float | None = None
    """What the whole device draws: its rails, else what leaves the battery."""
    watts_from: str = ""
    """`rails` or `battery`."""
    celsius: float | None = None
    """Of the hottest zone."""
    hot: bool = False
    """Some zone has reached a trip point at which the kernel slows the device down."""
    speed: float | None = None
    """What the processor's clock may reach now, as a part of what it could."""
    under_voltage: bool | None = None
    under_voltage_since_boot: bool | None = None


def read(root: Path = ROOT) -> Readings:
    """All sensors once."""
    firmware = _firmware(root)
    supplies = _supplies(root)
    batteries = [one for one in supplies if one.kind == "Battery"]
    percents = [_number(one.folder / "capacity", 0, 100) for one in batteries]
    rails = _rails(root)
    drawn = _from_batteries(batteries)
    celsius, hot = _temperatures(root)
    alarm = _alarm(root)
    return Readings(
        battery_percent=_mean([percent for percent in percents if percent is not None]),
        discharging=any(one.status == "Discharging" for one in batteries) if batteries else None,
        mains=_mains(supplies),
        watts=rails if rails is not None else drawn,
        watts_from="rails" if rails is not None else ("battery" if drawn is not None else ""),
        celsius=celsius,
        hot=hot,
        speed=_speed(root, bool(firmware and firmware & (CAPPED | THROTTLED | SOFT_LIMIT))),
        under_voltage=_either(alarm, None if firmware is None else bool(firmware & UNDER_VOLTAGE)),
        under_voltage_since_boot=None if firmware is None else bool(firmware >> SINCE_BOOT & UNDER_VOLTAGE),
    )


class Sampler:
    """Reads the sensors once a period, on a thread of its own, and says what it read last. `stop` ends it."""

    def __init__(
        self, root: Path = ROOT, *, period_s: float = PERIOD_S, seen: Callable[[Readings, float], None] | None = None
    ) -> None:
        """`seen` is told of every look and the monotonic clock's time; what it raises is logged."""
        self._root, self._period_s = root, period_s
        self._seen = seen or (lambda readings, now: None)
        self._latest = Readings()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sensors", daemon=True)

    @property
    def latest(self) -> Readings:
        """What was read last; nothing is known before."""
        return self._latest

    def start(self) -> None:
        """Look once, then go on."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """End it; a read that the kernel holds up is not waited for."""
        self._stop.set()

    def look(self) -> Readings:
        """Read now."""
        readings = Readings()
        try:
            self._latest = readings = read(self._root)
            self._seen(readings, monotonic())
        except Exception:
            log.exception("the sensors cannot be read")
        return readings

    def _loop(self) -> None:
        while not self._stop.wait(self._period_s):
            self.look()


class _Supply(NamedTuple):
    folder: Path
    kind: str
    status: str


def _supplies(root: Path) -> list[_Supply]:
    """Each supply of the device itself: a mouse's battery (scope Device) is none."""
    return [
        _Supply(folder, _word(folder / "type"), _word(folder / "status"))
        for folder in _folders(root / "class/power_supply")
        if _word(folder / "scope") != "Device"
    ]


def _mains(supplies: list[_Supply]) -> bool | None:
    """Whether any of them is on line."""
    lines = [_number(one.folder / "online", 0, 100) for one in supplies if one.kind != "Battery"]
    known = [line for line in lines if line is not None]
    return any(line > 0 for line in known) if known else None


def _from_batteries(batteries: list[_Supply]) -> float | None:
    """Watts that leave the batteries; None unless one is being emptied and says how fast."""
    total = 0.0
    for one in batteries:
        folder = one.folder
        if one.status != "Discharging":
            continue
        micro = _number(folder / "power_now", -1e12, 1e12)
        if micro is None:
            volts, amperes = _number(folder / "voltage_now", 0, 1e9), _number(folder / "current_now", -1e12, 1e12)
            micro = None if volts is None or amperes is None else volts * amperes / 1e6
        total += abs(micro) / 1e6 if micro is not None else 0.0
    return total if 0.0 < total <= MOST_WATTS else None


def _rails(root: Path) -> float | None:
    """Watts of the whole board, where a meter is soldered to it."""
    rails: dict[str, float] = {}
    for folder in _folders(root / "class/hwmon"):
        if not _word(folder / "name").startswith(INA):
            continue
        for channel in (1, 2, 3):
            watts = _rail(folder, channel)
            if watts is not None:
                label = _word(folder / f"in{channel}_label") or f"{folder.name}.{channel}"
                rails[label] = watts
    whole = [watts for label, watts in rails.items() if WHOLE_BOARD.search(label)]
    if not rails:
        return None
    return sum(whole) if whole else sum(rails.values())


def _rail(folder: Path, channel: int) -> float | None:
    """Watts of one channel: as it says, else volts times amperes."""
    micro = _number(folder / f"power{channel}_input", 0, MOST_WATTS * 1e6)
    if micro is not None:
        return micro / 1e6
    milli_v = _number(folder / f"in{channel}_input", 0, 1e6)
    milli_a = _number(folder / f"curr{channel}_input", -1e6, 1e6)
    if milli_v is None or milli_a is None or milli_v * abs(milli_a) > MOST_WATTS * 1e6:
        return None
    return milli_v * abs(milli_a) / 1e6


def _temperatures(root: Path) -> tuple[float | None, bool]:
    """The hottest zone's, and whether any has reached a trip point that slows the device down."""
    hottest, hot = None, False
    for folder in _folders(root / "class/thermal"):
        milli = _number(folder / "temp", -MOST_CELSIUS * 1e3, MOST_CELSIUS * 1e3)
        if milli is None or not folder.name.startswith("thermal_zone"):
            continue
        hottest = milli / 1e3 if hottest is None else max(hottest, milli / 1e3)
        hot = hot or any(milli >= trip for trip in _trips(folder))
    return hottest, hot


def _trips(folder: Path) -> Iterator[float]:
    for place in range(12):
        kind = _word(folder / f"trip_point_{place}_type")
        if not kind:
            return
        trip = _number(folder / f"trip_point_{place}_temp", 1, MOST_CELSIUS * 1e3)
        if kind == "passive" and trip is not None:
            yield trip


def _speed(root: Path, slowed: bool) -> float | None:
    """The least over all cores. Where the firmware says that it slows them, the clock now: it hides the cap."""
    parts = []
    for folder in _folders(root / "devices/system/cpu/cpufreq"):
        could = _number(folder / "cpuinfo_max_freq", 1, 1e9)
        may = _number(folder / ("scaling_cur_freq" if slowed else "scaling_max_freq"), 1, 1e9)
        if could is not None and may is not None:
            parts.append(min(1.0, may / could))
    return min(parts) if parts else None


def _firmware(root: Path) -> int | None:
    """The Raspberry Pi's word of bits."""
    word = _word(root / "devices/platform/soc/soc:firmware/get_throttled")
    return int(word, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", word) else None


def _alarm(root: Path) -> bool | None:
    """The rpi_volt monitor's."""
    for folder in _folders(root / "class/hwmon"):
        if _word(folder / "name") == "rpi_volt":
            alarm = _number(folder / "in0_lcrit_alarm", 0, 1)
            return None if alarm is None else alarm > 0
    return None


def _either(one: bool | None, other: bool | None) -> bool | None:
    known = [value for value in (one, other) if value is not None]
    return any(known) if known else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _folders(folder: Path) -> list[Path]:
    """What lies in it, in order, bounded; nothing where it cannot be listed."""
    try:
        return [folder / name for name in sorted(os.listdir(folder))[:MOST_ENTRIES]]
    except OSError:
        return []


def _number(path: Path, least: float, most: float) -> float | None:
    """The number in a file, if it is one in this range."""
    word = _word(path)
    if not re.fullmatch(r"[+-]?\d{1,15}(\.\d{1,9})?", word):
        return None
    value = float(word)
    return value if least <= value <= most else None


def _word(path: Path) -> str:
    """A file's text, bounded and stripped; empty where it is no plain file or cannot be read."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold it up
    except (OSError, ValueError):
        return ""
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            return ""
        return os.read(number, MOST_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(number)


settle(__name__)
