"""How long runs of one model take, by how many requests run together, and how many should: smoothed from what runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from edgesplit_offload.scheduling.arrivals import Returning

SMOOTHING = 0.3
OUTLIER = 2.0
"""A run counts as so many times as long as expected at most: one hiccup of the machine says nothing of the next run."""
SHARED = 1 / 3
"""What makes runs of one size slower or quicker than expected does so with the other sizes, mostly."""
HOPE = 0.98
"""What has not been tried for a while may have become quicker: by so much with each run of less."""
_SCALES = 10
FORGETTING = 1.002
"""By how much the shortest run ever seen counts for more with each run: a machine may become slower for good."""


@dataclass(frozen=True)
class Gain:
    """What running together is worth, as it was measured."""

    seconds: dict[int, float]
    """Of a run, by how many requests are in it."""
    most: int
    """Together; 1 where it is not worth it."""
    enough: int
    """So many together have most of the gain: a second run of the model need not wait for more."""

    @property
    def times(self) -> float:
        """How many times as many requests are answered by runs of `most` as by runs of one."""
        return self.seconds[1] * self.most / self.seconds[self.most] if self.most > 1 else 1.0

    @property
    def saves_s(self) -> float:
        """Seconds of a core that a request costs less by company, at best."""
        known = self.most > 1 and 1 in self.seconds and self.most in self.seconds
        return self.seconds[1] - self.seconds[self.most] / self.most if known else 0.0


class Pace:
    """One model's. Whoever shares a run shares its pace. Not thread-safe: `Turns` asks it under its own lock. Only what
    was measured (`allow`, `take`, `forbid`) comes without it, whole at a time."""

    def __init__(self) -> None:
        self.most = 1
        self.enough = 1
        self.alone_s = 0.0
        """Of one request with nothing beside it, about: the shortest seen. 0 before the first run."""
        self.saves_s = 0.0
        """Of a core, by company, as it was measured."""
        self.returning = Returning()
        """Its clients that are about to ask again."""
        self._seconds: dict[int, float] = {}
        self._runs = 0
        self._tried: list[int] = [0] * _SCALES
        """When runs of about that many, or more, were last tried, by the power of two."""

    def allow(self, gain: Gain) -> None:
        """From now on so many may run together."""
        self._seconds = {**self._seconds, **gain.seconds}
        self.most, self.enough, self.saves_s = gain.most, gain.enough, gain.saves_s

    def take(self, seconds: Mapping[int, float]) -> None:
        """Runs take so long now, by how many are in them: another engine runs them."""
        self._seconds = dict(seconds)

    def forbid(self) -> None:
        """From now on each runs by itself."""
        self.most = self.enough = 1

    def ran(self, together: int, seconds: float) -> None:
        """A run is over."""
        known = self._seconds  # these and no others: `take` may put others in their place meanwhile
        before = _expected(known, together)
        part = SMOOTHING * (min(seconds / before, OUTLIER) - 1) if before > 0 else 0.0
        if self.most > 1:
            self._runs += 1
            for scale in range(min(together.bit_length(), _SCALES)):
                self._tried[scale] = self._runs
            for size in known:
                known[size] *= 1 + part * SHARED
        known[together] = before * (1 + part) if before > 0 else seconds
        if together == 1:
            self.alone_s = min(seconds, self.alone_s * FORGETTING) if self.alone_s else seconds

    def seconds(self, together: int = 1) -> float:
        """Expected of a run of so many; 0 while nothing is known."""
        return _expected(self._seconds, together)

    def hoped(self, together: int) -> float:
        """The same by a light heart, for what is worth trying: the longer nothing of that size ran, the quicker."""
        untried = self._runs - self._tried[min(together.bit_length(), _SCALES) - 1]
        return max(self.seconds((together + 1) // 2), self.seconds(together) * HOPE**untried)

    def seconds_for(self, count: int) -> float:
        """Expected of `count` requests one after the other, as many together as may be."""
        whole, rest = divmod(count, self.most)
        return whole * self.seconds(self.most) + (self.seconds(rest) if rest else 0.0)


def _expected(seconds: Mapping[int, float], together: int) -> float:
    if together in seconds:
        return seconds[together]
    sizes = sorted(seconds)
    if not sizes:
        return 0.0
    place = bisect_left(sizes, together)
    if place == 0 or place == len(sizes):  # beyond what is known: in proportion, which is never too short
        nearest = sizes[min(place, len(sizes) - 1)]
        return seconds[nearest] * max(1.0, together / nearest)
    lower, upper = sizes[place - 1], sizes[place]
    share = (together - lower) / (upper - lower)
    return seconds[lower] + share * (seconds[upper] - seconds[lower])
