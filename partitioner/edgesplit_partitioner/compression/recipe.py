"""The recipe of a compressed model: what makes the same file from the same model and samples again."""

from __future__ import annotations

from typing import Literal

import msgspec

Method = Literal["int8", "int8-dynamic", "fp16", "auto"]
"""What a caller may ask for. `int8`: weights and activations, ranges measured on samples. `int8-dynamic`: weights, and
activations by their range in each request. `fp16`: weights and arithmetic in half precision. `auto`: the smallest file
that keeps the terms."""
AppliedMethod = Literal["int8", "int8-dynamic", "fp16"]
"""What a recipe applies; `auto` has chosen one of them."""
Calibration = Literal["", "minmax", "percentile"]
"""How the ranges of activations are found: by the extremes, or without the outermost values; empty where they are not
needed."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a compressed model was made. With the same model, samples and tools it makes the same bytes again."""

    method: AppliedMethod
    format: Literal["onnx", "tflite"]
    per_channel: bool = True
    """Whether each output channel of a weight has a scale of its own."""
    calibration: Calibration = ""
    calibration_samples: int = 0
    """Number of samples on which ranges were measured."""
    calibration_digest: str = ""
    """SHA-256 of those samples, as of `evaluation.StoredSamples.digest`; empty without any."""
    float_layers: tuple[str, ...] = ()
    """Layers left in float because they changed most answers, by the name of their operator (ONNX) or of the tensor
    that it writes (TFLite)."""
    without_kernel: tuple[str, ...] = ()
    """Types of operators of the model that have no int8 kernel and so stay in float."""
    opset: int = 0
    """Version of the ONNX operator set; 0 for TFLite."""
    tools: dict[str, str] = {}
    """Version of each package that made the file, by its name."""
