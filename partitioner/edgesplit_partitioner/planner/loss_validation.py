"""Validation of lossy codecs on held-out samples: which codecs of a plan lose more there than is allowed?

Codecs are chosen by their loss on one half of the samples; the limit must hold on the other half too. Losses of several
tensors add up, as they do for the limit itself. A codec that fails is left out of the costs and the plan is made again,
so the next best that holds is taken; with none left the plan is lossless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from edgesplit.plan import Hop, Row
from edgesplit.release import boundary_codecs
from edgesplit_partitioner.costs.model import CodecCost, Costs, TensorCost

Pair = tuple[str, str]
"""A tensor and a base codec."""
ROUNDING = 1e-12
"""The limit may be missed by this fraction: the rounding error of adding losses."""


def with_losses(row: Row, costs: Mapping[str, TensorCost]) -> Row:
    """The row with its loss on either half of the samples; `confirmed_loss` is None where a codec was not validated."""
    used = lossy_pairs(row, costs)
    if not used:
        return row
    losses = [cost.confirmed_loss for _, cost in used]
    known = [loss for loss in losses if loss is not None]
    confirmed = sum(known) if len(known) == len(losses) else None
    return msgspec.structs.replace(row, loss=sum(cost.loss for _, cost in used), confirmed_loss=confirmed)


def unconfirmed(rows: Iterable[Row], costs: Costs, max_loss: float) -> frozenset[Pair]:
    """Of each row that loses more than allowed on the held-out half, the codec that loses most there."""
    tensors = costs.tensors
    failed: set[Pair] = set()
    for row in rows:
        used = lossy_pairs(row, tensors)
        losses = {pair: cost.confirmed_loss for pair, cost in used if cost.confirmed_loss is not None}
        if sum(losses.values()) > max_loss * (1 + ROUNDING) + ROUNDING:
            failed.add(max(losses, key=lambda pair: losses[pair]))
    return frozenset(failed)


def without(costs: Costs, pairs: frozenset[Pair]) -> Costs:
    """The costs without these codecs, compressed or not."""

    def kept(name: str, tensor: TensorCost) -> TensorCost:
        codecs = {
            codec: cost
            for codec, cost in tensor.codecs.items()
            if (name, boundary_codecs.split_codec_name(codec)[0]) not in pairs
        }
        return msgspec.structs.replace(tensor, codecs=codecs)

    return costs.with_tensors(kept)


def lossy_pairs(row: Row, costs: Mapping[str, TensorCost]) -> list[tuple[Pair, CodecCost]]:
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
    """What the codec costs in such a request, or in the other kind where it was measured only there."""
    plain, compressed = tensor.codecs.get(codec), tensor.codecs.get(codec + boundary_codecs.ZSTD_SUFFIX)
    return (compressed or plain) if compress else (plain or compressed)
