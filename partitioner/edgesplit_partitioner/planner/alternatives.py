"""The cuts that a reader of a plan would like to see beside the best: the table's, the pure modes', and a few others.

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
from edgesplit_partitioner.algorithms.mincut import Floats, Ints, Mask
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.formulation.constraints import Limits, as_limits
from edgesplit_partitioner.formulation.mincut_problem import Price, Problem, Solution
from edgesplit_partitioner.formulation.objectives import Scene, as_objective, price
from edgesplit_partitioner.formulation.placement import allowed
from edgesplit_partitioner.formulation.tiers import Links
from edgesplit_partitioner.planner.search import Search, key_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cut with its seconds on the planned link."""

    row: Row
    """Named as in the table; `other-N` where it is not in it."""
    seconds: float
    value: float
    """What the objective makes of it; its seconds by default."""
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
    """At most `most` cuts or what the table has, most remote first.

    All-local and all-remote are always there, even where a limit forbids them.
    """
    return candidates_of(Search.of(costs, links, as_limits(limits), codecs, as_objective(objective)), most)


def candidates_of(search: Search, most: int = 10) -> list[Candidate]:
    """The same for a question already asked."""
    rows = {key_of(row): _candidate(search, row, in_table=True) for row in search.rows}
    for row in _pure(search):
        rows.setdefault(key_of(row), _candidate(search, row))
    for count in _narrow(search):
        if len(rows) >= most:
            break
        row = _prefix(search, count)
        if key_of(row) not in rows:
            rows[key_of(row)] = _candidate(search, row)
    ordered = sorted(rows.values(), key=lambda one: (one.row.is_local, len(one.row.layers), one.row.compress))
    taken = {one.row.name for one in ordered if one.in_table}
    others = (name for number in itertools.count(1) if (name := f"other-{number}") not in taken)
    return [_judged(search, one, _name(one, taken, others)) for one in ordered]


def _candidate(search: Search, row: Row, *, in_table: bool = False) -> Candidate:
    return Candidate(row, search.seconds(row), search.value(row), in_table=in_table)


def _name(one: Candidate, taken: set[str], others: Iterator[str]) -> str:
    """Its name in the table; outside of it that of its pure mode, if no row has it, or `other-N`."""
    if one.in_table or (one.row.name and one.row.name not in taken):
        taken.add(one.row.name)
        return one.row.name
    return next(others)


def _pure(search: Search) -> Iterator[Row]:
    """All-remote, on the tier where it is best, and all-local where the tiers can run them, whatever the limits say."""
    runs = allowed(search.problem.costs, Limits(), search.chain.tiers)
    further = [one for tier in range(1, len(runs)) if runs[tier].all() for one in search.all_on(tier)]
    if further:
        yield min(map(search.row, further), key=search.value)
    if runs[0].all():
        yield search.row(search.all_on(0)[0])


def _judged(search: Search, one: Candidate, name: str) -> Candidate:
    """With its name and its standing: is it allowed, is it the best?"""
    allows = search.allow(_tiers_of(search, one.row))
    row = msgspec.structs.replace(one.row, name=name)
    return replace(one, row=row, allowed=allows, best=key_of(row) == key_of(search.best))


def _tiers_of(search: Search, row: Row) -> Ints:
    """By layer, the tier that a row runs it on."""
    tier_of = dict.fromkeys(search.problem.layers, 0)
    for beyond in (row.remote, *(hop.remote for hop in row.hops)):
        for name in beyond:
            tier_of[name] += 1
    return np.array(list(tier_of.values()), dtype=np.intp)


def _prefix(search: Search, count: int) -> Row:
    """The cut after the first layers, the rest on whichever further tier and sent whichever way is better."""
    after = np.arange(len(search.problem.layers)) >= count
    runs = [tier for tier in range(1, len(search.chain.tiers)) if search.allow(after * tier)]
    found = (Solution(after * tier, way, 0.0) for tier in runs for way in search.problem.ways)
    return min(map(search.row, found), key=search.value)


def _narrow(search: Search) -> list[int]:
    """Numbers of first layers after which a cut is allowed: those that send no more than their neighbours first, and of
    those the best first.
    """
    problem = search.problem
    counts = np.arange(1, len(problem.layers))
    crossing = problem.crossing_after(problem.raw_bytes)[1:-1]
    around = np.concatenate([[np.inf], crossing, [np.inf]])
    narrow = (crossing <= around[:-2]) & (crossing <= around[2:])
    values = np.full(len(counts), np.inf)
    for tier, compress in itertools.product(range(1, len(search.chain.tiers)), problem.ways):
        least = price(problem, search.scenes or (Scene(search.links),), search.power, compress)
        np.minimum(values, _prices_after(problem, least, search.allowed, tier), out=values)
    order = np.lexsort((values, ~narrow))
    return [int(counts[i]) for i in order if np.isfinite(values[i])]


def _prices_after(problem: Problem, least: Price, may: Mask, tier: int) -> Floats:
    """Per number of first layers but none and all: their cost on the device, the others' on one further tier."""
    here, there = (np.where(may[one], least.layers[one], np.inf) for one in (0, tier))
    beyond = np.cumsum(there[::-1])[::-1]
    sending = sum(problem.crossing_after(least.sending[link])[1:-1] for link in range(tier))
    found: Floats = np.cumsum(here)[:-1] + beyond[1:] + sending
    return found
