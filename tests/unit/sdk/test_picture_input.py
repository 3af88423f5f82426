"""Input specs of pictures beyond a stretched JPEG: formats, raw frames, letterbox, crop, data types."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest
from PIL import Image

from edgesplit.errors import UsageError
from edgesplit.input_spec import InputSpec, parse_input_spec, prepare
from edgesplit.picture_fit import Fit, place
from edgesplit.picture_formats import PIXEL_FORMATS, Pixels, decode_raw, encode_raw, raw_bytes
from edgesplit_partitioner.ir.pictures import picture_bytes
from edgesplit_partitioner.profiling.layers import synthetic_frame
from support.reference_models import reference_file

BLOCKS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8).repeat(4, 0).repeat(6, 1)
"""Four blocks of one colour each, 12x8 pixels."""


def fed(text: str, width: int, height: int) -> InputSpec:
    """The spec for a tensor of this size."""
    return msgspec.structs.replace(parse_input_spec(text), tensor="x", tensor_width=width, tensor_height=height)


def encoded(pixels: np.ndarray, format_: str, **options: object) -> bytes:
    """The pixels in a file of that format."""
    Image.fromarray(pixels).save(content := io.BytesIO(), format_, **options)
    return content.getvalue()


@pytest.mark.parametrize("pixels", PIXEL_FORMATS)
def test_raw_frames_have_the_pixels_that_were_encoded(pixels: Pixels) -> None:
    """In every pixel format, of blocks as large as its coarsest samples; YUV to 2 of 255, its rounding."""
    frame = encode_raw(pixels, BLOCKS)
    got = decode_raw(pixels, 12, 8, frame).astype(int)
    wanted = np.asarray(Image.fromarray(BLOCKS).convert("L")) if pixels == "gray8" else BLOCKS
    assert len(frame) == raw_bytes(pixels, 12, 8)
    assert np.abs(got - wanted.astype(int)).max() <= (0 if pixels.endswith("24") else 2)


def test_yuv_is_that_of_bt601_in_limited_range() -> None:
    """Black is 16, white 235, and full red (81, 90, 240), by the table of ITU-R BT.601."""
    frame = bytes([16, 128, 235, 128, 81, 90, 81, 240])
    assert decode_raw("yuyv", 4, 1, frame).tolist()[0] == [[0, 0, 0], [255, 255, 255], [255, 0, 0], [255, 0, 0]]


@pytest.mark.parametrize(("pixels", "width", "height"), [("yuyv", 3, 2), ("nv12", 4, 3), ("i420", 3, 4)])
def test_raw_frames_of_odd_size_are_refused_before_a_push(pixels: str, width: int, height: int) -> None:
    """Their coarser samples would not be whole."""
    with pytest.raises(UsageError, match="even width and height"):
        parse_input_spec(f"image/raw {width}x{height} {pixels}")


def test_a_raw_frame_of_another_length_is_refused() -> None:
    """The error tells both lengths."""
    with pytest.raises(UsageError, match=r"7 bytes; 2x2 pixels of rgb24 are 12"):
        prepare(fed("image/raw 2x2 rgb24", 2, 2), b"1234567")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("image/raw 4x4", "pixel format is missing"), ("image/jpeg 4x4 nv12", "for image/raw"),
        ("image/png 4x4 q85", "image/png has no quality"), ("image/jpeg 4x4 pad=0", "goes with letterbox"),
        ("image/jpeg 4x4 crop letterbox", "repeats the fit"), ("image/jpeg 4x4 crop=1.5", "cannot read 'crop=1.5'"),
        ("image/jpeg 4x4 letterbox pad=256", "cannot read 'pad=256'"),
    ],
)  # fmt: skip
def test_words_that_do_not_belong_together_are_refused(text: str, why: str) -> None:
    """Before a push, with the word."""
    with pytest.raises(UsageError, match=why):
        parse_input_spec(text)


def test_a_png_is_the_same_tensor_as_its_raw_pixels() -> None:
    """Both are lossless, whatever else the PNG has: alpha is left out, palettes are resolved."""
    raw = prepare(fed("image/raw 12x8 rgb24 scale=1/255", 6, 4), BLOCKS.tobytes())
    spec = fed("image/png 12x8 scale=1/255", 6, 4)
    with_alpha = np.dstack([BLOCKS, np.full(BLOCKS.shape[:2], 7, np.uint8)])
    palette = io.BytesIO()
    Image.fromarray(BLOCKS).convert("P", palette=Image.Palette.ADAPTIVE).save(palette, "PNG")
    for frame in (encoded(BLOCKS, "PNG"), encoded(with_alpha, "PNG"), palette.getvalue()):
        np.testing.assert_array_equal(prepare(spec, frame), raw)


def test_a_png_of_16_bits_is_refused_rather_than_cut_off() -> None:
    """Pillow would clip its values at 255."""
    with pytest.raises(UsageError, match="more than 8 bits"):
        prepare(fed("image/png 4x4", 4, 4), encoded(np.full((4, 4), 60_000, np.uint16), "PNG"))


def test_webp_is_decoded_and_a_jpeg_in_its_place_is_named() -> None:
    """Lossless WebP has the pixels; another format names both."""
    spec = fed("image/webp 12x8 uint8 nhwc", 12, 8)
    np.testing.assert_array_equal(prepare(spec, encoded(BLOCKS, "WEBP", lossless=True))[0], BLOCKS)
    with pytest.raises(UsageError, match="a JPEG file, and the model was pushed for WebP"):
        prepare(spec, encoded(BLOCKS, "JPEG"))


def test_int8_is_the_pixel_less_128_and_fp16_the_rounded_value() -> None:
    """As quantised and half-precision models take it."""
    frame = BLOCKS.tobytes()
    pixels = prepare(fed("image/raw 12x8 rgb24 uint8", 12, 8), frame)
    less = prepare(fed("image/raw 12x8 rgb24 int8", 12, 8), frame)
    half = prepare(fed("image/raw 12x8 rgb24 fp16 scale=1/255 mean=0.5", 12, 8), frame)
    assert (less.dtype, half.dtype) == (np.int8, np.float16)
    np.testing.assert_array_equal(less.astype(int), pixels.astype(int) - 128)
    np.testing.assert_array_equal(half, (pixels.astype(np.float32) / 255 - 0.5).astype(np.float16))


@pytest.mark.parametrize("fit", ["stretch", "letterbox", "letterbox-topleft", "crop"])
@pytest.mark.parametrize("size", [(640, 480), (333, 517), (20, 20)])
def test_a_place_in_the_tensor_is_the_place_in_the_picture(fit: Fit, size: tuple[int, int]) -> None:
    """A bright square is found again where it was, to two pixels of the larger grid."""
    width, height = size
    left, top, right, bottom = width // 2 - 4, height // 2 - 3, width // 2 + 4, height // 2 + 5
    picture = np.zeros((height, width, 3), np.uint8)
    picture[top:bottom, left:right] = 255
    spec = fed(f"image/raw {width}x{height} rgb24 uint8 nhwc {'' if fit == 'stretch' else fit}", 200, 160)
    tensor = prepare(spec, picture.tobytes())
    rows, columns = np.nonzero(tensor[0, :, :, 0] > 130)
    found = np.array([[columns.min() / 200, rows.min() / 160, (columns.max() + 1) / 200, (rows.max() + 1) / 160]])
    placement = place(fit, size, (200, 160), 0.875 if fit == "crop" else 1.0)
    got = placement.to_picture(found, (200, 160))[0]
    assert np.abs(got - [left, top, right, bottom]).max() <= 2 * max(1.0, 1 / placement.x_scale)


def test_beside_a_letterboxed_picture_is_the_padding() -> None:
    """Above and below in the middle; at the bottom alone where it is at the top left; 114 by default."""
    white = np.full((10, 20, 3), 255, np.uint8).tobytes()
    middle = prepare(fed("image/raw 20x10 rgb24 uint8 nhwc letterbox pad=7", 20, 20), white)[0, :, 0, 0]
    top_left = prepare(fed("image/raw 20x10 rgb24 uint8 nhwc letterbox-topleft", 20, 20), white)[0, :, 0, 0]
    assert middle.tolist() == [7] * 5 + [255] * 10 + [7] * 5
    assert top_left.tolist() == [255] * 10 + [114] * 10


@pytest.mark.parametrize("text", ["image/png 64x48", "image/webp 64x48 q70 gray", "image/raw 64x48 nv12"])
def test_a_made_up_frame_is_of_the_specs_format(text: str) -> None:
    """The planner times the decoder on it, and its size is of the order that is priced."""
    spec = fed(text, 32, 24)
    frame = synthetic_frame(spec)
    assert prepare(spec, frame).shape == spec.shape
    assert picture_bytes(spec) / 4 < len(frame) < picture_bytes(spec) * 4


def test_a_spec_of_before_is_written_without_the_new_fields() -> None:
    """Agents that refuse unknown fields still read the manifests of stretched JPEGs."""
    written = msgspec.to_builtins(fed("image/jpeg 640x480 q85 bgr nhwc scale=1/255", 32, 24))
    assert not {"fit", "crop", "pad", "pixels"} & written.keys()
    assert msgspec.convert(written, InputSpec) == fed("image/jpeg 640x480 q85 bgr nhwc scale=1/255", 32, 24)


@pytest.mark.parametrize(
    ("reference", "picture", "text", "tensor"),
    [
        ("yolox_nano.onnx__000000000724", "coco/000000000724.jpg", "bgr letterbox-topleft", (416, 416)),
        ("yolox_nano.onnx__kite_and_cold", "photos/kite_and_cold.jpg", "bgr letterbox-topleft", (416, 416)),
        ("ultraface_rfb_320.onnx__face", "photos/face.jpg", "mean=127 std=128", (320, 240)),
        ("squeezenet_fp32.onnx__parrot", "photos/parrot.jpg", "bgr mean=104,117,123", (224, 224)),
        ("squeezenet_fp32.onnx__burger", "photos/burger.jpg", "bgr mean=104,117,123", (224, 224)),
        ("mobilenet_v1_0.25_224_float.tflite__n01440764", "imagenet/n01440764_tench.JPEG",
         "crop nhwc scale=1/127.5 mean=1", (224, 224)),
        ("squeezenet_fp16.onnx__n01440764", "imagenet/n01440764_tench.JPEG", "bgr crop fp16 mean=104,117,123",
         (224, 224)),
        ("mobilenet_v1_0.75_192_quant.tflite__parrot", "photos/parrot.jpg", "uint8 nhwc", (192, 192)),
        ("mobilenet_v1_0.25_224_float.tflite__parrot", "photos/parrot.jpg", "nhwc scale=1/127.5 mean=1",
         (224, 224)),
    ],
)  # fmt: skip
def test_the_tensor_is_that_of_the_trained_models_reference(
    reference: str, picture: str, text: str, tensor: tuple[int, int]
) -> None:
    """Letterbox, crop and normalisation give what the models' own preprocessing gave, to the rounding of float32."""
    with np.load(reference_file("ref", f"{reference}.npz")) as arrays:
        wanted = next(arrays[name] for name in arrays.files if name.startswith("in:"))
    frame = reference_file("inputs", picture).read_bytes()
    got = prepare(fed(f"image/jpeg 640x480 {text}", *tensor), frame)
    np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=0, atol=1e-5)
