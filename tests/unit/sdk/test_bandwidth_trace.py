"""Bandwidth traces: their files, and the rates in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.bandwidth_trace import PACKET_BYTES, make_uplink_trace, read_uplink_trace
from edgesplit.errors import UsageError
from support import REPOSITORY

TRACES = REPOSITORY / "bench" / "traces"


def test_rates_deliver_the_traces_bytes() -> None:
    """Rate times time over one round is every packet, also where the last bin is short."""
    trace = make_uplink_trace([3, 90, 100, 250, 251, 730, 999])
    rates = trace.rates_per_bin(0.1)
    lasted = [0.1] * 9 + [0.099]
    assert sum(rate * time for rate, time in zip(rates, lasted, strict=True)) == pytest.approx(7 * PACKET_BYTES)
    assert rates[2] == pytest.approx(2 * PACKET_BYTES / 0.1)


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.up")), ids=lambda path: path.stem)
def test_shipped_traces_can_be_read(path: Path) -> None:
    """They are small, and each describes a link."""
    trace = read_uplink_trace(path)
    assert path.stat().st_size < 150_000
    assert 20 <= trace.seconds <= 120 and min(trace.rates_per_bin(trace.seconds)) > 50_000


def test_trace_without_a_rate_is_refused(tmp_path: Path) -> None:
    """One packet is no rate."""
    file = tmp_path / "short.up"
    file.write_text("5\n")
    with pytest.raises(UsageError, match="fewer than two"):
        read_uplink_trace(file)
