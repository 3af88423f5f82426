"""The lower envelope of lines a + b·x over x >= 0: which line is lowest where.

`explore` finds every line of an envelope that is known only through its lowest point at a given x, by recursive
intersection (Eisner and Severance, "Mathematical techniques for efficient record segmentation in large shared
databases", J. ACM 1976): 2k-1 evaluations for k lines. `lower_envelope` sorts lines that are all known.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")

MIN_GAIN = 1e-9
"""A line that lies lower by less than this fraction is not added to the envelope."""


@dataclass(frozen=True, slots=True)
class Line(Generic[Item]):
    """The height a + b·x of an item, such as the cost of a cut over the seconds per byte of a link."""

    a: float
    b: float
    item: Item

    def at(self, x: float) -> float:
        """Height at x, which may be infinite."""
        return self.a + (self.b * x if self.b else 0.0)


@dataclass(frozen=True, slots=True)
class Segment(Generic[Item]):
    """Where a line is the lowest: from one x to another, the last of them infinite."""

    line: Line[Item]
    start: float
    end: float


class LowestLine(Protocol[Item]):
    """Returns the lowest line at an x; `near` are lines that are good there."""

    def __call__(self, x: float, /, *near: Line[Item]) -> Line[Item]: ...


def explore(lowest: LowestLine[Item], steep: Line[Item], flat: Line[Item], most: int | None = None) -> list[Line[Item]]:
    """Every line of the envelope between the lowest at x = 0 (`steep`) and the lowest at the far end (`flat`).

    `lowest` is called at an x where two known lines meet, with both. `most` stops at that many lines: the
    intersections beside the line that gained most are explored first.
    """
    found = [steep, flat]
    # Pairs of neighbouring lines between which others may lie, as a heap by the gain of the line that made the pair.
    pairs = [(0.0, 0, steep, flat)]
    order = itertools.count(1)
    while pairs and (most is None or len(found) < most):
        _, _, left, right = heapq.heappop(pairs)
        if left.b <= right.b or left.a >= right.a:
            continue
        # The envelope is concave and touches both lines, one on each side of where they meet. If no line is lower
        # there, nothing new lies between the two; else the line found there splits the pair in two.
        x = (right.a - left.a) / (left.b - right.b)
        middle = lowest(x, left, right)
        height = left.at(x)
        # As steep as one of the two, or steeper, it replaces that one: `lowest` may have been inexact further out.
        if middle.at(x) < height * (1 - MIN_GAIN):
            found.append(middle)
            gained = middle.at(x) / height
            heapq.heappush(pairs, (gained, next(order), left, middle))
            heapq.heappush(pairs, (gained, next(order), middle, right))
    return sorted(found, key=lambda line: -line.b)


def lower_envelope(lines: Iterable[Line[Item]]) -> list[Segment[Item]]:
    """The segments from x = 0 to infinity. Of equal lines the first counts."""
    # A stack of lines from the steepest, which can be the lowest only near x = 0, to the flattest, each with the x from
    # which it is the lowest.
    hull: list[tuple[Line[Item], float]] = []
    for line in sorted(lines, key=lambda line: (-line.b, line.a)):
        start = _overtakes(line, hull[-1][0]) if hull else 0.0
        # It overtakes the last line before that one becomes the lowest: that one is the lowest nowhere.
        while hull and start <= hull[-1][1]:
            hull.pop()
            start = _overtakes(line, hull[-1][0]) if hull else 0.0
        if math.isfinite(start):
            hull.append((line, start))
    ends = [start for _, start in hull[1:]] + [math.inf]
    return [Segment(line, start, end) for (line, start), end in zip(hull, ends, strict=True)]


def thinned(lines: list[Line[Item]], most: int) -> list[Line[Item]]:
    """At most `most` lines of an envelope in order of slope; those go first whose absence raises it least."""
    kept = list(lines)
    while len(kept) > max(most, 2):
        rises = [_rise_without(*kept[i - 1 : i + 2]) for i in range(1, len(kept) - 1)]
        del kept[1 + rises.index(min(rises))]
    return kept


def _rise_without(steep: Line[Item], between: Line[Item], flat: Line[Item]) -> float:
    """How far the envelope rises without the line between its neighbours, as a fraction of its height."""
    x = _overtakes(flat, steep)
    height = between.at(x)
    return (flat.at(x) - height) / height if height > 0 else math.inf


def _overtakes(flat: Line[Item], steep: Line[Item]) -> float:
    """From which x on `flat`, whose slope is no greater, is the lower line; infinite for never."""
    if flat.b == steep.b:
        return 0.0 if flat.a < steep.a else math.inf
    return max(0.0, (flat.a - steep.a) / (steep.b - flat.b))
