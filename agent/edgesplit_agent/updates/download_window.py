"""Hours of the day at which this device downloads releases: `01:00-05:00`, local time; several spans, also across
midnight.

`next_opening` is the whole decision. It uses the wall clock of the day in question: in the night when clocks are set
back such a span is an hour longer, in the night when they are set forward it is shorter, or opens at the moment when
the clock has passed its beginning. Metadata and statements are fetched at any hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from datetime import time as WallTime

from edgesplit.errors import EdgeError
from edgesplit.quantities import parse_daily_span

RECHECK_S = 60.0
"""Longest time until the clock is read again, because it may have been set meanwhile."""
POWER_RECHECK_S = 5.0
"""Time until the power supply is checked again."""


@dataclass(frozen=True, slots=True)
class Span:
    """From `begins` until before `ends`, each day; across midnight where it ends earlier than it begins."""

    begins: WallTime
    ends: WallTime

    def __contains__(self, at: WallTime) -> bool:
        if self.begins < self.ends:
            return self.begins <= at < self.ends
        return at >= self.begins or at < self.ends

    def __str__(self) -> str:
        return f"{self.begins:%H:%M}-{self.ends:%H:%M}"


class NotNow(EdgeError):
    """The device must not download now. Nothing failed: the step is retried after `retry_after_s` seconds."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


def parse_span(text: str) -> Span:
    """The span that `text` spells, as in 01:00-05:00; otherwise UsageError."""
    begin, end = parse_daily_span(text)
    return Span(WallTime(*divmod(begin, 60)), WallTime(*divmod(end, 60)))


def next_opening(spans: Sequence[Span], now: float, zone: tzinfo | None = None) -> float:
    """Unix seconds at which one of the spans is open next; `now` where one is open or there are none. `zone` None: the
    time zone of this machine."""
    if not spans:
        return now
    local = datetime.fromtimestamp(now, zone) if zone else datetime.fromtimestamp(now).astimezone()
    if any(local.time() in span for span in spans):
        return now
    openings = []
    for days in (0, 1):
        day = local.date() + timedelta(days=days)
        for span in spans:
            naive = datetime.combine(day, span.begins)
            moment = naive.replace(tzinfo=zone) if zone else naive.astimezone()
            openings.append(moment.timestamp())
    return min(opening for opening in openings if opening > now)


@dataclass(frozen=True)
class DownloadWindow:
    """The download spans of one device, its clock and its power supply."""

    spans: Sequence[Span] = ()
    now: Callable[[], float] = time.time
    hold: Callable[[bool], str] = lambda urgent: ""
    """Why the power supply does not permit an update now, empty where it does; the argument is whether the operator
    marked the release as urgent."""

    @property
    def is_open(self) -> bool:
        """Whether the clock permits downloads now."""
        now = self.now()
        return next_opening(self.spans, now) <= now

    def is_held(self, urgent: bool = False) -> bool:
        """Whether `check` would raise."""
        return bool(self.hold(urgent)) or not (urgent or self.is_open)

    def check_power(self, urgent: bool = False) -> None:
        """NotNow where the power supply does not permit an update (low voltage, empty battery)."""
        why = self.hold(urgent)
        if why:
            raise NotNow(f"waiting for power: {why}", POWER_RECHECK_S)

    def check(self, urgent: bool = False) -> None:
        """NotNow where power or clock do not permit a download; an `urgent` one ignores the clock."""
        self.check_power(urgent)
        now = self.now()
        opening = next_opening(self.spans, now)
        if urgent or opening <= now:
            return
        spans = ", ".join(map(str, self.spans))
        raise NotNow(f"waiting for the download window ({spans})", min(RECHECK_S, opening - now))
