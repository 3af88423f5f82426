"""Operators into layers: groups that a runtime runs as one, between which a cut may go.

A convolution or matrix product keeps the normalisation and activation that only it feeds; If, Loop and Scan are one
layer with what they capture; what depends on weights alone is part of every layer that uses it. Contracting a node
into its only reader, or into its only source, never makes a circle; where a type that cannot travel forces more
together, every circle that arises is closed into one layer. What a layer costs is `work`'s to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx

from edgesplit_partitioner.ir.fusion import Groups, close_circles, fixed_before, told_apart, topological
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, Tensor, Work
from edgesplit_partitioner.ir.tensor_types import ITEM_BYTES, TensorType
from edgesplit_partitioner.onnx_format import nodes as onnx_nodes
from edgesplit_partitioner.onnx_format.nodes import DATATYPES
from edgesplit_partitioner.onnx_format.operator_work import work_of

PRODUCTS = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
    | {"QGemm", "FusedConv", "FusedGemm", "FusedMatMul", "DynamicQuantizeMatMul"}
)
LEADERS = PRODUCTS | {"Add", "Sum", "BatchNormalization", "InstanceNormalization", "GroupNormalization"}
"""Operators that keep the elementwise ones after them."""
UNARY = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Elu", "Selu", "Celu", "Mish"}
    | {"Softplus", "Softsign", "ThresholdedRelu", "Gelu", "QuickGelu", "Swish", "Erf", "Identity", "Dropout", "Cast"}
    | {"BatchNormalization"}
)
BINARY = frozenset({"Add", "Sub", "Mul", "Div"})
"""Join the layer before them where the other operand is a constant."""
GATE_LENGTH = 4
"""Longest chain x -> f(x) that makes a gate x * f(x): erf's form of Gelu has Div, Erf, Add."""

RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
)

MOVES = frozenset(
    {"Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout", "Pad", "Slice", "Split"}
    | {"Concat", "Gather", "Resize", "Upsample", "SpaceToDepth", "DepthToSpace", "Crop", "Expand", "Tile"}
    | {"QuantizeLinear", "DequantizeLinear", "Clip", "Neg", "BatchNormalization"}
    | BINARY
)
"""Applied to a raw input with nothing but constants beside it, these leave the raw input in sight."""


@dataclass(slots=True)
class Facts:
    """A graph, looked up by name."""

    graph: onnx.GraphProto
    weights: dict[str, onnx.TensorProto] = field(init=False)
    constants: set[str] = field(init=False)
    """Weights and everything computed from weights alone."""
    fixed: set[int] = field(default_factory=set)
    """Nodes that compute constants."""
    reads: list[list[str]] = field(init=False)
    """Per node, constants left out."""
    readers: dict[str, list[int]] = field(default_factory=dict)
    """Per tensor, constants left out."""
    writer: dict[str, int] = field(default_factory=dict)
    outputs: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = onnx_nodes.initializers(self.graph)
        self.constants = onnx_nodes.constant_names(self.graph)
        self.outputs = {one.name for one in self.graph.output}
        self.reads = []
        for place, node in enumerate(self.graph.node):
            own = [name for name in onnx_nodes.reads(node) if name not in self.constants]
            written = onnx_nodes.writes(node)
            self.reads.append(own)
            self.writer.update(dict.fromkeys(written, place))
            if not own and not _draws(node) and not self.outputs & set(written):
                self.fixed.add(place)
                self.constants.update(written)
            for name in own:
                self.readers.setdefault(name, []).append(place)

    def op(self, place: int) -> str:
        """Type of the operator at a place."""
        operator: str = self.graph.node[place].op_type
        return operator

    def only_reader(self, tensor: str) -> int | None:
        """The one node that sees `tensor`, or None if several do, or the model's caller does."""
        readers = self.readers.get(tensor, [])
        return readers[0] if len(readers) == 1 and tensor not in self.outputs else None

    def follows(self, place: int) -> str | None:
        """The one tensor that this elementwise node works on, or None if it is no such node."""
        own = self.reads[place]
        if len(own) != 1 or not (self.op(place) in UNARY or self.op(place) in BINARY):
            return None
        uses = sum(name == own[0] for name in self.graph.node[place].input)
        return own[0] if uses == 1 else None


def _draws(node: onnx.NodeProto) -> bool:
    """Whether the node, or one in its subgraphs, draws random numbers: run twice, it answers twice."""
    inside = (
        one for graph in onnx_nodes.subgraphs(node) for inner in onnx_nodes.all_graphs(graph) for one in inner.node
    )
    return any(one.op_type in RANDOM for one in (node, *inside))


def layer_graph(model: onnx.ModelProto, types: Mapping[str, TensorType]) -> LayerGraph:
    """The layers of an optimised, tidied model; `types` knows each of its tensors."""
    facts = Facts(model.graph)
    groups = group_nodes(facts, types)
    members: dict[int, list[int]] = {}
    for place in range(len(model.graph.node)):
        if place not in facts.fixed:
            members.setdefault(groups.find(place), []).append(place)
    order = topological({leader: _sources(facts, groups, leader, members[leader]) for leader in members})
    names = told_apart(_layer_name(facts, members[leader]) for leader in order)
    look_up = _LookUp(facts, types)
    layers = tuple(_layer(facts, name, members[leader], look_up) for name, leader in zip(names, order, strict=True))
    inputs = tuple(one.name for one in model.graph.input)
    between = (*inputs, *(name for layer in layers for name in layer.writes))
    return LayerGraph(
        layers=layers,
        tensors={name: Tensor(name, types[name].datatype, types[name].shape, types[name].bytes) for name in between},
        inputs=inputs,
        outputs=tuple(one.name for one in model.graph.output),
        raw=_raw(facts, inputs) & frozenset(between),
    )


def group_nodes(facts: Facts, types: Mapping[str, TensorType]) -> Groups:
    """Who runs together with whom."""
    groups = Groups(len(facts.graph.node))
    leads = [facts.op(place) in LEADERS for place in range(len(facts.graph.node))]
    for place in range(len(facts.graph.node)):
        if place not in facts.fixed:
            _join_gate(facts, groups, leads, place)
            _join_chain(facts, groups, leads, place)
            _join_quantised(facts, groups, place)
    for name, readers in facts.readers.items():
        if name in facts.writer and not types[name].datatype:
            groups.join(facts.writer[name], *readers)
    close_circles(groups, facts.writer, facts.readers)
    return groups


def _join_chain(facts: Facts, groups: Groups, leads: list[bool], place: int) -> None:
    """An elementwise node joins the product or sum whose result only it reads."""
    tensor = facts.follows(place)
    if tensor is None or tensor not in facts.writer or facts.only_reader(tensor) is None:
        return
    source = facts.writer[tensor]
    if leads[source] and source not in facts.fixed:
        groups.join(source, place)
        leads[place] = True


def _join_gate(facts: Facts, groups: Groups, leads: list[bool], place: int) -> None:
    """x * f(x), f a short chain that nobody else reads (SiLU, HardSwish, Mish, Gelu): one with x's layer if it may."""
    own = facts.reads[place]
    if facts.op(place) != "Mul" or len(own) != 2:
        return
    for tensor, gated in (own, own[::-1]):
        chain = _chain_back(facts, gated, tensor)
        if chain is None:
            continue
        groups.join(place, *chain)
        source = facts.writer.get(tensor)
        alone = set(facts.readers[tensor]) == {place, chain[-1]} and tensor not in facts.outputs
        if alone and source is not None and leads[source]:
            groups.join(source, place)
            leads[place] = True
        return


def _chain_back(facts: Facts, tensor: str, start: str) -> list[int] | None:
    """Nodes from `tensor` back to `start`, each elementwise with one reader; None if there is no such chain."""
    chain: list[int] = []
    while tensor != start:
        place = facts.writer.get(tensor)
        if place is None or facts.only_reader(tensor) is None or len(chain) == GATE_LENGTH:
            return None
        before = facts.follows(place)
        if before is None:
            return None
        chain.append(place)
        tensor = before
    return chain or None


def _join_quantised(facts: Facts, groups: Groups, place: int) -> None:
    """DequantizeLinear runs with its only reader, QuantizeLinear with what only it reads: int8 crosses, not float."""
    operator = facts.op(place)
    if operator == "DequantizeLinear" and facts.reads[place]:
        reader = facts.only_reader(facts.graph.node[place].output[0])
        if reader is not None:
            groups.join(place, reader)
    elif operator == "QuantizeLinear" and len(facts.reads[place]) == 1:
        tensor = facts.reads[place][0]
        if tensor in facts.writer and facts.only_reader(tensor) is not None:
            groups.join(place, facts.writer[tensor])


def _sources(facts: Facts, groups: Groups, leader: int, places: Iterable[int]) -> set[int]:
    """Leaders of the groups that this group reads from."""
    tensors = (name for place in places for name in facts.reads[place])
    return {groups.find(facts.writer[name]) for name in tensors if name in facts.writer} - {leader}


@dataclass(frozen=True, slots=True)
class _LookUp:
    """Sizes of tensors and weights, as `work_of` asks for them."""

    facts: Facts
    types: Mapping[str, TensorType]

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name in self.facts.weights:
            return tuple(self.facts.weights[name].dims)
        known = self.types.get(name)
        return None if known is None else known.seen

    def item_bytes(self, name: str) -> int:
        if name in self.facts.weights:
            return ITEM_BYTES.get(DATATYPES.get(self.facts.weights[name].data_type, ""), 1)
        known = self.types.get(name)
        return 1 if known is None else known.item_bytes

    def is_weight(self, name: str) -> bool:
        return name in self.facts.constants

    def work(self, place: int) -> Work:
        return work_of(self.facts.graph.node[place], self.shape, self.item_bytes, self.is_weight)


def _layer(facts: Facts, name: str, places: list[int], look_up: _LookUp) -> Layer:
    own = {tensor for place in places for tensor in onnx_nodes.writes(facts.graph.node[place])}
    inside = set(places)
    computing = fixed_before(places, lambda place: onnx_nodes.reads(facts.graph.node[place]), facts.writer, facts.fixed)
    nodes = sorted(inside | computing)
    used = dict.fromkeys(tensor for place in nodes for tensor in onnx_nodes.reads(facts.graph.node[place]))
    weights = tuple(tensor for tensor in used if tensor in facts.weights)
    held = sum(onnx_nodes.inner_weight_bytes(facts.graph.node[place]) for place in nodes)
    return Layer(
        name=name,
        nodes=tuple(nodes),
        reads=tuple(dict.fromkeys(tensor for place in places for tensor in facts.reads[place] if tensor not in own)),
        writes=tuple(
            tensor
            for place in places
            for tensor in onnx_nodes.writes(facts.graph.node[place])
            if tensor in facts.outputs or set(facts.readers.get(tensor, ())) - inside
        ),
        weights=weights,
        weight_bytes=held + sum(onnx_nodes.tensor_bytes(facts.weights[tensor]) for tensor in weights),
        work=tuple(look_up.work(place) for place in nodes),
    )


def _layer_name(facts: Facts, places: list[int]) -> str:
    """The name of the layer's main operator, made plain."""
    main = next((place for place in places if facts.op(place) in PRODUCTS), places[0])
    node = facts.graph.node[main]
    plain = node.name.removesuffix("/MatMulAddFusion")  # added by onnxruntime where it makes a Gemm
    return re.sub(r"[^\w./:+-]+", "_", plain).strip("/_")[:80] or node.op_type.lower()


def _raw(facts: Facts, inputs: Iterable[str]) -> frozenset[str]:
    """The inputs and what only moves or rescales them."""
    raw = set(inputs)
    for place, node in enumerate(facts.graph.node):
        if node.op_type in MOVES and facts.reads[place] and raw.issuperset(facts.reads[place]):
            alone = len(facts.reads[place]) == 1 and sum(name in raw for name in node.input) == 1
            if alone or node.op_type == "Concat":
                raw.update(onnx_nodes.writes(node))
    return frozenset(raw)
