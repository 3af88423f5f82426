"""What one TFLite operator has to do: floating-point operations, bytes moved, and the class whose rate bounds it.

As `work` for ONNX: an operator that is not known counts as moving its inputs and outputs once. Layouts are TFLite's:
activations NHWC, convolution weights (out, height, width, in), depthwise (1, height, width, channels).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from edgesplit_partitioner.ir.graph import OperatorClass, Work

FREE = Work("memory", 0.0, 0.0)
FREE_OPERATORS = frozenset({"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "SHAPE", "RANK", "BITCAST"})
CHEAP = frozenset(
    {"ABS", "ADD", "ADD_N", "CAST", "CEIL", "DEQUANTIZE", "DIV", "EQUAL", "FLOOR", "FLOOR_DIV", "FLOOR_MOD", "GREATER"}
    | {"GREATER_EQUAL", "HARD_SWISH", "LEAKY_RELU", "LESS", "LESS_EQUAL", "LOGICAL_AND", "LOGICAL_NOT", "LOGICAL_OR"}
    | {"MAXIMUM", "MINIMUM", "MUL", "NEG", "NOT_EQUAL", "PRELU", "QUANTIZE", "RELU", "RELU6", "RELU_0_TO_1", "ROUND"}
    | {"RELU_N1_TO_1", "RSQRT", "SELECT", "SELECT_V2", "SIGN", "SQRT", "SQUARE", "SQUARED_DIFFERENCE", "SUB"}
)
COSTLY = frozenset({"COS", "ELU", "EXP", "GELU", "LOG", "LOGISTIC", "POW", "SIN", "TANH", "ATAN2"})
COSTLY_ELEMENT = 8.0
"""Operations per element of a transcendental function, as in `work`."""
PER_ELEMENT: Mapping[str, float] = {
    "ARG_MAX": 1.0,
    "ARG_MIN": 1.0,
    "CUMSUM": 1.0,
    "L2_NORMALIZATION": 3.0,
    "LOCAL_RESPONSE_NORMALIZATION": 12.0,
    "LOG_SOFTMAX": COSTLY_ELEMENT + 3.0,
    "MEAN": 1.0,
    "SOFTMAX": COSTLY_ELEMENT + 3.0,
    "SUM": 1.0,
    "TOPK_V2": 8.0,
}
"""Operations per element of the first input."""
POOLS = frozenset({"AVERAGE_POOL_2D", "MAX_POOL_2D", "L2_POOL_2D"})
RESIZES = frozenset({"RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"})
PICKING = frozenset({"SLICE", "STRIDED_SLICE", "GATHER", "GATHER_ND", "FILL", "TILE", "RANGE", "BROADCAST_TO"})
"""Read only as much as they write."""
RECURRENT = frozenset(
    {"LSTM", "RNN", "SVDF", "UNIDIRECTIONAL_SEQUENCE_LSTM", "UNIDIRECTIONAL_SEQUENCE_RNN"}
    | {"BIDIRECTIONAL_SEQUENCE_LSTM", "BIDIRECTIONAL_SEQUENCE_RNN"}
)


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator, as its work is counted."""

    name: str
    inputs: tuple[str, ...]
    """An optional one that is not given is empty."""
    outputs: tuple[str, ...]
    window: int
    """Elements under a pool's window."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is known of tensors, weights included, by name."""

    shape: Callable[[str], tuple[int, ...]]
    item_bytes: Callable[[str], int]
    is_weight: Callable[[str], bool]

    def elements(self, name: str) -> int:
        """Number of elements."""
        return prod(max(length, 0) for length in self.shape(name))

    def bytes(self, names: Iterable[str]) -> float:
        """Of all the tensors named, each once."""
        return float(sum(self.elements(name) * self.item_bytes(name) for name in set(names) if name))


def work_of(operator: Operator, sizes: Sizes) -> Work:
    """The work of one operator."""
    if operator.name in FREE_OPERATORS or not operator.outputs or not operator.inputs:
        return FREE
    product = _product(operator, sizes)
    return product if product is not None else _element_by_element(operator, sizes)


def _product(operator: Operator, sizes: Sizes) -> Work | None:
    """2 x multiply-accumulates of convolutions, matrix products and recurrent layers; None of anything else."""
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
    return Work(kind, flops, moved)


def _element_by_element(operator: Operator, sizes: Sizes) -> Work:
    moved = sizes.bytes((*operator.inputs, *operator.outputs))
    out = sizes.elements(operator.outputs[0])
    if operator.name in CHEAP:
        return Work("elementwise", float(out), moved)
    if operator.name in COSTLY:
        return Work("elementwise", COSTLY_ELEMENT * out, moved)
    if operator.name in PER_ELEMENT:
        return Work("memory", PER_ELEMENT[operator.name] * sizes.elements(operator.inputs[0]), moved)
    if operator.name.startswith("REDUCE_"):
        return Work("memory", float(sizes.elements(operator.inputs[0])), moved)
    if operator.name in POOLS:
        return Work("memory", float(out * operator.window), moved)
    if operator.name in RESIZES:
        return Work("memory", float(out), moved)
    if operator.name in PICKING:
        return Work("memory", 0.0, 2 * sizes.bytes(operator.outputs))
    return Work("memory", 0.0, moved)
