"""The common form of detectors' answers: in a family all variants give their boxes in it, whatever their own layouts.

One tensor FP32 [1, n, 6]: left, top, right, bottom as parts of the frame's width and height, score, and label. It has
the boxes that count, after suppression, at least at the variant's own threshold, by falling score. Frames are stretched
to each variant's input, so parts of the input are parts of the frame. See docs/decisions/0072-detectors-in-families.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import labelled_boxes
from edgesplit.lazy_import import Tensor, np
from edgesplit.release.manifest import TensorSpec

OUTPUT: Final = "boxes"
SPEC: Final = TensorSpec(OUTPUT, "FP32", (1, -1, 6))
RULE: Final = AnswerRule("boxes", (OUTPUT,), layout="detections")
"""By which answers in this form are compared: every box in them counts."""


def to_detections(rule: AnswerRule, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A detector's answer in the common form; `rule` is the variant's own, on its own outputs. UsageError where an
    output is missing, or a class has no label."""
    boxes = labelled_boxes(rule, outputs)
    columns = (boxes.corners, boxes.scores[:, None], boxes.classes[:, None])
    return {OUTPUT: np.concatenate(columns, axis=1).astype(np.float32)[None]}


def true_detections(corners: Sequence[Sequence[float]], labels: Sequence[int]) -> dict[str, Tensor]:
    """What a frame shows, in the common form, each box with a score of 1."""
    rows = [[*box, 1.0, float(label)] for box, label in zip(corners, labels, strict=True)]
    return {OUTPUT: np.array(rows, np.float32).reshape(1, -1, 6)}
