"""Corrected biases in ONNX graphs: see `bias_correction`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from edgesplit_partitioner.compression.bias_correction import Array, output_shift
from edgesplit_partitioner.onnx_format import nodes

CORRECTED: Final = frozenset({"Conv", "Gemm"})
"""Operators with a bias, which is corrected; the axis of their input's channels is 1."""


def output_shifts(model: onnx.ModelProto, means: Mapping[str, Array]) -> dict[str, Array]:
    """`output_shift` of each convolution and product with constant weights, by node."""
    weights = nodes.initializers(model.graph)
    shifts = {}
    for node in model.graph.node:
        if node.op_type not in CORRECTED or node.input[1] not in weights or node.input[0] not in means:
            continue
        values = numpy_helper.to_array(weights[node.input[1]])
        fields = {field.name: onnx.helper.get_attribute_value(field) for field in node.attribute}
        if node.op_type == "Gemm":
            if fields.get("alpha", 1.0) != 1.0 or fields.get("beta", 1.0) != 1.0 or fields.get("transA", 0):
                continue
            values = values if fields.get("transB", 0) else values.T
        shift = output_shift(values, means[node.input[0]], fields.get("group", 1))
        if shift is not None:
            shifts[node.name] = shift
    return shifts


def with_corrected_biases(
    model: onnx.ModelProto, shifts: Mapping[str, Array], quantised: Collection[str]
) -> onnx.ModelProto:
    """A copy of the model in which these nodes' biases take the shifts back; nodes without a bias get one."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    weights = nodes.initializers(copy.graph)
    for node in copy.graph.node:
        if node.name not in quantised or node.name not in shifts:
            continue
        shift = shifts[node.name]
        bias = np.zeros(len(shift), np.float32)
        if len(node.input) > 2 and node.input[2]:
            if node.input[2] not in weights:
                continue
            bias = numpy_helper.to_array(weights[node.input[2]])
            if bias.size != len(shift):
                continue
        name = f"{node.name}/corrected_bias"
        corrected = (bias.reshape(-1).astype(np.float64) - shift).astype(np.float32)
        copy.graph.initializer.append(numpy_helper.from_array(corrected, name))
        del node.input[2:]
        node.input.append(name)
    return copy
