"""Limits one by one, as demands that can be kept or dropped: bounds on the tiers of layers, or a cap on a quantity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgesplit.plan import Power
from edgesplit_partitioner.formulation import cost_terms
from edgesplit_partitioner.formulation.constraints import Limits, check_layer, up_to
from edgesplit_partitioner.formulation.cost_terms import Ints, Question
from edgesplit_partitioner.milp.model import Cap, MemoryUse

WARM = "fallback=warm"


@dataclass(frozen=True)
class Demand:
    """One limit. Its bounds are per layer; None where it sets none."""

    name: str
    """As the operator gave it."""
    limit: str
    """The field of `Limits` that it comes from."""
    lowest: Ints | None = None
    highest: Ints | None = None
    cap: Cap | None = None


def demands(question: Question, limits: Limits, power: Power) -> tuple[Demand, ...]:
    """Every limit that was given. The tiers that layers may run on are none: they cannot be dropped."""
    return (*_places(question, limits), *_caps(question, limits, power))


def caps(kept: Sequence[Demand]) -> list[Cap]:
    """What the demands cap. Memory counts the whole model's weights while a warm fallback is asked for."""
    warm = any(one.name == WARM for one in kept)
    return [
        Cap(MemoryUse(warm), one.cap.most) if isinstance(one.cap.quantity, MemoryUse) else one.cap
        for one in kept
        if one.cap is not None
    ]


def reach(question: Question, kept: Iterable[Demand]) -> tuple[Ints, Ints]:
    """Each layer's lowest and highest tier."""
    tiers = len(question.tiers)
    lowest = np.argmax(question.may_run, axis=1)
    highest = tiers - 1 - np.argmax(question.may_run[:, ::-1], axis=1)
    for one in kept:
        lowest = lowest if one.lowest is None else np.maximum(lowest, one.lowest)
        highest = highest if one.highest is None else np.minimum(highest, one.highest)
    return lowest.astype(np.intp), highest.astype(np.intp)


def _places(question: Question, limits: Limits) -> Iterable[Demand]:
    layers = question.costs.layers
    if limits.keep_raw_input:
        reads = np.array([not question.costs.raw.isdisjoint(layer.reads) for layer in layers])
        yield Demand("keep_raw_input", "keep_raw_input", highest=_held(question, reads))
    if limits.keep_first:
        yield first_kept(question, limits.keep_first)
    if limits.forced:
        yield _forced(question, limits)


def first_kept(question: Question, count: int) -> Demand:
    """So many layers, in the order of the costs, on the device."""
    first = np.arange(len(question.costs.layers)) < count
    return Demand(f"keep_first={count}", "keep_first", highest=_held(question, first))


def _held(question: Question, held: npt.NDArray[np.bool_]) -> Ints:
    """The highest tiers, where these layers must run on the device."""
    return np.where(held, 0, len(question.tiers) - 1).astype(np.intp)


def _forced(question: Question, limits: Limits) -> Demand:
    """A tier's name puts everything there; a layer's name puts it and all it needs on the device, and nothing else."""
    layers, last = question.costs.layers, limits.force_after or limits.force
    name, tiers = limits.force_label, question.tiers
    whole = {tier: number for number, tier in enumerate(tiers)} | {"device": 0}
    whole.setdefault("cloud", len(tiers) - 1)
    if not limits.force_after and last in whole:
        everywhere = np.full(len(layers), whole[last], dtype=np.intp)
        return Demand(name, "force", lowest=everywhere, highest=everywhere)
    check_layer(question.costs, last, name)
    needed: set[str] = set()
    here = np.zeros(len(layers), dtype=np.bool_)
    for position in range(len(layers) - 1, -1, -1):
        here[position] = layers[position].name == last or not needed.isdisjoint(layers[position].writes)
        needed.update(layers[position].reads if here[position] else ())
    lowest, highest = np.where(here, 0, 1).astype(np.intp), _held(question, here)
    if limits.edge_after:
        near = up_to(question.costs, limits, tiers)
        lowest, highest = np.where(here | near, lowest, 2), np.where(near, np.minimum(highest, 1), highest)
    return Demand(name, "force", lowest=lowest, highest=highest)


def _caps(question: Question, limits: Limits, power: Power) -> Iterable[Demand]:
    if limits.memory_bytes is not None:
        text = f"memory_bytes={limits.memory_bytes:g}"
        yield Demand(text, "memory_bytes", cap=Cap(MemoryUse(False), limits.memory_bytes))
        if limits.fallback == "warm":
            yield Demand(WARM, "fallback")
    if limits.energy_joules is not None:
        tariff = cost_terms.energy_j(question, power)
        yield Demand(f"energy_joules={limits.energy_joules:g}", "energy_joules", cap=Cap(tariff, limits.energy_joules))
    if limits.deadline_s is not None:
        tariff = cost_terms.latency_s(question)
        yield Demand(f"deadline_s={limits.deadline_s:g}", "deadline_s", cap=Cap(tariff, limits.deadline_s))
    if limits.max_loss is not None:
        yield Demand(f"max_loss={limits.max_loss:g}", "max_loss", cap=Cap(cost_terms.lost(question), limits.max_loss))
