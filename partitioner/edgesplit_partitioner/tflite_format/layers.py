"""Groups TFLite operators into layers. Most are a layer each, because what LiteRT fuses is fused in the file already.

An activation of its own joins the product or sum whose result only it reads, and padding joins the convolution that
alone reads it; quantising joins what it follows and dequantising what it feeds, so that int8 crosses a cut; operators
that share a variable, or a tensor that cannot travel, are one layer; what depends on weights alone is part of every
layer that uses it; every cycle is closed into one layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgesplit_partitioner.ir.fusion import UnionFind, fused_layers, merge_cyclic_groups
from edgesplit_partitioner.ir.graph import LayerGraph, OperatorWork
from edgesplit_partitioner.ir.tensor_types import TensorType
from edgesplit_partitioner.tflite_format.flatbuffer import EDGE_TPU_OPERATOR, custom_name, ints
from edgesplit_partitioner.tflite_format.graph import TfliteGraph
from edgesplit_partitioner.tflite_format.operator_work import OperatorInfo, TensorLookup, work_of

GROUP_LEADERS = frozenset(
    {"CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED", "BATCH_MATMUL", "ADD", "MUL"}
)
"""Operators that keep the activation after them in their layer."""
CONVOLUTIONS = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D"})
"""Operators that keep the padding before them in their layer."""
ACTIVATIONS = frozenset({"RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"})
"""Operators that join the leader before them."""
DATA_MOVEMENT = frozenset(
    {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "TRANSPOSE", "PAD", "PADV2", "MIRROR_PAD", "SLICE", "STRIDED_SLICE", "CAST"}
    | {"QUANTIZE", "DEQUANTIZE", "CONCATENATION", "SPLIT", "SPLIT_V", "PACK", "UNPACK", "GATHER", "REVERSE_V2", "TILE"}
    | {"RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "SPACE_TO_DEPTH", "DEPTH_TO_SPACE", "NEG", "ADD", "SUB", "MUL"}
    | {"DIV", "MINIMUM", "MAXIMUM"}
)
"""Operators through which raw input data stays recognisable: applied to a raw input with nothing but constants beside
it, they only move or rescale it."""


def layer_graph(graph: TfliteGraph, types: Mapping[str, TensorType]) -> LayerGraph:
    """The layer graph of a model; `types` holds the type of each of its tensors."""
    sizes = _sizes(graph, types)
    return fused_layers(
        graph, _group(graph, types), types, lambda place: _work(graph, place, sizes), _raw_tensors(graph)
    )


def _group(graph: TfliteGraph, types: Mapping[str, TensorType]) -> UnionFind:
    """Group the operators that run together, by the rules of the module's docstring."""
    places = range(len(graph.main.operators))
    groups = UnionFind(len(places))
    if any(custom_name(graph.model, operator) == EDGE_TPU_OPERATOR for operator in graph.main.operators):
        groups.union(*places)  # compiled for an Edge TPU: one layer
        return groups
    for place in places:
        if place not in graph.constant_positions:
            _join_neighbours(graph, groups, place)
    for name, readers in graph.readers.items():
        if name in graph.writer and not types[name].datatype:
            groups.union(graph.writer[name], *readers)
    # A variable lives in one interpreter: operators in two slices would each have a copy of their own.
    for name in graph.variables:
        users = [place for place in places if name in graph.inputs_of(place)]
        if users:
            groups.union(*users)
    merge_cyclic_groups(groups, graph.writer, graph.readers)
    return groups


def _join_neighbours(graph: TfliteGraph, groups: UnionFind, position: int) -> None:
    operator, own = graph.op_type(position), graph.reads[position]
    if operator in ACTIVATIONS or operator == "QUANTIZE":
        source = graph.writer.get(own[0]) if len(own) == 1 and graph.only_reader(own[0]) is not None else None
        if (
            source is not None
            and source not in graph.constant_positions
            and (operator == "QUANTIZE" or graph.op_type(source) in GROUP_LEADERS)
        ):
            groups.union(source, position)
    elif operator in ("DEQUANTIZE", "PAD") and own:
        reader = graph.only_reader(graph.outputs_of(position)[0])
        if reader is not None and (operator == "DEQUANTIZE" or graph.op_type(reader) in CONVOLUTIONS):
            groups.union(position, reader)


def _sizes(graph: TfliteGraph, types: Mapping[str, TensorType]) -> TensorLookup:
    return TensorLookup(
        shape=lambda name: types[name].concrete_shape if name else (),
        item_bytes=lambda name: types[name].item_bytes if name else 0,
        is_weight=lambda name: name in graph.constants,
        datatype=lambda name: types[name].datatype if name else "",
    )


def _work(graph: TfliteGraph, position: int, sizes: TensorLookup) -> OperatorWork:
    operator = graph.main.operators[position]
    options = operator.builtinOptions
    operator_shape = OperatorInfo(
        name=graph.op_type(position),
        inputs=tuple(graph.names[index] if index >= 0 else "" for index in ints(operator.inputs)),
        outputs=tuple(graph.outputs_of(position)),
        window=int(getattr(options, "filterWidth", 1)) * int(getattr(options, "filterHeight", 1)),
    )
    return work_of(operator_shape, sizes)


def _raw_tensors(graph: TfliteGraph) -> frozenset[str]:
    """Names of the inputs and of the tensors that only move or rescale them; a cut there would send the input
    itself."""
    raw = set(graph.inputs)
    for place, own in enumerate(graph.reads):
        if graph.op_type(place) in DATA_MOVEMENT and own and raw.issuperset(own):
            uses = [graph.names[index] for index in ints(graph.main.operators[place].inputs) if index >= 0]
            if sum(name in raw for name in uses) == 1 or graph.op_type(place) in ("CONCATENATION", "PACK"):
                raw.update(graph.outputs_of(place))
    return frozenset(raw)
