"""The least of a goal under demands, exactly: the program's answers evaluated again, and its near misses left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edgesplit.errors import EdgeError
from edgesplit_partitioner.formulation import cost_terms
from edgesplit_partitioner.formulation.cost_terms import Placement, Question
from edgesplit_partitioner.milp.demands import Demand, caps, reach
from edgesplit_partitioner.milp.model import Cap, Effort, Goal, MemoryUse, Program, Quantity, Solved

EXACT = 1e-9
"""Values closer than this part are equal, and a limit missed by less is kept: the noise of adding doubles."""
_MISSES = 50
"""So many answers that only the solver's tolerance lets pass are left out, one by one."""


class SearchStopped(EdgeError):
    """Time ran out before anything was found or shown to be impossible."""


@dataclass(frozen=True, slots=True)
class Found:
    """A placement, its value and what no placement is below."""

    placement: Placement
    value: float
    bound: float


@dataclass(frozen=True)
class Exact:
    """A question with its programs, one per kind of request."""

    question: Question
    lossy: bool
    effort: Effort

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Built when first needed."""
        return tuple(Program(self.question, compress=one, lossy=self.lossy) for one in self.question.requests)

    def value(self, quantity: Quantity, placement: Placement) -> float:
        """A quantity, from what the placement uses."""
        if isinstance(quantity, MemoryUse):
            return cost_terms.memory_of(self.question, placement.tier, "warm" if quantity.warm else "none").bytes
        return quantity.of(self.question, placement)

    def goal_value(self, goal: Goal, placement: Placement) -> float:
        """The sum and the greatest of the others."""
        slowest = max((one.of(self.question, placement) for one in goal.slowest), default=0.0)
        return self.value(goal.total, placement) + slowest

    def least(self, goal: Goal, kept: Sequence[Demand]) -> Found | None:
        """The best placement that keeps these demands, or None."""
        return self._least(goal, kept, caps(kept), self.programs)

    def least_of_equals(self, goal: Goal, kept: Sequence[Demand], best: Found, *wishes: Goal) -> Found:
        """Among the placements as good as the best, the one that is least in the first wish, then in the next."""
        bound, fixed = best.bound, caps(kept)
        for wanted, wish in zip((goal, *wishes), wishes, strict=False):
            fixed += self._as_good(wanted, best.placement)
            try:
                equal = self._least(wish, kept, fixed, self.programs)
            except SearchStopped:
                break
            if equal is None:
                break
            best = equal
        return Found(best.placement, self.goal_value(goal, best.placement), bound)

    def _as_good(self, goal: Goal, placement: Placement) -> list[Cap]:
        """Caps at what the placement has. The greatest of several is capped in each of them."""
        most = self.goal_value(goal, placement)
        if not goal.slowest:
            return [Cap(goal.total, most)]
        assert not isinstance(goal.total, MemoryUse)
        return [Cap(goal.total + stage, most) for stage in goal.slowest]

    def _least(
        self, goal: Goal, kept: Sequence[Demand], fixed: Sequence[Cap], programs: Sequence[Program]
    ) -> Found | None:
        found = [self._of_program(program, goal, kept, fixed) for program in programs]
        some = [one for one in found if one is not None]
        if not some:
            return None
        best = min(some, key=lambda one: one.value)
        return Found(best.placement, best.value, min(best.value, *(one.bound for one in some)))

    def _of_program(self, program: Program, goal: Goal, kept: Sequence[Demand], fixed: Sequence[Cap]) -> Found | None:
        lowest, highest = reach(self.question, kept)
        if (lowest > highest).any():
            return None
        barred: list[Placement] = []
        bound = -math.inf
        while len(barred) < _MISSES:
            try:
                solved: Solved | None = program.solve(goal, fixed, lowest, highest, self.effort, barred)
            except TimeoutError as error:
                raise SearchStopped(f"{error}; give the search more time or fewer layers") from error
            if solved is None:
                return None
            bound = max(bound, solved.bound)
            if all(self._keeps(solved.placement, cap) for cap in fixed):
                return Found(solved.placement, self.goal_value(goal, solved.placement), bound)
            barred.append(solved.placement)
        raise SearchStopped(f"{_MISSES} answers missed a limit by less than the solver can tell")

    def _keeps(self, placement: Placement, cap: Cap) -> bool:
        return self.value(cap.quantity, placement) <= cap.most * (1 + EXACT) + 1e-300
