"""Exact arithmetic on a recorded uplink."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from edgesplit.bandwidth_trace import PACKET_BYTES, UplinkTrace, make_uplink_trace, read_uplink_trace
from edgesplit.errors import UsageError
from support import REPOSITORY

TRACE = UplinkTrace((10, 10, 30, 1_000))
TRACES = REPOSITORY / "bench" / "traces"


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
    assert TRACE.completion_time_s(begins_s, size) == pytest.approx(through_s)


@settings(max_examples=200, deadline=None)
@given(
    some.lists(some.integers(0, 5_000), min_size=2, max_size=40).map(sorted).filter(lambda one: one[-1] > 0),
    some.floats(0, 30),
    some.integers(1, 100_000),
)
def test_what_is_through_was_carried_between(moments: list[int], begins_s: float, size: int) -> None:
    """As many packets pass until a transfer is through as it needs, and no fewer than it needs a moment before."""
    trace = make_uplink_trace(moments)
    through_s = trace.completion_time_s(begins_s, size)
    assert through_s >= begins_s
    assert trace.bytes_between(begins_s, through_s) >= size
    if through_s - 0.002 > begins_s:
        assert trace.bytes_between(begins_s, through_s - 0.002) < size


def test_rates_carry_the_traces_bytes() -> None:
    """Rate times time over one round is every packet, also where the last bin is short."""
    trace = make_uplink_trace([3, 90, 100, 250, 251, 730, 999])
    rates = trace.rates_per_bin(0.1)
    lasted = [0.1] * 9 + [0.099]
    assert sum(rate * time for rate, time in zip(rates, lasted, strict=True)) == pytest.approx(7 * PACKET_BYTES)
    assert rates[2] == pytest.approx(2 * PACKET_BYTES / 0.1)


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.up")), ids=lambda path: path.stem)
def test_our_traces_can_be_read(path: Path) -> None:
    """Small, and each says something of a link."""
    trace = read_uplink_trace(path)
    assert path.stat().st_size < 150_000
    assert 20 <= trace.seconds <= 120 and trace.mean_bytes_per_s > 50_000


def test_a_trace_that_says_nothing_is_refused(tmp_path: Path) -> None:
    """One packet is no rate."""
    file = tmp_path / "short.up"
    file.write_text("5\n")
    with pytest.raises(UsageError, match="fewer than two"):
        read_uplink_trace(file)
