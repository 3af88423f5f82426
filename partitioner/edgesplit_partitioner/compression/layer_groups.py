"""Layers of a model as quantisers see them: an operator with weights, and the operators after it up to the next.

Operators without weights before the first one form a layer of their own. A layer is named by its first operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: its name, whether it has weights, the tensors that it reads (weights left out) and writes."""

    name: str
    has_weights: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def layer_groups(operators: Iterable[Operator]) -> Mapping[str, tuple[str, ...]]:
    """The names of each layer's operators, by the layer's name, in the order in which they run."""
    groups: dict[str, list[str]] = {}
    layer_of: dict[str, str] = {}
    for operator in operators:
        source = next((layer_of[name] for name in operator.reads if name in layer_of), "")
        layer = operator.name if operator.has_weights or not source else source
        groups.setdefault(layer, []).append(operator.name)
        layer_of |= dict.fromkeys(operator.writes, layer)
    return {layer: tuple(names) for layer, names in groups.items()}
