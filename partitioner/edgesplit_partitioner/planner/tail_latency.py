"""The p95 of latency where several links vary, or one whose directions are slow at different moments.

Then no single bandwidth says how late an answer is: latency is a sum of independent delays, and its p95 is no sum of
theirs. So cuts are looked for at a grid of rates (each the least cut there, exactly) and the one with the least true
p95 over all joint moments is taken. What no cut can be below: at every joint moment a cut is no faster than the least
cut of that moment, which is concave in seconds per byte and so lies nowhere below what the grid's bounds interpolate;
the p95 of those is the bound. The gap between both is stated in the certificate.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edgesplit.errors import UsageError
from edgesplit.plan import Link, Row
from edgesplit_partitioner.algorithms.mincut import Floats
from edgesplit_partitioner.formulation.mincut_problem import Solution
from edgesplit_partitioner.formulation.objectives import Scene
from edgesplit_partitioner.formulation.tiers import P95, TierLink, quantile

if TYPE_CHECKING:
    from edgesplit_partitioner.planner.search import Search

MOST_MOMENTS = 1_000_000
"""Joint moments: the product of those of all links that vary."""
_LEVELS = {1: (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0), 2: (0.0, 0.5, 0.9, 0.95, 1.0)}
_FEW_LEVELS = (0.0, 0.9, 1.0)


@dataclass(frozen=True)
class _Axis:
    """One direction of one link, or both where one is a multiple of the other."""

    link: int
    up: bool
    down: bool

    def of(self, link: TierLink) -> Floats:
        """Its seconds per byte by moment."""
        return link.up if self.up else link.down

    def points(self, link: TierLink, levels: tuple[float, ...]) -> Floats:
        """The values at some quantiles, ascending, each once."""
        return np.unique([quantile(self.of(link), link.weights, level) for level in levels])


def value(search: Search, row: Row) -> float:
    """The objective: its means, and its p95 over all joint moments."""
    means = [scene for scene in search.scenes if scene is not search.scenes[-1]]
    weight = search.objective.latency_p95
    fixed = search.seconds(row) - sum(_moving(row, search.links))
    delays = [_delays(row, number, link) for number, link in enumerate(search.chain.links)]
    late = quantile(_joint(delays), _weights(search), P95)
    return search.value_in(means, row) + weight * (fixed + late)


def best(search: Search) -> Solution:
    """The cut of least value among those found, with what no cut can be below."""
    _check_moments(search)
    axes = _axes(search)
    levels = _LEVELS.get(len(axes), _FEW_LEVELS)
    points = [
        np.unique(
            [
                quantile(axis.of(search.chain.links[axis.link]), search.chain.links[axis.link].weights, one)
                for one in levels
            ]
        )
        for axis in axes
    ]
    found: dict[tuple[object, ...], Solution] = {}
    bounds = np.empty([len(one) for one in points])
    for place in itertools.product(*map(range, bounds.shape)):
        rates = [axis_points[i] for axis_points, i in zip(points, place, strict=True)]
        solved = search.solutions([*search.scenes[:-1], _scene(search, axes, rates)])
        bounds[place] = min(one.lower_bound for one in solved)
        found |= {(one.tier_of.tobytes(), one.compress): one for one in solved}
    least = search.least(list(found.values()))
    bound = quantile(_at_moments(search, axes, points, bounds), _weights(search), P95)
    return Solution(least.tier_of, least.compress, bound)


def _axes(search: Search) -> list[_Axis]:
    found = []
    for number, link in enumerate(search.chain.links):
        up, down = (bool(np.ptp(rates) > 0) for rates in (link.up, link.down))
        if up and down and np.allclose(link.down * link.up[0], link.up * link.down[0], rtol=1e-12, atol=0.0):
            found.append(_Axis(number, True, True))
        else:
            found += [_Axis(number, True, False)] * up + [_Axis(number, False, True)] * down
    return found


def _scene(search: Search, axes: list[_Axis], rates: list[float]) -> Scene:
    """Every link at its mean but where an axis says otherwise, in seconds per byte."""
    links = list(search.chain.mean)
    for axis, rate in zip(axes, rates, strict=True):
        link = search.chain.links[axis.link]
        if axis.up:
            links[axis.link] = msgspec.structs.replace(links[axis.link], up_bytes_per_s=1.0 / rate)
        if axis.down:
            down = rate * link.down[0] / link.up[0] if axis.up else rate
            links[axis.link] = msgspec.structs.replace(links[axis.link], down_bytes_per_s=1.0 / down)
    return replace(search.scenes[-1], links=tuple(links))


def _at_moments(search: Search, axes: list[_Axis], points: list[Floats], bounds: Floats) -> Floats:
    """At each joint moment, what no cut can be below."""
    sizes = [len(link.weights) for link in search.chain.links]
    places = np.indices(sizes).reshape(len(sizes), -1)
    at = np.stack([axis.of(search.chain.links[axis.link])[places[axis.link]] for axis in axes], axis=1)
    # Rounding may put a moment a hair beyond the grid's ends, which are the least and greatest of all moments.
    ends = np.array([(one[0], one[-1]) for one in points])
    from scipy.interpolate import RegularGridInterpolator  # loaded by the few plans that several varying links have

    interpolated: Floats = RegularGridInterpolator(points, bounds)(np.clip(at, ends[:, 0], ends[:, 1]))
    return interpolated


def _moving(row: Row, links: tuple[Link, ...]) -> list[float]:
    """Seconds that bytes move, by link."""
    rates = zip(_bytes(row), links, strict=False)
    return [up / link.up_bytes_per_s + down / link.down_bytes_per_s for (up, down), link in rates]


def _delays(row: Row, number: int, link: TierLink) -> Floats:
    """Seconds that a row's bytes take on a link, by moment."""
    up, down = (*_bytes(row), *[(0, 0)] * number)[number]
    delays: Floats = up * link.up + down * link.down
    return delays


def _bytes(row: Row) -> list[tuple[int, int]]:
    """Up and down, by link crossed."""
    return [(row.up_bytes, row.down_bytes), *((hop.up_bytes, hop.down_bytes) for hop in row.hops)]


def _joint(parts: list[Floats]) -> Floats:
    """Their sum at every joint moment: links vary independently, each one's directions together."""
    return reduce(lambda one, other: np.add.outer(one, other).ravel(), parts)


def _weights(search: Search) -> Floats:
    return reduce(lambda one, other: np.outer(one, other).ravel(), [link.weights for link in search.chain.links])


def _check_moments(search: Search) -> None:
    moments = int(np.prod([len(link.weights) for link in search.chain.links]))
    if moments > MOST_MOMENTS:
        raise UsageError(
            f"latency_p95: {moments} joint moments of {len(search.chain.varying)} varying links are more than "
            f"{MOST_MOMENTS}: thin the traces"
        )
