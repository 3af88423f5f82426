"""Prediction intervals of a plan's seconds, for tiers whose seconds are predicted. Pure: costs and a cut in.

Costs carry two figures of each predicted tier: the error of whole networks (`Costs.intervals`), which all layers share,
and the range of each layer (`LayerCost.between`), which holds that error and the layer's own. Layers' own errors are
taken as independent: squares of logarithms are added, weighted with each layer's share of the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from edgesplit.plan import Row
from edgesplit_partitioner.costs.model import Costs, LayerCost


@dataclass(frozen=True, slots=True)
class SecondsInterval:
    """Range of seconds that contains the true value with probability `coverage`."""

    low_s: float
    high_s: float
    coverage: float


def tier_interval(costs: Costs, tier: str, names: Collection[str]) -> SecondsInterval | None:
    """Interval of the seconds of these layers on one tier; None where none of them is predicted."""
    whole = costs.intervals.get(tier)
    layers = [layer for layer in costs.layers if layer.name in names]
    total_s = sum(layer.seconds.get(tier, 0.0) for layer in layers)
    if whole is None or not total_s:
        return None
    # Propagation of uncertainty on a logarithmic scale, as in `Predictor.predict_sum`: the error of whole networks
    # enters once, each layer's own error weighted with its share of the time.
    below = math.hypot(
        math.log(whole.low),
        *(_own_log_error(layer, tier, 0, whole.low) * layer.seconds[tier] / total_s for layer in layers),
    )
    above = math.hypot(
        math.log(whole.high),
        *(_own_log_error(layer, tier, 1, whole.high) * layer.seconds[tier] / total_s for layer in layers),
    )
    return SecondsInterval(total_s * math.exp(-below), total_s * math.exp(above), whole.coverage)


def row_interval(costs: Costs, tiers: tuple[str, ...], row: Row, seconds: float) -> SecondsInterval | None:
    """Interval of the latency of a row that is planned to take `seconds`. Links, codecs and measured tiers count as
    exact, errors of different tiers as independent. None where no tier of it is predicted."""
    by_tier = (
        (_planned_s(costs, tier, names), tier_interval(costs, tier, names))
        for tier, names in _layers_by_tier(tiers, row).items()
    )
    predicted = [(planned_s, interval) for planned_s, interval in by_tier if interval is not None]
    if not predicted:
        return None
    # Tiers run one after the other and err independently: absolute errors of a sum add in squares (GUM, JCGM 100:2008,
    # section 5.1.2). What is not predicted counts as exact.
    below = math.hypot(*(planned_s - interval.low_s for planned_s, interval in predicted))
    above = math.hypot(*(interval.high_s - planned_s for planned_s, interval in predicted))
    return SecondsInterval(
        max(seconds - below, 0.0), seconds + above, min(interval.coverage for _, interval in predicted)
    )


def _layers_by_tier(tiers: tuple[str, ...], row: Row) -> Mapping[str, frozenset[str]]:
    """Names of the row's layers by tier."""
    remote_sets = [frozenset(row.remote), *(frozenset(hop.remote) for hop in row.hops)]
    remote_sets += [frozenset()] * (len(tiers) - len(remote_sets))
    # `remote` of each hop holds every layer that runs on that tier or further out: a tier's own are the difference.
    device_layers = {tiers[0]: frozenset(row.layers)}
    return device_layers | {
        tier: remote_sets[position] - remote_sets[position + 1] for position, tier in enumerate(tiers[1:])
    }


def _planned_s(costs: Costs, tier: str, names: Collection[str]) -> float:
    return sum(layer.seconds.get(tier, 0.0) for layer in costs.layers if layer.name in names)


def _own_log_error(layer: LayerCost, tier: str, side: int, whole: float) -> float:
    """The layer's own error on one side (0: low, 1: high) as a logarithm, without the error of whole networks."""
    if tier not in layer.between or not layer.seconds[tier] or not layer.between[tier][side]:
        return 0.0
    # The layer's range was made by adding squares of both errors, so the common one is subtracted as a square.
    total_log = math.log(layer.between[tier][side] / layer.seconds[tier])
    return math.sqrt(max(total_log**2 - math.log(whole) ** 2, 0.0))
