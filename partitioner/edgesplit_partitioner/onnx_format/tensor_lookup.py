"""Shapes and element sizes of an ONNX graph's tensors, looked up by name when the work of its operators is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import onnx


@dataclass(frozen=True, slots=True)
class TensorLookup:
    """Shape, element size and kind of the tensors in one scope: the main graph, or a subgraph with what it captures."""

    shape: Callable[[str], tuple[int, ...] | None]
    """A tensor's or weight's shape by its name; None where it is not known."""
    itemsize: Callable[[str], int]
    """Bytes of one element of a tensor, by its name."""
    is_weight: Callable[[str], bool]
    """Whether the tensor of that name is a weight or a constant."""

    def elements(self, name: str) -> int:
        """Number of elements of a tensor; 0 where the shape is not known, and open lengths count as 0."""
        shape = self.shape(name) if name else None
        return 0 if shape is None else prod(max(length, 0) for length in shape)

    def bytes(self, names: Iterable[str]) -> float:
        """Bytes of all the tensors named; a name that is listed twice counts once."""
        return float(sum(self.elements(name) * self.itemsize(name) for name in set(names) if name))

    def moved(self, node: onnx.NodeProto) -> float:
        """Bytes that `node` moves: every input read once and every output written once."""
        return self.bytes((*node.input, *node.output))
