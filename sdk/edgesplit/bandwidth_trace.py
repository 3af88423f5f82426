"""Recorded uplink bandwidth trace in mahimahi's format: one line per delivery opportunity of a packet of 1,500 bytes,
holding its time in milliseconds (Netravali et al., USENIX ATC 2015). Several opportunities in one millisecond are
several lines.

The trace repeats when it ends, as in mahimahi. The planner's use of a trace is in
`edgesplit_partitioner.formulation.bandwidth_trace`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError

PACKET_BYTES = 1500
MAX_FILE_BYTES = 256 * 2**20
MAX_DURATION_MS = 7 * 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class UplinkTrace:
    """A bandwidth trace: times of the delivery opportunities in milliseconds, ascending. The last one is the length of
    the trace."""

    delivery_times_ms: tuple[int, ...]
    name: str = ""

    @property
    def seconds(self) -> float:
        """Length of one round of the trace in seconds."""
        return self.delivery_times_ms[-1] / 1e3

    def rates_per_bin(self, bin_s: float) -> list[float]:
        """Bytes per second in each bin of `bin_s` seconds over one round. The last bin may be shorter; its rate is over
        its actual length."""
        edges = [index * bin_s for index in range(int(self.seconds / bin_s - 1e-9) + 1)] + [self.seconds]
        # The round's first packet at 0 ms, if there is one, belongs to the first bin; its last moment to the last.
        counts = [bisect.bisect_right(self.delivery_times_ms, round(edge * 1e3, 6)) for edge in edges]
        counts[0] = 0
        return [
            (after - before) * PACKET_BYTES / (end_s - start_s)
            for (start_s, end_s), (before, after) in zip(
                itertools.pairwise(edges), itertools.pairwise(counts), strict=True
            )
        ]


def read_delivery_times(path: Path) -> list[int]:
    """Read the delivery times (milliseconds) from a trace file. UsageError names the line that is wrong."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trace {path}: {error}") from error
    return list(_parse_delivery_times(text, path))


def read_uplink_trace(path: Path) -> UplinkTrace:
    """Read the trace in a file. UsageError describes what is wrong with it."""
    return make_uplink_trace(read_delivery_times(path), path.stem)


def make_uplink_trace(delivery_times_ms: Sequence[int], name: str = "") -> UplinkTrace:
    """Make a trace of delivery times. UsageError where there are fewer than two packets or the trace has no length."""
    if len(delivery_times_ms) < 2 or not delivery_times_ms[-1]:
        raise UsageError("the trace has fewer than two packets: no rate can be derived from it")
    return UplinkTrace(tuple(delivery_times_ms), name)


def _parse_delivery_times(text: str, path: Path) -> Iterator[int]:
    """Parse the lines of a trace: times in milliseconds that never decrease. Blank lines and comments (`#`) are
    skipped."""
    last = 0
    for number, line in enumerate(text.splitlines(), 1):
        token = line.strip()
        if not token or token.startswith("#"):
            continue
        if not token.isdigit() or len(token) > 12 or not last <= int(token) <= MAX_DURATION_MS:
            raise UsageError(
                f"{path} line {number}: {token[:40]!r} is not a time of at least {last} ms (mahimahi's format)"
            )
        last = int(token)
        yield last
