"""Input specification: how encoded camera or microphone data becomes the model's first tensor. It is the first layer of
the network and can run on any tier.

Pictures: `image/jpeg WIDTHxHEIGHT [qQUALITY] [rgb|bgr|gray] [nchw|nhwc] [letterbox|letterbox-topleft|crop[=PART]]
[pad=N] [scale=S] [mean=A,B,C] [std=A,B,C] [uint8|int8|fp16]`; `image/png` and `image/webp` alike. Raw frames of a
camera: `image/raw WIDTHxHEIGHT rgb24|bgr24|gray8|yuyv|nv12|i420 …`. WIDTHxHEIGHT is the size that the camera sends; the
tensor's size comes from the model, and the picture is stretched to it unless a word says otherwise
(`edgesplit.picture_fit`). value = (pixel * scale - mean) / std; uint8 is the pixel, int8 the pixel less 128.

Sound: `audio/pcm16 RATE [SAMPLES] [scale=S]`: one channel of signed 16-bit little-endian samples, for example
`audio/pcm16 16k`. A frame consists of SAMPLES samples, by default as many as the model takes; value = sample * scale,
by default 1/32768.

All tiers run this code, so a frame decodes to the same tensor wherever the cut lies.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import msgspec

from edgesplit.errors import UsageError
from edgesplit.lazy_import import lazy_import, np, npt
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.picture_fit import Fit, Placement, fit_picture, place
from edgesplit.picture_formats import JPEG, PIXEL_FORMATS, PNG, RAW, WEBP, Pixels, decode_encoded, decode_raw, raw_bytes

if TYPE_CHECKING:
    from PIL import Image
else:
    Image = lazy_import("PIL.Image")

FRAME = "frame"
"""Name of the tensor (UINT8, [-1]) that holds an encoded picture or a block of sound samples."""
INPUT_LAYER = "input"
"""Name of the layer, and of the slice, that turns `frame` into the model's first tensor."""

PCM16 = "audio/pcm16"
PCM16_BYTES = 2
"""Bytes per sample."""
PCM16_SCALE = 1 / 32768
"""Default scale: full scale becomes 1."""
USUAL_MAGNITUDE = 16.0
"""Inputs beyond this are unusual: models are trained on values of the order of 1, normalised ones on a few."""
PICTURES = (JPEG, PNG, WEBP, RAW)
USUAL_CROP = 0.875
"""Part of a picture's shorter side that `crop` shows, where none is given."""

_MODES: dict[str, str] = {"rgb": "RGB", "bgr": "RGB", "gray": "L"}
"""Pillow mode by colour order."""


class InputSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Format of the incoming frames and how they are preprocessed. Defaults are not written, so that agents which do
    not know a field refuse only the specs that use it."""

    media: Literal["image/jpeg", "image/png", "image/webp", "image/raw", "audio/pcm16"] = "image/jpeg"
    width: int = 0
    """Width of the transmitted frame in pixels."""
    height: int = 0
    quality: int = 85
    """Quality of JPEG or WebP that the planner assumes for the frame's size where no samples are given."""
    pixels: Pixels = "rgb24"
    """Pixel format of raw frames."""
    fit: Fit = "stretch"
    """How the picture is brought to the tensor's size."""
    crop: float = 1.0
    """Part of the picture that a crop shows, of its shorter side, above 0 and at most 1."""
    pad: int = 114
    """Value of the pixels beside a letterboxed picture, 0 to 255."""
    colour: Literal["rgb", "bgr", "gray"] = "rgb"
    layout: Literal["nchw", "nhwc"] = "nchw"
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    datatype: Literal["FP32", "FP16", "UINT8", "INT8"] = "FP32"
    tensor: str = ""
    """The model input that receives the decoded frame; filled in when the model is pushed."""
    tensor_width: int = 0
    tensor_height: int = 0
    rate_hz: int = 0
    """Sample rate of the sound, for display and plans; the sound is not resampled."""
    samples: int = 0
    """Sound samples per frame; the model's input has as many values."""
    rank: int = 2
    """Number of dimensions of a sound tensor; all but the last have length 1."""

    @property
    def is_sound(self) -> bool:
        """True if frames are sound, not pictures."""
        return self.media == PCM16

    @property
    def channels(self) -> int:
        """Number of colour planes of the preprocessed tensor."""
        return 1 if self.colour == "gray" else 3

    @property
    def is_float(self) -> bool:
        """True if the tensor has the values that scale, mean and std make; False if it has the pixels."""
        return self.datatype in ("FP32", "FP16")

    def placement(self, width: int, height: int) -> Placement:
        """Where a frame of so many pixels lies in the tensor."""
        return place(self.fit, (width, height), (self.tensor_width, self.tensor_height), self.crop)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the preprocessed tensor, with a batch of one."""
        if self.is_sound:
            return (*(1,) * (self.rank - 1), self.samples)
        height, width = self.tensor_height, self.tensor_width
        return (1, self.channels, height, width) if self.layout == "nchw" else (1, height, width, self.channels)


def parse_input_spec(text: str) -> InputSpec:
    """Parse an input specification (grammar in the module's docstring); UsageError names the word that is wrong."""
    words = text.split()
    if not words or words[0] not in (*PICTURES, PCM16):
        raise UsageError(
            f"input spec {text[:80]!r}: it begins with {', '.join(PICTURES)} or {PCM16},"
            f" as in '{JPEG} 640x480 q85 rgb scale=1/255' or '{PCM16} 16k'"
        )
    fields: dict[str, object] = {"media": words[0]}
    if words[0] == PCM16:
        fields["scale"] = PCM16_SCALE
        fields.update(_sound_fields(words[1:], text))
    for word in words[1:] if words[0] != PCM16 else ():
        parsed = _picture_field(word, text)
        if repeated := fields.keys() & parsed.keys():
            raise UsageError(f"input spec {text[:80]!r}: {word!r} repeats the {sorted(repeated)[0]}")
        fields.update(parsed)
    if words[0] != PCM16:
        _check_picture(fields, text)
    try:
        return msgspec.convert(fields, InputSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"input spec {text[:80]!r}: {error}") from error


def _check_picture(fields: dict[str, object], text: str) -> None:
    """UsageError where words are missing, or do not belong together."""
    if "width" not in fields:
        raise UsageError(f"input spec {text[:80]!r}: the frame's size is missing, as in 640x480")
    if (fields["media"] == RAW) != ("pixels" in fields):
        wanted = "its pixel format is missing" if fields["media"] == RAW else "pixel formats are for image/raw"
        raise UsageError(f"input spec {text[:80]!r}: {wanted}, as in '{RAW} 640x480 yuyv' ({', '.join(PIXEL_FORMATS)})")
    if fields["media"] == RAW:
        spec = msgspec.convert(fields, InputSpec)
        raw_bytes(spec.pixels, spec.width, spec.height)
    if "quality" in fields and fields["media"] not in (JPEG, WEBP):
        raise UsageError(f"input spec {text[:80]!r}: {fields['media']} has no quality")
    if "pad" in fields and not str(fields.get("fit", "")).startswith("letterbox"):
        raise UsageError(f"input spec {text[:80]!r}: pad= goes with letterbox")


def _sound_fields(words: list[str], text: str) -> dict[str, object]:
    """Parse the words after `audio/pcm16`: the rate, then optionally the samples per frame and the scale. Returns
    fields of `InputSpec`."""
    rate = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(k?)(?:hz)?", words[0].lower()) if words else None
    rate_hz = round(float(rate[1]) * (1000 if rate[2] else 1)) if rate else 0
    if not 1000 <= rate_hz <= 768_000:
        raise UsageError(f"input spec {text[:80]!r}: the rate is missing or out of range, as in 16k or 44100")
    fields: dict[str, object] = {"rate_hz": rate_hz}
    for word in words[1:]:
        if re.fullmatch(r"\d{1,9}", word) and 0 < PCM16_BYTES * int(word) <= LIMITS.frame_bytes:
            fields["samples"] = int(word)
        elif word.startswith("scale="):
            fields["scale"] = _parse_scale(word.removeprefix("scale="), text)
        else:
            raise UsageError(f"input spec {text[:80]!r}: cannot read {word!r}")
    return fields


def _picture_field(word: str, text: str) -> dict[str, object]:
    """Parse one word of a picture's specification. Returns fields of `InputSpec`."""
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
    elif word in ("uint8", "int8", "fp16"):
        return {"datatype": word.upper()}
    elif word in PIXEL_FORMATS:
        return {"pixels": word}
    elif word in ("letterbox", "letterbox-topleft"):
        return {"fit": word}
    elif word == "crop" or word.startswith("crop="):
        part = _parse_number(word.removeprefix("crop="), text) if "=" in word else USUAL_CROP
        if 0.0 < part <= 1.0:
            return {"fit": "crop", "crop": part}
    elif (padding := re.fullmatch(r"pad=(\d{1,3})", word)) and int(padding[1]) <= 255:
        return {"pad": int(padding[1])}
    elif pair := re.fullmatch(r"(scale|mean|std)=(.+)", word):
        if pair[1] == "scale":
            return {"scale": _parse_scale(pair[2], text)}
        numbers = tuple(_parse_number(part, text) for part in pair[2].split(","))
        if len(numbers) in (1, 3) and (pair[1] != "std" or 0.0 not in numbers):
            return {pair[1]: numbers}
    raise UsageError(f"input spec {text[:80]!r}: cannot read {word!r}")


def _parse_number(part: str, text: str) -> float:
    above, slash, below = part.partition("/")
    try:
        number = float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise UsageError(f"input spec {text[:80]!r}: {part!r} is not a number") from error
    if not math.isfinite(number):
        raise UsageError(f"input spec {text[:80]!r}: {part!r} is not a finite number")
    return number


def _parse_scale(part: str, text: str) -> float:
    if (number := _parse_number(part, text)) == 0.0:
        raise UsageError(f"input spec {text[:80]!r}: a scale of 0 would leave nothing of the input")
    return number


def prepare(spec: InputSpec, frame: bytes | memoryview) -> npt.NDArray[np.generic]:
    """Decode and preprocess one frame: the first tensor, of shape `spec.shape`. UsageError where the bytes are not a
    picture of the spec's format and of bounded size, or not the specified amount of sound."""
    if len(frame) > LIMITS.frame_bytes:
        raise UsageError(f"frame of {len(frame)} bytes, at most {LIMITS.frame_bytes}")
    if spec.is_sound:
        return _decode_sound(spec, frame)
    picture = decode_picture(spec, frame)
    fitted = fit_picture(picture, spec.fit, (spec.tensor_width, spec.tensor_height), spec.crop, spec.pad)
    return _normalise(spec, np.asarray(fitted))


def decode_picture(spec: InputSpec, frame: bytes | memoryview) -> Image.Image:
    """The picture in a frame, at its own size: RGB, or grey where the model takes grey."""
    mode = _MODES[spec.colour]
    if spec.media != RAW:
        return decode_encoded(spec.media, frame, mode)
    return Image.fromarray(decode_raw(spec.pixels, spec.width, spec.height, frame)).convert(mode)


def range_warning(spec: InputSpec) -> str:
    """A warning where the values that the spec makes of frames are unusual for a model, as with `scale=255`; else
    empty."""
    if not spec.is_float:
        return ""
    raw = (-1 / PCM16_SCALE, 1 / PCM16_SCALE) if spec.is_sound else (0.0, 255.0)
    ends = [
        (value * spec.scale - mean) / std
        for value in raw
        for mean, std in zip(spec.mean * spec.channels, spec.std * spec.channels, strict=False)
    ]
    if max(map(abs, ends)) <= USUAL_MAGNITUDE:
        return ""
    usual = "scale=1/32768" if spec.is_sound else "scale=1/255"
    return (
        f"with this --input the model gets values from {min(ends):.6g} to {max(ends):.6g}; most models are trained on"
        f" values near 0 to 1 or -1 to 1, as with {usual}"
    )


def _decode_sound(spec: InputSpec, frame: bytes | memoryview) -> npt.NDArray[np.generic]:
    """Samples times the scale, in float32 on every tier."""
    if len(frame) != PCM16_BYTES * spec.samples:
        needed = PCM16_BYTES * spec.samples
        raise UsageError(f"the frame has {len(frame)} bytes; {spec.samples} samples of 16 bits are {needed}")
    samples = np.frombuffer(frame, dtype="<i2").astype(np.float32)
    return (samples * np.float32(spec.scale)).reshape(spec.shape)


def _normalise(spec: InputSpec, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
    """Apply colour order, scale, mean, std and layout; `pixels` is (height, width) or (height, width, 3)."""
    planes = pixels.reshape(spec.tensor_height, spec.tensor_width, spec.channels)
    if spec.colour == "bgr":
        planes = planes[:, :, ::-1]
    if not spec.is_float:
        values: npt.NDArray[np.generic] = planes.transpose(2, 0, 1) if spec.layout == "nchw" else planes
        whole = np.ascontiguousarray(values[None])
        return whole if spec.datatype == "UINT8" else (whole ^ np.uint8(0x80)).view(np.int8)
    dtype = np.dtype(np.float32 if spec.datatype == "FP32" else np.float16)
    out = np.empty(spec.shape, dtype)
    for channel, table in enumerate(_lookup_tables(spec)):
        of_type = table.astype(dtype, copy=False)
        if spec.layout == "nchw":
            np.take(of_type, planes[:, :, channel], out=out[0, channel], mode="clip")
        else:
            out[0, :, :, channel] = of_type[planes[:, :, channel]]
    return out


@lru_cache(maxsize=64)
def _lookup_tables(spec: InputSpec) -> npt.NDArray[np.float32]:
    """Lookup tables (channel, 256) from pixel value to normalised value: a lookup takes a third of the time of the
    arithmetic."""
    steps = np.arange(256, dtype=np.float32)[:, None] * np.float32(spec.scale)
    values = (steps - np.asarray(spec.mean, np.float32)) / np.asarray(spec.std, np.float32)
    return np.ascontiguousarray(np.broadcast_to(values, (256, spec.channels)).T)


warm_up_structs(__name__)
