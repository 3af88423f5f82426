"""Run-time model: how long runs of one model take by batch size, and which batch sizes pay; updated with every run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from edgesplit_offload.scheduling.arrivals import ExpectedReturns

SMOOTHING = 0.3
"""Weight of a new measurement in the exponential moving average."""
OUTLIER = 2.0
"""A run counts at most this multiple of its expected time, so that one hiccup of the machine does not distort the
model."""
CARRY_OVER = 1 / 3
"""Part of a measured change that is applied to the other batch sizes too: what slows one size down mostly slows all."""
OPTIMISM = 0.98
"""Factor per run by which the optimistic time of an untried batch size falls, because it may have become faster since.
"""
_SCALES = 10
"""Batch sizes are grouped by powers of two, up to this many groups."""
MINIMUM_GROWTH = 1.002
"""Factor per run by which the shortest time ever seen grows, because a machine may become slower for good."""


@dataclass(frozen=True)
class BatchBenefit:
    """The measured benefit of batching."""

    seconds: dict[int, float]
    """Seconds of a run by batch size."""
    max_batch: int
    """Largest batch that pays; 1 if batching does not pay."""
    sufficient_batch: int
    """Batch size that has most of the benefit: a second run of the model need not wait for more requests."""

    @property
    def throughput_ratio(self) -> float:
        """Throughput of runs of the largest batch divided by that of single runs."""
        return self.seconds[1] * self.max_batch / self.seconds[self.max_batch] if self.max_batch > 1 else 1.0

    @property
    def saved_s(self) -> float:
        """Core seconds saved per request in the largest batch."""
        known = self.max_batch > 1 and 1 in self.seconds and self.max_batch in self.seconds
        return self.seconds[1] - self.seconds[self.max_batch] / self.max_batch if known else 0.0


class RunTimes:
    """The run-time model of one model; requests that may share runs share it.

    Not thread-safe: the `Scheduler` calls it under its own lock. Only measurements (`enable_batching`, `replace_times`)
    come from other threads; each replaces its values as a whole.
    """

    def __init__(self) -> None:
        self.max_batch = 1
        self.sufficient_batch = 1
        self.single_s = 0.0
        """Shortest time of a single run, slowly forgotten; 0 before the first. The estimate for a run with nothing
        beside it."""
        self.saved_s = 0.0
        """Core seconds saved per request by batching, as measured."""
        self.returns = ExpectedReturns()
        """Forecast of the model's clients that are about to return."""
        self._seconds: dict[int, float] = {}
        self._runs = 0
        self._last_tried: list[int] = [0] * _SCALES
        """Run count at which a batch of this power of two, or a larger one, was last run."""

    def enable_batching(self, benefit: BatchBenefit) -> None:
        """Batch from now on, as measured."""
        self._seconds = {**self._seconds, **benefit.seconds}
        self.max_batch, self.sufficient_batch, self.saved_s = (
            benefit.max_batch,
            benefit.sufficient_batch,
            benefit.saved_s,
        )

    def replace_times(self, seconds: Mapping[int, float]) -> None:
        """Replace the run times, because another engine runs the batches now."""
        self._seconds = dict(seconds)

    def record(self, batch_size: int, seconds: float) -> None:
        """Learn from a run of `batch_size` requests and its duration in seconds."""
        # A local reference: `replace_times` may replace the dictionary from another thread meanwhile.
        known = self._seconds
        # Exponential moving average in relative terms: T <- T * (1 + a * (min(t / T, OUTLIER) - 1)).
        expected = _interpolated(known, batch_size)
        change = SMOOTHING * (min(seconds / expected, OUTLIER) - 1) if expected > 0 else 0.0
        if self.max_batch > 1:
            self._runs += 1
            for scale in range(min(batch_size.bit_length(), _SCALES)):
                self._last_tried[scale] = self._runs
            # A slower or faster machine changes all sizes alike: the others follow by a third (docs/decisions/0044).
            for size in known:
                known[size] *= 1 + change * CARRY_OVER
        known[batch_size] = expected * (1 + change) if expected > 0 else seconds
        if batch_size == 1:
            self.single_s = min(seconds, self.single_s * MINIMUM_GROWTH) if self.single_s else seconds

    def expected_s(self, batch_size: int = 1) -> float:
        """Expected seconds of a run of `batch_size` requests; 0 while nothing is known."""
        return _interpolated(self._seconds, batch_size)

    def optimistic_s(self, batch_size: int) -> float:
        """Optimistic seconds of a run of `batch_size` requests, to decide what is worth trying: the longer the size was
        not run, the lower."""
        # T * OPTIMISM**n after n runs without this size, but never below a run of half the size: twice the work cannot
        # take less time. Used for waiting only; deadlines are judged by what was measured (docs/decisions/0044).
        untried = self._runs - self._last_tried[min(batch_size.bit_length(), _SCALES) - 1]
        return max(self.expected_s((batch_size + 1) // 2), self.expected_s(batch_size) * OPTIMISM**untried)

    def total_s(self, count: int) -> float:
        """Expected seconds of `count` requests one after the other in the largest batches allowed."""
        whole, remainder = divmod(count, self.max_batch)
        return whole * self.expected_s(self.max_batch) + (self.expected_s(remainder) if remainder else 0.0)


def _interpolated(seconds: Mapping[int, float], batch_size: int) -> float:
    """Expected seconds of a run by interpolation between the known batch sizes."""
    if batch_size in seconds:
        return seconds[batch_size]
    sizes = sorted(seconds)
    if not sizes:
        return 0.0
    index = bisect_left(sizes, batch_size)
    # Outside the measured range: in proportion to the batch size, which never underestimates, as larger batches cost
    # less per request; below the smallest size its time is an upper bound. Inside: linear interpolation.
    if index == 0 or index == len(sizes):
        nearest = sizes[min(index, len(sizes) - 1)]
        return seconds[nearest] * max(1.0, batch_size / nearest)
    lower, upper = sizes[index - 1], sizes[index]
    position = (batch_size - lower) / (upper - lower)
    return seconds[lower] + position * (seconds[upper] - seconds[lower])
