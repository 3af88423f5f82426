"""Why limits cannot be kept together: the smallest set of them that conflicts, and what would be enough instead.

The set is irreducible: drop any one of it and a plan exists for the rest of it. It is found by the deletion filter
(Chinneck and Dravnieks, "Locating Minimal Infeasible Constraint Sets in Linear Programs", ORSA J. Computing 1991). For
each of its limits the least value is searched for with which all other limits given could be kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context, Decimal

import msgspec

from edgesplit.errors import InfeasibleLimits
from edgesplit_partitioner.formulation.cost_terms import CostTerm
from edgesplit_partitioner.milp.demands import WARM, Constraint, keep_first
from edgesplit_partitioner.milp.exact import EXACT, ExactSolver
from edgesplit_partitioner.milp.model import Cap, Goal, MemoryUse


class Relaxation(msgspec.Struct, frozen=True):
    """One limit of a conflict, and what would be enough in its place."""

    name: str
    """The limit as it was given."""
    least: float | None
    """The least value that is enough, the other limits as they are; None where the limit is no number, or none is."""
    text: str
    """The relaxation as it stands in the error message."""


class LimitsInConflict(InfeasibleLimits):
    """No assignment keeps all limits of `conflict`; without any one of them, some assignment keeps the others."""

    def __init__(
        self,
        conflict: tuple[str, ...],
        relaxations: tuple[Relaxation, ...],
        together: tuple[Relaxation, ...] = (),
    ) -> None:
        self.conflict = conflict
        self.relaxations = relaxations
        self.together = together
        """Where other limits conflict as well: what would be enough, all of it at once. Each value is the least that is
        possible beside those before it."""
        alone = "no cut keeps" if len(conflict) == 1 else "no cut keeps all of"
        if together:
            also = [relaxation.name for relaxation in together if relaxation.name not in conflict]
            more = f", and none keeps {', '.join(also)} beside the others" if also else ""
            reliefs = "; ".join(relaxation.text for relaxation in together)
            super().__init__(f"{alone} {', '.join(conflict)}{more}. Enough would be, together: {reliefs}")
            return
        reliefs = "; ".join(relaxation.text for relaxation in relaxations)
        super().__init__(f"{alone} {', '.join(conflict)}. Enough would be, the other limits kept: {reliefs}")


def conflict_error(solver: ExactSolver, constraints: Sequence[Constraint]) -> InfeasibleLimits:
    """The error for constraints that cannot all be kept."""
    if not _is_feasible(solver, []):
        return InfeasibleLimits(
            f"no cut of {', '.join(solver.model.tiers)} keeps to the tiers that the layers may run on: "
            "nothing comes back to an earlier tier but answers"
        )
    conflict = _irreducible(solver, constraints)
    names = tuple(constraint.name for constraint in conflict)
    # Limits whose relaxation alone is enough. Where there is none, some other limits conflict among themselves as well.
    alone = [constraint for constraint in conflict if _is_feasible(solver, _others(constraints, constraint))]
    together = () if alone else tuple(_together(solver, constraints))
    return LimitsInConflict(names, tuple(_relaxations(solver, constraints, conflict)), together)


def _others(constraints: Sequence[Constraint], without: Constraint) -> list[Constraint]:
    return [constraint for constraint in constraints if constraint is not without]


def _is_feasible(solver: ExactSolver, constraints: Sequence[Constraint]) -> bool:
    return solver.minimum(Goal(CostTerm.zero(solver.model)), constraints) is not None


def _irreducible(solver: ExactSolver, constraints: Sequence[Constraint]) -> list[Constraint]:
    """What is left after dropping, one by one, each constraint without which the rest still conflicts."""
    kept = list(constraints)
    # The warm fallback is tried last, so that it is dropped only if everything left conflicts without it: a conflict
    # over memory should name the fallback, which the operator can change, rather than leave it out.
    for constraint in sorted(constraints, key=lambda constraint: constraint.name == WARM):
        rest = _others(kept, constraint)
        if not _is_feasible(solver, rest):
            kept = rest
    # A warm fallback without a limit on memory demands nothing.
    caps_memory = any(constraint.limit == "memory_bytes" for constraint in kept)
    return [constraint for constraint in kept if constraint.name != WARM or caps_memory]


def _relaxations(
    solver: ExactSolver, constraints: Sequence[Constraint], conflict: Sequence[Constraint]
) -> Iterator[Relaxation]:
    """For each limit of a conflict what would be enough in its place, all other limits kept."""
    for constraint in conflict:
        rest = _others(constraints, constraint)
        if constraint.cap is not None:
            yield _greater_cap(solver, constraint, constraint.cap, rest)
        elif constraint.limit == "keep_first":
            yield _fewer_first(solver, constraint, rest)
        else:
            yield _dropped(solver, constraint, rest)


def _together(solver: ExactSolver, constraints: Sequence[Constraint]) -> Iterator[Relaxation]:
    """Several conflicts at once: what would be enough together.

    Out of each conflict a limit is put aside, a cap rather than another, until the rest can be kept. Then each of these
    is given the least value that the limits kept and those before it leave possible.
    """
    kept, aside = list(constraints), list[Constraint]()
    while not _is_feasible(solver, kept):
        constraint = min(_irreducible(solver, kept), key=lambda constraint: constraint.cap is None)
        kept.remove(constraint)
        aside.append(constraint)
    for constraint in aside:
        if constraint.cap is None:
            yield _dropped(solver, constraint, kept)
            continue
        relaxed = _greater_cap(solver, constraint, constraint.cap, kept)
        yield relaxed
        if relaxed.least is not None:
            kept.append(replace(constraint, cap=Cap(constraint.cap.quantity, relaxed.least)))


def _greater_cap(solver: ExactSolver, constraint: Constraint, cap: Cap, rest: Sequence[Constraint]) -> Relaxation:
    """The least of the capped quantity that the other constraints leave possible."""
    quantity = cap.quantity
    if isinstance(quantity, MemoryUse):
        quantity = MemoryUse(any(other.name == WARM for other in rest))
    least = solver.minimum(Goal(quantity), rest)
    if least is None:
        return _not_enough(constraint)
    instead = f"{constraint.limit}={_rounded_up(least.value)} instead of {cap.most:g}"
    return Relaxation(constraint.name, least.value, instead)


def _fewer_first(solver: ExactSolver, constraint: Constraint, rest: Sequence[Constraint]) -> Relaxation:
    """The most first layers that can be kept, by bisection: keeping fewer is never harder."""
    count, too_many = 0, int(constraint.name.partition("=")[2])
    too_many = min(too_many, len(solver.model.layers))
    if not _is_feasible(solver, rest):
        return _not_enough(constraint)
    while too_many - count > 1:
        middle = (count + too_many) // 2
        if _is_feasible(solver, [*rest, keep_first(solver.model, middle)]):
            count = middle
        else:
            too_many = middle
    return Relaxation(constraint.name, float(count), f"keep_first={count}")


def _dropped(solver: ExactSolver, constraint: Constraint, rest: Sequence[Constraint]) -> Relaxation:
    """The relaxation of a limit that is no number: it is left out."""
    if not _is_feasible(solver, rest):
        return _not_enough(constraint)
    instead = "fallback=cold or none" if constraint.name == WARM else f"no {constraint.name}"
    return Relaxation(constraint.name, None, instead)


def _not_enough(constraint: Constraint) -> Relaxation:
    return Relaxation(constraint.name, None, f"dropping {constraint.name} is not enough, the other limits conflict too")


def _rounded_up(value: float) -> str:
    """Six digits, never less than the value, so that the text is enough as a limit; of a large number all digits."""
    if value >= 1e6:
        return str(math.ceil(value * (1 - EXACT)))
    least = Decimal(value * (1 - EXACT))
    return f"{float(Context(prec=6, rounding=ROUND_CEILING).plus(least)):g}"
