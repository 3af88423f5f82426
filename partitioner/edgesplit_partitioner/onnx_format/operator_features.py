"""The family and sizes on which an operator's run time depends; the calibration fits seconds over the sizes'
logarithms.

Operators of a model and operators of the calibration's microbenchmarks are described by the same function, `described`.
A family without an entry in a device profile's fit is predicted by its class instead. Pure functions; nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Final

import onnx

from edgesplit_partitioner.ir.channel_blocks import BLOCK_SIZES, block_sizes
from edgesplit_partitioner.ir.graph import OperatorWork
from edgesplit_partitioner.onnx_format.nodes import int_attribute, ints_attribute
from edgesplit_partitioner.onnx_format.tensor_lookup import TensorLookup

Sizes = tuple[float, ...]
"""Sizes of an operator, in the order of its family's entry in `FEATURES`."""
Shape = tuple[int, ...]

FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "conv1": ("out_channels", "in_channels", "pixels", *BLOCK_SIZES),
    "conv1-pixel": ("out_channels", "in_channels"),
    "convk": ("out_channels", "in_channels", "taps", "pixels", "row", "stride", *BLOCK_SIZES),
    "depthwise": ("channels", "taps", "pixels", "row", "stride", "out_fill", "out_split"),
    "convg": ("groups", "out_each", "in_each", "taps", "pixels", "stride"),
    "convt": ("out_channels", "in_channels", "taps", "pixels"),
    "gemm": ("rows", "inner", "columns"),
    "gemv": ("inner", "columns"),
    "matmul": ("count", "rows", "inner", "columns"),
    "recurrent": ("steps", "inputs", "hidden"),
    "broadcast": ("elements", "run"),
    "MaxPool": ("elements", "taps", "row", "stride"),
    "AveragePool": ("elements", "taps", "row", "stride"),
    "reduce": ("elements", "results", "run"),
    "Softmax": ("elements", "run"),
    "normalise": ("elements", "run"),
    "Concat": ("bytes", "run", "pieces"),
    "Split": ("bytes", "run", "pieces"),
    "Slice": ("bytes", "run"),
    "Pad": ("bytes", "run"),
    "Gather": ("bytes", "run"),
    "Transpose": ("elements", "run", "row"),
    "resize-nearest": ("elements", "row"),
    "resize-linear": ("elements", "row"),
    "free": (),
}
"""Names of the sizes of each family that has more than `elements`. `run` is the number of contiguous bytes or elements.
A profile may know fewer: its fit leaves out last ones that predict nothing, and earlier versions had none of
`BLOCK_SIZES`."""

ALIASES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("Sub", "Sum", "Max", "Min"), "Add"),
    **dict.fromkeys(("Abs", "Neg"), "Relu"),
    **dict.fromkeys(("Sqrt", "Reciprocal"), "Div"),
    **dict.fromkeys(("Log", "Softplus"), "Exp"),
    **dict.fromkeys(("LayerNormalization", "InstanceNormalization"), "normalise"),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "ArgMin", "ArgMax"), "reduce"),
    **dict.fromkeys(("Tile", "Expand"), "Gather"),
    **{"HardSigmoid": "HardSwish", "Gelu": "Erf", "LogSoftmax": "Softmax", "Upsample": "Resize"},
}
"""Operators that cost about what another one does, by that operator or family."""

ELEMENTWISE: Final = frozenset(
    {"Relu", "LeakyRelu", "Clip", "Sigmoid", "Tanh", "Erf", "Exp", "Pow", "Cast", "HardSwish", "Add", "Mul", "Div"}
    | {"BatchNormalization", "PRelu"}
)
"""Elementwise operators with a family of their own."""
BINARY_ELEMENTWISE: Final = frozenset({"Add", "Mul", "Div", "PRelu", "Pow"})
"""Elementwise operators with two operands, the smaller of which may be broadcast."""
FREE_OPERATORS: Final = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Shape", "Size"}
)
"""Operators that only reinterpret a buffer."""
CONVOLUTIONS: Final = frozenset({"Conv", "FusedConv"})
"""Convolutions whose weights are the second input."""


def with_features(work: OperatorWork, node: onnx.NodeProto, lookup: TensorLookup) -> OperatorWork:
    """The operator's work with its family and sizes filled in; unchanged where the operator belongs to no family."""
    family, sizes = family_of(node, lookup)
    return replace(work, family=family, sizes=sizes) if family else work


def family_of(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    """Family and sizes of `node`; an empty family where none is known."""
    operator = ALIASES.get(node.op_type, node.op_type)
    if operator in FREE_OPERATORS:
        return "free", ()
    if operator in CONVOLUTIONS:
        return _convolution_sizes(node, lookup)
    if operator in ELEMENTWISE:
        return _elementwise_sizes(operator, node, lookup)
    if operator.startswith("Reduce"):
        operator = "reduce"
    sizes = _BY_OPERATOR.get(operator)
    return ("", ()) if sizes is None else sizes(node, lookup)


def _input_shape(node: onnx.NodeProto, lookup: TensorLookup, position: int) -> Shape:
    name = node.input[position] if len(node.input) > position else ""
    return tuple(max(length, 0) for length in (lookup.shape(name) if name else None) or ())


def _output_shape(node: onnx.NodeProto, lookup: TensorLookup) -> Shape:
    name = next((output for output in node.output if output), "")
    return tuple(max(length, 0) for length in (lookup.shape(name) if name else None) or ())


def _convolution_sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    input_shape, weights, out = (*(_input_shape(node, lookup, i) for i in (0, 1)), _output_shape(node, lookup))
    if len(weights) < 3 or len(out) < 3:
        return "", ()
    groups = max(int_attribute(node, "group", 1), 1)
    taps, pixels, row = prod(weights[2:]), out[0] * prod(out[2:]), out[-1]
    stride = prod(ints_attribute(node, "strides", (1,)))
    if groups > 1 and weights[1] == 1 and groups == input_shape[1]:
        return "depthwise", (weights[0], taps, pixels, row, stride, *block_sizes(weights[0]))
    if groups > 1:
        return "convg", (groups, weights[0] / groups, weights[1], taps, pixels, stride)
    if taps == 1 and pixels == 1:  # matrix times vector: bound by the weights
        return "conv1-pixel", (weights[0], weights[1])
    if taps == 1 and stride == 1:
        return "conv1", (weights[0], weights[1], pixels, *block_sizes(weights[0], weights[1]))
    return "convk", (weights[0], weights[1], taps, pixels, row, stride, *block_sizes(weights[0], weights[1]))


def _transposed_convolution_sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    weights, input_shape = _input_shape(node, lookup, 1), _input_shape(node, lookup, 0)
    if len(weights) < 3 or len(input_shape) < 3:
        return "", ()
    out_channels, pixels = weights[1] * int_attribute(node, "group", 1), input_shape[0] * prod(input_shape[2:])
    return "convt", (out_channels, weights[0], prod(weights[2:]), pixels)


def _product_sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    """Rows, inner length and columns of one matrix product, and the number of products that are batched."""
    first, out = _input_shape(node, lookup, 0), _output_shape(node, lookup)
    if not first:
        return "", ()
    inner = first[0] if int_attribute(node, "transA", 0) and len(first) == 2 else first[-1]
    columns = out[-1] if out else 1
    if lookup.is_weight(node.input[1]):
        count = prod(out) / max(columns, 1)
        return ("gemv", (inner, columns)) if count == 1 else ("gemm", (count, inner, columns))
    rows = out[-2] if len(out) > 1 else 1
    return "matmul", (prod(out[:-2]), rows, inner, columns)


def _recurrent_sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    input_shape, weights = _input_shape(node, lookup, 0), _input_shape(node, lookup, 1)
    if len(input_shape) < 3 or len(weights) < 3:
        return "", ()
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}.get(node.op_type, 4)
    return "recurrent", (input_shape[0] * input_shape[1] * weights[0], input_shape[2], weights[1] * gates / 4)


def _elementwise_sizes(operator: str, node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    """Number of elements; and the length of the repeated run where the smaller operand is broadcast."""
    out = _output_shape(node, lookup)
    if operator in BINARY_ELEMENTWISE and len(node.input) > 1:
        shapes = [_input_shape(node, lookup, position) for position in range(len(node.input))]
        if operator == "Mul" and node.input[0] == node.input[1]:
            return operator, (prod(out),)
        smaller = min(shapes, key=prod)
        if 1 < prod(smaller) < prod(out):
            return "broadcast", (prod(out), _broadcast_run(smaller, out))
    return operator, (prod(out),)


def _broadcast_run(small: Shape, out: Shape) -> int:
    """Number of contiguous results that use one contiguous stretch of the smaller operand."""
    padded = (1,) * (len(out) - len(small)) + small
    run, is_run_whole = 1, None
    for length, out_length in zip(reversed(padded), reversed(out), strict=True):
        if out_length == 1:
            continue
        same = length == out_length
        if is_run_whole is not None and same != is_run_whole:
            break
        is_run_whole = same
        run *= out_length
    return run


def _pool_sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    out = _output_shape(node, lookup)
    taps, stride = prod(ints_attribute(node, "kernel_shape")), prod(ints_attribute(node, "strides", (1,)))
    return node.op_type, (prod(out), taps, out[-1] if out else 1, stride)


def _reduction_sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    """Sizes of a reduction. `run`: contiguous elements in the result that the reduction walks over; 1 where it runs
    along the rows."""
    input_shape, results = _input_shape(node, lookup, 0), max(prod(_output_shape(node, lookup)), 1)
    axis = int_attribute(node, "axis", -1)
    axes = ints_attribute(node, "axes", (axis,) if node.op_type.startswith("Arg") else ())
    rank = len(input_shape)
    last = max((reduced_axis % rank for reduced_axis in axes), default=rank - 1) if rank else 0
    return "reduce", (prod(input_shape), results, prod(input_shape[last + 1 :]))


def _axis_sizes(family: str) -> Callable[[onnx.NodeProto, TensorLookup], tuple[str, Sizes]]:
    def sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
        input_shape = _input_shape(node, lookup, 0)
        axis = int_attribute(node, "axis", -1) if node.op_type != "InstanceNormalization" else 2
        start = axis % len(input_shape) if input_shape else 0
        return family, (prod(input_shape), prod(input_shape[start:]))

    return sizes


def _concat_sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    out, item = _output_shape(node, lookup), lookup.itemsize(node.output[0])
    axis = int_attribute(node, "axis", 1) % max(len(out), 1)
    pieces = max(sum(bool(name) for name in node.input), 1)
    return "Concat", (prod(out) * item, prod(out[axis:]) * item / pieces, pieces)


def _split_sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    input_shape, item = _input_shape(node, lookup, 0), lookup.itemsize(node.input[0])
    axis = int_attribute(node, "axis", 0) % max(len(input_shape), 1)
    pieces = max(len(node.output), 1)
    return "Split", (prod(input_shape) * item, prod(input_shape[axis:]) * item / pieces, pieces)


def _copy_sizes(family: str) -> Callable[[onnx.NodeProto, TensorLookup], tuple[str, Sizes]]:
    """Sizes of an operator that copies contiguous runs, each as long as the trailing axes that stay whole."""

    def sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
        input_shape, out = _input_shape(node, lookup, 0), _output_shape(node, lookup)
        run = item = lookup.itemsize(node.output[0])
        for before, after in zip(reversed(input_shape), reversed(out), strict=False):
            if before != after:
                break
            run *= after
        return family, (prod(out) * item, min(run, prod(out) * item))

    return sizes


def _transpose_sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    """Sizes of a transposition. `run`: elements that stay contiguous; `row`: distance in the source between
    neighbouring results."""
    input_shape = _input_shape(node, lookup, 0)
    order = ints_attribute(node, "perm", tuple(reversed(range(len(input_shape)))))
    if sorted(order) != list(range(len(input_shape))):
        return "", ()
    fixed_axes = 0
    while fixed_axes < len(order) and order[-1 - fixed_axes] == len(order) - 1 - fixed_axes:
        fixed_axes += 1
    moving = [axis for axis in order[: len(order) - fixed_axes] if input_shape[axis] > 1]
    if not moving or moving == sorted(moving):
        return "free", ()
    return "Transpose", (prod(input_shape), prod(input_shape[len(input_shape) - fixed_axes :]), input_shape[moving[-1]])


def _resize_sizes(node: onnx.NodeProto, lookup: TensorLookup) -> tuple[str, Sizes]:
    mode = next((attribute.s.decode() for attribute in node.attribute if attribute.name == "mode"), "nearest")
    out = _output_shape(node, lookup)
    return f"resize-{'nearest' if mode == 'nearest' else 'linear'}", (prod(out), out[-1] if out else 1)


_BY_OPERATOR: Final[Mapping[str, Callable[[onnx.NodeProto, TensorLookup], tuple[str, Sizes]]]] = {
    "ConvTranspose": _transposed_convolution_sizes,
    **dict.fromkeys(("Gemm", "MatMul", "FusedMatMul", "FusedGemm"), _product_sizes),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent_sizes),
    **dict.fromkeys(("MaxPool", "AveragePool"), _pool_sizes),
    **{family: _axis_sizes(family) for family in ("Softmax", "normalise")},
    **{family: _copy_sizes(family) for family in ("Slice", "Pad", "Gather")},
    "reduce": _reduction_sizes,
    "Concat": _concat_sizes,
    "Split": _split_sizes,
    "Transpose": _transpose_sizes,
    "Resize": _resize_sizes,
}
