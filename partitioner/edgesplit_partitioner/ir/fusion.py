"""Grouping operators into layers, independent of the model's format: union-find, merging of cyclic groups, unique
names, topological order, and the layer graph of the groups."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from edgesplit.errors import ModelRefused
from edgesplit.input_spec import INPUT_LAYER
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, OperatorWork, Tensor
from edgesplit_partitioner.ir.tensor_types import TensorType


class IndexedGraph(Protocol):
    """A model's graph with its operators and tensors indexed; an operator is identified by its position."""

    constant_positions: set[int]
    """Positions of the operators that compute constants."""
    reads: list[list[str]]
    """Per operator, the tensors that it reads, without constants."""
    readers: dict[str, list[int]]
    """Per tensor, the positions of the operators that read it, without constants."""
    writer: dict[str, int]
    """Per tensor, the position of the operator that writes it."""

    @property
    def inputs(self) -> Sequence[str]:
        """Names of the graph's inputs, in order."""
        ...

    @property
    def outputs(self) -> Collection[str]:
        """Names of the graph's outputs, in order."""
        ...

    def inputs_of(self, position: int) -> Sequence[str]:
        """Names of all the operator's inputs, constants too."""
        ...

    def outputs_of(self, position: int) -> Sequence[str]:
        """Names of the operator's outputs."""
        ...

    def weights_of(self, positions: Sequence[int]) -> tuple[tuple[str, ...], int]:
        """Names and bytes of the weights that these operators use."""
        ...

    def layer_name(self, positions: Sequence[int]) -> str:
        """A name for the layer of these operators."""
        ...


class UnionFind:
    """Disjoint sets of nodes (union-find with path halving); the representative of a set is its smallest node."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def __len__(self) -> int:
        return len(self._parent)

    def find(self, node: int) -> int:
        """The representative of the set that contains the node."""
        while self._parent[node] != node:
            # Path halving (Tarjan and van Leeuwen, J. ACM 31, 1984): each visited node is linked to its grandparent.
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def union(self, *nodes: int) -> None:
        """Merge the sets of all given nodes into one."""
        representatives = sorted({self.find(node) for node in nodes})
        for representative in representatives[1:]:
            self._parent[representative] = representatives[0]


def merge_cyclic_groups(groups: UnionFind, writer: Mapping[str, int], readers: Mapping[str, Sequence[int]]) -> None:
    """Merge groups that depend on each other in a cycle, so that the graph of groups becomes acyclic.

    `writer` is the node that writes each tensor, `readers` the nodes that read it.
    """
    edges = {
        (groups.find(writer[name]), groups.find(reader))
        for name, nodes in readers.items()
        if name in writer
        for reader in nodes
    }
    if not edges:
        return
    from scipy.sparse import coo_matrix  # imported here: scipy takes longer to load than most models to analyse
    from scipy.sparse.csgraph import connected_components

    source, target = np.array(sorted(edges)).T
    matrix = coo_matrix((np.ones(len(edges)), (source, target)), shape=(len(groups), len(groups)))
    _, component = connected_components(matrix, directed=True, connection="strong")
    # Groups on a common cycle are one strongly connected component of the graph of groups.
    group_of_component: dict[int, int] = {}
    for node in sorted({group for edge in edges for group in edge}):
        groups.union(group_of_component.setdefault(int(component[node]), node), node)


def constant_ancestors(
    nodes: Iterable[int], reads: Callable[[int], Iterable[str]], writer: Mapping[str, int], fixed: Container[int]
) -> set[int]:
    """The nodes among `fixed` that compute the constants which `nodes` use, directly or through others of `fixed`.
    `reads` returns the tensors that a node reads."""
    needed: set[int] = set()
    pending = list(nodes)
    while pending:
        for tensor in reads(pending.pop()):
            node = writer.get(tensor)
            if node is not None and node in fixed and node not in needed:
                needed.add(node)
                pending.append(node)
    return needed


def unique_names(bases: Iterable[str]) -> list[str]:
    """Unique names in the order of `bases`: later repeats get `-2`, `-3`, ... appended. `input` is reserved for the
    input layer."""
    used = {INPUT_LAYER}
    names = []
    for base in bases:
        name, count = base, 1
        while name in used:
            count += 1
            name = f"{base}-{count}"
        used.add(name)
        names.append(name)
    return names


def topological_order(dependencies_of: Mapping[int, set[int]]) -> list[int]:
    """The keys in an order in which each comes after the keys that it depends on; the smallest first where there is a
    choice. ModelRefused where the dependencies form a cycle."""
    readers: dict[int, list[int]] = {node: [] for node in dependencies_of}
    for node, dependencies in dependencies_of.items():
        for dependency in dependencies:
            readers[dependency].append(node)
    missing_count = {node: len(dependencies) for node, dependencies in dependencies_of.items()}
    ready = [node for node, count in missing_count.items() if not count]
    heapq.heapify(ready)  # Kahn's algorithm (CACM 5, 1962), with a heap so that the order is deterministic
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for reader in readers[node]:
            missing_count[reader] -= 1
            if not missing_count[reader]:
                heapq.heappush(ready, reader)
    if len(order) != len(dependencies_of):
        raise ModelRefused("the model's operators depend on each other in a circle")
    return order


def fused_layers(
    graph: IndexedGraph,
    groups: UnionFind,
    types: Mapping[str, TensorType],
    work: Callable[[int], OperatorWork],
    raw_tensors: frozenset[str],
) -> LayerGraph:
    """The layer graph in which each group of operators is a layer. `work` returns the work of the operator at a
    position; `raw_tensors` are tensors that hold raw input data, inner ones included."""
    members: dict[int, list[int]] = {}
    for position in range(len(graph.reads)):
        if position not in graph.constant_positions:
            members.setdefault(groups.find(position), []).append(position)
    sources = {
        leader: {
            groups.find(graph.writer[name])
            for position in positions
            for name in graph.reads[position]
            if name in graph.writer
        }
        - {leader}
        for leader, positions in members.items()
    }
    order = topological_order(sources)
    names = unique_names(graph.layer_name(members[leader]) for leader in order)
    layers = tuple(_layer(graph, name, members[leader], work) for name, leader in zip(names, order, strict=True))
    between = (*graph.inputs, *(name for layer in layers for name in layer.writes))
    return LayerGraph(
        layers=layers,
        tensors={name: Tensor(name, types[name].datatype, types[name].shape, types[name].bytes) for name in between},
        inputs=tuple(graph.inputs),
        outputs=tuple(graph.outputs),
        raw_tensors=raw_tensors & frozenset(between),
    )


def _layer(graph: IndexedGraph, name: str, positions: list[int], work: Callable[[int], OperatorWork]) -> Layer:
    """The layer of these operators and of those that compute their constants."""
    own = {tensor for position in positions for tensor in graph.outputs_of(position)}
    inside, outputs = set(positions), set(graph.outputs)
    nodes = sorted(inside | constant_ancestors(positions, graph.inputs_of, graph.writer, graph.constant_positions))
    weights, weight_bytes = graph.weights_of(nodes)
    read = dict.fromkeys(tensor for position in positions for tensor in graph.reads[position] if tensor not in own)
    return Layer(
        name=name,
        nodes=tuple(nodes),
        reads=tuple(read),
        writes=tuple(
            tensor
            for position in positions
            for tensor in graph.outputs_of(position)
            if tensor in outputs or set(graph.readers.get(tensor, ())) - inside
        ),
        weights=weights,
        weight_bytes=weight_bytes,
        work=tuple(work(position) for position in nodes),
    )
