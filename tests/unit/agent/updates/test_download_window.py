"""The hours for downloads: midnight, daylight saving time, several spans, and what an operator sees meanwhile."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import UsageError
from edgesplit.release.manifest import DesiredRelease, Statement
from edgesplit_agent.updates.download_window import RECHECK_S, DownloadWindow, NotNow, next_opening, parse_span
from edgesplit_agent.updates.reconciler import (
    DeviceState,
    FetchMissing,
    ReleaseProgress,
    after_failure,
    model_states,
    next_step,
)

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = parse_span("01:00-05:00")
LATE = parse_span("22:30-6:00")
HOUR = 3600.0


def at(text: str) -> float:
    """Unix seconds of a wall clock in Berlin."""
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


@pytest.mark.parametrize(
    ("spans", "now", "opens"),
    [
        ([], "2025-06-15T12:00", "2025-06-15T12:00"),
        ([NIGHT], "2025-06-15T01:00", "2025-06-15T01:00"),
        ([NIGHT], "2025-06-15T04:59", "2025-06-15T04:59"),
        ([NIGHT], "2025-06-15T05:00", "2025-06-16T01:00"),
        ([NIGHT], "2025-06-15T00:30", "2025-06-15T01:00"),
        ([LATE], "2025-06-15T23:59", "2025-06-15T23:59"),
        ([LATE], "2025-06-16T00:00", "2025-06-16T00:00"),
        ([LATE], "2025-06-16T06:00", "2025-06-16T22:30"),
        ([LATE], "2025-12-31T12:00", "2025-12-31T22:30"),
        ([NIGHT, parse_span("12:00-13:00")], "2025-06-15T11:00", "2025-06-15T12:00"),
        ([NIGHT, parse_span("12:00-13:00")], "2025-06-15T14:00", "2025-06-16T01:00"),
        ([parse_span("20:00-24:00")], "2025-06-15T23:59", "2025-06-15T23:59"),
        ([parse_span("20:00-24:00")], "2025-06-16T00:00", "2025-06-16T20:00"),
    ],
)
def test_next_opening(spans: list[object], now: str, opens: str) -> None:
    """Open now, later today, or tomorrow; across midnight and the turn of the year."""
    assert next_opening(spans, at(now), BERLIN) == at(opens)  # type: ignore[arg-type]


def test_repeated_hour_of_daylight_saving_is_open_twice() -> None:
    """26 October 2025: 02:00 to 03:00 occurs twice, and is in the span both times."""
    begins = at("2025-10-26T01:00")
    assert all(next_opening([NIGHT], begins + hour * HOUR, BERLIN) == begins + hour * HOUR for hour in range(5))
    assert next_opening([NIGHT], begins + 5 * HOUR, BERLIN) == at("2025-10-27T01:00")


def test_skipped_hour_of_daylight_saving_shortens_the_window() -> None:
    """30 March 2025: 02:00 to 03:00 does not occur. A span of that hour is skipped, one that starts in it opens at
    3."""
    begins = at("2025-03-30T01:00")
    assert next_opening([NIGHT], begins + 2.9 * HOUR, BERLIN) == begins + 2.9 * HOUR
    assert next_opening([NIGHT], begins + 3 * HOUR, BERLIN) == at("2025-03-31T01:00")
    half = parse_span("02:30-05:00")
    assert next_opening([half], begins + 1 * HOUR, BERLIN) == begins + 1 * HOUR
    assert next_opening([parse_span("02:00-03:00")], begins + 1 * HOUR, BERLIN) == at("2025-03-31T02:00")


@given(st.integers(0, 1439), st.integers(0, 1439), st.floats(1.6e9, 1.9e9))
def test_next_opening_is_within_a_day(begins: int, ends: int, now: float) -> None:
    """For any span and any moment of years with and without clock changes, it is not in the past either."""
    if begins != ends:
        span = parse_span(f"{begins // 60:02}:{begins % 60:02}-{ends // 60:02}:{ends % 60:02}")
        assert now <= next_opening([span], now, BERLIN) <= now + 26 * HOUR


@pytest.mark.parametrize("text", ["", "1-5", "01:00", "25:00-03:00", "01:60-02:00", "03:00-03:00", "01:00-24:30"])
def test_malformed_span_is_refused(text: str) -> None:
    """A typo stops the agent at its start, not at night."""
    with pytest.raises(UsageError):
        parse_span(text)


def test_closed_window_defers_downloads_with_a_reason() -> None:
    """The release waits without being failed, is checked again soon, and continues when the span opens."""
    noon = DownloadWindow([NIGHT], now=lambda: at("2025-06-15T12:00"))
    with pytest.raises(NotNow, match="waiting for the download window") as waiting:
        noon.check()
    noon.check(urgent=True)
    want = Statement(device="cam", releases=(DesiredRelease("tiny", "a" * 64),), counter=1, expires=2**40)
    state = after_failure(ReleaseProgress(manifest=True), waiting.value, 100.0, 0.5)
    have = replace(DeviceState(online=True), releases={"a" * 64: state})
    (told,) = model_states(want, have)
    assert (told.state, told.detail) == ("fetching", "waiting for the download window (01:00-05:00)")
    assert next_step(want, have, 100.0 + RECHECK_S - 1) is None
    assert next_step(want, have, 100.0 + RECHECK_S) == FetchMissing("a" * 64)


def test_wait_ends_at_the_opening() -> None:
    """Half a minute before it, the next check is in half a minute."""
    with pytest.raises(NotNow) as waiting:
        DownloadWindow([parse_span("01:00-05:00")], now=lambda: datetime(2025, 6, 15, 0, 59, 30).timestamp()).check()
    assert waiting.value.retry_after_s == pytest.approx(30.0)
