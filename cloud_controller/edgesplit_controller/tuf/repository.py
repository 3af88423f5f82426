"""The TUF repository, and the director's signature: the rules of `tuf.repository_signer` over the files of
`tuf.metadata_store`.

Promises: metadata is written durably, the timestamp last, so that a crash at any write leaves the repository as it was
before. Nothing is kept in memory between calls, so several processes may share the folder.

Leaves to others: changes of the keys (`tuf.rotation`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from tuf.api.metadata import Metadata, TargetFile, Targets
from tuf.api.serialization.json import JSONSerializer

from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.mqtt.remote_inference import InferenceJob
from edgesplit.release.fingerprint import Fingerprint, decode_fingerprint, fingerprint_file
from edgesplit.release.manifest import Manifest, Statement, decode_manifest, release_digest
from edgesplit.release.recut import check_recut
from edgesplit.trust.verification import (
    BASE_FILE,
    FINGERPRINT_FILE,
    PLANNER,
    PLANNER_FILE,
    TARGETS_FILE,
    fingerprint_path,
    recut_path,
    target_path,
)
from edgesplit_controller.errors import Conflict
from edgesplit_controller.tuf.key_folder import KeyFolder
from edgesplit_controller.tuf.metadata_store import MetadataStore
from edgesplit_controller.tuf.repository_signer import PublishedMetadata, RepositorySigner, delegated_keys

RELEASE_KEY_ELSEWHERE: Final = "say where it is with --sign-with URI (or EDGESPLIT_SIGN_WITH), as in file2:release.pem"


class Repository:
    """The repository in `folder`, created there if there is none. Safe from any thread and process."""

    def __init__(self, folder: Path, *, now: Callable[[], float] = time.time) -> None:
        self.keys = KeyFolder(folder / "keys")
        self.store = MetadataStore(folder)
        self.signer = RepositorySigner(self.keys, now)
        store, signer = self.store, self.signer
        with store.exclusive():
            if not store.root_version:
                store.write_root(signer.first_root(), 1)
            if not store.is_published:
                first = signer.unpublished(store.root(), store.role_versions())
                store.publish(signer.publish(first, targets=signer.next_targets(first), planner=first.planner))
        self.refresh_timestamp()

    # Reading

    @property
    def root_bytes(self) -> bytes:
        """The newest root metadata, which a claim gives to a new device."""
        return self.store.metadata(self.store.roots()[-1])

    @property
    def signs_releases(self) -> bool:
        """Whether the release key is stored here."""
        return self.signer.holds("targets", self.store.root())

    def published_metadata(self) -> tuple[bytes, bytes]:
        """The root and the targets metadata as devices receive them now."""
        with self.store.exclusive():
            return self.root_bytes, self.store.published().raw_targets

    def releases(self) -> list[str]:
        """Digests of all signed releases."""
        return sorted(Path(path).stem for path in self.store.targets().targets)

    def recuts(self) -> list[str]:
        """Digests of all recuts that the planner key signed."""
        return sorted(Path(path).stem for path in self.store.planner().targets)

    def delegated_keys(self, role: str) -> list[str]:
        """Ids of the keys that devices accept for the director, or the planner."""
        return delegated_keys(self.store.targets(), role)

    def read(self, path: str) -> bytes:
        """The file that a device requested, "metadata/…" or "targets/…"; FileNotFoundError if there is none."""
        return self.store.read(path)

    def manifest(self, digest: str) -> bytes:
        """Manifest bytes of a signed release or recut; FileNotFoundError if there is none."""
        return self.store.manifest(digest)

    def proof(self, digest: str) -> dict[str, bytes]:
        """Files that prove a release without a network: every root, and the targets metadata that lists it; for a recut
        also the planner's metadata and the base. TrustError if it is not in the repository."""
        store = self.store
        with store.exclusive():
            published = store.published()
            proof = {name: store.metadata(name) for name in store.roots()} | {TARGETS_FILE: published.raw_targets}
            if target_path(digest) in published.targets.targets:
                return proof
            if recut_path(digest) not in published.planner.targets:
                raise TrustError(f"release {digest[:12]} is not in the repository")
            raw_base, raw_fingerprint = self._base_of(decode_manifest(self.manifest(digest)))
            fingerprint = {} if raw_fingerprint is None else {FINGERPRINT_FILE: raw_fingerprint}
            raw_planner = store.metadata(f"{published.planner.version}.{PLANNER_FILE}")
            return {**proof, PLANNER_FILE: raw_planner, BASE_FILE: raw_base, **fingerprint}

    def offline_files(self, releases: Collection[str]) -> tuple[dict[str, bytes], dict[str, float]]:
        """The metadata and manifests that lead from any root to these releases, by the paths under which devices fetch
        them, as one consistent set; and the expiry of each role in Unix seconds. The timestamp is signed again, to be
        valid as long as possible."""
        store = self.store
        with store.exclusive():
            published = store.published()
            if self.signer.has_online_keys(published.root):
                store.publish(self.signer.renew_timestamp(published))
                published = store.published()
            recuts = {digest for digest in releases if recut_path(digest) in published.planner.targets}
            names = ["timestamp.json", *published.listed_files(), *store.roots()]
            files = {f"metadata/{name}": store.metadata(name) for name in names}
            for digest in releases:
                is_release = target_path(digest) in published.targets.targets
                files.update(self._release_files(digest, target_path(digest) if is_release else recut_path(digest)))
        expiries = {role: expires.timestamp() for role, (_, expires) in published.expiries().items()}
        return files, {role: expires for role, expires in expiries.items() if role != PLANNER or recuts}

    def _release_files(self, digest: str, path: str) -> dict[str, bytes]:
        """Files of a release by path: its manifest at `path`, and for a recut also its base."""
        raw = self.manifest(digest)
        files = {path: raw}
        manifest = decode_manifest(raw)
        if manifest.recut_of:
            files[target_path(manifest.recut_of)], raw_fingerprint = self._base_of(manifest)
            if raw_fingerprint is not None:
                files[fingerprint_path(fingerprint_file(raw_fingerprint).sha256)] = raw_fingerprint
        return {f"targets/{name}": content for name, content in files.items()}

    def _base_of(self, recut: Manifest) -> tuple[bytes, bytes | None]:
        """The manifest of a recut's base, and its fingerprint where it has one."""
        raw_base = self.store.target(target_path(recut.recut_of))
        fingerprint = decode_manifest(raw_base).fingerprint
        return raw_base, None if fingerprint is None else self.store.target(fingerprint_path(fingerprint.sha256))

    # Publishing

    def add_release(self, raw_manifest: bytes) -> str:
        """Sign a release and publish it; return its digest. Idempotent. Conflict if the release key is stored
        elsewhere."""
        decode_manifest(raw_manifest)
        digest = release_digest(raw_manifest)
        path = target_path(digest)
        with self.store.exclusive():
            published = self.store.published()
            if path not in published.targets.targets:
                if not self.signer.holds("targets", published.root):
                    raise Conflict(f"the release key does not lie on this controller: {RELEASE_KEY_ELSEWHERE}")
                self.store.write_target(path, raw_manifest)
                targets = self.signer.next_targets(published, [raw_manifest])
                self.store.publish(self.signer.publish(published, targets=targets))
        return digest

    def add_fingerprint(self, raw: bytes) -> None:
        """Store a model's fingerprint for devices to fetch; it is authenticated by the signed manifest,
        which contains its
        digest."""
        self.store.write_target(fingerprint_path(fingerprint_file(raw).sha256), raw)

    def add_recut(self, raw_manifest: bytes) -> str:
        """Sign a recut of a release with the planner key and publish it; return its digest. Idempotent. The release key
        is not needed.

        TrustError if the manifest is no valid recut of a release in the targets metadata: devices would refuse it.
        """
        recut = decode_manifest(raw_manifest)
        digest = release_digest(raw_manifest)
        path = recut_path(digest)
        with self.store.exclusive():
            published = self.store.published()
            check_recut(recut, *self._listed_base_of(recut, published.targets))
            planner = published.planner
            if path not in planner.targets:
                self.store.write_target(path, raw_manifest)
                planner.targets[path] = TargetFile.from_data(path, raw_manifest, ["sha256"])
                self.store.publish(self.signer.publish(published, planner=planner))
        return digest

    def _listed_base_of(self, recut: Manifest, targets: Targets) -> tuple[Manifest, Fingerprint | None]:
        """The base of a recut, and its fingerprint; TrustError if the targets metadata does not list the base."""
        if not recut.recut_of or target_path(recut.recut_of) not in targets.targets:
            raise TrustError("this is no recut of a release that the release key signed")
        try:
            raw_base, raw_fingerprint = self._base_of(recut)
        except (FileNotFoundError, MalformedMessage) as error:
            raise UsageError(f"the repository lacks release {recut.recut_of}: restore it from a backup") from error
        base = decode_manifest(raw_base)
        return base, decode_fingerprint(
            raw_fingerprint, base.fingerprint
        ) if raw_fingerprint and base.fingerprint else None

    def unsigned_targets(self, *raw_manifests: bytes) -> bytes:
        """Targets metadata for the release key to sign that adds these releases; without any, it only extends the
        expiry."""
        for raw in raw_manifests:
            decode_manifest(raw)
        with self.store.exclusive():
            following = self.signer.next_targets(self.store.published(), raw_manifests)
        return Metadata(following).to_bytes(JSONSerializer(compact=True))

    def add_signed(self, raw_targets: bytes, raw_manifests: Sequence[bytes]) -> None:
        """Publish targets metadata that was signed elsewhere: the present one with these releases added.

        TrustError for anything else, Conflict if another was published meanwhile; neither changes anything.
        """
        with self.store.exclusive():
            published = self.store.published()
            self.signer.check_signed(published, raw_targets, raw_manifests)
            for raw in raw_manifests:
                self.store.write_target(target_path(release_digest(raw)), raw)
            self.store.publish(self.signer.publish_signed(published, raw_targets))

    def unlist(self, listed: Callable[[], Collection[str]], before: float) -> list[str]:
        """Remove the releases and recuts that are not in `listed()` from the signed lists, then every target that no
        list leads to and that was written before the Unix time `before`; return the digests that were removed.

        `listed` is called while no other process can publish. Releases stay listed while their key is elsewhere, and
        nothing changes while a key change is pending, because what is signed for it contains the lists.
        """
        with self.store.exclusive():
            if self.store.has_pending_change:
                return []
            published, wanted = self.store.published(), set(listed())
            gone = set()
            if self.signer.holds("targets", published.root):
                gone = {path for path in published.targets.targets if Path(path).stem not in wanted}
            gone_recuts = {path for path in published.planner.targets if Path(path).stem not in wanted}
            if gone or gone_recuts:
                self._publish_without(published, gone, gone_recuts)
            self.store.delete_targets(self._reachable_targets(), before)
        return sorted(Path(path).stem for path in gone | gone_recuts)

    def _publish_without(
        self, published: PublishedMetadata, releases: Collection[str], recuts: Collection[str]
    ) -> None:
        """Publish the metadata without the targets of these paths."""
        targets = self.signer.next_targets(published) if releases else None
        for path in releases:
            assert targets is not None
            del targets.targets[path]
        for path in recuts:
            del published.planner.targets[path]
        self.store.publish(self.signer.publish(published, targets=targets, planner=published.planner))

    def _reachable_targets(self) -> set[str]:
        """Paths of the targets that the published lists name, and of the fingerprints that their manifests name."""
        paths = {*self.store.targets().targets, *self.store.planner().targets}
        manifests = [decode_manifest(self.store.target(path)) for path in paths]
        fingerprints = {
            fingerprint_path(manifest.fingerprint.sha256) for manifest in manifests if manifest.fingerprint is not None
        }
        return paths | fingerprints

    def renew(self) -> None:
        """Sign the metadata that devices fetch again, with versions that follow the clock; done at each start of a
        controller.

        A restored backup contains older versions than devices have seen, which they refuse (TUF 5.4.3, 5.5.5). If it
        lacks the online keys of the newest root, nothing can be signed until these are rotated.
        """
        with self.store.exclusive():
            published = self.store.published()
            if self.signer.has_online_keys(published.root):
                self.store.publish(self.signer.publish_again(published))

    def refresh_timestamp(self) -> bool:
        """Sign again what has passed half its validity, so that devices never receive expired metadata; return whether
        anything was signed.

        Metadata whose key is stored elsewhere is left alone: `edgectl keys show` reports when it is due.
        """
        with self.store.exclusive():
            renewal = self.signer.renewal(self.store.published())
            if renewal is not None:
                self.store.publish(renewal)
            return renewal is not None

    def sign_statement(self, statement: Statement) -> bytes:
        """Sign a statement with the director's keys; returns the encoded message."""
        return self.signer.sign_for_device(statement)

    def sign_inference_job(self, job: InferenceJob) -> bytes:
        """Sign a remote inference with the director's keys; returns the encoded `Signed`."""
        return self.signer.sign_for_device(job)
