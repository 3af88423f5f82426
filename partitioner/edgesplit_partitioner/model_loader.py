"""Loads a model of any supported format, which is detected from the content of the file."""

from __future__ import annotations

from collections.abc import Mapping

from edgesplit.errors import ModelRefused
from edgesplit_partitioner.ir.chunking import Data
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.onnx_format import model as onnx_model

TFLITE_IDENTIFIER = b"TFL3"
"""Bytes 4 to 8 of a TFLite flatbuffer."""
FOREIGN = {
    b"\xff\xd8\xff": "a JPEG picture",
    b"\x89PNG": "a PNG picture",
    b"PK\x03\x04": "a ZIP archive, as PyTorch and Keras write: export it to ONNX or TFLite",
    b"\x89HDF": "an HDF5 file, as Keras writes: convert it to TFLite",
    b"\x93NUMPY": "a NumPy array",
    b"\x1f\x8b": "a gzip archive: unpack it",
}
"""First bytes of files that are given for models by mistake, with what to tell the caller."""


def is_tflite(raw: Data) -> bool:
    """Whether the bytes have the identifier of a TFLite model; everything else is read as ONNX."""
    return raw[4:8] == TFLITE_IDENTIFIER


def prepare_model(raw: Data, bindings: Mapping[str, int] | None = None) -> PreparedModel:
    """The model in `raw`, ready to be cut; ModelRefused names what is wrong with it and what would help.

    A model in several files comes as a model archive (`onnx_format.archive`), which may be mapped: nothing of it is
    copied. `bindings` gives free dimensions their lengths: by name (`batch`, ONNX only) or by position (`images:0`).
    """
    foreign = next((format_ for start, format_ in FOREIGN.items() if raw[: len(start)] == start), None)
    if foreign:
        raise ModelRefused(f"neither ONNX nor TFLite but {foreign}")
    if is_tflite(raw):
        # LiteRT is an extra: without it ONNX models work all the same
        from edgesplit_partitioner.tflite_format import model as tflite_model

        return tflite_model.prepare_model(raw[:], bindings)
    return onnx_model.prepare_model(raw, bindings)
