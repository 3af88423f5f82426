"""Codecs under a limit on the share of answers that change: which may be tried, and which keep it on samples that chose
nothing.

A codec is chosen by the samples that choose, as its costs say. Confirming takes the others: of each tensor that the
plan's rows send by a lossy codec, its codecs are tested from the finest to the coarsest by the exact binomial bound
(Clopper-Pearson), and testing stops at the first that fails (fixed sequence: what passes is wrong with probability
delta, however many are tested). Several tensors share delta. So every row of a table keeps its promise, all at once,
with probability 1 - delta (docs/decisions/0066-coarser-codecs.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from edgesplit.cascade import ChangedShare
from edgesplit.errors import UsageError
from edgesplit.plan import Row
from edgesplit.release import boundary_codecs
from edgesplit_partitioner.bounds.binomial import trials_needed, upper_share
from edgesplit_partitioner.costs.model import ChangeCounts, CodecCost, Costs, TensorCost
from edgesplit_partitioner.planner.loss_validation import Pair, lossy_pairs

DELTA = 0.1
"""Probability with which samples may mislead: a promise is 90 % sure."""
MOST_TENSORS = 4
"""Most tensors of one plan whose codecs are confirmed: each takes a run of the rest of the model per sample and
codec."""
Promises = Mapping[Pair, ChangedShare]


def plausible(costs: Costs, allowed: float) -> Costs:
    """The costs without lossy codecs that change more answers than allowed on the samples that choose."""
    return _filtered(costs, lambda _, cost: _chosen_share(cost) <= allowed)


def confirmable(costs: Costs, allowed: float) -> Costs:
    """`plausible`, of the codecs that can be confirmed: their answers were compared on samples that chose nothing."""
    return _filtered(costs, lambda _, cost: bool(_counts(cost).confirming_samples) and _chosen_share(cost) <= allowed)


def only(costs: Costs, promises: Promises) -> Costs:
    """The costs with no lossy codecs but those that keep a promise."""
    return _filtered(costs, lambda pair, _: pair in promises)


def with_changes_of(costs: Costs, counted: Costs) -> Costs:
    """The costs with the changed answers that other costs of the same model have."""
    known = counted.tensors

    def counts_added(name: str, tensor: TensorCost) -> TensorCost:
        others = known[name].codecs if name in known else {}
        codecs = {
            codec: msgspec.structs.replace(cost, changes=others[codec].changes) if codec in others else cost
            for codec, cost in tensor.codecs.items()
        }
        return msgspec.structs.replace(tensor, codecs=codecs)

    return costs.with_tensors(counts_added)


def lossy_tensors(rows: Iterable[Row], costs: Costs) -> tuple[str, ...]:
    """The tensors that the rows send by lossy codecs, in the rows' order, each once."""
    tensors = costs.tensors
    return tuple(dict.fromkeys(tensor for row in rows for (tensor, _), _ in lossy_pairs(row, tensors)))


def check_samples(confirming: int, choosing: int, allowed: float) -> None:
    """UsageError, with the number that it takes, where so few samples cannot confirm the limit even if none of their
    answers changes."""
    needed = trials_needed(allowed, DELTA)
    if confirming < needed:
        raise UsageError(
            f"max_changed={allowed:g}: too few samples: it takes {needed} that chose nothing to be {1 - DELTA:.0%}"
            f" sure, and there are {confirming} beside the {choosing} that choose codecs; give {needed + choosing}"
        )


def confirm(rows: Iterable[Row], costs: Costs, allowed: float) -> dict[Pair, ChangedShare]:
    """The codecs that keep the limit on the tensors that these rows send by lossy codecs, the first rows' first where
    the samples do not suffice for all. UsageError where they suffice for none."""
    tensors = lossy_tensors(rows, costs)
    counts = [_counts(cost) for tensor in tensors for cost in _codecs(costs.tensors[tensor]).values()]
    if not counts:
        return {}
    fewest = min(counts, key=lambda count: count.confirming_samples)
    check_samples(fewest.confirming_samples, fewest.choosing_samples, allowed)
    tested = tensors[:MOST_TENSORS]
    while trials_needed(allowed, DELTA / len(tested)) > fewest.confirming_samples:
        tested = tested[:-1]
    promises: dict[Pair, ChangedShare] = {}
    for tensor in tested:
        promises.update(_fixed_sequence(tensor, costs.tensors[tensor], allowed, DELTA / len(tested)))
    return promises


def with_promise(row: Row, promises: Promises, costs: Mapping[str, TensorCost]) -> Row:
    """The row with what is promised of its lossy codec, if it has one."""
    kept = [promises[pair] for pair, _ in lossy_pairs(row, costs) if pair in promises]
    return msgspec.structs.replace(row, changed=kept[0]) if kept else row


def _filtered(costs: Costs, keeps: Callable[[Pair, CodecCost], bool]) -> Costs:
    """The costs with the lossless codecs, and those lossy ones that `keeps` accepts."""

    def kept(name: str, tensor: TensorCost) -> TensorCost:
        codecs = {
            codec: cost
            for codec, cost in tensor.codecs.items()
            for base in [boundary_codecs.split_codec_name(codec)[0]]
            if (base not in boundary_codecs.LOSSY and not cost.loss) or keeps((name, base), cost)
        }
        return msgspec.structs.replace(tensor, codecs=codecs)

    return costs.with_tensors(kept)


def _fixed_sequence(tensor: str, cost: TensorCost, allowed: float, delta: float) -> dict[Pair, ChangedShare]:
    """The tensor's codecs up to the first whose bound exceeds what is allowed."""
    promises: dict[Pair, ChangedShare] = {}
    for codec, measured in _codecs(cost).items():
        counts = _counts(measured)
        if upper_share(counts.confirmed, counts.confirming_samples, delta) > allowed:
            break
        # The limit is promised, not the bound: bounds of several codecs would have to hold for each of them at once.
        promises[tensor, codec] = ChangedShare(
            at_most=allowed, certainty=1 - DELTA, samples=counts.confirming_samples, differing=counts.confirmed
        )
    return promises


def _codecs(tensor: TensorCost) -> dict[str, CodecCost]:
    """The tensor's lossy codecs, the finest first; compressed or not, a codec changes the same answers."""
    packed = ((codec, tensor.codecs.get(codec + boundary_codecs.ZSTD_SUFFIX)) for codec in boundary_codecs.LOSSY)
    found = ((codec, tensor.codecs.get(codec) or compressed) for codec, compressed in packed)
    return {codec: cost for codec, cost in found if cost is not None}


def _counts(cost: CodecCost) -> ChangeCounts:
    return cost.changes or ChangeCounts()


def _chosen_share(cost: CodecCost) -> float:
    """Share of the choosing samples whose answer changes; 0 without any."""
    return _counts(cost).chosen / max(_counts(cost).choosing_samples, 1)
