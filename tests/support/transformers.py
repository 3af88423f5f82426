"""A small transformer encoder as ONNX with seeded weights, and sequences of tokens that it tells apart.

Two blocks of attention and a feed-forward part, as exporters write them: products with stored weights, products of two
activations, normalisation, GELU. The last product is fitted to the classes by least squares.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
from onnx import NodeProto, TensorProto, helper, numpy_helper

from support import onnx_models
from support.classifiers import Classifier
from support.onnx_models import Array

CLASSES, WORDS, LENGTH, WIDTH, HEADS, BLOCKS = 4, 64, 12, 32, 4, 2


class _Encoder:
    """Nodes and weights in the making."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 2])
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def weight(self, name: str, *shape: int) -> str:
        values = self._rng.standard_normal(shape) / np.sqrt(shape[0])
        return self.constant(name, values.astype(np.float32))

    def constant(self, name: str, values: Array) -> str:
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def node(self, kind: str, name: str, *reads: str, **fields: object) -> str:
        self.nodes.append(helper.make_node(kind, list(reads), [name], name=name, **fields))
        return name

    def product(self, name: str, read: str, columns: int, rows: int = WIDTH) -> str:
        return self.node("MatMul", name, read, self.weight(f"{name}/weights", rows, columns))

    def normalised(self, name: str, read: str) -> str:
        scale = self.constant(f"{name}/scale", np.ones(WIDTH, np.float32))
        shift = self.constant(f"{name}/shift", np.zeros(WIDTH, np.float32))
        return self.node("LayerNormalization", name, read, scale, shift, axis=-1)

    def heads(self, name: str, read: str, order: list[int]) -> str:
        columns = self.product(name, read, WIDTH)
        apart = self.node("Reshape", f"{name}/apart", columns, "split")
        return self.node("Transpose", f"{name}/heads", apart, perm=order)

    def block(self, name: str, read: str) -> str:
        asked, found = self.heads(f"{name}/q", read, [0, 2, 1, 3]), self.heads(f"{name}/k", read, [0, 2, 3, 1])
        values = self.heads(f"{name}/v", read, [0, 2, 1, 3])
        scores = self.node("MatMul", f"{name}/scores", asked, found)
        scaled = self.node("Mul", f"{name}/scaled", scores, "one_over_root")
        mixed = self.node("MatMul", f"{name}/mixed", self.node("Softmax", f"{name}/share", scaled, axis=-1), values)
        back = self.node("Transpose", f"{name}/back", mixed, perm=[0, 2, 1, 3])
        joined = self.product(f"{name}/out", self.node("Reshape", f"{name}/joined", back, "join"), WIDTH)
        first = self.normalised(f"{name}/norm1", self.node("Add", f"{name}/sum1", read, joined))
        wide = self.node("Relu", f"{name}/relu", self.product(f"{name}/wide", first, 4 * WIDTH))
        narrow = self.product(f"{name}/narrow", wide, WIDTH, 4 * WIDTH)
        return self.normalised(f"{name}/norm2", self.node("Add", f"{name}/sum2", first, narrow))


def transformer(count: int = 120, seed: int = 0) -> Classifier:
    """The encoder, on sequences whose words are drawn mostly from their class's share of the vocabulary."""
    rng = np.random.default_rng([seed, 3])
    labels = [position % CLASSES for position in range(count)]
    own = rng.random((count, LENGTH)) < 0.7
    share = WORDS // CLASSES
    words = np.where(own, np.array(labels)[:, None] * share, 0) + rng.integers(0, np.where(own, share, WORDS))
    samples = [{"words": sequence[None].astype(np.int64)} for sequence in words]
    session = onnxruntime.InferenceSession(_file(seed, None))
    features = np.concatenate([session.run(None, sample)[0] for sample in samples])
    ridge = features.T @ features + 1e-2 * count * np.eye(WIDTH)
    head = np.linalg.solve(ridge, features.T @ np.eye(CLASSES)[labels]).astype(np.float32)
    return Classifier(_file(seed, head), "encoder.onnx", samples, labels)


def _file(seed: int, head: Array | None) -> bytes:
    encoder = _Encoder(seed)
    encoder.constant("split", np.array([1, LENGTH, HEADS, WIDTH // HEADS], np.int64))
    encoder.constant("join", np.array([1, LENGTH, WIDTH], np.int64))
    encoder.constant("one_over_root", np.array((WIDTH / HEADS) ** -0.5, np.float32))
    last = encoder.node("Gather", "embedded", encoder.weight("vocabulary", WORDS, WIDTH), "words", axis=0)
    for number in range(BLOCKS):
        last = encoder.block(f"block{number}", last)
    last = encoder.node("ReduceMean", "features", last, axes=[1], keepdims=0)
    output = onnx_models.value("features", (1, WIDTH))
    if head is not None:
        encoder.node("MatMul", "scores", last, encoder.constant("head", head))
        output = onnx_models.value("scores", (1, CLASSES))
    words = helper.make_tensor_value_info("words", TensorProto.INT64, (1, LENGTH))
    return onnx_models.build(encoder.nodes, [words], [output], encoder.weights)
