"""A model of any format that we know becomes a prepared model. By its content: nobody is asked what it is."""

from __future__ import annotations

from collections.abc import Mapping

from edgesplit_partitioner import onnx_model
from edgesplit_partitioner.prepared import PreparedModel

TFLITE_IDENTIFIER = b"TFL3"
"""Bytes 4 to 8 of a TFLite flatbuffer."""


def is_tflite(raw: bytes) -> bool:
    """Whether these bytes say that they are a TFLite model; all else is read as ONNX, or refused as it."""
    return raw[4:8] == TFLITE_IDENTIFIER


def prepare_model(raw: bytes, bindings: Mapping[str, int] | None = None) -> PreparedModel:
    """The model in `raw`, ready to be cut; ModelRefused says what is wrong with it and what would do.

    A model in several files comes as a `bundle`. `bindings` gives free dimensions their lengths: by name (`batch`, ONNX
    only) or by place (`images:0`).
    """
    if is_tflite(raw):
        from edgesplit_partitioner import tflite_model  # LiteRT is an extra: without it ONNX models work all the same

        return tflite_model.prepare_model(raw, bindings)
    return onnx_model.prepare_model(raw, bindings)
