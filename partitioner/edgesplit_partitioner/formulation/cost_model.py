"""A layer graph with its costs on ordered tiers as arrays: the one input of the minimum cut and of the MILP.

`CostModel` contains what does not depend on links, objectives or limits. `cost_terms` prices it, `mincut_problem` and
`edgesplit_partitioner.milp` search for the cheapest assignment of layers to tiers, `solution` turns an assignment into
a row of the switching table.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edgesplit.release import boundary_codecs
from edgesplit.release.boundary_codecs import ZSTD_SUFFIX
from edgesplit_partitioner.arrays import Floats, Ints, Mask
from edgesplit_partitioner.costs.model import RAW, ZSTD, CodecCost, Costs, TensorCost


@dataclass(frozen=True, slots=True)
class TransferOption:
    """One codec for one tensor to cross one link."""

    codec: str
    bytes: float
    encode_s: float
    decode_s: float
    loss: float
    is_lossy: bool = False

    def is_no_worse_than(self, other: TransferOption) -> bool:
        """Whether none of its costs is above the other's."""
        return (
            self.bytes <= other.bytes
            and self.encode_s <= other.encode_s
            and self.decode_s <= other.decode_s
            and self.loss <= other.loss
            and self.is_lossy <= other.is_lossy
        )


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """What every tensor costs on its way up one link in one kind of request: arrays by tensor."""

    bytes: Floats
    encode_s: Floats
    decode_s: Floats


@dataclass(frozen=True)
class CostModel:
    """A checked `Costs` on some of its tiers, with the codecs that a plan may use.

    Layers are numbered in the order of the costs; tensors are numbered too, graph inputs first, then what the layers
    write, in order. Link k joins tier k to tier k + 1. Arrays are built when they are first used.
    """

    costs: Costs
    tiers: tuple[str, ...]
    codecs: frozenset[str]

    @property
    def link_count(self) -> int:
        """Number of links: one fewer than tiers."""
        return len(self.tiers) - 1

    def link_name(self, link: int) -> str:
        """The two tiers that a link joins, as in `device-edge`."""
        return f"{self.tiers[link]}-{self.tiers[link + 1]}"

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return tuple(layer.name for layer in self.costs.layers)

    @cached_property
    def tensors(self) -> dict[str, TensorCost]:
        """Costs of every tensor by name, in order."""
        return self.costs.tensors

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        return tuple(self.tensors)

    @cached_property
    def tensor_number(self) -> dict[str, int]:
        """Each tensor's number by its name."""
        return {name: number for number, name in enumerate(self.tensors)}

    @cached_property
    def seconds(self) -> Floats:
        """By tier and layer; 0 where the layer cannot run."""
        rows = [[layer.seconds.get(tier, 0.0) for layer in self.costs.layers] for tier in self.tiers]
        return np.array(rows, dtype=np.float64)

    @cached_property
    def joules(self) -> Floats:
        """On the device, by layer; not a number where the costs have none."""
        device = self.tiers[0]
        return np.array([layer.joules.get(device, np.nan) for layer in self.costs.layers], dtype=np.float64)

    @cached_property
    def weight_bytes(self) -> Floats:
        """By layer."""
        return np.array([layer.weight_bytes for layer in self.costs.layers], dtype=np.float64)

    @cached_property
    def can_run(self) -> Mask:
        """By tier and layer: whether the costs allow the layer on the tier."""
        rows = [[tier in (layer.tiers or layer.seconds) for layer in self.costs.layers] for tier in self.tiers]
        return np.array(rows, dtype=np.bool_)

    @cached_property
    def maker(self) -> Ints:
        """By tensor: the layer that writes it, -1 for a graph input."""
        counts = [len(self.costs.inputs), *(len(layer.writes) for layer in self.costs.layers)]
        return np.repeat(np.arange(-1, len(self.costs.layers)), counts)

    @cached_property
    def _reads(self) -> Ints:
        """Pairs of a tensor and a layer that reads it, each once, in the order of the layers."""
        number = self.tensor_number
        pairs = [
            (number[name], reader)
            for reader, layer in enumerate(self.costs.layers)
            for name in (dict.fromkeys(layer.reads) if len(layer.reads) > 1 else layer.reads)
        ]
        return np.array(pairs, dtype=np.intp).reshape(-1, 2)

    @cached_property
    def read_tensor(self) -> Ints:
        """By pair of a tensor and a layer that reads it: the tensor."""
        return self._reads[:, 0]

    @cached_property
    def read_layer(self) -> Ints:
        """By pair of a tensor and a layer that reads it: the layer."""
        return self._reads[:, 1]

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By tensor: the layers that read it, each once, in order."""
        readers: list[list[int]] = [[] for _ in self.tensors]
        for tensor, layer in self._reads.tolist():
            readers[tensor].append(layer)
        return tuple(map(tuple, readers))

    @cached_property
    def is_output(self) -> Mask:
        """By tensor: whether the device must receive it."""
        is_output = np.zeros(len(self.tensors), dtype=np.bool_)
        is_output[[self.tensor_number[name] for name in self.costs.outputs]] = True
        return is_output

    @cached_property
    def raw_bytes(self) -> Floats:
        """By tensor: its size without a codec."""
        return np.array([tensor.bytes for tensor in self.tensors.values()], dtype=np.float64)

    @cached_property
    def answer_bytes(self) -> Floats:
        """By layer: bytes of the model outputs that it writes."""
        made = self.is_output & (self.maker >= 0)
        total = np.bincount(self.maker[made], weights=self.raw_bytes[made], minlength=len(self.layers))
        return total.astype(np.float64, copy=False)

    # ---- how tensors cross a link ------------------------------------------------------------------------------------

    @cached_property
    def transfers(self) -> dict[bool, tuple[TransferCosts, ...]]:
        """Costs of sending every tensor raw, by whether the request is compressed, then by link.

        Only the kinds of request that the codecs allow and that differ: compressed is left out where no tensor was
        measured compressed, unless it is the only kind allowed.
        """
        tensors = tuple(self.tensors.values())
        nothing = np.zeros(len(tensors))
        plain = (TransferCosts(self.raw_bytes, nothing, nothing),) * self.link_count
        measured = [tensor.codecs.get(ZSTD) for tensor in tensors]
        if ZSTD not in self.codecs or not any(measured):
            return {False: plain}

        def by_tensor(seconds: list[dict[str, float]], tier: str) -> Floats:
            return np.array([by_tier.get(tier, 0.0) for by_tier in seconds], dtype=np.float64)

        encode_s = [codec.encode_s if codec else {} for codec in measured]
        decode_s = [codec.decode_s if codec else {} for codec in measured]
        pairs = zip(measured, tensors, strict=True)
        sizes = np.array([codec.bytes if codec else tensor.bytes for codec, tensor in pairs], dtype=np.float64)
        compressed = tuple(
            TransferCosts(sizes, by_tensor(encode_s, lower), by_tensor(decode_s, upper))
            for lower, upper in itertools.pairwise(self.tiers)
        )
        return {False: plain, True: compressed} if RAW in self.codecs else {True: compressed}

    def transfers_of(self, compress: bool) -> tuple[TransferCosts, ...]:
        """`transfers` of one kind of request, by link; of the other kind where that is the only one."""
        return self.transfers[compress] if compress in self.transfers else self.transfers[not compress]

    @cached_property
    def request_kinds(self) -> tuple[bool, ...]:
        """Whether a request may be plain (False) and compressed (True): both where both are allowed and differ.

        Unlike the keys of `transfers` this counts every codec, lossy ones too.
        """
        measured = any(
            name.endswith(ZSTD_SUFFIX) and name in self.codecs
            for tensor in self.tensors.values()
            for name in tensor.codecs
        )
        plain = any(not name.endswith(ZSTD_SUFFIX) for name in self.codecs)
        return (False, True) if measured and plain else (True,) if measured else (False,)

    def transfer_options(
        self, tensor: TensorCost, link: int, *, compress: bool, lossy: bool
    ) -> tuple[TransferOption, ...]:
        """The codecs with which a tensor may cross a link; one that another equals or beats in everything is left out.

        In a compressed request a codec that was not measured compressed counts with its uncompressed costs.
        """
        lower, upper = self.tiers[link], self.tiers[link + 1]
        options: list[TransferOption] = []
        names = {name.removesuffix(ZSTD_SUFFIX) for name in self.codecs if compress or not name.endswith(ZSTD_SUFFIX)}
        for codec in sorted(names, key=lambda name: (name != RAW, name)):
            cost = measured_cost(tensor, codec, compress)
            if cost is not None and (lossy or cost.loss <= 0):
                times = cost.encode_s.get(lower, 0.0), cost.decode_s.get(upper, 0.0)
                is_lossy = cost.loss > 0 or codec in boundary_codecs.LOSSY
                options.append(TransferOption(codec, cost.bytes, *times, cost.loss, is_lossy))
            elif codec == RAW:
                options.append(TransferOption(RAW, tensor.bytes, 0.0, 0.0, 0.0))
        return _undominated(options or [TransferOption(RAW, tensor.bytes, 0.0, 0.0, 0.0)])

    # ---- what crosses a link -----------------------------------------------------------------------------------------

    def crossing(self, below: Mask) -> tuple[Mask, Mask]:
        """Of one link: the tensors that go up it and the model outputs that come down it.

        `below` marks the layers that run before the link. A tensor goes up when it is made below the link (graph inputs
        are) and read beyond it.
        """
        beyond = ~below
        # `maker` is -1 for a graph input, which picks the appended False: inputs are never made beyond a link.
        made_beyond = np.append(beyond, False)[self.maker]
        read_beyond = np.zeros(len(self.tensors), dtype=np.bool_)
        read_beyond[self.read_tensor[beyond[self.read_layer]]] = True
        return read_beyond & ~made_beyond, self.is_output & made_beyond

    def last_layers(self, below: Mask) -> Mask:
        """Of the layers that run before a link: those that no other layer there reads. With all they depend on they are
        exactly the layers `below`."""
        makers = self.maker[self.read_tensor[below[self.read_layer]]]
        is_last = below.copy()
        is_last[makers[makers >= 0]] = False
        return is_last

    def crossing_after(self, sending: Floats) -> Floats:
        """By number of first layers before a link, 0 to all: the sum of `sending` over the tensors that cross it."""
        nodes, tensors, size = self._crossing_tree
        sums = np.bincount(nodes, sending[tensors], 2 * size)
        # Push the sums from the root to the leaves, level by level: a leaf ends up with those of all its ancestors.
        level: Floats = sums[1:2].astype(np.float64)
        while len(level) < size:
            level = np.repeat(level, 2) + sums[2 * len(level) : 4 * len(level)]
        return level[: len(self.layers) + 1]

    @cached_property
    def _crossing_tree(self) -> tuple[Ints, Ints, int]:
        """For which numbers of first layers each tensor crosses, as nodes of a segment tree: nodes, tensors, leaves.

        A tensor crosses for the numbers from its maker + 1 to its last reader, an interval. Its charge is added at the
        nodes that cover the interval, not at its start and subtracted again behind its end: a running sum would keep
        the rounding error of a large charge, which drowns the small charges after it.
        """
        last = np.full(len(self.tensors), -1, dtype=np.intp)
        np.maximum.at(last, self.read_tensor, self.read_layer)
        crosses = np.flatnonzero(last > self.maker)
        size = 1 << len(self.layers).bit_length()
        # Leaves are the nodes `size` to `2 * size`; node i has the children 2i and 2i + 1. Half-open intervals are
        # covered bottom-up, all of them level by level. An odd start is a right child whose parent also covers what
        # lies before the interval, so the node itself is taken; an odd end means the same of the last node inside.
        start, end = self.maker[crosses] + 1 + size, last[crosses] + 1 + size
        nodes, tensors = [start[:0]], [crosses[:0]]
        while len(start):
            left, right = start % 2 == 1, end % 2 == 1
            nodes += [start[left], end[right] - 1]
            tensors += [crosses[left], crosses[right]]
            start, end = (start + 1) // 2, end // 2
            more = start < end
            start, end, crosses = start[more], end[more], crosses[more]
        return np.concatenate(nodes), np.concatenate(tensors), size


def measured_cost(tensor: TensorCost, codec: str, compress: bool) -> CodecCost | None:
    """What a codec costs in one kind of request: its uncompressed costs where it was not measured compressed.

    None where it was not measured.
    """
    return (tensor.codecs.get(codec + ZSTD_SUFFIX) if compress else None) or tensor.codecs.get(codec)


def _undominated(options: list[TransferOption]) -> tuple[TransferOption, ...]:
    """The options without those that another equals or beats in everything; of equals the first stays."""
    best: list[TransferOption] = []
    for option in options:
        if not any(other.is_no_worse_than(option) for other in best):
            best = [other for other in best if not option.is_no_worse_than(other)] + [option]
    return tuple(best)
