"""The input spec: how what a camera gives becomes the first tensor. The first layer, on whichever tier it runs.

Spelled `image/jpeg WIDTHxHEIGHT [qQUALITY] [rgb|bgr|gray] [nchw|nhwc] [scale=S] [mean=A,B,C] [std=A,B,C] [uint8]`.
WIDTHxHEIGHT is what the camera sends; the tensor's size comes from the model. value = (pixel * scale - mean) / std.
Both tiers run this same code, so a frame decodes to the same tensor wherever the cut lies.
"""

from __future__ import annotations

import io
import re
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from edgesplit.errors import UsageError
from edgesplit.limits import LIMITS

FRAME = "frame"
"""Name of the tensor (UINT8, [-1]) that holds an encoded picture."""
INPUT_LAYER = "input"
"""Name of the layer, and of the slice, that turns `frame` into the model's first tensor."""

_MODES: dict[str, str] = {"rgb": "RGB", "bgr": "RGB", "gray": "L"}


class InputSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What arrives and how it is prepared."""

    media: Literal["image/jpeg"] = "image/jpeg"
    width: int
    """Of the frame as it travels, pixels."""
    height: int
    quality: int = 85
    """JPEG quality that the frame's size is priced at where no samples are given."""
    colour: Literal["rgb", "bgr", "gray"] = "rgb"
    layout: Literal["nchw", "nhwc"] = "nchw"
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    datatype: Literal["FP32", "UINT8"] = "FP32"
    tensor: str = ""
    """The model's input that this feeds; filled in when the model is pushed."""
    tensor_width: int = 0
    tensor_height: int = 0

    @property
    def channels(self) -> int:
        """Planes of the prepared tensor."""
        return 1 if self.colour == "gray" else 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the prepared tensor, batch of one."""
        height, width = self.tensor_height, self.tensor_width
        return (1, self.channels, height, width) if self.layout == "nchw" else (1, height, width, self.channels)


def parse_input_spec(text: str) -> InputSpec:
    """The spec that `text` spells (see the module's text for the grammar); UsageError names the word that is wrong."""
    words = text.split()
    if not words or words[0] != "image/jpeg":
        raise UsageError(
            f"input spec {text[:80]!r}: it begins with image/jpeg, as in 'image/jpeg 640x480 q85 rgb scale=1/255'"
        )
    fields: dict[str, object] = {}
    for word in words[1:]:
        fields.update(_field(word, text))
    if "width" not in fields:
        raise UsageError(f"input spec {text[:80]!r}: the frame's size is missing, as in 640x480")
    try:
        return msgspec.convert(fields, InputSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"input spec {text[:80]!r}: {error}") from error


def _field(word: str, text: str) -> dict[str, object]:
    """What one word of a spec sets."""
    if size := re.fullmatch(r"(\d{1,5})x(\d{1,5})", word):
        width, height = int(size[1]), int(size[2])
        if 0 < width * height <= LIMITS.frame_pixels:
            return {"width": width, "height": height}
    elif (quality := re.fullmatch(r"q(\d{1,3})", word)) and 1 <= int(quality[1]) <= 100:
        return {"quality": int(quality[1])}
    elif word in _MODES:
        return {"colour": word}
    elif word in ("nchw", "nhwc"):
        return {"layout": word}
    elif word == "uint8":
        return {"datatype": "UINT8"}
    elif pair := re.fullmatch(r"(scale|mean|std)=(.+)", word):
        numbers = tuple(_number(part, text) for part in pair[2].split(","))
        if pair[1] == "scale" and len(numbers) == 1:
            return {"scale": numbers[0]}
        if pair[1] != "scale" and len(numbers) in (1, 3) and (pair[1] != "std" or 0.0 not in numbers):
            return {pair[1]: numbers}
    raise UsageError(f"input spec {text[:80]!r}: cannot read {word!r}")


def _number(part: str, text: str) -> float:
    above, slash, below = part.partition("/")
    try:
        return float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(f"input spec {text[:80]!r}: {part!r} is not a number") from error


def prepare(spec: InputSpec, frame: bytes | memoryview) -> npt.NDArray[np.generic]:
    """The first tensor, of shape `spec.shape`; UsageError where the bytes are no picture of bounded size."""
    if len(frame) > LIMITS.frame_bytes:
        raise UsageError(f"frame of {len(frame)} bytes, at most {LIMITS.frame_bytes}")
    try:
        with Image.open(io.BytesIO(frame), formats=("JPEG",)) as picture:
            if picture.width * picture.height > LIMITS.frame_pixels:
                raise UsageError(f"frame of {picture.width}x{picture.height} pixels is too large")
            pixels = picture.convert(_MODES[spec.colour])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError("the frame is not a whole JPEG") from error
    if pixels.size != (spec.tensor_width, spec.tensor_height):
        pixels = pixels.resize((spec.tensor_width, spec.tensor_height), Image.Resampling.BILINEAR)
    return _normalise(spec, np.asarray(pixels))


def _normalise(spec: InputSpec, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
    """Colour order, scale, mean, std, layout; `pixels` is (height, width) or (height, width, 3)."""
    planes = pixels.reshape(spec.tensor_height, spec.tensor_width, spec.channels)
    if spec.colour == "bgr":
        planes = planes[:, :, ::-1]
    if spec.datatype == "UINT8":
        values: npt.NDArray[np.generic] = planes
    else:
        scaled = planes.astype(np.float32) * np.float32(spec.scale)
        values = (scaled - np.asarray(spec.mean, np.float32)) / np.asarray(spec.std, np.float32)
    if spec.layout == "nchw":
        values = values.transpose(2, 0, 1)
    return np.ascontiguousarray(values[None])
