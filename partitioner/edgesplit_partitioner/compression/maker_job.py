"""The messages between `maker` and its child process: what to make, and what was made."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from edgesplit_partitioner.compression.recipe import AppliedMethod, Calibration

GIVEN_FILE: Final = "given.model"
"""The model to compress, in the work folder: an ONNX message, or a normalised TFLite file."""
START_FILE: Final = "maker.json"
"""The `MakerStart` of a child process."""


class MakerStart(msgspec.Struct, frozen=True):
    """What the child process works on."""

    format: Literal["onnx", "tflite"]
    samples: tuple[dict[str, str], ...]
    """Samples to measure ranges on: file by input name."""


class MakeJob(msgspec.Struct, frozen=True, kw_only=True):
    """One variant to make."""

    file: str
    """Name of the file to write."""
    method: AppliedMethod
    calibration: Calibration = ""
    float_layers: tuple[str, ...] = ()
    """Layers that stay in float."""
    only: tuple[str, ...] = ()
    """Where given, only these layers are quantised."""


class MakeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was made."""

    refused: str = ""
    """Why there is no such variant; empty where it was written."""
    layers: tuple[str, ...] = ()
    """All layers that the method can quantise, in the order in which they run."""
    without_kernel: tuple[str, ...] = ()
    opset: int = 0
    tools: dict[str, str] = {}


class CannotCompress(Exception):
    """The method does not apply to the model; the text says why."""
