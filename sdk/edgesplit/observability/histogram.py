"""Histograms with fixed buckets: observing a value takes a microsecond, histograms of several processes can be summed,
and the encoding is small."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

SECONDS_BOUNDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the buckets for durations (inclusive, as in Prometheus), 0.1 ms to 10 s; one more bucket holds longer
durations."""
BATCH_SIZE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Upper bounds of the buckets for batch sizes."""


@dataclass
class Histogram:
    """Counts per bucket (not cumulative) and the sum of the observed values. Not thread-safe."""

    bounds: tuple[float, ...] = SECONDS_BOUNDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Record one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Record several values."""
        for index, count in Counter(map(partial(bisect_left, self.bounds), values)).items():
            self.counts[index] += count
        self.total += sum(values)

    @property
    def count(self) -> int:
        """Number of recorded values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of the recorded values; 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    def sparse(self) -> tuple[tuple[int, int], ...]:
        """The non-empty buckets as (index, count)."""
        return tuple((index, count) for index, count in enumerate(self.counts) if count)

    def quantile(self, fraction: float) -> float:
        """Estimate of the quantile `fraction` (0 to 1), interpolated linearly within its bucket; 0 if there are no
        values."""
        return quantile(self.bounds, self.sparse(), fraction)


def quantile(bounds: Sequence[float], sparse: Iterable[tuple[int, int]], fraction: float) -> float:
    """Estimate of the quantile `fraction` (0 to 1) from non-empty buckets (index, count), interpolated linearly within
    the bucket. Values above the last bound count as that bound."""
    buckets = sorted(sparse)
    rank = fraction * sum(count for _, count in buckets)
    below = 0
    for index, count in buckets:
        if below + count >= rank and count:
            low = bounds[index - 1] if index > 0 else 0.0
            high = bounds[index] if index < len(bounds) else math.inf
            return low if math.isinf(high) else low + (high - low) * max(0.0, rank - below) / count
        below += count
    return 0.0
