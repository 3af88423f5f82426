"""Files of the TUF repository: read, written durably in a given order, under a lock that excludes other processes.

Decides nothing about versions, expiries or signatures; these rules are in `tuf.repository_signer`. Nothing is kept in
memory between calls, so several processes may share the folder.

    <folder>/keys/         signers, see `tuf.key_folder`
    <folder>/metadata/     N.root.json, N.targets.json, N.planner.json, N.snapshot.json, timestamp.json
    <folder>/targets/      releases/<digest>.json, recuts/<digest>.json, fingerprints/<SHA-256>.json
    <folder>/pending.json  a key change that is not finished
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from tuf.api.metadata import Root, Snapshot, Targets, Timestamp

from edgesplit.atomic_files import write_durably
from edgesplit.errors import TrustError, UsageError
from edgesplit.trust.verification import (
    PLANNER,
    PLANNER_FILE,
    TARGETS_FILE,
    parse_metadata,
    recut_path,
    root_file,
    target_path,
)
from edgesplit_controller.tuf.repository_signer import Publication, PublishedMetadata

_PATH: Final = re.compile(
    r"metadata/(?:[0-9]{1,10}\.)?(?:root|targets|planner|snapshot|timestamp)\.json"
    r"|targets/(?:releases|recuts|fingerprints)/[0-9a-f]{64}\.json"
)
_Role = TypeVar("_Role", Root, Timestamp, Snapshot, Targets)


class MetadataStore:
    """The metadata and targets in `folder`. Safe from any thread and process; writers hold `exclusive`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = folder / "metadata"
        self._lock = threading.Lock()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other writers: a lock for threads, a lock file for other processes. Not re-entrant."""
        with self._lock:
            try:
                self._metadata.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise UsageError(f"cannot write the repository in {self.folder}: {error.strerror}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

    # Reading

    @property
    def is_published(self) -> bool:
        """Whether there is a timestamp, the last file of the first publication."""
        return (self._metadata / "timestamp.json").is_file()

    @property
    def has_pending_change(self) -> bool:
        """Whether there is a key change that is not finished."""
        return (self.folder / "pending.json").is_file()

    @property
    def root_version(self) -> int:
        """Version of the newest root; 0 if there is none."""
        return max(self._versions("root"), default=0)

    def root(self) -> Root:
        """The newest root."""
        return self._load(root_file(self.root_version), Root)

    def roots(self) -> list[str]:
        """File names of all roots, oldest first."""
        return [root_file(version) for version in range(1, self.root_version + 1)]

    def targets(self) -> Targets:
        """The published list of releases."""
        return self._load(f"{self._snapshot().meta[TARGETS_FILE].version}.{TARGETS_FILE}", Targets)

    def planner(self) -> Targets:
        """The planner's published list of recuts; empty where it has none."""
        return self._planner(self._snapshot())

    def published(self) -> PublishedMetadata:
        """All metadata that devices receive now."""
        timestamp = self._load("timestamp.json", Timestamp)
        snapshot = self._load(f"{timestamp.snapshot_meta.version}.snapshot.json", Snapshot)
        name = f"{snapshot.meta[TARGETS_FILE].version}.{TARGETS_FILE}"
        return PublishedMetadata(
            self.root(), self.role_versions(), self._load(name, Targets), self.metadata(name), self._planner(snapshot),
            snapshot, timestamp,
        )  # fmt: skip

    def role_versions(self) -> dict[str, list[int]]:
        """Versions on disk of each role that may be published, oldest first."""
        return {role: self._versions(role) for role in ("targets", PLANNER, "snapshot")}

    def _versions(self, role: str) -> list[int]:
        """Versions of that role on disk, oldest first."""
        suffix = f".{role}.json"
        names = [file.name.removesuffix(suffix) for file in self._metadata.glob(f"*{suffix}")]
        return sorted(int(version) for version in names if version.isdigit())

    def metadata(self, name: str) -> bytes:
        """The metadata file of that name; UsageError if it cannot be read."""
        try:
            return (self._metadata / name).read_bytes()
        except OSError as error:
            raise UsageError(f"the repository lacks {self._metadata / name}: restore it from a backup") from error

    def read(self, path: str) -> bytes:
        """The file that a device requested, "metadata/…" or "targets/…"; FileNotFoundError if there is none."""
        if not _PATH.fullmatch(path):
            raise FileNotFoundError(f"no such file: {path[:120]!r}")
        return (self.folder / path).read_bytes()

    def target(self, path: str) -> bytes:
        """The target of that path; FileNotFoundError if there is none."""
        return self.read(f"targets/{path}")

    def manifest(self, digest: str) -> bytes:
        """Manifest bytes of a signed release or recut; FileNotFoundError if there is none."""
        try:
            return self.target(target_path(digest))
        except FileNotFoundError:
            return self.target(recut_path(digest))

    def _snapshot(self) -> Snapshot:
        version = self._load("timestamp.json", Timestamp).snapshot_meta.version
        return self._load(f"{version}.snapshot.json", Snapshot)

    def _planner(self, snapshot: Snapshot) -> Targets:
        meta = snapshot.meta.get(PLANNER_FILE)
        return Targets() if meta is None else self._load(f"{meta.version}.{PLANNER_FILE}", Targets)

    def _load(self, name: str, kind: type[_Role]) -> _Role:
        try:
            return parse_metadata(self.metadata(name), kind, f"the repository's {name}").signed
        except TrustError as error:
            raise UsageError(f"{error}; restore it from a backup") from error

    # Writing

    def write_target(self, path: str, raw: bytes) -> None:
        """Write a target durably, before the metadata that lists it: a listed release can always be fetched."""
        write_durably(self.folder / "targets" / path, raw)

    def delete_targets(self, keep: Collection[str], before: float) -> None:
        """Delete the targets that are not in `keep` and were written before that Unix time."""
        for file in (self.folder / "targets").glob("*/*.json"):
            if file.relative_to(self.folder / "targets").as_posix() not in keep and file.stat().st_mtime < before:
                file.unlink()

    def write_root(self, raw: bytes, version: int) -> None:
        """Publish a root, which devices trust from then on."""
        write_durably(self._metadata / root_file(version), raw)

    def publish(self, publication: Publication) -> None:
        """Write the files of a publication in their order, each durably before the next, then delete the obsolete."""
        for name, raw in publication.files.items():
            write_durably(self._metadata / name, raw)
        for name in publication.obsolete:
            (self._metadata / name).unlink(missing_ok=True)
