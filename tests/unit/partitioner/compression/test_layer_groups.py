"""Layers begin at operators with weights."""

from __future__ import annotations

from edgesplit_partitioner.compression.layer_groups import Operator, layer_groups


def test_an_operator_without_weights_belongs_to_the_layer_before_it() -> None:
    """An activation, and a sum of two branches, to the layer that wrote its first operand."""
    operators = [
        Operator("scale", False, ("image",), ("scaled",)),
        Operator("conv1", True, ("scaled",), ("a",)),
        Operator("relu1", False, ("a",), ("b",)),
        Operator("conv2", True, ("b",), ("c",)),
        Operator("sum", False, ("b", "c"), ("d",)),
    ]
    assert layer_groups(operators) == {"scale": ("scale",), "conv1": ("conv1", "relu1", "sum"), "conv2": ("conv2",)}
