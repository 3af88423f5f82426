"""Between what the seconds of a plan are believed to lie, where they are predicted. Pure: costs and a cut in.

Costs carry two things of each predicted tier: how far off whole networks are (`Costs.intervals`), which is one error
shared by all layers, and the range of each layer (`LayerCost.between`), which holds that error and the layer's own.
Layers' own errors are taken as independent: squares of logarithms are added, weighted with shares of the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from edgesplit.plan import Row
from edgesplit_partitioner.costs.model import Costs, LayerCost


@dataclass(frozen=True, slots=True)
class Between:
    """The truth lies between these as often as `coverage` says."""

    low_s: float
    high_s: float
    coverage: float


def on_tier(costs: Costs, tier: str, names: Collection[str]) -> Between | None:
    """Seconds of these layers on one tier; None where nothing of them is predicted."""
    whole = costs.intervals.get(tier)
    layers = [layer for layer in costs.layers if layer.name in names]
    total_s = sum(layer.seconds.get(tier, 0.0) for layer in layers)
    if whole is None or not total_s:
        return None
    below = math.hypot(
        math.log(whole.low), *(_own(layer, tier, 0, whole.low) * layer.seconds[tier] / total_s for layer in layers)
    )
    above = math.hypot(
        math.log(whole.high), *(_own(layer, tier, 1, whole.high) * layer.seconds[tier] / total_s for layer in layers)
    )
    return Between(total_s * math.exp(-below), total_s * math.exp(above), whole.coverage)


def of_row(costs: Costs, tiers: tuple[str, ...], row: Row, seconds: float) -> Between | None:
    """The latency of a cut that takes so many seconds as planned: links, codecs and measured tiers as they are, errors
    of different tiers independent. None where nothing of it is predicted."""
    found = ((_seconds(costs, tier, part), on_tier(costs, tier, part)) for tier, part in _cut(tiers, row).items())
    known = [(planned_s, between) for planned_s, between in found if between is not None]
    if not known:
        return None
    below = math.hypot(*(planned_s - between.low_s for planned_s, between in known))
    above = math.hypot(*(between.high_s - planned_s for planned_s, between in known))
    return Between(max(seconds - below, 0.0), seconds + above, min(between.coverage for _, between in known))


def _cut(tiers: tuple[str, ...], row: Row) -> Mapping[str, frozenset[str]]:
    """Layers by tier."""
    beyond = [frozenset(row.remote), *(frozenset(hop.remote) for hop in row.hops)]
    beyond += [frozenset()] * (len(tiers) - len(beyond))
    found = {tiers[0]: frozenset(row.layers)}
    return found | {tier: beyond[place] - beyond[place + 1] for place, tier in enumerate(tiers[1:])}


def _seconds(costs: Costs, tier: str, names: Collection[str]) -> float:
    return sum(layer.seconds.get(tier, 0.0) for layer in costs.layers if layer.name in names)


def _own(layer: LayerCost, tier: str, side: int, whole: float) -> float:
    """Logarithm of the layer's own error on one side, that of whole networks taken out."""
    if tier not in layer.between or not layer.seconds[tier] or not layer.between[tier][side]:
        return 0.0
    both = math.log(layer.between[tier][side] / layer.seconds[tier])
    return math.sqrt(max(both**2 - math.log(whole) ** 2, 0.0))
