"""Clocks of the device: the settable wall clock, and the time since boot, which is never set but belongs to one boot.

A Raspberry Pi has no clock that outlives a power cut. What it measured before its wall clock was set is dated by the
time since boot.
"""

from __future__ import annotations

import time
from pathlib import Path

from edgesplit.mqtt.telemetry import DeviceTime

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MIN_PLAUSIBLE_TIME = 1_735_689_600.0
"""Unix time of 2025-01-01: a wall clock below this was never set."""


def boot_id(path: Path = BOOT_ID) -> str:
    """Identifier of this boot of the machine; empty where the kernel gives none, in which case two boots are never
    taken for the same."""
    try:
        return path.read_text("ascii").strip().replace("-", "")[:16]
    except (OSError, UnicodeDecodeError):
        return ""


_BOOT = boot_id()


def current_moment() -> DeviceTime:
    """The current time by both clocks."""
    return DeviceTime(unix_s=max(0.0, time.time()), boot_id=_BOOT, since_boot_s=time.clock_gettime(time.CLOCK_BOOTTIME))


def age_s(then: DeviceTime, now: DeviceTime) -> float:
    """Seconds since `then`: by the time since boot within one boot, else by the wall clock; 0 where neither is
    reliable."""
    if then.boot_id and then.boot_id == now.boot_id:
        return max(0.0, now.since_boot_s - then.since_boot_s)
    if then.unix_s >= MIN_PLAUSIBLE_TIME and now.unix_s >= MIN_PLAUSIBLE_TIME:
        return max(0.0, now.unix_s - then.unix_s)
    return 0.0
