"""The TUF repository on disk, and the director's signature.

Promises: metadata is written durably, the timestamp last, so that a crash at any write leaves the repository as it was
before; nothing is kept in memory between calls, so several processes may share the folder. Versions are
max(stored + 1, Unix time): a restored backup never goes back. The root role's versions count by one, as TUF demands.

    <folder>/keys/      signers, see `keys.py`
    <folder>/metadata/  N.root.json, N.targets.json, N.planner.json, N.snapshot.json, timestamp.json
    <folder>/targets/   releases/<digest>.json, recuts/<digest>.json, anatomies/<SHA-256>.json
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
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

from edgesplit import messages, names, release
from edgesplit.anatomy import Anatomy, anatomy_file, decode_anatomy
from edgesplit.durable import write_durably
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.recut import check_recut
from edgesplit.trust import (
    ANATOMY_FILE,
    BASE_FILE,
    DIRECTOR,
    PLANNER,
    PLANNER_FILE,
    TARGETS_FILE,
    anatomy_path,
    recut_path,
    root_file,
    target_path,
)
from edgesplit_controller.keys import KeyFolder

LIFE: Final = {
    "root": timedelta(days=3650),
    "targets": timedelta(days=365),
    PLANNER: timedelta(days=90),
    "snapshot": timedelta(days=90),
    "timestamp": timedelta(days=7),
}
RENEW_AT: Final = 0.5
"""Metadata is signed anew when this part of its life has passed."""
KEPT_VERSIONS: Final = 16
"""Old snapshots and targets kept for a device in the middle of a refresh."""
_PATH: Final = re.compile(
    r"metadata/(?:[0-9]{1,10}\.)?(?:root|targets|planner|snapshot|timestamp)\.json"
    r"|targets/(?:releases|recuts|anatomies)/[0-9a-f]{64}\.json"
)
_Role = TypeVar("_Role", Root, Timestamp, Snapshot, Targets)


def grown(stored: int, now: float) -> int:
    """The version or counter after `stored`: grows by one at least, and follows the clock."""
    return max(stored + 1, int(now))


class Repository:
    """The repository in `folder`, made there if there is none. Thread-safe, also between processes."""

    def __init__(self, folder: Path, *, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._metadata = folder / "metadata"
        self._keys = KeyFolder(folder / "keys")
        self._now = now
        self._lock = threading.Lock()
        with self._exclusive():
            if not self._newest_root():
                self._write_root()
            if not (self._metadata / "timestamp.json").is_file():
                self._publish(self._current_targets(), self._current_planner())
        self.refresh_timestamp()

    @property
    def root_bytes(self) -> bytes:
        """The newest root: what a claim gives to a new device."""
        return (self._metadata / root_file(self._newest_root())).read_bytes()

    def add_release(self, raw_manifest: bytes) -> str:
        """Sign a release and publish it; returns its digest. Adding it again changes nothing."""
        release.decode_manifest(raw_manifest)
        digest = release.release_digest(raw_manifest)
        path = target_path(digest)
        with self._exclusive():
            targets = self._current_targets()
            if path not in targets.targets:
                write_durably(self._folder / "targets" / path, raw_manifest)
                targets.targets[path] = TargetFile.from_data(path, raw_manifest, ["sha256"])
                self._publish(targets)
        return digest

    def add_anatomy(self, raw: bytes) -> None:
        """Keep a model's anatomy for devices to ask for; the manifest that names it by its digest is what is signed."""
        write_durably(self._folder / "targets" / anatomy_path(anatomy_file(raw).sha256), raw)

    def add_recut(self, raw_manifest: bytes) -> str:
        """Sign another cut of a release with the planner's key and publish it; returns its digest.

        TrustError says why the manifest is no recut of a release that the targets role lists: devices would refuse it.
        The release key is not needed. Adding it again changes nothing.
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
    def can_sign_releases(self) -> bool:
        """Is the release key at hand? Without it only recuts can be made."""
        try:
            return bool(self._keys.signers("targets"))
        except UsageError:
            return False

    def releases(self) -> list[str]:
        """Digests of all releases that the release key signed."""
        return sorted(Path(path).stem for path in self._current_targets().targets)

    def recuts(self) -> list[str]:
        """Digests of all other cuts of them that the planner's key signed."""
        return sorted(Path(path).stem for path in self._current_planner().targets)

    def renew(self) -> None:
        """Sign what devices ask for anew, with versions that follow the clock: at each start of a controller.

        A backup that was put back holds older versions than devices have seen, and they refuse those.
        """
        with self._exclusive():
            self._publish(self._current_targets(), self._current_planner())

    def refresh_timestamp(self) -> bool:
        """Sign anew what has passed half its life, so that devices never see expired metadata; True if it did."""
        with self._exclusive():
            online = (self._current_planner(), PLANNER), (self._current_snapshot(), "snapshot")
            if any(self._is_due(*role) for role in (*online, (self._current_targets(), "targets"))):
                self._publish(self._current_targets(), self._current_planner())
                return True
            timestamp = self._load("timestamp.json", Timestamp)
            if not self._is_due(timestamp, "timestamp"):
                return False
            self._write_timestamp(timestamp.snapshot_meta)
            return True

    def read(self, path: str) -> bytes:
        """The file that a device asked for, "metadata/…" or "targets/…"; FileNotFoundError if there is none."""
        if not _PATH.fullmatch(path):
            raise FileNotFoundError(f"no such file: {path[:120]!r}")
        return (self._folder / path).read_bytes()

    def manifest(self, digest: str) -> bytes:
        """The bytes of a signed release's or recut's manifest; FileNotFoundError if there is none."""
        try:
            return self.read(f"targets/{target_path(digest)}")
        except FileNotFoundError:
            return self.read(f"targets/{recut_path(digest)}")

    def sign_statement(self, statement: release.Statement) -> bytes:
        """The director's signed word, as it travels."""
        names.device_name(statement.device)
        payload = messages.encode(statement)
        signatures = [signer.sign(payload) for signer in self._keys.signers(DIRECTOR)]
        signed = release.Signed(payload, tuple(release.Signature(one.keyid, one.signature) for one in signatures))
        return messages.encode(signed)

    def proof(self, digest: str) -> dict[str, bytes]:
        """What proves that release without a network: every root, and the targets metadata that lists it; of a recut
        also the planner's metadata, and what it is a recut of."""
        with self._exclusive():
            meta = self._current_snapshot().meta
            versions = {name: f"{meta[name].version}.{name}" for name in (TARGETS_FILE, PLANNER_FILE) if name in meta}
            raw = {name: (self._metadata / file).read_bytes() for name, file in versions.items()}
            roots = [root_file(version) for version in range(1, self._newest_root() + 1)]
            proof = {**{name: (self._metadata / name).read_bytes() for name in roots}, TARGETS_FILE: raw[TARGETS_FILE]}
            if target_path(digest) in self._current_targets().targets:
                return proof
            if recut_path(digest) not in self._current_planner().targets:
                raise TrustError(f"release {digest[:12]} is not in the repository")
            return {**proof, PLANNER_FILE: raw[PLANNER_FILE], **self._base_files(self.manifest(digest))}

    def _base_files(self, raw_recut: bytes) -> dict[str, bytes]:
        """The manifest of a recut's base, and its anatomy, as they lie beside the recut."""
        raw_base = self.read(f"targets/{target_path(release.decode_manifest(raw_recut).recut_of)}")
        anatomy = release.decode_manifest(raw_base).anatomy
        files = {BASE_FILE: raw_base}
        if anatomy is not None:
            files[ANATOMY_FILE] = self.read(f"targets/{anatomy_path(anatomy.sha256)}")
        return files

    def _base_of(self, recut: release.Manifest) -> tuple[release.Manifest, Anatomy | None]:
        """The release that a manifest says it is a recut of; TrustError where the targets role lists none."""
        if not recut.recut_of or target_path(recut.recut_of) not in self._current_targets().targets:
            raise TrustError("this is no recut of a release that the release key signed")
        try:
            base = release.decode_manifest(self.manifest(recut.recut_of))
            raw = self.read(f"targets/{anatomy_path(base.anatomy.sha256)}") if base.anatomy else b""
        except (FileNotFoundError, MalformedMessage) as error:
            raise UsageError(f"the repository lacks release {recut.recut_of}: restore it from a backup") from error
        return base, decode_anatomy(raw, base.anatomy) if base.anatomy else None

    # Writing, always under the lock

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One writer at a time: the lock for our threads, the file's for other processes. Not re-entrant."""
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

    def _write_root(self) -> None:
        root = Root(version=1, expires=self._expiry("root"), consistent_snapshot=True)
        for role in ("root", "targets", "snapshot", "timestamp"):
            for signer in self._keys.signers(role):
                root.add_key(signer.public_key, role)
        self._write(root, root_file(1))

    def _publish(self, targets: Targets | None, planner: Targets | None = None) -> None:
        """Sign these targets, then what leads to them; the timestamp is what makes them count.

        What is not given stays as it is published, and its key is not needed.
        """
        meta = dict(self._current_snapshot().meta) if self._has_timestamp() else {}
        if targets is not None:
            meta[TARGETS_FILE] = self._sign(targets, "targets")
        if planner is not None:
            meta[PLANNER_FILE] = self._sign(planner, PLANNER)
        version = self._next(0, "snapshot")
        snapshot = Snapshot(version, None, self._expiry("snapshot"), meta)
        raw_snapshot = self._write(snapshot, f"{version}.snapshot.json")
        self._write_timestamp(MetaFile.from_data(version, raw_snapshot, ["sha256"]))
        for role in ("targets", PLANNER, "snapshot"):
            self._prune(role)

    def _sign(self, targets: Targets, role: str) -> MetaFile:
        """The next version of a role's targets, written; what the snapshot says of it."""
        targets.version = self._next(targets.version, role)
        targets.expires = self._expiry(role)
        raw = self._write(targets, f"{targets.version}.{role}.json", role)
        return MetaFile.from_data(targets.version, raw, ["sha256"])

    def _write_timestamp(self, snapshot: MetaFile) -> None:
        stored = self._load("timestamp.json", Timestamp).version if self._has_timestamp() else 0
        version = grown(stored, self._now())
        self._write(Timestamp(version, None, self._expiry("timestamp"), snapshot), "timestamp.json")

    def _write(self, role: _Role, name: str, signed_by: str | None = None) -> bytes:
        """Sign with every signer of the role (`signed_by` where its type is not its name), and put it on disk."""
        metadata = Metadata(role)
        for signer in self._keys.signers(signed_by or role.type):
            metadata.sign(signer, append=True)
        raw = metadata.to_bytes(JSONSerializer(compact=True))
        write_durably(self._metadata / name, raw)
        return raw

    def _next(self, stored: int, role: str) -> int:
        return grown(max([stored, *self._versions(role)]), self._now())

    def _expiry(self, role: str) -> datetime:
        return datetime.fromtimestamp(self._now(), timezone.utc) + LIFE[role]

    def _prune(self, role: str) -> None:
        for version in self._versions(role)[:-KEPT_VERSIONS]:
            (self._metadata / f"{version}.{role}.json").unlink(missing_ok=True)

    # Reading

    def _current_targets(self) -> Targets:
        """The published targets; before the first are published, the newest on disk or an empty list."""
        if self._has_timestamp():
            version = self._current_snapshot().meta[TARGETS_FILE].version
            return self._load(f"{version}.{TARGETS_FILE}", Targets)
        return Targets(delegations=self._delegations())

    def _current_planner(self) -> Targets:
        """The planner's published targets; an empty list before there are any."""
        meta = self._current_snapshot().meta.get(PLANNER_FILE) if self._has_timestamp() else None
        return Targets() if meta is None else self._load(f"{meta.version}.{PLANNER_FILE}", Targets)

    def _current_snapshot(self) -> Snapshot:
        version = self._load("timestamp.json", Timestamp).snapshot_meta.version
        return self._load(f"{version}.snapshot.json", Snapshot)

    def _delegations(self) -> Delegations:
        """The director: a key that devices know through the targets role. It lists no release, and stops no search.
        The planner: it lists other cuts of releases, and whoever looks for one looks nowhere else."""
        signers = {role: self._keys.signers(role) for role in (DIRECTOR, PLANNER)}
        keys = {one.public_key.keyid: one.public_key for of_role in signers.values() for one in of_role}
        ids = {role: sorted(one.public_key.keyid for one in of_role) for role, of_role in signers.items()}
        director = DelegatedRole(DIRECTOR, ids[DIRECTOR], 1, terminating=False, paths=["director/*"])
        planner = DelegatedRole(PLANNER, ids[PLANNER], 1, terminating=True, paths=["recuts/*"])
        return Delegations(keys, roles={DIRECTOR: director, PLANNER: planner})

    def _is_due(self, signed: Targets | Snapshot | Timestamp, role: str) -> bool:
        left_s = signed.expires.timestamp() - self._now()
        return left_s < LIFE[role].total_seconds() * (1 - RENEW_AT)

    def _has_timestamp(self) -> bool:
        return (self._metadata / "timestamp.json").is_file()

    def _newest_root(self) -> int:
        return max(self._versions("root"), default=0)

    def _versions(self, role: str) -> list[int]:
        """Versions of that role on disk, oldest first."""
        suffix = f".{role}.json"
        found = [file.name.removesuffix(suffix) for file in self._metadata.glob(f"*{suffix}")]
        return sorted(int(version) for version in found if version.isdigit())

    def _load(self, name: str, kind: type[_Role]) -> _Role:
        try:
            return _parse((self._metadata / name).read_bytes(), kind, name).signed
        except OSError as error:
            raise UsageError(f"the repository lacks {self._metadata / name}: restore it from a backup") from error


def _parse(raw: bytes, kind: type[_Role], name: str) -> Metadata[_Role]:
    try:
        metadata: Metadata[Any] = Metadata.from_bytes(raw)
    except RepositoryError as error:
        raise UsageError(f"the repository's {name} cannot be read: {error}; restore it from a backup") from error
    if not isinstance(metadata.signed, kind):
        raise UsageError(f"the repository's {name} is {metadata.signed.type} metadata; restore it from a backup")
    return metadata
