"""Shared state of a worker's lanes: an array of 64-bit words in memory that agent and worker both map.

A worker that ends, however it ends, loses nothing of what is written here. The agent trusts none of it: implausible
times and counts are discarded, and no word is used as an address. Each word is written by one side only.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_LANES = 16
"""Maximum number of lanes of one worker."""
MAX_SLICES = 64
"""Maximum number of slices that one request runs."""
RING_ENTRIES = 4_096
"""Number of answers recorded individually until the agent collects them, which it does at least once a second."""
MAX_PLAUSIBLE_S = 1e6
"""Larger durations are implausible and discarded."""
CLOCK_TOLERANCE_S = 1.0
"""A run may have begun up to this many seconds after the agent read its clock; a later beginning is implausible."""
LONG_AGO = 1e-6
"""Beginning assumed for a run with an implausible one: long ago, so that the watchdog grants it no time."""

# Written by the worker
_BUSY_SINCE, _BUSY_LEFT, _ANSWERS, _FAILURES, _NOTED, _RUNS = range(6)
# Written by the agent
_PREDICTED, _SCALE = 6, 7
_OPEN = 8
_SLICES = _OPEN + MAX_LANES
_RING = _SLICES + MAX_SLICES
WORDS = _RING + 2 * RING_ENTRIES
"""Number of words."""
BYTES = 8 * WORDS
"""Size of the shared state in bytes."""


class LaneSharedState:
    """Accessors of the words in memory of `BYTES` bytes."""

    def __init__(self, memory: memoryview) -> None:
        self._counts = memory[:BYTES].cast("B").cast("Q")
        self._seconds = memory[:BYTES].cast("B").cast("d")

    # What the worker writes

    def begin_run(self, now: float, left_s: float) -> None:
        """Worker: a run begins; its request has `left_s` seconds left."""
        # In this order: the agent treats a beginning other than 0 as valid, together with the word before it.
        self._seconds[_BUSY_LEFT] = left_s
        self._seconds[_BUSY_SINCE] = now

    def end_run(self) -> None:
        """Worker: the run has ended."""
        self._seconds[_BUSY_SINCE] = 0.0

    def record_answer(self, latency_s: float, run_s: float) -> None:
        """Worker: record an answer that is about to be sent."""
        seconds, counts = self._seconds, self._counts
        count = counts[_ANSWERS]
        index = _RING + 2 * (count % RING_ENTRIES)
        seconds[index] = latency_s
        seconds[index + 1] = run_s
        counts[_ANSWERS] = count + 1  # last: it makes the entry visible

    def record_slice_times(self, slice_s: Sequence[float]) -> None:
        """Worker: add the durations of the slices, in order."""
        seconds = self._seconds
        for index, seconds_spent in enumerate(slice_s, _SLICES):
            seconds[index] += seconds_spent
        self._counts[_RUNS] += 1

    def record_failure(self) -> None:
        """Worker: count a failed request."""
        self._counts[_FAILURES] += 1

    def signal_change(self) -> None:
        """Worker: signal that something changed since the model was opened (an accelerator was lost)."""
        self._counts[_NOTED] = 1

    # What the agent writes

    def set_predictions(self, predicted_s: float, scale: float) -> None:
        """Agent: set the predicted seconds, and measured over predicted power (0: not measured), for lane answers."""
        self._seconds[_PREDICTED] = predicted_s
        self._seconds[_SCALE] = scale

    def open_slot(self, slot: int, number: int) -> None:
        """Agent: lane `number` in this slot may be answered from now on."""
        self._counts[_OPEN + slot] = number

    def close_slot(self, slot: int) -> None:
        """Agent: the lane in this slot is ended; only a request that has begun is still answered."""
        self._counts[_OPEN + slot] = 0

    # What either reads

    def is_open(self, slot: int, number: int) -> bool:
        """Whether this lane may be answered."""
        return self._counts[_OPEN + slot] == number

    @property
    def predicted_s(self) -> float:
        """Seconds that the plan predicts for a request."""
        return self._seconds[_PREDICTED]

    @property
    def scale(self) -> float:
        """Measured over predicted power; 0: not measured."""
        return self._seconds[_SCALE]

    def current_run(self, now: float) -> tuple[float, float] | None:
        """Beginning of the current run and the seconds that its request had left; None if no run is in progress."""
        since, left_s = self._seconds[_BUSY_SINCE], self._seconds[_BUSY_LEFT]
        if since == 0.0:
            return None
        if not 0.0 < since <= now + CLOCK_TOLERANCE_S:
            since = LONG_AGO
        return min(since, now), left_s if 0.0 <= left_s < MAX_PLAUSIBLE_S else 0.0

    @property
    def has_changed(self) -> bool:
        """Whether the worker has signalled a change."""
        return bool(self._counts[_NOTED])

    @property
    def answer_count(self) -> int:
        """Number of answers so far."""
        return self._counts[_ANSWERS]

    @property
    def failure_count(self) -> int:
        """Number of failures so far."""
        return self._counts[_FAILURES]

    @property
    def slice_totals(self) -> tuple[int, list[float]]:
        """Number of runs, and the total seconds per position in their order."""
        return self._counts[_RUNS], list(self._seconds[_SLICES : _SLICES + MAX_SLICES])

    def answers_between(self, collected: int, answers: int) -> list[tuple[float, float]]:
        """Latency and run seconds of the answers after the first `collected`, up to number `answers`.

        If more than the ring holds, only the newest; implausible times are left out.
        """
        first = max(collected, answers - RING_ENTRIES)
        indexes = (_RING + 2 * (number % RING_ENTRIES) for number in range(first, answers))
        times = [(self._seconds[index], self._seconds[index + 1]) for index in indexes]
        return [(latency_s, run_s) for latency_s, run_s in times if 0.0 <= run_s <= latency_s < MAX_PLAUSIBLE_S]
