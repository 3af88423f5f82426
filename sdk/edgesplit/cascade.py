"""A cascade: two variants of a family, of which the second is asked where the first is unsure, and what it promises.

The first variant's local row answers. Where the score of its answer is below the threshold the request is escalated:
the second, more accurate variant is asked, by any of its rows. See docs/decisions/0069-cascades.md.

An early exit is a cascade within one model: its first layers answer by an output of their own, and where they are
unsure the same request goes on behind them. See docs/decisions/0070-early-exits.md.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from edgesplit.msgspec_warmup import warm_up_structs

MOST_SCORE: Final = 1e15
"""No score that is reported is larger; as a threshold it says that no answer is sure."""
EXIT, WHOLE = "exit", "whole"
"""`Cascade.first` and `Cascade.second` of an early exit."""


class ChangedShare(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on the share of answers that differ from those of the unchanged model, found on samples."""

    at_most: float
    """Upper bound of the share."""
    certainty: float
    """Probability with which samples give a bound that holds."""
    samples: int
    """Number of samples that the bound was found on, none of which chose anything."""
    differing: int
    """Of these, those whose answer differs."""

    @property
    def text(self) -> str:
        """For people."""
        # rounded up, so that the text never promises more than the bound
        percent = f"{math.ceil(1000 * self.at_most - 1e-9) / 10:g}"
        return f"at most {percent} % of answers differ ({100 * self.certainty:g} % sure, {self.samples} samples)"


class Cascade(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which variant answers first, when the second is asked, and the share of answers that this may change."""

    first: str
    """Variant whose local row answers first."""
    second: str
    """Variant that is asked where the first one is unsure."""
    answer: str
    """The answer rule as text (`edgesplit.answers.answer_rule`), on the family's outputs. Labels are the variants' own
    (`ReleaseVariant.labels`)."""
    score: str
    """How sure an answer is: a kind of `edgesplit.answers.score`."""
    score_output: str = ""
    """Of the kind `output`: the first variant's tensor that is the score. It is no part of the answer."""
    threshold: float
    """Answers with at least this score are given."""
    changed: ChangedShare
    """The promise: of all answers at most the share `at_most` is given by the first variant and differs from the second
    one's. `at_most` is what the operator allowed."""
    escalated: float
    """Share of the confirming samples whose score is below the threshold."""
    accuracy: float = 0.0
    """Share of right answers of the cascade as a whole among the family's labelled samples, by which a floor is kept;
    0: not known, then the first variant's own counts."""
    audit_share: float = 0.01
    """Probability with which a frame is drawn, so that a sure answer to it is compared with the second variant's."""
    exit_output: str = ""
    """Of an early exit: the tensor by which the model's first layers answer. It is no output of the release; its
    values are given as the release's only one. Empty: a cascade of two variants."""


def format_score(score: float) -> str:
    """A score with three digits; with more where it would seem to be 1, the most that a probability can be."""
    return f"{score:.6g}" if f"{score:.3g}" == "1" else f"{score:.3g}"


def score_text(cascade: Cascade) -> str:
    """What tells how sure an answer is, for people."""
    texts = {"boxes": "least margin of a box", "output": f"output {cascade.score_output}"}
    return texts.get(cascade.score, cascade.score)


def cascade_problem(cascade: Cascade) -> str:
    """What is wrong with the numbers of a cascade, in words; empty where nothing is."""
    shares = (cascade.escalated, cascade.audit_share, cascade.accuracy)
    if not abs(cascade.threshold) <= MOST_SCORE:  # nor NaN
        return f"a threshold of {cascade.threshold} is not a number from {-MOST_SCORE:g} to {MOST_SCORE:g}"
    if not all(0.0 <= share <= 1.0 for share in shares):
        return f"shares of {shares} are not between 0 and 1"
    promise = cascade.changed
    if not (0.0 < promise.at_most < 1.0 and 0.0 < promise.certainty < 1.0):
        return f"at most {promise.at_most}, {promise.certainty} sure: both lie between 0 and 1"
    if (cascade.score == "output") != bool(cascade.score_output):
        return f"score {cascade.score!r} with the output {cascade.score_output!r}: only the score `output` has one"
    if not 0 <= promise.differing <= promise.samples:
        return f"{promise.differing} of {promise.samples} samples differ"
    return ""


warm_up_structs(__name__)
