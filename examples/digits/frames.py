"""Camera-like frames around real handwriting: the digits, how they are divided, and how a frame is made.

A frame shows one digit somewhere on a softly lit coloured surface, a little blurred, with a sensor's noise.
Everything random comes from the generator that is passed in, so a seed names a set of frames exactly.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Generator, Tensor
from torch.nn import functional

JPEG_QUALITY = 90
DIGIT_PX = (40.0, 84.0)
"""Side of the square a digit is written in, which lies inside the frame before it leans."""
LEAN_DEGREES = 15.0
CHALK_PART = 0.4
"""How many digits are lighter than the surface; the others are darker."""
BLUR_SIGMA_PX = (0.3, 0.9)
READ_NOISE = (0.036, 0.045)
"""Standard deviation of the sensor's noise in the dark, as a part of full scale."""
SHOT_NOISE = (0.0014, 0.0024)
"""Variance that light adds, per unit of brightness."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits: `ink` is (n, 8, 8) in 0..1, `label` is (n,)."""

    ink: Tensor
    label: Tensor

    def pick(self, index: Tensor) -> Digits:
        """The digits at these positions."""
        return Digits(self.ink[index], self.label[index])

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, slots=True)
class Division:
    """No digit is in two of these. `validation` is for whoever tunes; `held_out` is only ever reported."""

    train: Digits
    validation: Digits
    held_out: Digits


def divide(seed: int, validation: int, held_out: int) -> Division:
    """scikit-learn's 1,797 digits, shuffled by `seed` and divided; the rest is for training."""
    source = load_digits()
    ink = torch.from_numpy(source.images.astype(np.float32) / 16.0)
    everything = Digits(ink, torch.from_numpy(source.target.astype(np.int64)))
    order = torch.randperm(len(everything), generator=Generator().manual_seed(seed))
    kept_back = validation + held_out
    return Division(
        train=everything.pick(order[kept_back:]),
        validation=everything.pick(order[held_out:kept_back]),
        held_out=everything.pick(order[:held_out]),
    )


def photograph(ink: Tensor, frame_px: int, rng: Generator) -> list[bytes]:
    """One JPEG per digit: written on a surface, lit, seen through a lens and a sensor."""
    n = len(ink)
    surface = _surface(n, frame_px, rng)
    scene = _write(surface, _strokes(ink, frame_px, rng), rng) * _lighting(n, frame_px, rng)
    return encode(_sense(_blur(scene, rng), rng))


def encode(frames: Tensor) -> list[bytes]:
    """Frames (n, 3, h, w) in 0..1 as JPEG."""
    pixels = (frames.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return [_encode_one(frame) for frame in pixels]


def decode(jpegs: Sequence[bytes]) -> Tensor:
    """What the network reads: (n, 3, h, w), RGB, 0..1."""
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB")) for jpeg in jpegs])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(torch.float32) / 255.0


def _encode_one(frame: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def _between(low: float, high: float, shape: tuple[int, ...], rng: Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=rng)


def _surface(n: int, frame_px: int, rng: Generator) -> Tensor:
    """Smooth colour: a brightness, a tint, and slow changes of both."""
    brightness = _between(0.25, 0.70, (n, 1, 1, 1), rng)
    tint = _between(-0.10, 0.10, (n, 3, 1, 1), rng)
    slow = _between(-0.12, 0.12, (n, 3, 4, 4), rng)
    changes = functional.interpolate(slow, size=(frame_px, frame_px), mode="bicubic", align_corners=True)
    return (brightness + tint + changes).clamp(0.03, 0.97)


def _strokes(ink: Tensor, frame_px: int, rng: Generator) -> Tensor:
    """How much ink lies on each pixel, (n, 1, h, w) in 0..1: the digit placed, scaled, leaning, smooth."""
    n = len(ink)
    longest = min(DIGIT_PX[1], 0.9 * frame_px)
    side = _between(DIGIT_PX[0], longest, (n,), rng) / frame_px
    reach = (1.0 - side)[:, None]
    centre = _between(-1.0, 1.0, (n, 2), rng) * reach
    angle = _between(-LEAN_DEGREES, LEAN_DEGREES, (n,), rng) * (math.pi / 180.0)
    # From frame to digit coordinates, both -1..1; the digit is padded by one cell so that its edge can fade.
    scale = (8.0 / 10.0) / side
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], dim=1).view(n, 2, 2)
    matrix = turn * scale[:, None, None]
    shift = -(matrix @ centre[:, :, None])
    grid = functional.affine_grid(torch.cat([matrix, shift], 2), [n, 1, frame_px, frame_px], align_corners=False)
    padded = functional.pad(ink[:, None], (1, 1, 1, 1))
    drawn = functional.grid_sample(padded, grid, mode="bicubic", align_corners=False)
    steepness = _between(7.0, 12.0, (n, 1, 1, 1), rng)
    threshold = _between(0.36, 0.50, (n, 1, 1, 1), rng)
    return torch.sigmoid(steepness * (drawn - threshold))


def _write(surface: Tensor, strokes: Tensor, rng: Generator) -> Tensor:
    """Ink darker than the surface, or chalk lighter than it, of some colour."""
    n = len(surface)
    contrast = _between(0.18, 0.45, (n, 1, 1, 1), rng)
    light = torch.rand((n, 1, 1, 1), generator=rng) < CHALK_PART
    colour = _between(-0.08, 0.08, (n, 3, 1, 1), rng)
    return surface + strokes * (torch.where(light, contrast, -contrast) + colour)


def _lighting(n: int, frame_px: int, rng: Generator) -> Tensor:
    """A lamp to one side and a lens darker at its corners: a factor for each pixel, (n, 1, h, w)."""
    axis = torch.linspace(-1.0, 1.0, frame_px)
    y, x = axis.view(1, 1, -1, 1), axis.view(1, 1, 1, -1)
    slope = _between(-0.20, 0.20, (2, n, 1, 1, 1), rng)
    corners = _between(0.0, 0.15, (n, 1, 1, 1), rng)
    return 0.9 + slope[0] * x + slope[1] * y - corners * (x * x + y * y)


def _blur(frames: Tensor, rng: Generator) -> Tensor:
    """A Gaussian blur, another for each frame."""
    n, channels, height, width = frames.shape
    sigma = _between(*BLUR_SIGMA_PX, (n, 1), rng)
    offsets = torch.arange(-2.0, 3.0)
    weights = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = (weights / weights.sum(1, keepdim=True)).repeat_interleave(channels, 0)
    planes = functional.pad(frames, (2, 2, 2, 2), mode="replicate").view(1, n * channels, height + 4, width + 4)
    planes = functional.conv2d(planes, kernel[:, None, :, None], groups=n * channels)
    planes = functional.conv2d(planes, kernel[:, None, None, :], groups=n * channels)
    return planes.view(n, channels, height, width)


def _sense(light: Tensor, rng: Generator) -> Tensor:
    """A sensor's noise: some in the dark, more in the light."""
    n = len(light)
    light = light.clamp(0, 1)
    variance = _between(*READ_NOISE, (n, 1, 1, 1), rng) ** 2 + _between(*SHOT_NOISE, (n, 1, 1, 1), rng) * light
    return light + variance.sqrt() * torch.randn(light.shape, generator=rng)
