"""Plans that no minimum cut can make: under limits on memory, energy, deadline or loss, and for a stream's rate.

`edgesplit_partitioner.milp` solves them; here its placements become solutions like any other. A table over bandwidth
takes a program for each point where two of its rows meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from edgesplit.plan import Conditions, Link, Power, Row, energy_j, slowest_stage_s
from edgesplit_partitioner.formulation.constraints import Limits
from edgesplit_partitioner.formulation.cost_model import CostModel
from edgesplit_partitioner.formulation.cost_terms import memory_of
from edgesplit_partitioner.formulation.solution import Solution, cost_row
from edgesplit_partitioner.formulation.tiers import P95, TierChain

if TYPE_CHECKING:
    from edgesplit_partitioner.milp.exact import MilpSolution
    from edgesplit_partitioner.milp.solve import MilpProblem

MAX_ROWS = 10
"""Rows of a table, at most: each takes about two programs, and most real tables have fewer."""


def milp_problem(
    model: CostModel, chain: TierChain, weights: dict[str, float], limits: Limits, power: Power, links: tuple[Link, ...]
) -> MilpProblem:
    """The mixed integer program of a plan on `links`, the planned ones of the chain."""
    from edgesplit_partitioner.milp.solve import MilpProblem  # scipy's optimizers take longer to load than most plans

    return MilpProblem(model, links, weights, limits, power, chain.at(P95))


def to_solution(model: CostModel, found: MilpSolution) -> Solution:
    """The program's placement with its bound, as the minimum cut returns one."""
    placement = found.placement
    codec_of = {
        (model.tensor_names[tensor], model.link_name(link)): option.codec
        for (tensor, link), option in sorted(placement.transfers.items(), key=lambda crossing: crossing[0])
        if option.codec != "raw"
    }
    compress = placement.compress and bool(placement.transfers)
    return Solution(placement.tier_of, compress, min(found.bound, found.value), codec_of)


def table(model: CostModel, best: Solution, others: Iterable[MilpSolution]) -> list[Solution]:
    """The rows of a table in order: by how much stays on the device, all-local last.

    `others` are best at some other uplink bandwidth (`MilpProblem.at_other_bandwidths`): every row keeps every limit on
    the planned link, a deadline only where not latency alone is planned for. It is the lower envelope by recursion, so
    exact as far as `MAX_ROWS` go; a stream's rate is sampled.
    """
    rows = [best, *(to_solution(model, other) for other in others)]
    return sorted(rows, key=lambda row: (row.reaches == 0, np.count_nonzero(row.tier_of == 0)))


def can_fall_back(model: CostModel, local: Solution, limits: Limits, link: Link, power: Power) -> bool:
    """Whether all-local keeps the limits that hold on any link, memory and energy, whatever the deadline: it is what is
    left when the link is gone."""
    if limits.energy_joules is not None:
        row = cost_row(model, local)
        if energy_j(row, Conditions(link=link), power) > limits.energy_joules:
            return False
    most = limits.memory_bytes
    return most is None or memory_of(model, local.tier_of, limits.fallback).bytes <= most * (1 + 1e-9)


def stream_ranges(rows: Sequence[Row], link: Link) -> dict[str, tuple[float, float]]:
    """By row: from which uplink rate to which (bytes per second) its slowest stage is the least of all.

    Of equal rows the earlier counts. A slowest stage is max(a, b/rate), so the least can change only where an a meets
    a b/rate: between two neighbouring such rates one row is best, and the middle of the range shows which.
    """
    endless = Conditions(link=msgspec.structs.replace(link, up_bytes_per_s=math.inf))
    fixed = np.array([slowest_stage_s(row, endless) for row in rows])
    sizes = np.array([float(row.up_bytes) for row in rows])
    meetings = np.unique([size / least for size in sizes for least in fixed if size > 0 and least > 0])
    inside = np.concatenate([meetings[:1] / 2, np.sqrt(meetings[:-1] * meetings[1:]), meetings[-1:] * 2])
    rates = inside if len(inside) else np.array([1.0])
    least = np.maximum(fixed[:, None], sizes[:, None] / rates).argmin(axis=0)
    ends = np.concatenate([[0.0], meetings, [math.inf]])
    ranges: dict[str, tuple[float, float]] = {}
    for place, number in enumerate(least.tolist()):
        name = rows[number].name
        start, end = float(ends[place]), float(ends[place + 1])
        # A range that goes on is extended; one that begins again further up keeps its first range.
        if name in ranges and ranges[name][1] == start:
            ranges[name] = ranges[name][0], end
        ranges.setdefault(name, (start, end))
    return ranges
