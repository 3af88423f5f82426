"""Which tier may run which layer, under the layers' own tiers and an operator's limits, for any number of tiers.

Every limit but `edge_after` is about the device: what must run on it, what must not. So limits are applied by
`constraints` with all further tiers as one, which names any two that conflict; then the layers' own tiers among those
further ones are applied.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from edgesplit.errors import InfeasibleLimits
from edgesplit_partitioner.arrays import Mask
from edgesplit_partitioner.costs.model import Costs, LayerCost
from edgesplit_partitioner.formulation.constraints import Limits, split_by_limits, up_to_next_tier


def allowed_tiers(costs: Costs, limits: Limits, tiers: tuple[str, ...], *, force: bool = True) -> Mask:
    """By tier and layer: whether it may run there. InfeasibleLimits names limits that conflict, and what is enough.

    Limits on sums are no part of it: where there are any, `edgesplit_partitioner.milp.conflict` finds the whole
    conflict. `force=False` leaves a forced cut out.
    """
    try:
        return _allowed_tiers(costs, limits, tiers, force=force)
    except InfeasibleLimits as error:
        reliefs = list(_reliefs(costs, limits if force else _unforced(limits), tiers))
        enough = f". Enough would be, the other limits kept: {'; '.join(reliefs)}" if reliefs else ""
        raise InfeasibleLimits(f"{error}{enough}") from error


def _reliefs(costs: Costs, limits: Limits, tiers: tuple[str, ...]) -> Iterator[str]:
    """Each limit that alone is enough to relax: the value to relax it to, or that it is left out."""

    def possible(**changed: Any) -> bool:
        try:
            _allowed_tiers(costs, msgspec.structs.replace(limits, **changed), tiers)
        except InfeasibleLimits:
            return False
        return True

    if limits.keep_first and possible(keep_first=0):
        fewest = bisect.bisect_left(range(1, limits.keep_first), True, key=lambda count: not possible(keep_first=count))
        yield f"keep_first={fewest}"
    if limits.keep_raw_input and possible(keep_raw_input=False):
        yield "no keep_raw_input"
    if limits.forced and possible(force="auto", force_after="", edge_after=""):
        yield f"no {limits.force_label}"


def _unforced(limits: Limits) -> Limits:
    return msgspec.structs.replace(limits, force="auto", force_after="", edge_after="")


def _allowed_tiers(costs: Costs, limits: Limits, tiers: tuple[str, ...], *, force: bool = True) -> Mask:
    """`allowed_tiers`, whose error does not name what would be enough.

    What follows for other layers is part of the result only for limits and for layers that run on one side of the first
    link alone.
    """
    is_limited = limits.keep_raw_input or limits.keep_first or (force and limits.forced)
    if not is_limited and all(set(tiers).issubset(layer.tiers or layer.seconds) for layer in costs.layers):
        return np.ones((len(tiers), len(costs.layers)), dtype=np.bool_)
    device, *further = tiers
    target = limits.force if limits.force in further else tiers[-1] if limits.force == "cloud" else ""
    if target:
        limits = msgspec.structs.replace(limits, force="cloud")
    merged = costs
    if len(tiers) > 2:
        merged = msgspec.structs.replace(costs, layers=_with_further_tiers_merged(costs.layers, device, further))
    split = split_by_limits(merged, limits, device, further[-1], force=force)
    allowed = np.array([~split.on_remote, *(~split.on_device for _ in further)])
    if len(tiers) > 2:
        runs = [[tier in (layer.tiers or layer.seconds) for layer in costs.layers] for tier in further]
        allowed[1:] &= np.array(runs)
    if target and force:
        allowed[[tier != target for tier in tiers]] = False
    if limits.edge_after and force:
        near = up_to_next_tier(costs, limits, tiers)
        allowed[1] &= near
        allowed[2:] &= ~near
    _check(costs, allowed, tiers)
    return allowed


def _with_further_tiers_merged(layers: tuple[LayerCost, ...], device: str, further: list[str]) -> tuple[LayerCost, ...]:
    """The layers, each allowed on the last tier where it is on any further one."""
    changed = []
    for layer in layers:
        runs_on = layer.tiers or tuple(layer.seconds)
        beyond = any(tier in runs_on for tier in further)
        if beyond and further[-1] not in runs_on:
            kept = (device, further[-1]) if device in runs_on else (further[-1],)
            layer = msgspec.structs.replace(layer, tiers=kept)
        changed.append(layer)
    return tuple(changed)


def _check(costs: Costs, allowed: Mask, tiers: tuple[str, ...]) -> None:
    """InfeasibleLimits where a layer has no tier at least as far as those that make what it reads.

    Each layer is put on the nearest tier possible: if that leaves a later layer none, nothing does.
    """
    if allowed.all() or len(tiers) == 2:
        return
    # By tensor: the tier that makes it, and which layer's tiers put it there.
    made: dict[str, tuple[int, str]] = {}
    for layer, column in zip(costs.layers, allowed.T, strict=True):
        least, reason = max((made.get(name, (0, "")) for name in layer.reads), default=(0, ""))
        nearest = next((tier for tier in np.flatnonzero(column).tolist() if tier >= least), None)
        own = f"the tiers of layer {layer.name!r} ({', '.join(layer.tiers or layer.seconds)} only)"
        if nearest is None:
            other = f" and {reason}" if reason else ""
            raise InfeasibleLimits(f"no cut satisfies {own}{other}: nothing returns to a nearer tier")
        made.update(dict.fromkeys(layer.writes, (nearest, own if nearest > least else reason)))
