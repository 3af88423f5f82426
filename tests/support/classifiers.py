"""Small classifiers with seeded weights, in both formats, and samples that they tell apart.

Four convolutions with random weights, then a product that is fitted to the samples' classes by least squares. `spread`
multiplies one channel after the second convolution, and divides it again after it was read: in float nothing changes,
in int8 the other channels lose their values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnxruntime
from ai_edge_litert import schema_py_generated as schema
from onnx import helper, numpy_helper

from support import onnx_models, tflite_models
from support.onnx_models import Array

CLASSES, SIDE, CHANNELS, DEPTH = 6, 8, 8, 4
NOISE = 0.5


@dataclass(frozen=True)
class Classifier:
    """A model's file, and samples with their classes."""

    raw: bytes
    file_name: str
    samples: list[dict[str, Array]]
    labels: list[int]


def onnx_classifier(count: int = 240, *, spread: float = 1.0, seed: int = 0, noise: float = NOISE) -> Classifier:
    """The classifier as ONNX, on pictures NCHW. Much noise leaves small margins between its classes."""
    pictures, labels = _pictures(count, seed, noise)
    filters = _filters(spread, seed)
    product = _fitted(pictures, labels, filters)
    raw = _onnx_file(filters, product)
    return Classifier(raw, "tiny.onnx", [{"image": picture[None]} for picture in pictures], labels)


def tflite_classifier(count: int = 240, *, spread: float = 1.0, seed: int = 0) -> Classifier:
    """The same classifier as TFLite, on pictures NHWC."""
    pictures, labels = _pictures(count, seed)
    filters = _filters(spread, seed)
    product = _fitted(pictures, labels, filters).reshape(CLASSES, CHANNELS, SIDE, SIDE)
    raw = _tflite_file(filters, product.transpose(0, 2, 3, 1).reshape(CLASSES, -1))
    return Classifier(raw, "tiny.tflite", [{"image": picture.transpose(1, 2, 0)[None]} for picture in pictures], labels)


def _pictures(count: int, seed: int, noise: float = NOISE) -> tuple[Array, list[int]]:
    rng = np.random.default_rng([seed, 1])
    prototypes = rng.standard_normal((CLASSES, 3, SIDE, SIDE))
    labels = [position % CLASSES for position in range(count)]
    shifts = noise * rng.standard_normal((count, 3, SIDE, SIDE))
    return (prototypes[labels] + shifts).astype(np.float32), labels


def _filters(spread: float, seed: int) -> list[Array]:
    """Weights of the convolutions, output channels first."""
    filters = [
        tflite_models.weight(f"w{layer}", CHANNELS, CHANNELS if layer else 3, 3, 3, seed=seed) for layer in range(DEPTH)
    ]
    filters[1][0] *= np.float32(spread)
    filters[2][:, 0] /= np.float32(spread)
    return filters


def _fitted(pictures: Array, labels: list[int], filters: list[Array]) -> Array:
    """Weights [classes, features] of the product, by least squares."""
    session = onnxruntime.InferenceSession(_onnx_file(filters, None))
    features = np.concatenate([session.run(None, {"image": picture[None]})[0] for picture in pictures])
    wanted = np.eye(CLASSES)[labels]
    ridge = features.T @ features + 1e-2 * len(features) * np.eye(features.shape[1])
    fitted: Array = np.linalg.solve(ridge, features.T @ wanted).T.astype(np.float32)
    return fitted


def _onnx_file(filters: list[Array], product: Array | None) -> bytes:
    nodes, weights, last = [], [], "image"
    for layer, values in enumerate(filters):
        weights.append(numpy_helper.from_array(np.ascontiguousarray(values), f"w{layer}"))
        nodes.append(
            helper.make_node("Conv", [last, f"w{layer}"], [f"c{layer}"], name=f"conv{layer}", pads=[1, 1, 1, 1])
        )
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"], name=f"relu{layer}"))
        last = f"r{layer}"
    nodes.append(helper.make_node("Flatten", [last], ["features"], name="flatten"))
    output = onnx_models.value("features", None)
    if product is not None:
        weights.append(numpy_helper.from_array(product, "product"))
        nodes.append(helper.make_node("Gemm", ["features", "product"], ["scores"], name="gemm", transB=1))
        output = onnx_models.value("scores", (1, CLASSES))
    return onnx_models.build(nodes, [onnx_models.value("image", (1, 3, SIDE, SIDE))], [output], weights)


def _tflite_file(filters: list[Array], product: Array) -> bytes:
    model = tflite_models.Model()
    graph = tflite_models.Graph(model)
    graph.tensor("image", 1, SIDE, SIDE, 3)
    last = "image"
    for layer, values in enumerate(filters):
        graph.tensor(f"w{layer}", values=np.ascontiguousarray(values.transpose(0, 2, 3, 1)))
        graph.tensor(f"b{layer}", values=np.zeros(CHANNELS, np.float32))
        graph.tensor(f"r{layer}", 1, SIDE, SIDE, CHANNELS)
        graph.operator("CONV_2D", [last, f"w{layer}", f"b{layer}"], [f"r{layer}"], _convolution())
        last = f"r{layer}"
    features = SIDE * SIDE * CHANNELS
    graph.tensor("shape", values=np.array([1, features], np.int32)).tensor("features", 1, features)
    graph.operator("RESHAPE", [last, "shape"], ["features"], schema.ReshapeOptionsT())
    graph.tensor("product", values=np.ascontiguousarray(product)).tensor("zeros", values=np.zeros(CLASSES, np.float32))
    graph.tensor("scores", 1, CLASSES)
    graph.operator("FULLY_CONNECTED", ["features", "product", "zeros"], ["scores"], schema.FullyConnectedOptionsT())
    graph.ends(["image"], ["scores"])
    return model.file()


def _convolution() -> object:
    options = schema.Conv2DOptionsT()
    options.strideH = options.strideW = options.dilationHFactor = options.dilationWFactor = 1
    options.fusedActivationFunction = int(schema.ActivationFunctionType.RELU)
    options.padding = schema.Padding.SAME
    return options
