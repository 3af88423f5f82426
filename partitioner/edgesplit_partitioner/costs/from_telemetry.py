"""Costs as devices and servers measured them at work: what a plan is made with again.

What was measured are slices: groups of layers with the seconds that they took together. A group's layers keep their
proportions and share its factor; layers of no group take the factor of all groups together. What differs by less than
`NOISE` from what was believed is left as it was, so that a plan does not wander with the noise of its own measuring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from edgesplit.input_spec import FRAME
from edgesplit.plan import Link
from edgesplit_partitioner.costs.model import RAW, Costs, LayerCost, TensorCost

NOISE = 0.1
"""A factor within this part of 1 is 1."""
ZSTD_SUFFIX = "+zstd"
MOST = 50.0
"""A factor beyond this, or below its inverse, is no measurement of these layers."""


class Group(msgspec.Struct, frozen=True, array_like=True):
    """Layers that ran together."""

    layers: tuple[str, ...]
    seconds: Annotated[float, Meta(ge=0)]


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that crossed the first link together, and the bytes that they took."""

    tensors: tuple[str, ...]
    codecs: dict[str, str]
    compress: bool
    bytes: Annotated[float, Meta(ge=0)]


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a class of devices measured at work, for one model."""

    link: Link
    """The first one."""
    device: tuple[Group, ...] = ()
    remote: tuple[Group, ...] = ()
    """On the last tier; of one row's layers each, so that groups may share layers."""
    sent: tuple[Sent, ...] = ()
    """What pictures and compressed tensors weigh is known when they travel."""
    fixed_s: float = 0.0
    """Of every request that crosses the first link, beyond what was planned: the server's work around the layers."""
    devices: int = 1
    """So many agree."""
    basis: str = "measured"
    """`measured`; or `emulated` or `simulated`, which no real device's plan is made of."""

    @property
    def planned_link(self) -> Link:
        """The link that a plan is made for: `fixed_s` is paid once by whatever crosses, as the round trip is."""
        return msgspec.structs.replace(self.link, rtt_s=self.link.rtt_s + self.fixed_s)


def alike(one: Measured, other: Measured) -> bool:
    """Whether two plans made with these would differ by noise alone."""
    pairs = [
        (one.link.up_bytes_per_s, other.link.up_bytes_per_s),
        (one.link.down_bytes_per_s, other.link.down_bytes_per_s),
        (one.planned_link.rtt_s, other.planned_link.rtt_s),
    ]
    for mine, theirs in ((one.device, other.device), (one.remote, other.remote)):
        if [group.layers for group in mine] != [group.layers for group in theirs]:
            return False
        pairs += [(here.seconds, there.seconds) for here, there in zip(mine, theirs, strict=True)]
    if [sent.tensors for sent in one.sent] != [sent.tensors for sent in other.sent]:
        return False
    pairs += [(here.bytes, there.bytes) for here, there in zip(one.sent, other.sent, strict=True)]
    return all(min(pair) * (1.0 + NOISE) >= max(pair) for pair in pairs)


def as_measured(costs: Costs, seen: Measured) -> Costs:
    """The costs with what was measured in place of what was believed: device seconds and joules, remote seconds."""
    device, remote = costs.tiers[0], costs.tiers[-1]
    factors = layer_factors(costs, device, seen.device)
    away = _snapped(_ratio(costs, remote, seen.remote))
    heavier = _weights(costs, seen.sent)
    inputs = {name: _weighed(cost, name, heavier) for name, cost in costs.inputs.items()}
    layers = tuple(
        msgspec.structs.replace(
            layer,
            writes={name: _weighed(cost, name, heavier) for name, cost in layer.writes.items()},
            seconds=_scaled(_scaled(layer.seconds, device, factors[layer.name]), remote, away),
            joules=_scaled(layer.joules, device, factors[layer.name]),
            between=_without(layer.between, device, measured=bool(seen.device)),
        )
        for layer in costs.layers
    )
    if not seen.device:
        return msgspec.structs.replace(costs, layers=layers, inputs=inputs)
    told = f"{seen.basis}: at work, on {seen.devices} of {costs.device_class}"
    intervals = {tier: one for tier, one in costs.intervals.items() if tier != device}
    return msgspec.structs.replace(
        costs, layers=layers, inputs=inputs, basis={**costs.basis, device: told}, intervals=intervals
    )


def bytes_sent(costs: Costs, tensors: Iterable[str], codecs: Mapping[str, str], *, compress: bool) -> float:
    """What these tensors are believed to weigh together, sent so; 0 where that is not known."""
    sizes = _sizes(costs)
    total = 0.0
    for name in tensors:
        known = sizes.get(name)
        if known is None:
            return 0.0
        way = _way(known, codecs.get(name, RAW), compress)
        if way != RAW and way not in known.codecs:
            return 0.0
        total += known.bytes if way == RAW else known.codecs[way].bytes
    return total


def _weights(costs: Costs, sent: Iterable[Sent]) -> dict[tuple[str, str], float]:
    """By tensor and way of travelling, what its bytes are multiplied by. Only what is encoded weighs as it likes."""
    found, sizes = {}, _sizes(costs)
    for one in sent:
        believed = bytes_sent(costs, one.tensors, one.codecs, compress=one.compress)
        for name in one.tensors if believed else ():
            way = _way(sizes[name], one.codecs.get(name, RAW), one.compress)
            if way.endswith(ZSTD_SUFFIX) or name == FRAME:
                found[name, way] = _snapped(one.bytes / believed)
    return found


def _weighed(cost: TensorCost, name: str, heavier: Mapping[tuple[str, str], float]) -> TensorCost:
    codecs = {
        way: msgspec.structs.replace(one, bytes=round(one.bytes * heavier.get((name, way), 1.0)))
        for way, one in cost.codecs.items()
    }
    return TensorCost(bytes=round(cost.bytes * heavier.get((name, RAW), 1.0)), codecs=codecs)


def _way(cost: TensorCost, codec: str, compress: bool) -> str:
    """As the planner prices it: a tensor whose compressed size nobody measured counts as plain in a compressed body."""
    return codec + ZSTD_SUFFIX if compress and codec + ZSTD_SUFFIX in cost.codecs else codec


def _sizes(costs: Costs) -> dict[str, TensorCost]:
    return {**costs.inputs, **{name: cost for layer in costs.layers for name, cost in layer.writes.items()}}


def layer_factors(costs: Costs, tier: str, groups: Iterable[Group]) -> dict[str, float]:
    """By layer, what its believed seconds on that tier are multiplied by."""
    groups = tuple(groups)
    by_layer = {layer.name: layer for layer in costs.layers}
    usual = _snapped(_ratio(costs, tier, groups))
    factors = dict.fromkeys(by_layer, usual)
    for group in groups:
        believed_s = _believed_s(by_layer, tier, group)
        if believed_s > 0.0:
            factors |= dict.fromkeys(group.layers, _snapped(group.seconds / believed_s))
    return {name: factors[name] for name in by_layer}


def _ratio(costs: Costs, tier: str, groups: Iterable[Group]) -> float:
    """Of all groups together; 1 where there are none."""
    by_layer = {layer.name: layer for layer in costs.layers}
    told = [(group.seconds, _believed_s(by_layer, tier, group)) for group in groups]
    believed_s = sum(believed for _, believed in told if believed > 0.0)
    return sum(seconds for seconds, believed in told if believed > 0.0) / believed_s if believed_s > 0.0 else 1.0


def _believed_s(by_layer: Mapping[str, LayerCost], tier: str, group: Group) -> float:
    """Seconds of the group as the costs have them; 0 where it is not of this model."""
    if not all(name in by_layer and tier in by_layer[name].seconds for name in group.layers):
        return 0.0
    return sum(by_layer[name].seconds[tier] for name in group.layers)


def _snapped(factor: float) -> float:
    bounded = min(MOST, max(1.0 / MOST, factor))
    return 1.0 if 1.0 / (1.0 + NOISE) <= bounded <= 1.0 + NOISE else bounded


def _scaled(by_tier: Mapping[str, float], tier: str, factor: float) -> dict[str, float]:
    return {name: one * factor if name == tier else one for name, one in by_tier.items()}


def _without(
    between: Mapping[str, tuple[float, float]], tier: str, *, measured: bool
) -> dict[str, tuple[float, float]]:
    return {name: one for name, one in between.items() if not (measured and name == tier)}
