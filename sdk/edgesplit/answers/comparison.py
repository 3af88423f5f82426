"""Comparison of answers: whether those of two models differ, and whether one is right."""

from __future__ import annotations

from collections.abc import Mapping

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.box_layouts import LAYOUTS, Boxes
from edgesplit.answers.box_matching import all_have_partners, candidates
from edgesplit.errors import UsageError
from edgesplit.lazy_import import Tensor, np

NO_LABEL = -1
"""The label of an answer that is none: the output is not a number, or all classes are left out."""


def answers_differ(
    rule: AnswerRule,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    *,
    their_rule: AnswerRule | None = None,
) -> bool:
    """Whether two answers to the same input differ; the same from both sides.

    `their_rule` is the other model's where it has other outputs, labels or thresholds. An output that is not a number
    differs from every other. UsageError where an output is missing or the rules are of different kinds.
    """
    other = their_rule or rule
    if rule.kind != other.kind:
        raise UsageError(f"answers by {rule.to_text()} and by {other.to_text()} mean different things")
    if rule.kind == "class":
        label = predicted_label(rule, ours)
        return label == NO_LABEL or label != predicted_label(other, theirs)
    if rule.kind == "boxes":
        return not all_have_partners(labelled_boxes(rule, ours), labelled_boxes(other, theirs))
    if len(rule.outputs) != len(other.outputs):
        raise UsageError(f"one model has {len(rule.outputs)} outputs to compare, the other {len(other.outputs)}")
    tolerance = min(rule.tolerance, other.tolerance)
    return any(
        _is_far(output_of(ours, name), output_of(theirs, their_name), tolerance)
        for name, their_name in zip(rule.outputs, other.outputs, strict=True)
    )


def predicted_label(rule: AnswerRule, outputs: Mapping[str, Tensor]) -> int:
    """Label of the most likely class; ties go to the lower class index. `NO_LABEL` where no class is an answer."""
    index = predicted_index(rule, outputs)
    return NO_LABEL if index is None else rule.label_of(index)


def is_right(rule: AnswerRule, outputs: Mapping[str, Tensor], label: int) -> bool:
    """Whether the answer is the class with this label. UsageError for rules without classes."""
    if rule.kind != "class":
        raise UsageError(f"answers by {rule.to_text()} are not compared with labels: only those of classifiers are")
    return label != NO_LABEL and predicted_label(rule, outputs) == label


def predicted_index(rule: AnswerRule, outputs: Mapping[str, Tensor]) -> int | None:
    """Class index of the most likely class that may be an answer; None where there is none."""
    values = class_values(rule, outputs)
    if not np.isfinite(values).any() or np.isnan(values).any():
        return None
    return int(values.argmax())


def class_values(rule: AnswerRule, outputs: Mapping[str, Tensor]) -> Tensor:
    """The classifier's output as float64 [classes]; -inf for classes that are never an answer."""
    values = output_of(outputs, rule.outputs[0]).reshape(-1).astype(np.float64)
    if rule.labels:
        if len(values) != len(rule.labels):
            text = f"output {rule.outputs[0]!r} has {len(values)} classes, the map of labels {len(rule.labels)}"
            raise UsageError(f"{text}: give one label for each class")
        values[np.asarray(rule.labels) < 0] = -np.inf
    return values


def labelled_boxes(rule: AnswerRule, outputs: Mapping[str, Tensor]) -> Boxes:
    """The boxes of an answer: suppressed, at least at the rule's threshold, with labels as classes."""
    found = candidates(decoded_boxes(rule, outputs), rule.threshold)
    found = found.select(found.scores >= rule.threshold)
    labels = np.array([rule.label_of(int(index)) for index in found.classes], np.int64)
    named = Boxes(found.corners, found.scores, labels)
    return named.select(labels >= 0)


def decoded_boxes(rule: AnswerRule, outputs: Mapping[str, Tensor]) -> Boxes:
    """All boxes that the outputs describe, before suppression, with the model's class indices."""
    return LAYOUTS[rule.layout].decode([output_of(outputs, name) for name in rule.outputs])


def output_of(outputs: Mapping[str, Tensor], name: str) -> Tensor:
    """An output by its name; UsageError where the answer lacks it."""
    try:
        return np.asarray(outputs[name])
    except KeyError:
        raise UsageError(f"the answer has no output {name!r}, only {', '.join(sorted(outputs)) or 'none'}") from None


def _is_far(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by more than `tolerance` times the largest absolute value of either."""
    if ours.shape != theirs.shape:
        return True
    if ours.size == 0:
        return False
    one, other = ours.astype(np.float64), theirs.astype(np.float64)
    largest = max(float(np.abs(one).max()), float(np.abs(other).max()))
    with np.errstate(invalid="ignore"):
        return not float(np.abs(one - other).max()) <= tolerance * largest
