"""Carries out the reconciler's steps by the parts that know how: `assignment`, `release_installer`, `trial_controller`
and `bundle.importer` for models, `self_update.manager` for the agent's own version."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from edgesplit.errors import LinkError
from edgesplit.mqtt.messages import ModelState
from edgesplit.mqtt.remote_inference import InferenceJob
from edgesplit.release.agent_release import AGENT_MODEL, is_agent_release
from edgesplit.release.manifest import Gateway, Statement
from edgesplit.release.privacy_floor import PrivacyFloor
from edgesplit_agent.control.mqtt_uplink import Uplink
from edgesplit_agent.releases.chunk_store import ChunkStore
from edgesplit_agent.releases.content_keys import ContentKeys
from edgesplit_agent.releases.tuner import Tuner
from edgesplit_agent.self_update.manager import VersionManager
from edgesplit_agent.state.activation_store import ActivationStore
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.updates.assignment import Assignment
from edgesplit_agent.updates.bundle.importer import BundleImporter, OnProgress
from edgesplit_agent.updates.download_window import DownloadWindow
from edgesplit_agent.updates.release_installer import ReleaseInstaller
from edgesplit_agent.updates.release_loader import ReleaseLoader, ServingEngine
from edgesplit_agent.updates.trial_controller import OnActivated, TrialController
from edgesplit_agent.updates.trusted_manifests import TrustedManifests
from edgesplit_agent.worker.host import StartHost


class DeviceUpdateActions:
    """Implements `reconciler.UpdateActions` over the data folder. Steps that concern models alone are those of its
    parts; the others are directed here to models or to the agent's own version."""

    def __init__(
        self,
        folder: DataFolder,
        identity: Identity,
        engine: ServingEngine,
        store: ChunkStore,
        start_host: StartHost,
        *,
        floor: PrivacyFloor | None = None,
        check_endpoint: Callable[[], None] = lambda: None,
        download_window: DownloadWindow | None = None,
        tuner: Tuner | None = None,
        use_gateway: Callable[[Gateway | None], None] = lambda gateway: None,
        on_activated: OnActivated = lambda model, release, drift, golden: None,
        on_bundle_progress: OnProgress = lambda done, of: None,
        version_manager: VersionManager | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`check_endpoint` raises where the local endpoint does not answer. `use_gateway` is called with each accepted
        statement's gateway (None: offload to the cloud). `on_activated` is called after each activation. `now` is the
        wall clock, in Unix seconds."""
        self._engine = engine
        self._uplink: Uplink | None = None
        self._activation = ActivationStore(folder)
        self._version_manager = version_manager or VersionManager(folder)
        self._manifests = TrustedManifests(folder, identity, now=now)
        self._assignment = Assignment(
            self._manifests, self._activation, self._version_manager, ContentKeys(folder, identity),
            identity.device_class, floor, use_gateway,
        )  # fmt: skip
        self._installer = ReleaseInstaller(
            folder, store, self._manifests, self._assignment, self._activation, self._version_manager,
            download_window or DownloadWindow(), lambda: self._connected_uplink,
        )  # fmt: skip
        loader = ReleaseLoader(store, self._manifests, self._assignment, engine, start_host, tuner)
        self._trials = TrialController(
            self._activation, loader, engine, self._version_manager, check_endpoint, on_activated
        )
        self._bundles = BundleImporter(identity.device, self._assignment, self._installer, on_bundle_progress)
        self.stage, self.progress = self._installer.stage, self._installer.progress
        self.reverify, self.commit, self.roll_back = self._trials.reverify, self._trials.commit, self._trials.roll_back
        self.mark_start_healthy, self.retire = self._trials.mark_start_healthy, self._trials.retire
        self.installed, self.on_stopped = self._trials.installed, self._trials.on_stopped

    def boot(self) -> Statement | None:
        """Serve the state of the last run without a network: signatures and digests are verified again, expiry is not.
        Returns the last accepted statement, or None."""
        self._trials.count_start(self._installer.stored_state())
        statement = self._assignment.restore()  # first: it brings the content keys that loading needs
        self._trials.serve_stored()
        return statement

    @property
    def built_for(self) -> str:
        """Tag of the agent builds that fit this machine; empty where the agent cannot change its version."""
        return self._version_manager.built_for

    def connect(self, uplink: Uplink) -> None:
        """Set the uplink, by which releases are fetched and reports are sent."""
        self._uplink = uplink

    @property
    def _connected_uplink(self) -> Uplink:
        """The uplink; LinkError before `connect`."""
        if self._uplink is None:
            raise LinkError("not connected yet")
        return self._uplink

    def accept_statement(self, raw: bytes) -> Statement:
        """Refresh the metadata and verify the statement. An accepted statement is stored for the next start and
        returned; TrustError where it must not be trusted."""
        return self._assignment.accept(raw, self._connected_uplink.metadata.fetch)

    def verify_inference_job(self, raw: bytes) -> InferenceJob:
        """Verify a remote inference, refreshing the metadata where necessary; TrustError where it must not be run."""
        return self._manifests.verify_inference_job(raw, self._connected_uplink.metadata.fetch)

    def apply_bundle_at(
        self, path: str, on_statement: Callable[[Statement], None], superseded: Callable[[], bool]
    ) -> str:
        """Fetch and stage what is wanted from the release bundle at that path; what it lacks, for people."""
        return self._bundles.apply(Path(path), on_statement, superseded)

    def fetch_manifest(self, release: str) -> None:
        """Fetch and verify the release's manifest."""
        self._installer.fetch_manifest(release, self._connected_uplink.metadata.fetch)

    def fetch_missing(self, release: str, superseded: Callable[[], bool]) -> bool:
        """Fetch the missing chunks; False where `superseded()` interrupted it."""
        return self._installer.fetch_missing(release, superseded)

    def verify(self, release: str) -> None:
        """Load the release and run its golden inputs, or install the version of the agent and run its check."""
        if is_agent_release(self._manifests.get(release).manifest):
            self._version_manager.verify(self._manifests.open(release), self._activation.current.counter)
        else:
            self._trials.verify(release)

    def activate(self, model: str, release: str) -> None:
        """Make the release the running one, on trial."""
        if model != AGENT_MODEL:
            return self._trials.activate(model, release)
        # The next version need not reach the broker to be healthy where a release bundle brought the statement and the
        # broker is unreachable now.
        is_offline = self._assignment.is_from_bundle and not (self._uplink is not None and self._uplink.connected)
        manifest, counter = self._manifests.open(release).manifest, self._activation.current.counter
        self._version_manager.activate(manifest, release, self._engine.serving, counter, online=not is_offline)

    def collect_garbage(self, want: Statement) -> None:
        """Remove releases that neither run nor are wanted."""
        self._trials.drop_unserved({wanted.model for wanted in want.releases})
        needed = {*self._assignment.protected, *(wanted.release for wanted in (*want.releases, *want.gateway_releases))}
        self._installer.remove_others(needed)
        self._trials.unload_others(needed)

    def report(
        self, counter: int, models: tuple[ModelState, ...], safe_mode: str, trouble: str, kept: tuple[ModelState, ...]
    ) -> None:
        """Send a report to the controller."""
        self._connected_uplink.report(counter, models, safe_mode, trouble, kept)
