"""Aggregation of telemetry: independent of order and grouping, with calendar months."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit_controller.history.buckets import (
    MOST_CUTS,
    OTHER,
    Content,
    bucket_start,
    bucket_view,
    content_of_message,
    content_of_window,
    merged,
)


def window(requests: int = 10, **more: object) -> dict[str, object]:
    told = {"model": "m", "row": "local", "requests": requests, "latency_p95_s": 0.2, "joules": 3.0}
    return {**told, "joules_basis": "measured", **more}


def test_buckets_start_at_calendar_boundaries_in_utc() -> None:
    """Also in a February, at the last second of a year, and at the first."""
    for text, day, month in (
        ("2028-02-29T23:59:59", "2028-02-29", "2028-02-01"),
        ("2026-12-31T23:59:59", "2026-12-31", "2026-12-01"),
        ("2027-01-01T00:00:00", "2027-01-01", "2027-01-01"),
    ):
        at = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        assert datetime.fromtimestamp(bucket_start("day", at), UTC).date().isoformat() == day
        assert datetime.fromtimestamp(bucket_start("month", at), UTC).date().isoformat() == month
    assert bucket_start("hour", 7_300.0) == 7_200.0 and bucket_start("minute", 7_300.0) == 7_260.0


def test_means_are_weighted_by_requests_and_extremes_kept() -> None:
    """The p95 of a bucket is the mean of its windows' and the worst of them; energy counts where it was weighed."""
    both = merged(
        content_of_window(window(30, latency_p95_s=0.1)),
        content_of_window(window(10, latency_p95_s=0.5, joules_basis="")),
    )
    told = bucket_view(0.0, "day", both)
    assert told["latency_p95_s"] == pytest.approx(0.2) and told["latency_p95_worst_s"] == 0.5
    assert (told["joules"], told["requests"], told["cuts"], told["span_s"]) == (3.0, 40, {"local": 40}, 86_400)


def test_a_missing_sensor_yields_none_instead_of_zero() -> None:
    """A device without sensors has no watts, however many messages it sent; the coldest message does not hide the
    hottest."""
    bare = merged(content_of_message({}, from_backlog=False), content_of_message({}, from_backlog=True))
    told = bucket_view(0.0, "hour", bare)
    assert told["watts"] is None and told["celsius_max"] is None and (told["samples"], told["from_backlog"]) == (2, 1)
    warm = content_of_message({"power": {"celsius": 71.0, "watts": 4.0, "clock_ratio": 0.6}}, from_backlog=False)
    told = bucket_view(
        0.0, "hour", merged(merged(bare, warm), content_of_message({"power": {"celsius": 40.0}}, from_backlog=False))
    )
    assert (told["celsius_max"], told["watts"], told["throttled"]) == (71.0, 4.0, 1)


def test_rows_per_bucket_are_bounded() -> None:
    """Beyond the limit all others are counted in one row, and none is lost."""
    whole = reduce(merged, (content_of_window(window(1, row=f"row-{number}")) for number in range(3 * MOST_CUTS)))
    assert len(whole["cuts"]) == MOST_CUTS + 1 and whole["cuts"][OTHER] == 2 * MOST_CUTS
    assert sum(whole["cuts"].values()) == 3 * MOST_CUTS


_CELSIUS = st.one_of(st.none(), st.integers(-20, 90))
_MESSAGES = st.lists(st.builds(lambda celsius: {"power": {"celsius": celsius}}, _CELSIUS), min_size=2, max_size=8)


@given(_MESSAGES, st.integers(1, 7))
def test_aggregation_is_independent_of_grouping_and_order(messages: list[dict[str, object]], cut: int) -> None:
    """Minutes into hours or messages into hours; forwards or backwards."""
    contents: list[Content] = [content_of_message(message, from_backlog=False) for message in messages]
    cut = min(cut, len(contents) - 1)
    halves = merged(reduce(merged, contents[:cut]), reduce(merged, contents[cut:]))
    assert halves == reduce(merged, contents) == reduce(merged, contents[::-1])
