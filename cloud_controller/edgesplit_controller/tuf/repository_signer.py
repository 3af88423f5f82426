"""Rules of the TUF repository: which metadata changes with a publication, its versions, expiries and signatures.

Reads and writes no metadata file: `PublishedMetadata` comes in, a `Publication` goes out, which `tuf.metadata_store`
writes. Versions are max(stored + 1, Unix time), so that a restored backup never publishes an older version than devices
have seen; root versions grow by one, as TUF demands (5.3.5). Each role is signed with those of its keys that are stored
here. Where the release key is stored elsewhere, what it must sign is prepared here, signed there, and checked before it
is published; snapshot and timestamp continue without it.

Leaves to others: changes of the keys (`tuf.rotation`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final, TypeVar

from securesystemslib.signer import Key
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import DelegatedRole, Delegations, Metadata, MetaFile, Root, Snapshot, Targets, Timestamp
from tuf.api.serialization.json import JSONSerializer

from edgesplit import identifiers
from edgesplit.errors import TrustError, UsageError
from edgesplit.mqtt import messages
from edgesplit.mqtt.remote_inference import InferenceJob
from edgesplit.release.manifest import Signature, Signed, Statement
from edgesplit.trust.verification import DIRECTOR, PLANNER, PLANNER_FILE, TARGETS_FILE, parse_metadata
from edgesplit_controller.errors import Conflict
from edgesplit_controller.tuf.key_change import LIFE, TOP_LEVEL, check_targets_step, next_targets
from edgesplit_controller.tuf.key_folder import KeyFolder

RENEW_AT: Final = 0.5
"""Metadata is signed again when this part of its validity has passed."""
AHEAD_S: Final = 86_400.0
"""A version or counter further ahead of the clock than this was not issued here: both follow the Unix time."""
KEPT_VERSIONS: Final = 16
"""Versions of snapshot and targets kept for devices in the middle of a refresh."""
_Role = TypeVar("_Role", Root, Timestamp, Snapshot, Targets)


def next_version(stored: int, now: float) -> int:
    """The version or counter after `stored`: at least one higher, and at least the Unix time."""
    return max(stored + 1, int(now))


def is_ahead(version: int, now: float) -> bool:
    """Whether this version or counter is further ahead of the clock than any that was issued here."""
    return version > now + AHEAD_S


@dataclass(frozen=True, slots=True)
class PublishedMetadata:
    """The metadata that devices receive now."""

    root: Root
    versions: Mapping[str, Sequence[int]]
    """Versions of each role on disk, published or not, oldest first."""
    targets: Targets
    raw_targets: bytes
    planner: Targets
    snapshot: Snapshot | None
    """None, like the timestamp, before the first publication."""
    timestamp: Timestamp | None

    def expiries(self) -> dict[str, tuple[int, datetime]]:
        """Version and expiry of each role's metadata."""
        parts = (self.root, self.targets, self.snapshot, self.timestamp)
        by_role = {part.type: (part.version, part.expires) for part in parts if part is not None}
        return {**by_role, PLANNER: (self.planner.version, self.planner.expires)}

    def listed_files(self) -> list[str]:
        """Names of the snapshot and of the files that it lists."""
        if self.snapshot is None:
            return []
        listed = [f"{meta.version}.{name}" for name, meta in self.snapshot.meta.items()]
        return [f"{self.snapshot.version}.snapshot.json", *listed]


@dataclass(frozen=True, slots=True)
class Publication:
    """Metadata files to write."""

    files: Mapping[str, bytes]
    """By name, in the order in which they must become durable."""
    obsolete: Sequence[str] = ()
    """Names of files to delete after that."""


class RepositorySigner:
    """Signs the metadata of one repository with the keys stored on this controller."""

    def __init__(self, keys: KeyFolder, now: Callable[[], float]) -> None:
        self._keys = keys
        self.now = now

    def expiry(self, role: str) -> datetime:
        """Expiry of metadata of that role that is made now."""
        return datetime.fromtimestamp(self.now(), timezone.utc) + LIFE[role]

    # The first publication

    def first_root(self) -> bytes:
        """Version 1 of the root; generates the keys of all its roles. UsageError if the root key was moved elsewhere:
        no device would accept another version 1."""
        if not self._keys.is_empty and not self._keys.has_key("root"):
            raise UsageError(
                "the repository has no root, and its key is stored elsewhere: restore the folder from a backup"
            )
        root = Root(version=1, expires=self.expiry("root"), consistent_snapshot=True)
        for role in TOP_LEVEL:
            for signer in self._keys.signers(role):
                root.add_key(signer.public_key, role)
        return self._sign(root, _keyids("root", [root]))

    def unpublished(self, root: Root, versions: Mapping[str, Sequence[int]]) -> PublishedMetadata:
        """The state before the first publication: an empty list of releases with the delegations."""
        targets = Targets(delegations=self._delegations())
        return PublishedMetadata(root, versions, targets, b"", Targets(), None, None)

    def _delegations(self) -> Delegations:
        """Delegations to the director, whose key signs statements but no target, and to the planner, who lists recuts.
        The planner's is terminating: no other role is searched for a recut (TUF 5.6.7)."""
        signers = {role: self._keys.signers(role) for role in (DIRECTOR, PLANNER)}
        keys = {signer.public_key.keyid: signer.public_key for of_role in signers.values() for signer in of_role}
        ids = {role: sorted(signer.public_key.keyid for signer in of_role) for role, of_role in signers.items()}
        # The director lists no target. It is not terminating, so it does not end a device's search (TUF 5.6.7).
        director = DelegatedRole(DIRECTOR, ids[DIRECTOR], 1, terminating=False, paths=["director/*"])
        planner = DelegatedRole(PLANNER, ids[PLANNER], 1, terminating=True, paths=["recuts/*"])
        return Delegations(keys, roles={DIRECTOR: director, PLANNER: planner})

    # Which keys are stored here

    def holds(self, role: str, root: Root) -> bool:
        """Whether enough of that role's keys are stored here to reach its threshold."""
        trusted = root.roles[role]
        return len(self._keys.held_among(role, trusted.keyids)) >= trusted.threshold

    def has_online_keys(self, root: Root) -> bool:
        """Whether snapshot and timestamp can be signed."""
        return self.holds("snapshot", root) and self.holds("timestamp", root)

    # What follows what is published

    def next_targets(
        self, published: PublishedMetadata, manifests: Iterable[bytes] = (), *,
        delegates: Mapping[str, Key] | None = None, is_rekeyed: bool = False,
    ) -> Targets:  # fmt: skip
        """The list of releases that follows, with these releases added, and these keys for its delegated roles;
        `is_rekeyed` where its own key changes."""
        version = self._next_version(published, "targets", published.targets.version, is_rekeyed=is_rekeyed)
        return next_targets(published.targets, manifests, version, self.expiry("targets"), delegates)

    def publish(
        self, published: PublishedMetadata, *, targets: Targets | None = None, planner: Targets | None = None
    ) -> Publication:
        """Sign these targets, then the snapshot and the timestamp that lead to them. What is None stays as it is
        published, and its key is not needed."""
        root = published.root
        if targets is None:
            return self._publication(published, published.targets, published.raw_targets, [root], planner)
        return self._publication(published, targets, self._sign(targets, _keyids("targets", [root])), [root], planner)

    def publish_again(self, published: PublishedMetadata) -> Publication:
        """Sign the published metadata again, as far as its keys are stored here."""
        targets = self.next_targets(published) if self.holds("targets", published.root) else None
        return self.publish(published, targets=targets, planner=published.planner)

    def publish_signed(
        self, published: PublishedMetadata, raw_targets: bytes, following: Root | None = None
    ) -> Publication:
        """Publish targets that are signed already, under the present root and the `following` one: what leads to them
        is signed with the keys of both, as far as they are stored here."""
        targets = parse_metadata(raw_targets, Targets, "the list of releases").signed
        roots = [published.root, *([following] if following is not None else [])]
        return self._publication(published, targets, raw_targets, roots, published.planner)

    def check_signed(self, published: PublishedMetadata, raw_targets: bytes, manifests: Sequence[bytes]) -> None:
        """Verify targets metadata that was signed elsewhere: the present one with these releases added. TrustError for
        anything else, Conflict if another was published meanwhile."""
        metadata = parse_metadata(raw_targets, Targets, "what was signed")
        # Checked before the signature: metadata prepared before another publication is a conflict, not an attack.
        if metadata.signed.version <= published.targets.version:
            raise Conflict("another list of releases was published meanwhile: try again")
        try:
            published.root.verify_delegate("targets", metadata.signed_bytes, metadata.signatures)
        except RepositoryError as error:
            raise TrustError(
                f"the list of releases is not signed by the release key ({error}); "
                "`edgectl keys show` tells which key that is"
            ) from error
        check_targets_step(published.targets, metadata.signed, manifests, self.now())

    def renewal(self, published: PublishedMetadata) -> Publication | None:
        """Sign again what has passed half its validity; None if nothing has. Metadata whose key is stored elsewhere is
        left alone."""
        snapshot, timestamp = published.snapshot, published.timestamp
        if snapshot is None or timestamp is None or not self.has_online_keys(published.root):
            return None
        targets_due = self.holds("targets", published.root) and self._is_due(published.targets, "targets")
        if targets_due or self._is_due(published.planner, PLANNER) or self._is_due(snapshot, "snapshot"):
            return self.publish_again(published)
        return self.renew_timestamp(published) if self._is_due(timestamp, "timestamp") else None

    def renew_timestamp(self, published: PublishedMetadata) -> Publication:
        """Sign the timestamp again, for the same snapshot."""
        assert published.timestamp is not None
        raw = self._sign_timestamp(published, published.timestamp.snapshot_meta, [published.root])
        return Publication({"timestamp.json": raw})

    def sign_for_device(self, content: Statement | InferenceJob) -> bytes:
        """Sign a statement or a remote inference with the director's keys; returns the encoded message."""
        identifiers.device_name(content.device)
        payload = messages.encode(content)
        # Signed also by a key that will replace the present one, so that it is valid before and after.
        signatures = [signer.sign(payload) for signer in self._keys.signers(DIRECTOR)]
        return messages.encode(Signed(payload, tuple(Signature(part.keyid, part.signature) for part in signatures)))

    def _publication(
        self, published: PublishedMetadata, targets: Targets, raw_targets: bytes, roots: Sequence[Root],
        planner: Targets | None,
    ) -> Publication:  # fmt: skip
        """The files that lead devices to these targets. The keys of snapshot and timestamp are always stored here. The
        planner's keys are those that `targets` delegates to."""
        # The order of writes is the inverse of the order in which devices read (TUF 5.4 to 5.6): targets, planner,
        # snapshot, and last the timestamp, whose replacement is the commit. Until then devices follow the old chain.
        files = {f"{targets.version}.{TARGETS_FILE}": raw_targets} if raw_targets != published.raw_targets else {}
        meta = dict(published.snapshot.meta) if published.snapshot is not None else {}
        meta[TARGETS_FILE] = MetaFile.from_data(targets.version, raw_targets, ["sha256"])
        if planner is not None and self._keys.held_among(PLANNER, delegated_keys(targets, PLANNER)):
            following = self._next_planner(published, planner, targets, roots)
            raw = self._sign(following, delegated_keys(targets, PLANNER), PLANNER)
            files[f"{following.version}.{PLANNER_FILE}"] = raw
            meta[PLANNER_FILE] = MetaFile.from_data(following.version, raw, ["sha256"])
        # TUF 5.5.5: a device refuses a snapshot in which some targets metadata has a lower version than before, and
        # 5.3.11: it forgets its snapshot and timestamp when their keys were rotated (fast-forward recovery). Versions
        # may therefore begin anew only under a new key.
        version = self._next_version(published, "snapshot", 0, is_rekeyed=_is_rekeyed("snapshot", roots))
        snapshot = Snapshot(version, None, self.expiry("snapshot"), meta)
        raw_snapshot = self._sign(snapshot, _keyids("snapshot", roots))
        files[f"{version}.snapshot.json"] = raw_snapshot
        snapshot_meta = MetaFile.from_data(version, raw_snapshot, ["sha256"])
        files["timestamp.json"] = self._sign_timestamp(published, snapshot_meta, roots)
        current = {"targets": targets.version, "snapshot": version}
        if PLANNER_FILE in meta:
            current[PLANNER] = meta[PLANNER_FILE].version
        obsolete = [name for role, of_role in current.items() for name in self._obsolete(published, role, of_role)]
        return Publication(files, obsolete)

    def _obsolete(self, published: PublishedMetadata, role: str, current: int) -> list[str]:
        """Files of a role that no device needs once `current` is published: old ones, and those counted ahead of the
        clock, above which a new key began anew."""
        known = sorted({*published.versions[role], current})
        old = [version for version in known if version <= current][:-KEPT_VERSIONS]
        ahead = [version for version in known if version > current and is_ahead(version, self.now())]
        return [f"{version}.{role}.json" for version in (*old, *ahead)]

    def _next_planner(
        self, published: PublishedMetadata, planner: Targets, targets: Targets, roots: Sequence[Root]
    ) -> Targets:
        """The planner's list of recuts that follows the published one, with the content of `planner`."""
        # A version that a thief counted ahead is dropped only if the snapshot key changes as well: under the same
        # snapshot key devices refuse a snapshot that lists an older version of any targets metadata (TUF 5.5.5).
        is_rekeyed = published.snapshot is not None and set(delegated_keys(targets, PLANNER)) != set(
            delegated_keys(published.targets, PLANNER)
        )
        is_anew = is_rekeyed and _is_rekeyed("snapshot", roots)
        version = self._next_version(published, PLANNER, published.planner.version, is_rekeyed=is_anew)
        return Targets(version, None, self.expiry(PLANNER), planner.targets, planner.delegations)

    def _sign_timestamp(self, published: PublishedMetadata, snapshot: MetaFile, roots: Sequence[Root]) -> bytes:
        # TUF 5.4.3: a timestamp's version never falls under one key. Under a new key it may (5.3.11).
        stored = published.timestamp.version if published.timestamp is not None else 0
        if _is_rekeyed("timestamp", roots) and is_ahead(stored, self.now()):
            stored = 0
        timestamp = Timestamp(next_version(stored, self.now()), None, self.expiry("timestamp"), snapshot)
        return self._sign(timestamp, _keyids("timestamp", roots))

    def _sign(self, part: _Role, keyids: Collection[str], role: str = "") -> bytes:
        """Sign with those of these keys of the role (by default the metadata's type) that are stored here."""
        role = role or part.type
        metadata = Metadata(part)
        # During a key change `keyids` contains old and new keys: the metadata verifies under both roots.
        for signer in self._keys.signers_among(role, keyids):
            metadata.sign(signer, append=True)
        if not metadata.signatures:
            raise UsageError(
                f"no {role} key lies in {self._keys.folder}: restore the folder from a backup, "
                f"or make a new one with `edgectl keys rotate {role}`"
            )
        return metadata.to_bytes(JSONSerializer(compact=True))

    def _next_version(self, published: PublishedMetadata, role: str, stored: int, *, is_rekeyed: bool) -> int:
        """The next version of a role; `is_rekeyed` after a change of its key: versions that a thief of the old key
        counted ahead are ignored."""
        # Files on disk count too: a crash between writing a version and the timestamp leaves one that is not
        # published, and a version must never be written twice with different content (consistent snapshots, TUF 6.2).
        now = self.now()
        known = [stored, *published.versions[role]]
        if is_rekeyed:
            known = [0, *(version for version in known if not is_ahead(version, now))]
        return next_version(max(known), now)

    def _is_due(self, part: Targets | Snapshot | Timestamp, role: str) -> bool:
        left_s = part.expires.timestamp() - self.now()
        return left_s < LIFE[role].total_seconds() * (1 - RENEW_AT)


def delegated_keys(targets: Targets, role: str) -> list[str]:
    """Ids of the keys to which these targets delegate that role."""
    roles = targets.delegations.roles if targets.delegations is not None else None
    return list(roles[role].keyids) if roles and role in roles else []


def _keyids(role: str, roots: Sequence[Root]) -> set[str]:
    """Ids of the keys that these roots list for the role."""
    return {keyid for root in roots for keyid in root.roles[role].keyids}


def _is_rekeyed(role: str, roots: Sequence[Root]) -> bool:
    """Whether the role's keys differ between these roots."""
    return len({tuple(sorted(root.roles[role].keyids)) for root in roots}) > 1
