"""Minimum cuts of a directed network in floats, with a bound that proves them and a fixed choice among equals.

`Network` keeps the structure; each `minimum` brings its costs. scipy's maximum flow takes integers below 2^31 (a
capacity of 2^40 silently gave 0), so: costs are clipped at the value of a cut already known and scaled by a power of
two, and what an integer flow leaves is solved again at a finer scale until nothing measurable is left. Any flow
found is feasible in floats too, so its value is a lower bound whatever was rounded.
What the nodes mean is left to `problem`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgesplit.lazy_import import later

if TYPE_CHECKING:
    from scipy import sparse
    from scipy.sparse import csgraph
else:  # a controller has started before its first plan, and a command that solves nothing loads no solver
    sparse, csgraph = later("scipy.sparse"), later("scipy.sparse.csgraph")

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

TIE = 1e-12
"""Two cuts whose values differ by less than this part are equal: the noise of adding doubles."""
_TOP = 2**29
"""What the known cut may be scaled to, so no flow is larger. A capacity is at most one more, infinity included: such an
arc is never full, and its residual, at most a capacity plus a flow, stays below 2^31."""
_ROUNDS = 3
_WORTHWHILE = 0.8
"""Grouping nodes pays if at most this part of them is left."""
_NOTHING = 1e-150
"""Charges below this are 0: a scale for them would overflow."""


@dataclass(frozen=True, slots=True)
class Charges:
    """What a cut pays. Infinity forbids."""

    source: Floats
    """Per node, paid where the node is on the sink's side."""
    sink: Floats
    """Per node, paid where the node is on the source's side."""
    arcs: Floats
    """Per arc, paid where its tail is on the source's side and its head on the sink's."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A minimum cut: which nodes are on the source's side, and a value that no cut can be below."""

    source_side: Mask
    lower_bound: float


@dataclass(frozen=True, slots=True)
class _Flow:
    """A maximum flow: what each arc has left, the cut it shows, its value and what the cut costs above it."""

    residual: Floats
    source_side: Mask
    value: float
    left: float


class Network:
    """Nodes 0..n-1 between a source and a sink, and the arcs between them."""

    def __init__(self, nodes: int, tails: Ints, heads: Ints) -> None:
        self.nodes = nodes
        self._arcs = tails, heads
        self._source, self._sink, self._size = nodes, nodes + 1, nodes + 2
        inner = np.arange(nodes)
        forward = self._keys(
            np.concatenate([tails, np.full(nodes, self._source), inner]),
            np.concatenate([heads, inner, np.full(nodes, self._sink)]),
        )
        backward = (forward % self._size) * self._size + forward // self._size
        keys, places = np.unique(np.concatenate([forward, backward]), return_inverse=True)
        self._places = places[: len(forward)]
        self._tails, self._heads = keys // self._size, keys % self._size
        self._reverse = np.searchsorted(keys, self._keys(self._heads, self._tails))
        self._indices = self._heads.astype(np.int32)
        self._indptr = np.searchsorted(self._tails, np.arange(self._size + 1)).astype(np.int32)

    def _keys(self, tails: Ints, heads: Ints) -> Ints:
        """One number per arc; in their order, arcs stand by tail, then by head."""
        return tails.astype(np.int64) * self._size + heads

    def value(self, charges: Charges, source_side: Mask) -> float:
        """What a cut pays; infinite if it is forbidden."""
        return self._crossing(self._capacities(charges), source_side)

    def minimum(self, charges: Charges, known: Mask, *ties: Charges, exact: bool = True) -> Cut:
        """A cut of least charge. `known` is any cut that is allowed.

        Among equals the least by each of `ties` in turn, and of those left the one with most nodes on the source's
        side. Without `exact` a cut within about 1e-8 of the least is enough, and ties fall anyhow.
        """
        netted, constant = _netted(charges)
        capacities = self._capacities(netted)
        groups = self._inseparable(capacities, known)
        if groups.max() + 1 < _WORTHWHILE * self.nodes:
            return self._minimum_of_groups(groups, charges, known, ties, exact)
        flow = self._maximum_flow(capacities, known, _ROUNDS if exact else 1)
        bound = constant + flow.value
        if not exact:
            return Cut(flow.source_side, bound)
        return Cut(self._among_equals(flow, TIE * bound, ties), bound)

    def _inseparable(self, capacities: Floats, known: Mask) -> Ints:
        """Per node, its group: nodes that no cut as good as `known` puts on different sides.

        Groups are tied by arcs in a circle, each charging more than the whole of that cut.
        """
        unpayable = capacities > self._crossing(capacities, known) * (1 + 1e-9)
        _, labels = csgraph.connected_components(self._kept(unpayable), connection="strong")
        groups: Ints = np.unique(labels[: self.nodes], return_inverse=True)[1]
        return groups

    def _minimum_of_groups(
        self, groups: Ints, charges: Charges, known: Mask, ties: tuple[Charges, ...], exact: bool
    ) -> Cut:
        """The minimum with each group as one node."""
        nodes = int(groups.max()) + 1
        tails, heads = (groups[end] for end in self._arcs)
        apart = tails != heads

        def grouped(one: Charges) -> Charges:
            return Charges(_summed(groups, one.source, nodes), _summed(groups, one.sink, nodes), one.arcs[apart])

        side = np.zeros(nodes, dtype=np.bool_)
        side[groups] = known
        smaller = Network(nodes, tails[apart], heads[apart])
        cut = smaller.minimum(grouped(charges), side, *map(grouped, ties), exact=exact)
        return Cut(cut.source_side[groups], cut.lower_bound)

    def _capacities(self, charges: Charges) -> Floats:
        """Per arc of the structure, reverse arcs included."""
        every = np.concatenate([charges.arcs, charges.source, charges.sink])
        return _summed(self._places, every, len(self._tails))

    def _crossing(self, capacities: Floats, source_side: Mask) -> float:
        side = np.append(source_side, [True, False])
        return float(capacities[side[self._tails] & ~side[self._heads]].sum())

    def _maximum_flow(self, capacities: Floats, known: Mask, rounds: int) -> _Flow:
        """Solve, then solve what rounding left, at most `rounds` times."""
        residual, side, value = capacities, known, 0.0
        left = worst = self._crossing(capacities, known)
        for _ in range(rounds):
            if left <= max(worst * 1e-16, _NOTHING):
                break
            scale = math.ldexp(1.0, math.frexp(_TOP / left)[1] - 1)
            whole = np.minimum(residual * scale, _TOP + 1).astype(np.int32)
            found = csgraph.maximum_flow(self._matrix(whole), self._source, self._sink)
            moved = found.flow.data
            residual = np.maximum(residual - moved / scale, 0.0)
            value += float(found.flow_value) / scale
            side = self._from_source(whole > moved)[: self.nodes]
            left = self._crossing(residual, side)
        return _Flow(residual, side, value, left)

    def _among_equals(self, flow: _Flow, tolerance: float, ties: tuple[Charges, ...]) -> Mask:
        """The cut to take of all whose value is that of the flow.

        Equal cuts are those that cross no arc with anything left, so the next charge is minimised with these forbidden.
        """
        passable = flow.residual > tolerance
        to_sink = self._to_sink(passable)
        if flow.left > tolerance or to_sink[self._source]:
            return flow.source_side
        widest: Mask = ~to_sink[: self.nodes]
        only = self._from_source(passable)[: self.nodes]
        if not ties or np.array_equal(only, widest):
            return widest
        capacities = np.where(passable, np.inf, self._capacities(ties[0]))
        start = min((only, widest), key=lambda side: self._crossing(capacities, side))
        narrower = self._maximum_flow(capacities, start, _ROUNDS)
        return self._among_equals(narrower, TIE * narrower.value, ties[1:])

    def _matrix(self, data: npt.NDArray[np.int32]) -> sparse.csr_array:
        return sparse.csr_array((data, self._indices, self._indptr), shape=(self._size, self._size))

    def _from_source(self, passable: Mask) -> Mask:
        return self._reached(passable, self._source)

    def _to_sink(self, passable: Mask) -> Mask:
        return self._reached(passable[self._reverse], self._sink)

    def _reached(self, passable: Mask, start: int) -> Mask:
        """Nodes that can be reached from `start` over passable arcs."""
        graph = self._kept(passable)
        reached = np.zeros(self._size, dtype=np.bool_)
        reached[csgraph.breadth_first_order(graph, start, return_predecessors=False)] = True
        return reached

    def _kept(self, passable: Mask) -> sparse.csr_array:
        """The structure with only some of its arcs."""
        indptr = np.concatenate([[0], np.cumsum(passable)])[self._indptr]
        kept = self._indices[passable]
        return sparse.csr_array((np.ones(len(kept)), kept, indptr), shape=(self._size, self._size))


def _summed(places: Ints, values: Floats, length: int) -> Floats:
    """Per place, the sum of its values."""
    return np.bincount(places, values, length).astype(np.float64, copy=False)


def _netted(charges: Charges) -> tuple[Charges, float]:
    """Each node's charges without what it pays on either side, and the sum of that."""
    unavoidable = np.minimum(charges.source, charges.sink)
    netted = Charges(charges.source - unavoidable, charges.sink - unavoidable, charges.arcs)
    return netted, float(unavoidable.sum())
