"""Groups the operators of an ONNX graph into layers: sets that a runtime runs as one, between which a cut may go.

A convolution or matrix product keeps the normalisation and activation that only it feeds; If, Loop and Scan are one
layer with what they capture; what depends on weights alone is part of every layer that uses it. Contracting a node into
its only reader, or into its only source, never makes a cycle; where a type that cannot travel forces more together,
every cycle that arises is closed into one layer. The work of a layer's operators is counted in `operator_work`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from edgesplit_partitioner.ir.fusion import UnionFind, fused_layers, merge_cyclic_groups
from edgesplit_partitioner.ir.graph import LayerGraph, OperatorWork
from edgesplit_partitioner.ir.tensor_types import TensorType, item_bytes
from edgesplit_partitioner.onnx_format import nodes as onnx_nodes
from edgesplit_partitioner.onnx_format.nodes import DATATYPES
from edgesplit_partitioner.onnx_format.operator_work import work_of
from edgesplit_partitioner.onnx_format.tensor_lookup import TensorLookup

MATRIX_OPERATORS = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
    | {"QGemm", "FusedConv", "FusedGemm", "FusedMatMul", "DynamicQuantizeMatMul"}
)
"""Convolutions and matrix products; the first one in a layer gives the layer its name."""
GROUP_LEADERS = MATRIX_OPERATORS | {"Add", "Sum", "BatchNormalization", "InstanceNormalization", "GroupNormalization"}
"""Operators that keep the elementwise operators after them in their layer."""
UNARY_ELEMENTWISE = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Elu", "Selu", "Celu", "Mish"}
    | {"Softplus", "Softsign", "ThresholdedRelu", "Gelu", "QuickGelu", "Swish", "Erf", "Identity", "Dropout", "Cast"}
    | {"BatchNormalization"}
)
"""Elementwise operators with one input that may join the layer before them."""
BINARY_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div"})
"""Elementwise operators with two inputs, which may join the layer before them where the other operand is a constant."""
MAX_GATE_LENGTH = 4
"""Longest chain x -> f(x) that is recognised in a gate x * f(x): the erf form of Gelu has Div, Erf, Add."""

RANDOM_OPERATORS = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
"""Operators that draw random numbers: they are not constants even where they read constants alone."""

DATA_MOVEMENT = frozenset(
    {"Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout", "Pad", "Slice", "Split"}
    | {"Concat", "Gather", "Resize", "Upsample", "SpaceToDepth", "DepthToSpace", "Crop", "Expand", "Tile"}
    | {"QuantizeLinear", "DequantizeLinear", "Clip", "Neg", "BatchNormalization"}
    | BINARY_ELEMENTWISE
)
"""Operators through which raw input data stays recognisable: applied to a raw input with nothing but constants beside
it, they only move or rescale it."""


@dataclass(slots=True)
class GraphIndex:
    """An ONNX graph with its nodes and tensors indexed by name; a node is identified by its position in
    `graph.node`."""

    graph: onnx.GraphProto
    initializers: dict[str, onnx.TensorProto] = field(init=False)
    """Dense initializers by name."""
    constants: set[str] = field(init=False)
    """Names of the weights and of everything computed from weights alone."""
    constant_positions: set[int] = field(default_factory=set)
    """Positions of the nodes that compute constants."""
    reads: list[list[str]] = field(init=False)
    """Per node, the tensors that it reads, without constants."""
    readers: dict[str, list[int]] = field(default_factory=dict)
    """Per tensor, the positions of the nodes that read it, without constants."""
    writer: dict[str, int] = field(default_factory=dict)
    """Per tensor, the position of the node that writes it."""
    inputs: list[str] = field(init=False)
    """Names of the graph's inputs, in order."""
    outputs: dict[str, None] = field(init=False)
    """Names of the graph's outputs, in order."""

    def __post_init__(self) -> None:
        self.initializers = onnx_nodes.initializers(self.graph)
        self.constants = onnx_nodes.constant_names(self.graph)
        self.inputs = [value.name for value in self.graph.input]
        self.outputs = dict.fromkeys(value.name for value in self.graph.output)
        self.reads = []
        for place, node in enumerate(self.graph.node):
            own = [name for name in onnx_nodes.inputs_of(node) if name not in self.constants]
            written = onnx_nodes.outputs_of(node)
            self.reads.append(own)
            self.writer.update(dict.fromkeys(written, place))
            # Constant: reads nothing but constants, gives the same values every time, and is no output of the model.
            if not own and not _is_random(node) and self.outputs.keys().isdisjoint(written):
                self.constant_positions.add(place)
                self.constants.update(written)
            for name in own:
                self.readers.setdefault(name, []).append(place)

    def op_type(self, position: int) -> str:
        """Operator type of the node at a position."""
        operator: str = self.graph.node[position].op_type
        return operator

    def inputs_of(self, position: int) -> list[str]:
        """Names of all the node's inputs, constants too."""
        return onnx_nodes.inputs_of(self.graph.node[position])

    def outputs_of(self, position: int) -> list[str]:
        """Names of the node's outputs."""
        return onnx_nodes.outputs_of(self.graph.node[position])

    def weights_of(self, positions: Sequence[int]) -> tuple[tuple[str, ...], int]:
        """Names of the initializers that these nodes use; their bytes with those of the nodes' own weights."""
        used = dict.fromkeys(tensor for place in positions for tensor in self.inputs_of(place))
        weights = tuple(tensor for tensor in used if tensor in self.initializers)
        inner_bytes = sum(onnx_nodes.inner_weight_bytes(self.graph.node[place]) for place in positions)
        return weights, inner_bytes + sum(onnx_nodes.tensor_bytes(self.initializers[tensor]) for tensor in weights)

    def layer_name(self, positions: Sequence[int]) -> str:
        """The name of the layer's main operator, restricted to plain characters and 80 of them."""
        main = next((place for place in positions if self.op_type(place) in MATRIX_OPERATORS), positions[0])
        node = self.graph.node[main]
        plain = node.name.removesuffix("/MatMulAddFusion")  # added by onnxruntime where it makes a Gemm
        return re.sub(r"[^\w./:+-]+", "_", plain).strip("/_")[:80] or node.op_type.lower()

    def only_reader(self, tensor: str) -> int | None:
        """Position of the only node that reads `tensor`; None where several do, or where it is an output of the
        graph."""
        readers = self.readers.get(tensor, [])
        return readers[0] if len(readers) == 1 and tensor not in self.outputs else None

    def elementwise_source(self, position: int) -> str | None:
        """The single non-constant tensor that the elementwise node at `place` works on; None where it is no such node,
        or uses the tensor twice."""
        own = self.reads[position]
        if len(own) != 1 or not (
            self.op_type(position) in UNARY_ELEMENTWISE or self.op_type(position) in BINARY_ELEMENTWISE
        ):
            return None
        uses = sum(name == own[0] for name in self.graph.node[position].input)
        return own[0] if uses == 1 else None


def _is_random(node: onnx.NodeProto) -> bool:
    """Whether the node, or a node in its subgraphs, draws random numbers, so that two runs give different results."""
    inside = (
        member
        for graph in onnx_nodes.subgraphs(node)
        for inner in onnx_nodes.all_graphs(graph)
        for member in inner.node
    )
    return any(member.op_type in RANDOM_OPERATORS for member in (node, *inside))


def layer_graph(model: onnx.ModelProto, types: Mapping[str, TensorType]) -> LayerGraph:
    """The layer graph of an optimised, normalised model; `types` holds the type of each of its tensors."""
    facts = GraphIndex(model.graph)
    groups, lookup = group_nodes(facts, types), _lookup(facts, types)

    def work(position: int) -> OperatorWork:
        return work_of(facts.graph.node[position], lookup)

    return fused_layers(facts, groups, types, work, _raw_tensors(facts))


def group_nodes(facts: GraphIndex, types: Mapping[str, TensorType]) -> UnionFind:
    """Group the nodes that run together, by the rules of the module's docstring."""
    groups = UnionFind(len(facts.graph.node))
    is_leader = [facts.op_type(place) in GROUP_LEADERS for place in range(len(facts.graph.node))]
    for place in range(len(facts.graph.node)):
        if place not in facts.constant_positions:
            _join_gate(facts, groups, is_leader, place)
            _join_chain(facts, groups, is_leader, place)
            _join_quantised(facts, groups, place)
    # A tensor whose type cannot travel (a sequence, strings) must not cross a cut: its writer and all readers are one
    # layer.
    for name, readers in facts.readers.items():
        if name in facts.writer and not types[name].datatype:
            groups.union(facts.writer[name], *readers)
    # Joining readers of several sources may have made groups that need each other; no order of layers exists until they
    # are merged.
    merge_cyclic_groups(groups, facts.writer, facts.readers)
    return groups


def _join_chain(facts: GraphIndex, groups: UnionFind, leads: list[bool], position: int) -> None:
    """Join an elementwise node with the product or sum whose result only this node reads."""
    tensor = facts.elementwise_source(position)
    if tensor is None or tensor not in facts.writer or facts.only_reader(tensor) is None:
        return
    source = facts.writer[tensor]
    if leads[source] and source not in facts.constant_positions:
        groups.union(source, position)
        leads[position] = True


def _join_gate(facts: GraphIndex, groups: UnionFind, leads: list[bool], position: int) -> None:
    """Join the nodes of a gate x * f(x) (SiLU, HardSwish, Mish, Gelu), where f is a short chain without other readers;
    and join the gate with the layer that writes x, where that is a leader and x has no other reader."""
    own = facts.reads[position]
    if facts.op_type(position) != "Mul" or len(own) != 2:
        return
    # Multiplication commutes: either operand of Mul may be x.
    for tensor, gated in (own, own[::-1]):
        chain = _elementwise_chain(facts, gated, tensor)
        if chain is None:
            continue
        groups.union(position, *chain)
        # The gate joins the layer of x only where nothing else reads x, so that x need not be kept for another layer.
        source = facts.writer.get(tensor)
        only_gate_reads = set(facts.readers[tensor]) == {position, chain[-1]} and tensor not in facts.outputs
        if only_gate_reads and source is not None and leads[source]:
            groups.union(source, position)
            leads[position] = True
        return


def _elementwise_chain(facts: GraphIndex, tensor: str, start: str) -> list[int] | None:
    """Positions of the nodes from `tensor` back to `start`, each elementwise with one reader; None where there is no
    such chain of at most `MAX_GATE_LENGTH` nodes."""
    chain: list[int] = []
    while tensor != start:
        place = facts.writer.get(tensor)
        if place is None or facts.only_reader(tensor) is None or len(chain) == MAX_GATE_LENGTH:
            return None
        before = facts.elementwise_source(place)
        if before is None:
            return None
        chain.append(place)
        tensor = before
    return chain or None


def _join_quantised(facts: GraphIndex, groups: UnionFind, position: int) -> None:
    """Join DequantizeLinear with its only reader, and QuantizeLinear with the source that only it reads, so that int8
    crosses a cut and not float."""
    operator = facts.op_type(position)
    if operator == "DequantizeLinear" and facts.reads[position]:
        reader = facts.only_reader(facts.graph.node[position].output[0])
        if reader is not None:
            groups.union(position, reader)
    elif operator == "QuantizeLinear" and len(facts.reads[position]) == 1:
        tensor = facts.reads[position][0]
        if tensor in facts.writer and facts.only_reader(tensor) is not None:
            groups.union(position, facts.writer[tensor])


def _lookup(facts: GraphIndex, types: Mapping[str, TensorType]) -> TensorLookup:
    """Shapes and element sizes of the graph's tensors and weights."""

    def shape(name: str) -> tuple[int, ...] | None:
        if name in facts.initializers:
            return tuple(facts.initializers[name].dims)
        return types[name].concrete_shape if name in types else None

    def itemsize(name: str) -> int:
        if name in facts.initializers:
            return item_bytes(DATATYPES.get(facts.initializers[name].data_type, ""))
        return types[name].item_bytes if name in types else 1

    return TensorLookup(shape, itemsize, facts.constants.__contains__)


def _raw_tensors(facts: GraphIndex) -> frozenset[str]:
    """Names of the inputs and of the tensors that only move or rescale them; a cut there would send the input
    itself."""
    raw = set(facts.inputs)
    for place, node in enumerate(facts.graph.node):
        if node.op_type in DATA_MOVEMENT and facts.reads[place] and raw.issuperset(facts.reads[place]):
            has_one_operand = len(facts.reads[place]) == 1 and sum(name in raw for name in node.input) == 1
            if has_one_operand or node.op_type == "Concat":
                raw.update(onnx_nodes.outputs_of(node))
    return frozenset(raw)
