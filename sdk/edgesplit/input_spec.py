"""The input spec: how what a camera or microphone gives becomes the first tensor. The first layer, on whichever tier.

Pictures: `image/jpeg WIDTHxHEIGHT [qQUALITY] [rgb|bgr|gray] [nchw|nhwc] [scale=S] [mean=A,B,C] [std=A,B,C] [uint8]`.
WIDTHxHEIGHT is what the camera sends; the tensor's size comes from the model. value = (pixel * scale - mean) / std.
Sound: `audio/pcm16 RATE [SAMPLES] [scale=S]`: one channel of signed 16-bit little-endian samples, as in `audio/pcm16
16k`. A frame is SAMPLES of them, as many as the model takes where it is not said; value = sample * scale, 1/32768
where it is not said. Both tiers run this same code, so a frame decodes to the same tensor wherever the cut lies.
"""

from __future__ import annotations

import io
import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec

from edgesplit.errors import UsageError
from edgesplit.lazy_import import later
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import settle

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image
else:
    np = later("numpy")
    Image = later("PIL.Image")

FRAME = "frame"
"""Name of the tensor (UINT8, [-1]) that holds an encoded picture, or a stretch of sound."""
INPUT_LAYER = "input"
"""Name of the layer, and of the slice, that turns `frame` into the model's first tensor."""

JPEG = "image/jpeg"
PCM16 = "audio/pcm16"
PCM16_BYTES = 2
"""Of one sample."""
PCM16_SCALE = 1 / 32768
"""Full scale becomes 1."""

_MODES: dict[str, str] = {"rgb": "RGB", "bgr": "RGB", "gray": "L"}


class InputSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What arrives and how it is prepared."""

    media: Literal["image/jpeg", "audio/pcm16"] = "image/jpeg"
    width: int = 0
    """Of the frame as it travels, pixels."""
    height: int = 0
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
    rate_hz: int = 0
    """Of the sound, for people and plans; it is not resampled."""
    samples: int = 0
    """Of sound in one frame; the model's input has as many values."""
    rank: int = 2
    """Dimensions of a tensor of sound: all of length 1 but the last."""

    @property
    def is_sound(self) -> bool:
        """Frames are sound, not pictures."""
        return self.media == PCM16

    @property
    def channels(self) -> int:
        """Planes of the prepared tensor."""
        return 1 if self.colour == "gray" else 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the prepared tensor, batch of one."""
        if self.is_sound:
            return (*(1,) * (self.rank - 1), self.samples)
        height, width = self.tensor_height, self.tensor_width
        return (1, self.channels, height, width) if self.layout == "nchw" else (1, height, width, self.channels)


def parse_input_spec(text: str) -> InputSpec:
    """The spec that `text` spells (see the module's text for the grammar); UsageError names the word that is wrong."""
    words = text.split()
    if not words or words[0] not in (JPEG, PCM16):
        raise UsageError(
            f"input spec {text[:80]!r}: it begins with {JPEG} or {PCM16},"
            f" as in '{JPEG} 640x480 q85 rgb scale=1/255' or '{PCM16} 16k'"
        )
    fields: dict[str, object] = {"media": words[0]}
    if words[0] == PCM16:
        fields["scale"] = PCM16_SCALE
        fields.update(_sound_fields(words[1:], text))
    for word in words[1:] if words[0] == JPEG else ():
        said = _field(word, text)
        if twice := fields.keys() & said.keys():
            raise UsageError(f"input spec {text[:80]!r}: {word!r} says the {sorted(twice)[0]} a second time")
        fields.update(said)
    if words[0] == JPEG and "width" not in fields:
        raise UsageError(f"input spec {text[:80]!r}: the frame's size is missing, as in 640x480")
    try:
        return msgspec.convert(fields, InputSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"input spec {text[:80]!r}: {error}") from error


def _sound_fields(words: list[str], text: str) -> dict[str, object]:
    """What the words after `audio/pcm16` set: the rate, then the samples of a frame, and the scale."""
    rate = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(k?)(?:hz)?", words[0].lower()) if words else None
    rate_hz = round(float(rate[1]) * (1000 if rate[2] else 1)) if rate else 0
    if not 1000 <= rate_hz <= 768_000:
        raise UsageError(f"input spec {text[:80]!r}: the rate is missing or out of range, as in 16k or 44100")
    fields: dict[str, object] = {"rate_hz": rate_hz}
    for word in words[1:]:
        if re.fullmatch(r"\d{1,9}", word) and 0 < PCM16_BYTES * int(word) <= LIMITS.frame_bytes:
            fields["samples"] = int(word)
        elif word.startswith("scale="):
            fields["scale"] = _scale(word.removeprefix("scale="), text)
        else:
            raise UsageError(f"input spec {text[:80]!r}: cannot read {word!r}")
    return fields


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
        if pair[1] == "scale":
            return {"scale": _scale(pair[2], text)}
        numbers = tuple(_number(part, text) for part in pair[2].split(","))
        if len(numbers) in (1, 3) and (pair[1] != "std" or 0.0 not in numbers):
            return {pair[1]: numbers}
    raise UsageError(f"input spec {text[:80]!r}: cannot read {word!r}")


def _number(part: str, text: str) -> float:
    above, slash, below = part.partition("/")
    try:
        number = float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise UsageError(f"input spec {text[:80]!r}: {part!r} is not a number") from error
    if not math.isfinite(number):
        raise UsageError(f"input spec {text[:80]!r}: {part!r} is not a finite number")
    return number


def _scale(part: str, text: str) -> float:
    if (number := _number(part, text)) == 0.0:
        raise UsageError(f"input spec {text[:80]!r}: a scale of 0 would leave nothing of the input")
    return number


def prepare(spec: InputSpec, frame: bytes | memoryview) -> npt.NDArray[np.generic]:
    """The first tensor, of shape `spec.shape`; UsageError where the bytes are no picture of bounded size, or not
    as much sound as the spec says."""
    if len(frame) > LIMITS.frame_bytes:
        raise UsageError(f"frame of {len(frame)} bytes, at most {LIMITS.frame_bytes}")
    if spec.is_sound:
        return _sound(spec, frame)
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


def _sound(spec: InputSpec, frame: bytes | memoryview) -> npt.NDArray[np.generic]:
    """Samples times the scale, in float32 as every tier computes it."""
    if len(frame) != PCM16_BYTES * spec.samples:
        raise UsageError(
            f"the frame has {len(frame)} bytes; {spec.samples} samples of 16 bits are {PCM16_BYTES * spec.samples}"
        )
    samples = np.frombuffer(frame, dtype="<i2").astype(np.float32)
    return (samples * np.float32(spec.scale)).reshape(spec.shape)


def _normalise(spec: InputSpec, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
    """Colour order, scale, mean, std, layout; `pixels` is (height, width) or (height, width, 3)."""
    planes = pixels.reshape(spec.tensor_height, spec.tensor_width, spec.channels)
    if spec.colour == "bgr":
        planes = planes[:, :, ::-1]
    if spec.datatype == "UINT8":
        values: npt.NDArray[np.generic] = planes.transpose(2, 0, 1) if spec.layout == "nchw" else planes
        return np.ascontiguousarray(values[None])
    out = np.empty(spec.shape, np.float32)
    for channel, table in enumerate(_tables(spec)):
        if spec.layout == "nchw":
            np.take(table, planes[:, :, channel], out=out[0, channel], mode="clip")
        else:
            out[0, :, :, channel] = table[planes[:, :, channel]]
    return out


@lru_cache(maxsize=64)
def _tables(spec: InputSpec) -> npt.NDArray[np.float32]:
    """What each of the 256 values of a channel becomes: looked up, that takes a third of computing it."""
    steps = np.arange(256, dtype=np.float32)[:, None] * np.float32(spec.scale)
    values = (steps - np.asarray(spec.mean, np.float32)) / np.asarray(spec.std, np.float32)
    return np.ascontiguousarray(np.broadcast_to(values, (256, spec.channels)).T)


settle(__name__)
