"""Plans that no minimum cut can make: under limits on memory, energy, deadline or loss, and for a stream's rate.

`milp` solves them; here a question is put to it, and its answers become solutions like any other. A table over
bandwidth takes a program for each point where two of its rows meet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Conditions, Link, Power, Row, energy_j, slowest_s
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.formulation.constraints import Limits
from edgesplit_partitioner.formulation.mincut_problem import Solution
from edgesplit_partitioner.formulation.tiers import P95

if TYPE_CHECKING:
    from edgesplit_partitioner.formulation.cost_terms import Assignment, Memory, Question
    from edgesplit_partitioner.milp.solve import Asked
    from edgesplit_partitioner.planner.search import Search

ROWS = 10
"""So many rows of a table at most: each takes about two programs, and most real tables have fewer."""


def best(search: Search) -> Solution:
    """The least of the objective within the limits, with what nothing is below."""
    return _solution(search, _asked(search).best())


def table(search: Search) -> list[Solution]:
    """The best of the planned link first where it was forced, else by how much stays on the device; all-local last.

    Every row keeps every limit on the planned link, a deadline only where not latency alone is planned for: the lower
    envelope over uplink bandwidth among those that do, by recursion, so exact as far as `ROWS` go
    (`milp.Asked.at_other_bandwidths`; a stream's rate is sampled). All-local stands behind them if memory and energy
    allow it, whatever the deadline: it is what is left when the link is gone.
    """
    found = [search.solution]
    if not search.limits.forced:
        found += [_solution(search, one) for one in _asked(search).at_other_bandwidths(ROWS)]
        found.sort(key=lambda one: (one.reaches == 0, np.count_nonzero(one.tier_of == 0)))
    if search.wants_local(map(search.line_of, found)) and _may_fall_back(search):
        found.append(Solution(search.everything, False, 0.0))
    return found


def conflict(
    costs: Costs, tiers: tuple[str, ...], links: tuple[Link, ...], codecs: Sequence[str], limits: Limits, power: Power
) -> InfeasibleLimits:
    """The error for limits that conflict already in where layers may run, those on sums counted in what would do."""
    from edgesplit_partitioner.formulation.cost_terms import Question
    from edgesplit_partitioner.milp.solve import Asked

    question = Question(costs, tiers, links, frozenset(codecs))
    return Asked(question, "latency", limits, power, links).conflict()


def memory(search: Search, solution: Solution) -> Memory:
    """What a solution needs on the device, its fallback counted."""
    from edgesplit_partitioner.formulation.cost_terms import memory_of

    return memory_of(_question(search), solution.tier_of, search.limits.fallback)


def stream_ranges(rows: Sequence[Row], link: Link) -> dict[str, tuple[float, float]]:
    """By row: from which uplink rate to which (bytes per second) its slowest stage is the least of all; equals go to
    the earlier row. A slowest stage is max(a, b/rate), so the least can change only where an a meets a b/rate.
    """
    endless = Conditions(link=msgspec.structs.replace(link, up_bytes_per_s=math.inf))
    fixed = np.array([slowest_s(row, endless) for row in rows])
    sizes = np.array([float(row.up_bytes) for row in rows])
    meetings = np.unique([size / least for size in sizes for least in fixed if size > 0 and least > 0])
    inside = np.concatenate([meetings[:1] / 2, np.sqrt(meetings[:-1] * meetings[1:]), meetings[-1:] * 2])
    rates = inside if len(inside) else np.array([1.0])
    least = np.maximum(fixed[:, None], sizes[:, None] / rates).argmin(axis=0)
    ends = np.concatenate([[0.0], meetings, [math.inf]])
    found: dict[str, tuple[float, float]] = {}
    for place, number in enumerate(least.tolist()):
        name = rows[number].name
        start, end = float(ends[place]), float(ends[place + 1])
        found[name] = (
            (found[name][0], end) if name in found and found[name][1] == start else found.get(name, (start, end))
        )
    return found


def _question(search: Search) -> Question:
    from edgesplit_partitioner.formulation.cost_terms import Question

    return Question(search.problem.costs, search.problem.tiers, search.links, frozenset(search.codecs))


def _asked(search: Search) -> Asked:
    if not search.exact:
        raise UsageError("latency_p95 over several varying links cannot be planned under such limits: fix all but one")
    from edgesplit_partitioner.milp.solve import Asked  # scipy's optimizers take longer to load than most plans to make

    return Asked(_question(search), search.objective.weights, search.limits, search.power, search.chain.at(P95))


def _solution(search: Search, found: Assignment) -> Solution:
    names = search.problem.tiers
    tier_of = np.array([names.index(found.tier_of[layer]) for layer in search.problem.layers], dtype=np.intp)
    codec_of = {key: codec for key, codec in found.codec_of.items() if codec != "raw"}
    return Solution(tier_of, found.compress, found.bound, codec_of)


def _may_fall_back(search: Search) -> bool:
    """All-local keeps the limits that hold on any link: layers, memory, energy."""
    limits = search.limits
    if not search.allow(search.everything, forced=False):
        return False
    if limits.energy_joules is not None:
        row = search.figures(Solution(search.everything, False, 0.0))
        if energy_j(row, Conditions(link=search.link), search.power) > limits.energy_joules:
            return False
    most = limits.memory_bytes
    return most is None or memory(search, Solution(search.everything, False, 0.0)).bytes <= most * (1 + 1e-9)
