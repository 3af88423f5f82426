"""What an operator's time depends on: its family, and a few sizes whose logarithms the calibration fits seconds over.

Promises one answer for the operators of a model and for the microbenchmarks alike: both come through `described`.
A family without an entry in a profile's fit is predicted by its class instead. Pure; no timing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

import onnx

from edgesplit_partitioner.ir.graph import Work

if TYPE_CHECKING:
    from edgesplit_partitioner.onnx_format.operator_work import Lookup

Sizes = tuple[float, ...]
Shape = tuple[int, ...]

FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "conv1": ("out_channels", "in_channels", "pixels"),
    "conv1-pixel": ("out_channels", "in_channels"),
    "convk": ("out_channels", "in_channels", "taps", "pixels", "row", "stride"),
    "depthwise": ("channels", "taps", "pixels", "row", "stride"),
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
"""The sizes of each family that has more than `elements`. `run` is how many bytes or elements lie side by side."""

ALIASES: Final[Mapping[str, str]] = {
    "Sub": "Add",
    "Sum": "Add",
    "Max": "Add",
    "Min": "Add",
    "Abs": "Relu",
    "Neg": "Relu",
    "HardSigmoid": "HardSwish",
    "Sqrt": "Div",
    "Reciprocal": "Div",
    "Gelu": "Erf",
    "Log": "Exp",
    "Softplus": "Exp",
    "LogSoftmax": "Softmax",
    "LayerNormalization": "normalise",
    "InstanceNormalization": "normalise",
    "GlobalAveragePool": "reduce",
    "GlobalMaxPool": "reduce",
    "Upsample": "Resize",
    "ArgMin": "reduce",
    "ArgMax": "reduce",
    "Tile": "Gather",
    "Expand": "Gather",
}
"""Operators that cost about what another one does."""

ELEMENT_BY_ELEMENT: Final = frozenset(
    {"Relu", "LeakyRelu", "Clip", "Sigmoid", "Tanh", "Erf", "Exp", "Pow", "Cast", "HardSwish", "Add", "Mul", "Div"}
    | {"BatchNormalization", "PRelu"}
)
BINARY: Final = frozenset({"Add", "Mul", "Div", "PRelu", "Pow"})
FREE: Final = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout", "Shape", "Size"})
CONVOLUTIONS: Final = frozenset({"Conv", "FusedConv"})


def described(work: Work, node: onnx.NodeProto, known: Lookup) -> Work:
    """The work with its family and sizes; as it was where the operator belongs to none."""
    family, sizes = family_of(node, known)
    return replace(work, family=family, sizes=sizes) if family else work


def family_of(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    """Family and sizes of `node`; an empty family where none is known."""
    operator = ALIASES.get(node.op_type, node.op_type)
    if operator in FREE:
        return "free", ()
    if operator in CONVOLUTIONS:
        return _convolution(node, known)
    if operator in ELEMENT_BY_ELEMENT:
        return _elements(operator, node, known)
    if operator.startswith("Reduce"):
        operator = "reduce"
    sizes = _BY_OPERATOR.get(operator)
    return ("", ()) if sizes is None else sizes(node, known)


def _shape(node: onnx.NodeProto, known: Lookup, place: int) -> Shape:
    name = node.input[place] if len(node.input) > place else ""
    return tuple(max(length, 0) for length in (known.shape(name) if name else None) or ())


def _written(node: onnx.NodeProto, known: Lookup) -> Shape:
    name = next((one for one in node.output if one), "")
    return tuple(max(length, 0) for length in (known.shape(name) if name else None) or ())


def _ints(node: onnx.NodeProto, name: str, default: Shape = ()) -> Shape:
    return next((tuple(one.ints) for one in node.attribute if one.name == name), default)


def _int(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(one.i) for one in node.attribute if one.name == name), default)


def _convolution(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    weights, out, given = _shape(node, known, 1), _written(node, known), _shape(node, known, 0)
    if len(weights) < 3 or len(out) < 3:
        return "", ()
    groups = max(_int(node, "group", 1), 1)
    taps, pixels, row = prod(weights[2:]), out[0] * prod(out[2:]), out[-1]
    stride = prod(_ints(node, "strides", (1,)))
    if groups > 1 and weights[1] == 1 and groups == given[1]:
        return "depthwise", (weights[0], taps, pixels, row, stride)
    if groups > 1:
        return "convg", (groups, weights[0] / groups, weights[1], taps, pixels, stride)
    if taps == 1 and pixels == 1:  # matrix times vector: bound by the weights
        return "conv1-pixel", (weights[0], weights[1])
    if taps == 1 and stride == 1:
        return "conv1", (weights[0], weights[1], pixels)
    return "convk", (weights[0], weights[1], taps, pixels, row, stride)


def _transposed(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    weights, given = _shape(node, known, 1), _shape(node, known, 0)
    if len(weights) < 3 or len(given) < 3:
        return "", ()
    return "convt", (weights[1] * _int(node, "group", 1), weights[0], prod(weights[2:]), given[0] * prod(given[2:]))


def _product(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    """Rows, inner length and columns of one product, and how many of them are done side by side."""
    first, out = _shape(node, known, 0), _written(node, known)
    if not first:
        return "", ()
    inner = first[0] if _int(node, "transA", 0) and len(first) == 2 else first[-1]
    columns = out[-1] if out else 1
    if known.is_weight(node.input[1]):
        count = prod(out) / max(columns, 1)
        return ("gemv", (inner, columns)) if count == 1 else ("gemm", (count, inner, columns))
    rows = out[-2] if len(out) > 1 else 1
    return "matmul", (prod(out[:-2]), rows, inner, columns)


def _recurrent(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    given, weights = _shape(node, known, 0), _shape(node, known, 1)
    if len(given) < 3 or len(weights) < 3:
        return "", ()
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}.get(node.op_type, 4)
    return "recurrent", (given[0] * given[1] * weights[0], given[2], weights[1] * gates / 4)


def _elements(operator: str, node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    """One size, unless the smaller operand is repeated in runs."""
    out = _written(node, known)
    if operator in BINARY and len(node.input) > 1:
        shapes = [_shape(node, known, place) for place in range(len(node.input))]
        if operator == "Mul" and node.input[0] == node.input[1]:
            return operator, (prod(out),)
        small = min(shapes, key=prod)
        if 1 < prod(small) < prod(out):
            return "broadcast", (prod(out), _repeated(small, out))
    return operator, (prod(out),)


def _repeated(small: Shape, out: Shape) -> int:
    """How many neighbouring results go by the same stretch of the smaller operand."""
    padded = (1,) * (len(out) - len(small)) + small
    run, alike = 1, None
    for length, whole in zip(reversed(padded), reversed(out), strict=True):
        if whole == 1:
            continue
        same = length == whole
        if alike is not None and same != alike:
            break
        alike = same
        run *= whole
    return run


def _pool(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    out = _written(node, known)
    taps, stride = prod(_ints(node, "kernel_shape")), prod(_ints(node, "strides", (1,)))
    return node.op_type, (prod(out), taps, out[-1] if out else 1, stride)


def _reduced(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    """`run`: elements side by side in the result that the reduction walks over; 1 where it runs along the rows."""
    given, results = _shape(node, known, 0), max(prod(_written(node, known)), 1)
    axis = _int(node, "axis", -1)
    axes = _ints(node, "axes", (axis,) if node.op_type.startswith("Arg") else ())
    last = max((one % len(given) for one in axes), default=len(given) - 1) if given else 0
    return "reduce", (prod(given), results, prod(given[last + 1 :]))


def _along_axis(family: str) -> Callable[[onnx.NodeProto, Lookup], tuple[str, Sizes]]:
    def sizes(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
        given = _shape(node, known, 0)
        axis = _int(node, "axis", -1) if node.op_type != "InstanceNormalization" else 2
        start = axis % len(given) if given else 0
        return family, (prod(given), prod(given[start:]))

    return sizes


def _concatenated(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    out, item = _written(node, known), known.itemsize(node.output[0])
    axis = _int(node, "axis", 1) % max(len(out), 1)
    pieces = max(sum(bool(name) for name in node.input), 1)
    return "Concat", (prod(out) * item, prod(out[axis:]) * item / pieces, pieces)


def _split(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    given, item = _shape(node, known, 0), known.itemsize(node.input[0])
    axis = _int(node, "axis", 0) % max(len(given), 1)
    pieces = max(len(node.output), 1)
    return "Split", (prod(given) * item, prod(given[axis:]) * item / pieces, pieces)


def _copied(family: str) -> Callable[[onnx.NodeProto, Lookup], tuple[str, Sizes]]:
    """Copies of stretches: as long as the trailing axes that stay whole."""

    def sizes(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
        given, out, item = _shape(node, known, 0), _written(node, known), known.itemsize(node.output[0])
        run = item
        for before, after in zip(reversed(given), reversed(out), strict=False):
            if before != after:
                break
            run *= after
        return family, (prod(out) * item, min(run, prod(out) * item))

    return sizes


def _transpose(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    """`run`: elements that stay side by side; `row`: how far apart in the source the next results lie."""
    given = _shape(node, known, 0)
    order = _ints(node, "perm", tuple(reversed(range(len(given)))))
    if sorted(order) != list(range(len(given))):
        return "", ()
    kept = 0
    while kept < len(order) and order[-1 - kept] == len(order) - 1 - kept:
        kept += 1
    moving = [axis for axis in order[: len(order) - kept] if given[axis] > 1]
    if not moving or moving == sorted(moving):
        return "free", ()
    return "Transpose", (prod(given), prod(given[len(given) - kept :]), given[moving[-1]])


def _resize(node: onnx.NodeProto, known: Lookup) -> tuple[str, Sizes]:
    mode = next((one.s.decode() for one in node.attribute if one.name == "mode"), "nearest")
    out = _written(node, known)
    return f"resize-{'nearest' if mode == 'nearest' else 'linear'}", (prod(out), out[-1] if out else 1)


_BY_OPERATOR: Final[Mapping[str, Callable[[onnx.NodeProto, Lookup], tuple[str, Sizes]]]] = {
    "ConvTranspose": _transposed,
    "Gemm": _product,
    "MatMul": _product,
    "FusedMatMul": _product,
    "FusedGemm": _product,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "reduce": _reduced,
    "Softmax": _along_axis("Softmax"),
    "normalise": _along_axis("normalise"),
    "Concat": _concatenated,
    "Split": _split,
    "Slice": _copied("Slice"),
    "Pad": _copied("Pad"),
    "Gather": _copied("Gather"),
    "Transpose": _transpose,
    "Resize": _resize,
}
