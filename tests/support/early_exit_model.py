"""A small classifier with an early exit: a head on its first layers, and one at its end."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

CLASSES = 5
SIDE = 16
EXIT_LAYERS = ("stem", "early-pool", "early-flatten", "early-classify", "early-softmax")


def exit_model(
    *, early_classes: int = CLASSES, has_softmax: bool = True, further: bool = False, seed: int = 0
) -> bytes:
    """`early` [1, classes] of the first convolution, `probabilities` [1, classes] of both; `further`: a third
    output."""
    rng = np.random.default_rng(seed)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    def value(name: str, *shape: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    node = helper.make_node
    last = "Softmax" if has_softmax else "Identity"
    nodes = [
        node("Conv", ["image", "w1"], ["trunk"], "stem", kernel_shape=[3, 3]),
        node("GlobalAveragePool", ["trunk"], ["p1"], "early-pool"),
        node("Flatten", ["p1"], ["f1"], "early-flatten"),
        node("MatMul", ["f1", "w2"], ["s1"], "early-classify"),
        node(last, ["s1"], ["early"], "early-softmax"),
        node("Relu", ["trunk"], ["active"], "relu"),
        node("Conv", ["active", "w3"], ["deep"], "body", kernel_shape=[3, 3]),
        node("GlobalAveragePool", ["deep"], ["p2"], "pool"),
        node("Flatten", ["p2"], ["f2"], "flatten"),
        node("MatMul", ["f2", "w4"], ["s2"], "classify"),
        node("Softmax", ["s2"], ["probabilities"], "softmax"),
    ]
    outputs = [value("early", 1, early_classes), value("probabilities", 1, CLASSES)]
    graph = helper.make_graph(
        nodes, "exits", [value("image", 1, 3, SIDE, SIDE)],
        [*outputs, *([value("p2", 1, 8, 1, 1)] if further else [])],
        [weight("w1", 6, 3, 3, 3), weight("w2", 6, early_classes), weight("w3", 8, 6, 3, 3), weight("w4", 8, CLASSES)],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    raw: bytes = made.SerializeToString()
    return raw


def images(count: int, seed: int = 3) -> list[np.ndarray]:
    """Noise of different strength, by which the classes differ."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((1, 3, SIDE, SIDE)) * (1 + n / 4)).astype(np.float32) for n in range(count)]
