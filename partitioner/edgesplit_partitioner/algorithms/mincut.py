"""Minimum cuts of a directed network in floats, with a lower bound that proves them and a fixed choice among equals.

`FlowNetwork` contains the structure; each call of `minimum` brings its capacities. scipy's maximum flow takes integers
below 2^31 (a capacity of 2^40 silently gave 0), so:

1. Capacities are clipped at the value of a cut that is already known and scaled by a power of two.
2. The integer flow is subtracted, and what it leaves is solved again at a finer scale until nothing measurable is left.
3. Any flow found is feasible in floats too, so its value is a lower bound whatever was rounded (weak duality).
4. Of the cuts that cost the same, the wanted one is found in the residual network of the flow (Picard and Queyranne,
   "On the structure of all minimum cuts in a network and applications", 1980).

What the nodes stand for is defined by the caller, see `edgesplit_partitioner.formulation.mincut_problem`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgesplit.lazy_import import lazy_import
from edgesplit_partitioner.arrays import TIE, Floats, Ints, Mask

if TYPE_CHECKING:
    from scipy import sparse
    from scipy.sparse import csgraph
else:  # a controller has started before its first plan, and a command that solves nothing loads no solver
    sparse, csgraph = lazy_import("scipy.sparse"), lazy_import("scipy.sparse.csgraph")

_KNOWN_CUT = 2**29
"""What the known cut may be scaled to, so no flow is larger. A capacity is at most one more, infinity included: such an
arc is never full, and its residual, at most a capacity plus a flow, stays below 2^31."""
_ROUNDS = 3
"""How often what rounding left is solved again, at most."""
_CONTRACTION_PAYS = 0.8
"""Nodes are contracted where at most this fraction of them is left."""
_NEGLIGIBLE = 1e-150
"""Capacities below this are 0: a scale for them would overflow."""


@dataclass(frozen=True, slots=True)
class Capacities:
    """What a cut pays. Infinity forbids."""

    source: Floats
    """By node: of the arc from the source, paid where the node is on the sink's side."""
    sink: Floats
    """By node: of the arc to the sink, paid where the node is on the source's side."""
    arcs: Floats
    """By arc, paid where its tail is on the source's side and its head on the sink's."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A minimum cut: which nodes are on the source's side, and a value that no cut is below."""

    source_side: Mask
    lower_bound: float


@dataclass(frozen=True, slots=True)
class _Flow:
    """A maximum flow: what each arc has left, the cut it shows, its value and what the cut costs above it."""

    residual: Floats
    source_side: Mask
    value: float
    left: float


class FlowNetwork:
    """Nodes 0..n-1 between a source and a sink, and the arcs between them."""

    def __init__(self, nodes: int, tails: Ints, heads: Ints) -> None:
        self.nodes = nodes
        self._ends = tails, heads
        self._source, self._sink, self._size = nodes, nodes + 1, nodes + 2
        inner = np.arange(nodes)
        forward = self._keys(
            np.concatenate([tails, np.full(nodes, self._source), inner]),
            np.concatenate([heads, inner, np.full(nodes, self._sink)]),
        )
        # Every arc gets its reverse, parallel arcs become one, and all stand in the order of a compressed sparse row
        # matrix: the structure is sorted once, and a solve only fills in numbers.
        backward = (forward % self._size) * self._size + forward // self._size
        keys, places = np.unique(np.concatenate([forward, backward]), return_inverse=True)
        self._places = places[: len(forward)]
        self._tails, self._heads = keys // self._size, keys % self._size
        self._reverse = np.searchsorted(keys, self._keys(self._heads, self._tails))
        self._indices = self._heads.astype(np.int32)
        self._indptr = np.searchsorted(self._tails, np.arange(self._size + 1)).astype(np.int32)

    def _keys(self, tails: Ints, heads: Ints) -> Ints:
        """One number per arc; sorted by it, arcs stand by tail, then by head."""
        return tails.astype(np.int64) * self._size + heads

    def value(self, capacities: Capacities, source_side: Mask) -> float:
        """What a cut pays; infinite if it is forbidden."""
        return self._crossing(self._by_arc(capacities), source_side)

    def minimum(self, capacities: Capacities, known: Mask, *ties: Capacities, exact: bool = True) -> Cut:
        """A cut of least value. `known` is any cut that is allowed.

        Among equals the least by each of `ties` in turn, and of those left the one with most nodes on the source's
        side. Without `exact` a cut within about 1e-8 of the least is found, and which of equals is undefined.
        """
        netted, constant = _netted(capacities)
        by_arc = self._by_arc(netted)
        groups = self._inseparable(by_arc, known)
        if groups.max() + 1 < _CONTRACTION_PAYS * self.nodes:
            return self._minimum_of_groups(groups, capacities, known, ties, exact)
        flow = self._maximum_flow(by_arc, known, _ROUNDS if exact else 1)
        bound = constant + flow.value
        if not exact:
            return Cut(flow.source_side, bound)
        return Cut(self._choose_among_equals(flow, TIE * bound, ties), bound)

    def _inseparable(self, by_arc: Floats, known: Mask) -> Ints:
        """By node, its group: nodes that no cut as good as `known` puts on different sides.

        An arc that alone costs more than the known cut is cut by no better one, so its head is on the source's side
        where its tail is. Nodes on a circle of such arcs (a strongly connected component) are all on one side.
        """
        unpayable = by_arc > self._crossing(by_arc, known) * (1 + 1e-9)
        _, labels = csgraph.connected_components(self._with_arcs(unpayable), connection="strong")
        groups: Ints = np.unique(labels[: self.nodes], return_inverse=True)[1]
        return groups

    def _minimum_of_groups(
        self, groups: Ints, capacities: Capacities, known: Mask, ties: tuple[Capacities, ...], exact: bool
    ) -> Cut:
        """The minimum with each group contracted to one node."""
        nodes = int(groups.max()) + 1
        tails, heads = (groups[end] for end in self._ends)
        apart = tails != heads

        def contracted(all_arcs: Capacities) -> Capacities:
            source, sink = _summed(groups, all_arcs.source, nodes), _summed(groups, all_arcs.sink, nodes)
            return Capacities(source, sink, all_arcs.arcs[apart])

        side = np.zeros(nodes, dtype=np.bool_)
        side[groups] = known
        smaller = FlowNetwork(nodes, tails[apart], heads[apart])
        cut = smaller.minimum(contracted(capacities), side, *map(contracted, ties), exact=exact)
        return Cut(cut.source_side[groups], cut.lower_bound)

    def _by_arc(self, capacities: Capacities) -> Floats:
        """By arc of the structure, reverse arcs and those of source and sink included."""
        every = np.concatenate([capacities.arcs, capacities.source, capacities.sink])
        return _summed(self._places, every, len(self._tails))

    def _crossing(self, by_arc: Floats, source_side: Mask) -> float:
        side = np.append(source_side, [True, False])
        return float(by_arc[side[self._tails] & ~side[self._heads]].sum())

    def _maximum_flow(self, by_arc: Floats, known: Mask, rounds: int) -> _Flow:
        """A flow in integers, then one in what rounding left, at most `rounds` times."""
        residual, side, value = by_arc, known, 0.0
        left = worst = self._crossing(by_arc, known)
        for _ in range(rounds):
            if left <= max(worst * 1e-16, _NEGLIGIBLE):
                break
            # A power of two only shifts the exponent: scaling there and back rounds nothing. What is left is at most
            # the value of the cut shown so far, so each round resolves about 2^29 times finer than the one before.
            scale = math.ldexp(1.0, math.frexp(_KNOWN_CUT / left)[1] - 1)
            whole = np.minimum(residual * scale, _KNOWN_CUT + 1).astype(np.int32)
            solved = csgraph.maximum_flow(self._matrix(whole), self._source, self._sink)
            moved = solved.flow.data
            residual = np.maximum(residual - moved / scale, 0.0)
            value += float(solved.flow_value) / scale
            side = self._from_source(whole > moved)[: self.nodes]
            left = self._crossing(residual, side)
        return _Flow(residual, side, value, left)

    def _choose_among_equals(self, flow: _Flow, tolerance: float, ties: tuple[Capacities, ...]) -> Mask:
        """The cut to take of all whose value is that of the flow.

        Minimum cuts are exactly those that cut no arc with anything left in the residual network (Picard and Queyranne
        1980), so the next tie is minimised with these arcs forbidden.
        """
        passable = flow.residual > tolerance
        to_sink = self._to_sink(passable)
        # The flow is not at its maximum as far as the tolerance tells: the residual network shows no minimum cuts.
        if flow.left > tolerance or to_sink[self._source]:
            return flow.source_side
        # The largest source side is everything that cannot reach the sink, the smallest what the source reaches.
        widest: Mask = ~to_sink[: self.nodes]
        smallest = self._from_source(passable)[: self.nodes]
        if not ties or np.array_equal(smallest, widest):
            return widest
        by_arc = np.where(passable, np.inf, self._by_arc(ties[0]))
        start = min((smallest, widest), key=lambda side: self._crossing(by_arc, side))
        narrower = self._maximum_flow(by_arc, start, _ROUNDS)
        return self._choose_among_equals(narrower, TIE * narrower.value, ties[1:])

    def _matrix(self, data: npt.NDArray[np.int32]) -> sparse.csr_array:
        return sparse.csr_array((data, self._indices, self._indptr), shape=(self._size, self._size))

    def _from_source(self, passable: Mask) -> Mask:
        return self._reached(passable, self._source)

    def _to_sink(self, passable: Mask) -> Mask:
        return self._reached(passable[self._reverse], self._sink)

    def _reached(self, passable: Mask, start: int) -> Mask:
        """Nodes that can be reached from `start` over passable arcs."""
        graph = self._with_arcs(passable)
        reached = np.zeros(self._size, dtype=np.bool_)
        reached[csgraph.breadth_first_order(graph, start, return_predecessors=False)] = True
        return reached

    def _with_arcs(self, chosen: Mask) -> sparse.csr_array:
        """The structure with only some of its arcs."""
        indptr = np.concatenate([[0], np.cumsum(chosen)])[self._indptr]
        indices = self._indices[chosen]
        return sparse.csr_array((np.ones(len(indices)), indices, indptr), shape=(self._size, self._size))


def _summed(groups: Ints, values: Floats, length: int) -> Floats:
    """By group, the sum of its values."""
    return np.bincount(groups, values, length).astype(np.float64, copy=False)


def _netted(capacities: Capacities) -> tuple[Capacities, float]:
    """Each node's capacities without what it pays on either side, and the sum of that."""
    unavoidable = np.minimum(capacities.source, capacities.sink)
    netted = Capacities(capacities.source - unavoidable, capacities.sink - unavoidable, capacities.arcs)
    return netted, float(unavoidable.sum())
