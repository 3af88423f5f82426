"""Exact arithmetic on a recorded uplink: when a transfer completes, and how many bytes pass between two times."""

from __future__ import annotations

import bisect

from edgesplit.bandwidth_trace import PACKET_BYTES, UplinkTrace


def mean_bytes_per_s(trace: UplinkTrace) -> float:
    """Mean rate in bytes per second: what the link delivers to a sender that never pauses."""
    return len(trace.delivery_times_ms) * PACKET_BYTES / trace.seconds


def completion_time_s(trace: UplinkTrace, begins_s: float, size: float) -> float:
    """Time in seconds at which a transfer of `size` bytes, ready at `begins_s` on a free link, is complete. A transfer
    of 0 bytes takes no time.

    The last packet may be partly filled; it still waits for a delivery opportunity.
    """
    if size <= 0:
        return begins_s
    packets, times_ms = -(-size // PACKET_BYTES), trace.delivery_times_ms
    # The transfer uses the next `packets` opportunities after those that had passed when it began.
    rounds, index = divmod(_packets_by(trace, begins_s) + int(packets) - 1, len(times_ms))
    return max(begins_s, (rounds * times_ms[-1] + times_ms[index]) / 1e3)


def bytes_between(trace: UplinkTrace, begins_s: float, ends_s: float) -> int:
    """Number of bytes that can be delivered after `begins_s` and up to `ends_s`."""
    return max(0, _packets_by(trace, ends_s) - _packets_by(trace, begins_s)) * PACKET_BYTES


def _packets_by(trace: UplinkTrace, at_s: float) -> int:
    """Number of packets that can have been delivered in [0, `at_s`], over as many rounds of the trace as that takes."""
    # The 1e-6 ms absorb floating-point rounding of times that are whole milliseconds.
    rounds, rest = divmod(max(0, int(at_s * 1e3 + 1e-6)), trace.delivery_times_ms[-1])
    return rounds * len(trace.delivery_times_ms) + bisect.bisect_right(trace.delivery_times_ms, rest)
