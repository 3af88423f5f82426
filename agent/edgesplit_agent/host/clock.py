"""The device's clocks: one that may be set, and one that only goes on, which knows one boot.

A Raspberry Pi has no clock of its own that outlives a power cut; what it measured before its time was set is dated by
the second clock.
"""

from __future__ import annotations

import time
from pathlib import Path

from edgesplit.mqtt.telemetry import Moment

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PLAUSIBLE = 1_735_689_600.0
"""Unix seconds of 2025-01-01: a clock that shows less was never set."""


def boot_mark(path: Path = BOOT_ID) -> str:
    """A mark of this boot of the machine; empty where the kernel does not tell, and then boots look alike to nobody."""
    try:
        return path.read_text("ascii").strip().replace("-", "")[:16]
    except (OSError, UnicodeDecodeError):
        return ""


_BOOT = boot_mark()


def moment() -> Moment:
    """Now."""
    return Moment(at=max(0.0, time.time()), boot=_BOOT, up_s=time.clock_gettime(time.CLOCK_BOOTTIME))


def age_s(then: Moment, now: Moment) -> float:
    """How long ago `then` was. Of another boot by a clock that may have been wrong; 0 where that cannot be known."""
    if then.boot and then.boot == now.boot:
        return max(0.0, now.up_s - then.up_s)
    if then.at >= PLAUSIBLE and now.at >= PLAUSIBLE:
        return max(0.0, now.at - then.at)
    return 0.0
