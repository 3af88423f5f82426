"""The gate of a variant: what must be kept, what was seen on samples, and the verdict in words.

Pure arithmetic: answers are compared elsewhere (`evaluation`). Bounds are one-sided at 1 - delta and hold for any
number of samples: Clopper and Pearson (Biometrika 26, 1934) for shares, a paired bound on the differences {-1, 0, 1}
for accuracy. They are promises about frames like the samples, drawn independently of each other and of the choice of
the variant.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgesplit.errors import UsageError
from edgesplit.quantities import format_percentage
from edgesplit.release.lineage import AccuracyInterval, VariantEvidence
from edgesplit_partitioner.bounds.binomial import check_promise, lower_share, trials_needed, upper_share
from edgesplit_partitioner.bounds.paired import mean_bounds


class GateTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a variant must keep to pass; at least one of the two is given."""

    allowed_accuracy_loss: float | None = None
    """Largest share of all answers by which accuracy may fall, as in 0.005 for 0.5 percentage points."""
    least_agreement: float | None = None
    """Least share of answers that stay as they are, as in 0.99."""
    delta: float = 0.1
    """Probability with which a bound may be wrong."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the terms are kept, in a sentence for people."""

    passed: bool
    sentence: str
    samples_needed: int = 0
    """Where there are too few samples for any variant to pass: how many confirming samples it takes; else 0."""


def check_terms(terms: GateTerms) -> None:
    """UsageError for terms that ask for nothing, or for what no number of samples can show."""
    if terms.allowed_accuracy_loss is None and terms.least_agreement is None:
        raise UsageError("say what a variant must keep: an accuracy (0.5pp) or an agreement (99%)")
    if terms.allowed_accuracy_loss is not None:
        check_promise(terms.allowed_accuracy_loss, terms.delta)
    if terms.least_agreement is not None:
        check_promise(1.0 - terms.least_agreement, terms.delta)


def samples_needed(terms: GateTerms, *, labelled: bool) -> int:
    """How many samples it takes at least to pass: as many as show the terms where not one answer changes."""
    needed = []
    if terms.least_agreement is not None:
        needed.append(trials_needed(1.0 - terms.least_agreement, terms.delta))
    if terms.allowed_accuracy_loss is not None:
        count = _pairs_needed if labelled else trials_needed
        needed.append(count(terms.allowed_accuracy_loss, terms.delta))
    return max(needed, default=0)


def _pairs_needed(allowed: float, delta: float) -> int:
    """The least number of labelled samples on which equal answers show that at most `allowed` of accuracy is lost."""
    few, enough = 0, trials_needed(allowed, delta)
    while _net_loss_at_most([0] * enough, delta) > allowed:
        few, enough = enough, 2 * enough
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if _net_loss_at_most([0] * middle, delta) <= allowed else (middle, enough)
    return enough


def _net_loss_at_most(differences: Sequence[int], delta: float) -> float:
    """Upper bound of the accuracy that is lost, at 1 - delta."""
    # The upper end of a two-sided interval at 1 - 2 delta is a one-sided bound at 1 - delta.
    return mean_bounds(differences, 2.0 * delta)[1]


def weigh(
    changed: Sequence[bool],
    base_right: Sequence[bool] = (),
    variant_right: Sequence[bool] = (),
    *,
    delta: float = 0.1,
    samples_digest: str = "",
) -> VariantEvidence:
    """The evidence in these samples: whether each one's answer changed and, where labels are known, whether the base's
    and the variant's are right."""
    count = len(changed)
    evidence = VariantEvidence(
        samples=count,
        changed=sum(changed),
        changed_at_most=upper_share(sum(changed), count, delta),
        delta=delta,
        samples_digest=samples_digest,
    )
    if not base_right or not variant_right:
        return evidence
    differences = [int(base) - int(variant) for base, variant in zip(base_right, variant_right, strict=True)]
    lost = sum(difference > 0 for difference in differences)
    return msgspec.structs.replace(
        evidence,
        right_to_wrong=lost,
        right_to_wrong_at_most=upper_share(lost, count, delta),
        wrong_to_right=sum(difference < 0 for difference in differences),
        accuracy_base=_accuracy(sum(base_right), count, delta),
        accuracy_variant=_accuracy(sum(variant_right), count, delta),
        net_loss_at_most=_net_loss_at_most(differences, delta),
    )


def judge(terms: GateTerms, evidence: VariantEvidence) -> Verdict:
    """The verdict on this evidence. Without labels an allowance of accuracy is applied to the changed answers, which
    bound the loss, and the sentence says so."""
    labelled = evidence.net_loss_at_most is not None
    needed = samples_needed(terms, labelled=labelled)
    if evidence.samples < needed:
        text = f"{evidence.samples} samples are too few to show {_terms_text(terms)}: it takes {needed}"
        return Verdict(passed=False, sentence=text, samples_needed=needed)
    passed, findings = True, []
    if terms.least_agreement is not None or not labelled:
        allowed = [1.0 - terms.least_agreement] if terms.least_agreement is not None else []
        allowed += [terms.allowed_accuracy_loss] if terms.allowed_accuracy_loss is not None and not labelled else []
        passed = evidence.changed_at_most <= min(allowed)
        findings.append(f"at most {format_percentage(evidence.changed_at_most)} of answers differ")
    if terms.allowed_accuracy_loss is not None and evidence.net_loss_at_most is not None:
        passed = passed and evidence.net_loss_at_most <= terms.allowed_accuracy_loss
        findings.append(f"accuracy falls by at most {_points(evidence.net_loss_at_most)}")
    sure = f"({format_percentage(1.0 - evidence.delta)} sure, {evidence.samples} samples)"
    sentence = f"{' and '.join(findings)} {sure}"
    if terms.allowed_accuracy_loss is not None and not labelled:
        sentence += "; without labels only agreement is measured"
    return Verdict(passed=passed, sentence=sentence if passed else f"{sentence}; allowed: {_terms_text(terms)}")


def _accuracy(right: int, count: int, delta: float) -> AccuracyInterval:
    half = delta / 2.0
    return AccuracyInterval(
        share=right / count if count else 0.0,
        at_least=lower_share(right, count, half),
        at_most=upper_share(right, count, half),
    )


def _terms_text(terms: GateTerms) -> str:
    parts = []
    if terms.least_agreement is not None:
        parts.append(f"{format_percentage(1.0 - terms.least_agreement)} of answers changed")
    if terms.allowed_accuracy_loss is not None:
        parts.append(f"{_points(terms.allowed_accuracy_loss)} of accuracy lost")
    return " and ".join(parts)


def _points(share: float) -> str:
    return f"{100.0 * share:.3g} percentage points"
