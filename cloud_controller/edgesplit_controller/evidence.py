"""What devices told of the releases that they run, as the gates of a rollout take it.

A device's word is kept under the name that its topic carries, which is its certificate's: it can speak well of itself,
never of another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit_controller.gates import Evidence
from edgesplit_controller.rollout.states import Member, Rollout
from edgesplit_controller.truth_tables import RunningRow

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
    return evidence_of(session, [member.name for member in members], rollout.model, rollout.release)


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
