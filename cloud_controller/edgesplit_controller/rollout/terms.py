"""Terms of a rollout: stages, rate, thresholds, hours, gates, and their arithmetic (pure functions).

`request` parses them from what people write. Stages are cumulative: 10 %, then 50 %, then 100 % of the devices.
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
"""Devices assigned in one step at most, so that the transaction that signs their statements stays short."""
MOST_FETCHING = 500
"""Devices of one rollout that fetch at once. More would finish no sooner, and their timed-out requests would be
repeated; further devices are assigned as these finish."""
FETCHING_S = 60.0
"""A device that was assigned the release longer ago does not count as fetching, so that slow devices do not hold up
others."""
BURST_S = 2.0
"""Seconds of a constant rate that may be saved up while a step is late."""
TimeoutsCount = Literal["never", "heard", "all"]


class Portion(msgspec.Struct, frozen=True):
    """A number of devices, or a part of them. One of the two is None."""

    part: float | None = None
    count: int | None = None

    def of(self, devices: int) -> int:
        """The number of devices, at least one and at most `devices`."""
        wanted = self.count if self.count is not None else math.ceil(round((self.part or 0.0) * devices, 9))
        return min(devices, max(1, wanted))

    def __str__(self) -> str:
        return f"{self.part * 100:g}%" if self.part is not None else str(self.count)


class Rate(msgspec.Struct, frozen=True):
    """How fast devices are assigned: `per_s`; or `base` of them in the first `every_s` seconds, then `factor` times as
    many in each period."""

    per_s: float = 0.0
    base: int = 0
    factor: float = 1.0
    every_s: float = 0.0

    def __str__(self) -> str:
        if self.base:
            return f"exponential from {self.base} per {format_duration(self.every_s)}, times {self.factor:g}"
        return f"{self.per_s * 60:g}/min"


class Hours(msgspec.Struct, frozen=True):
    """Hours of the day in which devices are assigned; may span midnight."""

    begin_minute: int
    end_minute: int
    zone: str
    """A name of the time zone database, or an offset such as `+01:00`."""

    def __str__(self) -> str:
        ends = (f"{minute // 60:02d}:{minute % 60:02d}" for minute in (self.begin_minute, self.end_minute))
        return f"{'-'.join(ends)} {self.zone}"

    def contains(self, now: float) -> bool:
        """Whether `now` lies within the hours."""
        here = datetime.fromtimestamp(now, parse_zone(self.zone))
        minute = here.hour * 60 + here.minute
        if self.begin_minute < self.end_minute:
            return self.begin_minute <= minute < self.end_minute
        return minute >= self.begin_minute or minute < self.end_minute

    def next_opening(self, now: float) -> float:
        """Unix time at which the hours next begin, after `now`."""
        here = datetime.fromtimestamp(now, parse_zone(self.zone))
        begin = time(self.begin_minute // 60, self.begin_minute % 60)
        days = (here.date() + timedelta(days=ahead) for ahead in range(3))
        moments = (datetime.combine(day, begin, here.tzinfo).timestamp() for day in days)
        return next(moment for moment in moments if moment > now)


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """All terms of a rollout. Stored in the database as JSON: add fields with defaults only."""

    stages: tuple[Portion, ...] = (Portion(part=1.0),)
    rate: Rate | None = None
    abort_when_failed: Portion | None = None
    """Failed devices of a stage at which the rollout fails. None: never."""
    next_when_succeeded: Portion | None = None
    """Devices of a stage that must succeed before the next stage begins, while the rest continue. None: the next begins
    when all have ended."""
    device_timeout_s: float = 86_400.0
    timeouts_count: TimeoutsCount = "heard"
    """Which devices that timed out count as failed: those that had begun (`heard`), all, or none."""
    approve: tuple[int, ...] = ()
    """Stages, counted from 0, that wait for approval."""
    starts_at: float = 0.0
    hours: Hours | None = None
    gates: Gates = Gates()
    prefer: str = ""
    """A selector expression (`fleet.selector`): matching devices come first."""
    follow: bool = False
    """Devices that match the targets later are added."""
    send_back: bool = False
    """Devices that fail are assigned the release they ran before, and do not retry. Otherwise they keep their
    assignment: they run the older release by themselves, and retry what may mend with time (a full disk)."""
    when_failed: Literal["stay", "rollback"] = "stay"
    """Whether devices that succeeded are rolled back when the rollout fails."""


class RateState(msgspec.Struct, frozen=True):
    """How much of the rate is used up."""

    at: float = 0.0
    """Constant rate: the time up to which the rate is used. Exponential rate: the begin of the current period."""
    period: int = 0
    assigned: int = 0
    """Devices assigned in this period."""


def allowance(rate: Rate | None, rate_state: RateState, now: float) -> tuple[int, RateState]:
    """Number of devices that may be assigned now, and the rate state from here on. Time in which none may be assigned
    (a pause, a night) is not saved up."""
    if rate is None:
        return BATCH, rate_state
    if not rate.base:
        # Constant rate as a virtual schedule: `at` advances by 1 / per_s per device and may lag behind `now` by at
        # most the burst, so unused time is not saved up. 1e-6 absorbs rounding of the quotient.
        burst_s = max(BURST_S, 1 / rate.per_s)
        at = max(rate_state.at, now - burst_s) if rate_state.at else now - 1 / rate.per_s
        return min(BATCH, int((now - at) * rate.per_s + 1e-6)), msgspec.structs.replace(rate_state, at=at)
    # Exponential rate: base * factor^n devices in the n-th period. A late step begins the next period at `now`, so
    # periods that passed without a step are not made up for.
    if not rate_state.at:
        rate_state = RateState(at=now)
    elif now - rate_state.at >= rate.every_s:
        rate_state = RateState(at=now, period=min(rate_state.period + 1, 1_000))
    in_period = (
        min(rate.base * rate.factor**rate_state.period, MOST_DEVICES) if rate_state.period < 64 else MOST_DEVICES
    )
    return max(0, min(BATCH, int(in_period) - rate_state.assigned)), rate_state


def consume(rate: Rate | None, rate_state: RateState, assigned: int) -> RateState:
    """The rate state after `assigned` devices were assigned."""
    if rate is None or not assigned:
        return rate_state
    if rate.base:
        return msgspec.structs.replace(rate_state, assigned=rate_state.assigned + assigned)
    return msgspec.structs.replace(rate_state, at=rate_state.at + assigned / rate.per_s)


def stage_sizes(stages: Sequence[Portion], devices: int) -> list[int]:
    """Number of devices that each stage adds; 0 for a stage that adds none."""
    ends = [stage.of(devices) for stage in stages]
    return [max(0, end - max(ends[:index], default=0)) for index, end in enumerate(ends)]


def rollout_order(
    rollout: int, names: Iterable[str], preferred: Callable[[str], bool] = lambda name: False
) -> list[str]:
    """The devices in the order of their assignment: preferred ones first, then by the SHA-256 of `ROLLOUT/DEVICE`. The
    order is reproducible, and each rollout has other canaries."""

    def key(name: str) -> tuple[bool, str]:
        return not preferred(name), hashlib.sha256(f"{rollout}/{name}".encode()).hexdigest()

    return sorted(names, key=key)


def split_into_stages(stages: Sequence[Portion], ordered: Sequence[str]) -> list[list[str]]:
    """The devices of each stage. With fewer devices than stages some stages are empty, and pass at once."""
    members_of_stages, begin = [], 0
    for size in stage_sizes(stages, len(ordered)):
        members_of_stages.append(list(ordered[begin : begin + size]))
        begin += size
    return members_of_stages


def parse_zone(name: str) -> tzinfo:
    """The time zone of that name or offset; KeyError or ValueError if there is none."""
    if name in ("Z", "UTC"):
        return timezone.utc
    if name[:1] in "+-":
        parsed = datetime.strptime(name, "%z").tzinfo
        assert parsed is not None
        return parsed
    return ZoneInfo(name)


def format_duration(seconds: float) -> str:
    """A duration for people: `10m`, `1h30m`, `45s`."""
    whole = int(seconds)
    parts = ((whole // 86_400, "d"), (whole // 3_600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count) or f"{seconds:g}s"
