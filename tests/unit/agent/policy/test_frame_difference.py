"""How much two frames differ: pictures, tensors, and what cannot be compared."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from edgesplit.input_spec import FRAME, InputSpec, parse_input_spec
from edgesplit.runtime import Tensor
from edgesplit_agent.policy.frame_difference import DIFFERENT, Thumbnail, difference, thumbnail
from support.still_video import video

SPEC = parse_input_spec("image/jpeg 128x128 rgb")


def of_jpeg(jpeg: bytes, spec: InputSpec = SPEC) -> Thumbnail:
    found = thumbnail({FRAME: np.frombuffer(jpeg, np.uint8)}, spec)
    assert found is not None
    return found


def of_tensor(values: Tensor, **others: Tensor) -> Thumbnail:
    found = thumbnail({"x": values, **others}, None)
    assert found is not None
    return found


def encoded(pixels: Tensor, **how: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **how)
    return buffer.getvalue()


def test_noise_differs_less_than_another_scene() -> None:
    """Seed 1: the greatest difference within a scene is a third of the least between two."""
    frames = list(video(scenes=8, frames_per_scene=4, seed=1))
    shown = [(frame.scene, of_jpeg(frame.jpeg)) for frame in frames]
    pairs = [(a == b, difference(one, other)) for a, one in shown for b, other in shown]
    within = max(distance for is_same, distance in pairs if is_same)
    between = min(distance for is_same, distance in pairs if not is_same)
    assert 0 < within < between / 3


def test_a_small_thing_that_moves_is_seen() -> None:
    """One in sixty-four parts of a large picture changes: the mean over the picture would be a sixty-fourth."""
    pixels = np.full((480, 640), 90, np.uint8)
    moved = pixels.copy()
    moved[60:120, 80:160] = 190
    distance = difference(of_jpeg(encoded(pixels)), of_jpeg(encoded(moved)))
    assert distance == pytest.approx(100 / 255, rel=0.1)


def test_the_same_bytes_differ_by_nothing() -> None:
    """Whatever the picture; and a picture of another size cannot be compared."""
    (frame,) = video(scenes=1, frames_per_scene=1, seed=2)
    assert difference(of_jpeg(frame.jpeg), of_jpeg(frame.jpeg)) == 0
    small = encoded(np.zeros((20, 16), np.uint8))
    assert difference(of_jpeg(frame.jpeg), of_jpeg(small)) == DIFFERENT


@pytest.mark.parametrize("shape", [(1, 3, 48, 64), (1, 48, 64, 3), (48, 64), (1, 1, 48, 64)])
def test_tensors_of_pictures(shape: tuple[int, ...]) -> None:
    """Either layout; whole numbers are parts of full scale, others of the first frame's range."""
    ramp = np.broadcast_to(np.linspace(0, 200, 64, dtype=np.float32), (48, 64))
    plane = np.broadcast_to(ramp[..., None] if shape[-1] == 3 else ramp, shape).copy()
    brighter = plane + np.float32(20)
    span = float(ramp[:, 63].mean() - ramp[:, 0].mean())
    assert difference(of_tensor(plane), of_tensor(brighter)) == pytest.approx(20 / span, rel=0.05)
    whole, brighter_whole = plane.astype(np.uint8), brighter.astype(np.uint8)
    assert difference(of_tensor(whole), of_tensor(brighter_whole)) == pytest.approx(20 / 255, rel=0.05)


def test_other_inputs_have_to_be_the_same() -> None:
    """A question beside the picture is no matter of degree."""
    picture = np.zeros((1, 3, 32, 32), np.float32)
    one, other = np.array([1, 2]), np.array([1, 3])
    assert difference(of_tensor(picture, q=one), of_tensor(picture, q=one)) == 0
    assert difference(of_tensor(picture, q=one), of_tensor(picture, q=other)) == DIFFERENT


def test_what_cannot_be_compared_has_no_thumbnail() -> None:
    """Sound, text, numbers that are none, and pictures that cannot be decoded: the model answers, or says why not."""
    sound = parse_input_spec("audio/pcm16 16k 160")
    assert thumbnail({FRAME: np.zeros(320, np.uint8)}, sound) is None
    assert thumbnail({FRAME: np.frombuffer(b"\xff\xd8nothing", np.uint8)}, SPEC) is None
    assert thumbnail({"other": np.zeros(3)}, SPEC) is None
    assert thumbnail({"x": np.array([b"text"], object)}, None) is None
    assert thumbnail({"x": np.array([np.nan, 1.0])}, None) is None
    assert thumbnail({"x": np.zeros((0, 3))}, None) is None and thumbnail({}, None) is None
    (frame,) = video(scenes=1, frames_per_scene=1, seed=3)
    for length in range(0, len(frame.jpeg), 500):
        assert thumbnail({FRAME: np.frombuffer(frame.jpeg[:length], np.uint8)}, SPEC) is None
