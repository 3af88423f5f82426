"""An allowance for loss is used on one half of the samples and must hold on the other: which codecs of a plan did not?

Losses of several tensors add up, as they do for the limit itself. A codec that fails is left out of the costs and the
plan is made again, so that what stays is the next best that holds; without any left it is lossless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from edgesplit.plan import Hop, Row
from edgesplit.release import boundary_codecs
from edgesplit_partitioner.costs.model import CodecCost, Costs, TensorCost

Pair = tuple[str, str]
"""A tensor and a base codec."""
NOISE = 1e-12


def with_losses(row: Row, costs: Mapping[str, TensorCost]) -> Row:
    """The row with its loss by either half; `confirmed_loss` stays None where nobody has measured it."""
    used = _used(row, costs)
    if not used:
        return row
    found = [one.confirmed_loss for _, one in used]
    known = [one for one in found if one is not None]
    confirmed = sum(known) if len(known) == len(found) else None
    return msgspec.structs.replace(row, loss=sum(one.loss for _, one in used), confirmed_loss=confirmed)


def unconfirmed(rows: Iterable[Row], costs: Costs, max_loss: float) -> frozenset[Pair]:
    """Of each row that loses more than allowed on the confirming half, the codec that loses most there."""
    tensors = tensors_of(costs)
    failed: set[Pair] = set()
    for row in rows:
        used = _used(row, tensors)
        lost = {pair: one.confirmed_loss for pair, one in used if one.confirmed_loss is not None}
        if sum(lost.values()) > max_loss * (1 + NOISE) + NOISE:
            failed.add(max(lost, key=lambda pair: lost[pair]))
    return frozenset(failed)


def without(costs: Costs, pairs: frozenset[Pair]) -> Costs:
    """The costs without these codecs, compressed or not."""

    def kept(name: str, cost: TensorCost) -> TensorCost:
        left = {
            codec: one for codec, one in cost.codecs.items() if (name, boundary_codecs.split(codec)[0]) not in pairs
        }
        return msgspec.structs.replace(cost, codecs=left)

    layers = tuple(
        msgspec.structs.replace(layer, writes={name: kept(name, cost) for name, cost in layer.writes.items()})
        for layer in costs.layers
    )
    inputs = {name: kept(name, cost) for name, cost in costs.inputs.items()}
    return msgspec.structs.replace(costs, layers=layers, inputs=inputs)


def tensors_of(costs: Costs) -> dict[str, TensorCost]:
    """Every tensor by name."""
    found = dict(costs.inputs)
    for layer in costs.layers:
        found.update(layer.writes)
    return found


def _used(row: Row, costs: Mapping[str, TensorCost]) -> list[tuple[Pair, CodecCost]]:
    """Every lossy codec that the row uses, once per link that it is used on."""
    links: tuple[Row | Hop, ...] = (row, *row.hops)
    return [
        ((tensor, codec), cost)
        for link in links
        for tensor, codec in link.codecs.items()
        for cost in [_cost(costs[tensor], codec, link.compress)]
        if cost is not None and codec in boundary_codecs.LOSSY
    ]


def _cost(tensor: TensorCost, codec: str, compress: bool) -> CodecCost | None:
    """As it was measured for such a request, else for the other kind."""
    plain, packed = tensor.codecs.get(codec), tensor.codecs.get(codec + boundary_codecs.ZSTD)
    return (packed or plain) if compress else (plain or packed)
