"""Plans of models with an early exit: the first layers answer by an output of their own, and the rest is asked where
they are unsure.

All that the exit depends on runs on the device in every row, and for every request. Where the share p of the requests
goes on, a row costs the exit's part plus p times the rest in the mean, in seconds, joules and any weighted sum of both.
The exit's part is the same in every row, so for every p above 0 the best row is the best row of whole requests under
that limit, which `planner.plan` finds with its proof. For a p95 and for the slowest stage of a stream this does not
hold, and these objectives are refused. See docs/decisions/0070-early-exits.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from edgesplit.cascade import EXIT, WHOLE, Cascade
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.plan import Row
from edgesplit.quantities import format_percentage
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.formulation.constraints import Limits
from edgesplit_partitioner.formulation.objectives import parse_objective
from edgesplit_partitioner.formulation.tiers import Links
from edgesplit_partitioner.planner.cascade import (
    PlannedLinks,
    RequestFigures,
    cascade_figures,
    figures_of,
    gain_text,
    value_of,
)
from edgesplit_partitioner.planner.cascade_calibration import (
    CalibratedCascade,
    Candidate,
    CascadeRequest,
    FamilyAnswers,
    calibrate,
    check_request,
    scores_of,
)
from edgesplit_partitioner.planner.planner import PlanResult, plan


class ExitPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model that an early exit depends on."""

    layers: int
    of_layers: int
    """All layers of the model."""
    seconds: float
    """On the device."""


class TriedScore(msgspec.Struct, frozen=True, kw_only=True):
    """A score as it was tried."""

    score: str
    stays: float
    """Share of the samples that the exit answers."""
    changed: int
    """Samples of these that the whole model answers differently."""


class PlannedExit(msgspec.Struct, frozen=True, kw_only=True):
    """An early exit with its price, beside the row that the model would be run by without it."""

    cascade: Cascade
    part: ExitPart
    row: str
    """The row by which unsure requests go on."""
    figures: RequestFigures
    """What a request costs in the mean."""
    value: float
    """Of the objective, minimised."""
    alone_row: str
    alone: RequestFigures
    """By the row without an exit."""
    alone_value: float
    gain: float
    """How many times more that row costs, by the objective."""
    text: str
    """What stays and what is promised, as a sentence."""
    escalation: str
    """How an unsure request goes on, as a sentence."""
    gain_text: str
    """Whether it gains on the planned link, as a sentence."""
    tried: tuple[TriedScore, ...]
    """The scores among which the certainty was divided."""


@dataclass(frozen=True)
class ExitPlan:
    """The plan of a model with an early exit."""

    result: PlanResult
    """Its table has the exit, and computes it on the device in every row."""
    planned: PlannedExit


class LayerTensors(Protocol):
    """What a layer is called, reads and writes: a layer of a graph or of costs."""

    @property
    def name(self) -> str:
        """Unique in its model."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of tensors."""
        ...

    @property
    def writes(self) -> Iterable[str]:
        """Names of tensors."""
        ...


def layers_for(layers: Sequence[LayerTensors], output: str) -> frozenset[str]:
    """Names of the layers that a tensor depends on, the one that writes it included; `layers` are in an order in which
    they can run."""
    needed, found = {output}, set[str]()
    for layer in reversed(layers):
        if not needed.isdisjoint(layer.writes):
            found.add(layer.name)
            needed.update(layer.reads)
    return frozenset(found)


def check_exit(layers: Sequence[LayerTensors], outputs: Sequence[str], exit_output: str) -> str:
    """The final output of a model with these outputs. UsageError, which says what is wrong and what to give, where
    `exit_output` is no early exit of it."""
    if exit_output not in outputs:
        raise UsageError(f"the model has no output {exit_output[:80]!r} to exit by, only {', '.join(outputs)}")
    others = [name for name in outputs if name != exit_output]
    if len(others) != 1:
        named = ", ".join(others) or "none"
        raise UsageError(
            f"an early answer by {exit_output} must stand for the whole answer, which is one output; beside it the"
            f" model has {len(others)}: {named}"
        )
    if not layers_for(layers, exit_output):
        raise UsageError(f"{exit_output} is an input of the model, which nothing computes: it cannot be an early exit")
    saved = layers_for(layers, others[0]) - layers_for(layers, exit_output)
    if not saved:
        raise UsageError(
            f"{exit_output} needs every layer that {others[0]} needs, so an exit there saves nothing: name an output of"
            " earlier layers"
        )
    return others[0]


def on_device(costs: Costs, exit_output: str) -> Costs:
    """The costs with all layers that the exit depends on held on the device."""
    held, device = layers_for(costs.layers, exit_output), costs.tiers[0]
    unable = [
        layer.name for layer in costs.layers if layer.name in held and device not in (layer.tiers or layer.seconds)
    ]
    if unable:
        raise InfeasibleLimits(f"{exit_output} cannot be an early exit: layer {unable[0]!r} cannot run on the device")
    layers = tuple(
        msgspec.structs.replace(layer, tiers=(device,)) if layer.name in held else layer for layer in costs.layers
    )
    return msgspec.structs.replace(costs, layers=layers)


def plan_exit(
    costs: Costs,
    links: Links,
    request: CascadeRequest,
    answers: FamilyAnswers,
    *,
    objective: str | Mapping[str, float] = "latency",
    limits: Limits | Mapping[str, Any] | None = None,
    codecs: Iterable[str] | None = None,
) -> ExitPlan:
    """The plan of a model with the early exit `request.exit_output`, and its price.

    `answers` are what exit and whole model (`EXIT`, `WHOLE`) answer to the model's samples. Limits are kept by the
    requests that go on, so by all. UsageError for what cannot be asked; InfeasibleLimits where the samples are too few,
    show that no answer may stay, or no cut keeps the limits.
    """
    check_request(request)
    check_exit(costs.layers, costs.outputs, request.exit_output)
    wanted = parse_objective(objective)
    if wanted.latency_p95 or wanted.throughput:
        raise UsageError(
            f"objective {wanted.name} cannot be planned with an early exit: the best cut would depend on the share of"
            " requests that go on; give latency or energy"
        )
    candidates = [Candidate(EXIT, WHOLE, score) for score in scores_of(request, answers)]
    calibrated = calibrate(answers, candidates, request, len(candidates))
    chosen = max(calibrated, key=lambda one: one.choice.stay_share)
    if chosen.choice.threshold is None:
        raise InfeasibleLimits(
            f"no frame stays at the exit {request.exit_output}: even the surest answers do not show that at most"
            f" {format_percentage(request.changed)} of answers differ ({format_percentage(request.certainty)} sure,"
            f" {chosen.choice.frames} samples)"
        )
    allowed = tuple(codecs) if codecs else None
    alone = plan(costs, links, objective=objective, limits=limits, codecs=allowed)
    held = on_device(costs, request.exit_output)
    result = plan(held, links, objective=objective, limits=limits, codecs=allowed)
    planned = _planned(result, alone, chosen, calibrated, request, answers.answer)
    return ExitPlan(replace(result, cascade=planned.cascade), planned)


def rows_at_exit(costs: Costs, exit_output: str, row: Row) -> tuple[Row, Row]:
    """What every request costs up to the exit, and what one that goes on by `row` costs more, as two rows."""
    held, device = layers_for(costs.layers, exit_output), costs.tiers[0]
    own = [layer for layer in costs.layers if layer.name in held]
    seconds = sum(layer.seconds[device] for layer in own)
    first = Row(name=EXIT, device_s=seconds)
    rest = msgspec.structs.replace(row, device_s=max(0.0, row.device_s - seconds))
    if row.device_joules is None:
        return first, rest
    joules = sum(layer.joules.get(device, 0.0) for layer in own)
    return (
        msgspec.structs.replace(first, device_joules=joules),
        msgspec.structs.replace(rest, device_joules=max(0.0, row.device_joules - joules)),
    )


def _planned(
    result: PlanResult, alone: PlanResult, chosen: CalibratedCascade, calibrated: Sequence[CalibratedCascade],
    request: CascadeRequest, answer: str,
) -> PlannedExit:  # fmt: skip
    """The exit with its price."""
    costs, choice = result.costs, chosen.choice
    assert choice.threshold is not None
    cascade = Cascade(
        first=EXIT, second=WHOLE, answer=answer, score=chosen.candidate.score, threshold=choice.threshold,
        changed=chosen.promise, escalated=1.0 - choice.stay_share, audit_share=request.audit_share,
        exit_output=request.exit_output,
    )  # fmt: skip
    links, power = PlannedLinks(result.links, result.tier_links), result.table.power
    first, rest = rows_at_exit(costs, request.exit_output, result.row)
    figures = cascade_figures(first, rest, cascade.escalated, request.audit_share, links, power)
    alone_figures = figures_of(alone.row, links, power)
    value, alone_value = (value_of(result.parsed_objective, each) for each in (figures, alone_figures))
    held = layers_for(costs.layers, request.exit_output)
    return PlannedExit(
        cascade=cascade, part=ExitPart(layers=len(held), of_layers=len(costs.layers), seconds=first.device_s),
        row=result.row.name, figures=figures, value=value, alone_row=alone.row.name, alone=alone_figures,
        alone_value=alone_value, gain=alone_value / value if value else 1.0,
        text=f"{format_percentage(choice.stay_share)} of frames stay here; {chosen.promise.text}",
        escalation=_escalation(rest),
        gain_text=gain_text(result.parsed_objective, alone.row.name, value, alone_value),
        tried=tuple(
            TriedScore(score=one.candidate.score, stays=one.choice.stay_share, changed=one.choice.changed)
            for one in calibrated
        ),
    )  # fmt: skip


def _escalation(rest: Row) -> str:
    """How an unsure request goes on, in words."""
    where = "runs on the device" if rest.is_local else f"sends {', '.join(rest.sends) or 'nothing'}"
    return f"unsure requests go on behind the exit by row {rest.name}, which {where}; nothing is computed twice"


warm_up_structs(__name__)
