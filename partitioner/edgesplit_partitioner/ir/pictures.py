"""Pictures as inputs: how large their frames are, and which tensors are most likely pictures that arrive decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from edgesplit.input_spec import InputSpec
from edgesplit.picture_formats import PNG, RAW, WEBP, raw_bytes
from edgesplit.release.manifest import TensorSpec
from edgesplit_partitioner.ir.graph import Tensor

JPEG_BITS_PER_PIXEL = ((1, 0.15), (30, 0.6), (50, 0.8), (75, 1.2), (85, 1.6), (90, 2.0), (95, 3.0), (100, 6.3))
"""Pairs of JPEG quality and bits per pixel: between the medians of 28 photographs at 320x240 (Pillow, 4:2:0; q85: 1.9)
and of one at 640x480 (1.2). Used only where no sample frames are given."""
PNG_BITS_PER_PIXEL = 15.3
"""Median of 22 photographs at 320x240 (Pillow, RGB)."""
WEBP_PART = 0.85
"""Bytes of a WebP as a part of those of the JPEG of the same quality: 0.80 to 0.88 for qualities 30 to 95, on the same
photographs."""
MIN_SIDE = 16
"""Pixels of a picture's shorter side, at least: smaller tensors of four dimensions are features as often."""
Datatype = Literal["FP32", "FP16", "UINT8", "INT8"]
DATATYPES: Mapping[str, Datatype] = {name: name for name in get_args(Datatype)}
"""What an input spec can make of a picture."""


def picture_bytes(spec: InputSpec) -> int:
    """Size in bytes of the spec's frames, for costs before any sample frame was given: typical of encoded pictures,
    exact for raw ones."""
    if spec.media == RAW:
        return raw_bytes(spec.pixels, spec.width, spec.height)
    if spec.media == PNG:
        return 100 + round(spec.width * spec.height * PNG_BITS_PER_PIXEL / 8)
    return round(jpeg_bytes(spec) * (WEBP_PART if spec.media == WEBP else 1.0))


def jpeg_bytes(spec: InputSpec) -> int:
    """Typical size in bytes of a JPEG of the spec's size and quality."""
    qualities, bits = zip(*JPEG_BITS_PER_PIXEL, strict=True)
    per_pixel = float(np.interp(spec.quality, qualities, bits))
    return 600 + round(spec.width * spec.height * per_pixel / 8 * (0.8 if spec.colour == "gray" else 1.0))


def picture_spec(tensor: Tensor | TensorSpec) -> InputSpec | None:
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
                datatype=DATATYPES[tensor.datatype],
            )
    return None


def spec_text(spec: InputSpec) -> str:
    """The part of a picture's spec that its tensor tells, as it is typed; scale, mean and std are the model's own."""
    words = ["image/jpeg", f"{spec.width}x{spec.height}", spec.colour, spec.layout]
    return " ".join(words if spec.datatype == "FP32" else (*words, spec.datatype.lower()))
