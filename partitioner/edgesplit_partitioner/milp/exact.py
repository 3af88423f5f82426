"""The exact minimum of a goal under constraints: the solver's answers evaluated again, and its near misses left out.

HiGHS accepts a solution that misses a row by its tolerance. So every answer is turned into a placement and evaluated
from the costs; one that misses a limit is forbidden by a row of its own, and the program is solved again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edgesplit_partitioner.formulation import cost_terms
from edgesplit_partitioner.formulation.cost_model import CostModel
from edgesplit_partitioner.formulation.cost_terms import Placement
from edgesplit_partitioner.milp.demands import Constraint, caps_of, tier_bounds
from edgesplit_partitioner.milp.model import (
    Cap,
    Goal,
    MemoryUse,
    MilpModel,
    Quantity,
    SearchStopped,
    SolverAnswer,
    StopCriteria,
)

EXACT = 1e-9
"""Values closer than this fraction are equal, and a limit missed by less is kept: the noise of adding doubles."""
_MAX_MISSES = 50
"""Answers that only the solver's tolerance accepts are forbidden one by one, at most this many."""


@dataclass(frozen=True, slots=True)
class MilpSolution:
    """A placement, its value, and a bound that no placement's value is below."""

    placement: Placement
    value: float
    bound: float


@dataclass(frozen=True)
class ExactSolver:
    """A cost model with its programs, one per kind of request."""

    model: CostModel
    lossy: bool
    stop: StopCriteria

    @cached_property
    def programs(self) -> tuple[MilpModel, ...]:
        """One program per kind of request, built when first needed."""
        kinds = self.model.request_kinds
        return tuple(MilpModel(self.model, compress=compress, lossy=self.lossy) for compress in kinds)

    def value(self, quantity: Quantity, placement: Placement) -> float:
        """A quantity, from what the placement uses."""
        if isinstance(quantity, MemoryUse):
            return cost_terms.memory_of(self.model, placement.tier_of, "warm" if quantity.warm else "none").bytes
        return quantity.of_placement(self.model, placement)

    def goal_value(self, goal: Goal, placement: Placement) -> float:
        """The goal's sum and the greatest of its stages."""
        slowest = max((stage.of_placement(self.model, placement) for stage in goal.stages), default=0.0)
        return self.value(goal.total, placement) + slowest

    def minimum(self, goal: Goal, constraints: Sequence[Constraint]) -> MilpSolution | None:
        """The best placement that keeps these constraints, or None. SearchStopped where none was shown to be."""
        return self._minimum(goal, constraints, caps_of(constraints))

    def minimum_of_equals(
        self, goal: Goal, constraints: Sequence[Constraint], best: MilpSolution, *ties: Goal
    ) -> MilpSolution:
        """Among the placements as good as the best, the one that is least in the first tie, then in the next."""
        bound, caps = best.bound, caps_of(constraints)
        # Lexicographic: what was minimised is capped at the value reached, then the next goal is minimised.
        for wanted, tie in zip((goal, *ties), ties, strict=False):
            caps += self._caps_at(wanted, best.placement)
            try:
                equal = self._minimum(tie, constraints, caps)
            except SearchStopped:
                break
            if equal is None:
                break
            best = equal
        return MilpSolution(best.placement, self.goal_value(goal, best.placement), bound)

    def _caps_at(self, goal: Goal, placement: Placement) -> list[Cap]:
        """Caps at what the placement has. The greatest of several stages is capped in each of them."""
        most = self.goal_value(goal, placement)
        if not goal.stages:
            return [Cap(goal.total, most)]
        assert not isinstance(goal.total, MemoryUse)
        return [Cap(goal.total + stage, most) for stage in goal.stages]

    def _minimum(self, goal: Goal, constraints: Sequence[Constraint], caps: Sequence[Cap]) -> MilpSolution | None:
        answers = [self._minimum_of(program, goal, constraints, caps) for program in self.programs]
        solutions = [answer for answer in answers if answer is not None]
        if not solutions:
            return None
        best = min(solutions, key=lambda solution: solution.value)
        return MilpSolution(best.placement, best.value, min(best.value, *(solution.bound for solution in solutions)))

    def _minimum_of(
        self, program: MilpModel, goal: Goal, constraints: Sequence[Constraint], caps: Sequence[Cap]
    ) -> MilpSolution | None:
        """The minimum among one kind of request."""
        lowest, highest = tier_bounds(self.model, constraints)
        if (lowest > highest).any():
            return None
        forbidden: list[Placement] = []
        bound = -math.inf
        while len(forbidden) < _MAX_MISSES:
            answer: SolverAnswer | None = program.solve(goal, caps, lowest, highest, self.stop, forbidden)
            if answer is None:
                return None
            # Forbidden placements miss a limit, so a bound on the others holds for all that count.
            bound = max(bound, answer.bound)
            if all(self._keeps(answer.placement, cap) for cap in caps):
                return MilpSolution(answer.placement, self.goal_value(goal, answer.placement), bound)
            forbidden.append(answer.placement)
        raise SearchStopped(f"{_MAX_MISSES} answers missed a limit by less than the solver can tell")

    def _keeps(self, placement: Placement, cap: Cap) -> bool:
        return self.value(cap.quantity, placement) <= cap.most * (1 + EXACT) + 1e-300
