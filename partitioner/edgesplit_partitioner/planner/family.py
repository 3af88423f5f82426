"""`plan_family`: one table over several models of one task, the variants, and what is best on the planned link.

Each variant's own table is exact over bandwidth and round trip (`planner`). The family's table is their union without
the rows that can never be chosen: those that a row of a variant at least as accurate exceeds in no figure. Every
objective grows with every figure, so for each floor of accuracy the table contains the best of (variant, cut, codecs)
wherever the variants' tables do. See docs/decisions/0068-families.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import msgspec

from edgesplit import identifiers
from edgesplit import plan as plan_table
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.limits import LIMITS
from edgesplit.plan import Fallback, Power, Row, variant_name
from edgesplit.variant_choice import ACCURACY
from edgesplit_partitioner.arrays import TIE
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.formulation.constraints import Limits, parse_limits
from edgesplit_partitioner.formulation.objectives import LATENCY, parse_objective
from edgesplit_partitioner.formulation.tiers import Links, parse_links
from edgesplit_partitioner.planner.cascade import FamilyChoices, PlannedCascade, PlannedLinks, choose_cascade
from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest, FamilyAnswers
from edgesplit_partitioner.planner.family_rows import undominated, variant_row
from edgesplit_partitioner.planner.planner import PlanResult, plan
from edgesplit_partitioner.planner.search import power_of


@dataclass(frozen=True)
class Variant:
    """One model of the family, with its costs on the device class and its accuracy. UsageError for a bad value."""

    name: str
    costs: Costs = field(repr=False)
    accuracy: float
    """Share of right answers among the family's samples, 0 to 1; of answers like the reference's where they have no
    labels."""

    def __post_init__(self) -> None:
        identifiers.variant_name(self.name)
        if not 0.0 <= self.accuracy <= 1.0:
            raise UsageError(f"variant {self.name}: an accuracy of {self.accuracy} is not between 0 and 1")


@dataclass(frozen=True)
class FrontierPoint:
    """A variant's best cut on the planned link, where no variant at least as accurate has one that costs less."""

    variant: str
    accuracy: float
    row: str
    """Its name in the family's table."""
    value: float
    """Of the objective: seconds where it is accuracy or latency."""
    seconds: float
    lower_bound: float
    """No cut of this variant within the limits has a lower value."""


@dataclass(frozen=True)
class FamilyCertificate:
    """The proof that no (variant, cut, codecs) is better than the chosen one."""

    lower_bound: float
    """No cut of a variant above the floor has a lower value; with objective accuracy, none of a variant as accurate as
    the chosen one."""
    gap: float
    """How far above the bound the chosen one is, as a fraction of its value; 0 but for the noise of adding doubles."""
    more_accurate_s: float | None
    """With objective accuracy and a deadline: no cut of a more accurate variant takes less, and this is beyond the
    deadline. None where no variant is more accurate."""


@dataclass(frozen=True)
class FamilyResult:
    """The plans of all variants, and what of them is best together."""

    name: str
    variants: Mapping[str, Variant]
    """By name; those below the floor too where a cascade is asked for."""
    plans: Mapping[str, PlanResult]
    """By variant above the floor; without those that no cut within the limits exists for."""
    weaker: Mapping[str, PlanResult]
    """By variant below the floor that fits beside the others: it may be the first of a cascade."""
    left_out: Mapping[str, str]
    """Variants without a plan or below the floor, with the reason."""
    objective: str
    least_accuracy: float
    deadline_s: float
    """0: none."""
    fallback: Fallback
    power: Power | None
    cascade_request: CascadeRequest | None = None
    answers: FamilyAnswers | None = field(default=None, repr=False)
    reference: str = ""
    """Variant by whose answers accuracies were measured, as the samples have no labels; empty: by labels."""

    @cached_property
    def cascade(self) -> PlannedCascade | None:
        """The cascade that was asked for; None where none was. InfeasibleLimits where none keeps the promise, the
        deadline and the floor; UsageError where this family cannot have one."""
        if self.cascade_request is None:
            return None
        if self.answers is None:
            raise UsageError(f"family {self.name}: a cascade needs the variants' answers to its samples")
        return choose_cascade(self._choices, self.answers, self.cascade_request)

    @property
    def _choices(self) -> FamilyChoices:
        """What a cascade is chosen from."""
        planned = {**self.plans, **self.weaker}
        local = {name: self._named_rows(name, result, local=True) for name, result in planned.items()}
        every = {name: self._named_rows(name, result) for name, result in self.plans.items()}
        some = next(iter(self.plans.values()))
        alone = next(row for row in every[self.best.variant] if row.name == self.best.row)
        is_accuracy = self.objective == ACCURACY
        return FamilyChoices(
            name=self.name, firsts={name: rows[0] for name, rows in local.items() if rows}, seconds=every,
            left_out=self.left_out, accuracies={name: variant.accuracy for name, variant in self.variants.items()},
            links=PlannedLinks(some.links, some.tier_links),
            objective=parse_objective(LATENCY) if is_accuracy else some.parsed_objective, by_accuracy=is_accuracy,
            power=self.power, deadline_s=self.deadline_s, least_accuracy=self.least_accuracy, alone=alone,
        )  # fmt: skip

    def _named_rows(self, name: str, result: PlanResult, *, local: bool = False) -> tuple[Row, ...]:
        """A variant's rows as the family's table names them; with `local` only the one on the device alone."""
        rows = (row for row in result.table.rows if row.is_local or not local)
        return tuple(variant_row(row, name, self.variants[name].accuracy) for row in rows)

    @cached_property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The most accurate first, each less accurate one of less cost than all before it."""
        points = sorted(map(self._point, self.plans), key=lambda point: (-point.accuracy, point.value))
        frontier: list[FrontierPoint] = []
        for point in points:
            if not frontier or point.value < frontier[-1].value * (1 - TIE):
                frontier.append(point)
        return tuple(frontier)

    def _point(self, variant: str) -> FrontierPoint:
        result = self.plans[variant]
        row = variant_name(variant, result.row.name)
        accuracy = self.variants[variant].accuracy
        return FrontierPoint(variant, accuracy, row, result.value, result.seconds, result.certificate.lower_bound)

    @cached_property
    def best(self) -> FrontierPoint:
        """The choice on the planned link. InfeasibleLimits where nothing on it meets the deadline."""
        if self.objective != ACCURACY:
            in_time = [point for point in self.frontier if self._in_time(point.seconds)]
            chosen = min(in_time, key=lambda point: point.value, default=None)
        else:
            chosen = next((point for point in self.frontier if self._in_time(point.seconds)), None)
        if chosen is None:
            fastest = min(self.frontier, key=lambda point: point.seconds)
            raise InfeasibleLimits(
                f"family {self.name}: no variant{self._above_floor} answers within {self.deadline_s * 1e3:g} ms on the"
                f" planned link; the fastest, {fastest.variant}, takes {fastest.seconds * 1e3:.3g} ms"
            )
        return chosen

    def _in_time(self, seconds: float) -> bool:
        return not self.deadline_s or seconds <= self.deadline_s * (1 + TIE)

    @property
    def _above_floor(self) -> str:
        return f" of at least {self.least_accuracy:.1%} accuracy" if self.least_accuracy else ""

    @cached_property
    def certificate(self) -> FamilyCertificate:
        """The proof that `best` is the best."""
        chosen = self.best
        bounds = {name: result.certificate.lower_bound for name, result in self.plans.items()}
        ahead = [bounds[name] for name in self.plans if self.variants[name].accuracy > chosen.accuracy]
        if self.objective == ACCURACY:
            equals = [bounds[name] for name in self.plans if self.variants[name].accuracy == chosen.accuracy]
            bound = min(equals)
        else:
            bound = min(bounds.values())
        bound = min(bound, chosen.value)
        gap = (chosen.value - bound) / chosen.value if chosen.value else 0.0
        return FamilyCertificate(bound, gap, min(ahead, default=None) if self.objective == ACCURACY else None)

    @property
    def regret(self) -> float:
        """How much more than the best (variant, cut, codecs) above any floor the table may cost under other server
        loads and slow-downs (`PlanResult.regret`): the greatest of the variants'."""
        return max(result.regret for result in self.plans.values())

    @cached_property
    def table(self) -> plan_table.Plan:
        """One switching table over all variants, the most accurate first, its names prefixed by theirs."""
        cascade = self.cascade.cascade if self.cascade is not None else None
        # A cascade needs rows that nothing else might choose: the first one's local row, and all of the second's.
        first, second = (cascade.first, cascade.second) if cascade is not None else ("", "")
        planned = {**self.plans, **({first: self.weaker[first]} if first in self.weaker else {})}
        ordered = sorted(planned, key=lambda name: -self.variants[name].accuracy)
        tables = {name: planned[name].table for name in ordered}
        rows = undominated(
            [row for name in ordered for row in self._named_rows(name, planned[name], local=name in self.weaker)],
            needed=lambda row: row.variant == second or (row.variant == first and row.is_local),
        )
        table = tables[ordered[0]]
        private = tuple(dict.fromkeys(tensor for one in tables.values() for tensor in one.private_tensors))
        _check_private(rows, private)
        used = {row.variant for row in rows}
        return msgspec.structs.replace(
            table, model=self.name, rows=rows, objective=self.objective, private_tensors=private,
            fallback=self.fallback if any(row.is_local for row in rows) else "none",
            required_local_layers=tuple(
                variant_name(name, layer)
                for name in ordered if name in used for layer in tables[name].required_local_layers
            ),
            basis=next((one.basis for one in tables.values() if one.basis != "measured"), table.basis),
            power=self.power, regret=0.0 if math.isnan(self.regret) else self.regret,
            agreement_with=self.reference, least_accuracy=self.least_accuracy, deadline_s=self.deadline_s,
            cascade=cascade,
        )  # fmt: skip

    def to_builtins(self) -> dict[str, Any]:
        """Everything as plain values, for JSON, with each variant's own plan."""
        plain: dict[str, Any] = {
            "model": self.name, "objective": self.objective, "reference": self.reference,
            "least_accuracy": self.least_accuracy,
            "deadline_s": self.deadline_s or None, "best": self.best, "certificate": self.certificate,
            "frontier": self.frontier, "regret": None if math.isnan(self.regret) else self.regret,
            "left_out": dict(self.left_out), "table": self.table,
            "accuracies": {name: self.variants[name].accuracy for name in self.plans}, "cascade": self.cascade,
        }  # fmt: skip
        own = {name: result.to_builtins() for name, result in self.plans.items()}
        return {**{name: msgspec.to_builtins(value) for name, value in plain.items()}, "variants": own}


def plan_family(
    name: str,
    variants: Sequence[Variant],
    links: Links,
    *,
    objective: str | Mapping[str, float] = ACCURACY,
    limits: Limits | Mapping[str, Any] | None = None,
    codecs: Iterable[str] | None = None,
    least_accuracy: float = 0.0,
    cascade: CascadeRequest | None = None,
    answers: FamilyAnswers | None = None,
    reference: str = "",
) -> FamilyResult:
    """Plans of all variants on the same links, under the same limits, and one table of them.

    `objective` is `accuracy` or one that `plan` takes. The limit `deadline_s` is held against the link of the moment
    at work; here it decides `best`. With `cascade` the table says which variant answers first and which one is asked
    where it is unsure; `answers` are the variants' on the family's samples (`FamilyResult.cascade`). `reference` is the
    variant by whose answers accuracies were measured where the samples have no labels; then there is no floor.
    UsageError where an argument cannot be read; InfeasibleLimits where no variant is above the floor, has a cut within
    the limits, or where not all of them fit into the device's memory.
    """
    kept = parse_limits(limits)
    _check_request(name, variants, kept, least_accuracy)
    if least_accuracy and reference:
        raise UsageError(
            f"family {name}: its samples have no labels, so the accuracy of its variants is not known, only how often"
            f" they agree with {reference}: leave the floor out, or create the family with labels"
        )
    accurate = [variant for variant in variants if variant.accuracy >= least_accuracy]
    left_out = {
        variant.name: f"its accuracy of {variant.accuracy:.1%} is below the floor"
        for variant in variants if variant.accuracy < least_accuracy
    }  # fmt: skip
    below = [variant for variant in variants if variant.accuracy < least_accuracy] if cascade is not None else []
    power = _joint_power([*accurate, *below], links)
    # The fastest cut keeps a deadline if any does, so only what is not planned for latency needs it as a limit.
    own_limits = msgspec.structs.replace(kept, deadline_s=None) if objective in (ACCURACY, LATENCY) else kept
    plans: dict[str, PlanResult] = {}
    refused: dict[str, InfeasibleLimits] = {}
    own_objective = LATENCY if objective == ACCURACY else objective
    weaker: dict[str, PlanResult] = {}
    for variant in (*accurate, *below):
        planned = partial(
            plan, variant.costs, links, objective=own_objective, codecs=codecs, power=power,
            most_rows=LIMITS.rows // (len(accurate) + len(below)),
        )  # fmt: skip
        into = plans if variant in accurate else weaker
        try:
            into[variant.name] = _with_or_without_fallback(planned, own_limits)
        except InfeasibleLimits as error:
            refused[variant.name] = error
    if not plans:
        raise next(iter(refused.values()))
    by_name = {variant.name: variant for variant in (*accurate, *below)}
    _check_memory(name, plans, by_name, kept)
    for too_large in [one for one, result in weaker.items() if not _fit([*plans.values(), result], kept)]:
        del weaker[too_large]
        left_out[too_large] += ", and it does not fit into the device's memory beside the others"
    left_out |= {variant: str(error) for variant, error in refused.items()}
    label = ACCURACY if objective == ACCURACY else next(iter(plans.values())).objective
    return FamilyResult(
        name, by_name, plans, weaker, left_out, label, least_accuracy, kept.deadline_s or 0.0, kept.fallback, power,
        cascade, answers, reference,
    )  # fmt: skip


def _with_or_without_fallback(planned: Callable[..., PlanResult], limits: Limits) -> PlanResult:
    """A variant's plan; where its whole weights exceed the device's memory, one without its local row: another variant
    can finish for it."""
    try:
        return planned(limits=limits)
    except InfeasibleLimits:
        if limits.memory_bytes is None or limits.fallback == "none":
            raise
    return planned(limits=msgspec.structs.replace(limits, fallback="none"))


def _check_request(name: str, variants: Sequence[Variant], limits: Limits, least_accuracy: float) -> None:
    names = [variant.name for variant in variants]
    if not 1 <= len(names) <= LIMITS.variants or len(set(names)) != len(names):
        raise UsageError(f"family {name}: give 1 to {LIMITS.variants} variants of different names, not {names}")
    if limits.forced or limits.edge_after:
        raise UsageError(f"family {name}: the cut of a family cannot be forced: plan one of its variants")
    if limits.keep_first:
        raise UsageError(
            f"family {name}: keep_first counts the layers of one model: use keep_raw_input, or plan a variant"
        )
    if limits.max_loss is not None:
        raise UsageError(
            f"family {name}: a row states the accuracy of the whole model, which codecs that lose would change:"
            " leave max_loss out"
        )
    if not 0.0 <= least_accuracy <= 1.0:
        raise UsageError(f"least accuracy of {least_accuracy}: a share between 0 and 1")
    best = max(variants, key=lambda variant: variant.accuracy)
    if best.accuracy < least_accuracy:
        raise InfeasibleLimits(
            f"family {name}: no variant reaches an accuracy of {least_accuracy:.1%}; the best, {best.name}, has"
            f" {best.accuracy:.1%}"
        )


def _check_private(rows: Sequence[Row], private: Sequence[str]) -> None:
    """UsageError where one variant sends a tensor that has the name of another's raw input."""
    for row in rows:
        links: tuple[Row | plan_table.Hop, ...] = (row, *row.hops)
        clash = [tensor for link in links for tensor in link.sends if tensor in private]
        if clash:
            raise UsageError(
                f"row {row.name} sends {clash[0]!r}, the name of another variant's raw input: plan without"
                " keep_raw_input, or rename that tensor"
            )


def _joint_power(variants: Sequence[Variant], links: Links) -> Power | None:
    """What the device draws, the same for all variants, since a plan has one figure; None where a layer has no joules.

    Busy power, which counts while tensors are encoded, is the mean of the variants'.
    """
    powers = []
    for variant in variants:
        costs, chain = variant.costs, parse_links(variant.costs, links)
        if any(chain.tiers[0] not in layer.joules for layer in costs.layers):
            return None
        powers.append(power_of(costs, chain))
    return msgspec.structs.replace(powers[0], busy_watts=fmean(power.busy_watts for power in powers))


def _check_memory(name: str, plans: Mapping[str, PlanResult], variants: Mapping[str, Variant], limits: Limits) -> None:
    """InfeasibleLimits where the variants do not fit into the device's memory together; it names those to leave out: as
    few as possible, and of these the least accurate."""
    most = limits.memory_bytes
    if most is None or _fit(plans.values(), limits):
        return
    for count in range(1, len(plans)):
        choices = [
            left for left in itertools.combinations(plans, count)
            if _fit((result for variant, result in plans.items() if variant not in left), limits)
        ]  # fmt: skip
        if choices:
            left = min(
                choices, key=lambda names: sorted((variants[variant].accuracy for variant in names), reverse=True)
            )
            raise InfeasibleLimits(
                f"family {name}: its variants need {_bytes_of(plans.values()) / 1e6:.3g} MB on the device together, at"
                f" most {most / 1e6:.3g} MB are allowed: leave out {' and '.join(left)}"
            )


def _fit(plans: Iterable[PlanResult], limits: Limits) -> bool:
    """Whether these variants fit into the device's memory together."""
    return limits.memory_bytes is None or _bytes_of(plans) <= limits.memory_bytes * (1 + 1e-9)


def _bytes_of(plans: Iterable[PlanResult]) -> float:
    """What variants need on the device together: weights stay loaded; one request runs at a time, so the largest peak
    of live tensors counts."""
    held = [result.memory for result in plans]
    return sum(memory.weight_bytes for memory in held) + max(memory.peak_bytes for memory in held)
