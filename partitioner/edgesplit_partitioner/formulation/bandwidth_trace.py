"""A bandwidth trace as a varying link: recordings in the format of mahimahi (Netravali et al., USENIX ATC 2015).

A trace has a line per opportunity to deliver one packet of 1,500 bytes: its millisecond. A plan needs the distribution
of the link's rate, so the trace becomes intervals of a second or more with a rate each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgesplit.bandwidth_trace import PACKET_BYTES, read_delivery_times
from edgesplit.errors import UsageError
from edgesplit.plan import Link
from edgesplit_partitioner.formulation.tiers import VaryingLink

INTERVAL_MS = 1000
"""Shortest interval that gets a rate of its own."""


def read_trace(path: Path) -> tuple[list[float], list[float]]:
    """Rates in bytes per second, and how many seconds each lasted; UsageError names the line that cannot be read."""
    return rates_from_packets(read_delivery_times(path))


def rates_from_packets(moments_ms: Sequence[int]) -> tuple[list[float], list[float]]:
    """Rates in bytes per second, and how many seconds each lasted, of packets at these milliseconds.

    Seconds without a packet are counted with the next second that has one: bytes sent in them wait until then.
    UsageError where the trace has fewer than two packets.
    """
    if len(moments_ms) < 2 or not moments_ms[-1]:
        raise UsageError("the trace has fewer than two packets: no rate can be derived from it")
    seconds = -(-moments_ms[-1] // INTERVAL_MS)
    packets = np.bincount(np.minimum(np.array(moments_ms) // INTERVAL_MS, seconds - 1), minlength=seconds)
    rates: list[float] = []
    lasted: list[float] = []
    waiting = 0.0
    for count in packets.tolist():
        waiting += INTERVAL_MS / 1000
        if count:
            rates.append(count * PACKET_BYTES / waiting)
            lasted.append(waiting)
            waiting = 0.0
    return rates, lasted


def with_bandwidth_trace(link: Link, rates: Sequence[float], lasted: Sequence[float]) -> VaryingLink:
    """The link with an uplink that varies as in the trace; downlink and round trip stay.

    `rates` are in bytes per second, `lasted` how many seconds each one lasted.
    """
    return VaryingLink(
        up_bytes_per_s=tuple(rates),
        down_bytes_per_s=link.down_bytes_per_s,
        rtt_s=link.rtt_s,
        name=link.name,
        weights=tuple(lasted),
    )
