"""The best assignment of layers to tiers and of codecs to crossing tensors under limits that no minimum cut can keep.

Exact for any number of tiers: one mixed integer program per kind of request (compressed or not), equals decided as in
the minimum cut (fewer bytes, then more local). Every answer is evaluated again from what it assigns: the solver's
tolerances are neither in the value nor in what the limits allow. Limits that conflict are explained by `conflict`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Link, Power
from edgesplit_partitioner.algorithms.lower_envelope import Line, explore
from edgesplit_partitioner.formulation import cost_terms
from edgesplit_partitioner.formulation.constraints import Limits
from edgesplit_partitioner.formulation.cost_model import CostModel
from edgesplit_partitioner.formulation.cost_terms import CostTerm
from edgesplit_partitioner.formulation.objectives import ENERGY, LATENCY, LATENCY_P95, THROUGHPUT
from edgesplit_partitioner.milp.conflict import conflict_error
from edgesplit_partitioner.milp.demands import Constraint, constraints_of
from edgesplit_partitioner.milp.exact import ExactSolver, MilpSolution
from edgesplit_partitioner.milp.model import Goal, SearchStopped, StopCriteria

SAMPLED_RATES = tuple(2.0**power for power in range(-6, 7))
"""Factors on the planned uplink rate at which a stream's rows are made: its slowest stage is no line over bandwidth."""


@dataclass(frozen=True)
class MilpProblem:
    """A cost model under limits: its best assignment, and those that are best at other bandwidths.

    The weights of the objectives are: `latency` per second; `latency_p95` per second on `p95_links`; `energy` per joule
    of the device; `throughput` per second that the slowest stage of a stream takes for an inference
    (`cost_terms.stages_s`). Energy and deadline are those of `links`. Where time runs out the answer is the best found,
    and its gap bounds how far off it is.
    """

    model: CostModel
    links: tuple[Link, ...]
    weights: Mapping[str, float]
    """By objective."""
    limits: Limits
    power: Power
    p95_links: tuple[Link, ...]
    """Links that `latency_p95` is counted on."""
    stop: StopCriteria = field(default_factory=StopCriteria)

    def __post_init__(self) -> None:
        if self.limits.energy_joules is not None or self.weights.get(ENERGY):
            _check_joules(self.model)

    def best(self) -> MilpSolution:
        """The best assignment on the planned links; InfeasibleLimits where there is none."""
        goal, constraints = self._goal(self.links, self.p95_links, self.power), self._constraints(self.limits)
        solution = self._solver.minimum(goal, constraints)
        if solution is None:
            raise conflict_error(self._solver, constraints)
        ties = Goal(cost_terms.sent_bytes(self.model)), Goal(cost_terms.distance(self.model))
        return self._solver.minimum_of_equals(goal, constraints, solution, *ties)

    def conflict(self) -> InfeasibleLimits:
        """The error for limits that are known to conflict."""
        return conflict_error(self._solver, self._constraints(self.limits))

    def at_other_bandwidths(self, most: int) -> list[MilpSolution]:
        """What is best at some uplink bandwidth of the first link, every limit kept on the planned links.

        The lower envelope over 1/bandwidth by recursion, a program for each of its points, at round trip 0 and with the
        radio awake on the first link: so it is exact for every round trip, as the table of a minimum cut is. At most
        `most` of its lines. A deadline is left out where latency alone counts: on the planned link the fastest row is
        taken, and that keeps it. For throughput, which is no line, the bandwidths `SAMPLED_RATES` are tried.
        """
        latency_only = not self.weights.keys() & {ENERGY, THROUGHPUT}
        limits = msgspec.structs.replace(self.limits, deadline_s=None) if latency_only else self.limits
        constraints = self._constraints(limits)
        if self.weights.get(THROUGHPUT):
            rate = self.links[0].up_bytes_per_s
            goals = [self._goal_at(1.0 / rate * factor, awake=False) for factor in SAMPLED_RATES]
            tried = [self._solver.minimum(goal, constraints) for goal in goals]
            return [solution for solution in tried if solution is not None]
        return [line.item for line in self._envelope(constraints, most)]

    def _envelope(self, constraints: Sequence[Constraint], most: int) -> list[Line[MilpSolution]]:
        """Solutions that are best at some seconds per byte x, as lines over x."""
        endless = self._goal_at(0.0)
        # The slope of the objective over x is what it costs more where a byte takes a second more.
        per_byte = Goal(_sum_of(self._goal_at(1.0)) + _sum_of(endless) * -1.0)

        def line(solution: MilpSolution) -> Line[MilpSolution]:
            return Line(self._value(endless, solution), self._value(per_byte, solution), solution)

        def lowest(x: float, *near: Line[MilpSolution]) -> Line[MilpSolution]:
            try:
                solution = self._solver.minimum(self._goal_at(x), constraints)
            except SearchStopped:
                solution = None
            # Without an answer in time the intersection counts as explored: its line is one already known.
            return line(solution) if solution is not None else near[0]

        steep, flat = self._solver.minimum(endless, constraints), self._solver.minimum(per_byte, constraints)
        if steep is None or flat is None:
            return []
        steep = self._solver.minimum_of_equals(endless, constraints, steep, per_byte)
        flat = self._solver.minimum_of_equals(per_byte, constraints, flat, endless)
        return explore(lowest, line(steep), line(flat), most)

    def _goal_at(self, x: float, *, awake: bool = True) -> Goal:
        """The objective at x seconds per byte up the first link; `awake` leaves out its round trip and the radio's."""
        up = 1.0 / x if x else math.inf

        def changed(links: tuple[Link, ...]) -> tuple[Link, ...]:
            first = msgspec.structs.replace(links[0], up_bytes_per_s=up, rtt_s=0.0 if awake else links[0].rtt_s)
            return (first, *links[1:])

        power = msgspec.structs.replace(self.power, wake_joules=0.0) if awake else self.power
        return self._goal(changed(self.links), changed(self.p95_links), power)

    def _goal(self, links: tuple[Link, ...], p95_links: tuple[Link, ...], power: Power) -> Goal:
        """The objective as a sum and the stages of which the slowest counts."""
        total = CostTerm.zero(self.model)
        if weight := self.weights.get(LATENCY):
            total = total + cost_terms.latency_s(self.model, links) * weight
        if weight := self.weights.get(LATENCY_P95):
            total = total + cost_terms.latency_s(self.model, p95_links) * weight
        if weight := self.weights.get(ENERGY):
            total = total + cost_terms.energy_j(self.model, links, power) * weight
        streamed = self.weights.get(THROUGHPUT, 0.0)
        stages = cost_terms.stages_s(self.model, links) if streamed else []
        return Goal(total, tuple(stage * streamed for stage in stages))

    def _value(self, goal: Goal, solution: MilpSolution) -> float:
        return self._solver.goal_value(goal, solution.placement)

    def _constraints(self, limits: Limits) -> tuple[Constraint, ...]:
        return constraints_of(self.model, self.links, limits, self.power)

    @cached_property
    def _solver(self) -> ExactSolver:
        lossy = self.limits.max_loss is not None or self.limits.max_changed is not None
        return ExactSolver(self.model, lossy, self.stop)


def _sum_of(goal: Goal) -> CostTerm:
    assert isinstance(goal.total, CostTerm)
    return goal.total


def _check_joules(model: CostModel) -> None:
    """UsageError unless every layer that may run on the device has joules: energy needs them."""
    device = model.tiers[0]
    can_run = zip(model.costs.layers, model.can_run[0], strict=True)
    missing = [layer.name for layer, can in can_run if can and device not in layer.joules]
    if missing:
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UsageError(f"energy cannot be planned: no joules on {device!r} for {len(missing)} layers ({some})")
