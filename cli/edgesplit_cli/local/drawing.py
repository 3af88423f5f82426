"""Draws an answer onto its picture: boxes with their names, a mask's colours, or the likeliest label."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgesplit.client.answer import Answer
from edgesplit.errors import UsageError
from edgesplit.input_spec import InputSpec
from edgesplit.picture_formats import RAW, decode_encoded, decode_raw

if TYPE_CHECKING:  # Pillow takes a while to import, and most commands do not draw
    from PIL import Image

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
MASK_SHARE = 0.5
"""Part of a masked pixel that is the class's colour."""


def draw(answer: Answer, file: Path) -> None:
    """Write the picture of the answer with what was found in it. UsageError where there is nothing to draw, or the file
    cannot be written."""
    picture = drawn(answer)
    try:
        picture.save(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"--draw {file}: {error}") from error


def drawn(answer: Answer) -> Image.Image:
    """The picture of the answer with what was found in it."""
    from PIL import Image, ImageDraw

    kind = answer.kind
    if kind is None or kind.kind == "embedding":
        what = "has no output kind" if kind is None else "gives an embedding"
        raise UsageError(f"--draw: the model {what}, so there is nothing to draw (`edgectl model push --output`)")
    picture = _picture(answer)
    if kind.kind == "mask":
        mask = answer.mask
        colours = np.array([_colour(index) if index > 0 else (0, 0, 0) for index in range(max(1, int(mask.max()) + 1))])
        shares = np.where(mask > 0, MASK_SHARE, 0.0)[:, :, None]
        pixels = np.asarray(picture) * (1 - shares) + colours[np.clip(mask, 0, None)] * shares
        return Image.fromarray(pixels.round().astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    line = max(1, round(min(picture.size) / 200))
    letters = max(10, round(min(picture.size) / 35))
    if kind.kind == "labels":
        best = answer.labels[0]
        pen.rectangle(pen.textbbox((line, line), str(best), font_size=letters), fill=_colour(best.index))
        pen.text((line, line), str(best), fill=(0, 0, 0), font_size=letters)
        return picture
    for box in reversed(answer.boxes):  # the surest last, above the others
        colour = _colour(box.index)
        left, right = sorted((box.left, box.right))
        top, bottom = sorted((box.top, box.bottom))
        pen.rectangle((left, top, right, bottom), outline=colour, width=line)
        text, at = f"{box.name} {box.score:.2f}", (max(0.0, left) + line, max(0.0, top) + line)
        pen.rectangle(pen.textbbox(at, text, font_size=letters), fill=colour)
        pen.text(at, text, fill=(0, 0, 0), font_size=letters)
    return picture


def _picture(answer: Answer) -> Image.Image:
    """The picture that was sent, in colour."""
    from PIL import Image

    source = answer.source
    spec: InputSpec | None = source.interface().input_spec if source is not None else None
    if source is None or spec is None or spec.is_sound or source.frame is None:
        raise UsageError("--draw: the model takes no pictures (`edgectl model push --input`)")
    frame = bytes(source.frame)
    if spec.media != RAW:
        return decode_encoded(spec.media, frame, "RGB")
    return Image.fromarray(decode_raw(spec.pixels, spec.width, spec.height, frame)).convert("RGB")


def _colour(index: int) -> tuple[int, int, int]:
    """A bright colour of its own for each class: hues by the golden ratio, which keeps neighbours apart."""
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618034 % 1.0, 0.7, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255)
