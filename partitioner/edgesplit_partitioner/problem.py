"""Two tiers as arrays: what every cut costs, and the cut that costs least at a given bandwidth.

A node per layer; a tensor read by several layers has one node of its own, so it is paid once. Source side = device.
Nothing returns from remote to device inside; graph inputs live on the device; an answer made remotely pays its way
down. Everything is built once; each solve brings only new charges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from edgesplit.plan import LOCAL, REMOTE, Link, Row
from edgesplit_partitioner.costs import Costs, TensorCost
from edgesplit_partitioner.mincut import Charges, Floats, Ints, Mask, Network
from edgesplit_partitioner.side_limits import Sides

RAW, ZSTD = "raw", "raw+zstd"


@dataclass(frozen=True, slots=True)
class Travel:
    """What each tensor costs on its way up, by one way of sending: arrays by tensor."""

    bytes: Floats
    encode_s: Floats
    decode_s: Floats


@dataclass(frozen=True, slots=True)
class Price:
    """What a cut is to be least in."""

    sending: Floats
    """Per tensor, paid where it goes up."""
    remote: Floats
    """Per layer, paid where it runs remotely."""
    device: Floats
    """Per layer, paid where it runs on the device."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A least cut at one bandwidth: the layers on the device, how they are sent, and what no cut can be below."""

    on_device: Mask
    compress: bool
    lower_bound: float


@dataclass(frozen=True)
class Problem:
    """A layer graph with its costs on a device and beyond one link. Make it with `Problem.of`."""

    costs: Costs
    device: str
    remote: str
    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    """Inputs first, then what the layers write, in order."""
    device_s: Floats
    remote_s: Floats
    joules: Floats
    """On the device, by layer; not a number where the costs have none."""
    maker: Ints
    """By tensor: the layer that writes it, -1 for an input."""
    is_output: Mask
    read_tensor: Ints
    """With `read_layer`: each pair of a tensor and a layer that reads it, once."""
    read_layer: Ints
    raw_bytes: Floats
    ways: dict[bool, Travel] = field(repr=False)
    """Ways of sending that are allowed and differ, by whether the request is compressed."""

    @classmethod
    def of(cls, costs: Costs, device: str, remote: str, codecs: frozenset[str]) -> Problem:
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
            for name in dict.fromkeys(layer.reads)
        ]
        pairs = np.array(reads, dtype=np.intp).reshape(-1, 2)
        is_output = np.zeros(len(tensors), dtype=np.bool_)
        is_output[[number[name] for name in costs.outputs]] = True
        return cls(
            costs=costs,
            device=device,
            remote=remote,
            layers=tuple(layer.name for layer in costs.layers),
            tensors=tuple(tensors),
            device_s=_floats(layer.seconds.get(device, 0.0) for layer in costs.layers),
            remote_s=_floats(layer.seconds.get(remote, 0.0) for layer in costs.layers),
            joules=_floats(layer.joules.get(device, np.nan) for layer in costs.layers),
            maker=np.array(makers, dtype=np.intp),
            is_output=is_output,
            read_tensor=pairs[:, 0],
            read_layer=pairs[:, 1],
            raw_bytes=_floats(tensor.bytes for tensor in tensors.values()),
            ways=_ways(tuple(tensors.values()), device, remote, codecs),
        )

    def figures(self, on_device: Mask, compress: bool) -> Row:
        """What the cut costs, as a row without names: every figure summed over what this cut runs and sends."""
        way = self.ways.get(compress) or self.ways[not compress]
        sent, returned = self.crossing(on_device)
        joules = float(self.joules[on_device].sum())
        return Row(
            name="",
            compress=compress and bool(sent.any()),
            device_s=float(self.device_s[on_device].sum()),
            encode_s=float(way.encode_s[sent].sum()),
            up_bytes=round(float(way.bytes[sent].sum())),
            down_bytes=round(float(self.raw_bytes[returned].sum())),
            decode_s=float(way.decode_s[sent].sum()),
            remote_s=float(self.remote_s[~on_device].sum()),
            device_joules=None if np.isnan(joules) or np.isnan(self.joules).all() else joules,
        )

    def row(self, on_device: Mask, compress: bool, name: str = "") -> Row:
        """The cut as a row of a table. Until the model is cut, each layer stands for a slice of its own."""
        sent, returned = self.crossing(on_device)
        here = tuple(self.layers[i] for i in np.flatnonzero(on_device))
        there = tuple(self.layers[i] for i in np.flatnonzero(~on_device))
        return msgspec.structs.replace(
            self.figures(on_device, compress),
            name=name or (LOCAL if not there else REMOTE if not here else ""),
            device=here,
            remote=there,
            layers=here,
            after=here[-1] if here else "",
            sends=tuple(self.tensors[i] for i in np.flatnonzero(sent)),
            receives=tuple(self.tensors[i] for i in np.flatnonzero(returned)),
        )

    def crossing(self, on_device: Mask) -> tuple[Mask, Mask]:
        """Tensors that go up, and answers that come down."""
        there = ~on_device
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

    def fastest(self, link: Link, sides: Sides) -> list[Solution]:
        """Per way of sending, the cut of least latency without the round trip; equals go to fewer bytes, then to more
        on the device.
        """
        return [
            self._solve(compress, self.seconds(way, link, 1.0 / link.up_bytes_per_s), sides, self._bytes(way))
            for compress, way in self.ways.items()
        ]

    def roughly_fastest(self, link: Link, sides: Sides, x: float) -> list[Solution]:
        """As `fastest` at x seconds per byte upwards, within about 1e-8 and equals as they fall."""
        return [
            self._solve(compress, self.seconds(way, link, x), sides, exact=False) for compress, way in self.ways.items()
        ]

    def fewest_bytes(self, link: Link, sides: Sides) -> list[Solution]:
        """Per way of sending, the cut that sends least; equals go to the fastest on an infinite uplink."""
        return [
            self._solve(compress, self._up_bytes(way), sides, self.seconds(way, link, 0.0))
            for compress, way in self.ways.items()
        ]

    def crossing_after(self, sending: Floats) -> Floats:
        """Per layer but the last: the charge of sending what is made up to it, or given, and read after it."""
        last = np.full(len(self.tensors), -1, dtype=np.intp)
        np.maximum.at(last, self.read_tensor, self.read_layer)
        born = np.maximum(self.maker, 0)
        alive = last > born
        change = np.zeros(len(self.layers) + 1)
        np.add.at(change, born[alive], sending[alive])
        np.add.at(change, last[alive], -sending[alive])
        return np.cumsum(change)[: max(len(self.layers) - 1, 0)]

    def prices_after(self, price: Price) -> Floats:
        """Per layer but the last: what the cut after it costs."""
        remote_after = np.cumsum(price.remote[::-1])[::-1] - price.remote
        return self.crossing_after(price.sending) + (np.cumsum(price.device) + remote_after)[:-1]

    def _known(self, price: Price, sides: Sides) -> list[Mask]:
        """Some allowed cuts: as local as may be, as remote as may be, and the best that ends after a layer."""
        prices = np.where(sides.may_end_after, self.prices_after(price), np.inf)
        known = [~sides.sent, sides.held]
        if prices.size and np.isfinite(prices.min()):
            known.append(np.arange(len(self.layers)) <= prices.argmin())
        return known

    def _solve(self, compress: bool, price: Price, sides: Sides, *ties: Price, exact: bool = True) -> Solution:
        network = self._network
        held, sent = (np.where(side, np.inf, 0.0) for side in (sides.held, sides.sent))
        walled = self._charges(Price(price.sending, price.remote + held, price.device + sent))
        known = min(map(self._nodes, self._known(price, sides)), key=lambda side: network.value(walled, side))
        cut = network.minimum(walled, known, *map(self._charges, ties), exact=exact)
        return Solution(cut.source_side[: len(self.layers)], compress, cut.lower_bound)

    def seconds(self, way: Travel, link: Link, x: float) -> Price:
        """Latency at x seconds per byte upwards, without the round trip."""
        down_s = self.answer_bytes / link.down_bytes_per_s
        return Price(way.encode_s + way.decode_s + way.bytes * x, self.remote_s + down_s, self.device_s)

    def _bytes(self, way: Travel) -> Price:
        return Price(way.bytes, self.answer_bytes, np.zeros(len(self.layers)))

    def _up_bytes(self, way: Travel) -> Price:
        return Price(way.bytes, np.zeros(len(self.layers)), np.zeros(len(self.layers)))

    def _charges(self, price: Price) -> Charges:
        """A price on the network's nodes and arcs."""
        graph = self._graph
        source, sink = np.zeros(graph.nodes), np.zeros(graph.nodes)
        source[: len(self.layers)], sink[: len(self.layers)] = price.remote, price.device
        np.add.at(source, graph.input_node, price.sending[graph.input_tensor])
        arcs = np.full(graph.arcs, np.inf)
        arcs[: len(graph.paying)] = price.sending[graph.paying]
        return Charges(source, sink, arcs)

    def _nodes(self, on_device: Mask) -> Mask:
        """A cut's side of every node: a tensor's own node is remote as soon as one reader is."""
        graph = self._graph
        side = np.ones(graph.nodes, dtype=np.bool_)
        side[: len(on_device)] = on_device
        side[graph.own[self.read_tensor[~on_device[self.read_layer]]]] = False
        return side

    @cached_property
    def _graph(self) -> _Graph:
        return _Graph.of(self)

    @cached_property
    def _network(self) -> Network:
        return Network(self._graph.nodes, self._graph.tails, self._graph.heads)


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


def _floats(values: object) -> Floats:
    return np.fromiter(values, dtype=np.float64)  # type: ignore[call-overload, no-any-return]


def _ways(tensors: tuple[TensorCost, ...], device: str, remote: str, codecs: frozenset[str]) -> dict[bool, Travel]:
    """The allowed ways; compressed is left out where no tensor was measured compressed, unless it is all there is."""
    nothing: npt.NDArray[np.float64] = np.zeros(len(tensors))
    plain = Travel(_floats(tensor.bytes for tensor in tensors), nothing, nothing)
    measured = [tensor.codecs.get(ZSTD) for tensor in tensors]
    if ZSTD not in codecs or not any(measured):
        return {False: plain}
    packed = Travel(
        _floats(codec.bytes if codec else tensor.bytes for codec, tensor in zip(measured, tensors, strict=True)),
        _floats(codec.encode_s.get(device, 0.0) if codec else 0.0 for codec in measured),
        _floats(codec.decode_s.get(remote, 0.0) if codec else 0.0 for codec in measured),
    )
    return {False: plain, True: packed} if RAW in codecs else {True: packed}
