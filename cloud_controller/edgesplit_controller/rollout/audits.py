"""The gate `changed<2%`: whether audits show that more answers change than the bound (pure).

Audits are rare, so those of all devices of the rollout that ran its release are judged together. A device can vouch for
itself only, and so it counts with at most `MOST_WEIGHT` times the audits of the median device.

Gates are judged again whenever devices have reported, so an interval for a single look would fail a good release in
time. The test here may be looked at at any time: a mixture of constant bets against the bound, as in
`edgesplit.answers.sequential`, but without its order, which sums over devices do not have. With a share of at most the
bound its capital is a non-negative supermartingale, and ever reaches 1/delta with probability at most delta (Ville,
1939). So the least share that it does not exclude is a lower bound that holds at all times together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from edgesplit.answers.sequential import bets, growth
from edgesplit.errors import UsageError
from edgesplit.release.manifest import Manifest
from edgesplit_controller.fleet.audits import AnswerAudits

UNSURE = 0.1
"""Probability with which a release whose share is the bound ever fails the gate."""
MOST_WEIGHT = 4
"""Times the audits of the median device that one device counts for at most."""


class AuditCounts(msgspec.Struct, frozen=True):
    """Audited answers of one kind, of a cascade or of still frames, and those of them that differed."""

    audited: int
    changed: int


def pooled(counts: Iterable[AuditCounts]) -> AuditCounts | None:
    """The sum over devices, each with a bounded weight; None where nothing was audited."""
    every = [count for count in counts if count.audited]
    if not every:
        return None
    ordered = sorted(count.audited for count in every)
    most = MOST_WEIGHT * ordered[(len(ordered) - 1) // 2]
    scaled = [
        count if count.audited <= most else AuditCounts(most, round(count.changed * most / count.audited))
        for count in every
    ]
    return AuditCounts(sum(count.audited for count in scaled), sum(count.changed for count in scaled))


def pooled_by_kind(devices: Sequence[AnswerAudits]) -> tuple[AuditCounts, ...]:
    """Pooled audits of the cascade, and of still frames, as far as there are any."""
    kinds = (
        pooled(_counts(AnswerAudits(cascade=device.cascade)) for device in devices if device.cascade is not None),
        pooled(_counts(AnswerAudits(still=device.still)) for device in devices if device.still is not None),
    )
    return tuple(kind for kind in kinds if kind is not None)


def _counts(sums: AnswerAudits) -> AuditCounts:
    return AuditCounts(*sums.audited[0])


def audits_needed(bound: float) -> int:
    """Audits after which a gate is judged before its time is over: as many as have one changed answer on average where
    the share is the bound; 50 for 2 %."""
    return math.ceil(1.0 / bound - 1e-9)


def is_exceeded(counts: AuditCounts, bound: float, unsure: float = UNSURE) -> bool:
    """Whether the audits show that a greater share of the answers than `bound` (between 0 and 1) changes."""
    kept = counts.audited - counts.changed
    logs = [
        counts.changed * math.log(growth(bet, bound, True)) + kept * math.log(growth(bet, bound, False))
        for bet in bets(bound)
    ]
    largest = max(logs)
    log_wealth = largest + math.log(sum(math.exp(log - largest) for log in logs) / len(logs))
    return log_wealth >= -math.log(unsure)


def check_audited(text: str, manifest: Manifest, devices: Iterable[dict[str, Any] | None]) -> None:
    """UsageError where nothing of a release is audited, so that the gate `text` would have nothing to judge by.
    `devices`: the newest telemetry of each device."""
    if any(plan.cascade is not None for plan in manifest.plans.values()):
        return
    windows = (window for telemetry in devices for window in (telemetry or {}).get("models", ()))
    if not any(window.get("still") for window in windows):
        raise UsageError(
            f"gate {text}: no answer of {manifest.model} is audited: it has no cascade (`edgectl deploy --cascade`),"
            " and none of these devices repeats answers to still frames (`edgesplit-agent run --skip-still`)"
        )
