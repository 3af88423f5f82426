"""The p95 of latency where several links vary, or one whose directions are slow at different moments.

Then no single bandwidth determines how late an answer is: latency is a sum of independent delays, and the p95 of a sum
is no sum of p95s.

1. Cuts are searched for at a grid of rates, each the least cut there, exactly.
2. The one with the least true p95 over all joint moments is taken.
3. The lower bound: at every joint moment a cut is no faster than the least cut of that moment. The least latency is
   concave in seconds per byte (a minimum of linear functions), so it is nowhere below the interpolation of the grid's
   bounds, and the p95 of those interpolated values is the bound. The certificate states the gap between both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import msgspec
import numpy as np

from edgesplit.errors import UsageError
from edgesplit.plan import Link, Row
from edgesplit_partitioner.arrays import Floats
from edgesplit_partitioner.formulation.cost_terms import LinkScenario
from edgesplit_partitioner.formulation.solution import Solution
from edgesplit_partitioner.formulation.tiers import P95, TierChain, TierLink, quantile

MAX_MOMENTS = 1_000_000
"""Joint moments that are evaluated, at most: the product of those of all links that vary."""
_LEVELS = {1: (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0), 2: (0.0, 0.5, 0.9, 0.95, 1.0)}
"""Quantiles of each axis at which cuts are searched for, by number of axes."""
_FEW_LEVELS = (0.0, 0.9, 1.0)
"""Quantiles of each axis where there are more axes: the grid is their product."""


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


def p95_s(row: Row, seconds: float, planned: Sequence[Link], links: tuple[TierLink, ...]) -> float:
    """The p95 of a row's latency over all joint moments of the links, given its `seconds` on the planned links."""
    return quantile_s(row, seconds, planned, links, P95)


def quantile_s(
    row: Row, seconds: float, planned: Sequence[Link], links: tuple[TierLink, ...], fraction: float
) -> float:
    """The seconds that a row's latency does not exceed for this fraction of all joint moments of the links, given its
    `seconds` on the planned links."""
    fixed, delays = _delays(row, seconds, planned, links)
    return fixed + quantile(_joint_sums(delays), _joint_weights(links), fraction)


def mean_s(row: Row, seconds: float, planned: Sequence[Link], links: tuple[TierLink, ...]) -> float:
    """The mean of a row's latency over all moments of the links, given its `seconds` on the planned links."""
    fixed, delays = _delays(row, seconds, planned, links)
    return fixed + sum(float(delay @ link.weights) for delay, link in zip(delays, links, strict=True))


def _delays(
    row: Row, seconds: float, planned: Sequence[Link], links: tuple[TierLink, ...]
) -> tuple[float, list[Floats]]:
    """The part of a row's seconds that no link's rate changes, and by link what its bytes take at each moment."""
    moved = _bytes_by_link(row)
    fixed = seconds - sum(
        up / link.up_bytes_per_s + down / link.down_bytes_per_s
        for (up, down), link in zip(moved, planned, strict=False)
    )
    # A link that the row does not cross takes no time at any of its moments.
    moved += [(0, 0)] * (len(links) - len(moved))
    return fixed, [up * link.up + down * link.down for (up, down), link in zip(moved, links, strict=True)]


def best(
    chain: TierChain,
    scenario: LinkScenario,
    solve: Callable[[LinkScenario], list[Solution]],
    choose: Callable[[list[Solution]], Solution],
) -> Solution:
    """The solution of least value among those found, with a bound that no cut's value is below.

    `scenario` is the one that prices the p95; `solve` returns cheapest cuts with it at other rates, and `choose` the
    best of some by its true p95.
    """
    _check_moments(chain)
    axes = _axes(chain)
    levels = _LEVELS.get(len(axes), _FEW_LEVELS)
    points = [axis.points(chain.links[axis.link], levels) for axis in axes]
    found: dict[tuple[object, ...], Solution] = {}
    bounds = np.empty([len(values) for values in points])
    for place in itertools.product(*map(range, bounds.shape)):
        rates = [values[i] for values, i in zip(points, place, strict=True)]
        solved = solve(_scenario_at(chain, scenario, axes, rates))
        bounds[place] = min(solution.lower_bound for solution in solved)
        found |= {(solution.tier_of.tobytes(), solution.compress): solution for solution in solved}
    least = choose(list(found.values()))
    bound = quantile(_bounds_at_moments(chain, axes, points, bounds), _joint_weights(chain.links), P95)
    return Solution(least.tier_of, least.compress, bound)


def _axes(chain: TierChain) -> list[_Axis]:
    """What varies by itself: the fewer axes, the fewer points has the grid."""
    axes = []
    for number, link in enumerate(chain.links):
        up, down = (bool(np.ptp(rates) > 0) for rates in (link.up, link.down))
        if up and down and np.allclose(link.down * link.up[0], link.up * link.down[0], rtol=1e-12, atol=0.0):
            axes.append(_Axis(number, True, True))
        else:
            axes += [_Axis(number, True, False)] * up + [_Axis(number, False, True)] * down
    return axes


def _scenario_at(chain: TierChain, scenario: LinkScenario, axes: list[_Axis], rates: list[float]) -> LinkScenario:
    """The scenario with every link at its mean, except at these seconds per byte on the axes."""
    links = list(chain.mean)
    for axis, rate in zip(axes, rates, strict=True):
        link = chain.links[axis.link]
        if axis.up:
            links[axis.link] = msgspec.structs.replace(links[axis.link], up_bytes_per_s=1.0 / rate)
        if axis.down:
            down = rate * link.down[0] / link.up[0] if axis.up else rate
            links[axis.link] = msgspec.structs.replace(links[axis.link], down_bytes_per_s=1.0 / down)
    return replace(scenario, links=tuple(links))


def _bounds_at_moments(chain: TierChain, axes: list[_Axis], points: list[Floats], bounds: Floats) -> Floats:
    """By joint moment, a value that no cut is below: the grid's bounds interpolated."""
    sizes = [len(link.weights) for link in chain.links]
    places = np.indices(sizes).reshape(len(sizes), -1)
    at = np.stack([axis.of(chain.links[axis.link])[places[axis.link]] for axis in axes], axis=1)
    # Rounding may put a moment a hair beyond the grid's ends, which are the least and greatest of all moments.
    ends = np.array([(values[0], values[-1]) for values in points])
    from scipy.interpolate import RegularGridInterpolator  # loaded by the few plans that several varying links have

    interpolated: Floats = RegularGridInterpolator(points, bounds)(np.clip(at, ends[:, 0], ends[:, 1]))
    return interpolated


def _bytes_by_link(row: Row) -> list[tuple[int, int]]:
    """Bytes up and down each link that the row crosses."""
    return [(row.up_bytes, row.down_bytes), *((hop.up_bytes, hop.down_bytes) for hop in row.hops)]


def _joint_sums(delays: list[Floats]) -> Floats:
    """The sum of the delays at every joint moment: links vary independently, each one's directions together."""
    return reduce(lambda sums, delay: np.add.outer(sums, delay).ravel(), delays)


def _joint_weights(links: tuple[TierLink, ...]) -> Floats:
    """By joint moment, its part of the time."""
    return reduce(lambda product, weights: np.outer(product, weights).ravel(), [link.weights for link in links])


def _check_moments(chain: TierChain) -> None:
    moments = int(np.prod([len(link.weights) for link in chain.links]))
    if moments > MAX_MOMENTS:
        raise UsageError(
            f"latency_p95: {moments} joint moments of {len(chain.varying)} varying links are more than "
            f"{MAX_MOMENTS}: thin the traces"
        )
