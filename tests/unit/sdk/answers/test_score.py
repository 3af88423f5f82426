"""Scores: larger for answers that are surer, on floating-point and on quantised outputs, of classes and of boxes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.score import UNSURE, probabilities, score
from edgesplit.errors import UsageError
from edgesplit.lazy_import import Tensor

CLASS = AnswerRule("class", ("o",))
FACES = AnswerRule("boxes", ("s", "b"), layout="scores+boxes", threshold=0.5)


def outputs(*values: float, dtype: type = np.float32) -> dict[str, Tensor]:
    return {"o": np.array([values], dtype)}


def faces(*scores: float) -> dict[str, Tensor]:
    """Boxes side by side with these scores."""
    corners = [(place, 0.0, place + 0.5, 1.0) for place in range(len(scores))]
    return {
        "s": np.array([[(1 - score, score) for score in scores]], np.float32).reshape(1, -1, 2),
        "b": np.array([corners], np.float32).reshape(1, -1, 4),
    }


@pytest.mark.parametrize(
    "given",
    [
        outputs(0.7, 0.2, 0.1),
        outputs(*np.log([0.7, 0.2, 0.1])),
        outputs(*(np.log([0.7, 0.2, 0.1]) + 5.0)),
        outputs(*np.round(256 * np.array([0.7, 0.2, 0.1])), dtype=np.uint8),
        outputs(*(np.round(256 * np.array([0.7, 0.2, 0.1])) - 128), dtype=np.int8),
    ],
    ids=["probabilities", "logits", "shifted logits", "uint8", "int8"],
)
def test_classifiers_are_scored_alike_in_every_form(given: dict[str, Tensor]) -> None:
    """Probabilities, logits, and TFLite's quantised softmax."""
    assert score("probability", CLASS, given) == pytest.approx(0.7, abs=0.004)
    assert score("margin", CLASS, given) == pytest.approx(0.5, abs=0.008)
    assert score("entropy", CLASS, given) == pytest.approx(-0.802, abs=0.01)


@pytest.mark.parametrize("kind", ["probability", "margin", "entropy"])
def test_a_surer_answer_has_a_larger_score(kind: str) -> None:
    """And an answer that is not a number none."""
    assert score(kind, CLASS, outputs(0.9, 0.05, 0.05)) > score(kind, CLASS, outputs(0.5, 0.3, 0.2))
    for broken in (math.nan, math.inf):
        assert score(kind, CLASS, outputs(broken, 0.5, 0.5)) == UNSURE


def test_classes_that_are_never_an_answer_have_no_part() -> None:
    """The background of a network with 1,001 classes."""
    rule = AnswerRule("class", ("o",), labels=(-1, 0, 1))
    assert score("probability", rule, outputs(0.6, 0.3, 0.1)) == pytest.approx(0.3)
    assert score("margin", rule, outputs(0.6, 0.3, 0.1)) == pytest.approx(0.2)
    logits = probabilities(rule, outputs(9.0, 1.0, 1.0))
    assert logits is not None and logits.tolist() == pytest.approx([0.0, 0.5, 0.5])
    assert score("margin", AnswerRule("class", ("o",), labels=(-1, -1)), outputs(1, 2)) == UNSURE
    assert score("margin", AnswerRule("class", ("o",), labels=(-1, 4)), outputs(0.3, 0.7)) == pytest.approx(0.7)


def test_a_detector_is_as_sure_as_its_least_certain_box() -> None:
    """Distance to the threshold, from either side."""
    assert score("boxes", FACES, faces(0.9, 0.8)) == pytest.approx(0.3)
    assert score("boxes", FACES, faces(0.9, 0.45)) == pytest.approx(0.05)
    assert score("boxes", FACES, faces(0.9, 0.001)) == pytest.approx(0.4)
    assert score("boxes", FACES, faces(0.001)) == pytest.approx(0.5)
    assert score("boxes", FACES, faces()) == pytest.approx(0.5)
    assert score("boxes", FACES, faces(0.9, math.nan)) == UNSURE


def test_a_box_that_is_suppressed_is_not_uncertain() -> None:
    """It would not be shown, whichever side of the threshold it fell on."""
    same = faces(0.9, 0.5)
    same["b"][0, 1] = same["b"][0, 0]
    assert score("boxes", FACES, same) == pytest.approx(0.4)


def test_an_output_that_the_user_names_is_the_score() -> None:
    """If it is one number."""
    rule = AnswerRule("close", ("o",), tolerance=0.1)
    given = {"o": np.zeros((1, 3)), "sure": np.array([[0.25]], np.float16)}
    assert score("output", rule, given, "sure") == 0.25
    assert score("output", rule, given | {"sure": np.array(math.nan)}, "sure") == UNSURE
    for output, says in (("o", "has 3 values"), ("gone", "no output 'gone'")):
        with pytest.raises(UsageError, match=says):
            score("output", rule, given, output)


def test_a_score_that_the_rule_does_not_have_is_refused() -> None:
    """With those that it has."""
    for kind, rule, says in (
        ("boxes", CLASS, "give probability, margin"),
        ("margin", FACES, "give boxes or output"),
        ("margin", AnswerRule("close", ("o",), tolerance=0.1), "name an output"),
    ):
        with pytest.raises(UsageError, match=says):
            score(kind, rule, outputs(1, 2))
