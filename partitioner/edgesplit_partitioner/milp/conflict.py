"""Why limits cannot be kept together: the smallest set of them that conflicts, and what would be enough instead.

The set is irreducible: drop any one of it and a plan exists for the rest of it. For each of its limits the least value
is searched for with which all other limits given could be kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context, Decimal

import msgspec

from edgesplit.errors import InfeasibleLimits
from edgesplit_partitioner.formulation.cost_terms import Tariff
from edgesplit_partitioner.milp.demands import WARM, Demand, first_kept
from edgesplit_partitioner.milp.exact import EXACT, Exact
from edgesplit_partitioner.milp.model import Cap, Goal, MemoryUse


class Relaxation(msgspec.Struct, frozen=True):
    """One limit of a conflict, and what would do in its place."""

    name: str
    """The limit as it was given."""
    least: float | None
    """The least value that would do, the other limits as they are; None where it is no number or none does."""
    text: str
    """For people."""


class LimitsInConflict(InfeasibleLimits):
    """No assignment keeps these limits together; without any one of them, one keeps the others of the set."""

    def __init__(
        self,
        conflict: tuple[str, ...],
        relaxations: tuple[Relaxation, ...],
        together: tuple[Relaxation, ...] = (),
    ) -> None:
        self.conflict = conflict
        self.relaxations = relaxations
        self.together = together
        """Where other limits conflict as well: what would do, all of it at once. Each value is the least that is
        possible beside those before it."""
        alone = "no cut keeps" if len(conflict) == 1 else "no cut keeps all of"
        if together:
            also = [one.name for one in together if one.name not in conflict]
            more = f", and none keeps {', '.join(also)} beside the others" if also else ""
            reliefs = "; ".join(one.text for one in together)
            super().__init__(f"{alone} {', '.join(conflict)}{more}. Enough would be, together: {reliefs}")
            return
        reliefs = "; ".join(one.text for one in relaxations)
        super().__init__(f"{alone} {', '.join(conflict)}. Enough would be, the other limits kept: {reliefs}")


def explained(exact: Exact, wanted: Sequence[Demand]) -> InfeasibleLimits:
    """The error for demands that cannot all be kept."""
    if not _possible(exact, []):
        return InfeasibleLimits(
            f"no cut of {', '.join(exact.question.tiers)} keeps to the tiers that the layers may run on: "
            "nothing comes back to an earlier tier but answers"
        )
    conflict = _irreducible(exact, wanted)
    names = tuple(one.name for one in conflict)
    alone = [one for one in conflict if _possible(exact, [other for other in wanted if other is not one])]
    together = () if alone else tuple(_together(exact, wanted))
    return LimitsInConflict(names, tuple(_relaxations(exact, wanted, conflict)), together)


def _possible(exact: Exact, kept: Sequence[Demand]) -> bool:
    question = exact.question
    anything = Goal(Tariff.nothing(len(question.costs.layers), len(question.tiers)))
    return exact.least(anything, kept) is not None


def _irreducible(exact: Exact, wanted: Sequence[Demand]) -> list[Demand]:
    """What is left after dropping, one by one, each demand without which the rest still conflicts."""
    kept = list(wanted)
    # A warm fallback is dropped last: it is rather the limit on memory that is to be named beside it than not.
    for one in sorted(wanted, key=lambda demand: demand.name == WARM):
        rest = [other for other in kept if other is not one]
        if one.name == WARM and any(other.limit == "memory_bytes" for other in rest):
            kept = rest if not _possible(exact, rest) else kept
        elif not _possible(exact, rest):
            kept = rest
    return [one for one in kept if one.name != WARM or any(other.limit == "memory_bytes" for other in kept)]


def _relaxations(exact: Exact, wanted: Sequence[Demand], conflict: Sequence[Demand]) -> Iterator[Relaxation]:
    for one in conflict:
        rest = [other for other in wanted if other is not one]
        if one.cap is not None:
            yield _greater(exact, one, rest)
        elif one.limit == "keep_first":
            yield _fewer(exact, one, rest)
        else:
            yield _without(exact, one, rest)


def _together(exact: Exact, wanted: Sequence[Demand]) -> Iterator[Relaxation]:
    """Several conflicts at once: out of each a limit is put aside, then each of these is given the least that the
    limits kept and those before it leave possible."""
    kept, aside = list(wanted), list[Demand]()
    while not _possible(exact, kept):
        one = min(_irreducible(exact, kept), key=lambda demand: demand.cap is None)
        kept.remove(one)
        aside.append(one)
    for one in aside:
        if one.cap is None:
            yield _without(exact, one, kept)
            continue
        relaxed = _greater(exact, one, kept)
        yield relaxed
        if relaxed.least is not None:
            kept.append(replace(one, cap=Cap(one.cap.quantity, relaxed.least)))


def _greater(exact: Exact, one: Demand, rest: Sequence[Demand]) -> Relaxation:
    """The least of the quantity that the others leave possible."""
    assert one.cap is not None
    quantity = one.cap.quantity
    if isinstance(quantity, MemoryUse):
        quantity = MemoryUse(any(other.name == WARM for other in rest))
    found = exact.least(Goal(quantity), rest)
    if found is None:
        return Relaxation(one.name, None, f"dropping {one.name} is not enough, the other limits conflict too")
    return Relaxation(one.name, found.value, f"{one.limit}={_rounded_up(found.value)} instead of {one.cap.most:g}")


def _fewer(exact: Exact, one: Demand, rest: Sequence[Demand]) -> Relaxation:
    """The most first layers that can be kept: keeping fewer is never harder."""
    count, too_many = 0, int(one.name.partition("=")[2])
    too_many = min(too_many, len(exact.question.costs.layers))
    if not _possible(exact, rest):
        return Relaxation(one.name, None, f"dropping {one.name} is not enough, the other limits conflict too")
    while too_many - count > 1:
        middle = (count + too_many) // 2
        if _possible(exact, [*rest, first_kept(exact.question, middle)]):
            count = middle
        else:
            too_many = middle
    return Relaxation(one.name, float(count), f"keep_first={count}")


def _without(exact: Exact, one: Demand, rest: Sequence[Demand]) -> Relaxation:
    if not _possible(exact, rest):
        return Relaxation(one.name, None, f"dropping {one.name} is not enough, the other limits conflict too")
    instead = "fallback=cold or none" if one.name == WARM else f"no {one.name}"
    return Relaxation(one.name, None, instead)


def _rounded_up(value: float) -> str:
    """Six digits, never less than the value, so that it does as it stands; of a large number all digits."""
    if value >= 1e6:
        return str(math.ceil(value * (1 - EXACT)))
    least = Decimal(value * (1 - EXACT))
    return f"{float(Context(prec=6, rounding=ROUND_CEILING).plus(least)):g}"
