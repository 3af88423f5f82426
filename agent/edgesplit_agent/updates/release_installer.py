"""Brings releases onto this device's disk: fetches manifests and chunks, assembles and stages them, and removes what is
no longer needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from edgesplit.crypto.key_file import has_keys, write_keys
from edgesplit.errors import EdgeError, LinkError, TrustError
from edgesplit.identifiers import ModelRef
from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit.release.manifest import Manifest
from edgesplit.release_store import adopt_release, stored_releases
from edgesplit.trust.store import Fetch
from edgesplit_agent.control.mqtt_uplink import Uplink
from edgesplit_agent.releases.chunk_store import ChunkStore, ReleaseLayout
from edgesplit_agent.releases.disk_quota import MANIFEST_ALLOWANCE_BYTES
from edgesplit_agent.self_update.manager import VersionManager
from edgesplit_agent.state.activation_store import ActivationStore
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_agent.state.slots import Current, Slots
from edgesplit_agent.updates.assignment import Assignment
from edgesplit_agent.updates.bundle.fetcher import BundleFetcher
from edgesplit_agent.updates.download_window import DownloadWindow
from edgesplit_agent.updates.reconciler import ReleaseProgress, is_final
from edgesplit_agent.updates.trusted_manifests import TrustedManifests

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReleaseInstaller:
    """The releases on disk and on their way there."""

    folder: DataFolder
    store: ChunkStore
    manifests: TrustedManifests
    assignment: Assignment
    activation: ActivationStore
    version_manager: VersionManager
    download_window: DownloadWindow
    uplink: Callable[[], Uplink]
    """Returns the connected uplink; LinkError where there is none yet."""

    def stored_state(self) -> Current:
        """The activation state on disk, or one rebuilt from the releases there."""
        return self.folder.read_current() or Current(models=self._rebuild_slots())

    def _rebuild_slots(self) -> dict[str, Slots]:
        """Slots for the case that `current.json` is missing: for each model its oldest complete release, which is the
        likeliest to be good, on trial. The next statement corrects a wrong guess."""
        slots: dict[str, Slots] = {}
        folder = self.folder.releases
        for release in sorted(stored_releases(folder), key=lambda name: (folder / name).stat().st_mtime):
            try:
                opened = self.manifests.open(release)
                model = ModelRef.parse(opened.manifest.model).name
                if model == AGENT_MODEL:
                    continue
                if model not in slots and opened.has_slices(self.assignment.own_slices(opened.manifest)):
                    slots[model] = Slots(trial=release)
                    log.warning("current.json is lost: %s runs from release %s, found here", model, release[:12])
            except EdgeError as error:
                log.warning("release %s cannot be used: %s", release[:12], error)
        return slots

    def progress(self, release: str) -> ReleaseProgress:
        """Progress of a release by what is on disk now; every byte is hashed."""
        reason = self.activation.current.rejected.get(release) or self.version_manager.bad_reason(release)
        if reason is not None:
            return ReleaseProgress(refused=reason, bad=True)
        if (reason := self.version_manager.refusal_reason(release)) is not None:
            return ReleaseProgress(refused=reason)
        try:
            verified = self.manifests.find(release)
            if verified is None:
                return ReleaseProgress()
            staged = self._is_staged(release, verified.manifest)
            slices = set() if staged else self.assignment.slices(release, verified.manifest)
            missing = self.store.assembly(ReleaseLayout.from_manifest(release, verified.manifest, slices)).missing()
            return ReleaseProgress(manifest=True, whole=not missing, staged=staged)
        except (EdgeError, OSError) as error:
            if is_final(error):
                return ReleaseProgress(refused=str(error))
            # A disk that is full or fails at present: the next step fails with the same error, and is retried.
            return ReleaseProgress(manifest=release in self.manifests, trouble=str(error))

    def _is_staged(self, release: str, manifest: Manifest) -> bool:
        """Whether the wanted slices are on disk, and for a gateway the content keys of what it runs for others."""
        try:
            opened = self.manifests.open(release)
            lacks_keys = self.assignment.needs_gateway_keys(release, manifest) and not has_keys(opened.folder)
            return opened.has_slices(self.assignment.slices(release, manifest)) and not lacks_keys
        except TrustError:
            return False

    def fetch_manifest(self, release: str, fetch: Fetch) -> None:
        """Fetch and verify the manifest. A release whose content keys are missing here fails now, before its chunks are
        fetched."""
        verified = self.manifests.fetch(release, fetch)
        self.assignment.check_usable(release, verified.manifest)
        self.manifests.add(release, verified)

    def make_room(self, releases: Sequence[str]) -> None:
        """Make room for all of these releases together, before the first byte of them is written."""
        layouts = [self._layout(release) for release in releases]
        missing_by_layout = [(layout, self.store.assembly(layout).missing()) for layout in layouts]
        further_bytes = sum(
            layout.bytes_of(missing) + MANIFEST_ALLOWANCE_BYTES for layout, missing in missing_by_layout[1:]
        )
        for layout, missing in missing_by_layout[:1]:
            self.store.make_room(layout, missing, {*self.assignment.protected, *releases}, further_bytes)

    def _layout(self, release: str) -> ReleaseLayout:
        manifest = self.manifests.get(release).manifest
        return ReleaseLayout.from_manifest(release, manifest, self.assignment.slices(release, manifest))

    def fetch_missing(self, release: str, superseded: Callable[[], bool], bundle: BundleFetcher | None = None) -> bool:
        """Fetch the missing chunks from the bundle, or from the uplink while the download window is open, if there is
        room for them; False where `superseded()` interrupted it. NotNow outside the window, NoRoom without room."""
        urgent = self.assignment.is_urgent(release)
        self.download_window.check_power(urgent)
        layout = self._layout(release)
        assembly = self.store.assembly(layout)
        assembly.link_shared_files()
        absent = assembly.missing()
        self.store.make_room(layout, absent, self.assignment.protected)
        missing = assembly.copy_shared_chunks(absent)
        if not missing:
            return True
        log.info("release %s: %d of %d chunks are missing", release[:12], len(missing), len(layout.sizes))
        all_chunks = tuple(self.manifests.get(release).manifest.chunk_list())
        if bundle is not None:  # the operator who brought the bundle chose the hour: no download window
            bundle.fetch_chunks(release, missing, all_chunks, assembly.put_all, superseded)
            return not superseded()
        self.download_window.check(urgent)

        def stop() -> bool:
            return superseded() or self.download_window.is_held(urgent)

        self.uplink().chunks.fetch(release, missing, all_chunks, assembly.put_all, stop)
        if not superseded():
            self.download_window.check(urgent)
        return not superseded()

    def stage(self, release: str) -> None:
        """Turn the assembled slices into a release on disk, by a rename. LinkError where chunks were damaged on disk
        meanwhile and must be fetched again."""
        verified = self.manifests.get(release)
        slices = self.assignment.slices(release, verified.manifest)
        assembly = self.store.assembly(ReleaseLayout.from_manifest(release, verified.manifest, slices))
        assembly.folder.mkdir(parents=True, exist_ok=True)
        try:
            adopt_release(
                self.folder.releases, release, verified.raw, verified.proof, assembly.folder, slices,
                bootstrap_root=self.manifests.root,
            )  # fmt: skip
        except TrustError as error:
            if assembly.missing():
                raise LinkError(
                    f"release {release[:12]} was corrupt on disk: its damaged chunks are fetched again"
                ) from error
            raise
        if keys := self.assignment.gateway_keys(release, verified.manifest):
            write_keys(self.folder.releases / release, keys)

    def remove_others(self, needed: Collection[str]) -> None:
        """Remove all other releases and versions of the agent, and all loose chunks, because what is wanted is
        staged."""
        self.store.remove_others(needed)
        self.version_manager.collect_garbage(needed)
        self.manifests.forget_others(needed)
