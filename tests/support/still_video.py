"""Made-up video with known truth: scenes that stand still for a while, under a sensor's noise."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from edgesplit.runtime import Tensor
from support import REPOSITORY

FRAMES = REPOSITORY / "examples" / "digits" / "frames"


@dataclass(frozen=True)
class VideoFrame:
    """One frame, and what is on it."""

    jpeg: bytes
    scene: int
    label: int


def video(scenes: int, frames_per_scene: int, seed: int, noise: float = 4.0) -> Iterator[VideoFrame]:
    """Each scene is one of the digits example's held-out frames; each frame of it has noise of its own (standard
    deviation in grey levels) and is encoded anew."""
    rng = np.random.default_rng(seed)
    labels: dict[str, int] = json.loads((FRAMES / "labels.json").read_text())
    names = sorted(labels)
    for scene, picked in enumerate(rng.choice(len(names), scenes, replace=False)):
        name = names[picked]
        pixels = np.asarray(Image.open(FRAMES / name).convert("RGB"), np.float32)
        for _ in range(frames_per_scene):
            yield VideoFrame(_jpeg(pixels + rng.normal(0, noise, pixels.shape)), scene, labels[name])


def one_hot(label: int, classes: int = 10) -> dict[str, Tensor]:
    """A classifier's answer."""
    return {"y": np.eye(classes, dtype=np.float32)[label][None]}


def _jpeg(pixels: Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
