"""Thresholds of cascades from the answers of a family's variants on its samples; no model runs here.

Every pair of variants and every score that is tried is a promise of its own. Whichever is taken later, by its cost, its
promise holds with the asked certainty, because the probability to be wrong is divided among all that might have been
taken (Bonferroni): 1 - certainty for one pair and score, half of it for two. See docs/decisions/0069-cascades.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from edgesplit.answers.comparison import NO_LABEL
from edgesplit.answers.score import UNSURE, ScoreKind
from edgesplit.cascade import ChangedShare
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit_partitioner.bounds.binomial import check_promise, trials_needed
from edgesplit_partitioner.bounds.threshold import ThresholdChoice, choose_threshold

CLASS_SCORES: tuple[ScoreKind, ...] = ("probability", "margin", "entropy")
"""Scores of a classifier's answer."""
OUTPUT_SCORE = "output:"
"""Begins a score that is an output of the first variant, as in `output:confidence`."""
CREATE_AGAIN = "create the family again with more"


class CascadeRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A cascade as an operator asks for it."""

    changed: float
    """Share of all answers that the first variant may give and the second one would give differently, above 0 and below
    1."""
    scores: tuple[str, ...] = ()
    """Scores to try; several divide the certainty. Empty: `margin` of classifiers, `boxes` of detectors."""
    variants: tuple[str, str] | None = None
    """The first and the second one; None: every pair is tried, which divides the certainty."""
    certainty: float = 0.9
    """Probability with which samples give a promise that holds."""
    audit_share: float = 0.01
    """Share of the frames that are drawn for audit at work."""
    exit_output: str = ""
    """Of one model: its output by which its first layers answer (`planner.early_exit`); empty: of a family."""


class VariantAnswers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variant's answers to a family's samples, in their order."""

    labels: tuple[int, ...] = ()
    """What it answers; -1: nothing. Empty where answers are no classes."""
    right: tuple[bool, ...] = ()
    """Where answers are no classes: whether each is right, or the reference's."""
    scores: dict[str, tuple[float | None, ...]]
    """By kind (`CLASS_SCORES`, `boxes`, `output:NAME`), larger is surer; None: never sure."""


class FamilyAnswers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all variants of a family answer to its samples; or what a model answers to its samples by an early exit and
    by its final output, which then stands for the label."""

    answer: str
    """The answer rule on the family's outputs, as text."""
    truth: tuple[int, ...]
    """Label of each sample, or the reference's answer; empty where answers are no classes."""
    variants: dict[str, VariantAnswers]
    reference: str = ""
    """Variant that stands for the truth, as the samples have no labels; empty: they have."""
    differing: dict[str, dict[str, tuple[int, ...]]] = {}
    """Where answers are no classes: by a variant and a later one, the samples that they answer differently, by
    index."""

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.truth) or max((len(given.right) for given in self.variants.values()), default=0)

    def differs(self, first: str, second: str) -> list[bool]:
        """Of each sample, whether two variants answer it differently."""
        ours, theirs = self.variants[first], self.variants[second]
        if not self.differing:
            return [one == NO_LABEL or one != other for one, other in zip(ours.labels, theirs.labels, strict=True)]
        pair = self.differing.get(first, {}).get(second)
        indices = set(self.differing[second][first] if pair is None else pair)
        return [index in indices for index in range(self.samples)]

    def right(self, variant: str) -> list[bool]:
        """Of each sample, whether a variant's answer is right; no answer never is."""
        given = self.variants[variant]
        if not self.truth:
            return list(given.right)
        return [label == true != NO_LABEL for label, true in zip(given.labels, self.truth, strict=True)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair of variants with a score, by which the first one's answers are told to be sure."""

    first: str
    second: str
    score: str


@dataclass(frozen=True, slots=True)
class CalibratedCascade:
    """A candidate with the threshold that keeps the promise, if any does."""

    candidate: Candidate
    choice: ThresholdChoice
    right: int
    """Samples that the cascade answers right; of no use without a threshold."""
    promise: ChangedShare

    @property
    def accuracy(self) -> float:
        """Share of the samples that the cascade answers right."""
        return self.right / self.choice.frames


def check_request(request: CascadeRequest) -> None:
    """UsageError where a number is out of range, or a family's variants have no such score."""
    check_promise(request.changed, 1.0 - request.certainty)
    if not 0.0 <= request.audit_share <= 1.0:
        raise UsageError(f"an audit share of {request.audit_share:g} is not between 0 and 1: give one as in 1%")
    unknown = [score for score in request.scores if not _is_score(score)]
    if unknown:
        raise UsageError(
            f"there is no score {', '.join(unknown)}: give {', '.join(CLASS_SCORES)}, boxes or {OUTPUT_SCORE}NAME"
        )
    if request.exit_output and request.variants:
        raise UsageError(f"an early exit ({request.exit_output}) is of one model: leave the variants out")
    if len(set(request.scores)) < len(request.scores):
        raise UsageError(f"a score is named twice: {', '.join(request.scores)}")


def _is_score(score: str) -> bool:
    is_output = score.startswith(OUTPUT_SCORE) and score != OUTPUT_SCORE
    return is_output or score in CLASS_SCORES or score == "boxes"


def scores_of(request: CascadeRequest, answers: FamilyAnswers) -> tuple[str, ...]:
    """The scores to try. UsageError, which names those that there are, where no variant has one that was asked for, or
    none was and the answers have no usual one."""
    known = sorted({score for given in answers.variants.values() for score in given.scores})
    scores = request.scores or tuple(score for score in ("margin", "boxes") if score in known)
    unknown = [score for score in scores if score not in known]
    if unknown or not scores:
        asked = f"have no score {', '.join(unknown)}" if unknown else "have no usual score, so one must be named"
        there_are = f"give {', '.join(known)}" if known else "their models have no output of one number to tell it by"
        raise UsageError(f"answers by {answers.answer} {asked}: {there_are}")
    return scores


def score_fields(score: str) -> dict[str, str]:
    """The fields of `Cascade` that name a score."""
    if score.startswith(OUTPUT_SCORE):
        return {"score": "output", "score_output": score.removeprefix(OUTPUT_SCORE)}
    return {"score": score}


def check_samples(samples: int, request: CascadeRequest, tested: int) -> None:
    """InfeasibleLimits, with the number that it takes, where so few samples cannot show the promise of any of the
    `tested` pairs and scores even if no answer differs."""
    delta = 1.0 - request.certainty
    needed = trials_needed(request.changed, delta / tested)
    if samples >= needed:
        return
    text = (
        f"{samples} samples are too few to promise that at most {100 * request.changed:g} % of answers differ"
        f" ({100 * request.certainty:g} % sure): it takes at least {needed}; "
        + (
            "give the model more (edgectl profile MODEL --samples DIR --every-sample)"
            if request.exit_output
            else CREATE_AGAIN
        )
    )
    if tested > 1:
        alone = trials_needed(request.changed, delta)
        one = "one score" if request.exit_output else "one pair of variants and one score"
        text += f", or name {one}, for which it takes {alone} ({tested} are tried)"
    raise InfeasibleLimits(text)


def calibrate(
    answers: FamilyAnswers, candidates: Sequence[Candidate], request: CascadeRequest, tested: int
) -> list[CalibratedCascade]:
    """The threshold of each candidate, with promises that hold all at once, as often as was asked.

    `tested`: number of candidates among which the certainty is divided; at least all that these samples, had they been
    others, might have made one. InfeasibleLimits where there are too few samples for any.
    """
    check_samples(answers.samples, request, tested)
    return [_calibrate(answers, candidate, request, tested) for candidate in candidates]


def _calibrate(answers: FamilyAnswers, candidate: Candidate, request: CascadeRequest, tested: int) -> CalibratedCascade:
    given = answers.variants[candidate.first].scores[candidate.score]
    scores = [UNSURE if score is None else score for score in given]
    differs = answers.differs(candidate.first, candidate.second)
    choice = choose_threshold(scores, differs, request.changed, (1.0 - request.certainty) / tested)
    least = math.inf if choice.threshold is None else choice.threshold
    first, second = answers.right(candidate.first), answers.right(candidate.second)
    right = sum(ours if score >= least else theirs for score, ours, theirs in zip(scores, first, second, strict=True))
    promise = ChangedShare(
        at_most=request.changed, certainty=request.certainty, samples=choice.frames, differing=choice.changed
    )
    return CalibratedCascade(candidate, choice, right, promise)


warm_up_structs(__name__)
