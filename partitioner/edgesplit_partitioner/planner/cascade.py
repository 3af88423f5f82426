"""Prices of cascades: what a request costs where a first variant answers and a second one is asked if it is unsure.

The first variant's local row runs for every request. A share of them, the escalated ones, is asked of a row of the
second variant afterwards: seconds add up. Frames that are drawn for audit run it too, when the answer is given already,
so they count in joules, bytes and runs of the server, and not in seconds. Latency is a mixture of two distributions,
whose p95 is found exactly over all moments of the links.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from edgesplit import plan as plan_table
from edgesplit.cascade import Cascade
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.plan import Conditions, Link, Power, Row
from edgesplit.quantities import format_percentage
from edgesplit_partitioner.arrays import TIE
from edgesplit_partitioner.bounds.binomial import lower_share
from edgesplit_partitioner.formulation.objectives import Objective
from edgesplit_partitioner.formulation.tiers import P95, TierLink
from edgesplit_partitioner.planner.cascade_calibration import (
    CalibratedCascade,
    Candidate,
    CascadeRequest,
    FamilyAnswers,
    calibrate,
    check_request,
    score_fields,
    scores_of,
)
from edgesplit_partitioner.planner.tail_latency import mean_s, quantile_s


class RequestFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one request costs in the mean."""

    seconds: float
    p95_s: float
    joules: float | None
    """On the device; None where its layers' are not known."""
    up_bytes: float
    """Over the first link."""
    down_bytes: float
    server_runs: float
    """Requests that anything beyond the device works on, per frame."""
    slowest_stage_s: float
    """Of a stream: seconds per frame of its slowest stage."""


class WayToAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A way to answer, with how often it is right and what it costs."""

    name: str
    accuracy: float
    figures: RequestFigures
    value: float
    """Of the objective, minimised."""


class TriedCascade(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of variants with a score, as it was tried."""

    first: str
    second: str
    score: str
    stays: float
    """Share of the samples that the first variant answers."""
    changed: int
    """Samples of these that the second one answers differently."""
    accuracy: float
    seconds: float
    value: float
    refused: str = ""
    """Why it may not be taken; empty where it may."""


class PlannedCascade(msgspec.Struct, frozen=True, kw_only=True):
    """The cascade that was chosen, beside the row that the family would choose without it."""

    cascade: Cascade
    first_row: str
    second_row: str
    way: WayToAnswer
    least_accuracy: float
    """Lower bound of its accuracy, or of its agreement: the second variant's, less the share of answers that may differ
    from it."""
    sure_s: float
    """Mean seconds of a request that the first variant answers."""
    escalated_s: float
    """Mean seconds of a request that is escalated."""
    alone: WayToAnswer
    """The row that the family chooses without a cascade."""
    gain: float
    """How many times more that row costs, by the objective."""
    text: str
    """What stays and what is promised, as a sentence."""
    escalation: str
    """Where an unsure frame goes, as a sentence."""
    gain_text: str
    """Whether it gains on the planned link, as a sentence."""
    tested: int
    """Pairs and scores among which the certainty was divided."""
    tried: tuple[TriedCascade, ...]


@dataclass(frozen=True)
class PlannedLinks:
    """The links that rows are priced on."""

    planned: tuple[Link, ...]
    moments: tuple[TierLink, ...]
    """The same links with all their moments."""


@dataclass(frozen=True)
class FamilyChoices:
    """What a family's plan leaves to choose a cascade from. Rows have their names in the family's table."""

    name: str
    firsts: Mapping[str, Row]
    """By variant, its local row; also of variants below the floor."""
    seconds: Mapping[str, tuple[Row, ...]]
    """By variant above the floor, its rows."""
    left_out: Mapping[str, str]
    """Variants that have no rows, or are below the floor, with the reason."""
    accuracies: Mapping[str, float]
    """Of every variant of the family."""
    links: PlannedLinks
    objective: Objective
    by_accuracy: bool
    """The most accurate second variant is taken, and of several firsts that of least cost."""
    power: Power | None
    deadline_s: float
    """0: none."""
    least_accuracy: float
    alone: Row
    """The row that the family chooses without a cascade."""


def figures_of(row: Row, links: PlannedLinks, power: Power | None) -> RequestFigures:
    """What a request costs that this row alone answers."""
    now = Conditions(link=links.planned[0])
    seconds = plan_table.latency_s(row, now)
    return RequestFigures(
        seconds=mean_s(row, seconds, links.planned, links.moments),
        p95_s=quantile_s(row, seconds, links.planned, links.moments, P95),
        joules=None if power is None else plan_table.energy_j(row, now, power),
        up_bytes=float(row.up_bytes), down_bytes=float(row.down_bytes), server_runs=float(not row.is_local),
        slowest_stage_s=plan_table.slowest_stage_s(row, now),
    )  # fmt: skip


def cascade_figures(
    first: Row, second: Row, escalated: float, audit_share: float, links: PlannedLinks, power: Power | None
) -> RequestFigures:
    """What a request costs in the mean where `first`, a local row, answers, and the share `escalated` of the requests
    is asked of `second` afterwards."""
    now = Conditions(link=links.planned[0])
    own, other = figures_of(first, links, power), figures_of(second, links, power)
    runs = escalated + audit_share * (1.0 - escalated)
    joules = None if own.joules is None or other.joules is None else own.joules + runs * other.joules
    stages = itertools.zip_longest(plan_table.stages_s(first, now), plan_table.stages_s(second, now), fillvalue=0.0)
    return RequestFigures(
        seconds=own.seconds + escalated * other.seconds, p95_s=_p95_s(own.seconds, second, escalated, links),
        joules=joules, up_bytes=runs * other.up_bytes, down_bytes=runs * other.down_bytes,
        server_runs=runs * other.server_runs, slowest_stage_s=max(ours + runs * theirs for ours, theirs in stages),
    )  # fmt: skip


def _p95_s(first_s: float, second: Row, escalated: float, links: PlannedLinks) -> float:
    """The p95 of the mixture: `first_s` for those that stay, which are the fastest, and `first_s` more than the second
    row's for those that are escalated."""
    # P(latency <= first_s + t) = 1 - escalated + escalated * P(second <= t), which is to reach the p95.
    if 1.0 - escalated >= P95 * (1.0 - TIE):
        return first_s
    fraction = 1.0 - (1.0 - P95) / escalated
    seconds = plan_table.latency_s(second, Conditions(link=links.planned[0]))
    return first_s + quantile_s(second, seconds, links.planned, links.moments, fraction)


def value_of(objective: Objective, figures: RequestFigures) -> float:
    """The objective: seconds, joules, or their weighted sum; of a stream, seconds of the slowest stage."""
    return (
        objective.latency * figures.seconds
        + objective.latency_p95 * figures.p95_s
        + objective.energy * (figures.joules or 0.0)
        + objective.throughput * figures.slowest_stage_s
    )


def choose_cascade(choices: FamilyChoices, answers: FamilyAnswers, request: CascadeRequest) -> PlannedCascade:
    """The cascade of least expected cost that keeps the promise, the deadline and the floor.

    UsageError for what cannot be asked of this family; InfeasibleLimits where no cascade keeps all of them, with the
    reason of each.
    """
    check_request(request)
    if request.exit_output:
        raise UsageError(
            f"{choices.name} is a family, and an early exit ({request.exit_output}) is of one model: plan a variant"
        )
    pairs, tested = _named_pair(choices, request) if request.variants else _all_pairs(choices)
    scores = scores_of(request, answers)
    candidates = [
        Candidate(first, second, score)
        for first, second in pairs for score in scores if score in answers.variants[first].scores
    ]  # fmt: skip
    if not candidates:
        raise UsageError(f"{' and '.join(dict(pairs))} cannot answer first, without an output for {', '.join(scores)}")
    tested *= len(scores)
    priced = [
        _price(choices, calibrated, request) for calibrated in calibrate(answers, candidates, request, tested)
    ]  # fmt: skip
    tried = tuple(one.tried for one in priced)
    allowed = [one for one in priced if not one.tried.refused]
    if not allowed:
        reasons = [f"{one.first}, {one.second} by {one.score}: {one.refused}" for one in tried]
        raise InfeasibleLimits(f"family {choices.name}: no cascade: {'; '.join(reasons)}")
    chosen = min(allowed, key=lambda one: _order(choices, one.tried))
    return _planned(choices, chosen, answers, request, tested, tried)


@dataclass(frozen=True)
class _Priced:
    """A candidate with its rows and costs."""

    calibrated: CalibratedCascade
    first: Row
    second: Row
    figures: RequestFigures
    tried: TriedCascade


def _order(choices: FamilyChoices, tried: TriedCascade) -> tuple[float, float]:
    """The lowest is taken."""
    return (-choices.accuracies[tried.second] if choices.by_accuracy else 0.0, tried.value)


def _named_pair(choices: FamilyChoices, request: CascadeRequest) -> tuple[list[tuple[str, str]], int]:
    """The pair that was asked for."""
    assert request.variants is not None
    first, second = request.variants
    for name in (first, second):
        if name not in choices.accuracies:
            raise UsageError(f"{choices.name} has no variant {name}, only {', '.join(choices.accuracies)}")
    if choices.accuracies[second] <= choices.accuracies[first]:
        raise UsageError(
            f"{second} ({choices.accuracies[second]:.1%}) is not more accurate than {first}"
            f" ({choices.accuracies[first]:.1%}): a cascade asks the more accurate one second"
        )
    if first not in choices.firsts:
        raise InfeasibleLimits(
            f"{first} has no row on the device alone{_because(choices, first)}: it cannot be the first of a cascade"
        )
    if second not in choices.seconds:
        raise InfeasibleLimits(f"{second} cannot be the second of a cascade{_because(choices, second)}")
    return [(first, second)], 1


def _because(choices: FamilyChoices, variant: str) -> str:
    reason = choices.left_out.get(variant)
    return f" ({reason})" if reason else ""


def _all_pairs(choices: FamilyChoices) -> tuple[list[tuple[str, str]], int]:
    """The pairs that may be tried, and how many there are before samples are asked: which of two comes first is decided
    by their seconds on the device alone, so that no sample chooses what is tested."""
    local_s = {
        name: choices.firsts[name].device_s if name in choices.firsts else math.inf for name in choices.accuracies
    }
    ordered = sorted(local_s, key=lambda name: local_s[name])
    possible = [pair for pair in itertools.combinations(ordered, 2) if pair[0] in choices.firsts]
    pairs = [
        (first, second) for first, second in possible
        if second in choices.seconds and choices.accuracies[second] > choices.accuracies[first]
    ]  # fmt: skip
    if not pairs:
        left_out = "; ".join(f"{name}: {reason}" for name, reason in choices.left_out.items())
        raise UsageError(
            f"family {choices.name}: no variant is more accurate than one that is faster on the device alone, so"
            f" there is nothing to ask second{f' (left out: {left_out})' if left_out else ''}"
        )
    return pairs, len(possible)


def _price(choices: FamilyChoices, calibrated: CalibratedCascade, request: CascadeRequest) -> _Priced:
    """A candidate's costs, and why it may not be taken."""
    candidate, choice = calibrated.candidate, calibrated.choice
    first = choices.firsts[candidate.first]
    second = _second_row(choices, first, choices.seconds[candidate.second])
    escalated = 1.0 - choice.stay_share
    figures = cascade_figures(first, second, escalated, request.audit_share, choices.links, choices.power)
    slowest_s = max(figures.p95_s, _escalated_s(choices, first, second) if escalated else 0.0)
    refused = ""
    if choice.threshold is None:
        refused = (
            "no frame stays here: even the surest answers do not show that at most"
            f" {format_percentage(request.changed)} of answers differ ({format_percentage(request.certainty)} sure,"
            f" {choice.frames} samples)"
        )
    elif choices.deadline_s and slowest_s > choices.deadline_s * (1 + TIE):
        refused = f"a request takes up to {slowest_s * 1e3:.3g} ms, the deadline is {choices.deadline_s * 1e3:g} ms"
    elif calibrated.accuracy < choices.least_accuracy:
        refused = f"its accuracy of {calibrated.accuracy:.1%} is below the floor of {choices.least_accuracy:.1%}"
    tried = TriedCascade(
        first=candidate.first, second=candidate.second, score=candidate.score, stays=choice.stay_share,
        changed=choice.changed, accuracy=calibrated.accuracy, seconds=figures.seconds,
        value=value_of(choices.objective, figures), refused=refused,
    )  # fmt: skip
    return _Priced(calibrated, first, second, figures, tried)


def _second_row(choices: FamilyChoices, first: Row, rows: Sequence[Row]) -> Row:
    """The row by which the agent asks the second variant on the planned link, with what is left of the deadline."""
    now = Conditions(link=choices.links.planned[0])
    left_s = choices.deadline_s - first.device_s if choices.deadline_s else math.inf
    in_time = [row for row in rows if plan_table.latency_s(row, now) <= left_s]
    weights = choices.objective.row_weights if in_time else {}
    row = plan_table.best_row(in_time or rows, now, weights, choices.power)
    assert row is not None
    return row


def _escalated_s(choices: FamilyChoices, first: Row, second: Row) -> float:
    """Mean seconds of a request that is escalated."""
    return sum(figures_of(row, choices.links, None).seconds for row in (first, second))


def _planned(
    choices: FamilyChoices, chosen: _Priced, answers: FamilyAnswers, request: CascadeRequest, tested: int,
    tried: tuple[TriedCascade, ...],
) -> PlannedCascade:  # fmt: skip
    """The chosen candidate beside the row that the family chooses without it."""
    calibrated, candidate = chosen.calibrated, chosen.calibrated.candidate
    choice, value = calibrated.choice, chosen.tried.value
    assert choice.threshold is not None
    alone = figures_of(choices.alone, choices.links, choices.power)
    alone_value = value_of(choices.objective, alone)
    cascade = Cascade(
        first=candidate.first, second=candidate.second, answer=answers.answer, **score_fields(candidate.score),
        threshold=choice.threshold, changed=calibrated.promise, escalated=1.0 - choice.stay_share,
        audit_share=request.audit_share, accuracy=calibrated.accuracy,
    )  # fmt: skip
    name = f"{candidate.first}, then {candidate.second}"
    least = 1.0
    if candidate.second != answers.reference:  # which agrees with itself
        right = sum(answers.right(candidate.second))
        least = lower_share(right, answers.samples, 1.0 - request.certainty)
    return PlannedCascade(
        cascade=cascade, first_row=chosen.first.name, second_row=chosen.second.name,
        way=WayToAnswer(name=name, accuracy=calibrated.accuracy, figures=chosen.figures, value=value),
        least_accuracy=max(0.0, least - request.changed),
        sure_s=chosen.first.device_s, escalated_s=_escalated_s(choices, chosen.first, chosen.second),
        alone=WayToAnswer(
            name=choices.alone.name, accuracy=choices.alone.accuracy or 0.0, figures=alone, value=alone_value
        ),
        gain=alone_value / value if value else 1.0,
        text=f"{format_percentage(choice.stay_share)} of frames stay here; {calibrated.promise.text}",
        escalation=_escalation(chosen.second),
        gain_text=gain_text(choices.objective, choices.alone.name, value, alone_value), tested=tested, tried=tried,
    )  # fmt: skip


def _escalation(second: Row) -> str:
    """Where an unsure frame goes, in words."""
    where = "runs on the device" if second.is_local else f"sends {', '.join(second.sends) or 'nothing'}"
    return f"unsure frames are asked of {second.name}, which {where}"


def gain_text(objective: Objective, row: str, value: float, alone: float) -> str:
    """Whether a cascade of this value gains on the planned link over `row`, of the value `alone`, in words."""
    if objective.energy and not (objective.latency or objective.latency_p95):
        figures = f"{value:.3g} J in the mean, {alone:.3g} J by {row} alone"
    elif objective.energy:
        figures = f"a cost of {value:.3g} in the mean, {alone:.3g} by {row} alone"
    else:
        what = "per frame of a stream" if objective.throughput else "at p95" if objective.latency_p95 else "in the mean"
        figures = f"{value * 1e3:.3g} ms {what}, {alone * 1e3:.3g} ms by {row} alone"
    if value < alone * (1 - TIE):
        return f"it gains on the planned link: {figures}, {alone / value:.2f} times as much"
    return f"it does not gain on the planned link: {figures}"


warm_up_structs(__name__)
