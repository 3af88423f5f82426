"""Datatypes by the names of ONNX, onnxruntime and TFLite, and random tensors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from edgesplit.release.manifest import TensorSpec
from edgesplit_partitioner.ir.tensor_types import NUMBER_DTYPES, ORT_DATATYPES, item_bytes, noise
from edgesplit_partitioner.onnx_format import nodes
from edgesplit_partitioner.tflite_format import model as tflite_model
from edgesplit_partitioner.tflite_format.flatbuffer import schema


@pytest.mark.parametrize(
    ("datatype", "onnx_type", "ort_name", "tflite_type"),
    [
        ("FP32", onnx.TensorProto.FLOAT, "float", schema.TensorType.FLOAT32),
        ("FP64", onnx.TensorProto.DOUBLE, "double", schema.TensorType.FLOAT64),
        ("FP16", onnx.TensorProto.FLOAT16, "float16", schema.TensorType.FLOAT16),
        ("INT64", onnx.TensorProto.INT64, "int64", schema.TensorType.INT64),
        ("UINT8", onnx.TensorProto.UINT8, "uint8", schema.TensorType.UINT8),
        ("BOOL", onnx.TensorProto.BOOL, "bool", schema.TensorType.BOOL),
    ],
)
def test_each_format_has_its_datatype_names(datatype: str, onnx_type: int, ort_name: str, tflite_type: int) -> None:
    """The tables are derived from one; strings and 8-bit floats are in none."""
    assert nodes.DATATYPES[onnx_type] == ORT_DATATYPES[ort_name] == tflite_model.DATATYPES[tflite_type] == datatype
    assert nodes.ELEMENT_TYPES[datatype] == onnx_type
    assert len(nodes.DATATYPES) == len(tflite_model.DATATYPES) == len(NUMBER_DTYPES) == 12
    assert onnx.TensorProto.STRING not in nodes.DATATYPES


def test_noise_is_deterministic_and_valid_for_every_type() -> None:
    """By seed; bytes take all values, whole numbers that may be lengths are 1, open lengths are 1."""
    specs = [TensorSpec("q", "INT8", (64,)), TensorSpec("n", "INT64", (2,)), TensorSpec("x", "FP16", (-1, 3))]
    made = noise(specs, 5)
    assert made["q"].min() < 0 < made["q"].max()
    assert made["n"].tolist() == [1, 1]
    assert made["x"].shape == (1, 3) and made["x"].dtype == np.float16
    assert np.array_equal(made["q"], noise(specs, 5)["q"])
    assert not np.array_equal(made["q"], noise(specs, 6)["q"])
    assert {name: noise([TensorSpec("t", name, (2,))], 0)["t"].nbytes for name in NUMBER_DTYPES} == {
        name: 2 * item_bytes(name) for name in NUMBER_DTYPES
    }
