"""`plan`: costs and links in, the best cut and the switching table out. Pure; nothing is measured or sent here.

Any number of tiers, and any objective that adds up, exactly: a minimum cut per furthest tier and kind of request,
compared with all-local, the round trips added to whatever crosses. `formulation.mincut_problem` builds the cuts,
`formulation.objectives` prices them, `formulation.placement` applies the limits; limits on sums and throughput are
solved by the package `milp`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from edgesplit import plan as plan_table
from edgesplit.cascade import Cascade
from edgesplit.errors import UsageError
from edgesplit.limits import LIMITS
from edgesplit.plan import Link, Row
from edgesplit_partitioner.algorithms.lower_envelope import lower_envelope
from edgesplit_partitioner.costs.intervals import SecondsInterval, row_interval
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.formulation.constraints import Limits, earliest_cut, parse_limits
from edgesplit_partitioner.formulation.cost_terms import Memory
from edgesplit_partitioner.formulation.objectives import OBJECTIVES, Objective, parse_objective
from edgesplit_partitioner.formulation.solution import layers_by_tier
from edgesplit_partitioner.formulation.tiers import Links, TierLink
from edgesplit_partitioner.planner import constrained
from edgesplit_partitioner.planner.alternatives import Candidate, candidates_of
from edgesplit_partitioner.planner.changed_answers import (
    MOST_TENSORS,
    Promises,
    confirm,
    confirmable,
    lossy_tensors,
    only,
    plausible,
    with_promise,
)
from edgesplit_partitioner.planner.loss_validation import unconfirmed, with_losses, without
from edgesplit_partitioner.planner.search import PlanSearch, cut_key, power_of, total_bytes
from edgesplit_partitioner.planner.sensitivity import LOADS, SLOWDOWNS

__all__ = ["OBJECTIVES", "Certificate", "PlanResult", "plan", "tensors_to_confirm"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """The proof of a plan's optimality, and what the pure modes cost, in the objective's unit (seconds by default)."""

    lower_bound: float
    """No cut within the limits has a lower value."""
    gap: float
    """How far above the bound the plan is, as a fraction of its value; 0 but for the noise of adding doubles."""
    all_local: float | None
    """None where the device cannot run every layer."""
    all_remote: float | None
    """On one tier beyond the device, compressed or not, whichever is best; None where no tier can run every layer."""


@dataclass(frozen=True)
class PlanResult:
    """The best cut for one link, with its proof; `table` holds the cuts for all other links."""

    costs: Costs = field(repr=False)
    tiers: tuple[str, ...]
    links: tuple[Link, ...]
    """Between neighbours, as planned: a varying link at its mean seconds per byte, at their p95 for `latency_p95`."""
    limits: Limits
    codecs: tuple[str, ...]
    objective: str
    cut: dict[str, tuple[str, ...]]
    """Layer names by tier."""
    value: float
    """Of the objective, minimised: seconds, joules or their weighted sum; of a stream, seconds per inference."""
    seconds: float
    """Latency on `links`."""
    joules: float | None
    """Of the device's layers, None where the costs lack them for a layer; where energy is an objective or a limit, of
    the whole device: its layers, encoding, waiting and radio.
    """
    bytes: int
    """Up and down, over all links."""
    split: dict[str, float]
    """`seconds` as device, encode, link, decode and remote."""
    certificate: Certificate
    gain: float | None
    """How many times better than the better of the pure modes that the limits allow; None if they allow neither."""
    promises: Promises = field(repr=False)
    """By tensor and codec: what is promised of the answers, where `max_changed` limits them."""
    _best: Row = field(repr=False)
    _search: PlanSearch = field(repr=False, compare=False)
    cascade: Cascade | None = None
    """Its early exit (`planner.early_exit`)."""

    @cached_property
    def row(self) -> Row:
        """The best cut as it stands in the table."""
        key = cut_key(self._best)
        return next(row for row in self.table.rows if cut_key(row) == key)

    @cached_property
    def between(self) -> SecondsInterval | None:
        """Interval of `seconds` where a tier's seconds are predicted, None where all are measured; links as planned."""
        return row_interval(self.costs, self.tiers, self._best, self.seconds)

    @property
    def link(self) -> Link:
        """The first link, as planned."""
        return self.links[0]

    @property
    def parsed_objective(self) -> Objective:
        """What the plan minimises, as weights."""
        return self._search.objective

    @property
    def tier_links(self) -> tuple[TierLink, ...]:
        """The planned links with all their moments."""
        return self._search.chain.links

    @cached_property
    def memory(self) -> Memory:
        """What the plan needs on the device, in bytes: weights, all of them where the fallback is `warm`, and the peak
        of live tensors.
        """
        return self._search.memory(self._search.solution)

    @cached_property
    def regret(self) -> float:
        """How much more than the best cut the table may cost under other server loads and device slow-downs.

        As a fraction of the best cost, at the planned links, for any factors between those sampled
        (`sensitivity.LOADS`, `sensitivity.SLOWDOWNS`). At load 1 and slow-down 1 it is 0 at every bandwidth. Not a
        number where none was sampled: a forced cut, or a plan of the package `milp`.
        """
        return self._search.sampled_factors.regret if self._is_sampled else math.nan

    @property
    def _is_sampled(self) -> bool:
        return not self.limits.forced and not self._search.needs_milp

    @cached_property
    def table(self) -> plan_table.Plan:
        """The switching table: every cut that is best at some uplink bandwidth, computed when first read.

        Exact for every round trip at the link's downlink rate, further links as planned; all-local is among the rows
        unless it cannot run, or the fallback is `none` and it is best at no round trip. Rows that are best under other
        server loads or device slow-downs are added, and `regret` bounds what is still lost. Under limits on sums the
        table has a limited number of rows, and of a stream it is sampled (`constrained.table`).
        """
        tensors = self.costs.tensors
        rows = tuple(with_promise(with_losses(row, tensors), self.promises, tensors) for row in self._search.rows)
        objective = self._search.objective
        return plan_table.Plan(
            model=self.costs.model,
            device_class=self.costs.device_class,
            rows=rows,
            link=self.link,
            fallback=self.limits.fallback if any(row.is_local for row in rows) else "none",
            objective=self.objective,
            limits=self.limits.as_text(),
            private_tensors=self._raw_tensors if self.limits.keep_raw_input else (),
            required_local_layers=earliest_cut(self.costs, self.limits),
            basis=(self.costs.basis.get(self.tiers[0], "").split() or ["predicted"])[0],
            forced_row=rows[0].name if self.limits.forced else "",
            weights=objective.row_weights,
            power=self._power,
            regret=self.regret if self._is_sampled else 0.0,
            factors={"server_load": LOADS[-1], "device_slowdown": SLOWDOWNS[-1]} if self._is_sampled else {},
            tiers=self.tiers if len(self.tiers) > 2 else (),
            cascade=self.cascade,
        )

    @property
    def _raw_tensors(self) -> tuple[str, ...]:
        """What `keep_raw_input` holds on the device, in the order of the costs."""
        return tuple(name for name in self.costs.tensors if name in self.costs.raw)

    @property
    def _power(self) -> plan_table.Power | None:
        """What the device draws, for the choice of a row at run time; None where a layer has no joules in the costs."""
        if self._search.objective.energy:
            return self._search.power
        if any(self.tiers[0] not in layer.joules for layer in self.costs.layers):
            return None
        return power_of(self.costs, self._search.chain)

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float] | None]:
        """Per row of the table: the uplink bytes per second at which it is best at the planned round trip.

        None for a row that is best nowhere, kept as a fallback or for shorter round trips.
        """
        if self._search.objective.throughput:
            best = constrained.stream_ranges(self.table.rows, self.link)
            return {row.name: best.get(row.name) for row in self.table.rows}
        segments = lower_envelope(self._search.line(row, row.name) for row in self.table.rows)
        best = {segment.line.item: (_rate(segment.end), _rate(segment.start)) for segment in segments}
        return {row.name: best.get(row.name) for row in self.table.rows}

    def candidates(self, most: int = 10) -> list[Candidate]:
        """Cuts to show beside the best, most remote first (see `alternatives`)."""
        return candidates_of(self._search, most)

    def to_builtins(self) -> dict[str, Any]:
        """Everything as plain values, for JSON. An infinite bandwidth becomes null."""
        ranges = {
            name: None if rates is None else [rate if math.isfinite(rate) else None for rate in rates]
            for name, rates in self.ranges.items()
        }
        plain = {
            "model": self.costs.model, "tiers": self.tiers, "link": self.link, "links": self.links,
            "objective": self.objective, "limits": self.limits.as_text(), "row": self.row.name, "cut": self.cut,
            "value": self.value, "seconds": self.seconds, "between": self.between, "joules": self.joules,
            "bytes": self.bytes,
            "memory": {"weights": self.memory.weight_bytes, "peak": self.memory.peak_bytes, "bytes": self.memory.bytes},
            "split": self.split, "certificate": self.certificate, "gain": self.gain,
            "regret": None if math.isnan(self.regret) else self.regret,
            "ranges": ranges, "table": self.table,
        }  # fmt: skip
        return {name: msgspec.to_builtins(value) for name, value in plain.items()}


def plan(
    costs: Costs,
    links: Links,
    *,
    objective: str | Mapping[str, float] = "latency",
    limits: Limits | Mapping[str, Any] | None = None,
    codecs: Iterable[str] | None = None,
    power: plan_table.Power | None = None,
    most_rows: int = LIMITS.rows,
) -> PlanResult:
    """The cut of least cost from the first input byte to the last answer, and the table of cuts around it.

    `links` names each pair of neighbouring tiers, as in
    `{"device-cloud": {"up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6, "rtt_s": 0.04}}`; a rate may be a sequence (a
    trace), and the first link may name its `radio`. `objective` is one of `OBJECTIVES`, or a weight for each of some.
    Codecs that lose more on held-out samples than `max_loss` allows are left out (`loss_validation`), and those for
    which samples do not confirm `max_changed` (`changed_answers`). For a plan beside others of its device (`family`),
    `power` is what the device draws and `most_rows` the table's share. UsageError where an argument cannot be read or
    samples are too few, InfeasibleLimits where no cut keeps the limits.
    """
    if not isinstance(costs, Costs):
        raise UsageError(f"costs: give what load_costs returns, not {type(costs).__name__}")
    parsed, kept = parse_objective(objective), parse_limits(limits)

    def planned(costs: Costs, promises: Promises) -> PlanResult:
        search = PlanSearch.of(costs, links, kept, codecs, parsed, power=power, most_rows=most_rows)
        return _planned(costs, search, promises)

    promises: Promises = {}
    if kept.max_changed:
        costs = confirmable(costs, kept.max_changed)
        promises = confirm(_best_first(planned(costs, {})), costs, kept.max_changed)
        costs = only(costs, promises)
    result = planned(costs, promises)
    while kept.max_loss and (failed := unconfirmed(result.table.rows, costs, kept.max_loss)):
        costs = without(costs, failed)
        result = planned(costs, promises)
    return result


def tensors_to_confirm(
    costs: Costs,
    links: Links,
    *,
    objective: str | Mapping[str, float] = "latency",
    limits: Limits | Mapping[str, Any] | None = None,
    codecs: Iterable[str] | None = None,
) -> tuple[str, ...]:
    """The tensors on which lossy codecs would pay under `max_changed`, the best row's first: those whose answers have
    to be compared on samples that choose nothing before `plan` can use these codecs. At most `MOST_TENSORS`."""
    kept = parse_limits(limits)
    if not kept.max_changed:
        return ()
    costs = plausible(costs, kept.max_changed)
    search = PlanSearch.of(costs, links, kept, codecs, parse_objective(objective))
    return lossy_tensors(_best_first(_planned(costs, search, {})), costs)[:MOST_TENSORS]


def _best_first(result: PlanResult) -> tuple[Row, ...]:
    """The rows of the table, the planned one first."""
    return (result.row, *result.table.rows)


def _planned(costs: Costs, search: PlanSearch, promises: Promises) -> PlanResult:
    """The plan of one search; whether its codecs hold on held-out samples is not checked here."""
    row = search.best
    value, seconds = search.value(row), search.seconds(row)
    local, remote = search.pure
    bound = min(search.solution.lower_bound, value)
    return PlanResult(
        costs=costs, tiers=search.chain.tiers, links=search.links, limits=search.limits, codecs=search.codecs,
        objective=search.objective.name, cut=layers_by_tier(search.model, search.solution.tier_of),
        value=value, seconds=seconds, joules=search.joules(row), bytes=total_bytes(row), split=_split(row, search.link),
        certificate=Certificate(bound, (value - bound) / value if value else 0.0, local, remote),
        gain=search.better_pure / value if search.better_pure and value else None, promises=promises, _best=row,
        _search=search,
    )  # fmt: skip


def _split(row: Row, link: Link) -> dict[str, float]:
    """Where the seconds go; encoding and decoding on any tier, all links, layers beyond the first link."""
    encode_s, decode_s = (sum(getattr(hop, name) for hop in row.hops) for name in ("encode_s", "decode_s"))
    return {
        "device": row.device_s,
        "encode": row.encode_s + encode_s,
        "link": plan_table.link_s(row, link) + row.further_links_s,
        "decode": row.decode_s + decode_s,
        "remote": row.remote_s - encode_s - decode_s,
    }


def _rate(x: float) -> float:
    """Bytes per second at x seconds per byte."""
    return 1.0 / x if x else math.inf
