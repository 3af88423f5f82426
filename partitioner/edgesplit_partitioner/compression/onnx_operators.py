"""Operators of ONNX graphs as onnxruntime's quantiser and kernels see them: layers, and what stays in float."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import onnx

from edgesplit_partitioner.compression.layer_groups import Operator, layer_groups
from edgesplit_partitioner.onnx_format import nodes

MATRIX_OPERATORS: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN"})
"""Operators with weights, which begin a layer."""
DATA_MOVEMENT: Final = frozenset(
    {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Cast", "Shape", "Gather"}
    | {"Slice", "Concat", "Split", "Expand", "Pad", "Tile", "Range", "Constant", "ConstantOfShape", "MaxPool"}
)
"""Operators that compute nothing: they run on int8 as on float."""
INTEGER_OPERATORS: Final = frozenset(
    {"QGemm", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "MatMulIntegerToFloat"}
    | {"DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "ConvInteger"}
)
"""Operators of a quantised graph, beside those whose names begin with QLinear."""


def float_operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """Types of the operators of a quantised graph that compute in float."""
    integer: set[str] = set()
    found: set[str] = set()
    for node in model.graph.node:
        if node.op_type in INTEGER_OPERATORS or node.op_type.startswith("QLinear"):
            integer.update(() if node.op_type == "DequantizeLinear" else node.output)
        elif node.op_type in DATA_MOVEMENT:
            integer.update(node.output if node.input and node.input[0] in integer else ())
        else:
            found.add(node.op_type)
    return tuple(sorted(found))


def unfused_types(model: onnx.ModelProto) -> tuple[str, ...]:
    """Types of the operators that read dequantised and write values that are quantised again: none of them has an
    integer kernel, so that quantising them costs time and accuracy. Operators with weights are left out: that one of
    them was not fused says nothing about the others."""
    dequantised = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    quantised = {node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    return tuple(
        sorted(
            {
                node.op_type
                for node in model.graph.node
                if node.op_type not in INTEGER_OPERATORS | MATRIX_OPERATORS
                and not dequantised.isdisjoint(node.input)
                and quantised.issuperset(node.output)
            }
        )
    )


def layers_of(model: onnx.ModelProto, kinds: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """The layers that have an operator of these kinds, with their nodes' names."""
    constants = nodes.constant_names(model.graph)
    kind_of = {node.name: node.op_type for node in model.graph.node}
    operators = (
        Operator(
            node.name,
            node.op_type in MATRIX_OPERATORS,
            tuple(name for name in nodes.inputs_of(node) if name not in constants),
            tuple(nodes.outputs_of(node)),
        )
        for node in model.graph.node
    )
    groups = layer_groups(operators)
    return {layer: names for layer, names in groups.items() if any(kind_of[name] in kinds for name in names)}
