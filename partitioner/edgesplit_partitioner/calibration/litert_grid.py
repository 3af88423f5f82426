"""Microbenchmarks and small networks of the calibration as TFLite models, for LiteRT: in floats, and quantised to int8
and uint8, whose kernels differ.

Operators have the sizes of `operator_grid`. Nothing is timed here. Imported only where LiteRT is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Final, Literal

import flatbuffers
import numpy as np
import numpy.typing as npt

from edgesplit_partitioner.calibration import operator_grid
from edgesplit_partitioner.calibration.operator_grid import Point
from edgesplit_partitioner.ir.graph import OperatorWork
from edgesplit_partitioner.ir.tensor_types import NUMBER_DTYPES
from edgesplit_partitioner.tflite_format.flatbuffer import IDENTIFIER, SCHEMA_VERSION, schema
from edgesplit_partitioner.tflite_format.operator_work import OperatorInfo, TensorLookup, work_of

Datatype = Literal["FP32", "INT8", "UINT8"]
Shape = tuple[int, ...]

SEED: Final = 2018
"""Seed of the random choices."""
EVERY: Final[Mapping[Datatype, int]] = {"FP32": 2, "INT8": 2, "UINT8": 3}
"""Of every so many points of `operator_grid` one is measured in that datatype."""
NETWORKS_PER_DATATYPE: Final = 8
SCALE, WEIGHT_SCALE = 0.05, 0.02
"""Quantisation scales of activations and weights."""
ZERO_POINTS: Final[Mapping[Datatype, int]] = {"FP32": 0, "INT8": 0, "UINT8": 128}
SAME_PADDING, RELU6 = 0, 3
"""Numbers of the schema."""


@dataclass
class Network:
    """A TFLite model in the making: each method appends an operator and returns the name of the tensor it writes."""

    datatype: Datatype
    shapes: dict[str, Shape] = field(default_factory=dict)
    operators: list[OperatorInfo] = field(default_factory=list)
    _model: Any = field(default_factory=schema.ModelT)
    _graph: Any = field(default_factory=schema.SubGraphT)
    _index: dict[str, int] = field(default_factory=dict)
    _codes: dict[str, int] = field(default_factory=dict)
    _datatypes: dict[str, str] = field(default_factory=dict)
    _weights: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._graph.tensors, self._graph.operators = [], []
        self._model.version, self._model.subgraphs = SCHEMA_VERSION, [self._graph]
        self._model.operatorCodes, self._model.buffers = [], [schema.BufferT()]

    def input(self, *shape: int) -> str:
        """An input of the model."""
        return self._tensor(f"x{len(self._index)}", shape, self.datatype)

    def conv(self, source: str, channels: int, kernel: int, stride: int = 1, activation: int = RELU6) -> str:
        """A convolution with its activation."""
        _, height, width, depth = self.shapes[source]
        options = self._options(schema.Conv2DOptionsT(), stride, activation)
        weights = [self._weight(channels, kernel, kernel, depth), self._bias(channels)]
        shape = (1, -(-height // stride), -(-width // stride), channels)
        return self._operator("CONV_2D", [source, *weights], shape, options)

    def depthwise(self, source: str, kernel: int, stride: int = 1) -> str:
        """A depthwise convolution with its activation."""
        _, height, width, depth = self.shapes[source]
        options = self._options(schema.DepthwiseConv2DOptionsT(), stride, RELU6)
        options.depthMultiplier = 1
        weights = [self._weight(1, kernel, kernel, depth, axis=3), self._bias(depth)]
        shape = (1, -(-height // stride), -(-width // stride), depth)
        return self._operator("DEPTHWISE_CONV_2D", [source, *weights], shape, options)

    def dense(self, source: str, columns: int) -> str:
        """A fully connected layer."""
        rows, inner = self.shapes[source]
        weights = [self._weight(columns, inner, per_channel=False), self._bias(columns, per_channel=False)]
        return self._operator("FULLY_CONNECTED", [source, *weights], (rows, columns), schema.FullyConnectedOptionsT())

    def pool(self, source: str, operator: str, kernel: int, stride: int) -> str:
        """A maximum or average over a window."""
        _, height, width, depth = self.shapes[source]
        options = schema.Pool2DOptionsT()
        options.filterWidth = options.filterHeight = kernel
        options.strideW = options.strideH = stride
        options.padding = SAME_PADDING
        shape = (1, -(-height // stride), -(-width // stride), depth)
        return self._operator(operator, [source], shape, options, window=kernel * kernel)

    def mean(self, source: str) -> str:
        """The mean of each channel."""
        axes = self._constant(np.array([1, 2], np.int32))
        return self._operator("MEAN", [source, axes], (1, self.shapes[source][3]), schema.ReducerOptionsT())

    def elementwise(self, operator: str, *sources: str) -> str:
        """An operator on each element."""
        options = {"ADD": schema.AddOptionsT, "MUL": schema.MulOptionsT}.get(operator)
        return self._operator(operator, [*sources], self.shapes[sources[0]], options() if options else None)

    def reshape(self, source: str) -> str:
        """An operator that computes nothing."""
        shape = self.shapes[source]
        options = schema.ReshapeOptionsT()
        options.newShape = list(shape)
        return self._operator("RESHAPE", [source, self._constant(np.array(shape, np.int32))], shape, options)

    def file(self, outputs: Sequence[str]) -> bytes:
        """The model as a file."""
        written = {name for operator in self.operators for name in operator.outputs}
        inputs = [name for name in self.shapes if name not in written | self._weights]
        self._graph.inputs = np.array([self._index[name] for name in inputs], np.int32)
        self._graph.outputs = np.array([self._index[name] for name in outputs], np.int32)
        builder = flatbuffers.Builder(1 << 16)
        builder.Finish(self._model.Pack(builder), IDENTIFIER)
        return bytes(builder.Output())

    def works(self) -> list[OperatorWork]:
        """The work of each operator, counted as for a model's."""
        lookup = TensorLookup(
            shape=lambda name: self.shapes.get(name, ()),
            item_bytes=lambda name: NUMBER_DTYPES[self._datatypes[name]].itemsize if name else 0,
            is_weight=self._weights.__contains__,
            datatype=lambda name: self._datatypes.get(name, ""),
        )
        return [work_of(operator, lookup) for operator in self.operators]

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return float(
            sum(prod(self.shapes[name]) * NUMBER_DTYPES[self._datatypes[name]].itemsize for name in self._weights)
        )

    @staticmethod
    def _options(options: Any, stride: int, activation: int) -> Any:
        options.strideH = options.strideW = stride
        options.dilationHFactor = options.dilationWFactor = 1
        options.padding, options.fusedActivationFunction = SAME_PADDING, activation
        return options

    def _operator(self, name: str, reads: Sequence[str], shape: Shape, options: Any, *, window: int = 1) -> str:
        written = self._tensor(f"t{len(self._index)}", shape, self.datatype)
        operator = schema.OperatorT()
        operator.opcodeIndex = self._code(name)
        operator.inputs = np.array([self._index[read] for read in reads], np.int32)
        operator.outputs = np.array([self._index[written]], np.int32)
        if options is not None:
            operator.builtinOptions = options
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T"))
        self._graph.operators.append(operator)
        self.operators.append(OperatorInfo(name, tuple(reads), (written,), window))
        return written

    def _code(self, name: str) -> int:
        if name not in self._codes:
            code = schema.OperatorCodeT()
            code.builtinCode = getattr(schema.BuiltinOperator, name)
            code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), 1
            self._codes[name] = len(self._model.operatorCodes)
            self._model.operatorCodes.append(code)
        return self._codes[name]

    def _weight(self, *shape: int, axis: int = 0, per_channel: bool = True) -> str:
        rng = np.random.default_rng([SEED, len(self._index)])
        if self.datatype == "FP32":
            return self._constant(np.resize(rng.standard_normal(4096).astype(np.float32) * np.float32(0.05), shape))
        zero = ZERO_POINTS[self.datatype]
        values = np.resize(rng.integers(zero - 100, zero + 100, 4096), shape).astype(NUMBER_DTYPES[self.datatype])
        scales = shape[axis] if self.datatype == "INT8" and per_channel else 1
        return self._constant(values, WEIGHT_SCALE, zero, scales, axis)

    def _bias(self, length: int, *, per_channel: bool = True) -> str:
        if self.datatype == "FP32":
            return self._constant(np.zeros(length, np.float32))
        scales = length if self.datatype == "INT8" and per_channel else 1
        return self._constant(np.zeros(length, np.int32), SCALE * WEIGHT_SCALE, 0, scales)

    def _constant(
        self, values: npt.NDArray[Any], scale: float = 0.0, zero: int = 0, scales: int = 1, axis: int = 0
    ) -> str:
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(values.tobytes(), np.uint8)
        self._model.buffers.append(buffer)
        datatype = next(name for name, dtype in NUMBER_DTYPES.items() if dtype == values.dtype)
        name = self._tensor(f"w{len(self._index)}", values.shape, datatype, len(self._model.buffers) - 1)
        self._weights.add(name)
        if scale:
            self._quantise(self._graph.tensors[self._index[name]], scale, zero, scales, axis)
        return name

    def _tensor(self, name: str, shape: Shape, datatype: str, buffer: int = 0) -> str:
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.buffer = name.encode(), np.array(shape, np.int32), buffer
        tensor.type = getattr(schema.TensorType, {"FP32": "FLOAT32"}.get(datatype, datatype))
        if not buffer and datatype != "FP32":
            self._quantise(tensor, SCALE, ZERO_POINTS[self.datatype], 1, 0)
        self._index[name] = len(self._graph.tensors)
        self._graph.tensors.append(tensor)
        self.shapes[name], self._datatypes[name] = shape, datatype
        return name

    @staticmethod
    def _quantise(tensor: Any, scale: float, zero: int, scales: int, axis: int) -> None:
        tensor.quantization = schema.QuantizationParametersT()
        tensor.quantization.scale = np.full(scales, scale, np.float32)
        tensor.quantization.zeroPoint = np.full(scales, zero, np.int64)
        # One scale has no dimension: XNNPACK leaves a depthwise convolution that names one to slower kernels.
        tensor.quantization.quantizedDimension = axis if scales > 1 else 0


def _append(network: Network, point: Point, source: str) -> str | None:
    """The operator of a point behind that tensor; None where TFLite has no such operator."""
    if point.operator == "Conv":
        channels, depth, *kernel = point.weights[0]
        if len(kernel) != 2 or max(point.attributes["dilations"]) > 1:
            return None
        groups, stride = point.attributes["group"], point.attributes["strides"][0]
        if groups == 1:
            return network.conv(source, channels, kernel[0], stride)
        return network.depthwise(source, kernel[0], stride) if depth == 1 else None
    if point.operator == "Gemm":
        return network.dense(source, point.weights[1][0])
    if point.operator in ("MaxPool", "AveragePool"):
        name = "MAX_POOL_2D" if point.operator == "MaxPool" else "AVERAGE_POOL_2D"
        return network.pool(source, name, point.attributes["kernel_shape"][0], point.attributes["strides"][0])
    if point.operator == "GlobalAveragePool":
        return network.mean(source)
    name = {"Add": "ADD", "Mul": "MUL", "Sigmoid": "LOGISTIC"}.get(point.operator, "")
    if not name or point.weights:
        return None
    return network.elementwise(name, *[source] * len(point.inputs))


def _channels_last(shape: Shape) -> Shape:
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape


@cache
def points() -> tuple[tuple[Point, Datatype], ...]:
    """The points that TFLite has, each in some of the datatypes, and those of partial blocks in all of them; each group
    in the order of `operator_grid`, one evenly among the other."""
    known = [point for point in operator_grid.even_channels_grid() if build_point(point, "FP32", 1) is not None]
    even: list[tuple[Point, Datatype]] = [
        (point, datatype)
        for position, point in enumerate(known)
        for datatype, every in EVERY.items()
        if position % every == 0
    ]
    blocks = operator_grid.partial_block_points()
    partial: list[tuple[Point, Datatype]] = [(point, datatype) for point in blocks for datatype in EVERY]
    ranked = [(rank / len(group), point) for group in (even, partial) for rank, point in enumerate(group)]
    return tuple(point for _, point in sorted(ranked, key=lambda entry: entry[0]))


def build_point(point: Point, datatype: Datatype, copies: int) -> tuple[Network, list[str]] | None:
    """A network with so many copies of the point's operator side by side, and their outputs; None where TFLite has no
    such operator."""
    network = Network(datatype)
    source = network.input(*_channels_last(point.inputs[0]))
    written = [_append(network, point, source) for _ in range(copies)]
    outputs = [name for name in written if name is not None]
    return (network, outputs) if len(outputs) == copies else None


def empty_model() -> bytes:
    """A model that computes nothing."""
    network = Network("FP32")
    return network.file([network.reshape(network.input(1, 16))])


def port_model(wide: bool) -> bytes:
    """As `operator_grid.port_model`."""
    network = Network("FP32")
    sources = [network.input(1, 16)]
    outputs: list[str] = []
    for position in range(operator_grid.PORT_COUNT):
        if position:
            sources.append(network.input(1, 16) if wide else outputs[-1])
        outputs.append(network.elementwise("LOGISTIC", sources[-1]))
    return network.file(outputs if wide else outputs[-1:])


@cache
def networks() -> tuple[tuple[Network, str], ...]:
    """Small networks drawn at random, each with its output. No published network is among them."""
    rng = np.random.default_rng(SEED)
    builders: tuple[Callable[[np.random.Generator, Network], str], ...] = (_separable, _residual, _inverted, _dense)
    made = []
    for index in range(NETWORKS_PER_DATATYPE):
        for datatype in EVERY:
            network = Network(datatype)
            made.append((network, builders[index % len(builders)](rng, network)))
    return tuple(made)


def _stages(rng: np.random.Generator, network: Network) -> Iterator[tuple[int, int]]:
    """Channels and stride of each block after the first convolution."""
    channels = 8 * int(rng.integers(1, 5))
    for _ in range(int(rng.integers(2, 5))):
        for position in range(int(rng.integers(1, 4))):
            channels = min(2 * channels, 384) if position == 0 else channels
            yield channels, 2 if position == 0 else 1


def _start(rng: np.random.Generator, network: Network) -> str:
    side = int(rng.choice([32, 64, 96, 128, 160, 192]))
    return network.conv(network.input(1, side, side, 3), 8 * int(rng.integers(1, 5)), 3, 2)


def _classifier(rng: np.random.Generator, network: Network, source: str) -> str:
    return network.dense(network.mean(source), int(rng.choice([10, 100, 1000])))


def _separable(rng: np.random.Generator, network: Network) -> str:
    x = _start(rng, network)
    for channels, stride in _stages(rng, network):
        x = network.conv(network.depthwise(x, 3, stride), channels, 1)
    return _classifier(rng, network, x)


def _residual(rng: np.random.Generator, network: Network) -> str:
    x = _start(rng, network)
    for channels, stride in _stages(rng, network):
        y = network.conv(network.conv(x, channels, 3, stride), channels, 3, activation=0)
        shortcut = x if network.shapes[x] == network.shapes[y] else network.conv(x, channels, 1, stride, activation=0)
        x = network.elementwise("ADD", y, shortcut)
    return _classifier(rng, network, x)


def _inverted(rng: np.random.Generator, network: Network) -> str:
    x = _start(rng, network)
    for channels, stride in _stages(rng, network):
        depth = network.shapes[x][3]
        y = network.depthwise(network.conv(x, 4 * depth, 1), 3, stride)
        y = network.conv(y, min(channels, 160), 1, activation=0)
        x = network.elementwise("ADD", x, y) if network.shapes[x] == network.shapes[y] else y
    return _classifier(rng, network, x)


def _dense(rng: np.random.Generator, network: Network) -> str:
    x = network.input(1, int(rng.choice([64, 256, 512])))
    for _ in range(int(rng.integers(2, 6))):
        x = network.dense(x, int(rng.choice([64, 128, 256, 512, 1024])))
    return network.dense(x, 10)
