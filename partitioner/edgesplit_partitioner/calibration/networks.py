"""Small whole networks of a calibration: drawn at random from the building blocks that networks are made of.

Operators alone are measured in `microbench`; these show what they cost one after the other, through the caches that a
whole network leaves them. No published network is among them. The same seed gives the same networks every time.
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
COUNT, WIDE = 26, 6
"""How many of ordinary size, and how many whose weights do not stay in any cache."""


class _Net:
    """A network under construction: a tensor's name goes in, the next one's comes out."""

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

    def pooled(self, x: str) -> str:
        _, channels, height, width = self.shapes[x]
        shape = (1, channels, height // 2, width // 2)
        return self.add("MaxPool", [x], shape, kernel_shape=[2, 2], strides=[2, 2])

    def head(self, x: str, columns: int) -> str:
        channels = self.shapes[x][1]
        mean = self.add("GlobalAveragePool", [x], (1, channels, 1, 1))
        return self.dense(self.add("Flatten", [mean], (1, channels)), columns)

    def bytes(self, output: str) -> bytes:
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
def nets() -> tuple[bytes, ...]:
    """The networks as ONNX files."""
    rng = np.random.default_rng(SEED)
    makers = (_plain, _residual, _separable, _gated, _branched, _layered)
    ordinary = [makers[place % len(makers)](rng) for place in range(COUNT)]
    return (*ordinary, *(_wide(rng, place) for place in range(WIDE)))


def _start(rng: np.random.Generator) -> tuple[_Net, str, int]:
    side, channels = int(rng.choice([32, 64, 96, 128, 192, 256])), int(rng.choice([8, 12, 16, 24]))
    net = _Net(rng, (1, 3, side, side))
    return net, net.relu(net.conv("x", channels, 3, 2)), channels


def _stages(rng: np.random.Generator, block: Callable[[_Net, str, int, int], str]) -> bytes:
    """Blocks that grow in channels while they shrink in size, and a classifier."""
    net, x, channels = _start(rng)
    for _ in range(int(rng.integers(2, 5))):
        for place in range(int(rng.integers(1, 4))):
            stride = 2 if place == 0 and net.shapes[x][2] > 7 else 1
            channels = min(int(channels * (1.5 + rng.random())), 320) // 4 * 4 if stride == 2 else channels
            x = block(net, x, channels, stride)
    return net.bytes(net.head(x, int(rng.choice([10, 100, 1000]))))


def _plain(rng: np.random.Generator) -> bytes:
    def block(net: _Net, x: str, channels: int, stride: int) -> str:
        y = net.relu(net.conv(x, channels, 3))
        return net.pooled(y) if stride == 2 else y

    return _stages(rng, block)


def _residual(rng: np.random.Generator) -> bytes:
    def block(net: _Net, x: str, channels: int, stride: int) -> str:
        y = net.conv(net.relu(net.conv(x, channels, 3, stride)), channels, 3)
        same = net.shapes[x] == net.shapes[y]
        around = x if same else net.conv(x, channels, 1, stride)
        return net.relu(net.add("Add", [y, around], net.shapes[y]))

    return _stages(rng, block)


def _separable(rng: np.random.Generator) -> bytes:
    wider = int(rng.choice([1, 2, 4, 6]))

    def block(net: _Net, x: str, channels: int, stride: int) -> str:
        cin = net.shapes[x][1]
        y = net.relu(net.conv(x, cin * wider, 1)) if wider > 1 else x
        y = net.relu(net.conv(y, cin * wider, 3, stride, cin * wider))
        y = net.conv(y, channels, 1)
        same = net.shapes[x] == net.shapes[y]
        return net.add("Add", [y, x], net.shapes[y]) if same else net.relu(y)

    return _stages(rng, block)


def _gated(rng: np.random.Generator) -> bytes:
    def block(net: _Net, x: str, channels: int, stride: int) -> str:
        y = net.silu(net.conv(x, channels, 1 if stride == 1 else 3, stride))
        return net.silu(net.conv(y, channels, 3, 1, channels))

    return _stages(rng, block)


def _branched(rng: np.random.Generator) -> bytes:
    def block(net: _Net, x: str, channels: int, stride: int) -> str:
        x = net.pooled(x) if stride == 2 else x
        small = net.relu(net.conv(x, max(channels // 4, 4), 1))
        halves = [net.relu(net.conv(small, channels // 2, kernel)) for kernel in (1, 3)]
        _, each, height, width = net.shapes[halves[0]]
        return net.add("Concat", halves, (1, 2 * each, height, width), axis=1)

    return _stages(rng, block)


def _layered(rng: np.random.Generator) -> bytes:
    """Fully connected layers only."""
    net = _Net(rng, (1, int(rng.choice([64, 256, 512]))))
    x = "x"
    for _ in range(int(rng.integers(2, 6))):
        x = net.relu(net.dense(x, int(rng.choice([64, 128, 256, 512, 1024]))))
    return net.bytes(net.dense(x, 10))


def _wide(rng: np.random.Generator, place: int) -> bytes:
    """From 4 to 64 MB of weights, as the last stages of large networks have them."""
    channels, kernel = int(rng.choice([256, 384, 512])), int(rng.choice([1, 3]))
    each = 4 * channels * channels * (kernel**2 + 1)
    side = int(rng.choice([4, 7, 10]))
    net = _Net(rng, (1, channels, side, side))
    x = "x"
    for _ in range(max(2, round(4e6 * 16 ** (place / (WIDE - 1)) / each))):
        x = net.relu(net.conv(net.relu(net.conv(x, channels, kernel)), channels, 1))
    return net.bytes(net.head(x, 1000))
