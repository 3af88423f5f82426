"""Other server loads and device slow-downs: which cuts are best under some, and what is lost between the samples.

The switching table is exact over bandwidth at load 1 and slow-down 1. These two factors are sampled at the planned
link, a minimum cut for each pair; a cut that costs less than the table by more than `MIN_GAIN` joins the table.

What may still be lost anywhere between the samples (the regret) is bounded without another solve: the cost of a cut is
linear in both factors, so the least cost over all cuts is a minimum of linear functions, which is concave, and a
concave function is nowhere below the interpolation between its values at the samples.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgesplit.plan import Row
from edgesplit_partitioner.arrays import Floats
from edgesplit_partitioner.formulation.cost_terms import LinkScenario
from edgesplit_partitioner.formulation.solution import Solution

LOADS = (1.0, 2.0, 4.0, 8.0)
"""Server loads that are sampled first."""
SLOWDOWNS = (1.0, 2.0, 4.0)
"""Device slow-downs that are sampled first."""
MIN_GAIN = 0.01
"""A cut joins the table where the table costs more than the cut by this fraction."""
MAX_REFINEMENTS = 3
"""So many times another load or slow-down is sampled, where most may be lost, while that is more than `MIN_GAIN`."""
_POINTS_BETWEEN = 8
"""Points between neighbouring samples at which the loss is bounded."""

Scenarios = Sequence[LinkScenario]


@dataclass(frozen=True, slots=True)
class SensitivitySample:
    """The cuts that other factors ask for, and a bound on what the table loses with them."""

    added: tuple[Solution, ...]
    """Cuts that the table lacks."""
    regret: float
    """With them the table costs at most so much more than the best cut, as a fraction of the best cost, anywhere
    between the samples, at the planned link."""


def sample(
    scenarios: Scenarios,
    solve: Callable[[Scenarios], list[Solution]],
    row_of: Callable[[Solution], Row],
    cost: Callable[[Scenarios, Row], float],
    table: Sequence[Solution],
    fallback: Sequence[Solution],
    room: int,
) -> SensitivitySample:
    """Solve for pairs of factors, more of them where most may be lost, and bound what the table loses.

    `scenarios` are those of the objective, which the factors are applied to. `solve` returns cheapest cuts in scenarios
    with a lower bound each, `row_of` a cut's figures and `cost` what they come to in scenarios. `table` are the table's
    rows but for all-local, which is `fallback` where it is allowed; at most `room` cuts join them.
    """

    def scaled(load: float, slowdown: float) -> Scenarios:
        return [replace(scenario, load=load, slowdown=slowdown) for scenario in scenarios]

    def plane(solution: Solution) -> Floats:
        """A cut's cost over the factors, linear in both: [constant, per load, per slow-down]."""
        row = row_of(solution)
        base, loaded, slowed = (cost(scaled(*factors), row) for factors in ((1, 1), (2, 1), (1, 2)))
        return np.array([base - (loaded - base) - (slowed - base), loaded - base, slowed - base])

    added: list[Solution] = []
    planes = [plane(solution) for solution in (*table, *fallback)]
    loads, slowdowns = list(LOADS), list(SLOWDOWNS)
    bounds: dict[tuple[float, float], float] = {}
    regret = 0.0
    for left in range(MAX_REFINEMENTS, -1, -1):
        for load, slowdown in itertools.product(loads, slowdowns):
            if (load, slowdown) in bounds:
                continue
            here = scaled(load, slowdown)
            solved = solve(here)
            # The bound, not the cost of the best cut found: the solver is inexact here, and the regret must hold.
            bounds[load, slowdown] = min(solution.lower_bound for solution in solved)
            costs = [cost(here, row_of(solution)) for solution in solved]
            worth_adding = min(costs) * (1 + MIN_GAIN)
            if len(added) < room and _lowest(planes, load, slowdown) > worth_adding:
                added.append(solved[costs.index(min(costs))])
                planes.append(plane(added[-1]))
        regret, where = _largest_regret(planes, loads, slowdowns, bounds)
        if regret <= MIN_GAIN or not left:
            break
        _refine(loads, slowdowns, where)
    return SensitivitySample(tuple(added), regret)


def _refine(loads: list[float], slowdowns: list[float], where: tuple[float, float]) -> None:
    """Add a sample of the factor whose neighbours around `where` are further apart, as ratios: their geometric mean."""
    gaps = []
    for samples, at in ((loads, where[0]), (slowdowns, where[1])):
        place = min(max(bisect.bisect_right(samples, at), 1), len(samples) - 1)
        gaps.append((samples[place] / samples[place - 1], samples, (samples[place] * samples[place - 1]) ** 0.5))
    _, samples, middle = max(gaps, key=lambda gap: gap[0])
    bisect.insort(samples, middle)


def _lowest(planes: list[Floats], load: float, slowdown: float) -> float:
    """The cost of the cheapest cut of the table at a pair of factors."""
    return float(min(plane @ (1.0, load, slowdown) for plane in planes))


def _largest_regret(
    planes: list[Floats], loads: list[float], slowdowns: list[float], bounds: Mapping[tuple[float, float], float]
) -> tuple[float, tuple[float, float]]:
    """The largest fraction by which the table may cost more than the best cut, and the factors where.

    The table is the lowest of the planes; the best cost is at least the interpolation of its bounds at the samples.
    """
    values = np.array([[bounds[load, slowdown] for slowdown in slowdowns] for load in loads])
    x, y = _with_points_between(loads), _with_points_between(slowdowns)
    over_loads = np.array([np.interp(x, loads, column) for column in values.T]).T
    bound = np.array([np.interp(y, slowdowns, row) for row in over_loads])
    fixed, per_load, per_slowdown = (np.array(planes)[:, part, None, None] for part in range(3))
    table = np.min(fixed + per_load * x[:, None] + per_slowdown * y, axis=0)
    above = np.divide(table - bound, bound, out=np.zeros_like(bound), where=bound > 0)
    i, j = np.unravel_index(int(above.argmax()), above.shape)
    return max(float(above[i, j]), 0.0), (float(x[i]), float(y[j]))


def _with_points_between(samples: Sequence[float]) -> Floats:
    """The samples with points evenly spaced between neighbours."""
    parts = [np.linspace(*pair, _POINTS_BETWEEN, endpoint=False) for pair in itertools.pairwise(samples)]
    return np.concatenate([*parts, samples[-1:]])
