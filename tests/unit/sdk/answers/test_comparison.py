"""When answers differ: classes, boxes and numbers; the same from both sides."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.box_layouts import Boxes
from edgesplit.answers.box_matching import LEAST_OVERLAP, all_have_partners, overlaps
from edgesplit.answers.comparison import NO_LABEL, answers_differ, is_right, predicted_label
from edgesplit.errors import UsageError
from edgesplit.lazy_import import Tensor

CLASS = AnswerRule("class", ("o",))
FACES = AnswerRule("boxes", ("s", "b"), layout="scores+boxes", threshold=0.5)


def outputs(*values: float, dtype: type = np.float32) -> dict[str, Tensor]:
    return {"o": np.array([values], dtype)}


def faces(*boxes: tuple[float, float, float, float, float]) -> dict[str, Tensor]:
    """A detector's outputs: score and corners of each box."""
    table = np.array(boxes, np.float32).reshape(-1, 5)
    scores = np.stack((1 - table[:, 0], table[:, 0]), axis=1)
    return {"s": scores[None], "b": table[None, :, 1:]}


def test_classes_differ_by_their_largest_value() -> None:
    """Ties go to the lower index, on both sides."""
    assert predicted_label(CLASS, outputs(0.1, 0.7, 0.2)) == 1
    assert predicted_label(CLASS, outputs(5, 7, 7, dtype=np.uint8)) == 1
    assert not answers_differ(CLASS, outputs(0.1, 0.7), outputs(0.4, 0.6))
    assert answers_differ(CLASS, outputs(0.1, 0.7), outputs(0.6, 0.4))


def test_labels_make_classes_of_two_models_the_same() -> None:
    """The one has a background in front, which is never an answer."""
    background = AnswerRule("class", ("p",), labels=(-1, 0, 1))
    with_background = {"p": np.array([[0.9, 0.02, 0.08]])}
    assert predicted_label(background, with_background) == 1
    assert not answers_differ(CLASS, outputs(0.3, 0.7), with_background, their_rule=background)
    assert answers_differ(CLASS, outputs(0.7, 0.3), with_background, their_rule=background)
    assert is_right(background, with_background, 1) and not is_right(background, with_background, 0)


def test_an_answer_that_is_not_a_number_differs_from_every_other() -> None:
    """Also from itself, and it is never right."""
    broken = outputs(np.nan, 0.7)
    assert predicted_label(CLASS, broken) == NO_LABEL
    assert answers_differ(CLASS, broken, broken) and not is_right(CLASS, broken, NO_LABEL)
    close = AnswerRule("close", ("o",), tolerance=1.0)
    assert answers_differ(close, broken, broken)


def test_close_is_relative_to_the_largest_value() -> None:
    """As output drift between releases is."""
    close = AnswerRule("close", ("o",), tolerance=0.01)
    assert not answers_differ(close, outputs(0, 10), outputs(0.09, 10))
    assert answers_differ(close, outputs(0, 10), outputs(0.11, 10))
    assert answers_differ(close, outputs(0, 10), outputs(0, 10, 0))
    assert not answers_differ(close, outputs(0, 0), outputs(0, 0))
    assert not answers_differ(close, outputs(200, 10, dtype=np.uint8), outputs(200, 11, dtype=np.uint8))


def test_rules_of_two_kinds_are_refused_with_both_names() -> None:
    """Outputs that mean different things have no distance."""
    with pytest.raises(UsageError, match="class:o and by boxes:scores"):
        answers_differ(CLASS, outputs(1, 2), faces(), their_rule=FACES)
    with pytest.raises(UsageError, match="no output 'o'"):
        answers_differ(CLASS, {"x": np.zeros(2)}, outputs(1, 2))
    with pytest.raises(UsageError, match="map of labels 3"):
        predicted_label(AnswerRule("class", ("o",), labels=(0, 1, 2)), outputs(1, 2))
    with pytest.raises(UsageError, match="only those of classifiers"):
        is_right(FACES, faces(), 1)


def test_a_box_without_a_partner_is_a_change() -> None:
    """Of either model, if its score reaches the threshold."""
    one, other, faint = (0.9, 0.1, 0.1, 0.5, 0.5), (0.8, 0.6, 0.6, 0.9, 0.9), (0.4, 0.6, 0.6, 0.9, 0.9)
    moved = (0.6, 0.12, 0.1, 0.52, 0.5)
    assert not answers_differ(FACES, faces(one, other), faces(other, moved))
    assert answers_differ(FACES, faces(one, other), faces(one))
    assert answers_differ(FACES, faces(one), faces(one, other))
    assert not answers_differ(FACES, faces(one, faint), faces(one))
    assert not answers_differ(FACES, faces(), faces(faint))
    assert answers_differ(FACES, faces(one), faces((0.9, 0.4, 0.4, 0.8, 0.8)))


def test_overlapping_boxes_of_one_thing_are_one() -> None:
    """They are suppressed before anything is compared."""
    one, again = (0.9, 0.1, 0.1, 0.5, 0.5), (0.8, 0.11, 0.1, 0.5, 0.5)
    assert not answers_differ(FACES, faces(one, again), faces(one))


def test_the_best_first_pair_does_not_leave_a_box_alone() -> None:
    """A fits both boxes of the other side, best the one that B needs: greedily B would go without."""
    a, b = (0.0, 0.0, 1.0, 0.3), (0.0, 0.0, 1.0, 0.18)
    c, d = (0.0, 0.0, 1.0, 0.29), (0.0, 0.08, 1.0, 0.38)
    ours = Boxes(np.array([a, b]), np.array([0.9, 0.8]), np.array([1, 1]))
    theirs = Boxes(np.array([c, d]), np.array([0.9, 0.8]), np.array([1, 1]))
    shared = np.array([overlaps(box, theirs.corners) for box in ours.corners])
    assert (shared >= LEAST_OVERLAP).tolist() == [[True, True], [True, False]] and shared[0, 0] > shared[0, 1]
    assert all_have_partners(ours, theirs) and all_have_partners(theirs, ours)


BOXES = some.lists(
    some.tuples(
        some.integers(0, 1), some.integers(0, 6), some.integers(0, 6), some.integers(1, 6), some.integers(1, 6)
    ),
    max_size=5,
)


def boxes_of(rows: list[tuple[int, int, int, int, int]]) -> Boxes:
    table = np.array(rows, float).reshape(-1, 5)
    corners = np.concatenate((table[:, 1:3], table[:, 1:3] + table[:, 3:5]), axis=1)
    return Boxes(corners, np.ones(len(table)), table[:, 0].astype(int))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(BOXES, BOXES, some.randoms(use_true_random=False))
def test_partners_are_those_of_the_best_matching(ours: list, theirs: list, random: Random) -> None:
    """As trying every pairing finds, from both sides, in any order."""
    one, other = boxes_of(ours), boxes_of(theirs)
    fits = [
        [
            one.classes[a] == other.classes[b] and overlaps(one.corners[a], other.corners)[b] >= LEAST_OVERLAP
            for b in range(len(other))
        ]
        for a in range(len(one))
    ]
    perfect = len(one) == len(other) and any(
        all(fits[a][b] for a, b in enumerate(order)) for order in itertools.permutations(range(len(other)))
    )
    assert all_have_partners(one, other) == all_have_partners(other, one) == perfect
    random.shuffle(ours)
    assert all_have_partners(boxes_of(ours), other) == perfect
