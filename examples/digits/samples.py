"""As many labelled frames of held-out digits as a gate needs, by numpy and Pillow alone.

    python samples.py FOLDER                  600 frames and labels.json: three of each held-out digit
    python samples.py FOLDER --count 1000 --seed 8

The scenes are those of frames.py (the same colours, light, lens, noise and JPEG), drawn by another generator, so they
can be made where PyTorch is not installed. `held_out.npz` holds the 200 digits that no training frame shows, as
distil.py wrote them. Frames of one digit are not independent: a writer's odd 7 is odd on all of its frames.
"""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.float32]
FRAME_PX = 128
JPEG_QUALITY = 90
DEFAULT_COUNT, DEFAULT_SEED = 600, 7
DIGITS = Path(__file__).parent / "held_out.npz"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The digits: `ink` (n, 8, 8) in 0..1, `label` (n,)."""

    ink: Plane
    label: NDArray[np.int64]


def held_out(file: Path = DIGITS) -> HeldOut:
    """The digits that the models have never seen, in the order of `frames/`."""
    with np.load(file, allow_pickle=False) as stored:
        return HeldOut(stored["ink"].astype(np.float32) / 16, stored["label"].astype(np.int64))


def scene(ink: Plane, rng: np.random.Generator) -> Plane:
    """Light that reaches the sensor from one digit on a surface, (128, 128, 3); see frames.py for each range."""
    slow = rng.uniform(-0.12, 0.12, (4, 4, 3))
    changes = np.stack([_enlarged(slow[..., channel].astype(np.float32)) for channel in range(3)], axis=2)
    surface = np.clip(rng.uniform(0.25, 0.70) + rng.uniform(-0.10, 0.10) + changes, 0.03, 0.97)
    strokes = _strokes(ink, rng)[..., None]
    contrast = rng.uniform(0.18, 0.45) * (1 if rng.random() < 0.4 else -1)
    written = surface + strokes * (contrast + rng.uniform(-0.08, 0.08, 3))
    axis = np.linspace(-1.0, 1.0, FRAME_PX)
    y, x = axis[:, None], axis[None, :]
    light = 0.9 + rng.uniform(-0.2, 0.2) * x + rng.uniform(-0.2, 0.2) * y - rng.uniform(0, 0.15) * (x * x + y * y)
    return _blurred((written * light[..., None]).astype(np.float32), rng.uniform(0.3, 0.9))


def photograph(light: Plane, rng: np.random.Generator) -> bytes:
    """One JPEG of a scene, with a sensor's noise."""
    light = np.clip(light, 0, 1)
    variance = rng.uniform(0.036, 0.045) ** 2 + rng.uniform(0.0014, 0.0024) * light
    seen = light + np.sqrt(variance) * rng.standard_normal(light.shape)
    buffer = io.BytesIO()
    pixels = (np.clip(seen, 0, 1) * 255).round().astype(np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def samples(count: int, seed: int) -> list[tuple[bytes, int]]:
    """JPEGs with their labels: the held-out digits in turn."""
    digits, rng = held_out(), np.random.default_rng(seed)
    order = [number % len(digits.label) for number in range(count)]
    return [(photograph(scene(digits.ink[digit], rng), rng), int(digits.label[digit])) for digit in order]


def write(folder: Path, count: int = DEFAULT_COUNT, seed: int = DEFAULT_SEED) -> None:
    """`0000.jpg` and so on, and `labels.json`, which maps file names to digits."""
    folder.mkdir(parents=True, exist_ok=True)
    labels: dict[str, int] = {}
    for number, (jpeg, label) in enumerate(samples(count, seed)):
        labels[f"{number:04}.jpg"] = label
        (folder / f"{number:04}.jpg").write_bytes(jpeg)
    (folder / "labels.json").write_text(json.dumps(labels, indent=0) + "\n")


def _enlarged(coarse: Plane) -> Plane:
    return np.asarray(Image.fromarray(coarse).resize((FRAME_PX, FRAME_PX), Image.Resampling.BICUBIC))


def _strokes(ink: Plane, rng: np.random.Generator) -> Plane:
    """How much ink lies on each pixel, 0..1: the digit placed, scaled, leaning, smooth."""
    side = rng.uniform(40.0, 84.0)
    corner = rng.uniform(0, FRAME_PX - side, 2)
    angle = np.deg2rad(rng.uniform(-15.0, 15.0))
    # From a pixel to the digit's 8 cells and the one around them, into which its edge fades.
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]) * (8 / side)
    shift = np.array([5.0, 5.0]) - turn @ (corner + side / 2)
    matrix = (*turn[0], shift[0], *turn[1], shift[1])
    padded = Image.fromarray(np.pad(ink, 1))
    drawn = padded.transform((FRAME_PX, FRAME_PX), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    steepness, threshold = rng.uniform(7.0, 12.0), rng.uniform(0.36, 0.50)
    return (1 / (1 + np.exp(-steepness * (np.asarray(drawn) - threshold)))).astype(np.float32)


def _blurred(frame: Plane, sigma_px: float) -> Plane:
    kernel = np.exp(-0.5 * (np.arange(-2, 3) / sigma_px) ** 2)
    kernel /= kernel.sum()
    for axis in (0, 1):
        padding = [(2, 2) if each == axis else (0, 0) for each in range(3)]
        edged = np.pad(frame, padding, mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(edged, 5, axis=axis)
        frame = (windows @ kernel).astype(np.float32)
    return frame


def main() -> None:
    """Write the frames."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=DEFAULT_COUNT)
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    chosen = parser.parse_args()
    write(chosen.folder, chosen.count, chosen.seed)
    print(f"{chosen.count} frames in {chosen.folder}")


if __name__ == "__main__":
    main()
