"""The common form of detectors' answers: it has the boxes that count, and differs where the outputs do."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edgesplit.answers.answer_rule import AnswerRule, parse_answer_rule, rule_of_boxes
from edgesplit.answers.comparison import answers_differ, labelled_boxes
from edgesplit.answers.detections import RULE, SPEC, to_detections, true_detections
from edgesplit.errors import UsageError
from edgesplit.lazy_import import Tensor
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec
from support.reference_models import reference_file

FACES = AnswerRule("boxes", ("s", "b"), layout="scores+boxes", threshold=0.7)


def seen(*scores: float, shift: float = 0.0) -> dict[str, Tensor]:
    """A detector of one class that sees things beside each other, each of that score."""
    corners = [[0.2 * place + shift, 0.0, 0.2 * place + 0.2 + shift, 0.5] for place in range(len(scores))]
    return {"s": np.array(scores, np.float32).reshape(1, -1, 1), "b": np.array([corners], np.float32).reshape(1, -1, 4)}


def test_only_what_counts_is_given() -> None:
    """Boxes from the variant's threshold on, the surest first, with score and label."""
    given = to_detections(FACES, seen(0.75, 0.69, 0.9))["boxes"]
    assert given.dtype == np.float32 and given.shape == (1, 2, 6)
    assert given[0, :, 4] == pytest.approx([0.9, 0.75]) and given[0, :, 5].tolist() == [0.0, 0.0]
    assert given[0, 0, :4] == pytest.approx([0.4, 0.0, 0.6, 0.5])
    assert to_detections(FACES, seen(0.1))["boxes"].shape == (1, 0, 6)


def test_a_score_that_is_rounded_below_the_threshold_still_counts() -> None:
    """0.7 as 32 bits is less than 0.7: the common form has no threshold of its own."""
    exact = {name: value.astype(np.float64) for name, value in seen(0.7).items()}
    exact["s"][:] = 0.7
    given = to_detections(FACES, exact)
    assert float(given["boxes"][0, 0, 4]) < 0.7 and len(labelled_boxes(RULE, given)) == 1


def test_it_differs_where_the_outputs_do() -> None:
    """Random scenes, seen by two detectors with thresholds of their own."""
    rng, other = np.random.default_rng(8), AnswerRule("boxes", ("s", "b"), layout="scores+boxes", threshold=0.6)
    verdicts = set[bool]()
    for _ in range(200):
        ours, theirs = seen(*rng.random(3)), seen(*rng.random(3), shift=float(rng.choice([0.0, 0.05, 0.15])))
        expected = answers_differ(FACES, ours, theirs, their_rule=other)
        assert answers_differ(RULE, to_detections(FACES, ours), to_detections(other, theirs)) == expected
        verdicts.add(expected)
    assert verdicts == {True, False}


def test_what_a_frame_shows_is_compared_in_the_same_form() -> None:
    """A box off by a little is right; a missing one and another label are not; nothing is right where nothing is."""
    given = to_detections(FACES, seen(0.9, 0.9, shift=0.02))
    boxes = [[0.0, 0.0, 0.2, 0.5], [0.2, 0.0, 0.4, 0.5]]
    assert not answers_differ(RULE, true_detections(boxes, [0, 0]), given)
    assert answers_differ(RULE, true_detections(boxes, [0, 1]), given)
    assert answers_differ(RULE, true_detections(boxes[:1], [0]), given)
    assert not answers_differ(RULE, true_detections([], []), to_detections(FACES, seen()))


def test_labels_are_the_familys() -> None:
    """A class that is none of them is no box."""
    rule = AnswerRule("boxes", ("s", "b"), layout="scores+boxes", threshold=0.5, labels=(7,))
    assert to_detections(rule, seen(0.9))["boxes"][0, 0, 5] == 7.0
    nothing = AnswerRule("boxes", ("s", "b"), layout="scores+boxes", threshold=0.5, labels=(-1,))
    assert to_detections(nothing, seen(0.9))["boxes"].shape == (1, 0, 6)


def test_its_rule_is_read_from_text() -> None:
    """As the cascade of a plan has it; a variant's own rule names outputs that are in order already."""
    assert parse_answer_rule(RULE.to_text(), [SPEC]) == RULE
    assert rule_of_boxes(FACES.to_text(), FACES.outputs) == FACES
    for text in ("class:s", "boxes:mystery:0.5", "boxes:yolox:2"):
        with pytest.raises(UsageError, match=r"boxes"):
            rule_of_boxes(text, ("s",))


def test_a_trained_detector_gives_the_boxes_that_it_sees() -> None:
    """YOLOX nano on photographs: classes and scores are those of the model's own post-processing (expected.json)."""
    expected = json.loads(reference_file("expected.json").read_text())["models"]["models/yolox_nano.onnx"]["samples"]
    for sample in (sample for sample in expected if "ref" in sample):
        with np.load(reference_file(sample["ref"]), allow_pickle=False) as stored:
            outputs = {name.removeprefix("out:"): stored[name] for name in stored if name.startswith("out:")}
        specs = [TensorSpec(name, oip.datatype(value), value.shape) for name, value in outputs.items()]
        given = to_detections(parse_answer_rule("boxes:yolox:0.35", specs), outputs)["boxes"][0]
        told = sorted((box["cls"], box["score"]) for box in sample["detections"])
        assert np.array(sorted(zip(given[:, 5], given[:, 4], strict=True))) == pytest.approx(np.array(told), abs=0.002)
