"""Small whole networks for calibration, drawn at random from common building blocks.

Single operators are measured in `calibration.operator_grid`; these networks show what operators cost one after the
other, with the caches that a whole network leaves them. No published network is among them. The fixed seed gives the
same networks every time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnx.onnx_ml_pb2 import GraphProto, NodeProto
from onnx.onnx_ml_pb2 import TensorProto as Stored

OPSET, SEED = 17, 2017
"""ONNX opset of the networks, and the seed of their random choices."""
ORDINARY_COUNT, WIDE_COUNT = 26, 6
"""Number of networks of ordinary size, and of those whose weights exceed every cache."""


class _NetworkBuilder:
    """Builder of an ONNX network: each method appends operators to the tensor of the given name and returns the new
    tensor's name."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
        self.rng = rng
        self.nodes: list[NodeProto] = []
        self.weights: list[Stored] = []
        self.shapes: dict[str, tuple[int, ...]] = {"x": shape}

    def add(self, operator: str, inputs: list[str], shape: tuple[int, ...], **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=f"n{len(self.nodes)}", **attributes))
        self.shapes[name] = shape
        return name

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        block = self.rng.standard_normal(4096, dtype=np.float32) * np.float32(0.05)
        self.weights.append(numpy_helper.from_array(np.resize(block, shape), name))
        return name

    def conv(self, x: str, cout: int, kernel: int, stride: int = 1, groups: int = 1) -> str:
        _, cin, height, width = self.shapes[x]
        shape = (1, cout, -(-height // stride), -(-width // stride))
        pads = [kernel // 2] * 4 if stride == 1 or kernel > 1 else [0] * 4
        inputs = [x, self.weight(cout, cin // groups, kernel, kernel), self.weight(cout)]
        return self.add("Conv", inputs, shape, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads, group=groups)

    def relu(self, x: str) -> str:
        return self.add("Relu", [x], self.shapes[x])

    def silu(self, x: str) -> str:
        return self.add("Mul", [x, self.add("Sigmoid", [x], self.shapes[x])], self.shapes[x])

    def dense(self, x: str, columns: int) -> str:
        rows, inner = self.shapes[x]
        inputs = [x, self.weight(columns, inner), self.weight(columns)]
        return self.add("Gemm", inputs, (rows, columns), transB=1)

    def max_pool(self, x: str) -> str:
        _, channels, height, width = self.shapes[x]
        shape = (1, channels, height // 2, width // 2)
        return self.add("MaxPool", [x], shape, kernel_shape=[2, 2], strides=[2, 2])

    def head(self, x: str, columns: int) -> str:
        channels = self.shapes[x][1]
        mean = self.add("GlobalAveragePool", [x], (1, channels, 1, 1))
        return self.dense(self.add("Flatten", [mean], (1, channels)), columns)

    def to_bytes(self, output: str) -> bytes:
        graph: GraphProto = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shapes["x"])],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, self.shapes[output])],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        return bytes(model.SerializeToString())


@cache
def calibration_networks() -> tuple[bytes, ...]:
    """The networks as ONNX files."""
    rng = np.random.default_rng(SEED)
    builders = (_plain_convolutions, _residual, _separable, _gated, _branched, _fully_connected)
    ordinary = [builders[index % len(builders)](rng) for index in range(ORDINARY_COUNT)]
    return (*ordinary, *(_wide(rng, index) for index in range(WIDE_COUNT)))


def _start_network(rng: np.random.Generator) -> tuple[_NetworkBuilder, str, int]:
    """A network with an input and a first convolution, the name of its tensor, and its channels."""
    side, channels = int(rng.choice([32, 64, 96, 128, 192, 256])), int(rng.choice([8, 16, 32]))
    net = _NetworkBuilder(rng, (1, 3, side, side))
    return net, net.relu(net.conv("x", channels, 3, 2)), channels


def _staged_network(rng: np.random.Generator, block: Callable[[_NetworkBuilder, str, int, int], str]) -> bytes:
    """Blocks that grow in channels while they shrink in size, followed by a classifier."""
    net, x, channels = _start_network(rng)
    for _ in range(int(rng.integers(2, 5))):
        for position in range(int(rng.integers(1, 4))):
            stride = 2 if position == 0 and net.shapes[x][2] > 7 else 1
            channels = round(min(channels * (1.5 + rng.random()), 320) / 16) * 16 if stride == 2 else channels
            x = block(net, x, channels, stride)
    return net.to_bytes(net.head(x, int(rng.choice([10, 100, 1000]))))


def _plain_convolutions(rng: np.random.Generator) -> bytes:
    def block(net: _NetworkBuilder, x: str, channels: int, stride: int) -> str:
        y = net.relu(net.conv(x, channels, 3))
        return net.max_pool(y) if stride == 2 else y

    return _staged_network(rng, block)


def _residual(rng: np.random.Generator) -> bytes:
    def block(net: _NetworkBuilder, x: str, channels: int, stride: int) -> str:
        y = net.conv(net.relu(net.conv(x, channels, 3, stride)), channels, 3)
        same = net.shapes[x] == net.shapes[y]
        shortcut = x if same else net.conv(x, channels, 1, stride)
        return net.relu(net.add("Add", [y, shortcut], net.shapes[y]))

    return _staged_network(rng, block)


def _separable(rng: np.random.Generator) -> bytes:
    wider = int(rng.choice([1, 2, 4, 6]))

    def block(net: _NetworkBuilder, x: str, channels: int, stride: int) -> str:
        cin = net.shapes[x][1]
        y = net.relu(net.conv(x, cin * wider, 1)) if wider > 1 else x
        y = net.relu(net.conv(y, cin * wider, 3, stride, cin * wider))
        y = net.conv(y, channels, 1)
        same = net.shapes[x] == net.shapes[y]
        return net.add("Add", [y, x], net.shapes[y]) if same else net.relu(y)

    return _staged_network(rng, block)


def _gated(rng: np.random.Generator) -> bytes:
    def block(net: _NetworkBuilder, x: str, channels: int, stride: int) -> str:
        y = net.silu(net.conv(x, channels, 1 if stride == 1 else 3, stride))
        return net.silu(net.conv(y, channels, 3, 1, channels))

    return _staged_network(rng, block)


def _branched(rng: np.random.Generator) -> bytes:
    def block(net: _NetworkBuilder, x: str, channels: int, stride: int) -> str:
        x = net.max_pool(x) if stride == 2 else x
        reduced = net.relu(net.conv(x, max(channels // 4, 4), 1))
        branches = [net.relu(net.conv(reduced, channels // 2, kernel)) for kernel in (1, 3)]
        _, each, height, width = net.shapes[branches[0]]
        return net.add("Concat", branches, (1, 2 * each, height, width), axis=1)

    return _staged_network(rng, block)


def _fully_connected(rng: np.random.Generator) -> bytes:
    """Fully connected layers only."""
    net = _NetworkBuilder(rng, (1, int(rng.choice([64, 256, 512]))))
    x = "x"
    for _ in range(int(rng.integers(2, 6))):
        x = net.relu(net.dense(x, int(rng.choice([64, 128, 256, 512, 1024]))))
    return net.to_bytes(net.dense(x, 10))


def _wide(rng: np.random.Generator, index: int) -> bytes:
    """A network with 4 to 64 MB of weights, growing with `index`, as the last stages of large networks have."""
    channels, kernel = int(rng.choice([256, 384, 512])), int(rng.choice([1, 3]))
    block_bytes = 4 * channels * channels * (kernel**2 + 1)
    side = int(rng.choice([4, 7, 10]))
    net = _NetworkBuilder(rng, (1, channels, side, side))
    x = "x"
    for _ in range(max(2, round(4e6 * 16 ** (index / (WIDE_COUNT - 1)) / block_bytes))):
        x = net.relu(net.conv(net.relu(net.conv(x, channels, kernel)), channels, 1))
    return net.to_bytes(net.head(x, 1000))
