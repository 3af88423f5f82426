"""Scores: how sure an answer is. Any number serves that is larger for answers that are more often right.

A threshold on a score is fixed from frames on which both models ran (partitioner `bounds.threshold`), so no score has
to mean a probability; it only has to rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.box_matching import candidates
from edgesplit.answers.comparison import class_values, decoded_boxes, output_of
from edgesplit.errors import UsageError
from edgesplit.lazy_import import Tensor, np

ScoreKind = Literal["probability", "margin", "entropy", "boxes", "output"]
SCORE_KINDS: tuple[ScoreKind, ...] = get_args(ScoreKind)
UNSURE = -math.inf
"""Score of an answer that is not a number: no threshold accepts it."""
SUM_TOLERANCE = 0.01
"""Values that are 0 or more and whose sum is so near to 1 are probabilities already."""


def score(kind: ScoreKind, rule: AnswerRule, outputs: Mapping[str, Tensor], output: str = "") -> float:
    """How sure an answer is; larger is surer.

    `probability`: of the most likely class. `margin`: that less the second's (Scheffer et al., IDA 2001). `entropy`:
    the negative entropy in nats of all classes. `boxes`: the least distance of any box's score to the threshold.
    `output`: the value of the output of this name, which has one element. UsageError where the rule has no such score.
    """
    if kind == "output":
        values = output_of(outputs, output)
        if values.size != 1:
            raise UsageError(f"output {output!r} has {values.size} values: a score is one number")
        value = float(values.reshape(())[()])
        return UNSURE if math.isnan(value) else value
    if (rule.kind, kind == "boxes") not in (("class", False), ("boxes", True)):
        raise UsageError(f"answers by {rule.to_text()} have no score {kind!r}: {_SCORES_OF[rule.kind]}")
    if kind == "boxes":
        return _least_margin(rule, outputs)
    likely = probabilities(rule, outputs)
    if likely is None:
        return UNSURE
    if kind == "entropy":
        positive = likely[likely > 0.0]
        return float((positive * np.log(positive)).sum())
    top = np.partition(likely, -2)[-2:] if len(likely) > 1 else np.array([0.0, likely[0]])
    return float(top[1] if kind == "probability" else top[1] - top[0])


_SCORES_OF = {
    "class": "give probability, margin, entropy or output",
    "boxes": "give boxes or output",
    "close": "name an output that is one",
}


def probabilities(rule: AnswerRule, outputs: Mapping[str, Tensor]) -> Tensor | None:
    """Probabilities [classes] of a classifier's output, 0 for classes that are never an answer; None where the output
    is not finite.

    Numbers of 8 or 16 bits are a softmax with a step of 2^-bits and a zero point at the type's least value, as TFLite's
    quantisation specification fixes it (https://ai.google.dev/edge/litert/models/quantization_spec). Floating-point
    values that are no probabilities are logits.
    """
    datatype = output_of(outputs, rule.outputs[0]).dtype
    values = class_values(rule, outputs)
    answers = values > -np.inf if rule.labels else np.ones(len(values), bool)
    if not answers.any() or not np.isfinite(values[answers]).all():
        return None
    if datatype.kind in "iu" and datatype.itemsize <= 2:
        likely = (values - np.iinfo(datatype).min) / 2.0 ** (8 * datatype.itemsize)
    elif values[answers].min() >= 0.0 and _whole(rule, outputs):
        likely = values
    else:
        likely = np.exp(values - values[answers].max())
        likely = likely / likely[answers].sum()
    return np.where(answers, likely, 0.0)


def _whole(rule: AnswerRule, outputs: Mapping[str, Tensor]) -> bool:
    """Whether the output's sum, classes that are never an answer included, is that of probabilities."""
    total = float(output_of(outputs, rule.outputs[0]).astype(np.float64).sum())
    return abs(total - 1.0) <= SUM_TOLERANCE


def _least_margin(rule: AnswerRule, outputs: Mapping[str, Tensor]) -> float:
    """Least distance of a candidate's score to the threshold: how near the answer is to having one box more or less. A
    picture without candidates has the whole threshold to the nearest box."""
    boxes = decoded_boxes(rule, outputs)
    if np.isnan(boxes.scores).any():
        return UNSURE
    if rule.labels:  # what is never an answer makes none unsure
        known = [rule.label_of(int(index)) >= 0 for index in np.unique(boxes.classes)]
        boxes = boxes.select(np.isin(boxes.classes, np.unique(boxes.classes)[known]))
    scores = candidates(boxes, rule.threshold).scores
    return float(np.abs(scores - rule.threshold).min(initial=rule.threshold))
