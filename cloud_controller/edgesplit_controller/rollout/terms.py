"""On what terms a release goes out: stages, rate, thresholds, hours, gates. Plain values and their arithmetic; pure.

What people write becomes these in `asked`. Stages are cumulative: 10 %, then 50 %, then 100 % of the devices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, time, timedelta, timezone, tzinfo
from typing import Literal
from zoneinfo import ZoneInfo

import msgspec

from edgesplit_controller.rollout.gates import Gates

MOST_STAGES = 20
MOST_DEVICES = 20_000
BATCH = 200
"""Devices that one step tells at most: the transaction that signs their statements stays short."""
MOST_FETCHING = 500
"""Devices of one rollout that fetch at once. More of them make nobody faster, and what each waits for is asked for
again; the next are told as these have done."""
FETCHING_S = 60.0
"""A device that was told so long ago counts no longer as one that fetches: slow ones hold up nobody."""
BURST_S = 2.0
"""So much of a constant rate may be saved up while a step is late."""
TimeoutsCount = Literal["never", "heard", "all"]


class Portion(msgspec.Struct, frozen=True):
    """So many devices, or such a part of them. One of the two is None."""

    part: float | None = None
    count: int | None = None

    def of(self, devices: int) -> int:
        """How many that is; of some devices at least one."""
        wanted = self.count if self.count is not None else math.ceil(round((self.part or 0.0) * devices, 9))
        return min(devices, max(1, wanted))

    def __str__(self) -> str:
        return f"{self.part * 100:g}%" if self.part is not None else str(self.count)


class Rate(msgspec.Struct, frozen=True):
    """How fast devices are told: `per_s`; or `base` of them in the first `every_s`, then `factor` times as many."""

    per_s: float = 0.0
    base: int = 0
    factor: float = 1.0
    every_s: float = 0.0

    def __str__(self) -> str:
        if self.base:
            return f"exponential from {self.base} per {spell_s(self.every_s)}, times {self.factor:g}"
        return f"{self.per_s * 60:g}/min"


class Hours(msgspec.Struct, frozen=True):
    """Hours of the day in which devices are told, also across midnight."""

    begin_minute: int
    end_minute: int
    zone: str
    """A name of the time zone database, or an offset as in `+01:00`."""

    def __str__(self) -> str:
        ends = (f"{minute // 60:02d}:{minute % 60:02d}" for minute in (self.begin_minute, self.end_minute))
        return f"{'-'.join(ends)} {self.zone}"

    def are_now(self, now: float) -> bool:
        """Is `now` in them?"""
        here = datetime.fromtimestamp(now, zone_of(self.zone))
        minute = here.hour * 60 + here.minute
        if self.begin_minute < self.end_minute:
            return self.begin_minute <= minute < self.end_minute
        return minute >= self.begin_minute or minute < self.end_minute

    def next_opening(self, now: float) -> float:
        """When they next begin, after `now`."""
        here = datetime.fromtimestamp(now, zone_of(self.zone))
        begin = time(self.begin_minute // 60, self.begin_minute % 60)
        days = (here.date() + timedelta(days=ahead) for ahead in range(3))
        moments = (datetime.combine(day, begin, here.tzinfo).timestamp() for day in days)
        return next(moment for moment in moments if moment > now)


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was asked of a rollout. What is kept in the database; add with defaults only."""

    stages: tuple[Portion, ...] = (Portion(part=1.0),)
    rate: Rate | None = None
    abort_when_failed: Portion | None = None
    """Of a stage's devices. None: however many fail, the others are told."""
    next_when_succeeded: Portion | None = None
    """Of a stage's devices; then the next stage begins while the rest go on. None: when all have ended."""
    device_timeout_s: float = 86_400.0
    timeouts_count: TimeoutsCount = "heard"
    """Which devices that did not end in time count as failed: those that had begun (`heard`), all, or none."""
    approve: tuple[int, ...] = ()
    """Stages, counted from 0, that wait for approval."""
    starts_at: float = 0.0
    hours: Hours | None = None
    gates: Gates = Gates()
    prefer: str = ""
    """An expression (`selecting`): these devices come first."""
    follow: bool = False
    """Devices that come to be meant later are told, too."""
    send_back: bool = False
    """Devices that fail are told what they ran before, and do not try again. Otherwise they are left to themselves:
    they run it anyway, and try again what time may mend (a full disk)."""
    when_failed: Literal["stay", "rollback"] = "stay"
    """What becomes of devices that succeeded when the rollout fails."""


class Pace(msgspec.Struct, frozen=True):
    """How much of the rate is used up."""

    at: float = 0.0
    """Up to when, at a constant rate; when the period began, at an exponential one."""
    period: int = 0
    told: int = 0
    """In this period."""


def allowance(rate: Rate | None, pace: Pace, now: float) -> tuple[int, Pace]:
    """How many devices may be told now, and the pace that counts from here. Time in which none may be told (a pause, a
    night) is not saved up."""
    if rate is None:
        return BATCH, pace
    if not rate.base:
        burst_s = max(BURST_S, 1 / rate.per_s)
        at = max(pace.at, now - burst_s) if pace.at else now - 1 / rate.per_s
        return min(BATCH, int((now - at) * rate.per_s + 1e-6)), msgspec.structs.replace(pace, at=at)
    if not pace.at:
        pace = Pace(at=now)
    elif now - pace.at >= rate.every_s:
        pace = Pace(at=now, period=min(pace.period + 1, 1_000))
    in_period = min(rate.base * rate.factor**pace.period, MOST_DEVICES) if pace.period < 64 else MOST_DEVICES
    return max(0, min(BATCH, int(in_period) - pace.told)), pace


def spend(rate: Rate | None, pace: Pace, told: int) -> Pace:
    """The pace after so many devices were told."""
    if rate is None or not told:
        return pace
    if rate.base:
        return msgspec.structs.replace(pace, told=pace.told + told)
    return msgspec.structs.replace(pace, at=pace.at + told / rate.per_s)


def sizes(stages: Sequence[Portion], devices: int) -> list[int]:
    """How many devices each stage adds; a stage that would add none is left out by `divide`."""
    ends = [stage.of(devices) for stage in stages]
    return [max(0, end - max(ends[:place], default=0)) for place, end in enumerate(ends)]


def in_order(rollout: int, names: Iterable[str], preferred: Callable[[str], bool] = lambda name: False) -> list[str]:
    """The devices in the order in which they are told: those preferred first, then by the SHA-256 of `ROLLOUT/DEVICE`:
    the same for everybody who computes it, and another choice of canaries for each rollout."""

    def key(name: str) -> tuple[bool, str]:
        return not preferred(name), hashlib.sha256(f"{rollout}/{name}".encode()).hexdigest()

    return sorted(names, key=key)


def divide(stages: Sequence[Portion], ordered: Sequence[str]) -> list[list[str]]:
    """The devices of each stage. With fewer devices than stages some stages are empty, and pass at once."""
    found, at = [], 0
    for size in sizes(stages, len(ordered)):
        found.append(list(ordered[at : at + size]))
        at += size
    return found


def zone_of(name: str) -> tzinfo:
    """The time zone of that name or offset; KeyError or ValueError where there is none."""
    if name in ("Z", "UTC"):
        return timezone.utc
    if name[:1] in "+-":
        parsed = datetime.strptime(name, "%z").tzinfo
        assert parsed is not None
        return parsed
    return ZoneInfo(name)


def spell_s(seconds: float) -> str:
    """A duration for people: `10m`, `1h30m`, `45s`."""
    whole = int(seconds)
    parts = ((whole // 86_400, "d"), (whole // 3_600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count) or f"{seconds:g}s"
