"""The layer graph: layers, tensors and operator work, shared by reading, profiling, prediction, planning and slicing.
Independent of the model's format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OperatorClass = Literal["input", "conv", "depthwise", "gemm", "elementwise", "memory"]
"""Class of an operator by what bounds its time.

conv: dense convolution (1x1 included); gemm: matrix products (with a batch of 1 bound by reading the weights);
elementwise: arithmetic per element; memory: pooling, softmax, copies, resizing; input: decode and normalise.
"""


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """Amount of work of one operator, from which its run time is predicted."""

    operator: OperatorClass
    flops: float
    """2 x multiply-accumulates; for elementwise operators one per element."""
    bytes_moved: float
    """Bytes of activations read and written plus bytes of weights read."""
    family: str = field(default="", compare=False)
    """Operator family whose fit predicts its time (`onnx_format.operator_features`); empty where no family is known."""
    sizes: tuple[float, ...] = field(default=(), compare=False)
    """Feature values of the family's fit, in the family's order."""
    is_int8: bool = field(default=False, compare=False)
    """Whether a convolution or product multiplies 8-bit integers."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that passes from one layer to another, or in or out of the model."""

    name: str
    datatype: str
    """Datatype in the Open Inference Protocol's notation: FP32, INT64, ..."""
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """A fusible group of operators; no cut goes through a layer."""

    name: str
    nodes: tuple[int, ...]
    """Positions in the model's node list, ascending; empty for the input layer."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weights: tuple[str, ...]
    weight_bytes: int
    work: tuple[OperatorWork, ...]
    """Work of each operator, in order."""


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Layers in an order in which they can run, and every tensor between them."""

    layers: tuple[Layer, ...]
    tensors: dict[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    raw_tensors: frozenset[str] = field(default=frozenset())
    """Names of the model's inputs and of tensors that are only decoded, moved or rescaled from them, and so still show
    the raw input."""

    def layer(self, name: str) -> Layer:
        """The layer of that name; KeyError if there is none."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)
