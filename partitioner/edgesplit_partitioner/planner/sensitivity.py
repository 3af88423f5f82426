"""Other server loads and device slow-downs: the cuts that are best under some, and what is lost between them.

The table is exact over bandwidth at load 1 and slow-down 1. Factors are sampled at the planned link, a minimum cut
each; a cut that the table would miss by more than `WORTH` joins it. What may still be lost anywhere between the
samples is bounded without another solve: the best cost is a minimum of costs linear in both factors, so it is concave,
and lies nowhere below what is interpolated between its values at the samples.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edgesplit_partitioner.algorithms.mincut import Floats
from edgesplit_partitioner.formulation.mincut_problem import Solution
from edgesplit_partitioner.formulation.objectives import Scene

if TYPE_CHECKING:
    from edgesplit_partitioner.planner.search import Search

LOADS = (1.0, 2.0, 4.0, 8.0)
SLOWDOWNS = (1.0, 2.0, 4.0)
WORTH = 0.01
"""A cut joins the table where the table costs more than the cut by this part."""
REFINED = 3
"""So many times another load or slow-down is sampled, where most may be lost, while that is more than `WORTH`."""
_BETWEEN = 8
"""Points between neighbouring samples at which the loss is bounded."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What sampling found."""

    added: tuple[Solution, ...]
    """Cuts that the table lacks."""
    before: float
    """How much dearer than the best cut the table may be without them, as a part of its cost."""
    regret: float
    """The same with them: no more than this, anywhere between the samples, at the planned link."""


def sample(search: Search, kept: Sequence[Solution], room: int) -> Sampled:
    """Solve for pairs of factors, more of them where most may be lost, and bound what is lost with what was found.

    `kept` are the table's rows without all-local; at most `room` join them.
    """
    added: list[Solution] = []
    planes = [_plane(search, one) for one in (*kept, *_local(search))]
    first = list(planes)
    loads, slowdowns = list(LOADS), list(SLOWDOWNS)
    least: dict[tuple[float, float], float] = {}
    regret = 0.0
    for left in range(REFINED, -1, -1):
        for load, slowdown in itertools.product(loads, slowdowns):
            if (load, slowdown) in least:
                continue
            scenes = _scaled(search, load, slowdown)
            found = search.solutions(scenes, exact=False)
            least[load, slowdown] = min(one.lower_bound for one in found)
            best = min(found, key=lambda one: search.value_in(scenes, search.figures(one)))
            worth = search.value_in(scenes, search.figures(best)) * (1 + WORTH)
            if len(added) < room and _lowest(planes, load, slowdown) > worth:
                added.append(best)
                planes.append(_plane(search, best))
        regret, where = _loss(planes, loads, slowdowns, least)
        if regret <= WORTH or not left:
            break
        _insert(loads, slowdowns, where)
    return Sampled(tuple(added), _loss(first, loads, slowdowns, least)[0], regret)


def _insert(loads: list[float], slowdowns: list[float], where: tuple[float, float]) -> None:
    """One more sample of that factor whose neighbours around `where` are further apart, as ratios."""
    gaps = []
    for samples, at in ((loads, where[0]), (slowdowns, where[1])):
        place = min(max(bisect.bisect_right(samples, at), 1), len(samples) - 1)
        gaps.append((samples[place] / samples[place - 1], samples, (samples[place] * samples[place - 1]) ** 0.5))
    _, samples, middle = max(gaps, key=lambda gap: gap[0])
    bisect.insort(samples, middle)


def _local(search: Search) -> list[Solution]:
    may = search.limits.fallback != "none" and search.allow(search.everything)
    return [Solution(search.everything, False, 0.0)] if may else []


def _scaled(search: Search, load: float, slowdown: float) -> list[Scene]:
    return [replace(scene, load=load, slowdown=slowdown) for scene in search.scenes]


def _plane(search: Search, solution: Solution) -> Floats:
    """A cut's cost over the factors, as [constant, per load, per slow-down]: it is linear in both."""
    row = search.figures(solution)
    here, loaded, slowed = (search.value_in(_scaled(search, *one), row) for one in ((1, 1), (2, 1), (1, 2)))
    return np.array([here - (loaded - here) - (slowed - here), loaded - here, slowed - here])


def _lowest(planes: list[Floats], load: float, slowdown: float) -> float:
    return float(min(plane @ (1.0, load, slowdown) for plane in planes))


def _loss(
    planes: list[Floats], loads: list[float], slowdowns: list[float], least: Mapping[tuple[float, float], float]
) -> tuple[float, tuple[float, float]]:
    """The largest part by which the lowest plane may lie above the best cost, known at the samples, and where."""
    values = np.array([[least[load, slowdown] for slowdown in slowdowns] for load in loads])
    x, y = _refined(loads), _refined(slowdowns)
    over_loads = np.array([np.interp(x, loads, column) for column in values.T]).T
    bound = np.array([np.interp(y, slowdowns, row) for row in over_loads])
    fixed, per_load, per_slowdown = (np.array(planes)[:, one, None, None] for one in range(3))
    table = np.min(fixed + per_load * x[:, None] + per_slowdown * y, axis=0)
    above = np.divide(table - bound, bound, out=np.zeros_like(bound), where=bound > 0)
    i, j = np.unravel_index(int(above.argmax()), above.shape)
    return max(float(above[i, j]), 0.0), (float(x[i]), float(y[j]))


def _refined(samples: Sequence[float]) -> Floats:
    parts = [np.linspace(one, other, _BETWEEN, endpoint=False) for one, other in itertools.pairwise(samples)]
    return np.concatenate([*parts, samples[-1:]])
