"""The lower envelope of lines a + b·x over x >= 0: which one is lowest where.

`explore` finds every line of an envelope that is known only through its lowest point at a given x (recursive
intersection: 2k-1 questions for k lines); `lower_envelope` sorts lines that are all known.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

What = TypeVar("What")

NOTICED = 1e-9
"""A line that lies lower by less than this part is not worth a place."""


@dataclass(frozen=True, slots=True)
class Line(Generic[What]):
    """What it stands for, and its height a + b·x."""

    a: float
    b: float
    what: What

    def at(self, x: float) -> float:
        """Height at x, which may be infinite."""
        return self.a + (self.b * x if self.b else 0.0)


@dataclass(frozen=True, slots=True)
class Stretch(Generic[What]):
    """Where a line is lowest: from one x to another, the last of them infinite."""

    line: Line[What]
    start: float
    end: float


class Lowest(Protocol[What]):
    """Asks for the lowest line at an x, where the given lines are good."""

    def __call__(self, x: float, /, *near: Line[What]) -> Line[What]: ...


def explore(lowest: Lowest[What], steep: Line[What], flat: Line[What], most: int | None = None) -> list[Line[What]]:
    """Every line of the envelope between the lowest at x = 0 (`steep`) and the lowest at the far end (`flat`).

    `lowest` is asked at an x where two known lines meet, and given both. With `most`, so many lines are enough: the
    places where the last answer gained most are asked first.
    """
    found = [steep, flat]
    pairs = [(0.0, 0, steep, flat)]
    order = itertools.count(1)
    while pairs and (most is None or len(found) < most):
        _, _, left, right = heapq.heappop(pairs)
        if left.b <= right.b or left.a >= right.a:
            continue
        x = (right.a - left.a) / (left.b - right.b)
        middle = lowest(x, left, right)
        height = left.at(x)
        # As steep as one of the two, or steeper, it replaces that one: `lowest` may have been inexact further out.
        if middle.at(x) < height * (1 - NOTICED):
            found.append(middle)
            gained = middle.at(x) / height
            heapq.heappush(pairs, (gained, next(order), left, middle))
            heapq.heappush(pairs, (gained, next(order), middle, right))
    return sorted(found, key=lambda line: -line.b)


def lower_envelope(lines: Iterable[Line[What]]) -> list[Stretch[What]]:
    """The stretches from x = 0 to infinity. Of equal lines the first counts."""
    hull: list[tuple[Line[What], float]] = []
    for line in sorted(lines, key=lambda one: (-one.b, one.a)):
        start = _overtakes(line, hull[-1][0]) if hull else 0.0
        while hull and start <= hull[-1][1]:
            hull.pop()
            start = _overtakes(line, hull[-1][0]) if hull else 0.0
        if math.isfinite(start):
            hull.append((line, start))
    ends = [start for _, start in hull[1:]] + [math.inf]
    return [Stretch(line, start, end) for (line, start), end in zip(hull, ends, strict=True)]


def thinned(lines: list[Line[What]], most: int) -> list[Line[What]]:
    """At most `most` lines of an envelope in order of slope; those go first whose absence raises it least."""
    kept = list(lines)
    while len(kept) > max(most, 2):
        missed = [_rise(*kept[i - 1 : i + 2]) for i in range(1, len(kept) - 1)]
        del kept[1 + missed.index(min(missed))]
    return kept


def _rise(steep: Line[What], between: Line[What], flat: Line[What]) -> float:
    """How far the envelope rises without the line between its neighbours, as a part of its height."""
    x = _overtakes(flat, steep)
    height = between.at(x)
    return (flat.at(x) - height) / height if height > 0 else math.inf


def _overtakes(flat: Line[What], steep: Line[What]) -> float:
    """From which x on `flat`, whose slope is no greater, is the lower one; infinite for never."""
    if flat.b == steep.b:
        return 0.0 if flat.a < steep.a else math.inf
    return max(0.0, (flat.a - steep.a) / (steep.b - flat.b))
