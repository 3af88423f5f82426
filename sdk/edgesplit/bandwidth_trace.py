"""A recorded uplink, in mahimahi's format: a line for each chance to send a packet of 1,500 bytes, the millisecond at
which it came (Netravali et al., USENIX ATC 2015). Several on one millisecond are several lines.

Promises exact arithmetic on it: when bytes that begin to move at one moment are through, and how many get through until
another. It begins anew when it is over, as mahimahi's does. What a plan makes of such a trace is `bandwidth_trace`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgesplit.errors import UsageError

PACKET_BYTES = 1500
LONGEST_BYTES = 256 * 2**20
LONGEST_MS = 7 * 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class UplinkTrace:
    """The moments, in milliseconds, rising; the last one is how long the trace lasts."""

    moments_ms: tuple[int, ...]
    name: str = ""

    @property
    def seconds(self) -> float:
        """How long it lasts before it begins anew."""
        return self.moments_ms[-1] / 1e3

    @property
    def mean_bytes_per_s(self) -> float:
        """The arithmetic mean: what a link gives whoever sends all the time."""
        return len(self.moments_ms) * PACKET_BYTES / self.seconds

    def sent_by(self, at_s: float) -> int:
        """Packets that may have left in [0, at_s], over as many rounds as that takes."""
        rounds, rest = divmod(max(0, int(at_s * 1e3 + 1e-6)), self.moments_ms[-1])
        return rounds * len(self.moments_ms) + bisect.bisect_right(self.moments_ms, rest)

    def through_at(self, begins_s: float, size: float) -> float:
        """Seconds at which `size` bytes, ready at `begins_s` on a free link, are through. None take no time.

        The last packet may be partly filled; it still waits for its chance.
        """
        if size <= 0:
            return begins_s
        packets = -(-size // PACKET_BYTES)
        rounds, place = divmod(self.sent_by(begins_s) + int(packets) - 1, len(self.moments_ms))
        return max(begins_s, (rounds * self.moments_ms[-1] + self.moments_ms[place]) / 1e3)

    def bytes_between(self, begins_s: float, ends_s: float) -> int:
        """That get through between two moments, the earlier one not included."""
        return max(0, self.sent_by(ends_s) - self.sent_by(begins_s)) * PACKET_BYTES

    def rates(self, bin_s: float) -> list[float]:
        """Bytes per second in each bin of one round; the last bin may be shorter, and is counted as long as it is."""
        edges = [place * bin_s for place in range(int(self.seconds / bin_s - 1e-9) + 1)] + [self.seconds]
        # The round's first packet at 0 ms, if there is one, belongs to the first bin; its last moment to the last.
        counts = [bisect.bisect_right(self.moments_ms, round(edge * 1e3, 6)) for edge in edges]
        counts[0] = 0
        return [
            (after - before) * PACKET_BYTES / (later - sooner)
            for (sooner, later), (before, after) in zip(
                itertools.pairwise(edges), itertools.pairwise(counts), strict=True
            )
        ]


def read_moments(path: Path) -> list[int]:
    """The milliseconds in a file; UsageError names the line that is wrong."""
    try:
        if path.stat().st_size > LONGEST_BYTES:
            raise UsageError(f"{path} is larger than {LONGEST_BYTES >> 20} MiB")
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trace {path}: {error}") from error
    return list(_moments(text, path))


def read_uplink_trace(path: Path) -> UplinkTrace:
    """The trace in a file; UsageError says what is wrong with it."""
    return uplink_trace(read_moments(path), path.stem)


def uplink_trace(moments_ms: Sequence[int], name: str = "") -> UplinkTrace:
    """The trace of these moments; UsageError where nothing can be said of the link."""
    if len(moments_ms) < 2 or not moments_ms[-1]:
        raise UsageError("the trace has fewer than two packets: nothing can be said of the link")
    return UplinkTrace(tuple(moments_ms), name)


def _moments(text: str, path: Path) -> Iterator[int]:
    """The milliseconds, which never fall."""
    last = 0
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if not word or word.startswith("#"):
            continue
        if not word.isdigit() or len(word) > 12 or not last <= int(word) <= LONGEST_MS:
            raise UsageError(f"{path} line {number}: {word[:40]!r} is no millisecond after {last}, as mahimahi writes")
        last = int(word)
        yield last
