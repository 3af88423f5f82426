"""A small convolutional classifier that is right on most of its samples: made from a seed, without training steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

CLASSES = 6
SIDE = 12
FILTERS = 8
WRONG_LABELS = 0.05
"""Share of samples with another label than the picture they were made from."""
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LabelledShapes:
    """A model, and samples with their labels."""

    model: bytes
    inputs: Array
    labels: list[int]

    def write_samples(self, folder: Path, *, labels: bool = True) -> Path:
        """The samples as .npz files, with labels.json; returns the folder."""
        folder.mkdir()
        for number, one in enumerate(self.inputs):
            np.savez(folder / f"{number:04}.npz", image=one[np.newaxis])
        if labels:
            classes = {f"{number:04}.npz": label for number, label in enumerate(self.labels)}
            (folder / "labels.json").write_text(json.dumps(classes))
        return folder


def labelled_shapes(samples: int = 240, seed: int = 0) -> LabelledShapes:
    """A convolution with random filters, and a linear layer fitted to it by least squares on other pictures."""
    rng = np.random.default_rng(seed)
    templates = rng.normal(size=(CLASSES, 3, SIDE, SIDE)).astype(np.float32)
    filters = (rng.normal(size=(FILTERS, 3, 3, 3)) / 5).astype(np.float32)

    def drawn(count: int) -> tuple[Array, npt.NDArray[np.int64]]:
        classes = rng.integers(0, CLASSES, count)
        pictures = templates[classes] + rng.normal(scale=0.5, size=(count, 3, SIDE, SIDE))
        return pictures.astype(np.float32), classes

    fitted, classes = drawn(800)
    features = np.maximum(_convolved(fitted, filters), 0).reshape(len(fitted), -1)
    targets = np.eye(CLASSES, dtype=np.float32)[classes]
    ridge = features.T @ features + 10.0 * np.eye(features.shape[1], dtype=np.float32)
    weights = (4 * np.linalg.solve(ridge, features.T @ targets)).astype(np.float32)
    inputs, truth = drawn(samples)
    wrong = rng.random(samples) < WRONG_LABELS
    labels = np.where(wrong, (truth + 1) % CLASSES, truth)
    return LabelledShapes(_classifier(filters, weights), inputs, [int(label) for label in labels])


def _convolved(pictures: Array, filters: Array) -> Array:
    windows = np.lib.stride_tricks.sliding_window_view(pictures, (3, 3), axis=(2, 3))
    result: Array = np.einsum("nchwij,fcij->nfhw", windows, filters, optimize=True).astype(np.float32)
    return result


def _classifier(filters: Array, weights: Array) -> bytes:
    nodes = [
        helper.make_node("Conv", ["image", "filters"], ["a"], "conv", kernel_shape=[3, 3]),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Flatten", ["b"], ["c"], "flatten"),
        helper.make_node("MatMul", ["c", "weights"], ["scores"], "classify"),
    ]
    graph = helper.make_graph(
        nodes, "shapes", [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, CLASSES])],
        [numpy_helper.from_array(filters, "filters"), numpy_helper.from_array(weights, "weights")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    raw: bytes = model.SerializeToString()
    return raw
