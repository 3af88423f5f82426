"""Answer rules: what they read, what they refuse, and that a stored one is checked."""

from __future__ import annotations

import msgspec
import pytest

from edgesplit.answers.answer_rule import AnswerRule, infer_answer_rule, parse_answer_rule
from edgesplit.errors import UsageError
from edgesplit.release.manifest import TensorSpec

CLASSES = TensorSpec("probabilities", "FP32", (1, 1000, 1, 1))
STATE = TensorSpec("state", "FP32", (1, 2, 128))
YOLOX = TensorSpec("output", "FP32", (1, 3549, 85))
FACES = (TensorSpec("scores", "FP32", (1, 4420, 2)), TensorSpec("boxes", "FP32", (1, 4420, 4)))
SSD = tuple(
    TensorSpec(name, "FP32", shape) for name, shape in (("a", (1, 20, 4)), ("b", (1, 20)), ("c", (1, 20)), ("d", (1,)))
)


@pytest.mark.parametrize(
    ("text", "outputs", "reads", "normal"),
    [
        ("class", (CLASSES,), ("probabilities",), "class:probabilities"),
        ("class", (STATE, CLASSES), ("probabilities",), "class:probabilities"),
        ("class:probabilities", (CLASSES,), ("probabilities",), "class:probabilities"),
        ("boxes:yolox", (YOLOX,), ("output",), "boxes:yolox:0.5"),
        ("boxes:yolox:0.35", (YOLOX,), ("output",), "boxes:yolox:0.35"),
        ("boxes:yolov8:0.3", (TensorSpec("o", "FP32", (1, 84, 8400)),), ("o",), "boxes:yolov8:0.3"),
        ("boxes:scores+boxes:0.7", FACES, ("scores", "boxes"), "boxes:scores+boxes:0.7"),
        ("boxes:scores+boxes:0.7", FACES[::-1], ("scores", "boxes"), "boxes:scores+boxes:0.7"),
        ("boxes:ssd", SSD, ("a", "b", "c", "d"), "boxes:ssd:0.5"),
        ("close:0.01", (STATE, CLASSES), ("state", "probabilities"), "close:0.01"),
    ],
)
def test_a_rule_finds_its_outputs(text: str, outputs: tuple[TensorSpec, ...], reads: object, normal: str) -> None:
    """And written out it reads the same again."""
    rule = parse_answer_rule(text, outputs)
    assert rule.outputs == reads and rule.to_text() == normal
    assert parse_answer_rule(rule.to_text(), outputs) == rule
    assert msgspec.json.decode(msgspec.json.encode(rule), type=AnswerRule) == rule


def test_scores_before_classes_are_found_by_their_names() -> None:
    """Converters give TFLite's four outputs in another order."""
    renamed = [
        TensorSpec("scores", "FP32", (1, 9)),
        TensorSpec("boxes", "FP32", (1, 9, 4)),
        TensorSpec("count", "FP32", (1,)),
        TensorSpec("classes", "FP32", (1, 9)),
    ]
    assert parse_answer_rule("boxes:ssd", renamed).outputs == ("boxes", "classes", "scores", "count")


@pytest.mark.parametrize(
    ("text", "outputs", "says"),
    [
        ("klass", (CLASSES,), "give class, class:OUTPUT"),
        ("class:logits", (CLASSES,), "give class:probabilities"),
        ("class", (STATE,), r"state \[1, 2, 128\]"),
        ("class", (CLASSES, TensorSpec("b", "FP32", (5,))), "class:probabilities or class:b"),
        ("boxes:yolo", (YOLOX,), "one of yolox, yolov8, ssd"),
        ("boxes:yolox", (CLASSES,), "needs one output"),
        ("boxes:yolox", (TensorSpec("o", "INT8", (1, 3549, 85)),), "in floating point"),
        ("boxes:yolox", (TensorSpec("o", "FP32", (1, 3000, 85)),), "of a square input"),
        ("boxes:yolox:1.5", (YOLOX,), "between 0 and 1"),
        ("close:near", (CLASSES,), "not a number"),
        ("close:nan", (CLASSES,), "not a number"),
        ("close", (CLASSES,), "not a number"),
        ("close:-1", (CLASSES,), "0 or more"),
        ("close:0.1", (TensorSpec("t", "BYTES", (1,)),), "not numbers"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(text: str, outputs: tuple[TensorSpec, ...], says: str) -> None:
    """With what the model has, or what would fit."""
    with pytest.raises(UsageError, match=says):
        parse_answer_rule(text, outputs)


@pytest.mark.parametrize(
    ("shape", "is_classifier"),
    [
        ((1, 1000), True),
        ((-1, 10), True),
        ((1, 1000, 1, 1), True),
        ((10,), True),
        ((1, 1), False),
        ((-1,), False),
        ((1, -1), False),
        ((4, 10), False),
        ((1, 3549, 85), False),
    ],
)
def test_a_classifier_is_recognised_by_its_output(shape: tuple[int, ...], is_classifier: bool) -> None:
    """One number for each of at least two classes; a batch is one picture."""
    rule = infer_answer_rule((TensorSpec("o", "FP32", shape),))
    assert rule == (AnswerRule("class", ("o",)) if is_classifier else None)


def test_several_outputs_are_not_guessed_at() -> None:
    """A state beside the classes may matter."""
    assert infer_answer_rule((CLASSES, STATE)) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"class","outputs":[]}',
        '{"kind":"boxes","outputs":["o"],"layout":"other"}',
        '{"kind":"boxes","outputs":["o"],"layout":"yolox","threshold":1.5}',
        '{"kind":"close","outputs":["o"],"tolerance":-1}',
        '{"kind":"top5","outputs":["o"]}',
        '{"kind":"class","outputs":["o"],"more":1}',
    ],
)
def test_a_stored_rule_is_checked(text: str) -> None:
    """A manifest cannot bring a rule that no parser makes."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=AnswerRule)


def test_a_map_of_labels_that_is_too_short_is_named() -> None:
    """Instead of an index that means another class."""
    rule = AnswerRule("class", ("o",), labels=(3, 4))
    assert rule.label_of(1) == 4
    for index in (2, -1):
        with pytest.raises(UsageError, match="2 classes"):
            rule.label_of(index)
