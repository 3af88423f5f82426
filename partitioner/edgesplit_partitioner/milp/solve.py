"""The best assignment of layers to tiers and of codecs to crossing tensors under limits that no minimum cut can keep.

Exact for any number of tiers: one mixed integer program per kind of request (compressed or not), equals decided as in
the cut (fewer bytes, then more local). Every answer is evaluated again from what it assigns: the solver's tolerances
are neither in the value nor in what the limits allow. What cannot be kept is explained by `conflict`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Link, Power
from edgesplit_partitioner.algorithms.lower_envelope import Line, explore
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.formulation import cost_terms
from edgesplit_partitioner.formulation.constraints import Limits
from edgesplit_partitioner.formulation.cost_terms import Assignment, Placement, Question, Tariff
from edgesplit_partitioner.milp.conflict import explained
from edgesplit_partitioner.milp.demands import Demand, demands
from edgesplit_partitioner.milp.exact import Exact, Found, SearchStopped
from edgesplit_partitioner.milp.model import Effort, Goal

OBJECTIVES = ("latency", "latency_p95", "energy", "throughput")
SAMPLED = tuple(2.0**power for power in range(-6, 7))
"""Parts of the planned uplink rate at which a stream's rows are made: its slowest stage is no line over bandwidth."""


def solve(
    costs: Costs,
    tiers: Sequence[str],
    links: Sequence[Link],
    objective: str | Mapping[str, float],
    limits: Limits,
    codecs: Iterable[str],
    *,
    power: Power | None = None,
    p95_links: Sequence[Link] | None = None,
    mip_rel_gap: float = 1e-6,
    time_limit_s: float = 60.0,
) -> Assignment:
    """The assignment that is least in the objective and keeps the limits; InfeasibleLimits says which cannot be kept.

    `links[k]` joins `tiers[k]` to `tiers[k + 1]`. The objective is one of `OBJECTIVES` or a weight for each of several:
    `latency` in seconds; `latency_p95` the same on `p95_links` (the links by default); `energy` in joules of the
    device; `throughput` the seconds per inference of the slowest stage of a stream. Its stages are each tier's layers
    with the decoding of what comes up to it and the encoding of what it sends on, and each direction of each link,
    bytes over rate. Round trips are in no stage: they delay the first answer and not the next. Energy and deadline are
    those of the given links. Where time runs out the answer is the best found, and its gap says how far off it may be.
    """
    question = Question(costs, tuple(tiers), tuple(links), frozenset(codecs))
    effort = Effort(mip_rel_gap, time_limit_s)
    return Asked(question, objective, limits, power or Power(), tuple(p95_links or links), effort).best()


@dataclass(frozen=True)
class Asked:
    """A question under limits: its best assignment, and those that are best at other bandwidths."""

    question: Question
    objective: str | Mapping[str, float]
    limits: Limits
    power: Power
    p95_links: tuple[Link, ...]
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        if any(name not in OBJECTIVES for name in self._weights) or not any(self._weights.values()):
            known = ", ".join(OBJECTIVES)
            raise UsageError(f"objective {self.objective!r} is not supported; supported: {known}, or weights")
        if not all(0 <= weight < math.inf for weight in self._weights.values()):
            raise UsageError(f"objective: weights must be numbers of at least 0, not {self.objective}")
        if self.limits.energy_joules is not None or self._weights.get("energy"):
            _check_joules(self.question)

    def best(self) -> Assignment:
        """The best at the links of the question."""
        goal, wanted = self._goal(self.question.links, self.p95_links, self.power), self._demands(self.limits)
        found = self._exact.least(goal, wanted)
        if found is None:
            raise explained(self._exact, wanted)
        wishes = Goal(cost_terms.sent_bytes(self.question)), Goal(cost_terms.distance(self.question))
        return self._named(self._exact.least_of_equals(goal, wanted, found, *wishes))

    def conflict(self) -> InfeasibleLimits:
        """Why the limits cannot be kept, for who knows that already."""
        return explained(self._exact, self._demands(self.limits))

    def at_other_bandwidths(self, most: int) -> list[Assignment]:
        """What is best at some uplink bandwidth of the first link, every limit kept on the planned links.

        The lower envelope over 1/bandwidth by recursion, a program for each of its points, at round trip 0 and with the
        radio awake on the first link: so it is exact for every round trip, as the table of a minimum cut is. At most
        `most` of its lines. A deadline is left out where latency alone counts: on the planned link the fastest row is
        taken, and that keeps it. For throughput, which is no line, the bandwidths `SAMPLED` are tried.
        """
        unhurried = not self._weights.keys() & {"energy", "throughput"}
        limits = msgspec.structs.replace(self.limits, deadline_s=None) if unhurried else self.limits
        wanted = self._demands(limits)
        if self._weights.get("throughput"):
            tried = [self._exact.least(self._goal_at(1.0 / self._rate * part, awake=False), wanted) for part in SAMPLED]
            return [self._named(one) for one in tried if one is not None]
        return [self._named(line.what) for line in self._envelope(wanted, most)]

    def _envelope(self, wanted: Sequence[Demand], most: int) -> list[Line[Found]]:
        endless = self._goal_at(0.0)
        # Where a byte takes a second more, each costs what its slope is.
        per_byte = Goal(_sum(self._goal_at(1.0)) + _sum(endless) * -1.0)

        def line(found: Found) -> Line[Found]:
            return Line(self._value(endless, found), self._value(per_byte, found), found)

        def lowest(x: float, *near: Line[Found]) -> Line[Found]:
            try:
                found = self._exact.least(self._goal_at(x), wanted)
            except SearchStopped:
                found = None
            return line(found) if found is not None else near[0]

        steep, flat = self._exact.least(endless, wanted), self._exact.least(per_byte, wanted)
        if steep is None or flat is None:
            return []
        steep = self._exact.least_of_equals(endless, wanted, steep, per_byte)
        flat = self._exact.least_of_equals(per_byte, wanted, flat, endless)
        return explore(lowest, line(steep), line(flat), most)

    def _goal_at(self, x: float, *, awake: bool = True) -> Goal:
        """The objective at x seconds per byte up the first link; `awake` leaves out its round trip and the radio's."""
        up = 1.0 / x if x else math.inf

        def changed(links: tuple[Link, ...]) -> tuple[Link, ...]:
            first = msgspec.structs.replace(links[0], up_bytes_per_s=up, rtt_s=0.0 if awake else links[0].rtt_s)
            return (first, *links[1:])

        power = msgspec.structs.replace(self.power, wake_joules=0.0) if awake else self.power
        return self._goal(changed(self.question.links), changed(self.p95_links), power)

    def _goal(self, links: tuple[Link, ...], p95_links: tuple[Link, ...], power: Power) -> Goal:
        """The objective as a sum and the stages of which the slowest counts."""
        here = replace(self.question, links=links)
        known: dict[str, Callable[[], Tariff]] = {
            "latency": lambda: cost_terms.latency_s(here),
            "latency_p95": lambda: cost_terms.latency_s(replace(self.question, links=p95_links)),
            "energy": lambda: cost_terms.energy_j(here, power),
        }
        total = Tariff.nothing(len(here.costs.layers), len(here.tiers))
        for name, tariff in known.items():
            total = total + tariff() * self._weights[name] if self._weights.get(name) else total
        streamed = self._weights.get("throughput", 0.0)
        stages = cost_terms.stages_s(here).values() if streamed else ()
        return Goal(total, tuple(stage * streamed for stage in stages))

    def _value(self, goal: Goal, found: Found) -> float:
        return self._exact.goal_value(goal, found.placement)

    def _demands(self, limits: Limits) -> tuple[Demand, ...]:
        return demands(self.question, limits, self.power)

    def _named(self, found: Found) -> Assignment:
        return assignment_of(self.question, found.placement, found.value, min(found.bound, found.value))

    @property
    def _weights(self) -> Mapping[str, float]:
        return {self.objective: 1.0} if isinstance(self.objective, str) else self.objective

    @property
    def _rate(self) -> float:
        return self.question.links[0].up_bytes_per_s

    @cached_property
    def _exact(self) -> Exact:
        return Exact(self.question, self.limits.max_loss is not None, self.effort)


def _sum(goal: Goal) -> Tariff:
    assert isinstance(goal.total, Tariff)
    return goal.total


def assignment_of(question: Question, placement: Placement, value: float, bound: float) -> Assignment:
    """The placement with names instead of numbers."""
    tensors, tiers = tuple(question.tensors), question.tiers
    layers = zip(question.costs.layers, placement.tier, strict=True)
    return Assignment(
        tier_of={layer.name: tiers[tier] for layer, tier in layers},
        codec_of={
            (tensors[tensor], f"{tiers[link]}-{tiers[link + 1]}"): way.codec
            for (tensor, link), way in sorted(placement.ways.items(), key=lambda one: one[0])
        },
        compress=placement.compress and bool(placement.ways),
        value=value,
        bound=bound,
    )


def _check_joules(question: Question) -> None:
    """Energy needs the joules of every layer that may run on the device."""
    device = question.tiers[0]
    may_run = zip(question.costs.layers, question.may_run[:, 0], strict=True)
    missing = [layer.name for layer, may in may_run if may and device not in layer.joules]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UsageError(f"energy cannot be planned: no joules on {device!r} for {len(missing)} layers ({shown})")
