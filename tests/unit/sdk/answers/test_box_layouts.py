"""Layouts of detectors: each decodes the same two boxes, and the reference models see what is in the pictures."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edgesplit.answers.answer_rule import AnswerRule, parse_answer_rule
from edgesplit.answers.box_layouts import LAYOUTS
from edgesplit.answers.comparison import answers_differ, labelled_boxes
from edgesplit.errors import UsageError
from edgesplit.lazy_import import Tensor
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec
from support.reference_models import reference_file

CORNERS = np.array([[0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.25, 0.5]])
"""Left, top, right, bottom."""
SCORES, CLASSES = np.array([0.9, 0.7]), np.array([2, 0])


def yolo_cells(side: int) -> tuple[Tensor, Tensor]:
    """Centres and sizes in pixels of the two boxes."""
    return (CORNERS[:, :2] + CORNERS[:, 2:]) / 2 * side, (CORNERS[:, 2:] - CORNERS[:, :2]) * side


def made_outputs(layout: str) -> list[Tensor]:
    """Outputs of a detector with three classes that sees the two boxes, in the layout's order."""
    if layout == "ssd":
        boxes = np.concatenate((CORNERS[:, [1, 0, 3, 2]], np.zeros((3, 4))))
        filler = np.array([0.0, 0.0, 0.99])
        scores = np.concatenate((SCORES, filler))
        return [boxes[None], np.concatenate((CLASSES, filler))[None], scores[None], np.array([2.0])]
    if layout == "detections":
        return [np.concatenate((CORNERS, SCORES[:, None], CLASSES[:, None]), axis=1)[None]]
    one_hot = np.zeros((2, 3))
    one_hot[np.arange(2), CLASSES] = SCORES
    if layout == "scores+boxes":
        return [np.concatenate((np.zeros((2, 1)), one_hot), axis=1)[None], CORNERS[None]]
    side, cells = 64, 84  # grids of 8x8, 4x4 and 2x2 cells
    centres, sizes = yolo_cells(side)
    if layout == "yolov8":
        table = np.zeros((cells, 7))
        table[:2] = np.concatenate((centres, sizes, one_hot), axis=1)
        return [table.T[None]]
    table = np.zeros((cells, 8))
    for row, place in ((70, 0), (83, 1)):  # cell (2, 1) with 16 pixels, and the last one with 32
        across, down, stride = (2, 1, 16) if row == 70 else (1, 1, 32)
        table[row, :2] = centres[place] / stride - [across, down]
        table[row, 2:4] = np.log(sizes[place] / stride)
        table[row, 4], table[row, 5:] = 1.0, one_hot[place]
    return [table[None]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_decodes_the_same_boxes(layout: str) -> None:
    """Found by the shapes alone, as parts of the picture."""
    made = made_outputs(layout)
    given = {f"o{place}": tensor.astype(np.float32) for place, tensor in enumerate(made)}
    specs = [TensorSpec(name, oip.datatype(tensor), tensor.shape) for name, tensor in given.items()]
    rule = parse_answer_rule(f"boxes:{layout}:0.5", specs)
    found = labelled_boxes(rule, given)
    assert found.corners == pytest.approx(CORNERS, abs=1e-6)
    assert found.scores == pytest.approx(SCORES) and found.classes.tolist() == CLASSES.tolist()
    assert not answers_differ(rule, given, given)


def test_two_layouts_are_compared_with_labels() -> None:
    """A detector of another family, another input size and other class indices sees the same."""
    ours = AnswerRule("boxes", ("o",), layout="yolox", threshold=0.5)
    theirs = AnswerRule("boxes", ("b", "c", "s", "n"), layout="ssd", threshold=0.5, labels=(0, 9, 2))
    one = {"o": made_outputs("yolox")[0]}
    other = dict(zip(theirs.outputs, made_outputs("ssd"), strict=True))
    assert not answers_differ(ours, one, other, their_rule=theirs)
    assert not answers_differ(theirs, other, one, their_rule=ours)
    left_out = AnswerRule("boxes", ("o",), layout="yolox", threshold=0.5, labels=(-1, 1, 2))
    assert answers_differ(left_out, one, other, their_rule=theirs)


def test_values_no_box_has_are_no_boxes() -> None:
    """Sizes that overflow and scores that are not numbers: no error, and a box without a partner at most."""
    table = made_outputs("yolox")[0]
    table[0, 70, 2:4] = 1e9
    table[0, 83, 4] = np.nan
    assert len(labelled_boxes(AnswerRule("boxes", ("o",), layout="yolox", threshold=0.5), {"o": table})) == 0


def test_an_input_that_is_not_square_is_refused() -> None:
    """Its cells do not tell its width."""
    with pytest.raises(UsageError, match="square"):
        LAYOUTS["yolox"].decode([np.zeros((1, 83, 8))])


@pytest.mark.parametrize(
    ("model", "text"), [("yolox_nano.onnx", "boxes:yolox:0.35"), ("ultraface_rfb_320.onnx", "boxes:scores+boxes:0.7")]
)
def test_reference_detectors_see_what_is_in_the_pictures(model: str, text: str) -> None:
    """Classes and scores are those that the models' own post-processing found (expected.json)."""
    expected = json.loads(reference_file("expected.json").read_text())["models"][f"models/{model}"]["samples"]
    with_outputs = [sample for sample in expected if "ref" in sample]
    assert with_outputs
    for sample in with_outputs:
        with np.load(reference_file(sample["ref"]), allow_pickle=False) as stored:
            given = {name.removeprefix("out:"): stored[name] for name in stored if name.startswith("out:")}
        specs = [TensorSpec(name, oip.datatype(value), value.shape) for name, value in given.items()]
        found = labelled_boxes(parse_answer_rule(text, specs), given)
        seen = sorted(zip(found.classes.tolist(), found.scores.tolist(), strict=True))
        told = sorted((box["cls"], box["score"]) for box in sample["detections"])
        assert np.array(seen) == pytest.approx(np.array(told), abs=0.002)
