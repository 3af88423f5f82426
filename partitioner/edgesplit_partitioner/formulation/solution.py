"""An assignment of layers to tiers as the solvers return it, and the row of a switching table that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from edgesplit.plan import LOCAL, REMOTE, Hop, Row, cut_name
from edgesplit_partitioner.arrays import Ints, Mask
from edgesplit_partitioner.formulation.cost_model import CostModel, TransferCosts, measured_cost


@dataclass(frozen=True, slots=True)
class Solution:
    """A cheapest assignment: each layer's tier, how the requests are sent, and a bound that proves it."""

    tier_of: Ints
    compress: bool
    lower_bound: float
    """No assignment that reaches as far costs less."""
    codec_of: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By tensor and link (`device-edge`): its codec, where it is not `raw`."""

    @property
    def reaches(self) -> int:
        """The furthest tier that runs a layer; 0 is all-local."""
        return int(self.tier_of.max(initial=0))


def cost_row(model: CostModel, solution: Solution) -> Row:
    """What the assignment costs, as a row without names: every figure summed over what it runs and sends.

    Of the layers beyond the first link only the first is named, which marks the row as one that crosses.
    """
    tier_of, (first, *further) = solution.tier_of, _transfers_of(model, solution)
    on_device = tier_of == 0
    sent, returned = model.crossing(on_device)
    joules = float(model.joules[on_device].sum())
    crossed = enumerate(further[: solution.reaches - 1 if solution.reaches else 0], 1)
    hops = tuple(_hop(model, solution, link, transfers) for link, transfers in crossed)
    beyond_s = sum(float(model.seconds[tier][tier_of == tier].sum()) for tier in range(1, len(model.tiers)))
    return Row(
        name="",
        remote=() if not solution.reaches else (model.layers[int(tier_of.argmax())],),
        compress=solution.compress and bool(sent.any()),
        device_s=float(model.seconds[0][on_device].sum()),
        encode_s=float(first.encode_s[sent].sum()),
        up_bytes=round(float(first.bytes[sent].sum())),
        down_bytes=round(float(model.raw_bytes[returned].sum())),
        decode_s=float(first.decode_s[sent].sum()),
        remote_s=beyond_s + sum(hop.encode_s + hop.decode_s for hop in hops),
        # A layer on the device without joules leaves the sum unknown; all-remote is 0, unless no layer has any.
        device_joules=None if np.isnan(joules) or np.isnan(model.joules).all() else joules,
        hops=hops,
    )


def to_row(model: CostModel, solution: Solution) -> Row:
    """The assignment as a row of a table. Until the model is cut, each layer stands for a slice of its own."""
    on_device = solution.tier_of == 0
    here, there = _layer_names(model, on_device), _layer_names(model, ~on_device)
    costs = cost_row(model, solution)
    sends, receives, codecs, clips = _crossing_names(model, solution, 0)
    hops = []
    for link, hop in enumerate(costs.hops, 1):
        names = dict(zip(("sends", "receives", "codecs", "clips"), _crossing_names(model, solution, link), strict=True))
        hops.append(msgspec.structs.replace(hop, remote=_layer_names(model, solution.tier_of > link), **names))
    return msgspec.structs.replace(
        costs,
        name=LOCAL if not there else REMOTE if not here else "",
        device=here,
        remote=there,
        layers=here,
        split_after=cut_name(_layer_names(model, model.last_layers(on_device))),
        sends=sends,
        receives=receives,
        codecs=codecs,
        clips=clips,
        hops=tuple(hops),
    )


def layers_by_tier(model: CostModel, tier_of: Ints) -> dict[str, tuple[str, ...]]:
    """Names of the layers that an assignment runs on each tier."""
    return {tier: _layer_names(model, tier_of == number) for number, tier in enumerate(model.tiers)}


def _layer_names(model: CostModel, chosen: Mask) -> tuple[str, ...]:
    return tuple(model.layers[layer] for layer in np.flatnonzero(chosen))


def _hop(model: CostModel, solution: Solution, link: int, transfers: TransferCosts) -> Hop:
    """What the assignment costs on a link beyond the first and on the tier behind it."""
    sent, returned = model.crossing(solution.tier_of <= link)
    return Hop(
        tier=model.tiers[link + 1],
        compress=solution.compress and bool(sent.any()),
        encode_s=float(transfers.encode_s[sent].sum()),
        up_bytes=round(float(transfers.bytes[sent].sum())),
        down_bytes=round(float(model.raw_bytes[returned].sum())),
        decode_s=float(transfers.decode_s[sent].sum()),
        seconds=float(model.seconds[link + 1][solution.tier_of == link + 1].sum()),
    )


def _crossing_names(
    model: CostModel, solution: Solution, link: int
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str], dict[str, float]]:
    """Tensors that go up a link, outputs that come down it, the codecs of those that do not go raw, and the clips of
    those that have one."""
    sent, returned = model.crossing(solution.tier_of <= link)
    sends = tuple(model.tensor_names[tensor] for tensor in np.flatnonzero(sent))
    receives = tuple(model.tensor_names[tensor] for tensor in np.flatnonzero(returned))
    name = model.link_name(link)
    codecs = {tensor: solution.codec_of[tensor, name] for tensor in sends if (tensor, name) in solution.codec_of}
    costs = {tensor: measured_cost(model.tensors[tensor], codec, solution.compress) for tensor, codec in codecs.items()}
    clips = {tensor: cost.clip for tensor, cost in costs.items() if cost is not None and cost.clip < 1}
    return sends, receives, codecs, clips


def _transfers_of(model: CostModel, solution: Solution) -> tuple[TransferCosts, ...]:
    """What sending costs, by link, with the assignment's own codecs."""
    transfers = model.transfers_of(solution.compress)
    if not solution.codec_of:
        return transfers
    return tuple(_with_codecs(model, solution, link, costs) for link, costs in enumerate(transfers))


def _with_codecs(model: CostModel, solution: Solution, link: int, transfers: TransferCosts) -> TransferCosts:
    """A link's transfer costs with those of the assignment's codecs in place of raw."""
    lower, upper = model.tiers[link], model.tiers[link + 1]
    size, encode_s, decode_s = transfers.bytes.copy(), transfers.encode_s.copy(), transfers.decode_s.copy()
    for (tensor, name), codec in solution.codec_of.items():
        cost = measured_cost(model.tensors[tensor], codec, solution.compress)
        if name == model.link_name(link) and cost is not None:
            number = model.tensor_number[tensor]
            size[number] = cost.bytes
            encode_s[number], decode_s[number] = cost.encode_s.get(lower, 0.0), cost.decode_s.get(upper, 0.0)
    return TransferCosts(size, encode_s, decode_s)
