"""Limits one by one, as constraints to keep or drop: bounds on the tiers of layers, or a cap on a quantity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgesplit.plan import Link, Power
from edgesplit_partitioner.arrays import Ints, Mask
from edgesplit_partitioner.formulation import cost_terms
from edgesplit_partitioner.formulation.constraints import Limits, up_to_next_tier, with_dependencies
from edgesplit_partitioner.formulation.cost_model import CostModel
from edgesplit_partitioner.milp.model import Cap, MemoryUse

WARM = "fallback=warm"
"""Name of the constraint that the whole model's weights are kept on the device."""


@dataclass(frozen=True)
class Constraint:
    """One limit. Its bounds are by layer; None where it sets none."""

    name: str
    """As the operator gave it."""
    limit: str
    """The field of `Limits` that it comes from."""
    lowest: Ints | None = None
    highest: Ints | None = None
    cap: Cap | None = None


def constraints_of(model: CostModel, links: tuple[Link, ...], limits: Limits, power: Power) -> tuple[Constraint, ...]:
    """Every limit that was given. The tiers that layers may run on are no constraint: they cannot be dropped."""
    return (*_tier_limits(model, limits), *_sum_limits(model, links, limits, power))


def caps_of(constraints: Sequence[Constraint]) -> list[Cap]:
    """What the constraints cap. Memory counts the whole model's weights while a warm fallback is among them."""
    warm = any(constraint.name == WARM for constraint in constraints)
    caps = [constraint.cap for constraint in constraints if constraint.cap is not None]
    return [Cap(MemoryUse(warm), cap.most) if isinstance(cap.quantity, MemoryUse) else cap for cap in caps]


def tier_bounds(model: CostModel, constraints: Iterable[Constraint]) -> tuple[Ints, Ints]:
    """Each layer's lowest and highest tier."""
    lowest = np.argmax(model.can_run, axis=0)
    highest = len(model.tiers) - 1 - np.argmax(model.can_run[::-1], axis=0)
    for constraint in constraints:
        lowest = lowest if constraint.lowest is None else np.maximum(lowest, constraint.lowest)
        highest = highest if constraint.highest is None else np.minimum(highest, constraint.highest)
    return lowest.astype(np.intp), highest.astype(np.intp)


def keep_first(model: CostModel, count: int) -> Constraint:
    """So many layers, in the order of the costs, on the device."""
    first = np.arange(len(model.layers)) < count
    return Constraint(f"keep_first={count}", "keep_first", highest=_highest(model, first))


def _tier_limits(model: CostModel, limits: Limits) -> Iterable[Constraint]:
    """The limits on where layers run."""
    costs = model.costs
    if limits.keep_raw_input:
        reads_raw = np.array([not costs.raw.isdisjoint(layer.reads) for layer in costs.layers])
        yield Constraint("keep_raw_input", "keep_raw_input", highest=_highest(model, reads_raw))
    if limits.keep_first:
        yield keep_first(model, limits.keep_first)
    if limits.forced:
        yield _forced(model, limits)


def _highest(model: CostModel, on_device: Mask) -> Ints:
    """The highest tiers, where these layers must run on the device."""
    return np.where(on_device, 0, len(model.tiers) - 1).astype(np.intp)


def _forced(model: CostModel, limits: Limits) -> Constraint:
    """A tier's name puts everything there; a layer's name puts it and all it needs on the device, and nothing else."""
    name, last, tiers = limits.force_label, limits.force_after or limits.force, model.tiers
    whole = {tier: number for number, tier in enumerate(tiers)} | {"device": 0}
    whole.setdefault("cloud", len(tiers) - 1)
    if not limits.force_after and last in whole:
        everywhere = np.full(len(model.layers), whole[last], dtype=np.intp)
        return Constraint(name, "force", lowest=everywhere, highest=everywhere)
    here = with_dependencies(model.costs, last, name)
    lowest, highest = np.where(here, 0, 1).astype(np.intp), _highest(model, here)
    if limits.edge_after:
        near = up_to_next_tier(model.costs, limits, tiers)
        lowest, highest = np.where(here | near, lowest, 2), np.where(near, np.minimum(highest, 1), highest)
    return Constraint(name, "force", lowest=lowest, highest=highest)


def _sum_limits(model: CostModel, links: tuple[Link, ...], limits: Limits, power: Power) -> Iterable[Constraint]:
    """The limits on quantities of the whole plan."""
    if limits.memory_bytes is not None:
        text = f"memory_bytes={limits.memory_bytes:g}"
        yield Constraint(text, "memory_bytes", cap=Cap(MemoryUse(False), limits.memory_bytes))
        if limits.fallback == "warm":
            yield Constraint(WARM, "fallback")
    if limits.energy_joules is not None:
        cap = Cap(cost_terms.energy_j(model, links, power), limits.energy_joules)
        yield Constraint(f"energy_joules={limits.energy_joules:g}", "energy_joules", cap=cap)
    if limits.deadline_s is not None:
        cap = Cap(cost_terms.latency_s(model, links), limits.deadline_s)
        yield Constraint(f"deadline_s={limits.deadline_s:g}", "deadline_s", cap=cap)
    if limits.max_loss is not None:
        cap = Cap(cost_terms.codec_loss(model), limits.max_loss)
        yield Constraint(f"max_loss={limits.max_loss:g}", "max_loss", cap=cap)
    if limits.max_changed is not None:
        # Which codecs keep the share was decided before (`planner.changed_answers`), each codec measured alone.
        cap = Cap(cost_terms.lossy_crossings(model), 1.0)
        yield Constraint(f"max_changed={limits.max_changed:g}", "max_changed", cap=cap)
