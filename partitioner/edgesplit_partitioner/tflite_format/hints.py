"""Hints of a TFLite file: the names of classes in the ZIP that TensorFlow's metadata tools append to it."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

from edgesplit_partitioner.ir.hints import MOST_NAME_BYTES, Hints, parse_names

MOST_FILES = 20
_ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, ValueError, RuntimeError, NotImplementedError, EOFError,
    KeyError, OverflowError,
)  # fmt: skip
"""What zipfile raises for bytes that are no archive, or one that is encrypted or oddly packed."""


def hints_of(raw: bytes) -> Hints:
    """The hints of the file; none where nothing is appended, or it cannot be read."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as appended:
            texts = [entry for entry in appended.infolist()[:MOST_FILES] if entry.filename.endswith(".txt")]
            if len(texts) != 1 or texts[0].file_size > MOST_NAME_BYTES:
                return Hints(producer="tflite")
            return Hints(producer="tflite", names=parse_names(appended.read(texts[0]).decode("utf-8", "replace")))
    except _ZIP_ERRORS:
        return Hints(producer="tflite")
