"""Traces in mahimahi's format become rates with their durations."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.errors import UsageError
from edgesplit.links import parse_link
from edgesplit_partitioner.formulation.bandwidth_trace import rates_from_packets, read_trace, with_bandwidth_trace


def test_a_constant_trace_is_one_rate() -> None:
    """A packet a millisecond is 12 Mbit/s."""
    rates, lasted = rates_from_packets(list(range(1, 5_001)))
    assert set(lasted) == {1.0}
    assert rates == pytest.approx([1.5e6] * 5, rel=0.002)


def test_idle_time_counts_towards_the_next_packet() -> None:
    """Three silent seconds and one with four packets: 1,500 bytes a second for all four seconds."""
    rates, lasted = rates_from_packets([10, 20, 30, 40, 4_010, 4_020, 4_030, 4_040, 5_000])
    assert lasted == [1.0, 4.0]
    assert rates == pytest.approx([6_000.0, 5 * 1_500 / 4])


def test_a_trace_conserves_bytes() -> None:
    """Rate times time over all stretches is every packet of the trace."""
    moments = [3, 900, 1_000, 2_500, 2_501, 7_300, 9_999]
    rates, lasted = rates_from_packets(moments)
    assert sum(rate * time for rate, time in zip(rates, lasted, strict=True)) == pytest.approx(1_500 * len(moments))


@pytest.mark.parametrize("text", ["", "7\n", "5\n3\n", "1\n2 3\n", "a\n", "-1\n", "1\n999999999999\n", "é\n"])
def test_an_invalid_trace_is_refused(text: str, tmp_path: Path) -> None:
    """Empty, falling, or not milliseconds."""
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(UsageError):
        read_trace(file)


def test_a_trace_leaves_downlink_and_round_trip_unchanged() -> None:
    """Such a trace contains neither."""
    link = with_bandwidth_trace(parse_link("lte"), [1e6, 2e6], [1.0, 3.0])
    assert (link.up_bytes_per_s, link.weights) == ((1e6, 2e6), (1.0, 3.0))
    assert (link.down_bytes_per_s, link.rtt_s, link.name) == (parse_link("lte").down_bytes_per_s, 0.06, "lte")
