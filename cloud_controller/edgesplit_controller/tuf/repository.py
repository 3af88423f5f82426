"""The TUF repository on disk, and the director's signature.

Promises: metadata is written durably, the timestamp last, so that a crash at any write leaves the repository as it was
before. Nothing is kept in memory between calls, so several processes may share the folder. Versions are max(stored + 1,
Unix time), so that a restored backup never publishes an older version than devices have seen; root versions grow by
one, as TUF demands (5.3.5). Each role is signed with those of its keys that are stored here. Where the release key is
stored elsewhere, what it must sign is prepared here, signed there, and checked before it is published; snapshot and
timestamp continue without it.

Leaves to others: changes of the keys (`tuf.rotation`).

    <folder>/keys/         signers, see `tuf.key_folder`
    <folder>/metadata/     N.root.json, N.targets.json, N.planner.json, N.snapshot.json, timestamp.json
    <folder>/targets/      releases/<digest>.json, recuts/<digest>.json, anatomies/<SHA-256>.json
    <folder>/pending.json  a key change that is not finished
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TypeVar

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (
    DelegatedRole,
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)
from tuf.api.serialization.json import JSONSerializer

from edgesplit import identifiers
from edgesplit.atomic_files import write_durably
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.mqtt import messages
from edgesplit.release import manifest as release
from edgesplit.release.fingerprint import Fingerprint, decode_fingerprint, fingerprint_file
from edgesplit.release.recut import check_recut
from edgesplit.trust.store import (
    BASE_FILE,
    DIRECTOR,
    FINGERPRINT_FILE,
    PLANNER,
    PLANNER_FILE,
    TARGETS_FILE,
    fingerprint_path,
    recut_path,
    root_file,
    target_path,
)
from edgesplit_controller.errors import Conflict
from edgesplit_controller.tuf.key_change import LIFE, check_targets_step, next_targets, parse_metadata
from edgesplit_controller.tuf.key_folder import KeyFolder

RENEW_AT: Final = 0.5
"""Metadata is signed again when this part of its validity has passed."""
AHEAD_S: Final = 86_400.0
"""A version further ahead of the clock than this was not counted by this repository."""
KEPT_VERSIONS: Final = 16
"""Old snapshots and targets kept for devices in the middle of a refresh."""
RELEASE_KEY_ELSEWHERE: Final = "say where it is with --sign-with URI (or EDGESPLIT_SIGN_WITH), as in file2:release.pem"
_PATH: Final = re.compile(
    r"metadata/(?:[0-9]{1,10}\.)?(?:root|targets|planner|snapshot|timestamp)\.json"
    r"|targets/(?:releases|recuts|anatomies)/[0-9a-f]{64}\.json"
)
_Role = TypeVar("_Role", Root, Timestamp, Snapshot, Targets)


def next_version(stored: int, now: float) -> int:
    """The version or counter after `stored`: at least one higher, and at least the Unix time."""
    return max(stored + 1, int(now))


class Repository:
    """The repository in `folder`, created there if there is none. Safe from any thread and process."""

    def __init__(self, folder: Path, *, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._metadata = folder / "metadata"
        self._keys = KeyFolder(folder / "keys")
        self._now = now
        self._lock = threading.Lock()
        with self._exclusive():
            if not self._newest_root():
                self._check_root_not_lost()
                self._write_root()
            if not (self._metadata / "timestamp.json").is_file():
                self._publish(self._current_targets(), self._current_planner())
        self.refresh_timestamp()

    @property
    def root_bytes(self) -> bytes:
        """The newest root metadata, which a claim gives to a new device."""
        return (self._metadata / root_file(self._newest_root())).read_bytes()

    def add_release(self, raw_manifest: bytes) -> str:
        """Sign a release and publish it; return its digest. Idempotent. Conflict if the release key is stored
        elsewhere."""
        release.decode_manifest(raw_manifest)
        digest = release.release_digest(raw_manifest)
        path = target_path(digest)
        with self._exclusive():
            targets = self._current_targets()
            if path not in targets.targets:
                self._check_release_key()
                write_durably(self._folder / "targets" / path, raw_manifest)
                targets.targets[path] = TargetFile.from_data(path, raw_manifest, ["sha256"])
                self._publish(targets)
        return digest

    def add_anatomy(self, raw: bytes) -> None:
        """Store a model's anatomy for devices to fetch; it is authenticated by the signed manifest, which contains its
        digest."""
        write_durably(self._folder / "targets" / fingerprint_path(fingerprint_file(raw).sha256), raw)

    def add_recut(self, raw_manifest: bytes) -> str:
        """Sign a recut of a release with the planner key and publish it; return its digest. Idempotent. The release key
        is not needed.

        TrustError if the manifest is no valid recut of a release in the targets metadata: devices would refuse it.
        """
        recut = release.decode_manifest(raw_manifest)
        digest = release.release_digest(raw_manifest)
        path = recut_path(digest)
        with self._exclusive():
            check_recut(recut, *self._base_of(recut))
            planner = self._current_planner()
            if path not in planner.targets:
                write_durably(self._folder / "targets" / path, raw_manifest)
                planner.targets[path] = TargetFile.from_data(path, raw_manifest, ["sha256"])
                self._publish(None, planner)
        return digest

    @property
    def signs_releases(self) -> bool:
        """Whether the release key is stored here."""
        return self._holds("targets")

    def published_metadata(self) -> tuple[bytes, bytes]:
        """The root and the targets metadata as devices receive them now."""
        with self._exclusive():
            return self.root_bytes, self._raw_targets()[1]

    def unsigned_targets(self, *raw_manifests: bytes) -> bytes:
        """Targets metadata for the release key to sign that adds these releases; without any, it only extends the
        expiry."""
        for raw in raw_manifests:
            release.decode_manifest(raw)
        with self._exclusive():
            targets = self._current_targets()
            version = self._next_version(targets.version, "targets")
            following = next_targets(targets, raw_manifests, version, self._expiry("targets"))
            return Metadata(following).to_bytes(JSONSerializer(compact=True))

    def add_signed(self, raw_targets: bytes, raw_manifests: Sequence[bytes]) -> None:
        """Publish targets metadata that was signed elsewhere: the present one with these releases added.

        TrustError for anything else, Conflict if another was published meanwhile; neither changes anything.
        """
        metadata = parse_metadata(raw_targets, Targets, "what was signed")
        with self._exclusive():
            current = self._current_targets()
            # Checked before the signature: metadata prepared before another publication is a conflict, not an attack.
            if metadata.signed.version <= current.version:
                raise Conflict("another list of releases was published meanwhile: do it again")
            try:
                self.trusted_root().verify_delegate("targets", metadata.signed_bytes, metadata.signatures)
            except RepositoryError as error:
                raise TrustError(
                    f"the list of releases is not signed by the release key ({error}); "
                    "`edgectl keys show` tells which key that is"
                ) from error
            check_targets_step(current, metadata.signed, raw_manifests, self._now())
            # Manifests before the metadata that lists them, so that a listed release can always be fetched.
            for raw in raw_manifests:
                path = target_path(release.release_digest(raw))
                write_durably(self._folder / "targets" / path, raw)
            self._publish_raw(metadata.signed.version, raw_targets)

    def releases(self) -> list[str]:
        """Digests of all signed releases."""
        return sorted(Path(path).stem for path in self._current_targets().targets)

    def recuts(self) -> list[str]:
        """Digests of all recuts that the planner key signed."""
        return sorted(Path(path).stem for path in self._current_planner().targets)

    def renew(self) -> None:
        """Sign the metadata that devices fetch again, with versions that follow the clock; done at each start of a
        controller.

        A restored backup contains older versions than devices have seen, which they refuse (TUF 5.4.3, 5.5.5). If it
        lacks the online keys of the newest root, nothing can be signed until these are rotated.
        """
        with self._exclusive():
            if self._has_online_keys():
                self._publish_again()

    def refresh_timestamp(self) -> bool:
        """Sign again what has passed half its validity, so that devices never receive expired metadata; return whether
        anything was signed.

        Metadata whose key is stored elsewhere is left alone: `edgectl keys show` reports when it is due.
        """
        with self._exclusive():
            if not self._has_online_keys():
                return False
            targets_due = self._holds("targets") and self._is_due(self._current_targets(), "targets")
            online = (self._current_planner(), PLANNER), (self._current_snapshot(), "snapshot")
            if targets_due or any(self._is_due(*role) for role in online):
                self._publish_again()
                return True
            timestamp = self._load("timestamp.json", Timestamp)
            if not self._is_due(timestamp, "timestamp"):
                return False
            self._write_timestamp(timestamp.snapshot_meta)
            return True

    def offline_files(self, releases: Collection[str]) -> tuple[dict[str, bytes], dict[str, float]]:
        """The metadata and manifests that lead from any root to these releases, by the paths under which devices fetch
        them, as one consistent set; and the expiry of each role in Unix seconds. The timestamp is signed again, to be
        valid as long as possible."""
        with self._exclusive():
            if self._has_online_keys():
                self._write_timestamp(self._load("timestamp.json", Timestamp).snapshot_meta)
            timestamp, snapshot = self._load("timestamp.json", Timestamp), self._current_snapshot()
            parts: dict[str, Root | Timestamp | Snapshot | Targets] = {
                "root": self.trusted_root(), "timestamp": timestamp, "snapshot": snapshot,
                "targets": self._current_targets(),
            }  # fmt: skip
            if set(releases) & set(self.recuts()):
                parts[PLANNER] = self._current_planner()
            listed_files = [f"{meta.version}.{name}" for name, meta in snapshot.meta.items()]
            roots = [root_file(version) for version in range(1, self._newest_root() + 1)]
            names = ["timestamp.json", f"{snapshot.version}.snapshot.json", *listed_files, *roots]
            files = {f"metadata/{name}": (self._metadata / name).read_bytes() for name in names}
            for digest in releases:
                files.update(self._release_files(digest))
        return files, {role: part.expires.timestamp() for role, part in parts.items()}

    def _release_files(self, digest: str) -> dict[str, bytes]:
        """Files of a release by path: its manifest, and for a recut also its base."""
        raw = self.manifest(digest)
        path = target_path(digest) if digest in self.releases() else recut_path(digest)
        files = {f"targets/{path}": raw}
        recut = release.decode_manifest(raw)
        if recut.recut_of:
            base = self.manifest(recut.recut_of)
            files[f"targets/{target_path(recut.recut_of)}"] = base
            anatomy = release.decode_manifest(base).fingerprint
            if anatomy is not None:
                path_of_anatomy = f"targets/{fingerprint_path(anatomy.sha256)}"
                files[path_of_anatomy] = self.read(path_of_anatomy)
        return files

    def read(self, path: str) -> bytes:
        """The file that a device requested, "metadata/…" or "targets/…"; FileNotFoundError if there is none."""
        if not _PATH.fullmatch(path):
            raise FileNotFoundError(f"no such file: {path[:120]!r}")
        return (self._folder / path).read_bytes()

    def manifest(self, digest: str) -> bytes:
        """Manifest bytes of a signed release or recut; FileNotFoundError if there is none."""
        try:
            return self.read(f"targets/{target_path(digest)}")
        except FileNotFoundError:
            return self.read(f"targets/{recut_path(digest)}")

    def sign_statement(self, statement: release.Statement) -> bytes:
        """Sign a statement with the director's keys; returns the encoded message."""
        identifiers.device_name(statement.device)
        payload = messages.encode(statement)
        # Signed also by a key that will replace the present one, so that a statement is valid before and after.
        signatures = [signer.sign(payload) for signer in self._keys.signers(DIRECTOR)]
        signed = release.Signed(
            payload, tuple(release.Signature(signature.keyid, signature.signature) for signature in signatures)
        )
        return messages.encode(signed)

    def delegated_keys(self, role: str) -> list[str]:
        """Ids of the keys that devices accept for the director, or the planner."""
        return delegated_keys(self._current_targets(), role)

    def proof(self, digest: str) -> dict[str, bytes]:
        """Files that prove a release without a network: every root, and the targets metadata that lists it; for a recut
        also the planner's metadata and the base. TrustError if it is not in the repository."""
        with self._exclusive():
            meta = self._current_snapshot().meta
            versions = {name: f"{meta[name].version}.{name}" for name in (TARGETS_FILE, PLANNER_FILE) if name in meta}
            role_bytes = {name: (self._metadata / file).read_bytes() for name, file in versions.items()}
            roots = [root_file(version) for version in range(1, self._newest_root() + 1)]
            proof = {
                **{name: (self._metadata / name).read_bytes() for name in roots},
                TARGETS_FILE: role_bytes[TARGETS_FILE],
            }
            if target_path(digest) in self._current_targets().targets:
                return proof
            if recut_path(digest) not in self._current_planner().targets:
                raise TrustError(f"release {digest[:12]} is not in the repository")
            return {**proof, PLANNER_FILE: role_bytes[PLANNER_FILE], **self._base_files(self.manifest(digest))}

    def _base_files(self, raw_recut: bytes) -> dict[str, bytes]:
        """The manifest of a recut's base, and its anatomy, by the file names under which they are stored beside the
        recut."""
        raw_base = self.read(f"targets/{target_path(release.decode_manifest(raw_recut).recut_of)}")
        anatomy = release.decode_manifest(raw_base).fingerprint
        files = {BASE_FILE: raw_base}
        if anatomy is not None:
            files[FINGERPRINT_FILE] = self.read(f"targets/{fingerprint_path(anatomy.sha256)}")
        return files

    def _base_of(self, recut: release.Manifest) -> tuple[release.Manifest, Fingerprint | None]:
        """The base of a recut, and its anatomy; TrustError if the targets metadata does not list the base."""
        if not recut.recut_of or target_path(recut.recut_of) not in self._current_targets().targets:
            raise TrustError("this is no recut of a release that the release key signed")
        try:
            base = release.decode_manifest(self.manifest(recut.recut_of))
            raw = self.read(f"targets/{fingerprint_path(base.fingerprint.sha256)}") if base.fingerprint else b""
        except (FileNotFoundError, MalformedMessage) as error:
            raise UsageError(f"the repository lacks release {recut.recut_of}: restore it from a backup") from error
        return base, decode_fingerprint(raw, base.fingerprint) if base.fingerprint else None

    # For changes of the keys, always under the lock

    @property
    def keys(self) -> KeyFolder:
        """The signing keys stored here."""
        return self._keys

    @property
    def folder(self) -> Path:
        """Folder of the repository."""
        return self._folder

    def exclusive(self) -> AbstractContextManager[None]:
        """Exclude other writers. Not re-entrant: methods that lock must not be called inside."""
        return self._exclusive()

    def now(self) -> float:
        """Unix seconds."""
        return self._now()

    def expiry(self, role: str) -> datetime:
        """Expiry of metadata of that role that is made now."""
        return self._expiry(role)

    def trusted_root(self, version: int = 0) -> Root:
        """The newest root, or that version of it."""
        return self._load(root_file(version or self._newest_root()), Root)

    def newest_root(self) -> int:
        """Version of the newest root."""
        return self._newest_root()

    def current_targets(self) -> Targets:
        """The published targets metadata (the list of releases)."""
        return self._current_targets()

    def next_targets_version(self, *, is_rekeyed: bool) -> int:
        """Version of the next targets metadata; `is_rekeyed` where its key changes."""
        return self._next_version(self._current_targets().version, "targets", is_rekeyed=is_rekeyed)

    def expiries(self) -> dict[str, tuple[int, datetime]]:
        """Version and expiry of each role's metadata."""
        timestamp = self._load("timestamp.json", Timestamp)
        parts = (self.trusted_root(), self._current_targets(), self._current_snapshot(), timestamp)
        planner = self._current_planner()
        return {
            **{part.type: (part.version, part.expires) for part in parts},
            PLANNER: (planner.version, planner.expires),
        }

    def publish_for(self, following: Root, raw_targets: bytes | None) -> None:
        """Publish metadata for devices that have the present root as well as for those that have `following`: signed
        with the keys of both, as far as they are stored here. With `raw_targets` as targets metadata, else with the
        present one."""
        version, raw = self._raw_targets()
        if raw_targets is not None:
            raw, version = raw_targets, parse_metadata(raw_targets, Targets, "the list of releases").signed.version
        self._publish_raw(version, raw, following)

    def write_root(self, raw: bytes, version: int) -> None:
        """Publish a root, which devices trust from then on."""
        write_durably(self._metadata / root_file(version), raw)

    # Writing, always under the lock

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Exclude other writers: a lock for threads, a lock file for other processes. Not re-entrant."""
        with self._lock:
            try:
                self._metadata.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise UsageError(f"cannot write the repository in {self._folder}: {error.strerror}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

    def _check_root_not_lost(self) -> None:
        """Refuse to create version 1 of the root again after the root key was moved elsewhere: no device would accept
        it."""
        if not self._keys.is_empty and not self._keys.has_key("root"):
            raise UsageError(
                f"{self._metadata} has no root, and its key lies elsewhere: restore the folder from a backup"
            )

    def _write_root(self) -> None:
        root = Root(version=1, expires=self._expiry("root"), consistent_snapshot=True)
        for role in ("root", "targets", "snapshot", "timestamp"):
            for signer in self._keys.signers(role):
                root.add_key(signer.public_key, role)
        self._write(root, root_file(1), _keyids("root", [root]))

    def _check_release_key(self) -> None:
        if not self._holds("targets"):
            raise Conflict(f"the release key does not lie on this controller: {RELEASE_KEY_ELSEWHERE}")

    def _holds(self, role: str) -> bool:
        """Whether enough of that role's keys are stored here to reach its threshold."""
        trusted = self.trusted_root().roles[role]
        return len(self._keys.held_among(role, trusted.keyids)) >= trusted.threshold

    def _has_online_keys(self) -> bool:
        return self._holds("snapshot") and self._holds("timestamp")

    def _publish(self, targets: Targets | None, planner: Targets | None = None) -> None:
        """Sign these targets, then the snapshot and the timestamp that lead to them. What is None stays as it is
        published, and its key is not needed."""
        # The order of writes is the inverse of the order in which devices read (TUF 5.4 to 5.6): targets, planner,
        # snapshot, and last the timestamp, whose replacement is the commit. Until then devices follow the old chain.
        roots = [self.trusted_root()]
        if targets is not None:
            targets.version = self._next_version(targets.version, "targets")
            targets.expires = self._expiry("targets")
            raw_targets = self._write(targets, f"{targets.version}.{TARGETS_FILE}", _keyids("targets", roots))
            self._publish_online(targets, raw_targets, roots, planner)
        else:
            self._publish_online(self._current_targets(), self._raw_targets()[1], roots, planner)

    def _publish_again(self) -> None:
        """Sign the published metadata again, as far as its keys are stored here."""
        self._publish(self._current_targets() if self._holds("targets") else None, self._current_planner())

    def _publish_raw(self, version: int, raw_targets: bytes, following: Root | None = None) -> None:
        """Publish these signed targets and what leads to them, under the present root and the following one."""
        targets = parse_metadata(raw_targets, Targets, "the list of releases").signed
        planner = self._current_planner()
        write_durably(self._metadata / f"{version}.{TARGETS_FILE}", raw_targets)
        roots = [self.trusted_root(), *([following] if following is not None else [])]
        self._publish_online(targets, raw_targets, roots, planner)
        if following is not None:
            self._delete_ahead("targets", version)

    def _publish_online(
        self, targets: Targets, raw_targets: bytes, roots: Sequence[Root], planner: Targets | None
    ) -> None:
        """Write the planner's targets (if given), the snapshot and the timestamp for these targets. The keys of these
        roles are always stored here. The planner's keys are those that `targets` delegates to."""
        meta = dict(self._current_snapshot().meta) if self._has_timestamp() else {}
        meta[TARGETS_FILE] = MetaFile.from_data(targets.version, raw_targets, ["sha256"])
        if planner is not None and self._keys.held_among(PLANNER, delegated_keys(targets, PLANNER)):
            meta[PLANNER_FILE] = self._sign_planner(planner, targets, roots)
        # TUF 5.5.5: a device refuses a snapshot in which some targets metadata has a lower version than before, and
        # 5.3.11: it forgets its snapshot and timestamp when their keys were rotated (fast-forward recovery). Versions
        # may therefore begin anew only under a new key.
        version = self._next_version(0, "snapshot", is_rekeyed=_is_rekeyed("snapshot", roots))
        snapshot = Snapshot(version, None, self._expiry("snapshot"), meta)
        raw_snapshot = self._write(snapshot, f"{version}.snapshot.json", _keyids("snapshot", roots))
        self._write_timestamp(MetaFile.from_data(version, raw_snapshot, ["sha256"]), roots)
        if _is_rekeyed("snapshot", roots):  # after the timestamp: the deleted versions are no longer referenced
            self._delete_ahead("snapshot", version)
        for role in ("targets", PLANNER, "snapshot"):
            self._prune(role)

    def _sign_planner(self, planner: Targets, targets: Targets, roots: Sequence[Root]) -> MetaFile:
        """Write the next version of the planner's targets; return its entry in the snapshot."""
        # A version that a thief counted ahead is dropped only if the snapshot key changes as well: under the same
        # snapshot key devices refuse a snapshot that lists an older version of any targets metadata (TUF 5.5.5).
        keys = delegated_keys(targets, PLANNER)
        rekeyed = self._has_timestamp() and set(keys) != set(self.delegated_keys(PLANNER))
        anew = rekeyed and _is_rekeyed("snapshot", roots)
        stored = 0 if anew and self._is_ahead(planner.version) else planner.version
        planner.version = self._next_version(stored, PLANNER, is_rekeyed=anew)
        planner.expires = self._expiry(PLANNER)
        raw = self._write(planner, f"{planner.version}.{PLANNER}.json", keys, PLANNER)
        return MetaFile.from_data(planner.version, raw, ["sha256"])

    def _write_timestamp(self, snapshot: MetaFile, roots: Sequence[Root] | None = None) -> None:
        # TUF 5.4.3: a timestamp's version never falls under one key. Under a new key it may (5.3.11).
        stored = self._load("timestamp.json", Timestamp).version if self._has_timestamp() else 0
        signed_for = roots or [self.trusted_root()]
        if _is_rekeyed("timestamp", signed_for) and self._is_ahead(stored):
            stored = 0
        version = next_version(stored, self._now())
        timestamp = Timestamp(version, None, self._expiry("timestamp"), snapshot)
        self._write(timestamp, "timestamp.json", _keyids("timestamp", signed_for))

    def _write(self, part: _Role, name: str, keyids: Collection[str], role: str = "") -> bytes:
        """Sign with those of these keys of the role (by default the metadata's type) that are stored here, and write
        the file."""
        role = role or part.type
        metadata = Metadata(part)
        # During a key change `keyids` contains old and new keys: the metadata verifies under both roots.
        for signer in self._keys.signers_among(role, keyids):
            metadata.sign(signer, append=True)
        if not metadata.signatures:
            raise UsageError(
                f"no {role} key lies in {self._folder / 'keys'}: restore the folder from a backup, "
                f"or make a new one with `edgectl keys rotate {role}`"
            )
        raw = metadata.to_bytes(JSONSerializer(compact=True))
        write_durably(self._metadata / name, raw)
        return raw

    def _next_version(self, stored: int, role: str, *, is_rekeyed: bool = False) -> int:
        """The next version of a role; `is_rekeyed` after a change of its key: versions that a thief of the old key
        counted ahead are ignored."""
        # Files on disk count too: a crash between writing a version and the timestamp leaves one that is not
        # published, and a version must never be written twice with different content (consistent snapshots, TUF 6.2).
        known = [stored, *self._versions(role)]
        if is_rekeyed:
            known = [0, *(version for version in known if not self._is_ahead(version))]
        return next_version(max(known), self._now())

    def _is_ahead(self, version: int) -> bool:
        return version > self._now() + AHEAD_S

    def _delete_ahead(self, role: str, version: int) -> None:
        """Delete files of versions counted ahead of the clock, once a lower one is published under a new key."""
        for known in self._versions(role):
            if known > version and self._is_ahead(known):
                (self._metadata / f"{known}.{role}.json").unlink(missing_ok=True)

    def _expiry(self, role: str) -> datetime:
        return datetime.fromtimestamp(self._now(), timezone.utc) + LIFE[role]

    def _prune(self, role: str) -> None:
        for version in self._versions(role)[:-KEPT_VERSIONS]:
            (self._metadata / f"{version}.{role}.json").unlink(missing_ok=True)

    # Reading

    def _current_targets(self) -> Targets:
        """The published targets; before the first publication, an empty list with the delegations."""
        if self._has_timestamp():
            version = self._current_snapshot().meta[TARGETS_FILE].version
            return self._load(f"{version}.{TARGETS_FILE}", Targets)
        return Targets(delegations=self._delegations())

    def _current_planner(self) -> Targets:
        """The planner's published targets; empty before the first publication."""
        meta = self._current_snapshot().meta.get(PLANNER_FILE) if self._has_timestamp() else None
        return Targets() if meta is None else self._load(f"{meta.version}.{PLANNER_FILE}", Targets)

    def _raw_targets(self) -> tuple[int, bytes]:
        """Version and bytes of the published targets."""
        version = self._current_snapshot().meta[TARGETS_FILE].version
        try:
            return version, (self._metadata / f"{version}.{TARGETS_FILE}").read_bytes()
        except OSError as error:
            raise UsageError(
                f"the repository lacks {self._metadata / f'{version}.{TARGETS_FILE}'}: restore it from a backup"
            ) from error

    def _current_snapshot(self) -> Snapshot:
        version = self._load("timestamp.json", Timestamp).snapshot_meta.version
        return self._load(f"{version}.snapshot.json", Snapshot)

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

    def _is_due(self, part: Targets | Snapshot | Timestamp, role: str) -> bool:
        left_s = part.expires.timestamp() - self._now()
        return left_s < LIFE[role].total_seconds() * (1 - RENEW_AT)

    def _has_timestamp(self) -> bool:
        return (self._metadata / "timestamp.json").is_file()

    def _newest_root(self) -> int:
        return max(self._versions("root"), default=0)

    def _versions(self, role: str) -> list[int]:
        """Versions of that role on disk, oldest first."""
        suffix = f".{role}.json"
        names = [file.name.removesuffix(suffix) for file in self._metadata.glob(f"*{suffix}")]
        return sorted(int(version) for version in names if version.isdigit())

    def _load(self, name: str, kind: type[_Role]) -> _Role:
        try:
            return _parse((self._metadata / name).read_bytes(), kind, name).signed
        except OSError as error:
            raise UsageError(f"the repository lacks {self._metadata / name}: restore it from a backup") from error


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


def _parse(raw: bytes, kind: type[_Role], name: str) -> Metadata[_Role]:
    try:
        metadata: Metadata[Any] = Metadata.from_bytes(raw)
    except RepositoryError as error:
        raise UsageError(f"the repository's {name} cannot be read: {error}; restore it from a backup") from error
    if not isinstance(metadata.signed, kind):
        raise UsageError(f"the repository's {name} is {metadata.signed.type} metadata; restore it from a backup")
    return metadata
