"""Formats in which pictures arrive: encoded (JPEG, PNG, WebP), and raw frames of a camera, whose bytes are its pixels.

Raw frames have no header: their size and pixel format are known beforehand, and their length follows. YUV is that of
ITU-R BT.601 in limited range, as V4L2 cameras send it; colours between its coarser samples are those of the nearest.
It is converted in whole numbers, so that every tier computes the same pixels.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final, Literal, get_args

from edgesplit.errors import UsageError
from edgesplit.lazy_import import lazy_import, np, npt
from edgesplit.limits import LIMITS

if TYPE_CHECKING:
    from PIL import Image
else:
    Image = lazy_import("PIL.Image")

JPEG: Final = "image/jpeg"
PNG: Final = "image/png"
WEBP: Final = "image/webp"
RAW: Final = "image/raw"
PictureMedia = Literal["image/jpeg", "image/png", "image/webp", "image/raw"]
Pixels = Literal["rgb24", "bgr24", "gray8", "yuyv", "nv12", "i420"]
"""Layouts of a raw frame: 3 bytes or 1 byte per pixel; Y U Y V for each two pixels of a row; a plane of Y, then one of
U V pairs (nv12) or two of U and V (i420), for each 2x2 pixels."""
PIXEL_FORMATS: tuple[Pixels, ...] = get_args(Pixels)
ENCODED: Final = {JPEG: "JPEG", PNG: "PNG", WEBP: "WEBP"}
"""Pillow's name of each encoded format."""
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Pillow modes with more than 8 bits per colour, which it would cut off."""
_MAGICS = (
    (b"\xff\xd8\xff", "JPEG"), (b"\x89PNG", "PNG"), (b"GIF8", "GIF"), (b"RIFF", "WebP or WAV"), (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
)  # fmt: skip
"""First bytes of files, and what to call them."""
_HALVES: Final = ("nv12", "i420")


def raw_bytes(pixels: Pixels, width: int, height: int) -> int:
    """Bytes of a raw frame. UsageError where its pixel format needs an even width or height."""
    if (width % 2 and pixels in ("yuyv", *_HALVES)) or (height % 2 and pixels in _HALVES):
        raise UsageError(f"a raw frame in {pixels} has an even width and height, and {width}x{height} is not")
    per_two = {"rgb24": 6, "bgr24": 6, "gray8": 2, "yuyv": 4, "nv12": 3, "i420": 3}[pixels]
    return width * height * per_two // 2


def decode_encoded(media: str, frame: bytes | memoryview, mode: str) -> Image.Image:
    """The picture in an encoded frame, in Pillow's `mode` ("RGB" or "L"). UsageError where the bytes are not a whole
    picture of that format and of bounded size."""
    if media == WEBP:
        import PIL.WebPImagePlugin  # noqa: F401  Pillow loads this reader by itself only where all others failed
    try:
        with Image.open(io.BytesIO(frame), formats=(ENCODED[media],)) as picture:
            if picture.width * picture.height > LIMITS.frame_pixels:
                raise UsageError(f"frame of {picture.width}x{picture.height} pixels is too large")
            if picture.mode in DEEP_MODES:
                raise UsageError("the frame has more than 8 bits per colour: convert it to 8")
            return picture.convert(mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(_not_of(media, bytes(frame[:4]))) from error


def _not_of(media: str, head: bytes) -> str:
    """Why a frame that begins with these bytes is refused."""
    wanted = ENCODED[media].replace("WEBP", "WebP")
    for magic, name in _MAGICS:
        if head.startswith(magic) and wanted not in name:
            return (
                f"the frame is a {name} file, and the model was pushed for {wanted} frames: convert it, or push the"
                " model again with the --input of what arrives"
            )
    return f"the frame is not a whole {wanted}"


def decode_raw(pixels: Pixels, width: int, height: int, frame: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """The pixels [height, width, 3] in the order RGB, or [height, width] of gray8. UsageError where the frame has not
    the length that its format has."""
    needed = raw_bytes(pixels, width, height)
    if len(frame) != needed:
        raise UsageError(f"the frame has {len(frame)} bytes; {width}x{height} pixels of {pixels} are {needed}")
    flat = np.frombuffer(frame, np.uint8)
    if pixels == "gray8":
        return flat.reshape(height, width)
    if pixels in ("rgb24", "bgr24"):
        planes = flat.reshape(height, width, 3)
        return planes if pixels == "rgb24" else planes[:, :, ::-1]
    if pixels == "yuyv":
        pairs = flat.reshape(height, width // 2, 4)
        luma = pairs[:, :, ::2].reshape(height, width)
        return _to_rgb(luma, *(pairs[:, :, at].repeat(2, axis=1) for at in (1, 3)))
    area = width * height
    luma, chroma = flat[:area].reshape(height, width), flat[area:]
    halves = chroma.reshape(-1, 2).T if pixels == "nv12" else chroma.reshape(2, -1)
    quarter = halves.reshape(2, height // 2, width // 2)
    return _to_rgb(luma, *(plane.repeat(2, axis=0).repeat(2, axis=1) for plane in quarter))


def luma_of_raw(pixels: Pixels, width: int, height: int, frame: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """Brightness [height, width] of a raw frame: the Y of YUV as it is, the mean of colours else."""
    if pixels in _HALVES and len(frame) == raw_bytes(pixels, width, height):
        return np.frombuffer(frame, np.uint8)[: width * height].reshape(height, width)
    values = decode_raw(pixels, width, height, frame)
    return values if values.ndim == 2 else values.mean(axis=2).astype(np.uint8)


def _to_rgb(
    luma: npt.NDArray[np.uint8], blue: npt.NDArray[np.uint8], red: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """RGB of Y, U and V, each [height, width] (ITU-R BT.601, limited range, in 8 bits of fraction)."""
    scaled = 298 * (luma.astype(np.int32) - 16) + 128
    u, v = blue.astype(np.int32) - 128, red.astype(np.int32) - 128
    planes = (scaled + 409 * v, scaled - 100 * u - 208 * v, scaled + 516 * u)
    return np.stack([np.clip(plane >> 8, 0, 255).astype(np.uint8) for plane in planes], axis=2)


def encode_picture(media: str, picture: Image.Image, quality: int) -> bytes:
    """The picture as a JPEG, PNG or WebP; `quality` is for JPEG and WebP. UsageError for raw frames."""
    if media not in ENCODED:
        raise UsageError(f"{media} has no encoder: give the bytes of the frame")
    file = io.BytesIO()
    mode = "L" if picture.mode in ("1", "L") else "RGB"
    options = {} if media == PNG else {"quality": quality}
    picture.convert(mode).save(file, ENCODED[media], **options)
    return file.getvalue()


def encode_raw(pixels: Pixels, rgb: npt.NDArray[np.uint8]) -> bytes:
    """A raw frame of the pixels [height, width, 3] in the order RGB; of 2x2 or 2x1 pixels with one colour, the first
    one's."""
    height, width = rgb.shape[:2]
    raw_bytes(pixels, width, height)
    if pixels in ("rgb24", "bgr24"):
        return np.ascontiguousarray(rgb if pixels == "rgb24" else rgb[:, :, ::-1]).tobytes()
    red, green, blue = (rgb[:, :, plane].astype(np.int32) for plane in range(3))
    if pixels == "gray8":
        return ((299 * red + 587 * green + 114 * blue + 500) // 1000).astype(np.uint8).tobytes()
    luma = (((66 * red + 129 * green + 25 * blue + 128) >> 8) + 16).astype(np.uint8)
    u = (((-38 * red - 74 * green + 112 * blue + 128) >> 8) + 128).astype(np.uint8)
    v = (((112 * red - 94 * green - 18 * blue + 128) >> 8) + 128).astype(np.uint8)
    if pixels == "yuyv":
        return np.stack([luma[:, ::2], u[:, ::2], luma[:, 1::2], v[:, ::2]], axis=2).tobytes()
    quarters = (u[::2, ::2], v[::2, ::2])
    chroma = np.stack(quarters, axis=2).tobytes() if pixels == "nv12" else b"".join(map(np.ndarray.tobytes, quarters))
    return luma.tobytes() + chroma
