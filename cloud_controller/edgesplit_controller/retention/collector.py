"""Garbage collection: deletes what the retention rules let go and nothing uses, first rows, then the files that no row
refers to any more.

Promises: killed at any moment, a collection leaves rows whose files are all there, and unused files that the next one
deletes. Each step decides and deletes its rows in one transaction, excluded from those that make a release used; files
are chosen afterwards, by the rows that are left. A file that is stored meanwhile is kept by the time at which it was
stored (`retention.holds`). One collection or backup runs at a time.

Leaves to others: telemetry and its sums, which have periods of their own (`history.rollup`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, or_, select
from sqlalchemy.orm import Session

from edgesplit.quantities import format_duration
from edgesplit.release.manifest import Manifest, decode_manifest
from edgesplit.release_store import remove_release, stored_releases
from edgesplit_controller.errors import Conflict
from edgesplit_controller.model_registry.families import families_with
from edgesplit_controller.model_registry.registry import MODELS
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.retention.holds import delete_void_holds, oldest_hold
from edgesplit_controller.retention.references import (
    bases_of_recuts,
    find_uses,
    referenced_blobs,
    rollback_releases,
)
from edgesplit_controller.retention.removal import delete_model, delete_release
from edgesplit_controller.retention.rules import RetentionRules
from edgesplit_controller.rollout.states import ENDED
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.blobs import BlobLost
from edgesplit_controller.storage.collection_lock import collection_lock
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.leases import Lease
from edgesplit_controller.storage.tables.core import Deployment, Desired, Model, ReleaseRow
from edgesplit_controller.storage.tables.replan import ProposalRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow, RolloutStageRow
from edgesplit_controller.tuf.repository import Repository

CONTROLLER = "retention"
"""Actor of removals by the rules."""
MARGIN_S = 2.0
"""Files stored in the last seconds are kept whatever the rules say: clocks of files and processes differ a little."""
ROWS_PER_STATEMENT = 500
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a release or a model version, and why."""

    name: str
    """Digest of the release, or `name@version` of the model."""
    model: str
    bytes: int
    reason: str


@dataclass(slots=True)
class CollectionResult:
    """What a collection deleted or would delete, and what it keeps."""

    releases: list[Fate] = field(default_factory=list)
    models: list[Fate] = field(default_factory=list)
    kept: list[Fate] = field(default_factory=list)
    """Releases that stay."""
    rollouts: int = 0
    proposals: int = 0
    unlisted: int = 0
    """Releases removed from the signed lists."""
    blobs: int = 0
    blob_bytes: int = 0
    exported: int = 0
    """Releases in the folder of the offload server."""
    exported_bytes: int = 0
    database_bytes: int = 0
    waiting: int = 0
    """Blobs that nothing refers to and that were stored too lately."""
    waiting_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Decision:
    """What the rules let go, by the rows of one transaction."""

    releases: Sequence[tuple[ReleaseRow, Fate]]
    models: Sequence[tuple[Model, Fate]]
    kept: Sequence[Fate]


class Collector:
    """The garbage collection of one installation."""

    def __init__(
        self, database: Database, blobs: Blobs, releases: ReleaseBuilder, repository: Repository, *,
        offload_releases: Path, rules: RetentionRules, now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._database = database
        self._blobs = blobs
        self._releases = releases
        self._repository = repository
        self._offload_releases = offload_releases
        self._rules = rules
        self._now = now

    @property
    def rules(self) -> RetentionRules:
        """The rules in force."""
        return self._rules

    def with_rules(self, rules: RetentionRules) -> Collector:
        """This collector under other rules."""
        other = copy.copy(self)
        other._rules = rules
        return other

    def preview(self) -> CollectionResult:
        """What `collect` would delete now, and what it would keep."""
        result = CollectionResult()
        with self._database.read() as session:
            before = self._stored_before(session)
            decision = self._decide(session, before, self._sizes())
            self._record(decision, result)
            result.rollouts, result.proposals = len(self._old_rollouts(session)), len(self._old_proposals(session))
            going = {row.digest for row, _ in decision.releases}
            kept = self._blobs_in_use(session, going, {model.id for model, _ in decision.models})
            rows = set(self._known_releases()) - going
        self._sweep_blobs(kept, before, result, lambda _: True)
        for digest in set(stored_releases(self._offload_releases)) - rows:
            self._count_exported(digest, result)
        listed = {*self._repository.recuts(), *(self._repository.releases() if self._repository.signs_releases else ())}
        result.unlisted = len(listed - rows)
        return result

    def collect(self) -> CollectionResult:
        """Delete what the rules let go. Busy if another collection or a backup runs."""
        result = CollectionResult()
        with collection_lock(self._database) as lock:
            with self._writing(lock) as session:
                delete_void_holds(session)
                before = self._stored_before(session)
                result.rollouts = _delete_rollouts(session, self._old_rollouts(session))
                result.proposals = _delete_by_id(session, ProposalRow, self._old_proposals(session))
            sizes = self._sizes()
            with self._writing(lock) as session:
                decision = self._decide(session, before, sizes)
                for row, fate in decision.releases:
                    delete_release(session, row.digest, fate.model, self._now(), CONTROLLER)
                for model, _ in decision.models:
                    delete_model(session, model, self._now(), CONTROLLER)
                self._record(decision, result)
            self._releases.forget(row.digest for row, _ in decision.releases)
            result.unlisted = len(self._repository.unlist(self._known_releases, before))
            self._delete_exported(lock, result)
            with self._database.read() as session:
                kept = self._blobs_in_use(session)
            self._sweep_blobs(
                kept, before, result, lambda sha256: lock.held() and self._blobs.delete_stored_before(sha256, before)
            )
            result.database_bytes = self._database.compact()
        log.info(
            "collected %d releases, %d blobs of %d bytes, %d rollouts", len(result.releases), result.blobs,
            result.blob_bytes, result.rollouts,
        )  # fmt: skip
        return result

    @contextmanager
    def _writing(self, lock: Lease) -> Iterator[Session]:
        """A write transaction that commits only while this process has the lock."""
        lock.held()
        with self._database.write() as session:
            lock.check(session)
            yield session

    def _stored_before(self, session: Session) -> float:
        """Unix time before which a file must have been stored to be deleted."""
        before, held = self._now() - max(self._rules.unused_s, MARGIN_S), oldest_hold(session)
        return before if held is None else min(before, held - MARGIN_S)

    def _known_releases(self) -> list[str]:
        with self._database.read() as session:
            return list(session.scalars(select(ReleaseRow.digest)))

    def _blobs_in_use(
        self, session: Session, without_releases: set[str] | None = None, without_models: set[int] | None = None
    ) -> set[str]:
        # A blob that cannot be read ends the collection here: what it refers to is not known, so nothing is unused.
        return referenced_blobs(
            session, self._manifest, self._blobs.get, without_releases or set(), without_models or set()
        )

    # Which releases and models

    def _sizes(self) -> dict[str, int]:
        """Bytes of the chunks of each release, by digest; 0 where its manifest is lost."""
        return {digest: self._size(digest) for digest in self._known_releases()}

    def _size(self, digest: str) -> int:
        try:
            return sum(self._manifest(digest).chunk_list().values())
        except BlobLost:
            return 0

    def _manifest(self, digest: str) -> Manifest:
        """A release's manifest, whether its row was removed meanwhile or not."""
        try:
            return decode_manifest(self._blobs.get(digest))
        except BlobLost as error:
            raise Conflict(
                f"no blob was deleted, because the manifest of release {digest[:16]} is lost and so it is not known"
                f" which files it needs ({error}): restore a backup, or `edgectl release remove {digest[:16]}`"
            ) from error

    def _decide(self, session: Session, before: float, sizes: Mapping[str, int]) -> _Decision:
        """Choose the releases and models that go, with the reasons why the others stay."""
        models = {model.id: model for model in session.scalars(select(Model))}
        rows = session.scalars(select(ReleaseRow).order_by(ReleaseRow.created.desc())).all()
        stays = self._reasons_to_stay(session, rows, models, before)
        gone: list[tuple[ReleaseRow, Fate]] = []
        kept: list[Fate] = []
        for row in rows:
            reason = stays.get(row.digest, "nothing uses it, and newer ones are kept")
            fate = Fate(row.digest, models[row.model_id].ref, sizes.get(row.digest, 0), reason)
            if row.digest in stays:
                kept.append(fate)
            else:
                gone.append((row, fate))
        used = {row.model_id for row in rows if row.digest in stays}
        expired = self._expired_models(session, used, before)
        return _Decision(gone, expired, kept)

    def _reasons_to_stay(
        self, session: Session, rows: Sequence[ReleaseRow], models: dict[int, Model], before: float
    ) -> dict[str, str]:
        """Why each release that stays does so, by digest. `rows`: all releases, newest first."""
        reasons = {digest: "; ".join(use.reason for use in uses) for digest, uses in find_uses(session).items()}
        for digest, rollout in rollback_releases(session).items():
            reasons.setdefault(digest, f"a rollback of rollout {rollout} returns devices to it")
        newest: dict[str, int] = {}
        for row in rows:
            name = models[row.model_id].name
            newest[name] = newest.get(name, 0) + 1
            if newest[name] <= self._rules.releases:
                reasons.setdefault(row.digest, f"one of the {self._rules.releases} newest releases of {name}")
            if row.created >= before:
                reasons.setdefault(row.digest, f"made less than {format_duration(self._rules.unused_s)} ago")
        for digest, base in bases_of_recuts(session).items():
            if digest in reasons:
                reasons.setdefault(base, f"release {digest[:16]} is another cut of it")
        return reasons

    def _expired_models(self, session: Session, used: set[int], before: float) -> list[tuple[Model, Fate]]:
        """Model versions beyond the newest ones that the rules keep, without a release that stays and in no family."""
        expired: list[tuple[Model, Fate]] = []
        newer: dict[str, int] = {}
        query = select(Model).where(MODELS).order_by(Model.name, Model.version.desc())
        for model in session.scalars(query) if self._rules.versions else ():
            newer[model.name] = newer.get(model.name, 0) + 1
            is_old = newer[model.name] > self._rules.versions and model.created < before
            if is_old and model.id not in used and not families_with(session, [model]):
                reason = f"older than the {self._rules.versions} newest versions, and no device runs it"
                expired.append((model, Fate(model.ref, model.ref, model.bytes, reason)))
        return expired

    @staticmethod
    def _record(decision: _Decision, result: CollectionResult) -> None:
        result.releases = [fate for _, fate in decision.releases]
        result.models = [fate for _, fate in decision.models]
        result.kept = list(decision.kept)

    # History

    def _old_rollouts(self, session: Session) -> list[int]:
        """Rollouts and deployments that ended too long ago. One that still governs a device stays, and the newest one,
        because no number is used twice."""
        oldest = self._now() - self._rules.history_s
        newest = session.scalar(select(func.max(Deployment.id)))
        ended = RolloutRow.state.in_(ENDED) & (RolloutRow.ended < oldest)
        query = (
            select(Deployment.id)
            .outerjoin(RolloutRow, RolloutRow.id == Deployment.id)
            .where(or_(ended, RolloutRow.id.is_(None) & (Deployment.created < oldest)))
            .where(Deployment.id.not_in(select(Desired.deployment)), Deployment.id != newest)
        )
        return list(session.scalars(query.order_by(Deployment.id)))

    def _old_proposals(self, session: Session) -> list[int]:
        """Proposals that were decided too long ago."""
        oldest = self._now() - self._rules.history_s
        return list(session.scalars(select(ProposalRow.id).where(ProposalRow.decided < oldest)))

    # Files

    def _delete_exported(self, lock: Lease, result: CollectionResult) -> None:
        """Delete releases without a row from the offload server's folder."""
        for digest in set(stored_releases(self._offload_releases)) - set(self._known_releases()):
            # In a transaction: a release is written there after its row, so none can come back meanwhile.
            with self._writing(lock) as session:
                if session.get(ReleaseRow, digest) is None:
                    self._count_exported(digest, result)
                    remove_release(self._offload_releases, digest)

    def _count_exported(self, digest: str, result: CollectionResult) -> None:
        files = (self._offload_releases / digest).rglob("*")
        result.exported += 1
        result.exported_bytes += sum(file.stat().st_size for file in files if file.is_file())

    def _sweep_blobs(
        self, kept: set[str], before: float, result: CollectionResult, delete_blob: Callable[[str], bool]
    ) -> None:
        """Delete and count the blobs that are not kept and were stored before that time; count the younger ones."""
        for blob in self._blobs.list_blobs():
            if blob.sha256 in kept:
                continue
            if blob.stored < before and delete_blob(blob.sha256):
                result.blobs, result.blob_bytes = result.blobs + 1, result.blob_bytes + blob.bytes
            else:
                result.waiting, result.waiting_bytes = result.waiting + 1, result.waiting_bytes + blob.bytes


def _delete_rollouts(session: Session, numbers: Sequence[int]) -> int:
    _delete_where(session, RolloutDeviceRow.rollout, numbers)
    _delete_where(session, RolloutStageRow.rollout, numbers)
    _delete_by_id(session, RolloutRow, numbers)
    return _delete_by_id(session, Deployment, numbers)


def _delete_by_id(session: Session, table: type[RolloutRow | Deployment | ProposalRow], numbers: Sequence[int]) -> int:
    _delete_where(session, table.id, numbers)
    return len(numbers)


def _delete_where(session: Session, column: Any, numbers: Sequence[int]) -> None:
    for at in range(0, len(numbers), ROWS_PER_STATEMENT):
        chosen = delete(column.class_).where(column.in_(numbers[at : at + ROWS_PER_STATEMENT]))
        session.execute(chosen.execution_options(synchronize_session=False))
