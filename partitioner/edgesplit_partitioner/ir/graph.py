"""The layer graph: the nouns that reading, measuring, predicting and cutting share. No model format is known here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OperatorClass = Literal["input", "conv", "depthwise", "gemm", "elementwise", "memory"]
"""conv: dense convolution (1x1 included); gemm: matrix products (a batch of one is bound by its weights);
elementwise: arithmetic per element; memory: pooling, softmax, copies, resizing; input: decode and normalise."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one operator has to do."""

    operator: OperatorClass
    flops: float
    """2 x multiply-accumulates, or one per element of elementwise operators."""
    bytes_moved: float
    """Activations read and written plus weights read."""
    family: str = field(default="", compare=False)
    """What it is to a fitted predictor (`features`); empty where no family is known."""
    sizes: tuple[float, ...] = field(default=(), compare=False)
    """The family's sizes, in its order."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that lives between layers."""

    name: str
    datatype: str
    """Of the Open Inference Protocol: FP32, INT64, ..."""
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A fusible group of operators; a cut never goes inside one."""

    name: str
    nodes: tuple[int, ...]
    """Positions in the model's node list, in order; empty for the input layer."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: tuple[str, ...]
    weight_bytes: int
    work: tuple[Work, ...]
    """Per operator."""


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Layers in an order in which they can run, and every tensor between them."""

    layers: tuple[Layer, ...]
    tensors: dict[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    raw: frozenset[str] = field(default=frozenset())
    """Inputs and what is only decoded, moved or rescaled from them: still the raw picture."""

    def layer(self, name: str) -> Layer:
        """The layer of that name; KeyError if there is none."""
        for one in self.layers:
            if one.name == name:
                return one
        raise KeyError(name)
