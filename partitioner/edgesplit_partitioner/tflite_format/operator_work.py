"""The work of one TFLite operator: floating-point operations, bytes moved, and the class whose rate bounds its time.

An operator that is not known counts as moving its inputs and outputs once, as in `onnx_format.operator_work`. Layouts
are TFLite's: activations NHWC, convolution weights (out, height, width, in), depthwise (1, height, width, channels).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from edgesplit_partitioner.ir.channel_blocks import block_sizes
from edgesplit_partitioner.ir.graph import OperatorClass, OperatorWork

NO_WORK = OperatorWork("memory", 0.0, 0.0)
"""Nothing is computed and nothing moves: the runtime passes the same buffer on."""
FREE_OPERATORS = frozenset({"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "SHAPE", "RANK", "BITCAST"})
"""Operators without work."""
CHEAP_ELEMENTWISE = frozenset(
    {"ABS", "ADD", "ADD_N", "CAST", "CEIL", "DEQUANTIZE", "DIV", "EQUAL", "FLOOR", "FLOOR_DIV", "FLOOR_MOD", "GREATER"}
    | {"GREATER_EQUAL", "HARD_SWISH", "LEAKY_RELU", "LESS", "LESS_EQUAL", "LOGICAL_AND", "LOGICAL_NOT", "LOGICAL_OR"}
    | {"MAXIMUM", "MINIMUM", "MUL", "NEG", "NOT_EQUAL", "PRELU", "QUANTIZE", "RELU", "RELU6", "RELU_0_TO_1", "ROUND"}
    | {"RELU_N1_TO_1", "RSQRT", "SELECT", "SELECT_V2", "SIGN", "SQRT", "SQUARE", "SQUARED_DIFFERENCE", "SUB"}
)
"""Elementwise operators with one operation per element."""
COSTLY_ELEMENTWISE = frozenset({"COS", "ELU", "EXP", "GELU", "LOG", "LOGISTIC", "POW", "SIN", "TANH", "ATAN2"})
"""Elementwise operators that evaluate a transcendental function, `TRANSCENDENTAL_FLOPS` operations per element."""
TRANSCENDENTAL_FLOPS = 8.0
"""Operations per element of a transcendental function, as in `onnx_format.operator_work`."""
PER_ELEMENT: Mapping[str, float] = {
    "ARG_MAX": 1.0,
    "ARG_MIN": 1.0,
    "CUMSUM": 1.0,
    "L2_NORMALIZATION": 3.0,
    "LOCAL_RESPONSE_NORMALIZATION": 12.0,
    "LOG_SOFTMAX": TRANSCENDENTAL_FLOPS + 3.0,
    "MEAN": 1.0,
    "SOFTMAX": TRANSCENDENTAL_FLOPS + 3.0,
    "SUM": 1.0,
    "TOPK_V2": 8.0,
}
"""Operations per element of the first input."""
POOLING_OPERATORS = frozenset({"AVERAGE_POOL_2D", "MAX_POOL_2D", "L2_POOL_2D"})
"""Pooling operators, with one operation per element of the window for each result."""
RESIZE_OPERATORS = frozenset({"RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"})
"""Resizing operators, with one operation per result."""
INDEXING_OPERATORS = frozenset(
    {"SLICE", "STRIDED_SLICE", "GATHER", "GATHER_ND", "FILL", "TILE", "RANGE", "BROADCAST_TO"}
)
"""Operators that read only as much as they write."""
RECURRENT = frozenset(
    {"LSTM", "RNN", "SVDF", "UNIDIRECTIONAL_SEQUENCE_LSTM", "UNIDIRECTIONAL_SEQUENCE_RNN"}
    | {"BIDIRECTIONAL_SEQUENCE_LSTM", "BIDIRECTIONAL_SEQUENCE_RNN"}
)
"""Operators that use every weight once per step and batch element."""

INTEGERS = frozenset({"INT8", "UINT8"})
"""Datatypes that integer kernels multiply."""


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """One operator, with what counting its work needs."""

    name: str
    """Operator type."""
    inputs: tuple[str, ...]
    """Names of the inputs; an optional input that is not given is empty."""
    outputs: tuple[str, ...]
    window: int
    """Elements under a pool's window; 1 for other operators."""


@dataclass(frozen=True, slots=True)
class TensorLookup:
    """Shapes and element sizes of the tensors and weights, by name."""

    shape: Callable[[str], tuple[int, ...]]
    item_bytes: Callable[[str], int]
    is_weight: Callable[[str], bool]
    datatype: Callable[[str], str] = lambda name: ""
    """Datatype in the Open Inference Protocol's notation."""

    def elements(self, name: str) -> int:
        """Number of elements of a tensor; open lengths count as 0."""
        return prod(max(length, 0) for length in self.shape(name))

    def bytes(self, names: Iterable[str]) -> float:
        """Bytes of all the tensors named; a name that is listed twice counts once."""
        return float(sum(self.elements(name) * self.item_bytes(name) for name in set(names) if name))


def work_of(operator: OperatorInfo, sizes: TensorLookup) -> OperatorWork:
    """The work of one operator."""
    if operator.name in FREE_OPERATORS or not operator.outputs or not operator.inputs:
        return NO_WORK
    product = _product(operator, sizes)
    return product if product is not None else _elementwise(operator, sizes)


def _product(operator: OperatorInfo, sizes: TensorLookup) -> OperatorWork | None:
    """2 x multiply-accumulates of convolutions, matrix products and recurrent layers; None for any other operator."""
    moved = sizes.bytes((*operator.inputs, *operator.outputs))
    out = sizes.elements(operator.outputs[0])
    kind: OperatorClass = "conv"
    first, second, third = (*operator.inputs, "", "", "")[:3]
    if operator.name in ("CONV_2D", "CONV_3D"):
        weights = sizes.shape(second)
        flops = 2.0 * out * prod(weights[1:] if operator.name == "CONV_2D" else weights[:-1])
    elif operator.name == "DEPTHWISE_CONV_2D":
        kind, flops = "depthwise", 2.0 * out * prod(sizes.shape(second)[1:3])
    elif operator.name == "TRANSPOSE_CONV":
        flops = 2.0 * sizes.elements(third) * prod(sizes.shape(second)[:3])
    elif operator.name in ("FULLY_CONNECTED", "BATCH_MATMUL"):
        factor = sizes.shape(second if operator.name == "FULLY_CONNECTED" else first)
        kind, flops = "gemm", 2.0 * out * (factor[-1] if factor else 0)
    elif operator.name in RECURRENT:
        weights_held = sum(sizes.elements(name) for name in operator.inputs if name and sizes.is_weight(name))
        steps = prod(max(length, 1) for length in sizes.shape(first)[:-1])
        kind, flops = "gemm", 2.0 * steps * weights_held
    else:
        return None
    family, features = _family(operator.name, first, second, operator.outputs[0], sizes)
    # Weights alone in int8 are not enough: LiteRT then quantises what they multiply in each run.
    multiplied = third if operator.name == "TRANSPOSE_CONV" else first
    is_int8 = {sizes.datatype(multiplied), sizes.datatype(second)} <= INTEGERS
    return OperatorWork(kind, flops, moved, family, features, is_int8)


def _family(name: str, source: str, weight: str, written: str, sizes: TensorLookup) -> tuple[str, tuple[float, ...]]:
    """Operator family in a fit of LiteRT and its sizes: as `onnx_format.operator_features`, with the datatype of the
    weights after a slash, because kernels differ by it; an empty family where there is none."""
    weights, before, after = sizes.shape(weight), sizes.shape(source), sizes.shape(written)
    datatype = sizes.datatype(weight).lower()
    if not datatype or not sizes.is_weight(weight):
        return "", ()
    if name == "FULLY_CONNECTED" and len(weights) == 2:
        rows = prod(max(length, 1) for length in before) // max(weights[1], 1)
        family, features = ("gemv", weights[::-1]) if rows == 1 else ("gemm", (rows, *weights[::-1]))
        return f"{family}/{datatype}", features
    if name not in ("CONV_2D", "DEPTHWISE_CONV_2D") or {len(weights), len(before), len(after)} != {4}:
        return "", ()
    taps, pixels = weights[1] * weights[2], after[0] * after[1] * after[2]
    stride = max(round(before[1] * before[2] / max(after[1] * after[2], 1)), 1)
    if name == "DEPTHWISE_CONV_2D":
        return f"depthwise/{datatype}", (weights[3], taps, pixels, after[2], stride, *block_sizes(weights[3]))
    if taps == 1 and pixels == 1:
        return f"conv1-pixel/{datatype}", (weights[0], weights[3])
    if taps == 1 and stride == 1:
        return f"conv1/{datatype}", (weights[0], weights[3], pixels, *block_sizes(weights[0], weights[3]))
    blocks = block_sizes(weights[0], weights[3])
    return f"convk/{datatype}", (weights[0], weights[3], taps, pixels, after[2], stride, *blocks)


def _elementwise(operator: OperatorInfo, sizes: TensorLookup) -> OperatorWork:
    """The work of operators whose operations grow with the number of elements; an operator that is not known only moves
    bytes."""
    moved = sizes.bytes((*operator.inputs, *operator.outputs))
    out = sizes.elements(operator.outputs[0])
    if operator.name in CHEAP_ELEMENTWISE:
        return OperatorWork("elementwise", float(out), moved)
    if operator.name in COSTLY_ELEMENTWISE:
        return OperatorWork("elementwise", TRANSCENDENTAL_FLOPS * out, moved)
    if operator.name in PER_ELEMENT:
        return OperatorWork("memory", PER_ELEMENT[operator.name] * sizes.elements(operator.inputs[0]), moved)
    if operator.name.startswith("REDUCE_"):
        return OperatorWork("memory", float(sizes.elements(operator.inputs[0])), moved)
    if operator.name in POOLING_OPERATORS:
        return OperatorWork("memory", float(out * operator.window), moved)
    if operator.name in RESIZE_OPERATORS:
        return OperatorWork("memory", float(out), moved)
    if operator.name in INDEXING_OPERATORS:
        return OperatorWork("memory", 0.0, 2 * sizes.bytes(operator.outputs))
    return OperatorWork("memory", 0.0, moved)
