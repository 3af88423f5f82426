"""The metadata that a device trusts, and its rules over time: no rollback, no freeze, no installation after expiry.

Contains no I/O. Bytes and the time come in as arguments; results are immutable, and `trust.store` makes them durable
before it uses them. The role of this module is that of python-tuf's `TrustedMetadataSet`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import msgspec
from tuf.api.metadata import Root, Snapshot, Targets, Timestamp

from edgesplit.errors import Expired, LinkError, TrustError
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.release.manifest import Statement
from edgesplit.trust import verification
from edgesplit.trust.verification import PLANNER, PLANNER_FILE, Proof, TrustChain

_log = logging.getLogger(__name__)


class VersionMark(msgspec.Struct, frozen=True):
    """Highest version seen of some metadata, and the keys that were trusted to sign it then.

    A different set of keys starts a new count: so an operator can recover after an attacker with a stolen key has
    signed the highest possible version (TUF 5.3.11).
    """

    version: int
    keys: tuple[str, ...]

    def is_rollback(self, version: int, keys: Collection[str]) -> bool:
        """True if this version is lower than the one seen, signed by the same keys (rollback)."""
        return set(keys) == set(self.keys) and version < self.version


@dataclass(frozen=True, slots=True)
class TrustedMetadata:
    """Verified metadata of one refresh."""

    chain: TrustChain
    proof: Proof
    marks: Mapping[str, VersionMark]
    """Version and signing keys of each role."""
    expires_at: float | None = None
    """Earliest expiry in Unix seconds. The planner's own expiry only concerns recuts and is checked there. None for
    metadata that was stored by an earlier process: it proves what is installed, and allows no installation."""

    @classmethod
    def from_proof(cls, proof: Proof, bootstrap_root: bytes) -> TrustedMetadata:
        """Verify metadata that an earlier process stored; TrustError where a step fails."""
        chain = verification.verify_chain(proof, bootstrap_root)
        marks = _marks(chain.root, chain.root, chain.targets)
        if chain.planner is not None:
            keys = chain.targets.get_delegated_role(PLANNER).keyids
            marks[PLANNER] = VersionMark(chain.planner.version, tuple(sorted(keys)))
        return cls(chain, proof, marks)

    @classmethod
    def from_refresh(cls, proof: Proof, timestamp: bytes, snapshot: bytes, bootstrap_root: bytes) -> TrustedMetadata:
        """Verify freshly fetched metadata; TrustError where a step fails."""
        stored = cls.from_proof(proof, bootstrap_root)
        root, targets = stored.chain.root, stored.chain.targets
        online = (
            verification.parse_verified(timestamp, Timestamp, root, "timestamp.json"),
            verification.parse_verified(snapshot, Snapshot, root, "snapshot.json"),
        )
        expires_at = min(role.expires.timestamp() for role in (root, *online, targets))
        return replace(stored, marks={**stored.marks, **_marks(root, *online)}, expires_at=expires_at)

    def without_planner(self) -> TrustedMetadata:
        """The same metadata without the planner's: releases that the release key signed stay installable."""
        return replace(
            self,
            chain=replace(self.chain, planner=None),
            proof={name: raw for name, raw in self.proof.items() if name != PLANNER_FILE},
            marks={role: mark for role, mark in self.marks.items() if role != PLANNER},
        )

    def require_fresh(self, now: float) -> None:
        """Raise unless the metadata was refreshed by this process (LinkError) and has not expired (Expired)."""
        if self.expires_at is None:
            raise LinkError("metadata was not refreshed since the start: refresh before installing")
        if self.expires_at <= now:
            raise Expired("metadata has expired: what runs is kept, nothing is installed")

    def proof_of(self, release: str, now: float) -> dict[str, bytes]:
        """The metadata files that prove this release; TrustError for a recut whose planner's metadata has expired."""
        proof = dict(self.without_planner().proof)
        if self.chain.planner is not None and self.chain.is_recut(release):
            if self.chain.planner.expires.timestamp() <= now:
                raise TrustError("the planner's metadata has expired: what runs is kept, no recut is installed")
            proof[PLANNER_FILE] = self.proof[PLANNER_FILE]
        return proof


class RollbackRecord(msgspec.Struct, frozen=True):
    """Persistent rollback protection, independent of TUF's cache."""

    roles: dict[str, VersionMark] = {}
    statements: dict[str, VersionMark] = {}
    """By device."""

    def refuse_rollback(self, marks: Mapping[str, VersionMark]) -> None:
        """TrustError on a rollback: of the root, whatever its keys, or of another role under the same keys."""
        for role, mark in marks.items():
            seen = self.roles.get(role)
            if seen is None:
                continue
            if seen.is_rollback(mark.version, mark.keys) or (role == Root.type and mark.version < seen.version):
                raise TrustError(f"{role} version {mark.version} is older than {seen.version}, which was seen before")

    def accept(self, refreshed: TrustedMetadata) -> tuple[TrustedMetadata, RollbackRecord]:
        """Refreshed metadata as it may be trusted, and the record that must be durable before it is; TrustError on a
        rollback. A rollback of the planner alone removes the planner: a problem of its key must not block releases that
        the release key signed."""
        mark, seen = refreshed.marks.get(PLANNER), self.roles.get(PLANNER)
        if mark is not None and seen is not None and seen.is_rollback(mark.version, mark.keys):
            _log.warning("planner version %d is older than %d, which was seen: no recut", mark.version, seen.version)
            refreshed = refreshed.without_planner()
        self.refuse_rollback(refreshed.marks)
        return refreshed, RollbackRecord({**self.roles, **refreshed.marks}, self.statements)

    def accept_statement(
        self, raw: bytes, device: str, trusted: TrustedMetadata, now: float, *, for_install: bool
    ) -> tuple[Statement, RollbackRecord]:
        """Verify a statement: for `device`, and not older than the newest accepted one; with `for_install`, neither it
        nor the metadata has expired. Returns it and the record that must be durable before it is acted upon."""
        targets = trusted.chain.targets
        statement = verification.verify_statement(raw, device, targets)
        mark = VersionMark(statement.counter, tuple(sorted(targets.get_delegated_role(verification.DIRECTOR).keyids)))
        seen = self.statements.get(device)
        if seen is not None and seen.is_rollback(mark.version, mark.keys):
            raise TrustError(f"statement {mark.version} is older than {seen.version}, which was accepted before")
        if for_install:
            trusted.require_fresh(now)
            if statement.expires <= now:
                raise Expired(f"statement {statement.counter} has expired: nothing is installed")
        return statement, RollbackRecord(self.roles, {**self.statements, device: mark})


def _marks(root: Root, *roles: Root | Timestamp | Snapshot | Targets) -> dict[str, VersionMark]:
    keys = {role.type: tuple(sorted(root.get_delegated_role(role.type).keyids)) for role in roles}
    return {role.type: VersionMark(role.version, keys[role.type]) for role in roles}


warm_up_structs(__name__)
