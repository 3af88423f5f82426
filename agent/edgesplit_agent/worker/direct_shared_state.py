"""What a worker notes of its lanes, and what the agent tells it of them, in words that both see.

A worker that ends, however it ends, has lost nothing of what is written here. The agent believes none of it: times and
counts are taken as far as they can be, and no word leads anywhere in memory. Each word is written by one side alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_LANES = 16
"""Of one worker."""
MOST_SLICES = 64
"""That one request runs."""
RING = 4_096
"""Answers that are told one by one until the agent looks, which it does once a second at least."""
LONGEST_S = 1e6
AHEAD_S = 1.0
"""A run may have begun after whoever asks looked at the clock; what began later than that began..."""
FIRST_S = 1e-6
"""...long ago: a worker that writes such things is given no time."""

# Written by the worker
_BUSY_SINCE, _BUSY_LEFT, _ANSWERS, _FAILURES, _NOTED, _RUNS = range(6)
# Written by the agent
_PREDICTED, _SCALE = 6, 7
_OPEN = 8
_SLICES = _OPEN + MOST_LANES
_RING = _SLICES + MOST_SLICES
WORDS = _RING + 2 * RING
BYTES = 8 * WORDS


class LaneWords:
    """The words in memory of `BYTES`."""

    def __init__(self, memory: memoryview) -> None:
        self._counts = memory[:BYTES].cast("B").cast("Q")
        self._seconds = memory[:BYTES].cast("B").cast("d")

    # What the worker writes

    def begin(self, now: float, left_s: float) -> None:
        """A run begins, of a request that has so long."""
        self._seconds[_BUSY_LEFT] = left_s
        self._seconds[_BUSY_SINCE] = now

    def end(self) -> None:
        """It has ended."""
        self._seconds[_BUSY_SINCE] = 0.0

    def answered(self, latency_s: float, run_s: float) -> None:
        """A request is about to get its answer."""
        seconds, counts = self._seconds, self._counts
        done = counts[_ANSWERS]
        at = _RING + 2 * (done % RING)
        seconds[at] = latency_s
        seconds[at + 1] = run_s
        counts[_ANSWERS] = done + 1

    def took(self, slice_s: Sequence[float]) -> None:
        """Its slices took so long, in their order."""
        seconds = self._seconds
        for place, spent in enumerate(slice_s, _SLICES):
            seconds[place] += spent
        self._counts[_RUNS] += 1

    def failed(self) -> None:
        """The model could not answer."""
        self._counts[_FAILURES] += 1

    def note(self) -> None:
        """Something is not as it was when the model was opened: the agent should hear of it."""
        self._counts[_NOTED] = 1

    # What the agent writes

    def tell(self, predicted_s: float, scale: float) -> None:
        """What answers say of the plan, and of measured over predicted power (0: unmeasured)."""
        self._seconds[_PREDICTED] = predicted_s
        self._seconds[_SCALE] = scale

    def open(self, place: int, number: int) -> None:
        """Lane `number` may be answered from now on."""
        self._counts[_OPEN + place] = number

    def shut(self, place: int) -> None:
        """What is there may not, of which nothing has begun."""
        self._counts[_OPEN + place] = 0

    # What either reads

    def is_open(self, place: int, number: int) -> bool:
        """Whether that lane may be answered."""
        return self._counts[_OPEN + place] == number

    @property
    def predicted_s(self) -> float:
        """By the plan."""
        return self._seconds[_PREDICTED]

    @property
    def scale(self) -> float:
        """Measured over predicted power."""
        return self._seconds[_SCALE]

    def busy(self, now: float) -> tuple[float, float] | None:
        """Since when a run runs, and how long its request had; None where none does."""
        since, left_s = self._seconds[_BUSY_SINCE], self._seconds[_BUSY_LEFT]
        if since == 0.0:
            return None
        if not 0.0 < since <= now + AHEAD_S:
            since = FIRST_S
        return min(since, now), left_s if 0.0 <= left_s < LONGEST_S else 0.0

    @property
    def noted(self) -> bool:
        """Whether the worker has something to say."""
        return bool(self._counts[_NOTED])

    @property
    def answers(self) -> int:
        """Answers so far."""
        return self._counts[_ANSWERS]

    @property
    def failures(self) -> int:
        """Failures so far."""
        return self._counts[_FAILURES]

    @property
    def slice_s(self) -> tuple[int, list[float]]:
        """Runs, and what each place in their order took in all of them."""
        return self._counts[_RUNS], list(self._seconds[_SLICES : _SLICES + MOST_SLICES])

    def between(self, taken: int, answers: int) -> list[tuple[float, float]]:
        """Latency and run of each answer after the first `taken` of so many; of more than fit, the newest. Times that
        cannot be are left out."""
        first = max(taken, answers - RING)
        found = [
            (self._seconds[at], self._seconds[at + 1])
            for at in (_RING + 2 * (number % RING) for number in range(first, answers))
        ]
        return [one for one in found if 0.0 <= one[1] <= one[0] < LONGEST_S and math.isfinite(one[0])]
