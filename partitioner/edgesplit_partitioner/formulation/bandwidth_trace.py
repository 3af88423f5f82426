"""A recorded link as a varying rate: traces in the format of mahimahi (Netravali et al., USENIX ATC 2015).

A line per chance to deliver one packet of 1,500 bytes: the millisecond at which it came. What a plan needs of it is
how fast the link is and how often, so the trace becomes stretches of a second or more with a rate each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgesplit.bandwidth_trace import PACKET_BYTES, read_moments
from edgesplit.errors import UsageError
from edgesplit.plan import Link
from edgesplit_partitioner.formulation.tiers import VaryingLink

STRETCH_MS = 1000


def read_trace(path: Path) -> tuple[list[float], list[float]]:
    """Rates in bytes per second, and how many seconds each lasted; UsageError names the line that is wrong."""
    return stretches(read_moments(path))


def stretches(moments_ms: Sequence[int]) -> tuple[list[float], list[float]]:
    """Seconds without a single packet belong to the next in which one comes: who sends then, waits until then."""
    if len(moments_ms) < 2 or not moments_ms[-1]:
        raise UsageError("the trace has fewer than two packets: nothing can be said of the link")
    seconds = -(-moments_ms[-1] // STRETCH_MS)
    packets = np.bincount(np.minimum(np.array(moments_ms) // STRETCH_MS, seconds - 1), minlength=seconds)
    rates: list[float] = []
    lasted: list[float] = []
    waiting = 0.0
    for count in packets.tolist():
        waiting += STRETCH_MS / 1000
        if count:
            rates.append(count * PACKET_BYTES / waiting)
            lasted.append(waiting)
            waiting = 0.0
    return rates, lasted


def traced(link: Link, rates: Sequence[float], lasted: Sequence[float]) -> VaryingLink:
    """The link with an uplink that varies like the trace; downlink and round trip stay."""
    return VaryingLink(
        up_bytes_per_s=tuple(rates),
        down_bytes_per_s=link.down_bytes_per_s,
        rtt_s=link.rtt_s,
        name=link.name,
        weights=tuple(lasted),
    )
