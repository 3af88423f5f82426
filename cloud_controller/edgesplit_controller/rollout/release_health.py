"""Evidence for the gates of a rollout, from the release health that devices report.

A report is stored under the device name in its topic, which is the name in its certificate: a device can vouch for
itself, but not for another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit_controller.fleet.audits import AnswerAudits, sums_of
from edgesplit_controller.rollout.audits import pooled_by_kind
from edgesplit_controller.rollout.gates import Evidence, gate_of_audits
from edgesplit_controller.rollout.states import Member, Rollout
from edgesplit_controller.storage.database import batched
from edgesplit_controller.storage.tables.device_state import RunningRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow


def evidence_by_device(session: Session, devices: Collection[str], model: str, release: str) -> dict[str, Evidence]:
    """Evidence on that release of `model` (a name without a version), by device."""
    evidences: dict[str, Evidence] = {}
    for batch in batched(devices):
        query = select(RunningRow).where(RunningRow.model == model, RunningRow.device.in_(batch))
        evidences.update({row.device: evidence_from_row(row, release) for row in session.scalars(query)})
    return {name: evidences.get(name) or Evidence(model=model, release=release) for name in sorted(devices)}


def evidence_of_members(session: Session, rollout: Rollout, members: Collection[Member]) -> dict[str, Evidence]:
    """Evidence on a rollout's release, by device. The `EvidenceSource` of the rollout engine."""
    if rollout.model == AGENT_MODEL:
        return _evidence_of_agents(session, rollout.release, members)
    evidences = evidence_by_device(session, [member.name for member in members], rollout.model, rollout.release)
    if gate_of_audits(rollout.terms.gates) is None:
        return evidences
    audits = pooled_by_kind(_audits_of_rollout(session, rollout))
    return {name: replace(evidence, audits=audits) for name, evidence in evidences.items()}


def _audits_of_rollout(session: Session, rollout: Rollout) -> list[AnswerAudits]:
    """What each device of a rollout counted of its release."""
    query = (
        select(RunningRow.audits)
        .join(RolloutDeviceRow, RolloutDeviceRow.device == RunningRow.device)
        .where(RolloutDeviceRow.rollout == rollout.id, RunningRow.model == rollout.model)
    )
    found = (sums_of(stored, rollout.release) for stored in session.scalars(query))
    return [sums for sums in found if sums is not None]


def _evidence_of_agents(session: Session, release: str, members: Collection[Member]) -> dict[str, Evidence]:
    """Evidence on a release of the agent. It has no requests of its own: it is measured by those of every model that it
    serves, as reported since it runs."""
    evidences: dict[str, list[Evidence]] = {member.name: [] for member in members}
    since = {member.name: member.ran_at for member in members}
    for batch in batched(evidences):
        query = select(RunningRow).where(RunningRow.device.in_(batch), RunningRow.model != AGENT_MODEL)
        for row in session.scalars(query):
            if row.health and since[row.device] and (row.health_at or 0.0) > since[row.device]:
                evidences[row.device].append(evidence_from_health(row.model, row.health))
    return {name: combined(release, every) for name, every in evidences.items()}


def combined(release: str, evidences: Sequence[Evidence]) -> Evidence:
    """Evidence on an agent from the models it serves: counts are added, of other figures the worst is taken."""

    def worst(figures: Iterable[float | None]) -> float | None:
        return max((figure for figure in figures if figure is not None), default=None)

    if not evidences:
        return Evidence(model=AGENT_MODEL, release=release)
    return Evidence(
        model=AGENT_MODEL,
        release=release,
        requests=sum(model.requests or 0 for model in evidences),
        failed=sum(model.failed or 0 for model in evidences),
        fallbacks=sum(model.fallbacks or 0 for model in evidences),
        latency_p95_s=worst(model.latency_p95_s for model in evidences),
        memory_bytes=sum(model.memory_bytes or 0 for model in evidences) or None,
        celsius=worst(model.celsius for model in evidences),
        joules=worst(model.joules for model in evidences),
    )


def evidence_from_row(row: RunningRow, release: str) -> Evidence:
    """Evidence on a release from a row; empty if the row is about another release."""
    health = row.health or {}
    if health.get("release") != release:
        golden_ok = False if row.desired_release == release and _golden_failed(row) else None
        return Evidence(model=row.model, release=release, golden_ok=golden_ok)
    return evidence_from_health(row.model, health)


def evidence_from_health(model: str, health: Mapping[str, Any]) -> Evidence:
    """Evidence from one stored `telemetry.ReleaseHealth`; a missing count is 0, a missing figure is unknown."""
    return Evidence(
        model=model, release=str(health["release"]), requests=int(health.get("requests", 0)),
        failed=int(health.get("failed", 0)), fallbacks=int(health.get("fallbacks", 0)),
        latency_p95_s=health.get("latency_p95_s"), memory_bytes=health.get("memory_bytes"),
        celsius=health.get("celsius"), joules=health.get("joules"), drift=health.get("drift"),
        golden_ok=health.get("golden_ok"),
        inaccuracy=_missing_share(health, "golden_right", "golden_labelled"),
        disagreement=_missing_share(health, "golden_agreeing", "golden_compared"),
        active_s=float(health.get("active_s", 0.0)),
    )  # fmt: skip


def _missing_share(health: Mapping[str, Any], part: str, whole: str) -> float | None:
    """The share of a count that is not in its part; None where nothing was counted."""
    count = int(health.get(whole, 0))
    return 1.0 - int(health.get(part, 0)) / count if count else None


def _golden_failed(row: RunningRow) -> bool:
    """Whether the device refused the release because its golden outputs differ."""
    return row.state in ("failed", "rolled back") and "golden" in row.detail
