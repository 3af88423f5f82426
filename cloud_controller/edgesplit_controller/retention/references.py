"""What refers to releases and to blobs. Every function reads in the caller's transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit.release.manifest import Manifest, Slice
from edgesplit_controller.releases.build import blobs_of
from edgesplit_controller.rollout.states import ENDED, NOTHING
from edgesplit_controller.storage.tables.core import Desired, Device, Model, ReleaseRow, Sample
from edgesplit_controller.storage.tables.device_state import RunningRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow

MOST_NAMED = 5
"""Devices named in one sentence."""


@dataclass(frozen=True, slots=True)
class Use:
    """Why a release must stay, and how that is ended."""

    reason: str
    remedy: str


def find_uses(session: Session) -> dict[str, list[Use]]:
    """The uses of every release that must stay, by digest: what devices run or shall run, what rollouts in progress
    bring or may roll back to, and the releases that these are other cuts of."""
    uses: defaultdict[str, list[Use]] = defaultdict(list)
    desired = session.execute(select(Desired.release, Desired.model, Desired.device).order_by(Desired.device)).all()
    for (release, model), devices in _grouped(desired).items():
        ending = f"`edgectl undeploy {model} {_from(devices)}`"
        remedy = "deploy another version of the agent" if model == AGENT_MODEL else ending
        uses[release].append(Use(f"{model} is deployed to {named(devices)}", remedy))
    is_desired = {(row.release, row.model, row.device) for row in desired}
    for (release, model), devices in _grouped(_reported(session) - is_desired).items():
        verb = "reports" if len(devices) == 1 else "report"
        remedy = f"it ends when the device is online again; `edgectl device revoke {devices[0]}` gives it up"
        uses[release].append(Use(f"{named(devices)} still {verb} to run {model}", remedy))
    for number, release, previous in _rollouts_in_progress(session):
        uses[release].append(Use(f"rollout {number} brings it to devices", f"`edgectl rollout abort {number}`"))
        for other in previous:
            remedy = f"wait until it has ended: `edgectl rollout status {number}`"
            uses[other].append(Use(f"rollout {number} may roll devices back to it", remedy))
    for digest, base in bases_of_recuts(session).items():
        if digest in uses:
            uses[base].append(Use(f"release {digest[:16]} is another cut of it", uses[digest][0].remedy))
    uses.pop(NOTHING, None)
    return dict(uses)


def bases_of_recuts(session: Session) -> Mapping[str, str]:
    """The release of which each recut is another cut."""
    rows = session.execute(select(ReleaseRow.digest, ReleaseRow.options))
    return {digest: str(options["recut_of"]) for digest, options in rows if options.get("recut_of")}


def rollback_releases(session: Session) -> dict[str, int]:
    """The releases to which a rollback of the rollout that governs a device would return it, each with that rollout."""
    rows = session.execute(
        select(RolloutDeviceRow.previous, RolloutDeviceRow.rollout)
        .join(Desired, (Desired.deployment == RolloutDeviceRow.rollout) & (Desired.device == RolloutDeviceRow.device))
        .where(RolloutDeviceRow.previous.not_in(("", NOTHING)))
        .distinct()
    )
    return {row.previous: row.rollout for row in rows}


def referenced_blobs(
    session: Session, manifest_of: Callable[[str], Manifest], build_of: Callable[[str], bytes],
    without_releases: Collection[str] = (), without_models: Collection[int] = (),
) -> set[str]:  # fmt: skip
    """Digests of the blobs that rows refer to, other than those of these releases and models. `build_of` reads the
    description of an agent's build."""
    found: set[str] = set()
    for model in session.scalars(select(Model)):
        if model.id not in without_models:
            found.update(_blobs_of_model(model, build_of))
    samples = select(Sample.sha256, Sample.model_id)
    found.update(digest for digest, model_id in session.execute(samples) if model_id not in without_models)
    for digest in session.scalars(select(ReleaseRow.digest)):
        if digest not in without_releases:
            found.update((digest, *blobs_of(manifest_of(digest))))
    return found


def named(names: Sequence[str]) -> str:
    """Device names as a list for people."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _blobs_of_model(model: Model, build_of: Callable[[str], bytes]) -> Iterator[str]:
    yield from filter(None, (model.sha256, model.optimised_sha256))
    for build in model.shown.get("builds", ()):
        yield build["build"]
        described = msgspec.json.decode(build_of(build["build"]), type=Slice)
        yield from (chunk.sha256 for file in described.files for chunk in file.chunks)


def _grouped(rows: Iterable[Sequence[str]]) -> dict[tuple[str, str], list[str]]:
    """Devices by release and model, each sorted."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for release, model, device in sorted(tuple(row) for row in rows):
        groups[release, model].append(device)
    return dict(groups)


def _reported(session: Session) -> set[tuple[str, str, str]]:
    """Release, model and device of what devices that are not revoked report to run or to be about to run."""
    query = select(RunningRow.release, RunningRow.desired_release, RunningRow.model, RunningRow.device)
    query = query.join(Device, Device.name == RunningRow.device).where(Device.revoked.is_(None))
    return {
        (release, model, device)
        for running, wanted, model, device in session.execute(query)
        for release in (running, wanted)
        if release
    }


def _rollouts_in_progress(session: Session) -> Iterator[tuple[int, str, list[str]]]:
    """Number and release of each rollout that has not ended, and the releases that its devices ran before."""
    query = select(RolloutRow.id, RolloutRow.release).where(RolloutRow.state.not_in(ENDED)).order_by(RolloutRow.id)
    for number, release in session.execute(query).all():
        previous = select(RolloutDeviceRow.previous).where(
            RolloutDeviceRow.rollout == number, RolloutDeviceRow.previous.not_in(("", NOTHING))
        )
        yield number, release, list(session.scalars(previous.distinct()))


def _from(devices: Sequence[str]) -> str:
    """The option of `edgectl undeploy` that names these devices."""
    return "--all" if len(devices) > MOST_NAMED else " ".join(f"--from {name}" for name in devices)
