"""Cuts to show beside the best: those of the switching table, the pure modes, and a few others.

The others cut the layers, in their order, where little crosses. They are evaluated like the rest and never chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from edgesplit.plan import Row
from edgesplit_partitioner.arrays import Floats, Ints, Mask
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.formulation.constraints import Limits, parse_limits
from edgesplit_partitioner.formulation.cost_model import CostModel
from edgesplit_partitioner.formulation.cost_terms import LinkScenario
from edgesplit_partitioner.formulation.mincut_problem import ArcPrices, arc_prices
from edgesplit_partitioner.formulation.objectives import parse_objective
from edgesplit_partitioner.formulation.placement import allowed_tiers
from edgesplit_partitioner.formulation.solution import Solution
from edgesplit_partitioner.formulation.tiers import Links
from edgesplit_partitioner.planner.search import PlanSearch, cut_key, row_name


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cut with its seconds on the planned link."""

    row: Row
    """Named by its cut, as in the table (`search.row_name`)."""
    seconds: float
    value: float
    """Of the objective; its seconds by default."""
    allowed: bool = True
    """False where a limit forbids it."""
    in_table: bool = False
    best: bool = False


def candidates(
    costs: Costs,
    links: Links,
    limits: Limits | Mapping[str, Any] | None = None,
    *,
    objective: str | Mapping[str, float] = "latency",
    codecs: Iterable[str] | None = None,
    most: int = 10,
) -> list[Candidate]:
    """At most `most` cuts or as many as the table has, most remote first.

    All-local and all-remote are always there, even where a limit forbids them.
    """
    return candidates_of(PlanSearch.of(costs, links, parse_limits(limits), codecs, parse_objective(objective)), most)


def candidates_of(search: PlanSearch, most: int = 10) -> list[Candidate]:
    """The candidates of a search: at most `most` cuts or as many as the table has, most remote first."""
    by_cut = {cut_key(row): _candidate(search, row, in_table=True) for row in search.rows}
    for row in _pure(search):
        by_cut.setdefault(cut_key(row), _candidate(search, row))
    for count in _narrow_prefixes(search):
        if len(by_cut) >= most:
            break
        row = _prefix(search, count)
        if cut_key(row) not in by_cut:
            by_cut[cut_key(row)] = _candidate(search, row)
    ordered = sorted(by_cut.values(), key=lambda cut: (cut.row.is_local, len(cut.row.layers), cut.row.compress))
    taken = {candidate.row.name for candidate in ordered if candidate.in_table}
    return [_judged(search, candidate, _name(search, candidate, taken)) for candidate in ordered]


def _candidate(search: PlanSearch, row: Row, *, in_table: bool = False) -> Candidate:
    return Candidate(row, search.seconds(row), search.value(row), in_table=in_table)


def _name(search: PlanSearch, candidate: Candidate, taken: set[str]) -> str:
    """Its name in the table; outside of it that of its pure mode, if no row has it, or of its cut."""
    name = candidate.row.name
    if candidate.in_table:
        return name
    if not name or name in taken:
        name = row_name(candidate.row, search.model.layers)
    taken.add(name)
    return name


def _pure(search: PlanSearch) -> Iterator[Row]:
    """All-remote, on the tier where it is best, and all-local, where the tiers can run them and whatever the limits."""
    runs = allowed_tiers(search.model.costs, Limits(), search.chain.tiers)
    remote = [solution for tier in range(1, len(runs)) if runs[tier].all() for solution in search.all_on(tier)]
    if remote:
        yield min(map(search.row, remote), key=search.value)
    if runs[0].all():
        yield search.row(search.local)


def _judged(search: PlanSearch, candidate: Candidate, name: str) -> Candidate:
    """With its name, whether it is allowed and whether it is the best."""
    allowed = search.allows(_tier_of(search, candidate.row))
    row = msgspec.structs.replace(candidate.row, name=name)
    return replace(candidate, row=row, allowed=allowed, best=cut_key(row) == cut_key(search.best))


def _tier_of(search: PlanSearch, row: Row) -> Ints:
    """By layer, the tier that a row runs it on: the number of links that it is beyond."""
    tier_of = dict.fromkeys(search.model.layers, 0)
    for beyond in (row.remote, *(hop.remote for hop in row.hops)):
        for layer in beyond:
            tier_of[layer] += 1
    return np.array(list(tier_of.values()), dtype=np.intp)


def _prefix(search: PlanSearch, count: int) -> Row:
    """The cut after the first layers, the rest on the further tier and in the kind of request that are best."""
    after = np.arange(len(search.model.layers)) >= count
    runs = [tier for tier in range(1, len(search.chain.tiers)) if search.allows(after * tier)]
    solutions = (Solution(after * tier, kind, 0.0) for tier in runs for kind in search.model.transfers)
    return min(map(search.row, solutions), key=search.value)


def _narrow_prefixes(search: PlanSearch) -> list[int]:
    """Numbers of first layers after which a cut is allowed, the most interesting first.

    Those that send no more than their neighbours come before the others, and of each the best come first.
    """
    model = search.model
    counts = np.arange(1, len(model.layers))
    crossing = model.crossing_after(model.raw_bytes)[1:-1]
    around = np.concatenate([[np.inf], crossing, [np.inf]])
    narrow = (crossing <= around[:-2]) & (crossing <= around[2:])
    values = np.full(len(counts), np.inf)
    # Throughput is priced by no scenario: its cuts are put in order of latency.
    by_kind = arc_prices(model, search.scenarios or (LinkScenario(search.links),), search.power)
    for tier, prices in itertools.product(range(1, len(search.chain.tiers)), by_kind.values()):
        np.minimum(values, _prefix_costs(model, prices, search.allowed, tier), out=values)
    order = np.lexsort((values, ~narrow))
    return [int(counts[i]) for i in order if np.isfinite(values[i])]


def _prefix_costs(model: CostModel, prices: ArcPrices, allowed: Mask, tier: int) -> Floats:
    """By number of first layers but none and all: their cost on the device, the others' on one further tier."""
    here, there = (np.where(allowed[number], prices.layers[number], np.inf) for number in (0, tier))
    beyond = np.cumsum(there[::-1])[::-1]
    sending = sum(model.crossing_after(prices.sending[link])[1:-1] for link in range(tier))
    costs: Floats = np.cumsum(here)[:-1] + beyond[1:] + sending
    return costs
