"""Reads an answer by its model's output kind: labels, boxes in pixels of the picture, a mask, an embedding.

The outputs stay as they are. What is read of them is computed where it is asked for, from the same tensors whichever
tier gave them, so that it does not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.box_layouts import LAYOUTS
from edgesplit.answers.box_matching import candidates
from edgesplit.answers.comparison import output_of
from edgesplit.answers.kind_text import planes_first
from edgesplit.answers.score import probabilities
from edgesplit.errors import InferenceFailed, UsageError
from edgesplit.input_spec import InputSpec
from edgesplit.lazy_import import Tensor, np
from edgesplit.output_kind import Kind, OutputKind
from edgesplit.picture_fit import Size

MOST_LABELS = 5
"""Labels that are read of an answer, at most."""
MASK_THRESHOLD = 0.5
"""Least value of a pixel of a mask with one plane that is not the background."""


@dataclass(frozen=True, slots=True)
class Label:
    """A class, and how likely it is."""

    name: str
    """Its name; its index where it has none."""
    index: int
    score: float
    """Between 0 and 1: the model's own probability, or the softmax of its values."""

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f}"


@dataclass(frozen=True, slots=True)
class Box:
    """A thing in a picture, and where it is: in pixels of the picture as it was sent."""

    name: str
    index: int
    score: float
    left: float
    top: float
    right: float
    bottom: float

    def __str__(self) -> str:
        place = ",".join(f"{value:.0f}" for value in (self.left, self.top, self.right, self.bottom))
        return f"{self.name} {self.score:.2f} at {place}"


def read_labels(kind: OutputKind, outputs: Mapping[str, Tensor], most: int = MOST_LABELS) -> tuple[Label, ...]:
    """The most likely classes, the likeliest first. UsageError where the kind is another; InferenceFailed where the
    output is not finite."""
    _check(kind, "labels")
    likely = probabilities(AnswerRule("class", kind.outputs), outputs)
    if likely is None:
        raise InferenceFailed(f"the output {kind.outputs[0]!r} is not finite, so it has no classes")
    ranked = np.argsort(-likely, kind="stable")[:most]
    return tuple(Label(kind.name_of(int(index)), int(index), float(likely[index])) for index in ranked)


def read_boxes(
    kind: OutputKind, outputs: Mapping[str, Tensor], picture: Size | None = None, spec: InputSpec | None = None
) -> tuple[Box, ...]:
    """Boxes by falling score: those of at least the kind's threshold, less those that overlap a better one of their
    class. In pixels of the picture of that size (width, height), which was brought to the tensor's size by `spec`;
    without a size or spec as parts of the tensor's width and height."""
    _check(kind, "boxes")
    found = LAYOUTS[kind.layout].decode([output_of(outputs, name) for name in kind.outputs])
    kept = candidates(found, kind.threshold, kind.overlap)
    kept = kept.select(kept.scores >= kind.threshold)
    corners = kept.corners
    if picture is not None and spec is not None:
        tensor = spec.tensor_width, spec.tensor_height
        corners = spec.placement(*picture).to_picture(corners, tensor)
    return tuple(
        Box(kind.name_of(int(index)), int(index), float(score), *map(float, corner))
        for index, score, corner in zip(kept.classes, kept.scores, corners, strict=True)
    )


def read_mask(kind: OutputKind, outputs: Mapping[str, Tensor]) -> Tensor:
    """The class of each pixel, int32 [rows, columns], at the output's own size. An output with one plane of floating
    point has the classes 0 and 1, by `MASK_THRESHOLD`."""
    _check(kind, "mask")
    values = output_of(outputs, kind.outputs[0])[0]
    if values.ndim == 3:
        planes = values if planes_first((1, *values.shape)) else values.transpose(2, 0, 1)
        if len(planes) > 1:
            classes: Tensor = planes.argmax(axis=0).astype(np.int32)
            return classes
        values = planes[0]
    classes = (values >= MASK_THRESHOLD).astype(np.int32) if values.dtype.kind == "f" else values.astype(np.int32)
    return classes


def mask_on_picture(mask: Tensor, picture: Size, spec: InputSpec) -> Tensor:
    """The mask [height, width] at the picture's size: each pixel's class is that of its place in the tensor; -1 where
    a crop did not show it."""
    width, height = picture
    tensor = spec.tensor_width, spec.tensor_height
    placement = spec.placement(width, height)
    x = ((np.arange(width) + 0.5) * placement.x_scale + placement.left) * mask.shape[1] / tensor[0]
    y = ((np.arange(height) + 0.5) * placement.y_scale + placement.top) * mask.shape[0] / tensor[1]
    columns, rows = np.floor(x).astype(int), np.floor(y).astype(int)
    shown = ((columns >= 0) & (columns < mask.shape[1]))[None] & ((rows >= 0) & (rows < mask.shape[0]))[:, None]
    at = mask[np.clip(rows, 0, mask.shape[0] - 1)[:, None], np.clip(columns, 0, mask.shape[1] - 1)[None]]
    placed: Tensor = np.where(shown, at, -1)
    return placed


def read_embedding(kind: OutputKind, outputs: Mapping[str, Tensor]) -> Tensor:
    """The vector [n], float32, scaled to length 1, so that the product of two is their cosine. InferenceFailed where
    it is not finite, or zero."""
    _check(kind, "embedding")
    vector = output_of(outputs, kind.outputs[0]).astype(np.float64).reshape(-1)
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length) or length == 0.0:
        raise InferenceFailed(f"the output {kind.outputs[0]!r} has length {length}, so it has no direction")
    scaled: Tensor = (vector / length).astype(np.float32)
    return scaled


def _check(kind: OutputKind, wanted: Kind) -> None:
    if kind.kind != wanted:
        raise UsageError(f"the model's outputs are {kind.to_text()}, so it gives no {wanted}")
