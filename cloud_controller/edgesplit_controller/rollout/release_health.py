"""What devices told of the releases that they run, as the gates of a rollout take it.

A device's word is kept under the name that its topic carries, which is its certificate's: it can speak well of itself,
never of another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit.release.agent_release import AGENT
from edgesplit_controller.rollout.gates import Evidence
from edgesplit_controller.rollout.states import Member, Rollout
from edgesplit_controller.storage.tables.device_state import RunningRow

AT_ONCE = 500
"""Devices that are asked for in one statement."""


def evidence_of(session: Session, devices: Collection[str], model: str, release: str) -> dict[str, Evidence]:
    """What is known of that release of `model` (a name without a version) on each of these devices."""
    found: dict[str, Evidence] = {}
    names = sorted(devices)
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        wanted = select(RunningRow).where(RunningRow.model == model, RunningRow.device.in_(some))
        found.update({row.device: of_row(row, release) for row in session.scalars(wanted)})
    return {name: found.get(name) or Evidence(model=model, release=release) for name in names}


def of_members(session: Session, rollout: Rollout, members: Collection[Member]) -> dict[str, Evidence]:
    """The same of a rollout's release, as its engine asks."""
    if rollout.model == AGENT:
        return _of_agents(session, rollout.release, members)
    return evidence_of(session, [member.name for member in members], rollout.model, rollout.release)


def _of_agents(session: Session, release: str, members: Collection[Member]) -> dict[str, Evidence]:
    """A version of the agent has no requests of its own: it is measured by those of every model that it serves, as it
    told them since it runs."""
    found: dict[str, list[Evidence]] = {member.name: [] for member in members}
    since = {member.name: member.ran_at for member in members}
    names = sorted(found)
    for start in range(0, len(names), AT_ONCE):
        some = RunningRow.device.in_(names[start : start + AT_ONCE])
        for row in session.scalars(select(RunningRow).where(some, RunningRow.model != AGENT)):
            if row.health and since[row.device] and (row.health_at or 0.0) > since[row.device]:
                found[row.device].append(evidence(row.model, row.health))
    return {name: together(release, every) for name, every in found.items()}


def together(release: str, every: Sequence[Evidence]) -> Evidence:
    """What several models say of the agent that serves them: counts added up, the worst of each other figure."""

    def worst(figures: Iterable[float | None]) -> float | None:
        return max((one for one in figures if one is not None), default=None)

    if not every:
        return Evidence(model=AGENT, release=release)
    return Evidence(
        model=AGENT,
        release=release,
        requests=sum(one.requests or 0 for one in every),
        failed=sum(one.failed or 0 for one in every),
        fallbacks=sum(one.fallbacks or 0 for one in every),
        latency_p95_s=worst(one.latency_p95_s for one in every),
        memory_bytes=sum(one.memory_bytes or 0 for one in every) or None,
        celsius=worst(one.celsius for one in every),
        joules=worst(one.joules for one in every),
    )


def of_row(row: RunningRow, release: str) -> Evidence:
    """What one row says of a release; nothing where it tells of another."""
    health = row.health or {}
    if health.get("release") != release:
        golden_ok = False if row.wanted == release and _golden_failed(row) else None
        return Evidence(model=row.model, release=release, golden_ok=golden_ok)
    return evidence(row.model, health)


def evidence(model: str, health: Mapping[str, Any]) -> Evidence:
    """Of one `measured.ReleaseHealth`, as it was kept: what it leaves out is nothing, or not known."""
    return Evidence(
        model=model,
        release=str(health["release"]),
        requests=int(health.get("requests", 0)),
        failed=int(health.get("failed", 0)),
        fallbacks=int(health.get("fallbacks", 0)),
        latency_p95_s=health.get("latency_p95_s"),
        memory_bytes=health.get("memory_bytes"),
        celsius=health.get("celsius"),
        joules=health.get("joules"),
        drift=health.get("drift"),
        golden_ok=health.get("golden_ok"),
        since_s=float(health.get("since_s", 0.0)),
    )


def _golden_failed(row: RunningRow) -> bool:
    """It was refused because it gave other answers than it must."""
    return row.state in ("failed", "rolled back") and "golden" in row.detail
