"""Histograms of seconds that cost a microsecond, add up across processes, and travel small."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

SECONDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds (inclusive, as Prometheus has them), 0.1 ms to 10 s; one more bucket holds what is longer."""
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Upper bounds for how many requests ran together."""


@dataclass
class Histogram:
    """Counts by bucket, not cumulative, and the sum of what was observed. Not thread-safe by itself."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count them all."""
        for place, count in Counter(map(partial(bisect_left, self.bounds), values)).items():
            self.counts[place] += count
        self.total += sum(values)

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean; 0 of none."""
        return self.total / self.count if self.count else 0.0

    def sparse(self) -> tuple[tuple[int, int], ...]:
        """The buckets that hold something, as (place, count)."""
        return tuple((place, count) for place, count in enumerate(self.counts) if count)

    def quantile(self, part: float) -> float:
        """About the value that `part` of all do not exceed, linear within its bucket; 0 of none."""
        return quantile(self.bounds, self.sparse(), part)


def quantile(bounds: Sequence[float], sparse: Iterable[tuple[int, int]], part: float) -> float:
    """The same of sparse buckets; what lies beyond the last bound counts as that bound."""
    buckets = sorted(sparse)
    rank = part * sum(count for _, count in buckets)
    below = 0
    for place, count in buckets:
        if below + count >= rank and count:
            low = bounds[place - 1] if place > 0 else 0.0
            high = bounds[place] if place < len(bounds) else math.inf
            return low if math.isinf(high) else low + (high - low) * max(0.0, rank - below) / count
        below += count
    return 0.0
