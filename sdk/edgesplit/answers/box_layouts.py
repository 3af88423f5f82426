"""Layouts of detectors' outputs: which outputs describe boxes, and the boxes that they describe.

    yolox         [1, N, 5+C]: centre in cells, log of the size in cells, objectness, C classes; strides 8, 16, 32
    yolov8        [1, 4+C, N]: centre and size in pixels of the input, C classes
    ssd           TFLite's post-processing: boxes [1, N, 4], classes [1, N], scores [1, N], count [1]
    scores+boxes  [1, N, C] and [1, N, 4]: of several classes the first is the background (as of UltraFace)
    detections    [1, n, 6]: left, top, right, bottom, score, label: the answers of a family (`answers.detections`)

Corners are parts of the input's width and height, so models with inputs of different size are compared. The input of
`yolox` and `yolov8` is square, with a side that 32 divides: it follows from N, which is 21 (side/32)².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgesplit.errors import UsageError
from edgesplit.lazy_import import Tensor, np
from edgesplit.release.manifest import TensorSpec

STRIDES = (8, 16, 32)
"""Pixels per cell of the three grids."""
CELLS_PER_SQUARE = sum((STRIDES[-1] // stride) ** 2 for stride in STRIDES)
"""Cells of all grids in a square of 32 pixels: 21."""
FLOATS = ("FP16", "FP32", "FP64")


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of one picture."""

    corners: Tensor
    """[n, 4]: left, top, right, bottom, as parts of the input's width and height."""
    scores: Tensor
    """[n], between 0 and 1."""
    classes: Tensor
    """[n], class indices."""

    def __len__(self) -> int:
        return len(self.scores)

    def select(self, chosen: Tensor) -> Boxes:
        """The boxes at these positions, or where this mask is set."""
        return Boxes(self.corners[chosen], self.scores[chosen], self.classes[chosen])


def decode_yolox(outputs: Sequence[Tensor]) -> Boxes:
    """Boxes of YOLOX (Ge et al., 2107.08430) as it is exported: without the decoding of cells."""
    cells = outputs[0][0]
    side, likely, cells = _side(len(cells)), cells[:, 5:], cells[:, :5].astype(np.float64)
    places, strides = [], []
    for stride in STRIDES:
        length = side // stride
        across, down = np.meshgrid(np.arange(length), np.arange(length))
        places.append(np.stack((across, down), axis=2).reshape(-1, 2))
        strides.append(np.full((length * length, 1), stride))
    pixels = np.concatenate(strides)
    with np.errstate(over="ignore", invalid="ignore"):
        centres = (cells[:, :2] + np.concatenate(places)) * pixels / side
        sizes = np.exp(cells[:, 2:4]) * pixels / side
        found = _best_class(_corners(centres, sizes), likely)
        return Boxes(found.corners, found.scores * cells[:, 4], found.classes)


def decode_yolov8(outputs: Sequence[Tensor]) -> Boxes:
    """Boxes of YOLOv8 and of later exports of the same form."""
    cells = outputs[0][0].T
    side, places = _side(len(cells)), cells[:, :4].astype(np.float64)
    return _best_class(_corners(places[:, :2] / side, places[:, 2:] / side), cells[:, 4:])


def decode_ssd(outputs: Sequence[Tensor]) -> Boxes:
    """Boxes of TFLite's operator TFLite_Detection_PostProcess, whose corners are top, left, bottom, right."""
    corners, classes, scores, count = (output.reshape(-1) for output in outputs)
    number = int(np.clip(np.nan_to_num(count[0]), 0, len(scores)))
    ordered = corners.reshape(-1, 4)[:number, [1, 0, 3, 2]].astype(np.float64)
    return Boxes(ordered, scores[:number].astype(np.float64), np.nan_to_num(classes[:number]).astype(np.int64))


def decode_scores_and_boxes(outputs: Sequence[Tensor]) -> Boxes:
    """Boxes from a tensor of scores and one of corners: left, top, right, bottom, as parts of width and height."""
    scores = outputs[0][0]
    return _best_class(outputs[1][0].astype(np.float64), scores[:, 1:] if scores.shape[1] > 1 else scores)


def decode_detections(outputs: Sequence[Tensor]) -> Boxes:
    """Boxes that were decoded before, corners as parts of width and height."""
    rows = outputs[0].reshape(-1, 6).astype(np.float64)
    return Boxes(rows[:, :4], rows[:, 4], np.nan_to_num(rows[:, 5]).astype(np.int64))


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout: its decoder, and the choice of its outputs among a model's."""

    decode: Callable[[Sequence[Tensor]], Boxes]
    choose: Callable[[Sequence[TensorSpec]], tuple[TensorSpec, ...]]
    """The outputs in the decoder's order; empty where none fit."""
    needs: str
    """The outputs that the layout needs, in words."""
    classes: Callable[[Sequence[TensorSpec]], int] = lambda specs: 0
    """Number of classes by the chosen outputs; 0: they do not say."""


def _choose_yolox(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(spec for spec in specs if len(spec.shape) == 3 and spec.shape[2] > 5 and _is_whole_grid(spec.shape[1]))


def _choose_yolov8(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(spec for spec in specs if len(spec.shape) == 3 and spec.shape[1] > 4 and _is_whole_grid(spec.shape[2]))


def _choose_ssd(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """By shape, and classes before scores, which is the operator's order, unless their names say otherwise."""
    corners = [spec for spec in specs if len(spec.shape) == 3 and spec.shape[2] == 4]
    count = [spec for spec in specs if math.prod(spec.shape) == 1 and len(spec.shape) == 1]
    lists = [spec for spec in specs if len(spec.shape) == 2]
    if len(lists) == 2 and ("score" in lists[0].name.lower() or "class" in lists[1].name.lower()):
        lists.reverse()
    fits = len(corners) == 1 and len(lists) == 2 and len(count) == 1 and len(specs) == 4
    return (*corners, *lists, *count) if fits else ()


def _choose_scores_and_boxes(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    flat = [spec for spec in specs if len(spec.shape) == 3]
    if len(flat) != 2 or len(specs) != 2 or flat[0].shape[1] != flat[1].shape[1]:
        return ()
    if flat[1].shape[2] != 4:
        flat.reverse()
    return tuple(flat) if flat[1].shape[2] == 4 else ()


def _choose_detections(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    fitting = tuple(spec for spec in specs if len(spec.shape) == 3 and spec.shape[2] == 6)
    return fitting if len(fitting) == 1 else ()


LAYOUTS: Mapping[str, Layout] = {
    "yolox": Layout(
        decode_yolox, _choose_yolox, "one output [1, N, 5+C] with N = 21 (side/32)² of a square input",
        lambda specs: specs[0].shape[2] - 5,
    ),
    "yolov8": Layout(
        decode_yolov8, _choose_yolov8, "one output [1, 4+C, N] with N = 21 (side/32)² of a square input",
        lambda specs: specs[0].shape[1] - 4,
    ),
    "ssd": Layout(decode_ssd, _choose_ssd, "boxes [1, N, 4], classes [1, N], scores [1, N] and count [1]"),
    "scores+boxes": Layout(
        decode_scores_and_boxes, _choose_scores_and_boxes, "scores [1, N, C] and boxes [1, N, 4]",
        lambda specs: max(1, specs[0].shape[2] - 1),
    ),
    "detections": Layout(decode_detections, _choose_detections, "one output [1, n, 6]: corners, score and label"),
}  # fmt: skip


def box_outputs(layout: str, outputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Names of the outputs that a layout reads, in its order; UsageError where the model has none that fit."""
    if layout not in LAYOUTS:
        raise UsageError(f"no layout of boxes is called {layout[:40]!r}: give one of {', '.join(LAYOUTS)}")
    # Numbers of 8 bits are boxes only with a scale, which an output does not carry.
    chosen = LAYOUTS[layout].choose([spec for spec in outputs if spec.datatype in FLOATS])
    if not chosen or (layout.startswith("yolo") and len(chosen) != 1):
        given = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in outputs)
        raise UsageError(f"boxes:{layout} needs {LAYOUTS[layout].needs}, in floating point; the model has {given}")
    return tuple(spec.name for spec in chosen)


def _is_whole_grid(cells: int) -> bool:
    squares, rest = divmod(cells, CELLS_PER_SQUARE)
    return cells > 0 and rest == 0 and math.isqrt(squares) ** 2 == squares


def _side(cells: int) -> int:
    """Side in pixels of the square input with so many cells."""
    if not _is_whole_grid(cells):
        raise UsageError(f"{cells} cells are not those of a square input with a side that {STRIDES[-1]} divides")
    return STRIDES[-1] * math.isqrt(cells // CELLS_PER_SQUARE)


def _corners(centres: Tensor, sizes: Tensor) -> Tensor:
    return np.concatenate((centres - sizes / 2, centres + sizes / 2), axis=1)


def _best_class(corners: Tensor, scores: Tensor) -> Boxes:
    """Each box with its most likely class; ties go to the lower index."""
    # Only the best score is converted: of 80 classes the copy of all would take longer than the rest.
    classes = scores.argmax(axis=1)
    best = np.take_along_axis(scores, classes[:, None], axis=1)[:, 0]
    return Boxes(corners, best.astype(np.float64), classes)
