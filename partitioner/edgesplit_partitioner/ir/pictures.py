"""Pictures as inputs: how large their JPEG is, and which tensors are most likely pictures that arrive decoded."""

from __future__ import annotations

import numpy as np

from edgesplit.input_spec import InputSpec
from edgesplit_partitioner.ir.graph import Tensor

JPEG_BITS_PER_PIXEL = ((1, 0.15), (30, 0.6), (50, 0.8), (75, 1.2), (85, 1.6), (90, 2.0), (95, 3.0), (100, 6.3))
"""Pairs of JPEG quality and bits per pixel: between the medians of 28 photographs at 320x240 (Pillow, 4:2:0; q85: 1.9)
and of one at 640x480 (1.2). Used only where no sample frames are given."""
MIN_SIDE = 16
"""Pixels of a picture's shorter side, at least: smaller tensors of four dimensions are features as often."""
DATATYPES = ("FP32", "UINT8")
"""What an input spec can make of a JPEG."""


def jpeg_bytes(spec: InputSpec) -> int:
    """Typical size in bytes of the spec's JPEG frame, for costs before any sample frame was given."""
    qualities, bits = zip(*JPEG_BITS_PER_PIXEL, strict=True)
    per_pixel = float(np.interp(spec.quality, qualities, bits))
    return 600 + round(spec.width * spec.height * per_pixel / 8 * (0.8 if spec.colour == "gray" else 1.0))


def picture_spec(tensor: Tensor) -> InputSpec | None:
    """The spec of a JPEG of the tensor's own size, where the tensor looks like one decoded picture: four dimensions,
    one or three planes, either plane order. None where it does not."""
    if tensor.datatype not in DATATYPES or len(tensor.shape) != 4 or tensor.shape[0] != 1:
        return None
    _, second, third, last = tensor.shape
    for planes_first, planes, height, width in ((True, second, third, last), (False, last, second, third)):
        if planes in (1, 3) and min(height, width) >= MIN_SIDE:
            return InputSpec(
                width=width,
                height=height,
                colour="gray" if planes == 1 else "rgb",
                layout="nchw" if planes_first else "nhwc",
                datatype="UINT8" if tensor.datatype == "UINT8" else "FP32",
            )
    return None


def spec_text(spec: InputSpec) -> str:
    """The part of a picture's spec that its tensor tells, as it is typed; scale, mean and std are the model's own."""
    words = ["image/jpeg", f"{spec.width}x{spec.height}", spec.colour, spec.layout]
    return " ".join(word for word in (*words, "uint8" if spec.datatype == "UINT8" else "") if word)
