"""How much two frames of a stream differ, cheaply: from thumbnails in grey, compared tile by tile.

A JPEG is decoded at an eighth of its size where that is enough, which needs the DC coefficients of its luma only.
The difference of two frames is the mean absolute difference of the tile that differs most: a small thing that moves is
not averaged away by a background that stands still, and a sensor's noise is averaged within each tile. It is a part of
full scale for pictures and whole numbers, and of the first frame's own range for other tensors.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgesplit.errors import UsageError
from edgesplit.input_spec import FRAME, InputSpec
from edgesplit.lazy_import import Tensor, lazy_import, np
from edgesplit.limits import LIMITS
from edgesplit.picture_formats import JPEG, RAW, decode_encoded, luma_of_raw

if TYPE_CHECKING:
    from PIL import Image
else:
    Image = lazy_import("PIL.Image")

SIDE = 32
"""Rows and columns of a thumbnail, at most."""
TILES = 8
"""Rows and columns of tiles, at most."""
MOST_CHANNELS = 4
"""A first or last dimension up to this length is taken for colour."""
DIFFERENT = math.inf
"""Difference of frames that cannot be compared."""


@dataclass(frozen=True, slots=True, eq=False)
class Thumbnail:
    """What is kept of a frame to compare others with."""

    levels: Tensor
    """Grey levels, float32 [rows, columns], at most `SIDE` each."""
    span: float
    """What one unit of difference is: 1 for levels that are parts of full scale, else the range of this frame's."""
    rest: bytes
    """Digest of the request's other inputs, which have to be the same."""


def thumbnail(inputs: Mapping[str, Tensor], spec: InputSpec | None) -> Thumbnail | None:
    """The thumbnail of a request's inputs: of the encoded picture, or of the largest tensor. None where there is
    nothing to compare: sound, text, or a picture that cannot be decoded, which the model's own decoder reports."""
    name = FRAME if spec is not None else max(inputs, key=lambda each: inputs[each].nbytes, default="")
    if name not in inputs or (spec is not None and spec.is_sound):
        return None
    rest = _digest({other: values for other, values in inputs.items() if other != name})
    values = np.asarray(inputs[name])
    if spec is not None:
        grey = _decoded(values.tobytes(), spec)
        return Thumbnail(_averaged(grey, SIDE), 1.0, rest) if grey is not None else None
    if values.dtype.kind not in "biuf" or not values.size:
        return None
    plane = _plane(values)
    if values.dtype.kind == "f":
        if not np.isfinite(plane).all():
            return None
        levels = _averaged(plane, SIDE)
        return Thumbnail(levels, max(float(levels.max() - levels.min()), 1e-12), rest)
    full = 1.0 if values.dtype.kind == "b" else float(np.iinfo(values.dtype).max)
    return Thumbnail(_averaged(plane / np.float32(full), SIDE), 1.0, rest)


def difference(reference: Thumbnail, frame: Thumbnail) -> float:
    """Difference of a frame to the one that was answered; `DIFFERENT` where they have other sizes or other inputs."""
    if reference.levels.shape != frame.levels.shape or reference.rest != frame.rest:
        return DIFFERENT
    tiles = _averaged(np.abs(frame.levels - reference.levels), TILES)
    return float(tiles.max()) / reference.span


def _decoded(frame: bytes, spec: InputSpec) -> Tensor | None:
    """Luma of a picture as parts of full scale, no larger than needed."""
    if len(frame) > LIMITS.frame_bytes:
        return None
    try:
        if spec.media == RAW:
            luma = luma_of_raw(spec.pixels, spec.width, spec.height, frame)
            return luma.astype(np.float32) / np.float32(255)
        if spec.media != JPEG:
            return np.asarray(decode_encoded(spec.media, frame, "L"), np.float32) / np.float32(255)
        with Image.open(io.BytesIO(frame), formats=("JPEG",)) as picture:
            if picture.width * picture.height > LIMITS.frame_pixels:
                return None
            picture.draft("L", (SIDE, SIDE))
            return np.asarray(picture.convert("L"), np.float32) / np.float32(255)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, UsageError):
        return None


def _plane(values: Tensor) -> Tensor:
    """A tensor as one plane, float32: without dimensions of length 1, with its channels averaged."""
    squeezed = values.astype(np.float32).squeeze()
    if squeezed.ndim == 3 and min(squeezed.shape[0], squeezed.shape[2]) <= MOST_CHANNELS:
        return np.asarray(squeezed.mean(axis=0 if squeezed.shape[0] <= MOST_CHANNELS else 2))
    return squeezed if squeezed.ndim == 2 else squeezed.reshape(1, -1)


def _averaged(plane: Tensor, side: int) -> Tensor:
    """The plane divided into at most `side` rows and columns of nearly equal size, each averaged."""
    for axis, length in enumerate(plane.shape):
        edges = _edges(length, side)
        widths = np.diff([*edges, length]).astype(np.float32)
        plane = np.add.reduceat(plane, edges, axis=axis) / (widths[:, None] if axis == 0 else widths)
    return plane


def _edges(length: int, parts: int) -> Sequence[int]:
    """Where each of at most `parts` parts begins."""
    count = min(length, parts)
    return [part * length // count for part in range(count)]


def _digest(inputs: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        values = np.asarray(inputs[name])
        digest.update(f"{name} {values.dtype} {values.shape} ".encode())
        digest.update(repr(values.tolist()).encode() if values.dtype.kind == "O" else values.tobytes())
    return digest.digest()
