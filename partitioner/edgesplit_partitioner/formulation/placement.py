"""Which tier may run which layer, under the layers' own tiers and an operator's limits, for any number of tiers.

Every limit is about the device: what must run on it, what must not. So limits are settled by `side_limits`, which names
any two that conflict, with all further tiers as one; what is left are the layers' own tiers among those.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from edgesplit.errors import InfeasibleLimits
from edgesplit_partitioner.algorithms.mincut import Mask
from edgesplit_partitioner.costs.model import Costs, LayerCost
from edgesplit_partitioner.formulation.constraints import Limits, sides, up_to


def allowed(costs: Costs, limits: Limits, tiers: tuple[str, ...], *, force: bool = True) -> Mask:
    """By tier and layer: may it run there? InfeasibleLimits names the demands that conflict, and what would do.

    Limits on sums are no part of it: where there are any, `limited.conflict` knows more.
    """
    try:
        return _allowed(costs, limits, tiers, force=force)
    except InfeasibleLimits as error:
        reliefs = list(_reliefs(costs, limits if force else _unforced(limits), tiers))
        enough = f". Enough would be, the other limits kept: {'; '.join(reliefs)}" if reliefs else ""
        raise InfeasibleLimits(f"{error}{enough}") from error


def _reliefs(costs: Costs, limits: Limits, tiers: tuple[str, ...]) -> Iterator[str]:
    """Each limit that alone need give way: by how much, or that it is left out."""

    def possible(**changed: Any) -> bool:
        try:
            _allowed(costs, msgspec.structs.replace(limits, **changed), tiers)
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


def _allowed(costs: Costs, limits: Limits, tiers: tuple[str, ...], *, force: bool = True) -> Mask:
    """The same, and the error without what would do.

    Only limits, and layers that run on one side of the first link alone, have been closed over what depends on what.
    """
    asked = limits.keep_raw_input or limits.keep_first or (force and limits.forced)
    if not asked and all(tier in (one.tiers or one.seconds) for one in costs.layers for tier in tiers):
        return np.ones((len(tiers), len(costs.layers)), dtype=np.bool_)
    device, *further = tiers
    target = limits.force if limits.force in further else tiers[-1] if limits.force == "cloud" else ""
    if target:
        limits = msgspec.structs.replace(limits, force="cloud")
    seen = costs if len(tiers) == 2 else msgspec.structs.replace(costs, layers=_as_two(costs.layers, device, further))
    both = sides(seen, limits, device, tiers[-1], force=force)
    may = np.array([~both.sent, *(~both.held for _ in further)])
    if len(tiers) > 2:
        may[1:] &= np.array([[tier in (one.tiers or one.seconds) for one in costs.layers] for tier in further])
    if target and force:
        may[[tier != target for tier in tiers]] = False
    if limits.edge_after and force:
        near = up_to(costs, limits, tiers)
        may[1] &= near
        may[2:] &= ~near
    _check(costs, may, tiers)
    return may


def _as_two(layers: tuple[LayerCost, ...], device: str, further: list[str]) -> tuple[LayerCost, ...]:
    """With all further tiers as the last one."""
    changed = []
    for layer in layers:
        runs_on = layer.tiers or tuple(layer.seconds)
        beyond = any(tier in runs_on for tier in further)
        if beyond and further[-1] not in runs_on:
            kept = (device, further[-1]) if device in runs_on else (further[-1],)
            layer = msgspec.structs.replace(layer, tiers=kept)
        changed.append(layer)
    return tuple(changed)


def _check(costs: Costs, may: Mask, tiers: tuple[str, ...]) -> None:
    """Each layer has a tier no nearer than those that what it reads is made on, or InfeasibleLimits names two."""
    if may.all() or len(tiers) == 2:
        return
    made: dict[str, tuple[int, str]] = {}
    for layer, column in zip(costs.layers, may.T, strict=True):
        least, why = max((made.get(name, (0, "")) for name in layer.reads), default=(0, ""))
        place = next((tier for tier in np.flatnonzero(column).tolist() if tier >= least), None)
        mine = f"the tiers of layer {layer.name!r} ({', '.join(layer.tiers or layer.seconds)} only)"
        if place is None:
            wanted = f" and {why}" if why else ""
            raise InfeasibleLimits(f"no cut satisfies {mine}{wanted}: nothing returns to a nearer tier")
        made.update(dict.fromkeys(layer.writes, (place, mine if place > least else why)))
