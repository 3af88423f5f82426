"""The models that every server runs: an identity of 800 KB, convolutions of about 1 and 10 ms, large fully connected
layers.

They are remote halves: one boundary tensor in, one tensor out. Weights are random from a fixed seed; the batch
dimension is free, so that servers can batch. Our server gets the same file as the product prepares it, one inference at
a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

INPUT, OUTPUT = "x", "y"
CHANNELS = 64
SEED = 5


@dataclass(frozen=True)
class Suffix:
    """One model, and the numbers of connections that it is measured with."""

    name: str
    shape: tuple[int, ...]
    """Shape of the input, without the batch."""
    output_shape: tuple[int, ...]
    connections: tuple[int, ...]
    nodes: Callable[[], tuple[list[onnx.NodeProto], list[onnx.TensorProto]]]
    gains_from_batching: bool = False
    """Whether batching is faster: the weights are read once for many inputs."""

    def write(self, path: Path) -> Path:
        """Write the ONNX file."""
        nodes, weights = self.nodes()
        ends = [
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", *shape))]
            for name, shape in ((INPUT, self.shape), (OUTPUT, self.output_shape))
        ]
        graph = helper.make_graph(nodes, self.name, ends[0], ends[1], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        path.write_bytes(model.SerializeToString())
        return path

    def expected_output(self, model: Path) -> npt.NDArray[np.float32]:
        """The model's output for the sample, by onnxruntime in this process."""
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        return np.asarray(session.run([OUTPUT], {INPUT: self.sample()})[0], np.float32)

    def sample(self) -> npt.NDArray[np.float32]:
        """One input, half of it zeros, as a boundary behind a ReLU has."""
        drawn = np.random.default_rng(SEED).standard_normal((1, *self.shape))
        return np.maximum(drawn, 0).astype(np.float32)


def _identity() -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    return [helper.make_node("Identity", [INPUT], [OUTPUT])], []


def _weight(name: str, shape: Sequence[int]) -> onnx.TensorProto:
    fan_in = int(np.prod(shape[1:]))
    drawn: npt.NDArray[Any] = np.random.default_rng([SEED, *name.encode()]).standard_normal(shape)
    return numpy_helper.from_array((drawn * np.sqrt(2 / fan_in)).astype(np.float32), name)


def _convolutions(count: int) -> Callable[[], tuple[list[onnx.NodeProto], list[onnx.TensorProto]]]:
    def make() -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        nodes, weights, last = [], [], INPUT
        for number in range(count):
            weights.append(_weight(f"w{number}", (CHANNELS, CHANNELS, 3, 3)))
            nodes.append(helper.make_node("Conv", [last, f"w{number}"], [f"c{number}"], pads=[1, 1, 1, 1]))
            nodes.append(helper.make_node("Relu", [f"c{number}"], [f"r{number}"]))
            last = f"r{number}"
        weights.append(_weight("head", (10, CHANNELS)))
        nodes.append(helper.make_node("GlobalAveragePool", [last], ["pooled"]))
        nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"]))
        nodes.append(helper.make_node("Gemm", ["flat", "head"], [OUTPUT], transB=1))
        return nodes, weights

    return make


def _dense(widths: Sequence[int]) -> Callable[[], tuple[list[onnx.NodeProto], list[onnx.TensorProto]]]:
    def make() -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
        nodes, weights, last = [], [], INPUT
        for number, (wide, wider) in enumerate(pairwise(widths)):
            end = OUTPUT if number == len(widths) - 2 else f"g{number}"
            weights.append(_weight(f"w{number}", (wider, wide)))
            nodes.append(helper.make_node("Gemm", [last, f"w{number}"], [end], transB=1))
            if end != OUTPUT:
                nodes.append(helper.make_node("Relu", [end], [f"r{number}"]))
            last = f"r{number}"
        return nodes, weights

    return make


SUFFIXES = (
    Suffix("identity", (200_704,), (200_704,), (1, 8), _identity),
    Suffix("conv-1ms", (CHANNELS, 28, 28), (10,), (1, 8, 32), _convolutions(4)),
    Suffix("conv-10ms", (CHANNELS, 28, 28), (10,), (1, 8, 32), _convolutions(36)),
    Suffix("dense", (2048,), (1000,), (1, 8, 32), _dense((2048, 4096, 2048, 1000)), gains_from_batching=True),
)
