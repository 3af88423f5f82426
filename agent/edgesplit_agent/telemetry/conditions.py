"""Conditions that the agent reports of itself, with telemetry: who floods its endpoint or its gateway's server, a
revocation list that has expired, and streams and cascades whose answers changed too often. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgesplit.http1.admission import Refusals, flooding_clients, sum_refusals
from edgesplit.mqtt.messages import (
    CASCADE_CHANGED,
    ENDPOINT_FLOODED,
    GATEWAY_FLOODED,
    LIST_EXPIRED,
    REPEATS_CHANGED,
    ReportedCondition,
)

MAX_TEXT_CHARS = 200


def reported_conditions(
    endpoints: Iterable[Refusals],
    gateway_flood: str = "",
    list_problem: str = "",
    repeat_alarms: Sequence[str] = (),
    cascade_alarms: Sequence[str] = (),
) -> tuple[ReportedCondition, ...]:
    """The conditions that hold now: `endpoints` are the recent refusals of the local endpoint's servers,
    `gateway_flood` and `list_problem` what is wrong with a gateway's server; empty for nothing. `repeat_alarms`: the
    alarms of streams that repeat answers; `cascade_alarms`: those of cascades."""
    floods = flooding_clients(sum_refusals(endpoints))
    worst = max(floods, key=floods.__getitem__, default="")
    texts = {
        ENDPOINT_FLOODED: flood_text(worst, *floods[worst]) if worst else "",
        GATEWAY_FLOODED: gateway_flood,
        LIST_EXPIRED: list_problem,
        REPEATS_CHANGED: repeat_alarms[0] if repeat_alarms else "",
        CASCADE_CHANGED: cascade_alarms[0] if cascade_alarms else "",
    }
    return tuple(ReportedCondition(kind, text[:MAX_TEXT_CHARS]) for kind, text in texts.items() if text)


def flood_text(client: str, refused: int, reasons: str) -> str:
    """One flood in words."""
    return f"{client} was refused {refused} times in two minutes: {reasons}"
