"""What one ONNX operator has to do: floating-point operations, bytes moved, and the class whose rate bounds it.

Promises an answer for every operator: one it does not know counts as moving its inputs and outputs once. How long
that takes on a device is predict.py's business. A length that the caller does not know counts as nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import onnx

from edgesplit.input_spec import PCM16_BYTES, InputSpec
from edgesplit_partitioner.ir.graph import OperatorClass, Work
from edgesplit_partitioner.onnx_format.operator_features import described

ShapeOf = Callable[[str], tuple[int, ...] | None]
Bytes = Callable[[str], int]
IsWeight = Callable[[str], bool]

FREE = Work("memory", 0.0, 0.0)
"""Nothing is computed and nothing moves: the runtime hands the same buffer on."""

FREE_OPERATORS = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Shape", "Size", "Constant"}
)
CHEAP_ELEMENTWISE = frozenset(
    {"Abs", "Add", "And", "BitShift", "Cast", "CastLike", "Ceil", "Clip", "DequantizeLinear", "Div", "Equal", "Floor"}
    | {"Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual"}
    | {"Max", "Mean", "Min", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "QLinearAdd", "QLinearMul", "QuantizeLinear"}
    | {"Reciprocal", "Relu", "Round", "Sign", "Sqrt", "Sub", "Sum", "ThresholdedRelu", "Where", "Xor"}
)
COSTLY_ELEMENTWISE = frozenset(
    {"Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp", "Gelu", "Log"}
    | {"Mish", "Pow", "QLinearSigmoid", "QuickGelu", "Selu", "Sigmoid", "Sin", "Sinh", "Softplus", "Softsign", "Swish"}
    | {"Tan", "Tanh"}
)
COSTLY_ELEMENT = 8.0
"""Operations per element of a transcendental function, which runtimes evaluate as a short polynomial."""
PER_ELEMENT: Mapping[str, tuple[OperatorClass, float]] = {
    "BatchNormalization": ("elementwise", 2.0),
    "DynamicQuantizeLinear": ("elementwise", 3.0),
    "InstanceNormalization": ("memory", 4.0),
    "GroupNormalization": ("memory", 4.0),
    "LayerNormalization": ("memory", 4.0),
    "SimplifiedLayerNormalization": ("memory", 4.0),
    "SkipLayerNormalization": ("memory", 5.0),
    "RMSNormalization": ("memory", 3.0),
    "LpNormalization": ("memory", 3.0),
    "LRN": ("memory", 12.0),
    "Softmax": ("memory", COSTLY_ELEMENT + 3.0),
    "LogSoftmax": ("memory", COSTLY_ELEMENT + 3.0),
    "CumSum": ("memory", 1.0),
    "TopK": ("memory", 8.0),
    "ArgMax": ("memory", 1.0),
    "ArgMin": ("memory", 1.0),
    "GlobalAveragePool": ("memory", 1.0),
    "GlobalMaxPool": ("memory", 1.0),
    "QLinearGlobalAveragePool": ("memory", 1.0),
}
"""Operations per element of the first input."""
POOLS = frozenset({"AveragePool", "MaxPool", "LpPool", "QLinearAveragePool"})
PICKING = frozenset({"Slice", "Gather", "GatherElements", "GatherND", "Expand", "Tile", "ConstantOfShape", "Range"})
"""Read only as much as they write, however large the input is."""
CONVOLUTIONS: Mapping[str, int] = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}
"""Position of the weights."""
PRODUCTS: Mapping[str, int] = {
    "Gemm": 1,
    "FusedGemm": 1,
    "MatMul": 1,
    "FusedMatMul": 1,
    "MatMulInteger": 1,
    "DynamicQuantizeMatMul": 1,
    "QLinearMatMul": 3,
    "QGemm": 3,
}
"""Position of the second factor."""
RECURRENT = frozenset({"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"})


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is known of tensors by name."""

    shape: ShapeOf
    itemsize: Bytes
    is_weight: IsWeight

    def elements(self, name: str) -> int:
        """Number of elements; 0 where the shape is not known."""
        shape = self.shape(name) if name else None
        return 0 if shape is None else prod(max(length, 0) for length in shape)

    def bytes(self, names: Iterable[str]) -> float:
        """Of all the tensors named, each once."""
        return float(sum(self.elements(name) * self.itemsize(name) for name in set(names) if name))

    def moved(self, node: onnx.NodeProto) -> float:
        """Every input read and every output written once."""
        return self.bytes((*node.input, *node.output))


def work_of(node: onnx.NodeProto, shape: ShapeOf, itemsize: Bytes, is_weight: IsWeight) -> Work:
    """The work of `node`. `shape` gives a tensor's shape (weights too) or None, `itemsize` the bytes of one element."""
    known = Lookup(shape, itemsize, is_weight)
    return described(_work(node, known), node, known)


def input_work(spec: InputSpec) -> Work:
    """The work of the input layer: `flops` counts the pixels to decode, `bytes_moved` what resizing and
    normalising move after that (8-bit planes once, float planes written, scaled and rearranged). Sound is not
    decoded: 16-bit samples are read, floats written and scaled."""
    if spec.is_sound:
        return Work("input", 0.0, float((PCM16_BYTES + 3 * 4) * spec.samples))
    pixels = spec.width * spec.height
    values = prod(spec.shape)
    float_bytes = 0 if spec.datatype == "UINT8" else 4 * values
    return Work("input", float(pixels), float(2 * pixels * spec.channels + 2 * values + 6 * float_bytes))


def _work(node: onnx.NodeProto, known: Lookup) -> Work:
    operator = node.op_type
    if operator in FREE_OPERATORS or not node.output:
        return FREE
    if operator in CONVOLUTIONS:
        return _convolution(node, known)
    if operator == "ConvTranspose":
        return _transposed_convolution(node, known)
    if operator in PRODUCTS:
        return _product(node, known)
    if operator in RECURRENT:
        return _recurrent(node, known)
    if operator == "Einsum":
        return _einsum(node, known)
    if operator in ("If", "Loop", "Scan"):
        return _control_flow(node, known)
    return _element_by_element(node, known)


def _element_by_element(node: onnx.NodeProto, known: Lookup) -> Work:
    """Everything whose operations grow with the number of elements; what is not known only moves its bytes."""
    operator, moved = node.op_type, known.moved(node)
    if operator in CHEAP_ELEMENTWISE:
        return Work("elementwise", float(known.elements(node.output[0])), moved)
    if operator in COSTLY_ELEMENTWISE:
        return Work("elementwise", COSTLY_ELEMENT * known.elements(node.output[0]), moved)
    if operator in PER_ELEMENT:
        kind, each = PER_ELEMENT[operator]
        return Work(kind, each * known.elements(node.input[0]), moved)
    if operator in POOLS:
        return Work("memory", float(known.elements(node.output[0]) * prod(_ints(node, "kernel_shape"))), moved)
    if operator.startswith("Reduce"):
        return Work("memory", float(known.elements(node.input[0])), moved)
    if operator in PICKING:
        return Work("memory", 0.0, 2 * known.bytes(node.output))
    if operator in ("Resize", "Upsample"):
        return Work("memory", float(known.elements(node.output[0])), moved)
    return Work("memory", 0.0, moved)


def _convolution(node: onnx.NodeProto, known: Lookup) -> Work:
    """2 x multiply-accumulates: each output element sums over one filter. Weights are (out, in / groups, kernel...)."""
    weights = known.shape(_input(node, CONVOLUTIONS[node.op_type])) or ()
    each = prod(weights[1:])
    out = known.elements(node.output[0]) or (weights[0] if weights else 0)
    groups = _int(node, "group", 1)
    alone = groups > 1 and len(weights) > 1 and weights[1] == 1
    return Work("depthwise" if alone else "conv", 2.0 * out * each, known.moved(node))


def _transposed_convolution(node: onnx.NodeProto, known: Lookup) -> Work:
    """Each input element is spread over one filter. Weights are (in, out / groups, kernel...)."""
    weights = known.shape(_input(node, 1)) or ()
    each = prod(weights[1:])
    alone = _int(node, "group", 1) > 1 and len(weights) > 1 and weights[1] == 1
    flops = 2.0 * known.elements(node.input[0]) * each
    return Work("depthwise" if alone else "conv", flops, known.moved(node))


def _product(node: onnx.NodeProto, known: Lookup) -> Work:
    """Each output element sums over the inner length: the first factor's last axis (first, where it is transposed)."""
    first, second = known.shape(node.input[0]), known.shape(_input(node, PRODUCTS[node.op_type]))
    out = known.elements(node.output[0])
    if first:
        inner = first[0] if _int(node, "transA", 0) and len(first) == 2 else first[-1]
        return Work("gemm", 2.0 * out * max(inner, 0), known.moved(node))
    return Work("gemm", 2.0 * prod(second or (0,)), known.moved(node))


def _recurrent(node: onnx.NodeProto, known: Lookup) -> Work:
    """Both weight matrices once for each step and each of the batch; they are read once and then stay in the cache."""
    steps = known.shape(node.input[0]) or (1, 1)
    weights = known.elements(_input(node, 1)) + known.elements(_input(node, 2))
    return Work("gemm", 2.0 * prod(max(length, 1) for length in steps[:2]) * weights, known.moved(node))


def _einsum(node: onnx.NodeProto, known: Lookup) -> Work:
    """One multiply-accumulate for each combination of the labels; with an ellipsis, only the bytes are known."""
    equation = next((a.s.decode() for a in node.attribute if a.name == "equation"), "").replace(" ", "")
    lengths: dict[str, int] = {}
    for term, name in zip(equation.partition("->")[0].split(","), node.input, strict=False):
        lengths.update(zip(term, known.shape(name) or (), strict=False))
    flops = 0.0 if "." in equation or not lengths else 2.0 * prod(lengths.values())
    return Work("gemm", flops, known.moved(node))


def _control_flow(node: onnx.NodeProto, known: Lookup) -> Work:
    """The heaviest branch of an If, one pass of a Loop or Scan (how often it turns is known only at run time)."""
    branches = [_branch(attribute.g, known) for attribute in node.attribute if attribute.HasField("g")]
    heaviest = max(branches, key=lambda work: (work.flops, work.bytes_moved), default=FREE)
    return Work(heaviest.operator, heaviest.flops, heaviest.bytes_moved + known.moved(node))


def _branch(graph: onnx.GraphProto, outer: Lookup) -> Work:
    """The sum over a subgraph, under the class of its heaviest operator."""
    inner = _inside(graph, outer)
    works = [_work(node, inner) for node in graph.node]
    main = max(works, key=lambda work: (work.flops, work.bytes_moved), default=FREE)
    return Work(main.operator, sum(work.flops for work in works), sum(work.bytes_moved for work in works))


def _inside(graph: onnx.GraphProto, outer: Lookup) -> Lookup:
    """What is known inside a subgraph: its own tensors first, then those it captures."""
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
    return Lookup(
        shape=lambda name: shapes[name] if name in shapes else outer.shape(name),
        itemsize=lambda name: sizes[name] if name in sizes else outer.itemsize(name),
        is_weight=lambda name: name in weights or outer.is_weight(name),
    )


def element_bytes(data_type: int) -> int:
    """Bytes of one element of an ONNX data type; 4 where there is no fixed size."""
    try:
        return max(onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize, 1)
    except (KeyError, TypeError, ValueError):
        return 4


def _input(node: onnx.NodeProto, position: int) -> str:
    """Name of the input at that position; empty where it was left out."""
    return node.input[position] if len(node.input) > position else ""


def _int(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), default)


def _ints(node: onnx.NodeProto, name: str) -> tuple[int, ...]:
    return next((tuple(attribute.ints) for attribute in node.attribute if attribute.name == name), ())
