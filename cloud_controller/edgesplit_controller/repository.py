"""The TUF repository on disk, and the director's signature.

Promises: metadata is written durably, the timestamp last, so that a crash at any write leaves the repository as it was
before; nothing is kept in memory between calls, so several processes may share the folder. Versions are
max(stored + 1, Unix time): a restored backup never goes back. The root role's versions count by one, as TUF demands.

    <folder>/keys/      signers, see `keys.py`
    <folder>/metadata/  N.root.json, N.targets.json, N.snapshot.json, timestamp.json
    <folder>/targets/   releases/<digest>.json
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
from edgesplit.durable import write_durably
from edgesplit.errors import TrustError, UsageError
from edgesplit.trust import DIRECTOR, TARGETS_FILE, root_file, target_path
from edgesplit_controller.keys import KeyFolder

LIFE: Final = {
    "root": timedelta(days=3650),
    "targets": timedelta(days=365),
    "snapshot": timedelta(days=90),
    "timestamp": timedelta(days=7),
}
RENEW_AT: Final = 0.5
"""Metadata is signed anew when this part of its life has passed."""
KEPT_VERSIONS: Final = 16
"""Old snapshots and targets kept for a device in the middle of a refresh."""
_PATH: Final = re.compile(
    r"metadata/(?:[0-9]{1,10}\.)?(?:root|targets|snapshot|timestamp)\.json|targets/releases/[0-9a-f]{64}\.json"
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
                self._publish(self._current_targets())
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

    def releases(self) -> list[str]:
        """Digests of all signed releases."""
        return sorted(Path(path).stem for path in self._current_targets().targets)

    def renew(self) -> None:
        """Sign what devices ask for anew, with versions that follow the clock: at each start of a controller.

        A backup that was put back holds older versions than devices have seen, and they refuse those.
        """
        with self._exclusive():
            self._publish(self._current_targets())

    def refresh_timestamp(self) -> bool:
        """Sign anew what has passed half its life, so that devices never see expired metadata; True if it did."""
        with self._exclusive():
            if any(self._is_due(role) for role in (self._current_targets(), self._current_snapshot())):
                self._publish(self._current_targets())
                return True
            timestamp = self._load("timestamp.json", Timestamp)
            if not self._is_due(timestamp):
                return False
            self._write_timestamp(timestamp.snapshot_meta)
            return True

    def read(self, path: str) -> bytes:
        """The file that a device asked for, "metadata/…" or "targets/…"; FileNotFoundError if there is none."""
        if not _PATH.fullmatch(path):
            raise FileNotFoundError(f"no such file: {path[:120]!r}")
        return (self._folder / path).read_bytes()

    def manifest(self, digest: str) -> bytes:
        """The bytes of a signed release's manifest; FileNotFoundError if there is none."""
        return self.read(f"targets/{target_path(digest)}")

    def sign_statement(self, statement: release.Statement) -> bytes:
        """The director's signed word, as it travels."""
        names.device_name(statement.device)
        payload = messages.encode(statement)
        signatures = [signer.sign(payload) for signer in self._keys.signers(DIRECTOR)]
        signed = release.Signed(payload, tuple(release.Signature(one.keyid, one.signature) for one in signatures))
        return messages.encode(signed)

    def proof(self, digest: str) -> dict[str, bytes]:
        """What proves that release without a network: every root, and the targets metadata that lists it."""
        with self._exclusive():
            meta = self._current_snapshot().meta[TARGETS_FILE]
            raw = (self._metadata / f"{meta.version}.{TARGETS_FILE}").read_bytes()
            if target_path(digest) not in _parse(raw, Targets, TARGETS_FILE).signed.targets:
                raise TrustError(f"release {digest[:12]} is not in the repository")
            roots = [root_file(version) for version in range(1, self._newest_root() + 1)]
            return {**{name: (self._metadata / name).read_bytes() for name in roots}, TARGETS_FILE: raw}

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

    def _publish(self, targets: Targets) -> None:
        """Sign these targets, then what leads to them; the timestamp is what makes them count."""
        targets.version = self._next(targets.version, "targets")
        targets.expires = self._expiry("targets")
        raw_targets = self._write(targets, f"{targets.version}.{TARGETS_FILE}")
        version = self._next(0, "snapshot")
        snapshot = Snapshot(
            version,
            None,
            self._expiry("snapshot"),
            {TARGETS_FILE: MetaFile.from_data(targets.version, raw_targets, ["sha256"])},
        )
        raw_snapshot = self._write(snapshot, f"{version}.snapshot.json")
        self._write_timestamp(MetaFile.from_data(version, raw_snapshot, ["sha256"]))
        self._prune("targets")
        self._prune("snapshot")

    def _write_timestamp(self, snapshot: MetaFile) -> None:
        stored = self._load("timestamp.json", Timestamp).version if self._has_timestamp() else 0
        version = grown(stored, self._now())
        self._write(Timestamp(version, None, self._expiry("timestamp"), snapshot), "timestamp.json")

    def _write(self, role: _Role, name: str) -> bytes:
        """Sign with every signer of the role, and put it on disk."""
        metadata = Metadata(role)
        for signer in self._keys.signers(role.type):
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

    def _current_snapshot(self) -> Snapshot:
        version = self._load("timestamp.json", Timestamp).snapshot_meta.version
        return self._load(f"{version}.snapshot.json", Snapshot)

    def _delegations(self) -> Delegations:
        """The director: a key that devices know through the targets role. It lists no release, and stops no search."""
        keys = {signer.public_key.keyid: signer.public_key for signer in self._keys.signers(DIRECTOR)}
        role = DelegatedRole(DIRECTOR, sorted(keys), 1, terminating=False, paths=["director/*"])
        return Delegations(keys, roles={DIRECTOR: role})

    def _is_due(self, role: Targets | Snapshot | Timestamp) -> bool:
        left_s = role.expires.timestamp() - self._now()
        return left_s < LIFE[role.type].total_seconds() * (1 - RENEW_AT)

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
