"""The hours at which this device fetches releases: `01:00-05:00`, local time, several of them, also across midnight.

`next_opening` is the whole decision. It goes by the wall clock of the day in question: on the night that has an hour
twice such a span is an hour longer, on the one that lacks an hour it is shorter, or opens when the clock has leapt past
its beginning. Metadata and statements are fetched at any hour.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from datetime import time as WallTime

from edgesplit.errors import EdgeError, UsageError

LOOK_AGAIN_S = 60.0
"""A clock may be set meanwhile, so nobody sleeps until an opening that is far."""
LOOK_AT_POWER_S = 5.0


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
    """Nothing failed: it goes on by itself later."""

    look_again_s: float = LOOK_AGAIN_S


def parse_span(text: str) -> Span:
    """The span that `text` spells, as in 01:00-05:00; else UsageError."""
    found = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)-(?:([01]?\d|2[0-3]):([0-5]\d)|24:00)", text.strip())
    if not found:
        raise UsageError(f"not a span of the day: {text[:80]!r} (as in 01:00-05:00 or 22:30-6:00)")
    hours = [int(part or 0) for part in found.groups()]
    span = Span(WallTime(hours[0], hours[1]), WallTime(hours[2], hours[3]))
    if span.begins == span.ends:
        raise UsageError(f"{text[:80]!r} begins when it ends; leave --fetch-window out to fetch at any time")
    return span


def next_opening(spans: Sequence[Span], now: float, zone: tzinfo | None = None) -> float:
    """Unix seconds at which one of the spans is open next: `now` where one is. `zone` None: this machine's."""
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


class FetchHours:
    """The spans of one device and its clock."""

    def __init__(
        self,
        spans: Sequence[Span] = (),
        now: Callable[[], float] = time.time,
        hold: Callable[[bool], str] = lambda urgent: "",
    ) -> None:
        """`hold` says why the device cannot afford an update just now, given whether an operator wants it at once."""
        self._spans = tuple(spans)
        self._now = now
        self._hold = hold

    @property
    def open(self) -> bool:
        """It may fetch now, as far as the clock goes."""
        now = self._now()
        return next_opening(self._spans, now) <= now

    def held(self, urgent: bool = False) -> bool:
        """`check` would refuse."""
        return bool(self._hold(urgent)) or not (urgent or self.open)

    def check_power(self, urgent: bool = False) -> None:
        """NotNow where the device cannot afford an update (a failing supply, an empty battery)."""
        why = self._hold(urgent)
        if why:
            error = NotNow(f"waiting for power: {why}")
            error.look_again_s = LOOK_AT_POWER_S
            raise error

    def check(self, urgent: bool = False) -> None:
        """NotNow where it may not fetch now and the operator does not say that it is `urgent`."""
        self.check_power(urgent)
        now = self._now()
        opening = next_opening(self._spans, now)
        if urgent or opening <= now:
            return
        error = NotNow(f"waiting for the fetch window ({', '.join(map(str, self._spans))})")
        error.look_again_s = min(LOOK_AGAIN_S, opening - now)
        raise error
