"""The microbenchmarks of a calibration: a designed grid of operators, each as a small ONNX model.

Promises the same points in the same order every time: every prefix of the grid covers all families evenly, so that a
slow machine may stop early. Sizes come from a Halton sequence, spread evenly in the logarithm. No timing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgesplit_partitioner.ir.graph import Work
from edgesplit_partitioner.onnx_format import nodes as onnx_nodes
from edgesplit_partitioner.onnx_format.operator_work import element_bytes, work_of

Shape = tuple[int, ...]
FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64

OPSET = 17
MOST_OPERATIONS = 4e8
MOST_ELEMENTS = 3_000_000
WEIGHT_BYTES = 8 << 20
"""Of all copies of a point together."""
WANTED_S, MOST_COPIES = 200e-6, 24
"""A model holds as many copies of its operator as take about so long by a guess, for the clock's sake."""
PORTS = 8
PRIMES = (2, 3, 5, 7, 11, 13)


@dataclass(frozen=True, slots=True)
class Point:
    """One operator of one size."""

    operator: str
    inputs: tuple[Shape, ...]
    weights: tuple[Shape, ...] = ()
    """Fresh in every copy, so that they come from where a whole model's weights come from."""
    constants: tuple[tuple[int, ...], ...] = ()
    """Whole numbers as further inputs (Slice's starts, ends, axes, steps)."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    datatype: int = FLOAT
    chained: bool = False
    """Each copy works on what the one before it wrote, in place, as activations behind a convolution do."""


def grid() -> list[Point]:
    """All points, the families interleaved."""
    ranked: list[tuple[float, int, Point]] = []
    for family, (count, make) in enumerate(_FAMILIES):
        points = [make(*numbers) for numbers in _halton(count)]
        ranked += [((place + 0.5) / len(points), family, point) for place, point in enumerate(points)]
    return [point for _, _, point in sorted(ranked, key=lambda one: one[:2])]


def build(point: Point, copies: int | None = None) -> bytes:
    """The point as a model: so many copies of its operator, and one tiny output that needs none of them."""
    number = copies_of(point) if copies is None else copies
    rng = np.random.default_rng(1)
    names = [f"x{place}" for place in range(len(point.inputs))]
    nodes, initializers = [], []
    for column, values in enumerate(point.constants):
        kind = np.float32 if point.operator in ("Resize", "Pow") else np.int64
        initializers.append(numpy_helper.from_array(np.array(values, kind), f"k{column}"))
    for copy in range(number):
        own = [f"w{copy}-{column}" for column in range(len(point.weights))]
        initializers += [_weight(name, shape, rng) for name, shape in zip(own, point.weights, strict=True)]
        nodes.append(_node(point, copy, names, own))
    nodes.append(helper.make_node("Shape", ["x0"], ["out"]))
    given = [
        helper.make_tensor_value_info(name, point.datatype, shape)
        for name, shape in zip(names, point.inputs, strict=True)
    ]
    out = helper.make_tensor_value_info("out", INT64, [len(point.inputs[0])])
    graph = helper.make_graph(nodes, "point", given, [out], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    return bytes(model.SerializeToString())


def ports(wide: bool) -> bytes:
    """Eight tiny operators: side by side, each with an input and an output of its own, or in a row."""
    nodes, given, out = [], [], []
    for place in range(PORTS):
        source = f"x{place}" if wide or not place else f"y{place - 1}"
        nodes.append(helper.make_node("Relu", [source], [f"y{place}"]))
        if wide or not place:
            given.append(helper.make_tensor_value_info(source, FLOAT, [1, 16]))
        if wide or place == PORTS - 1:
            out.append(helper.make_tensor_value_info(f"y{place}", FLOAT, [1, 16]))
    graph = helper.make_graph(nodes, "ports", given, out)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    return bytes(model.SerializeToString())


def work(point: Point) -> Work:
    """The point's work, family and sizes, by the way that a model's operators take too."""
    model = onnx.load_model_from_string(build(point, 1))
    return works(model)[0]


def works(model: onnx.ModelProto) -> list[Work]:
    """Of every node of a model whose shapes inference finds."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    shapes: dict[str, Shape] = {}
    sizes: dict[str, int] = {}
    for one in (*graph.input, *graph.value_info, *graph.output):
        shapes[one.name] = tuple(axis.dim_value for axis in one.type.tensor_type.shape.dim)
        sizes[one.name] = element_bytes(one.type.tensor_type.elem_type)
    weights = onnx_nodes.initializers(graph)
    for name, tensor in weights.items():
        shapes[name], sizes[name] = tuple(tensor.dims), element_bytes(tensor.data_type)
    return [work_of(node, shapes.get, lambda name: sizes.get(name, 4), weights.__contains__) for node in graph.node]


def copies_of(point: Point) -> int:
    """How many copies take about `WANTED_S`, by a guess that need not be good."""
    one = work(point)
    guess_s = 1e-6 + one.flops / (5e9 if one.operator == "depthwise" else 5e10) + one.bytes_moved / 1e10
    bytes_each = 4 * sum(math.prod(shape) for shape in point.weights)
    most = min(MOST_COPIES, max(1, WEIGHT_BYTES // max(bytes_each, 1)))
    return int(min(max(round(WANTED_S / guess_s), 1), most))


def _node(point: Point, copy: int, names: list[str], own: list[str]) -> onnx.NodeProto:
    first = f"y{copy - 1}" if point.chained and copy else names[0]
    constants = [f"k{column}" for column in range(len(point.constants))]
    written = [f"y{copy}"] + [f"y{copy}-{piece}" for piece in range(1, point.outputs)]
    inputs = [first, *names[1:], *own]
    if point.operator == "Resize":
        inputs.append("")
    return helper.make_node(point.operator, [*inputs, *constants], written, name=f"n{copy}", **point.attributes)


def _weight(name: str, shape: Shape, rng: np.random.Generator) -> onnx.TensorProto:
    """Small values that neither vanish nor grow."""
    block = rng.standard_normal(4096, dtype=np.float32) * np.float32(0.05)
    return numpy_helper.from_array(np.resize(block, shape), name)


def _halton(count: int) -> Iterator[tuple[float, ...]]:
    """Evenly spread points of the unit cube, the first 20 left out (they line up)."""
    for place in range(20, 20 + count):
        yield tuple(_radical_inverse(place, base) for base in PRIMES)


def _radical_inverse(place: int, base: int) -> float:
    value, part = 0.0, 1.0 / base
    while place:
        place, digit = divmod(place, base)
        value += digit * part
        part /= base
    return value


def _log(u: float, low: float, high: float) -> int:
    """Between `low` and `high`, evenly in the logarithm; beyond 32 a multiple of 8, as real sizes are."""
    value = float(low * (high / low) ** u)
    return max(1, round(value / 8) * 8 if value > 32 else round(value))


def _pick(u: float, *choices: Any) -> Any:
    return choices[min(int(u * len(choices)), len(choices) - 1)]


def _fit_side(side: int, each: float, most: float) -> int:
    """The side, made smaller until side x side x each is at most `most`."""
    return max(1, min(side, int(math.sqrt(most / max(each, 1e-9)))))


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
    cout, cin = _log(u, 6, 1200), _log(v, 3, 1200)
    side = 1 if w < 0.16 else _fit_side(_log((w - 0.16) / 0.84, 2, 160), 2.0 * cout * cin, MOST_OPERATIONS)
    return _conv(cout, cin, (1, 1), (side, side), 1, 1)


def _convk(u: float, v: float, w: float, x: float, y: float, z: float) -> Point:
    kernel = _pick(x, 3, 3, 3, 3, 3, 5, 7, 1)
    stride = 2 if kernel == 1 else _pick(y, 1, 1, 1, 2)
    cout, cin = _log(u, 4, 512), _log(v * v if kernel > 3 else v, 1, 512)
    dilation = _pick(z, 1, 1, 1, 1, 2) if kernel == 3 and stride == 1 else 1
    side = _fit_side(_log(w, 4, 224), 2.0 * cout * cin * kernel**2 / stride**2, MOST_OPERATIONS)
    side = _fit_side(max(side, dilation * 2), max(cin, cout), MOST_ELEMENTS)
    return _conv(cout, cin, (kernel, kernel), (side, side), stride, 1, dilation)


def _conv_line(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    """Along one axis, as audio models have them: short filters over many channels, or long ones over a signal."""
    if x < 0.3:
        taps = _pick(x / 0.3, 16, 64, 256)
        shape = (1, _log(v, 1, 4), taps * _log(w, 1, 40) // 2 + taps)
        attributes = {"kernel_shape": [taps], "strides": [taps // 2]}
        return Point("Conv", (shape,), ((_log(u, 16, 512), shape[1], taps),), attributes=attributes)
    stride = _pick((x - 0.3) / 0.7, 1, 1, 2)
    cout, cin = _log(u, 16, 512), _log(v, 1, 512)
    length = int(min(_log(w, 1, 400), MOST_OPERATIONS / (6 * cout * cin)))
    return _conv(cout, cin, (3,), (max(length, 1),), stride, 1)


def _depthwise(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    channels, kernel, stride = _log(u, 6, 1024), _pick(w, 3, 3, 3, 5), _pick(x, 1, 1, 2)
    side = _fit_side(_log(v, 4, 160), channels, MOST_ELEMENTS)
    return _conv(channels, channels, (kernel, kernel), (side, side), stride, channels)


def _grouped(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    groups, each, kernel = _pick(w, 2, 4, 8, 32), _log(u, 2, 64), _pick(x, 1, 3, 3)
    side = _fit_side(_log(v, 4, 112), 2.0 * groups * each * each * kernel**2, MOST_OPERATIONS)
    return _conv(groups * each, groups * each, (kernel, kernel), (side, side), 1, groups)


def _transposed_conv(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    cout, cin, kernel = _log(u, 4, 256), _log(v, 4, 256), _pick(x, 2, 3, 4)
    side = _fit_side(_log(w, 4, 80), 2.0 * cout * cin * kernel**2, MOST_OPERATIONS)
    attributes = {"kernel_shape": [kernel, kernel], "strides": [2, 2]}
    return Point("ConvTranspose", ((1, cin, side, side),), ((cin, cout, kernel, kernel),), attributes=attributes)


def _gemm(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    inner, columns = _log(u, 3, 2048), _log(v, 2, 2048)
    rows = 1 if w < 0.5 else int(min(_log((w - 0.5) / 0.5, 2, 512), MOST_OPERATIONS / (2 * inner * columns)))
    if x < 0.3:
        return Point("MatMul", ((1, max(rows, 1), inner),), ((inner, columns),))
    attributes = {"transB": int(x < 0.75)}
    shape = (columns, inner) if x < 0.75 else (inner, columns)
    return Point("Gemm", ((max(rows, 1), inner),), (shape, (columns,)), attributes=attributes)


def _matmul(u: float, v: float, w: float, x: float, *rest: float) -> Point:
    count, inner, columns = _pick(x, 1, 2, 4, 8), _log(u, 8, 512), _log(v, 8, 512)
    rows = max(1, int(min(_log(w, 1, 512), MOST_OPERATIONS / (2 * count * inner * columns))))
    return Point("MatMul", ((1, count, rows, inner), (1, count, inner, columns)))


def _lstm(u: float, v: float, w: float, *rest: float) -> Point:
    steps, inputs, hidden = _pick(w, 1, 1, 1, 4, 16), _log(u, 16, 512), _log(v, 16, 256)
    weights = ((1, 4 * hidden, inputs), (1, 4 * hidden, hidden), (1, 8 * hidden))
    return Point("LSTM", ((steps, 1, inputs),), weights, attributes={"hidden_size": hidden})


def _elements(operator: str, datatype: int = FLOAT, **attributes: Any) -> Callable[..., Point]:
    def make(u: float, *rest: float) -> Point:
        chained = operator in ("Relu", "LeakyRelu", "Clip")
        constants = ((2,),) if operator == "Pow" else ()
        shape = (1, round(16 * (MOST_ELEMENTS / 16) ** u))
        return Point(operator, (shape,), (), constants, attributes, datatype=datatype, chained=chained)

    return make


def _two(operator: str) -> Callable[..., Point]:
    def make(u: float, *rest: float) -> Point:
        shape = (1, round(16 * (MOST_ELEMENTS / 2 / 16) ** u))
        return Point(operator, (shape, shape))

    return make


def _broadcast(u: float, v: float, w: float, *rest: float) -> Point:
    operator = _pick(w, "Add", "Mul")
    if v < 0.5:  # per channel
        channels, side = _log(2 * v, 4, 512), _log(u, 2, 112)
        side = _fit_side(side, channels, MOST_ELEMENTS)
        return Point(operator, ((1, channels, side, side),), ((1, channels, 1, 1),))
    columns = _log(2 * v - 1, 4, 1024)
    return Point(operator, ((1, int(min(_log(u, 1, 4096), MOST_ELEMENTS / columns)), columns),), ((columns,),))


def _normal_batch(u: float, v: float, *rest: float) -> Point:
    channels = _log(u, 4, 512)
    side = _fit_side(_log(v, 2, 112), channels, MOST_ELEMENTS)
    return Point("BatchNormalization", ((1, channels, side, side),), ((channels,),) * 4)


def _pool(operator: str) -> Callable[..., Point]:
    def make(u: float, v: float, w: float, x: float, *rest: float) -> Point:
        channels, kernel, stride = _log(u, 4, 512), _pick(w, 2, 3, 3, 5), _pick(x, 1, 2, 2)
        side = max(kernel, _fit_side(_log(v, 4, 160), channels, MOST_ELEMENTS))
        attributes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4}
        return Point(operator, ((1, channels, side, side),), attributes=attributes)

    return make


def _reduced(u: float, v: float, w: float, *rest: float) -> Point:
    channels = _log(u, 4, 1024)
    side = _fit_side(_log(v, 2, 80), channels, MOST_ELEMENTS)
    if w < 0.4:
        return Point("GlobalAveragePool", ((1, channels, side, side),))
    axes = _pick((w - 0.4) / 0.6, [-1], [1], [2, 3])
    return Point("ReduceMean", ((1, channels, side, side),), attributes={"axes": axes})


def _rows(operator: str, columns: int) -> Callable[..., Point]:
    """Operators that work row by row."""

    def make(u: float, v: float, *rest: float) -> Point:
        length = _log(v, 2, 2048)
        rows = int(max(1, min(_log(u, 1, 8192), 400_000 / length)))
        return Point(operator, ((1, rows, length),), ((length,),) * columns, attributes={"axis": -1})

    return make


def _concat(u: float, v: float, w: float, *rest: float) -> Point:
    pieces, channels = _pick(w, 2, 2, 3, 4), _log(u, 2, 256)
    side = _fit_side(_log(v, 1, 112), pieces * channels, MOST_ELEMENTS)
    return Point("Concat", ((1, channels, side, side),) * pieces, attributes={"axis": 1})


def _split(u: float, v: float, w: float, *rest: float) -> Point:
    pieces, channels = _pick(w, 2, 3, 4), _log(u, 2, 128)
    side = _fit_side(_log(v, 1, 80), pieces * channels, MOST_ELEMENTS)
    return Point("Split", ((1, pieces * channels, side, side),), attributes={"axis": 1}, outputs=pieces)


def _slice(u: float, v: float, w: float, *rest: float) -> Point:
    channels, side = _log(u, 1, 256), 2 * _log(v, 1, 200)
    side = max(2, _fit_side(side, channels, MOST_ELEMENTS) // 2 * 2)
    axis, step = _pick(w, (1, 1), (2, 1), (2, 2), (3, 2), (3, 1))
    length = channels if axis == 1 else side
    constants = ((0,), (max(length // 2, 1) if step == 1 else length,), (axis,), (step,))
    return Point("Slice", ((1, channels, side, side),), (), constants)


def _pad(u: float, v: float, w: float, *rest: float) -> Point:
    channels, width = _log(u, 1, 256), _pick(w, 1, 2)
    side = _fit_side(_log(v, 3, 112), channels, MOST_ELEMENTS)
    return Point("Pad", ((1, channels, side, side),), (), ((0, 0, width, width, 0, 0, width, width),))


def _transpose(u: float, v: float, w: float, *rest: float) -> Point:
    channels = _log(u, 2, 512)
    side = _fit_side(_log(v, 2, 112), channels, MOST_ELEMENTS)
    order = _pick(w, [0, 2, 3, 1], [0, 3, 1, 2], [0, 1, 3, 2], [0, 2, 1, 3])
    return Point("Transpose", ((1, channels, side, side),), attributes={"perm": order})


def _resize(mode: str) -> Callable[..., Point]:
    def make(u: float, v: float, *rest: float) -> Point:
        channels = _log(u, 2, 256)
        side = _fit_side(_log(v, 4, 80), 4 * channels, MOST_ELEMENTS)
        rounding = {"nearest_mode": "floor"} if mode == "nearest" else {}
        where = {"coordinate_transformation_mode": "asymmetric" if mode == "nearest" else "half_pixel"}
        attributes = {"mode": mode, **where, **rounding}
        return Point("Resize", ((1, channels, side, side),), (), ((1, 1, 2, 2),), attributes)

    return make


def _gather(u: float, v: float, w: float, *rest: float) -> Point:
    length, rows = _log(u, 1, 512), _log(v, 4, 1000)
    chosen = tuple(range(0, rows, _pick(w, 1, 2, 4)))
    return Point("Gather", ((rows, length),), (), (chosen,), {"axis": 0})


def _reshape(u: float, *rest: float) -> Point:
    length = _log(u, 16, 100_000)
    return Point("Reshape", ((1, length),), (), ((-1,),))


_FAMILIES: Final[tuple[tuple[int, Callable[..., Point]], ...]] = (
    (156, _conv1),
    (150, _convk),
    (40, _conv_line),
    (90, _depthwise),
    (24, _grouped),
    (16, _transposed_conv),
    (80, _gemm),
    (24, _matmul),
    (16, _lstm),
    (14, _elements("Relu")),
    (8, _elements("LeakyRelu", alpha=0.1)),
    (8, _elements("Clip")),
    (14, _elements("Sigmoid")),
    (10, _elements("Tanh")),
    (8, _elements("Erf")),
    (8, _elements("Exp")),
    (8, _elements("Pow")),
    (8, _elements("HardSwish")),
    (8, _elements("Cast", HALF, to=FLOAT)),
    (14, _two("Add")),
    (14, _two("Mul")),
    (10, _two("Div")),
    (28, _broadcast),
    (8, _normal_batch),
    (26, _pool("MaxPool")),
    (16, _pool("AveragePool")),
    (24, _reduced),
    (14, _rows("Softmax", 0)),
    (10, _rows("LayerNormalization", 2)),
    (24, _concat),
    (12, _split),
    (26, _slice),
    (10, _pad),
    (28, _transpose),
    (14, _resize("nearest")),
    (12, _resize("linear")),
    (10, _gather),
    (3, _reshape),
)
"""How many points each maker gives at most."""
