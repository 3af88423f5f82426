"""Microbenchmarks of the calibration: a designed grid of operators, each as a small ONNX model.

The points and their order are the same every time, and every prefix of the grid covers all families evenly, so that a
slow machine may stop early. Sizes come from a Halton sequence and are spread evenly in the logarithm. Nothing is timed
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgesplit_partitioner.ir.graph import OperatorWork
from edgesplit_partitioner.onnx_format.operator_work import graph_lookup, work_of
from edgesplit_partitioner.onnx_format.tensor_lookup import TensorLookup

Shape = tuple[int, ...]
FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64

OPSET = 17
MAX_FLOPS = 4e8
"""Upper limit of an operator's FLOPs."""
MAX_ELEMENTS = 3_000_000
"""Upper limit of an operator's elements."""
MAX_WEIGHT_BYTES = 8 << 20
"""Upper limit of the weights of all copies of a point together, if there are more than `MIN_COPIES`."""
TARGET_S, MIN_COPIES, MAX_COPIES = 200e-6, 2, 24
"""Estimated seconds that the copies of an operator in one model should take together, so that the clock's resolution
does not matter; and the least and the greatest number of copies."""
PORT_COUNT = 8
"""Number of operators in the models of `port_model`."""
PRIMES = (2, 3, 5, 7, 11, 13)
"""Bases of the Halton sequence, one per dimension."""


@dataclass(frozen=True, slots=True)
class Point:
    """One operator with given sizes."""

    operator: str
    inputs: tuple[Shape, ...]
    weights: tuple[Shape, ...] = ()
    """Shapes of the weights; each copy has its own, so that weights are read from where a whole model's weights are
    read from."""
    constants: tuple[tuple[int, ...], ...] = ()
    """Integers as further inputs (Slice's starts, ends, axes, steps)."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    datatype: int = FLOAT
    chained: bool = False
    """Each copy works in place on the output of the copy before, as activations after a convolution do."""


def grid() -> list[Point]:
    """All points, the families interleaved."""
    return _interleaved((*_FAMILIES, *_PARTIAL_BLOCKS))


def even_channels_grid() -> list[Point]:
    """The points without those of `partial_block_points`."""
    return _interleaved(_FAMILIES)


def partial_block_points() -> list[Point]:
    """Convolutions with numbers of channels that networks have and that fill no whole blocks: three of an image, and
    odd multiples of 8."""
    return _interleaved(_PARTIAL_BLOCKS)


def _interleaved(families: Sequence[tuple[int, Callable[..., Point]]]) -> list[Point]:
    """All points of these families, evenly covered by every prefix."""
    ranked: list[tuple[float, int, Point]] = []
    for family, (count, make_point) in enumerate(families):
        points = [make_point(*numbers) for numbers in _halton(count)]
        ranked += [((rank + 0.5) / len(points), family, point) for rank, point in enumerate(points)]
    return [point for _, _, point in sorted(ranked, key=lambda entry: entry[:2])]


def build(point: Point, copies: int | None = None) -> bytes:
    """The point as an ONNX model: `copies` of its operator (by default `copies_of(point)`), and one tiny output that
    depends on none of them."""
    copy_count = copies_of(point) if copies is None else copies
    rng = np.random.default_rng(1)
    names = [f"x{position}" for position in range(len(point.inputs))]
    nodes, initializers = [], []
    for column, values in enumerate(point.constants):
        kind = np.float32 if point.operator in ("Resize", "Pow") else np.int64
        initializers.append(numpy_helper.from_array(np.array(values, kind), f"k{column}"))
    for copy in range(copy_count):
        weight_names = [f"w{copy}-{column}" for column in range(len(point.weights))]
        initializers += [_weight(name, shape, rng) for name, shape in zip(weight_names, point.weights, strict=True)]
        nodes.append(_node(point, copy, names, weight_names))
    nodes.append(helper.make_node("Shape", ["x0"], ["out"]))
    inputs = [
        helper.make_tensor_value_info(name, point.datatype, shape)
        for name, shape in zip(names, point.inputs, strict=True)
    ]
    output = helper.make_tensor_value_info("out", INT64, [len(point.inputs[0])])
    graph = helper.make_graph(nodes, "point", inputs, [output], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    return bytes(model.SerializeToString())


def port_model(wide: bool) -> bytes:
    """A model of eight tiny operators, whose times with many and with few tensors differ by the cost of inputs and
    outputs. `wide`: side by side, each with an input and output of its own; else in a chain."""
    nodes, inputs, outputs = [], [], []
    for position in range(PORT_COUNT):
        source = f"x{position}" if wide or not position else f"y{position - 1}"
        nodes.append(helper.make_node("Relu", [source], [f"y{position}"]))
        if wide or not position:
            inputs.append(helper.make_tensor_value_info(source, FLOAT, [1, 16]))
        if wide or position == PORT_COUNT - 1:
            outputs.append(helper.make_tensor_value_info(f"y{position}", FLOAT, [1, 16]))
    graph = helper.make_graph(nodes, "ports", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    return bytes(model.SerializeToString())


def point_work(point: Point) -> OperatorWork:
    """The point's work, family and sizes, computed in the same way as for a model's operators."""
    model = onnx.load_model_from_string(build(point, 1))
    return model_work(model)[0]


def model_work(model: onnx.ModelProto) -> list[OperatorWork]:
    """Work of every node of a model whose shapes can be inferred."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    lookup = graph_lookup(graph, TensorLookup(lambda _: None, lambda _: 4, lambda _: False))
    return [work_of(node, lookup) for node in graph.node]


def copies_of(point: Point) -> int:
    """Number of copies that take about `TARGET_S` by a rough estimate, within the limits of copies and weights."""
    copy_work = point_work(point)
    guess_s = (
        1e-6 + copy_work.flops / (5e9 if copy_work.operator == "depthwise" else 5e10) + copy_work.bytes_moved / 1e10
    )
    bytes_each = 4 * sum(math.prod(shape) for shape in point.weights)
    max_copies = min(MAX_COPIES, max(MIN_COPIES, MAX_WEIGHT_BYTES // max(bytes_each, 1)))
    return int(min(max(round(TARGET_S / guess_s), MIN_COPIES), max_copies))


def _node(point: Point, copy: int, names: list[str], weight_names: list[str]) -> onnx.NodeProto:
    """The operator's node for one copy."""
    first_input = f"y{copy - 1}" if point.chained and copy else names[0]
    constants = [f"k{column}" for column in range(len(point.constants))]
    outputs = [f"y{copy}"] + [f"y{copy}-{piece}" for piece in range(1, point.outputs)]
    inputs = [first_input, *names[1:], *weight_names]
    if point.operator == "Resize":
        inputs.append("")
    return helper.make_node(point.operator, [*inputs, *constants], outputs, name=f"n{copy}", **point.attributes)


def _weight(name: str, shape: Shape, rng: np.random.Generator) -> onnx.TensorProto:
    """Random values small enough that activations neither vanish nor overflow."""
    block = rng.standard_normal(4096, dtype=np.float32) * np.float32(0.05)
    return numpy_helper.from_array(np.resize(block, shape), name)


def _halton(count: int) -> Iterator[tuple[float, ...]]:
    """Evenly spread points of the unit cube; the first 20 are left out because they are correlated."""
    # Halton, Numerische Mathematik 2, 1960: coordinate k is the radical inverse of the index in the k-th prime base.
    for index in range(20, 20 + count):
        yield tuple(_radical_inverse(index, base) for base in PRIMES)


def _radical_inverse(index: int, base: int) -> float:
    """The integer's digits in this base, mirrored at the radix point."""
    value, digit_weight = 0.0, 1.0 / base
    while index:
        index, digit = divmod(index, base)
        value += digit * digit_weight
        digit_weight /= base
    return value


def _log_size(u: float, low: float, high: float) -> int:
    """A size between `low` and `high`, evenly in the logarithm; from 16 on a multiple of 4, above 32 of 8, as channels
    are in nearly all networks: kernels for blocks of channels run no others."""
    value = float(low * (high / low) ** u)
    step = 8 if value > 32 else 4 if value >= 16 else 1
    return max(1, round(value / step) * step)


def _channels(u: float, low: float, high: float) -> int:
    """As `_log_size`, from 16 on a multiple of 16, as most channels are: kernels for blocks of 8 or 16 pad others."""
    value = _log_size(u, low, high)
    return value if value < 16 else round(value / 16) * 16


def _pick(u: float, *choices: Any) -> Any:
    """The choice that `u`, between 0 and 1, falls on."""
    return choices[min(int(u * len(choices)), len(choices) - 1)]


def _fit_side(side: int, each: float, limit: float) -> int:
    """The side, reduced until side x side x `each` is at most `limit`."""
    return max(1, min(side, int(math.sqrt(limit / max(each, 1e-9)))))


def _conv(cout: int, cin: int, kernel: Shape, side: Shape, stride: int, groups: int, dilation: int = 1) -> Point:
    pads = [dilation * (length // 2) for length in kernel]
    attributes = {
        "kernel_shape": list(kernel),
        "strides": [stride] * len(kernel),
        "pads": pads + pads,
        "group": groups,
        "dilations": [dilation] * len(kernel),
    }
    return Point("Conv", ((1, cin, *side),), ((cout, cin // groups, *kernel), (cout,)), attributes=attributes)


def _conv1(u: float, v: float, w: float, *rest: float) -> Point:
    cout, cin = _channels(u, 6, 1200), _channels(v, 3, 1200)
    side = 1 if w < 0.16 else _fit_side(_log_size((w - 0.16) / 0.84, 2, 160), 2.0 * cout * cin, MAX_FLOPS)
    return _conv(cout, cin, (1, 1), (side, side), 1, 1)


def _convk(u: float, v: float, w: float, x: float, y: float, z: float) -> Point:
    kernel = _pick(x, 3, 3, 3, 3, 3, 5, 7, 1)
    stride = 2 if kernel == 1 else _pick(y, 1, 1, 1, 2)
    cout, cin = _channels(u, 4, 512), _channels(v * v if kernel > 3 else v, 1, 512)
    dilation = _pick(z, 1, 1, 1, 1, 2) if kernel == 3 and stride == 1 else 1
    side = _fit_side(_log_size(w, 4, 224), 2.0 * cout * cin * kernel**2 / stride**2, MAX_FLOPS)
    side = _fit_side(max(side, dilation * 2), max(cin, cout), MAX_ELEMENTS)
    return _conv(cout, cin, (kernel, kernel), (side, side), stride, 1, dilation)


def _conv_line(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    """Convolution along one axis, as in audio models: short filters over many channels, or long ones over a signal."""
    if x < 0.3:
        taps = _pick(x / 0.3, 16, 64, 256)
        shape = (1, _log_size(v, 1, 4), taps * _log_size(w, 1, 40) // 2 + taps)
        attributes = {"kernel_shape": [taps], "strides": [taps // 2]}
        return Point("Conv", (shape,), ((_log_size(u, 16, 512), shape[1], taps),), attributes=attributes)
    stride = _pick((x - 0.3) / 0.7, 1, 1, 2)
    cout, cin = _log_size(u, 16, 512), _log_size(v, 1, 512)
    length = int(min(_log_size(w, 1, 400), MAX_FLOPS / (6 * cout * cin)))
    return _conv(cout, cin, (3,), (max(length, 1),), stride, 1)


def _depthwise(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    channels, kernel, stride = _channels(u, 6, 1024), _pick(w, 3, 3, 3, 5), _pick(x, 1, 1, 2)
    side = _fit_side(_log_size(v, 4, 160), channels, MAX_ELEMENTS)
    return _conv(channels, channels, (kernel, kernel), (side, side), stride, channels)


def _grouped(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    groups, each, kernel = _pick(w, 2, 4, 8, 32), _log_size(u, 2, 64), _pick(x, 1, 3, 3)
    side = _fit_side(_log_size(v, 4, 112), 2.0 * groups * each * each * kernel**2, MAX_FLOPS)
    return _conv(groups * each, groups * each, (kernel, kernel), (side, side), 1, groups)


def _first_conv(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    """A network's first convolution: of a grey or coloured image, with few channels after it."""
    cin, kernel = _pick(v, 1, 3, 3, 3), _pick(x, 3, 3, 3, 5, 7)
    cout, stride = 8 * _log_size(u, 1, 8), _pick(w * 7 % 1, 1, 2, 2)
    side = _fit_side(_log_size(w, 24, 320), 2.0 * cout * cin * kernel**2 / stride**2, MAX_FLOPS)
    return _conv(cout, cin, (kernel, kernel), (side, side), stride, 1)


def _half_blocks(u: float, low: float, high: float) -> int:
    """An odd multiple of 8 channels, as networks have whose width was scaled: half of the last block is empty."""
    value = float(low * (high / low) ** u)
    return 16 * max(0, round((value - 8) / 16)) + 8


def _conv1_half(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    cout, cin = _half_blocks(u, 8, 400), _half_blocks(v, 8, 400)
    cout, cin = (cout, cin) if x < 0.4 else (cout, _channels(v, 16, 400)) if x < 0.7 else (_channels(u, 16, 400), cin)
    side = _fit_side(_log_size(w, 4, 112), 2.0 * cout * cin, MAX_FLOPS)
    return _conv(cout, cin, (1, 1), (side, side), 1, 1)


def _convk_half(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    cout, cin, stride = _half_blocks(u, 8, 200), _half_blocks(v, 8, 200), _pick(x, 1, 1, 2)
    side = _fit_side(_log_size(w, 4, 112), 18.0 * cout * cin / stride**2, MAX_FLOPS)
    return _conv(cout, cin, (3, 3), (side, side), stride, 1)


def _depthwise_half(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    channels, kernel, stride = _half_blocks(u, 8, 400), _pick(w, 3, 3, 3, 5), _pick(x, 1, 1, 2)
    side = _fit_side(_log_size(v, 4, 160), channels, MAX_ELEMENTS)
    return _conv(channels, channels, (kernel, kernel), (side, side), stride, channels)


def _transposed_conv(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    cout, cin, kernel = _log_size(u, 4, 256), _log_size(v, 4, 256), _pick(x, 2, 3, 4)
    side = _fit_side(_log_size(w, 4, 80), 2.0 * cout * cin * kernel**2, MAX_FLOPS)
    attributes = {"kernel_shape": [kernel, kernel], "strides": [2, 2]}
    return Point("ConvTranspose", ((1, cin, side, side),), ((cin, cout, kernel, kernel),), attributes=attributes)


def _gemm(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    inner, columns = _log_size(u, 3, 2048), _log_size(v, 2, 2048)
    rows = 1 if w < 0.5 else int(min(_log_size((w - 0.5) / 0.5, 2, 512), MAX_FLOPS / (2 * inner * columns)))
    if x < 0.3:
        return Point("MatMul", ((1, max(rows, 1), inner),), ((inner, columns),))
    attributes = {"transB": int(x < 0.75)}
    shape = (columns, inner) if x < 0.75 else (inner, columns)
    return Point("Gemm", ((max(rows, 1), inner),), (shape, (columns,)), attributes=attributes)


def _matmul(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    count, inner, columns = _pick(x, 1, 2, 4, 8), _log_size(u, 8, 512), _log_size(v, 8, 512)
    rows = max(1, int(min(_log_size(w, 1, 512), MAX_FLOPS / (2 * count * inner * columns))))
    return Point("MatMul", ((1, count, rows, inner), (1, count, inner, columns)))


def _lstm(u: float, v: float, w: float, *rest: float) -> Point:
    steps, inputs, hidden = _pick(w, 1, 1, 1, 4, 16), _log_size(u, 16, 512), _log_size(v, 16, 256)
    weights = ((1, 4 * hidden, inputs), (1, 4 * hidden, hidden), (1, 8 * hidden))
    return Point("LSTM", ((steps, 1, inputs),), weights, attributes={"hidden_size": hidden})


def _elements(operator: str, datatype: int = FLOAT, **attributes: Any) -> Callable[..., Point]:
    def make(u: float, *rest: float) -> Point:
        chained = operator in ("Relu", "LeakyRelu", "Clip")
        constants = ((2,),) if operator == "Pow" else ()
        shape = (1, round(16 * (MAX_ELEMENTS / 16) ** u))
        return Point(operator, (shape,), (), constants, attributes, datatype=datatype, chained=chained)

    return make


def _two_inputs(operator: str) -> Callable[..., Point]:
    def make(u: float, *rest: float) -> Point:
        shape = (1, round(16 * (MAX_ELEMENTS / 2 / 16) ** u))
        return Point(operator, (shape, shape))

    return make


def _broadcast(u: float, v: float, w: float, *rest: float) -> Point:
    operator = _pick(w, "Add", "Mul")
    if v < 0.5:  # per channel
        channels, side = _log_size(2 * v, 4, 512), _log_size(u, 2, 112)
        side = _fit_side(side, channels, MAX_ELEMENTS)
        return Point(operator, ((1, channels, side, side),), ((1, channels, 1, 1),))
    columns = _log_size(2 * v - 1, 4, 1024)
    return Point(operator, ((1, int(min(_log_size(u, 1, 4096), MAX_ELEMENTS / columns)), columns),), ((columns,),))


def _batch_norm(u: float, v: float, *rest: float) -> Point:
    channels = _log_size(u, 4, 512)
    side = _fit_side(_log_size(v, 2, 112), channels, MAX_ELEMENTS)
    return Point("BatchNormalization", ((1, channels, side, side),), ((channels,),) * 4)


def _pool(operator: str) -> Callable[..., Point]:
    def make(u: float, v: float, w: float, x: float, *rest: float) -> Point:
        channels, kernel, stride = _log_size(u, 4, 512), _pick(w, 2, 3, 3, 5), _pick(x, 1, 2, 2)
        side = max(kernel, _fit_side(_log_size(v, 4, 160), channels, MAX_ELEMENTS))
        attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        return Point(operator, ((1, channels, side, side),), attributes=attributes)

    return make


def _reduction(u: float, v: float, w: float, *rest: float) -> Point:
    channels = _log_size(u, 4, 1024)
    side = _fit_side(_log_size(v, 2, 80), channels, MAX_ELEMENTS)
    if w < 0.4:
        return Point("GlobalAveragePool", ((1, channels, side, side),))
    axes = _pick((w - 0.4) / 0.6, [-1], [1], [2, 3])
    return Point("ReduceMean", ((1, channels, side, side),), attributes={"axes": axes})


def _rows(operator: str, columns: int) -> Callable[..., Point]:
    """Operators that work row by row; `columns` is the number of weights of a row's length."""

    def make(u: float, v: float, *rest: float) -> Point:
        length = _log_size(v, 2, 2048)
        rows = int(max(1, min(_log_size(u, 1, 8192), 400_000 / length)))
        return Point(operator, ((1, rows, length),), ((length,),) * columns, attributes={"axis": -1})

    return make


def _concat(u: float, v: float, w: float, *rest: float) -> Point:
    pieces, channels = _pick(w, 2, 2, 3, 4), _log_size(u, 2, 256)
    side = _fit_side(_log_size(v, 1, 112), pieces * channels, MAX_ELEMENTS)
    return Point("Concat", ((1, channels, side, side),) * pieces, attributes={"axis": 1})


def _split(u: float, v: float, w: float, *rest: float) -> Point:
    pieces, channels = _pick(w, 2, 3, 4), _log_size(u, 2, 128)
    side = _fit_side(_log_size(v, 1, 80), pieces * channels, MAX_ELEMENTS)
    return Point("Split", ((1, pieces * channels, side, side),), attributes={"axis": 1}, outputs=pieces)


def _slice(u: float, v: float, w: float, *rest: float) -> Point:
    channels, side = _log_size(u, 1, 256), 2 * _log_size(v, 1, 200)
    side = max(2, _fit_side(side, channels, MAX_ELEMENTS) // 2 * 2)
    axis, step = _pick(w, (1, 1), (2, 1), (2, 2), (3, 2), (3, 1))
    length = channels if axis == 1 else side
    constants = ((0,), (max(length // 2, 1) if step == 1 else length,), (axis,), (step,))
    return Point("Slice", ((1, channels, side, side),), (), constants)


def _pad(u: float, v: float, w: float, *rest: float) -> Point:
    channels, width = _log_size(u, 1, 256), _pick(w, 1, 2)
    side = _fit_side(_log_size(v, 3, 112), channels, MAX_ELEMENTS)
    return Point("Pad", ((1, channels, side, side),), (), ((0, 0, width, width, 0, 0, width, width),))


def _transpose(u: float, v: float, w: float, *rest: float) -> Point:
    channels = _log_size(u, 2, 512)
    side = _fit_side(_log_size(v, 2, 112), channels, MAX_ELEMENTS)
    order = _pick(w, [0, 2, 3, 1], [0, 3, 1, 2], [0, 1, 3, 2], [0, 2, 1, 3])
    return Point("Transpose", ((1, channels, side, side),), attributes={"perm": order})


def _resize(mode: str) -> Callable[..., Point]:
    def make(u: float, v: float, *rest: float) -> Point:
        channels = _log_size(u, 2, 256)
        side = _fit_side(_log_size(v, 4, 80), 4 * channels, MAX_ELEMENTS)
        rounding = {"nearest_mode": "floor"} if mode == "nearest" else {}
        where = {"coordinate_transformation_mode": "asymmetric" if mode == "nearest" else "half_pixel"}
        attributes = {"mode": mode, **where, **rounding}
        return Point("Resize", ((1, channels, side, side),), (), ((1, 1, 2, 2),), attributes)

    return make


def _gather(u: float, v: float, w: float, *rest: float) -> Point:
    length, rows = _log_size(u, 1, 512), _log_size(v, 4, 1000)
    chosen = tuple(range(0, rows, _pick(w, 1, 2, 4)))
    return Point("Gather", ((rows, length),), (), (chosen,), {"axis": 0})


def _reshape(u: float, *rest: float) -> Point:
    length = _log_size(u, 16, 100_000)
    return Point("Reshape", ((1, length),), (), ((-1,),))


_FAMILIES: Final[tuple[tuple[int, Callable[..., Point]], ...]] = (
    (156, _conv1), (150, _convk), (40, _conv_line), (90, _depthwise), (24, _grouped), (16, _transposed_conv),
    (80, _gemm), (24, _matmul), (16, _lstm),
    (14, _elements("Relu")), (8, _elements("LeakyRelu", alpha=0.1)), (8, _elements("Clip")), (14, _elements("Sigmoid")),
    (10, _elements("Tanh")), (8, _elements("Erf")), (8, _elements("Exp")), (8, _elements("Pow")),
    (8, _elements("HardSwish")), (8, _elements("Cast", HALF, to=FLOAT)),
    (14, _two_inputs("Add")), (14, _two_inputs("Mul")), (10, _two_inputs("Div")), (28, _broadcast), (8, _batch_norm),
    (26, _pool("MaxPool")), (16, _pool("AveragePool")), (24, _reduction),
    (14, _rows("Softmax", 0)), (10, _rows("LayerNormalization", 2)),
    (24, _concat), (12, _split), (26, _slice), (10, _pad), (28, _transpose),
    (14, _resize("nearest")), (12, _resize("linear")), (10, _gather), (3, _reshape),
)  # fmt: skip
"""Number of points and maker of each family."""
_PARTIAL_BLOCKS: Final[tuple[tuple[int, Callable[..., Point]], ...]] = (
    (24, _first_conv), (20, _conv1_half), (16, _convk_half), (20, _depthwise_half),
)  # fmt: skip
"""As `_FAMILIES`, with numbers of channels that fill no blocks."""
