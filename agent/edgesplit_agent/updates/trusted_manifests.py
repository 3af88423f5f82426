"""Which statements and manifests are trusted: each is verified by signed metadata before it is used, and what lies on
disk is verified again when it is read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from edgesplit.errors import EdgeError, LinkError, TrustError
from edgesplit.mqtt.remote_inference import InferenceJob
from edgesplit.release.manifest import Manifest, Statement
from edgesplit.release_store import StoredRelease, open_release
from edgesplit.trust.store import Fetch, TrustStore
from edgesplit.trust.verification import verify_manifest, verify_statement_offline
from edgesplit_agent.state.data_folder import DataFolder, Identity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerifiedManifest:
    """A release's verified manifest, with the signed metadata that proves it."""

    raw: bytes
    proof: dict[str, bytes]
    manifest: Manifest


class TrustedManifests:
    """The verified manifests of wanted releases, and the trust store that verifies them."""

    def __init__(self, folder: DataFolder, identity: Identity, *, now: Callable[[], float] = time.time) -> None:
        """`now` is the wall clock, in Unix seconds."""
        self.root = identity.tuf_root.encode()
        self._releases = folder.releases
        self._device = identity.device
        self._trust = TrustStore(folder.trust, self.root, now=now)
        self._manifests: dict[str, VerifiedManifest] = {}

    def verify_statement(self, raw: bytes, fetch: Fetch) -> Statement:
        """Refresh the metadata and verify the statement; TrustError where it must not be trusted."""
        self._trust.refresh(fetch)
        return self._trust.verify_statement(raw, self._device, for_install=True)

    def verify_inference_job(self, raw: bytes, fetch: Fetch) -> InferenceJob:
        """Verify a remote inference; the metadata is refreshed where it is too old to, or names another director key.
        TrustError where it must not be run."""
        with suppress(LinkError, TrustError):
            return self._trust.verify_inference_job(raw, self._device)
        self._trust.refresh(fetch)
        return self._trust.verify_inference_job(raw, self._device)

    def verify_stored_statement(self, raw: bytes) -> Statement | None:
        """The statement accepted in an earlier run, if its signatures still verify; what runs does not depend on it."""
        try:
            return verify_statement_offline(raw, self._device, self._trust.proof(), self.root)
        except EdgeError as error:
            log.warning("the stored statement cannot be verified until the controller is reached: %s", error)
            return None

    def fetch(self, release: str, fetch: Fetch) -> VerifiedManifest:
        """Fetch and verify the manifest, with the signed metadata that proves it offline (for a recut also of its base
        release). `add` makes it known."""
        raw, proof = self._trust.manifest_with_proof(release, fetch)
        return VerifiedManifest(raw, proof, verify_manifest(raw, proof, self.root))

    def add(self, release: str, verified: VerifiedManifest) -> None:
        """Keep a fetched manifest until it is staged."""
        self._manifests[release] = verified

    def find(self, release: str) -> VerifiedManifest | None:
        """The verified manifest of a fetched or staged release; None where it is neither."""
        if release not in self._manifests:
            try:
                home = self.open(release).folder
            except TrustError:
                return None
            raw = (home / "manifest.json").read_bytes()
            proof = {path.name: path.read_bytes() for path in (home / "proof").glob("*.json")}
            self.add(release, VerifiedManifest(raw, proof, verify_manifest(raw, proof, self.root)))
        return self._manifests[release]

    def get(self, release: str) -> VerifiedManifest:
        """The verified manifest; LinkError where it is not here."""
        verified = self.find(release)
        if verified is None:
            raise LinkError(f"the manifest of release {release[:12]} is not here")
        return verified

    def __contains__(self, release: str) -> bool:
        """Whether the manifest is in memory."""
        return release in self._manifests

    def open(self, release: str) -> StoredRelease:
        """The release as stored on disk, verified."""
        return open_release(self._releases, release, self.root)

    def forget_others(self, releases: Collection[str]) -> None:
        """Forget the manifests of all other releases."""
        self._manifests = {release: verified for release, verified in self._manifests.items() if release in releases}
