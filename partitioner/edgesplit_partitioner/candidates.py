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
from edgesplit_partitioner.costs import Costs
from edgesplit_partitioner.search import Links, Search
from edgesplit_partitioner.side_limits import Limits, as_limits


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cut with its seconds on the planned link."""

    row: Row
    """Named as in the table; `other-N` where it is not in it."""
    seconds: float
    allowed: bool = True
    """False where a limit forbids it."""
    in_table: bool = False
    best: bool = False


def candidates(
    costs: Costs,
    links: Links,
    limits: Limits | Mapping[str, Any] | None = None,
    *,
    codecs: Iterable[str] | None = None,
    most: int = 10,
) -> list[Candidate]:
    """At most `most` cuts or what the table has, most remote first.

    All-local and all-remote are always there, even where a limit forbids them.
    """
    return candidates_of(Search.of(costs, links, as_limits(limits), codecs), most)


def candidates_of(search: Search, most: int = 10) -> list[Candidate]:
    """The same for a question already asked."""
    rows = {_key(row): Candidate(row, search.seconds(row), in_table=True) for row in search.rows}
    for row in _pure(search):
        rows.setdefault(_key(row), Candidate(row, search.seconds(row)))
    for position in _narrow(search):
        if len(rows) >= most:
            break
        row = _prefix(search, position)
        if _key(row) not in rows:
            rows[_key(row)] = Candidate(row, search.seconds(row))
    ordered = sorted(rows.values(), key=lambda one: (one.row.is_local, len(one.row.layers), one.row.compress))
    others = (f"other-{number}" for number in itertools.count(1))
    return [_judged(search, one, one.row.name or next(others)) for one in ordered]


def _key(row: Row) -> tuple[tuple[str, ...], bool]:
    return row.layers, row.compress


def _pure(search: Search) -> Iterator[Row]:
    """All-remote and all-local where the tiers can run them, whatever the limits say."""
    local_s, remote_s = search.pure_s
    if remote_s is not None:
        yield min((search.problem.row(search.nothing, way) for way in search.problem.ways), key=search.seconds)
    if local_s is not None:
        yield search.problem.row(search.everything, False)


def _judged(search: Search, one: Candidate, name: str) -> Candidate:
    """With its name and its standing: is it allowed, is it the best?"""
    mine = frozenset(one.row.layers)
    on_device = np.array([name in mine for name in search.problem.layers], dtype=np.bool_)
    row = msgspec.structs.replace(one.row, name=name)
    return replace(one, row=row, allowed=search.sides.allow(on_device), best=_key(row) == _key(search.best))


def _prefix(search: Search, position: int) -> Row:
    """The cut after the layer at `position`, sent whichever way is faster."""
    on_device = np.arange(len(search.problem.layers)) <= position
    return min((search.problem.row(on_device, way) for way in search.problem.ways), key=search.seconds)


def _narrow(search: Search) -> list[int]:
    """Positions after which a cut is allowed: those that send no more than their neighbours first, fastest first."""
    problem = search.problem
    crossing = problem.crossing_after(problem.raw_bytes)
    around = np.concatenate([[np.inf], crossing, [np.inf]])
    narrow = (crossing <= around[:-2]) & (crossing <= around[2:])
    x = 1.0 / search.link.up_bytes_per_s
    ways = (problem.prices_after(problem.seconds(way, search.link, x)) for way in problem.ways.values())
    seconds = np.minimum.reduce(list(ways))
    return [int(i) for i in np.lexsort((seconds, ~narrow)) if search.sides.may_end_after[i]]
