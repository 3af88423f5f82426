"""Layers on ordered tiers as arrays: what every assignment costs, and the one that costs least at given prices.

A node per layer and link says "no further than this link"; a tensor read by several layers has one node of its own per
link, so it is paid once there. Source side = the device's. Nothing returns from a further tier inside; graph inputs
live on the device; an answer pays its way down every link. Everything is built once; each solve brings only charges.
With two tiers this is the minimum cut between device and remote; with K it is K - 1 copies of it (Ishikawa chains).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from edgesplit.plan import LOCAL, REMOTE, Hop, Row
from edgesplit_partitioner.algorithms.mincut import TIE, Charges, Floats, Ints, Mask, Network
from edgesplit_partitioner.costs.model import RAW, ZSTD, Costs, TensorCost


@dataclass(frozen=True, slots=True)
class Travel:
    """What each tensor costs on its way up one link, by one way of sending: arrays by tensor."""

    bytes: Floats
    encode_s: Floats
    decode_s: Floats


@dataclass(frozen=True, slots=True)
class Price:
    """What an assignment is to be least in."""

    layers: Floats
    """Per tier and layer, paid where it runs. Infinity forbids."""
    sending: Floats
    """Per link and tensor, paid where it goes up."""
    reached: Floats
    """Per tier, paid once by an assignment that reaches it and no further."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A least assignment: each layer's tier, how it is sent, and what none that reaches as far can be below."""

    tier_of: Ints
    compress: bool
    lower_bound: float
    codec_of: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By tensor and link (`device-edge`): its codec, where it is not `raw`."""

    @property
    def reaches(self) -> int:
        """The furthest tier that runs a layer; 0 is all-local."""
        return int(self.tier_of.max(initial=0))


@dataclass(frozen=True)
class Problem:
    """A layer graph with its costs on ordered tiers. Make it with `Problem.of`."""

    costs: Costs
    tiers: tuple[str, ...]
    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    """Inputs first, then what the layers write, in order."""
    seconds: Floats
    """By tier and layer; 0 where it cannot run."""
    joules: Floats
    """On the device, by layer; not a number where the costs have none."""
    maker: Ints
    """By tensor: the layer that writes it, -1 for an input."""
    is_output: Mask
    read_tensor: Ints
    """With `read_layer`: each pair of a tensor and a layer that reads it, once."""
    read_layer: Ints
    raw_bytes: Floats
    ways: dict[bool, tuple[Travel, ...]] = field(repr=False)
    """Ways of sending that are allowed and differ, by whether the request is compressed: what they cost, by link."""

    @classmethod
    def of(cls, costs: Costs, tiers: tuple[str, ...], codecs: frozenset[str]) -> Problem:
        """The arrays of a checked `Costs`."""
        tensors: dict[str, TensorCost] = dict(costs.inputs)
        makers = [-1] * len(tensors)
        for position, layer in enumerate(costs.layers):
            tensors.update(layer.writes)
            makers.extend([position] * len(layer.writes))
        number = {name: position for position, name in enumerate(tensors)}
        reads = [
            (number[name], position)
            for position, layer in enumerate(costs.layers)
            for name in (dict.fromkeys(layer.reads) if len(layer.reads) > 1 else layer.reads)
        ]
        pairs = np.array(reads, dtype=np.intp).reshape(-1, 2)
        is_output = np.zeros(len(tensors), dtype=np.bool_)
        is_output[[number[name] for name in costs.outputs]] = True
        device = tiers[0]
        return cls(
            costs=costs,
            tiers=tiers,
            layers=tuple(layer.name for layer in costs.layers),
            tensors=tuple(tensors),
            seconds=np.array([_floats([layer.seconds.get(tier, 0.0) for layer in costs.layers]) for tier in tiers]),
            joules=_floats([layer.joules.get(device, np.nan) for layer in costs.layers]),
            maker=np.array(makers, dtype=np.intp),
            is_output=is_output,
            read_tensor=pairs[:, 0],
            read_layer=pairs[:, 1],
            raw_bytes=_floats([tensor.bytes for tensor in tensors.values()]),
            ways=_ways(tuple(tensors.values()), tiers, codecs),
        )

    def way(self, compress: bool) -> tuple[Travel, ...]:
        """What sending costs that way, by link; the other way's where it is the only one."""
        return self.ways[compress] if compress in self.ways else self.ways[not compress]

    def figures(self, one: Solution) -> Row:
        """What the assignment costs, as a row without names: every figure summed over what it runs and sends. Of the
        layers beyond the link it names the first alone, which says that there are some.
        """
        tier_of, (first, *further) = one.tier_of, self._ways_of(one)
        on_device = tier_of == 0
        sent, returned = self.crossing(on_device)
        joules = float(self.joules[on_device].sum())
        reached = enumerate(further[: one.reaches - 1 if one.reaches else 0], 1)
        hops = tuple(self._hop(one, link, way) for link, way in reached)
        beyond_s = sum(float(self.seconds[tier][tier_of == tier].sum()) for tier in range(1, len(self.tiers)))
        return Row(
            name="",
            remote=self.layers[:0] if not one.reaches else (self.layers[int(tier_of.argmax())],),
            compress=one.compress and bool(sent.any()),
            device_s=float(self.seconds[0][on_device].sum()),
            encode_s=float(first.encode_s[sent].sum()),
            up_bytes=round(float(first.bytes[sent].sum())),
            down_bytes=round(float(self.raw_bytes[returned].sum())),
            decode_s=float(first.decode_s[sent].sum()),
            remote_s=beyond_s + sum(hop.encode_s + hop.decode_s for hop in hops),
            device_joules=None if np.isnan(joules) or np.isnan(self.joules).all() else joules,
            hops=hops,
        )

    def row(self, one: Solution, name: str = "") -> Row:
        """The assignment as a row of a table. Until the model is cut, each layer stands for a slice of its own."""
        on_device = one.tier_of == 0
        here, there = self._names(on_device), self._names(~on_device)
        figures = self.figures(one)
        sends, receives, codecs = self._crossing_names(one, 0)
        named = []
        for link, hop in enumerate(figures.hops, 1):
            names = dict(zip(("sends", "receives", "codecs"), self._crossing_names(one, link), strict=True))
            named.append(msgspec.structs.replace(hop, remote=self._names(one.tier_of > link), **names))
        return msgspec.structs.replace(
            figures,
            name=name or (LOCAL if not there else REMOTE if not here else ""),
            device=here,
            remote=there,
            layers=here,
            after=here[-1] if here else "",
            sends=sends,
            receives=receives,
            codecs=codecs,
            hops=tuple(named),
        )

    def _hop(self, one: Solution, link: int, way: Travel) -> Hop:
        sent, returned = self.crossing(one.tier_of <= link)
        return Hop(
            tier=self.tiers[link + 1],
            compress=one.compress and bool(sent.any()),
            encode_s=float(way.encode_s[sent].sum()),
            up_bytes=round(float(way.bytes[sent].sum())),
            down_bytes=round(float(self.raw_bytes[returned].sum())),
            decode_s=float(way.decode_s[sent].sum()),
            seconds=float(self.seconds[link + 1][one.tier_of == link + 1].sum()),
        )

    def _crossing_names(self, one: Solution, link: int) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
        """Tensors that go up a link, answers that come down it, and the codecs of those that do not go raw."""
        sent, returned = self.crossing(one.tier_of <= link)
        sends = tuple(self.tensors[i] for i in np.flatnonzero(sent))
        name = f"{self.tiers[link]}-{self.tiers[link + 1]}"
        codecs = {tensor: one.codec_of[tensor, name] for tensor in sends if (tensor, name) in one.codec_of}
        return sends, tuple(self.tensors[i] for i in np.flatnonzero(returned)), codecs

    def _ways_of(self, one: Solution) -> tuple[Travel, ...]:
        """What sending costs, by link, with the assignment's own codecs."""
        ways = self.way(one.compress)
        if not one.codec_of:
            return ways
        return tuple(self._with_codecs(one, link, way) for link, way in enumerate(ways))

    def _with_codecs(self, one: Solution, link: int, way: Travel) -> Travel:
        lower, upper = self.tiers[link], self.tiers[link + 1]
        size, encode_s, decode_s = way.bytes.copy(), way.encode_s.copy(), way.decode_s.copy()
        known = {
            **self.costs.inputs,
            **{name: cost for layer in self.costs.layers for name, cost in layer.writes.items()},
        }
        number = {name: position for position, name in enumerate(self.tensors)}
        for (tensor, name), codec in one.codec_of.items():
            measured = known[tensor].codecs
            cost = (measured.get(f"{codec}+zstd") if one.compress else None) or measured.get(codec)
            if name == f"{lower}-{upper}" and cost is not None:
                place = number[tensor]
                size[place] = cost.bytes
                encode_s[place], decode_s[place] = cost.encode_s.get(lower, 0.0), cost.decode_s.get(upper, 0.0)
        return Travel(size, encode_s, decode_s)

    def _names(self, chosen: Mask) -> tuple[str, ...]:
        return tuple(self.layers[i] for i in np.flatnonzero(chosen))

    def cut(self, tier_of: Ints) -> dict[str, tuple[str, ...]]:
        """Layer names by tier."""
        return {tier: self._names(tier_of == number) for number, tier in enumerate(self.tiers)}

    def crossing(self, below: Mask) -> tuple[Mask, Mask]:
        """Of one link: tensors that go up it, and answers that come down. `below` are the layers before it."""
        there = ~below
        made_there = np.append(there, False)[self.maker]
        read_there = np.zeros(len(self.tensors), dtype=np.bool_)
        read_there[self.read_tensor[there[self.read_layer]]] = True
        return read_there & ~made_there, self.is_output & made_there

    @cached_property
    def answer_bytes(self) -> Floats:
        """Bytes of the answers that each layer makes."""
        made = self.is_output & (self.maker >= 0)
        total = np.bincount(self.maker[made], weights=self.raw_bytes[made], minlength=len(self.layers))
        return total.astype(np.float64)

    def bytes_sent(self, compress: bool, *, first_link_up: bool = False) -> Price:
        """A byte is the price: over every link and both directions, or up the first link alone."""
        sending = np.array([way.bytes for way in self.way(compress)])
        tiers = np.arange(len(self.tiers), dtype=np.float64)
        if first_link_up:
            sending[1:] = 0.0
            tiers[:] = 0.0
        return Price(np.outer(tiers, self.answer_bytes), sending, np.zeros(len(self.tiers)))

    def crossing_after(self, sending: Floats) -> Floats:
        """Per number of first layers, 0 to all: the charge of what crosses after them, made by them or given."""
        nodes, tensors, size = self._alive
        sums = np.bincount(nodes, sending[tensors], 2 * size)
        level: Floats = sums[1:2].astype(np.float64)
        while len(level) < size:
            level = np.repeat(level, 2) + sums[2 * len(level) : 4 * len(level)]
        return level[: len(self.layers) + 1]

    @cached_property
    def _alive(self) -> tuple[Ints, Ints, int]:
        """Where each tensor crosses, as nodes of a segment tree over the numbers of first layers, and its leaves.

        Only sums of charges come out of a tree. Running sums subtract: a large charge would leave its rounding behind
        and drown the small ones after it.
        """
        last = np.full(len(self.tensors), -1, dtype=np.intp)
        np.maximum.at(last, self.read_tensor, self.read_layer)
        crosses = np.flatnonzero(last > self.maker)
        size = 1 << len(self.layers).bit_length()
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

    def solve(
        self,
        compress: bool,
        price: Price,
        allowed: Mask,
        reach: int,
        *ties: Price,
        exact: bool = True,
        near: Iterable[Ints] = (),
    ) -> Solution:
        """The cheapest assignment to the tiers up to `reach`, `price.reached` left out; equals by `ties` in turn, then
        to more layers nearer the device. Not `exact`: within about 1e-8, equals as they fall.

        `allowed` says by tier and layer where it may run; `near` are assignments that may be good. The bound is
        infinite where no assignment is allowed.
        """
        walled = Price(np.where(allowed, price.layers, np.inf), price.sending, price.reached)
        if reach == 1 and self.only_in_order:
            return self._least_in_order(compress, walled, ties)
        guesses = (*self._known(walled, allowed, reach), *(np.minimum(one, reach) for one in near))
        known = [self._nodes(one, reach) for one in guesses]
        network, charges = self._network(reach), self._charges(walled, reach)
        values = [network.value(charges, side) for side in known]
        best = int(np.argmin(values)) if values else 0
        if not values or not np.isfinite(values[best]):
            return Solution(np.zeros(len(self.layers), dtype=np.intp), compress, np.inf)
        cut = network.minimum(charges, known[best], *(self._charges(one, reach) for one in ties), exact=exact)
        sides = cut.source_side.reshape(reach, -1)[:, : len(self.layers)]
        return Solution(np.count_nonzero(~sides, axis=0), compress, cut.lower_bound)

    def _known(self, price: Price, allowed: Mask, reach: int) -> Iterable[Ints]:
        """Some assignments that are allowed where any is: as near as may be, as far, and the best that keeps to the
        order of the layers.
        """
        spread = self.spread(allowed, reach)
        if spread is None:
            return []
        found = [spread[0], spread[1]]
        in_order = self._best_in_order(price, spread, reach)
        return [*found, in_order] if in_order is not None else found

    def spread(self, allowed: Mask, reach: int) -> tuple[Ints, Ints] | None:
        """The assignments nearest to the device and furthest from it; None where none is allowed."""
        usable = allowed[: reach + 1]
        if bool(usable.all()):
            nearest = np.zeros(len(self.layers), dtype=np.intp)
            return nearest, nearest + reach
        tiers = [np.flatnonzero(column) for column in usable.T]
        if any(len(one) == 0 for one in tiers):
            return None
        before = list(zip(self.maker[self.read_tensor].tolist(), self.read_layer.tolist(), strict=True))
        near = self._pushed([(upper, lower) for lower, upper in before if lower >= 0], [one.tolist() for one in tiers])
        mirrored = [[reach - tier for tier in reversed(one.tolist())] for one in tiers]
        far = self._pushed(
            [(lower, upper) for lower, upper in reversed(before) if lower >= 0], mirrored, last_first=True
        )
        return (near, reach - far) if near is not None and far is not None else None

    def _pushed(self, pairs: list[tuple[int, int]], tiers: list[list[int]], *, last_first: bool = False) -> Ints | None:
        """By layer the least of its tiers that is at least that of the others it is paired with."""
        needs: list[list[int]] = [[] for _ in self.layers]
        for layer, other in pairs:
            needs[layer].append(other)
        found = [0] * len(self.layers)
        for layer in reversed(range(len(found))) if last_first else range(len(found)):
            least = max((found[other] for other in needs[layer]), default=0)
            place = next((tier for tier in tiers[layer] if tier >= least), None)
            if place is None:
                return None
            found[layer] = place
        return np.array(found, dtype=np.intp)

    @cached_property
    def only_in_order(self) -> bool:
        """Each layer needs the one before it, so every cut is "the first so many": a chain, with or without skips."""
        makers = self.maker[self.read_tensor]
        follows = np.zeros(len(self.layers), dtype=np.bool_)
        follows[self.read_layer[(makers >= 0) & (makers == self.read_layer - 1)]] = True
        return bool(follows[1:].all())

    def _least_in_order(self, compress: bool, price: Price, ties: tuple[Price, ...]) -> Solution:
        """The same as a minimum cut, where every cut is "the first so many" and there are two tiers."""
        values = self._ending_after(price)
        least = float(values.min(initial=np.inf))
        equal = values <= least + TIE * abs(least)
        for tie in ties if math.isfinite(least) else ():
            wished = np.where(equal, self._ending_after(tie), np.inf)
            lowest = float(wished.min())
            equal = wished <= lowest + TIE * abs(lowest)
        count = len(values) - 1 - int(equal[::-1].argmax())
        return Solution((np.arange(len(self.layers)) >= count).astype(np.intp), compress, least)

    def _ending_after(self, price: Price) -> Floats:
        """Per number of first layers, 0 to all: the price of them on the device and the rest beyond the link."""
        here = np.concatenate([[0.0], np.cumsum(price.layers[0])])
        beyond = np.concatenate([np.cumsum(price.layers[1][::-1])[::-1], [0.0]])
        found: Floats = here + beyond + self.crossing_after(price.sending[0])
        return found

    def _best_in_order(self, price: Price, spread: tuple[Ints, Ints], reach: int) -> Ints | None:
        """Of the assignments in which no layer runs nearer than one before it, the cheapest: the first p0 layers on the
        device, those up to p1 on the next tier, and so on. What a link's position costs is a sum of its own.
        """
        count = len(self.layers)
        layers = np.where(np.isfinite(price.layers), price.layers, 0.0)
        sums = np.concatenate([np.zeros((len(layers), 1)), np.cumsum(layers, axis=1)], axis=1)
        least: list[Floats] = []
        for link in range(reach):
            cost = sums[link] - sums[link + 1] + self.crossing_after(price.sending[link])
            forced, kept = spread[0] > link, spread[1] <= link
            first_forced = int(forced.argmax()) if forced.any() else count
            last_kept = count - int(kept[::-1].argmax()) if kept.any() else 0
            cost[:last_kept] = np.inf
            cost[first_forced + 1 :] = np.inf
            if least:
                cost = cost + np.minimum.accumulate(least[-1])
            least.append(cost)
        if not np.isfinite(least[-1].min()):
            return None
        ends = [count]
        for cost in reversed(least):
            ends.append(int(cost[: ends[-1] + 1].argmin()))
        return np.searchsorted(np.array(ends[:0:-1]), np.arange(count), side="right").astype(np.intp)

    def _charges(self, price: Price, reach: int) -> Charges:
        """A price on the network's nodes and arcs."""
        graph, count = self._graph, len(self.layers)
        source, sink = np.zeros((reach, graph.nodes)), np.zeros((reach, graph.nodes))
        arcs = np.full((reach, graph.arcs), np.inf)
        sink[0, :count] = price.layers[0]
        source[-1, :count] = price.layers[reach]
        for link in range(reach):
            sending = price.sending[link]
            np.add.at(source[link], graph.input_node, sending[graph.input_tensor])
            arcs[link, : len(graph.paying)] = sending[graph.paying]
        between = price.layers[1:reach].ravel()
        forbidden = np.full(len(between), np.inf)
        return Charges(source.ravel(), sink.ravel(), np.concatenate([arcs.ravel(), between, forbidden]))

    def _nodes(self, tier_of: Ints, reach: int) -> Mask:
        """An assignment's side of every node: a tensor's own node is beyond a link as soon as one reader is."""
        graph = self._graph
        side = np.ones((reach, graph.nodes), dtype=np.bool_)
        for link in range(reach):
            below = tier_of <= link
            side[link, : len(below)] = below
            side[link, graph.own[self.read_tensor[~below[self.read_layer]]]] = False
        return side.ravel()

    @cached_property
    def _graph(self) -> _Graph:
        return _Graph.of(self)

    def _network(self, reach: int) -> Network:
        """One copy of the graph per link; between copies, arcs pay for the tiers in the middle."""
        if reach not in self._networks:
            graph = self._graph
            offsets = np.arange(reach)[:, np.newaxis] * graph.nodes
            inner = (np.arange(len(self.layers)) + offsets[:-1]).ravel()
            outer = inner + graph.nodes
            tails = np.concatenate([(graph.tails + offsets).ravel(), outer, inner])
            heads = np.concatenate([(graph.heads + offsets).ravel(), inner, outer])
            self._networks[reach] = Network(graph.nodes * reach, tails, heads)
        return self._networks[reach]

    @cached_property
    def _networks(self) -> dict[int, Network]:
        return {}


@dataclass(frozen=True, slots=True)
class _Graph:
    """Which node and which arc stands for what. Arcs that pay for a tensor come first, infinite ones after them."""

    nodes: int
    tails: Ints
    heads: Ints
    paying: Ints
    """By paying arc: the tensor it pays for."""
    input_tensor: Ints
    input_node: Ints
    """With `input_tensor`: the node that pays for an input when it is remote."""
    own: Ints
    """By tensor: its own node, or that of its only reader, or some layer where nothing reads it."""

    @property
    def arcs(self) -> int:
        return len(self.tails)

    @classmethod
    def of(cls, problem: Problem) -> _Graph:
        layers, tensors = len(problem.layers), len(problem.tensors)
        readers = np.bincount(problem.read_tensor, minlength=tensors)
        own = np.zeros(tensors, dtype=np.intp)
        own[problem.read_tensor] = problem.read_layer
        shared = readers > 1
        own[shared] = layers + np.arange(np.count_nonzero(shared))
        makes = problem.maker >= 0
        paying = np.flatnonzero(makes & (readers > 0))
        inputs = np.flatnonzero(~makes & (readers > 0))
        fan = shared[problem.read_tensor]
        back = makes[problem.read_tensor]
        return cls(
            nodes=layers + int(np.count_nonzero(shared)),
            # A tensor crosses; all its readers follow it; a reader on the device holds the maker there.
            tails=np.concatenate([problem.maker[paying], own[problem.read_tensor[fan]], problem.read_layer[back]]),
            heads=np.concatenate([own[paying], problem.read_layer[fan], problem.maker[problem.read_tensor[back]]]),
            paying=paying,
            input_tensor=inputs,
            input_node=own[inputs],
            own=own,
        )


def _floats(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float64)


def _ways(
    tensors: tuple[TensorCost, ...], tiers: tuple[str, ...], codecs: frozenset[str]
) -> dict[bool, tuple[Travel, ...]]:
    """The allowed ways; compressed is left out where no tensor was measured compressed, unless it is all there is."""
    nothing = np.zeros(len(tensors))
    plain = Travel(_floats([tensor.bytes for tensor in tensors]), nothing, nothing)
    links = len(tiers) - 1
    measured = [tensor.codecs.get(ZSTD) for tensor in tensors]
    if ZSTD not in codecs or not any(measured):
        return {False: (plain,) * links}
    sizes = _floats([codec.bytes if codec else tensor.bytes for codec, tensor in zip(measured, tensors, strict=True)])
    encode = {tier: _floats([codec.encode_s.get(tier, 0.0) if codec else 0.0 for codec in measured]) for tier in tiers}
    decode = {tier: _floats([codec.decode_s.get(tier, 0.0) if codec else 0.0 for codec in measured]) for tier in tiers}
    packed = tuple(Travel(sizes, encode[lower], decode[upper]) for lower, upper in itertools.pairwise(tiers))
    return {False: (plain,) * links, True: packed} if RAW in codecs else {True: packed}
