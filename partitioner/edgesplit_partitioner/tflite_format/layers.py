"""TFLite operators into layers. Most are a layer each: what LiteRT fuses is fused in the file already.

An activation that stands alone joins the product or sum whose result only it reads, and padding the convolution that
alone reads it; quantising joins what it follows and dequantising what it feeds, so that int8 crosses; operators that
share a variable, or a tensor that cannot travel, are one layer; what depends on weights alone is part of every layer
that uses it; every circle is closed into one layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from edgesplit_partitioner.ir.fusion import Groups, close_circles, fixed_before, told_apart, topological
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, Tensor, Work
from edgesplit_partitioner.ir.tensor_types import TensorType
from edgesplit_partitioner.tflite_format.flatbuffer import EDGE_TPU, buffer_bytes, custom_name, ints
from edgesplit_partitioner.tflite_format.graph import TfliteGraph
from edgesplit_partitioner.tflite_format.operator_work import Operator, Sizes, work_of

LEADERS = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED", "BATCH_MATMUL", "ADD", "MUL"})
"""Operators that keep the activation after them."""
CONVOLUTIONS = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D"})
"""Operators that keep the padding before them."""
ACTIVATIONS = frozenset({"RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"})
MOVES = frozenset(
    {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "TRANSPOSE", "PAD", "PADV2", "MIRROR_PAD", "SLICE", "STRIDED_SLICE", "CAST"}
    | {"QUANTIZE", "DEQUANTIZE", "CONCATENATION", "SPLIT", "SPLIT_V", "PACK", "UNPACK", "GATHER", "REVERSE_V2", "TILE"}
    | {"RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "SPACE_TO_DEPTH", "DEPTH_TO_SPACE", "NEG", "ADD", "SUB", "MUL"}
    | {"DIV", "MINIMUM", "MAXIMUM"}
)
"""Applied to a raw input with nothing but constants beside it, these leave the raw input in sight."""


def layer_graph(graph: TfliteGraph, types: Mapping[str, TensorType]) -> LayerGraph:
    """The layers of a model; `types` knows each of its tensors."""
    groups = _group(graph, types)
    members: dict[int, list[int]] = {}
    for place in range(len(graph.main.operators)):
        if place not in graph.fixed:
            members.setdefault(groups.find(place), []).append(place)
    order = topological({leader: _sources(graph, groups, leader, members[leader]) for leader in members})
    names = told_apart(_layer_name(graph, members[leader]) for leader in order)
    sizes = _sizes(graph, types)
    layers = tuple(_layer(graph, name, members[leader], sizes) for name, leader in zip(names, order, strict=True))
    between = (*graph.inputs, *(name for layer in layers for name in layer.writes))
    return LayerGraph(
        layers=layers,
        tensors={name: Tensor(name, types[name].datatype, types[name].shape, types[name].bytes) for name in between},
        inputs=tuple(graph.inputs),
        outputs=tuple(graph.outputs),
        raw=_raw(graph) & frozenset(between),
    )


def _group(graph: TfliteGraph, types: Mapping[str, TensorType]) -> Groups:
    """Who runs together with whom."""
    places = range(len(graph.main.operators))
    groups = Groups(len(places))
    if any(custom_name(graph.model, operator) == EDGE_TPU for operator in graph.main.operators):
        groups.join(*places)  # compiled for an Edge TPU: one layer
        return groups
    for place in places:
        if place not in graph.fixed:
            _join_neighbours(graph, groups, place)
    for name, readers in graph.readers.items():
        if name in graph.writer and not types[name].datatype:
            groups.join(graph.writer[name], *readers)
    for name in graph.variables:
        users = [place for place in places if name in graph.inputs_of(place)]
        if users:
            groups.join(*users)
    close_circles(groups, graph.writer, graph.readers)
    return groups


def _join_neighbours(graph: TfliteGraph, groups: Groups, place: int) -> None:
    operator, own = graph.op(place), graph.reads[place]
    if operator in ACTIVATIONS or operator == "QUANTIZE":
        source = graph.writer.get(own[0]) if len(own) == 1 and graph.only_reader(own[0]) is not None else None
        if source is not None and source not in graph.fixed and (operator == "QUANTIZE" or graph.op(source) in LEADERS):
            groups.join(source, place)
    elif operator in ("DEQUANTIZE", "PAD") and own:
        reader = graph.only_reader(graph.writes(place)[0])
        if reader is not None and (operator == "DEQUANTIZE" or graph.op(reader) in CONVOLUTIONS):
            groups.join(place, reader)


def _sources(graph: TfliteGraph, groups: Groups, leader: int, places: Iterable[int]) -> set[int]:
    """Leaders of the groups that this group reads from."""
    tensors = (name for place in places for name in graph.reads[place])
    return {groups.find(graph.writer[name]) for name in tensors if name in graph.writer} - {leader}


def _layer(graph: TfliteGraph, name: str, places: list[int], sizes: Sizes) -> Layer:
    own = {tensor for place in places for tensor in graph.writes(place)}
    inside = set(places)
    outputs = set(graph.outputs)
    nodes = sorted(inside | fixed_before(places, graph.inputs_of, graph.writer, graph.fixed))
    buffers = graph.buffers(nodes)
    return Layer(
        name=name,
        nodes=tuple(nodes),
        reads=tuple(dict.fromkeys(tensor for place in places for tensor in graph.reads[place] if tensor not in own)),
        writes=tuple(
            tensor
            for place in places
            for tensor in graph.writes(place)
            if tensor in outputs or set(graph.readers.get(tensor, ())) - inside
        ),
        weights=tuple(weight_name(buffer) for buffer in buffers),
        weight_bytes=sum(buffer_bytes(graph.model, buffer) for buffer in buffers),
        work=tuple(_work(graph, place, sizes) for place in nodes),
    )


def weight_name(buffer: int) -> str:
    """What a layer calls a buffer of the file."""
    return f"buffer {buffer}"


def _layer_name(graph: TfliteGraph, places: list[int]) -> str:
    """What the layer writes last, made plain: operators have no names here, tensors do."""
    written = next((name for place in reversed(places) for name in graph.writes(place)), "")
    plain = re.split(r"[;]", written)[0]
    return re.sub(r"[^\w./:+-]+", "_", plain).strip("/_")[-80:].strip("/_") or graph.op(places[0]).lower()


def _sizes(graph: TfliteGraph, types: Mapping[str, TensorType]) -> Sizes:
    return Sizes(
        shape=lambda name: types[name].seen if name else (),
        item_bytes=lambda name: types[name].item_bytes if name else 0,
        is_weight=lambda name: name in graph.constants,
    )


def _work(graph: TfliteGraph, place: int, sizes: Sizes) -> Work:
    operator = graph.main.operators[place]
    options = operator.builtinOptions
    described = Operator(
        name=graph.op(place),
        inputs=tuple(graph.names[index] if index >= 0 else "" for index in ints(operator.inputs)),
        outputs=tuple(graph.writes(place)),
        window=int(getattr(options, "filterWidth", 1)) * int(getattr(options, "filterHeight", 1)),
    )
    return work_of(described, sizes)


def _raw(graph: TfliteGraph) -> frozenset[str]:
    """The inputs and what only moves or rescales them."""
    raw = set(graph.inputs)
    for place, own in enumerate(graph.reads):
        if graph.op(place) in MOVES and own and raw.issuperset(own):
            uses = [graph.names[index] for index in ints(graph.main.operators[place].inputs) if index >= 0]
            if sum(name in raw for name in uses) == 1 or graph.op(place) in ("CONCATENATION", "PACK"):
                raw.update(graph.writes(place))
    return frozenset(raw)
