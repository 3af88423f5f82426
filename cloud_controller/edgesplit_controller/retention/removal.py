"""Removes models and releases: their rows, in one transaction that refuses what is in use. The files follow by garbage
collection, so that a process that is killed in between leaves unused files and never a row without its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from edgesplit.errors import UsageError
from edgesplit.identifiers import ModelRef
from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit_controller.errors import Conflict, not_found
from edgesplit_controller.model_registry.families import families_with
from edgesplit_controller.model_registry.registry import MODELS
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.retention.references import bases_of_recuts, find_uses
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Measurement, Model, ReleaseRow, Sample, SampleSetRow
from edgesplit_controller.storage.tables.device_state import DeviceBucketRow, ModelBucketRow
from edgesplit_controller.storage.tables.replan import PolicyRow, ProposalRow
from edgesplit_controller.storage.tables.retention import RemovedModelRow

SHORTEST_PREFIX = 8
"""Characters of a digest that name a release, at least."""


class Removal:
    """Removal of models and releases from one installation."""

    def __init__(self, database: Database, releases: ReleaseBuilder, *, now: Callable[[], float]) -> None:
        self._database = database
        self._releases = releases
        self._now = now

    def remove_model(self, reference: str) -> dict[str, Any]:
        """Remove every version of a model, or the one named by `name@version`, with samples, measurements, proposals
        and releases. Conflict if one of the releases is in use; then nothing is removed.

        Versions that stand in for one of these stay (`variants`): they need nothing of it, and their lineage still
        names what it was, because no number is used twice."""
        wanted = ModelRef.parse(reference)
        if wanted.name == AGENT_MODEL:
            raise UsageError(
                f"{AGENT_MODEL} is the agent itself, and no model: `edgectl release remove` removes releases"
            )
        with self._database.write() as session:
            models = _models(session, wanted)
            if families := families_with(session, models):
                raise Conflict(
                    f"model {wanted} is a variant of {', '.join(family.ref for family in families)}: remove the family"
                    f" first (edgectl family remove {families[0].ref})"
                )
            releases = _releases_of(session, models)
            _refuse_used(session, f"model {wanted}", releases)
            for model in models:
                delete_model(session, model, self._now(), "operator")
            gone = {model.ref for model in models}
            stay = [
                row.ref
                for row in session.scalars(select(Model).where(MODELS).order_by(Model.name, Model.version))
                if row.lineage and row.lineage["base"] in gone
            ]
        self._releases.forget(releases)
        return {"models": [model.ref for model in models], "releases": releases, "variants": stay}

    def remove_release(self, prefix: str) -> dict[str, Any]:
        """Remove the release whose digest begins with `prefix`, with the releases that are other cuts of it. Conflict
        if one is in use."""
        with self._database.write() as session:
            digests = session.scalars(select(ReleaseRow.digest)).all()
            matching = [digest for digest in digests if len(prefix) >= SHORTEST_PREFIX and digest.startswith(prefix)]
            if not matching and any(digest.startswith(prefix) for digest in digests):
                raise UsageError(
                    f"{prefix!r} is too short to remove a release by: write at least {SHORTEST_PREFIX} digits of it"
                )
            if not matching:
                raise not_found("release", prefix, (digest[:16] for digest in digests))
            if len(matching) > 1:
                raise UsageError(f"{len(matching)} releases begin with {prefix!r}: write more of the digest")
            bases = bases_of_recuts(session)
            matching += [digest for digest in digests if bases.get(digest) == matching[0]]
            _refuse_used(session, f"release {matching[0][:16]}", matching)
            for digest in matching:
                ref = session.get_one(Model, session.get_one(ReleaseRow, digest).model_id).ref
                delete_release(session, digest, ref, self._now(), "operator")
        self._releases.forget(matching)
        return {"models": [], "releases": matching}


def delete_release(session: Session, digest: str, model: str, now: float, who: str) -> None:
    """Delete a release that nothing uses, and the proposals about it. Deployments and rollouts keep its digest."""
    _execute(session, delete(ProposalRow).where(ProposalRow.release == digest))
    _execute(session, delete(ReleaseRow).where(ReleaseRow.digest == digest))
    record_event(session, now, who, "release.removed", digest, model=model)


def delete_model(session: Session, model: Model, now: float, who: str) -> None:
    """Delete a model version whose releases nothing uses, and with the last version the model's history and policies.
    The number of the version is never used again."""
    ref = model.ref
    for digest in _releases_of(session, [model]):
        delete_release(session, digest, ref, now, who)
    for table in (SampleSetRow, Sample, Measurement):
        _execute(session, delete(table).where(table.model_id == model.id))
    removed = session.get(RemovedModelRow, model.name)
    session.merge(RemovedModelRow(name=model.name, version=max(model.version, removed.version if removed else 0)))
    session.delete(model)
    session.flush()
    if not session.scalar(select(func.count()).where(Model.name == model.name)):
        for history in (ModelBucketRow, DeviceBucketRow, PolicyRow):
            _execute(session, delete(history).where(history.model == model.name))
    record_event(session, now, who, "model.removed", ref, sha256=model.sha256)


def _models(session: Session, wanted: ModelRef) -> Sequence[Model]:
    query = select(Model).where(Model.name == wanted.name).order_by(Model.version)
    versions = session.scalars(query.with_for_update()).all()
    if not versions:
        raise not_found("model", wanted.name, session.scalars(select(Model.name).where(MODELS).distinct()))
    models = [model for model in versions if wanted.version in (None, model.version)]
    if not models:
        raise not_found("model", str(wanted), (model.ref for model in versions))
    return models


def _releases_of(session: Session, models: Sequence[Model]) -> list[str]:
    query = select(ReleaseRow.digest).where(ReleaseRow.model_id.in_([model.id for model in models]))
    return list(session.scalars(query.order_by(ReleaseRow.created)))


def _refuse_used(session: Session, what: str, releases: Sequence[str]) -> None:
    """Conflict if one of these releases is used by something other than these releases."""
    uses = find_uses(session)
    used = [use for digest in releases for use in uses.get(digest, ())]
    if used:
        reasons = "; ".join(dict.fromkeys(use.reason for use in used))
        remedies = ", then ".join(dict.fromkeys(use.remedy for use in used))
        raise Conflict(f"{what} is in use, and nothing was removed: {reasons}. To end that: {remedies}")


def _execute(session: Session, statement: Any) -> None:
    session.execute(statement.execution_options(synchronize_session=False))
