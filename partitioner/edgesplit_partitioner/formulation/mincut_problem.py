"""The cheapest assignment of layers to tiers as a minimum cut, for costs that add up.

1. Two tiers are a minimum cut between a source (the device) and a sink (the remote tier): DADS, Hu et al., "Dynamic
   Adaptive DNN Surgery for Inference Acceleration on the Edge", INFOCOM 2019, section IV. A layer is a node; it pays
   its device cost if it is on the source side and its remote cost if it is on the sink side.
2. K tiers are K - 1 copies of that network, one per link, joined as in Ishikawa, "Exact Optimization for Markov Random
   Fields with Convex Priors", PAMI 2003: node (v, k) is on the source side when layer v runs no further than link k.
3. A tensor that several layers read has a node of its own per link, so its crossing is paid once.
4. Nothing returns from a further tier inside the model, graph inputs are on the device, and an output pays its way down
   every link.

The network is built once per number of tiers reached; each solve brings only new arc prices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edgesplit.plan import Power
from edgesplit_partitioner.algorithms.mincut import Capacities, FlowNetwork
from edgesplit_partitioner.arrays import TIE, Floats, Ints, Mask
from edgesplit_partitioner.formulation.cost_model import CostModel
from edgesplit_partitioner.formulation.cost_terms import LinkScenario, scenario_term
from edgesplit_partitioner.formulation.solution import Solution


@dataclass(frozen=True, slots=True)
class ArcPrices:
    """What an assignment pays, as the prices of the network's arcs."""

    layers: Floats
    """By tier and layer, paid where the layer runs. Infinity forbids."""
    sending: Floats
    """By link and tensor, paid where the tensor goes up."""
    reached: Floats
    """By tier, paid once by an assignment that reaches it and no further."""

    def __add__(self, other: ArcPrices) -> ArcPrices:
        return ArcPrices(self.layers + other.layers, self.sending + other.sending, self.reached + other.reached)


def arc_prices(
    model: CostModel, scenarios: Sequence[LinkScenario], power: Power, up_s_per_byte: float | None = None
) -> dict[bool, ArcPrices]:
    """The sum of what the scenarios charge, by kind of request. `up_s_per_byte` replaces that of the first link."""
    first, *others = (_arc_prices(model, scenario, power, up_s_per_byte) for scenario in scenarios)
    return {kind: sum((prices[kind] for prices in others), first[kind]) for kind in model.transfers}


def _arc_prices(
    model: CostModel, scenario: LinkScenario, power: Power, up_s_per_byte: float | None
) -> dict[bool, ArcPrices]:
    term = scenario_term(model, scenario, power, up_s_per_byte)
    # An output comes down every link below the tier that makes it, whatever else runs there: part of its layer's price.
    layers = term.layer
    layers[1:] += model.answer_bytes * np.cumsum(term.down_byte)[:, None]
    reached = np.concatenate([[0.0], np.cumsum(term.crossed)])
    by_kind = {}
    for kind, transfers in model.transfers.items():
        sending = np.empty((len(transfers), len(model.tensors)))
        for link, costs in enumerate(transfers):
            coded = term.encode[link] * costs.encode_s + term.decode[link] * costs.decode_s
            sending[link] = coded + costs.bytes * term.up_byte[link]
        by_kind[kind] = ArcPrices(layers, sending, reached)
    return by_kind


def byte_prices(model: CostModel, compress: bool, *, first_link_up: bool = False) -> ArcPrices:
    """Prices by which an assignment pays its bytes: over every link and both directions, or up the first link alone."""
    sending = np.array([costs.bytes for costs in model.transfers_of(compress)])
    tiers = np.arange(len(model.tiers), dtype=np.float64)
    if first_link_up:
        sending[1:] = 0.0
        tiers[:] = 0.0
    return ArcPrices(np.outer(tiers, model.answer_bytes), sending, np.zeros(len(model.tiers)))


@dataclass(frozen=True)
class MinCutProblem:
    """The networks of a cost model, and the search for its cheapest assignment at given prices."""

    model: CostModel

    def solve(
        self,
        compress: bool,
        prices: ArcPrices,
        allowed: Mask,
        reach: int,
        *ties: ArcPrices,
        exact: bool = True,
        near: Iterable[Ints] = (),
    ) -> Solution:
        """The cheapest assignment to the tiers up to `reach`, `prices.reached` left out.

        Of equals the cheapest by each of `ties` in turn, then the one with more layers nearer the device. Without
        `exact` it is within about 1e-8 of the cheapest, and which of equals is found is undefined. `allowed` marks by
        tier and layer where it may run; `near` are assignments that may be good and speed the search up. The bound is
        infinite where no assignment is allowed.
        """
        walled = ArcPrices(np.where(allowed, prices.layers, np.inf), prices.sending, prices.reached)
        if reach == 1 and self._is_sequential:
            return self._cheapest_prefix(compress, walled, ties)
        guesses = (*self._first_guesses(walled, allowed, reach), *(np.minimum(guess, reach) for guess in near))
        known = [self._source_side(guess, reach) for guess in guesses]
        network, capacities = self._network(reach), self._capacities(walled, reach)
        values = [network.value(capacities, side) for side in known]
        best = int(np.argmin(values)) if values else 0
        if not values or not np.isfinite(values[best]):
            return Solution(np.zeros(len(self.model.layers), dtype=np.intp), compress, np.inf)
        tie_capacities = (self._capacities(tie, reach) for tie in ties)
        cut = network.minimum(capacities, known[best], *tie_capacities, exact=exact)
        # A layer's tier is the number of links that it runs beyond: of its copies on the sink side.
        sides = cut.source_side.reshape(reach, -1)[:, : len(self.model.layers)]
        return Solution(np.count_nonzero(~sides, axis=0), compress, cut.lower_bound)

    # ---- the network -------------------------------------------------------------------------------------------------

    @cached_property
    def _graph(self) -> _LinkGraph:
        return _LinkGraph.of(self.model)

    @cached_property
    def _networks(self) -> dict[int, FlowNetwork]:
        return {}

    def _network(self, reach: int) -> FlowNetwork:
        """One copy of the graph per link, with arcs between the copies of a layer.

        The arc from (v, k + 1) to (v, k) is cut where the layer runs beyond link k and no further than link k + 1: on
        the tier between them, whose cost it carries. The infinite arc back forbids to run beyond link k + 1 without
        running beyond link k (Ishikawa).
        """
        if reach not in self._networks:
            graph = self._graph
            offsets = np.arange(reach)[:, np.newaxis] * graph.nodes
            inner = (np.arange(len(self.model.layers)) + offsets[:-1]).ravel()
            outer = inner + graph.nodes
            tails = np.concatenate([(graph.tails + offsets).ravel(), outer, inner])
            heads = np.concatenate([(graph.heads + offsets).ravel(), inner, outer])
            self._networks[reach] = FlowNetwork(graph.nodes * reach, tails, heads)
        return self._networks[reach]

    def _capacities(self, prices: ArcPrices, reach: int) -> Capacities:
        """The prices on the network's nodes and arcs, in the order in which `_network` lists the arcs."""
        graph, layers = self._graph, len(self.model.layers)
        source, sink = np.zeros((reach, graph.nodes)), np.zeros((reach, graph.nodes))
        arcs = np.full((reach, graph.arcs), np.inf)
        # The device's cost is paid by the first copy, where the layer stays; the furthest tier's by the last copy.
        sink[0, :layers] = prices.layers[0]
        source[-1, :layers] = prices.layers[reach]
        for link in range(reach):
            sending = prices.sending[link]
            # A graph input is on the device, so it crosses as soon as its own node is on the sink side.
            np.add.at(source[link], graph.input_node, sending[graph.input_tensor])
            arcs[link, : len(graph.paying)] = sending[graph.paying]
        between = prices.layers[1:reach].ravel()
        forbidden = np.full(len(between), np.inf)
        return Capacities(source.ravel(), sink.ravel(), np.concatenate([arcs.ravel(), between, forbidden]))

    def _source_side(self, tier_of: Ints, reach: int) -> Mask:
        """An assignment's side of every node: a tensor's own node is beyond a link as soon as one reader is."""
        graph, model = self._graph, self.model
        side = np.ones((reach, graph.nodes), dtype=np.bool_)
        for link in range(reach):
            below = tier_of <= link
            side[link, : len(below)] = below
            side[link, graph.own[model.read_tensor[~below[model.read_layer]]]] = False
        return side.ravel()

    # ---- assignments to start from -----------------------------------------------------------------------------------

    def _first_guesses(self, prices: ArcPrices, allowed: Mask, reach: int) -> Iterable[Ints]:
        """Some assignments, allowed where any is: nearest to the device, furthest, and the cheapest in order."""
        extremes = self._nearest_and_furthest(allowed, reach)
        if extremes is None:
            return []
        in_order = self._cheapest_in_order(prices, extremes, reach)
        return [*extremes, in_order] if in_order is not None else extremes

    def _nearest_and_furthest(self, allowed: Mask, reach: int) -> tuple[Ints, Ints] | None:
        """The assignments nearest to the device and furthest from it; None where none is allowed."""
        usable = allowed[: reach + 1]
        if bool(usable.all()):
            nearest = np.zeros(len(self.model.layers), dtype=np.intp)
            return nearest, nearest + reach
        tiers = [np.flatnonzero(column) for column in usable.T]
        if any(len(usable_tiers) == 0 for usable_tiers in tiers):
            return None
        model = self.model
        before = list(zip(model.maker[model.read_tensor].tolist(), model.read_layer.tolist(), strict=True))
        near = self._lowest_tiers(
            [(reader, maker) for maker, reader in before if maker >= 0], [tier.tolist() for tier in tiers]
        )
        # The furthest is the nearest of the mirrored problem: tiers counted from the far end, readers before makers.
        mirrored = [[reach - tier for tier in reversed(usable_tiers.tolist())] for usable_tiers in tiers]
        far = self._lowest_tiers(
            [(maker, reader) for maker, reader in reversed(before) if maker >= 0], mirrored, last_first=True
        )
        return (near, reach - far) if near is not None and far is not None else None

    def _lowest_tiers(
        self, pairs: list[tuple[int, int]], tiers: list[list[int]], *, last_first: bool = False
    ) -> Ints | None:
        """By layer the lowest of its tiers that is at least that of the other layers it is paired with; None for none.

        Layers are settled in order, or from the last to the first.
        """
        needs: list[list[int]] = [[] for _ in self.model.layers]
        for layer, other in pairs:
            needs[layer].append(other)
        lowest = [0] * len(needs)
        for layer in reversed(range(len(needs))) if last_first else range(len(needs)):
            least = max((lowest[other] for other in needs[layer]), default=0)
            tier = next((tier for tier in tiers[layer] if tier >= least), None)
            if tier is None:
                return None
            lowest[layer] = tier
        return np.array(lowest, dtype=np.intp)

    def _cheapest_in_order(self, prices: ArcPrices, extremes: tuple[Ints, Ints], reach: int) -> Ints | None:
        """Of the assignments in which no layer runs nearer than an earlier one, the cheapest.

        Such an assignment is an end per link: the first p0 layers run on the device, those up to p1 on the next tier,
        and so on with p0 <= p1 <= ... What a link's end costs is a sum of its own, so the best ends are found by
        dynamic programming over the links, each with the least cost of any earlier end.
        """
        count = len(self.model.layers)
        layers = np.where(np.isfinite(prices.layers), prices.layers, 0.0)
        sums = np.concatenate([np.zeros((len(layers), 1)), np.cumsum(layers, axis=1)], axis=1)
        least: list[Floats] = []
        for link in range(reach):
            cost = sums[link] - sums[link + 1] + self.model.crossing_after(prices.sending[link])
            # Layers that can only run beyond the link end it at the latest, those that must stay before it at the
            # earliest.
            beyond, before = extremes[0] > link, extremes[1] <= link
            first_beyond = int(beyond.argmax()) if beyond.any() else count
            last_before = count - int(before[::-1].argmax()) if before.any() else 0
            cost[:last_before] = np.inf
            cost[first_beyond + 1 :] = np.inf
            if least:
                cost = cost + np.minimum.accumulate(least[-1])
            least.append(cost)
        if not np.isfinite(least[-1].min()):
            return None
        ends = [count]
        for cost in reversed(least):
            ends.append(int(cost[: ends[-1] + 1].argmin()))
        return np.searchsorted(np.array(ends[:0:-1]), np.arange(count), side="right").astype(np.intp)

    # ---- chains on two tiers need no flow ----------------------------------------------------------------------------

    @cached_property
    def _is_sequential(self) -> bool:
        """Whether each layer reads from the one before it, so that every cut is a prefix of the layers.

        True of a chain, with or without skip connections (the models of Neurosurgeon, Kang et al., ASPLOS 2017).
        """
        model = self.model
        makers = model.maker[model.read_tensor]
        follows = np.zeros(len(model.layers), dtype=np.bool_)
        follows[model.read_layer[(makers >= 0) & (makers == model.read_layer - 1)]] = True
        return bool(follows[1:].all())

    def _cheapest_prefix(self, compress: bool, prices: ArcPrices, ties: tuple[ArcPrices, ...]) -> Solution:
        """The minimum cut of a sequential model on two tiers: every split point is tried, as in Neurosurgeon."""
        values = self._prefix_costs(prices)
        least = float(values.min(initial=np.inf))
        equal = values <= least + TIE * abs(least)
        for tie in ties if math.isfinite(least) else ():
            among_equals = np.where(equal, self._prefix_costs(tie), np.inf)
            lowest = float(among_equals.min())
            equal = among_equals <= lowest + TIE * abs(lowest)
        count = len(values) - 1 - int(equal[::-1].argmax())  # of those left the one with most layers on the device
        return Solution((np.arange(len(self.model.layers)) >= count).astype(np.intp), compress, least)

    def _prefix_costs(self, prices: ArcPrices) -> Floats:
        """By number of first layers, 0 to all: the cost of them on the device and of the rest beyond the link."""
        here = np.concatenate([[0.0], np.cumsum(prices.layers[0])])
        beyond = np.concatenate([np.cumsum(prices.layers[1][::-1])[::-1], [0.0]])
        costs: Floats = here + beyond + self.model.crossing_after(prices.sending[0])
        return costs


@dataclass(frozen=True, slots=True)
class _LinkGraph:
    """The nodes and arcs of one link's copy. Arcs that pay for a tensor come first, infinite ones after them."""

    nodes: int
    tails: Ints
    heads: Ints
    paying: Ints
    """By paying arc: the tensor it pays for."""
    input_tensor: Ints
    """Graph inputs that some layer reads."""
    input_node: Ints
    """By `input_tensor`: the node that pays for it when it is on the sink side."""
    own: Ints
    """By tensor: its own node, or that of its only reader, or some layer where nothing reads it."""

    @property
    def arcs(self) -> int:
        """Number of arcs."""
        return len(self.tails)

    @classmethod
    def of(cls, model: CostModel) -> _LinkGraph:
        """The graph of a cost model: a node per layer, and one per tensor that several layers read."""
        layers, tensors = len(model.layers), len(model.tensors)
        readers = np.bincount(model.read_tensor, minlength=tensors)
        own = np.zeros(tensors, dtype=np.intp)
        own[model.read_tensor] = model.read_layer
        # A tensor is paid for once, however many layers read it: it gets a node of its own between its maker and its
        # readers, and only the arc into that node carries the cost (DADS, section IV).
        shared = readers > 1
        own[shared] = layers + np.arange(np.count_nonzero(shared))
        makes = model.maker >= 0
        paying = np.flatnonzero(makes & (readers > 0))
        inputs = np.flatnonzero(~makes & (readers > 0))
        fan = shared[model.read_tensor]
        back = makes[model.read_tensor]
        return cls(
            nodes=layers + int(np.count_nonzero(shared)),
            # An arc is cut when its tail is on the device's side and its head is not. In this order:
            # maker to the tensor's own node, cut where the tensor crosses, at its cost;
            # from there to each reader, infinite: a reader beyond the link takes the tensor's node along;
            # reader to maker, infinite, since nothing returns: a reader before the link holds the maker there.
            tails=np.concatenate([model.maker[paying], own[model.read_tensor[fan]], model.read_layer[back]]),
            heads=np.concatenate([own[paying], model.read_layer[fan], model.maker[model.read_tensor[back]]]),
            paying=paying,
            input_tensor=inputs,
            input_node=own[inputs],
            own=own,
        )
