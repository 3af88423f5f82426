"""Outputs of a variant whose classes are declared by labels, in the order of the family's classes."""

from __future__ import annotations

import numpy as np
import pytest

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import is_right
from edgesplit.errors import InferenceFailed
from edgesplit.release.manifest import TensorSpec
from edgesplit_agent.releases.class_labels import by_label

SPEC = TensorSpec("scores", "FP32", (1, 4))


def scores(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def test_each_class_is_at_the_place_of_its_label() -> None:
    """In the shape of the family's output; what belongs to no class of the family is gone, and a class that the variant
    does not know has the least value."""
    mapped = by_label(scores(0.1, 0.2, 0.9), (3, -1, 0), SPEC)
    assert mapped.shape == (1, 4) and mapped.dtype == np.float32
    assert mapped.tolist() == scores(0.9, 0.1, 0.1, 0.1).tolist()


def test_without_labels_the_output_is_the_variants_own() -> None:
    """Not even copied."""
    output = scores(1, 2, 3, 4)
    assert by_label(output, (), SPEC) is output


def test_a_label_of_several_classes_is_as_likely_as_its_likeliest() -> None:
    """Two breeds of one species: whichever comes first, the species' place has the greater value."""
    assert int(by_label(scores(0.8, 0.1, 0.5), (2, 2, 1), SPEC).argmax()) == 2
    assert int(by_label(scores(0.1, 0.8, 0.5), (2, 2, 1), SPEC).argmax()) == 2


def test_another_number_of_classes_is_an_error() -> None:
    """It names the output, the classes and the labels."""
    with pytest.raises(InferenceFailed, match="'scores' has 3 classes, and 2 labels"):
        by_label(scores(1, 2, 3), (0, 1), SPEC)


@pytest.mark.parametrize("seed", range(50))
def test_the_answer_is_the_label_by_which_the_variants_accuracy_was_measured(seed: int) -> None:
    """Random outputs and labels, several classes of one label among them, and classes that are none of the family's."""
    rng = np.random.default_rng(seed)
    labels = (0, *(int(label) for label in rng.integers(-1, 4, 5)))
    output = rng.standard_normal((1, 6)).astype(np.float32)
    answered = int(by_label(output, labels, SPEC).argmax())
    rule = AnswerRule(kind="class", outputs=("scores",), labels=labels)
    assert is_right(rule, {"scores": output}, answered), seed
