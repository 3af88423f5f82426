"""The work of one ONNX operator: floating-point operations, bytes moved, and the class whose rate bounds its time.

Every operator has an answer: one that is not known counts as moving its inputs and outputs once. `costs.predict` turns
work into seconds on a device. An open length counts as nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import onnx

from edgesplit.input_spec import PCM16_BYTES, InputSpec
from edgesplit.picture_formats import RAW
from edgesplit_partitioner.ir.graph import OperatorClass, OperatorWork
from edgesplit_partitioner.onnx_format import nodes
from edgesplit_partitioner.onnx_format.operator_features import FREE_OPERATORS, with_features
from edgesplit_partitioner.onnx_format.tensor_lookup import TensorLookup

NO_WORK = OperatorWork("memory", 0.0, 0.0)
"""Nothing is computed and nothing moves: the runtime passes the same buffer on."""

CHEAP_ELEMENTWISE = frozenset(
    {"Abs", "Add", "And", "BitShift", "Cast", "CastLike", "Ceil", "Clip", "DequantizeLinear", "Div", "Equal", "Floor"}
    | {"Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual"}
    | {"Max", "Mean", "Min", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "QLinearAdd", "QLinearMul", "QuantizeLinear"}
    | {"Reciprocal", "Relu", "Round", "Sign", "Sqrt", "Sub", "Sum", "ThresholdedRelu", "Where", "Xor"}
)
"""Elementwise operators with one operation per element."""
COSTLY_ELEMENTWISE = frozenset(
    {"Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp", "Gelu", "Log"}
    | {"Mish", "Pow", "QLinearSigmoid", "QuickGelu", "Selu", "Sigmoid", "Sin", "Sinh", "Softplus", "Softsign", "Swish"}
    | {"Tan", "Tanh"}
)
"""Elementwise operators that evaluate a transcendental function, `TRANSCENDENTAL_FLOPS` operations per element."""
TRANSCENDENTAL_FLOPS = 8.0
"""Operations per element of a transcendental function, which runtimes evaluate as a short polynomial."""
PER_ELEMENT: Mapping[str, tuple[OperatorClass, float]] = {
    "BatchNormalization": ("elementwise", 2.0), "DynamicQuantizeLinear": ("elementwise", 3.0),
    "InstanceNormalization": ("memory", 4.0), "GroupNormalization": ("memory", 4.0),
    "LayerNormalization": ("memory", 4.0), "SimplifiedLayerNormalization": ("memory", 4.0),
    "SkipLayerNormalization": ("memory", 5.0), "RMSNormalization": ("memory", 3.0),
    "LpNormalization": ("memory", 3.0), "LRN": ("memory", 12.0),
    "Softmax": ("memory", TRANSCENDENTAL_FLOPS + 3.0), "LogSoftmax": ("memory", TRANSCENDENTAL_FLOPS + 3.0),
    "CumSum": ("memory", 1.0), "TopK": ("memory", 8.0), "ArgMax": ("memory", 1.0), "ArgMin": ("memory", 1.0),
    "GlobalAveragePool": ("memory", 1.0), "GlobalMaxPool": ("memory", 1.0), "QLinearGlobalAveragePool": ("memory", 1.0),
}  # fmt: skip
"""Class, and operations per element of the first input."""
POOLING_OPERATORS = frozenset({"AveragePool", "MaxPool", "LpPool", "QLinearAveragePool"})
"""Pooling operators, with one operation per element of the kernel for each result."""
INDEXING_OPERATORS = frozenset(
    {"Slice", "Gather", "GatherElements", "GatherND", "Expand", "Tile", "ConstantOfShape", "Range"}
)
"""Operators that read only as much as they write, however large the input is."""
CONVOLUTION_WEIGHTS: Mapping[str, int] = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}
"""Position of the weights among the inputs, by operator."""
PRODUCT_FACTORS: Mapping[str, int] = {
    **dict.fromkeys(("Gemm", "FusedGemm", "MatMul", "FusedMatMul"), 1),
    **dict.fromkeys(("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), 1),
    **dict.fromkeys(("QLinearMatMul", "QGemm"), 3),
}
"""Position of the second factor among the inputs, by operator."""
RECURRENT = frozenset({"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"})
INTEGER_PRODUCTS = frozenset(
    {"ConvInteger", "QLinearConv", "MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QLinearMatMul"}
    | {"QGemm", "DynamicQuantizeLSTM"}
)
"""Operators that multiply 8-bit integers."""


def work_of(node: onnx.NodeProto, lookup: TensorLookup) -> OperatorWork:
    """The work of `node`."""
    work = with_features(_work(node, lookup), node, lookup)
    return replace(work, is_int8=True) if node.op_type in INTEGER_PRODUCTS else work


def input_work(spec: InputSpec) -> OperatorWork:
    """The work of the input layer: `flops` counts the pixels to decode, `bytes_moved` what resizing and normalising
    move after that (8-bit planes once; float planes written, scaled and rearranged). Raw frames and sound are not
    decoded: of sound 16-bit samples are read, floats written and scaled."""
    if spec.is_sound:
        return OperatorWork("input", 0.0, float((PCM16_BYTES + 3 * 4) * spec.samples))
    pixels = spec.width * spec.height
    values = prod(spec.shape)
    float_bytes = 4 * values if spec.is_float else 0
    decoded = 0.0 if spec.media == RAW else float(pixels)
    return OperatorWork("input", decoded, float(2 * pixels * spec.channels + 2 * values + 6 * float_bytes))


def _work(node: onnx.NodeProto, lookup: TensorLookup) -> OperatorWork:
    operator = node.op_type
    if operator in FREE_OPERATORS or operator == "Constant" or not node.output:
        return NO_WORK
    if operator in CONVOLUTION_WEIGHTS:
        return _convolution(node, lookup)
    if operator == "ConvTranspose":
        return _transposed_convolution(node, lookup)
    if operator in PRODUCT_FACTORS:
        return _product(node, lookup)
    if operator in RECURRENT:
        return _recurrent(node, lookup)
    if operator == "Einsum":
        return _einsum(node, lookup)
    if operator in ("If", "Loop", "Scan"):
        return _control_flow(node, lookup)
    return _elementwise(node, lookup)


def _elementwise(node: onnx.NodeProto, lookup: TensorLookup) -> OperatorWork:
    """The work of operators whose operations grow with the number of elements; an operator that is not known only moves
    bytes."""
    operator, moved = node.op_type, lookup.moved(node)
    if operator in CHEAP_ELEMENTWISE:
        return OperatorWork("elementwise", float(lookup.elements(node.output[0])), moved)
    if operator in COSTLY_ELEMENTWISE:
        return OperatorWork("elementwise", TRANSCENDENTAL_FLOPS * lookup.elements(node.output[0]), moved)
    if operator in PER_ELEMENT:
        kind, operations = PER_ELEMENT[operator]
        return OperatorWork(kind, operations * lookup.elements(node.input[0]), moved)
    if operator in POOLING_OPERATORS:
        return OperatorWork(
            "memory", float(lookup.elements(node.output[0]) * prod(nodes.ints_attribute(node, "kernel_shape"))), moved
        )
    if operator.startswith("Reduce"):
        return OperatorWork("memory", float(lookup.elements(node.input[0])), moved)
    if operator in INDEXING_OPERATORS:
        return OperatorWork("memory", 0.0, 2 * lookup.bytes(node.output))
    if operator in ("Resize", "Upsample"):
        return OperatorWork("memory", float(lookup.elements(node.output[0])), moved)
    return OperatorWork("memory", 0.0, moved)


def _convolution(node: onnx.NodeProto, lookup: TensorLookup) -> OperatorWork:
    """2 x multiply-accumulates: each output element sums over one filter. Weights are (out, in / groups, kernel...)."""
    weights = lookup.shape(_input(node, CONVOLUTION_WEIGHTS[node.op_type])) or ()
    filter_elements = prod(weights[1:])
    out = lookup.elements(node.output[0]) or (weights[0] if weights else 0)
    groups = nodes.int_attribute(node, "group", 1)
    is_depthwise = groups > 1 and len(weights) > 1 and weights[1] == 1
    return OperatorWork("depthwise" if is_depthwise else "conv", 2.0 * out * filter_elements, lookup.moved(node))


def _transposed_convolution(node: onnx.NodeProto, lookup: TensorLookup) -> OperatorWork:
    """2 x multiply-accumulates: each input element is spread over one filter. Weights are (in, out / groups,
    kernel...)."""
    weights = lookup.shape(_input(node, 1)) or ()
    filter_elements = prod(weights[1:])
    is_depthwise = nodes.int_attribute(node, "group", 1) > 1 and len(weights) > 1 and weights[1] == 1
    flops = 2.0 * lookup.elements(node.input[0]) * filter_elements
    return OperatorWork("depthwise" if is_depthwise else "conv", flops, lookup.moved(node))


def _product(node: onnx.NodeProto, lookup: TensorLookup) -> OperatorWork:
    """2 x multiply-accumulates: each output element sums over the inner length, which is the first factor's last axis
    (its first axis where that factor is transposed)."""
    first, second = lookup.shape(node.input[0]), lookup.shape(_input(node, PRODUCT_FACTORS[node.op_type]))
    out = lookup.elements(node.output[0])
    if first:
        inner = first[0] if nodes.int_attribute(node, "transA", 0) and len(first) == 2 else first[-1]
        return OperatorWork("gemm", 2.0 * out * max(inner, 0), lookup.moved(node))
    return OperatorWork("gemm", 2.0 * prod(second or (0,)), lookup.moved(node))


def _recurrent(node: onnx.NodeProto, lookup: TensorLookup) -> OperatorWork:
    """Both weight matrices once per step and batch element; they are read from memory once and then stay in the
    cache."""
    steps = lookup.shape(node.input[0]) or (1, 1)
    weights = lookup.elements(_input(node, 1)) + lookup.elements(_input(node, 2))
    return OperatorWork("gemm", 2.0 * prod(max(length, 1) for length in steps[:2]) * weights, lookup.moved(node))


def _einsum(node: onnx.NodeProto, lookup: TensorLookup) -> OperatorWork:
    """One multiply-accumulate for each combination of the labels; with an ellipsis only the bytes are counted."""
    equation = next((a.s.decode() for a in node.attribute if a.name == "equation"), "").replace(" ", "")
    lengths: dict[str, int] = {}
    for term, name in zip(equation.partition("->")[0].split(","), node.input, strict=False):
        lengths.update(zip(term, lookup.shape(name) or (), strict=False))
    flops = 0.0 if "." in equation or not lengths else 2.0 * prod(lengths.values())
    return OperatorWork("gemm", flops, lookup.moved(node))


def _control_flow(node: onnx.NodeProto, lookup: TensorLookup) -> OperatorWork:
    """The heaviest branch of an If, or one pass of a Loop or Scan, whose number of passes is known only at run time."""
    branches = [_branch_work(attribute.g, lookup) for attribute in node.attribute if attribute.HasField("g")]
    heaviest = max(branches, key=lambda work: (work.flops, work.bytes_moved), default=NO_WORK)
    return OperatorWork(heaviest.operator, heaviest.flops, heaviest.bytes_moved + lookup.moved(node))


def _branch_work(graph: onnx.GraphProto, outer: TensorLookup) -> OperatorWork:
    """The sum over a subgraph's operators, under the class of the heaviest one."""
    inner = graph_lookup(graph, outer)
    works = [_work(node, inner) for node in graph.node]
    main = max(works, key=lambda work: (work.flops, work.bytes_moved), default=NO_WORK)
    return OperatorWork(main.operator, sum(work.flops for work in works), sum(work.bytes_moved for work in works))


def graph_lookup(graph: onnx.GraphProto, outer: TensorLookup) -> TensorLookup:
    """Lookup inside a graph: its own tensors first, then those that it captures from `outer`."""
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            shapes[value.name] = tuple(axis.dim_value for axis in tensor.shape.dim)
            sizes[value.name] = element_bytes(tensor.elem_type)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            weights[node.output[0]] = node.attribute[0].t
    for name, tensor in weights.items():
        shapes[name], sizes[name] = tuple(tensor.dims), element_bytes(tensor.data_type)
    return TensorLookup(
        shape=lambda name: shapes[name] if name in shapes else outer.shape(name),
        itemsize=lambda name: sizes[name] if name in sizes else outer.itemsize(name),
        is_weight=lambda name: name in weights or outer.is_weight(name),
    )


def element_bytes(data_type: int) -> int:
    """Bytes of one element of an ONNX data type; 4 where the type has no fixed size."""
    try:
        return max(onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize, 1)
    except (KeyError, TypeError, ValueError):
        return 4


def _input(node: onnx.NodeProto, position: int) -> str:
    """Name of the input at that position; empty where it was left out."""
    return node.input[position] if len(node.input) > position else ""
