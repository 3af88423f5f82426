"""Exact arithmetic on a recorded uplink."""

from __future__ import annotations

import pytest
import uplink
from hypothesis import given, settings
from hypothesis import strategies as some

from edgesplit.bandwidth_trace import UplinkTrace, make_uplink_trace

TRACE = UplinkTrace((10, 10, 30, 1_000))


@pytest.mark.parametrize(
    ("begins_s", "size", "through_s"),
    [
        (0.0, 1, 0.01),
        (0.0, 1_500, 0.01),
        (0.0, 1_501, 0.01),  # two packets on one millisecond
        (0.0, 3_001, 0.03),
        (0.01, 1_500, 0.03),  # what has passed is gone
        (0.031, 1_500, 1.0),
        (0.0, 4 * 1_500 + 1, 1.01),  # the next round
        (5.005, 1_500, 5.01),
        (0.5, 0, 0.5),
    ],
)
def test_bytes_are_through_at_the_packet_that_carries_their_last(begins_s: float, size: int, through_s: float) -> None:
    """Nothing before its chance, and rounds follow each other."""
    assert uplink.completion_time_s(TRACE, begins_s, size) == pytest.approx(through_s)


@settings(max_examples=200, deadline=None)
@given(
    some.lists(some.integers(0, 5_000), min_size=2, max_size=40).map(sorted).filter(lambda one: one[-1] > 0),
    some.floats(0, 30),
    some.integers(1, 100_000),
)
def test_what_is_through_was_carried_between(moments: list[int], begins_s: float, size: int) -> None:
    """As many packets pass until a transfer is through as it needs, and no fewer than it needs a moment before."""
    trace = make_uplink_trace(moments)
    through_s = uplink.completion_time_s(trace, begins_s, size)
    assert through_s >= begins_s
    assert uplink.bytes_between(trace, begins_s, through_s) >= size
    if through_s - 0.002 > begins_s:
        assert uplink.bytes_between(trace, begins_s, through_s - 0.002) < size
