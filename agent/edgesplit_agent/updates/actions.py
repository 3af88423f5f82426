"""Carries out the reconciler's steps: what each does to this device's disk, trust store and engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

from edgesplit.crypto.key_file import has_keys, write_keys
from edgesplit.crypto.slice_encryption import decrypting_chunk_source, needed_keys
from edgesplit.errors import EdgeError, LinkError, TrustError, UsageError
from edgesplit.identifiers import ModelRef
from edgesplit.mqtt.messages import ModelState
from edgesplit.release.agent_release import AGENT_MODEL, is_agent_release
from edgesplit.release.manifest import Gateway, Manifest, Statement, device_slices, gateway_slices
from edgesplit.release.privacy_floor import PrivacyFloor
from edgesplit.release_store import StoredRelease, adopt_release, open_release, stored_releases
from edgesplit.runtime import Tensor, Tensors
from edgesplit.trust.store import Fetch, TrustStore, verify_manifest, verify_statement_offline
from edgesplit_agent.control.mqtt_uplink import Uplink
from edgesplit_agent.releases.chunk_store import ChunkStore, ReleaseLayout
from edgesplit_agent.releases.content_keys import ContentKeys
from edgesplit_agent.releases.disk_quota import MANIFEST_ALLOWANCE_BYTES
from edgesplit_agent.releases.loaded_release import LoadedRelease, check_golden, golden_inputs, load_release, plan_for
from edgesplit_agent.releases.output_drift import Drift, drift_of, worst_drift
from edgesplit_agent.releases.synthetic_inputs import make_synthetic_inputs, unchanged_answers_check
from edgesplit_agent.releases.tuner import Tuner
from edgesplit_agent.self_update.manager import VersionManager
from edgesplit_agent.state import slots as activation
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.state.slots import Current, Slots
from edgesplit_agent.updates.bundle.fetcher import BundleFetcher
from edgesplit_agent.updates.bundle.reader import open_bundle
from edgesplit_agent.updates.download_window import DownloadWindow
from edgesplit_agent.updates.reconciler import InstalledState, ReleaseProgress, is_final
from edgesplit_agent.worker.host import StartHost

log = logging.getLogger(__name__)

LONGEST_COMPARISON_S = 30.0
"""Timeout of running the golden inputs on the previous release to measure the drift."""
OnActivated = Callable[[str, str, "Drift | None", "bool | None"], None]
"""Callback on an activation: model, release, its drift from the release before, and whether it passed its golden inputs
(None: it has none that can run on this device alone)."""


@dataclass(frozen=True, slots=True)
class _VerifiedManifest:
    """A release's verified manifest, with the signed metadata that proves it."""

    raw: bytes
    proof: dict[str, bytes]
    manifest: Manifest


class ServingEngine(Protocol):
    """The part of the engine that the actions need."""

    @property
    def serving(self) -> Mapping[str, LoadedRelease]:
        """The serving release by model."""
        ...

    def serve(self, model: str, release: LoadedRelease) -> None:
        """Answer requests for `model` by this release from now on."""
        ...

    def drop(self, model: str) -> None:
        """Stop answering requests for `model`."""
        ...


class DeviceUpdateActions:
    """Implements `reconciler.UpdateActions` over the data folder."""

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
        on_activated: OnActivated = lambda model, release, drift, golden_ok: None,
        version_manager: VersionManager | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`check_endpoint` raises where the local endpoint does not answer. `use_gateway` is called with each accepted
        statement's gateway (None: offload to the cloud). `on_activated` is called after each activation. `now` is the
        wall clock, in Unix seconds."""
        self._version_manager = version_manager or VersionManager(folder)
        self._use_gateway = use_gateway
        self._on_activated = on_activated
        self._drifts: dict[str, Drift | None] = {}
        """By release that is loaded and does not serve yet: its drift from the serving release, by golden answers."""
        self._folder = folder
        self._identity = identity
        self._engine = engine
        self._start_host = start_host
        self._floor = floor
        self._tuner = tuner
        self._root = identity.tuf_root.encode()
        self._trust = TrustStore(folder.trust, self._root, now=now)
        self._check_endpoint = check_endpoint
        self._store = store
        self._manifests: dict[str, _VerifiedManifest] = {}
        self._loaded: dict[str, LoadedRelease] = {}
        self._current = Current()
        self._starts_before = 0
        self._wanted: set[str] = set()
        """Releases that the newest accepted statement names."""
        self._own: set[str] = set()
        """Those of them that this device runs itself."""
        self._kept_for_others: set[str] = set()
        """Those of them that this device stores for the devices behind it, as their gateway."""
        self._urgent: set[str] = set()
        """Those of them that are fetched at any hour."""
        self._download_window = download_window or DownloadWindow(())
        self._keys = ContentKeys(folder.encryption_key_file, identity, folder.releases)
        self._uplink: Uplink | None = None
        self._is_statement_from_bundle = False
        """Whether the newest statement came in a release bundle."""
        self._bundle_fetcher: BundleFetcher | None = None
        """Replaces the uplink as the source of metadata and chunks while a release bundle is applied."""
        self.on_bundle_progress: Callable[[int, int], None] = lambda done, of: None
        """Callback on progress: bytes of a release copied from the bundle, and their total."""

    def boot(self) -> Statement | None:
        """Serve the state of the last run without a network: signatures and digests are verified again, expiry is not.
        Returns the last accepted statement, or None.

        A release on trial whose slices are damaged is replaced by the committed one; a model without an undamaged
        release is left out and fetched again; the other models go on. In safe mode nothing is loaded.
        """
        self._count_start()
        statement = self._stored_statement()  # first: it brings the content keys that loading needs
        if self._current.safe_mode is not None:
            log.error("safe mode, no model is loaded: %s", self._current.safe_mode.reason)
            return statement
        for model, slots in list(self._current.models.items()):
            if self._try_serve(model, slots.running) or not slots.trial:
                continue
            self._persist_best_effort(activation.without_trial(self._current, model), "what was on trial is spoilt")
            if slots.committed:
                self._try_serve(model, slots.committed)
        self._stop_spinning()
        return statement

    def _count_start(self) -> None:
        """Count this start on disk before anything is loaded. A disk error does not prevent the start."""
        stored = self._read_state()
        self._starts_before = stored.unhealthy_starts
        # While a version of the agent is on trial, an unhealthy start is that version's fault and was counted by the
        # launcher: counting it here too would roll back the models' releases for it.
        counted = stored if self._version_manager.on_trial else activation.with_start_counted(stored)
        if counted.unhealthy_starts == 1:  # the count has led to a rollback or to safe mode, and begins anew
            self._starts_before = 0
        for release in sorted(set(counted.rejected) - set(stored.rejected)):
            log.error("release %s is not loaded again: %s", release[:12], counted.rejected[release])
        self._persist_best_effort(counted, "this start is not counted")

    def _read_state(self) -> Current:
        """The stored activation state, or one rebuilt from the releases on disk."""
        return self._folder.read_current() or Current(models=self._rebuild_slots())

    def load_state_only(self) -> None:
        """Load the activation state without serving it, where no agent runs: only for `apply_bundle`."""
        self._current = self._read_state()

    def _rebuild_slots(self) -> dict[str, Slots]:
        """Slots for the case that `current.json` is missing: for each model its oldest complete release, which is the
        likeliest to be good, on trial. The next statement corrects a wrong guess."""
        slots: dict[str, Slots] = {}
        folder = self._folder.releases
        for release in sorted(stored_releases(folder), key=lambda name: (folder / name).stat().st_mtime):
            try:
                opened = self._open(release)
                model = ModelRef.parse(opened.manifest.model).name
                if model == AGENT_MODEL:
                    continue
                if model not in slots and opened.has_slices(self._own_slices(opened.manifest)):
                    slots[model] = Slots(trial=release)
                    log.warning("current.json is lost: %s runs from release %s, found here", model, release[:12])
            except EdgeError as error:
                log.warning("release %s cannot be used: %s", release[:12], error)
        return slots

    def _try_serve(self, model: str, release: str) -> bool:
        """Load a release and serve it; False, with the reason in the log, if it cannot be loaded."""
        try:
            self._engine.serve(model, self._load(release))
        except (EdgeError, OSError) as error:
            log.error("%s cannot be served from release %s as it is here: %s", model, release[:12], error)
            return False
        log.info("serving %s from release %s", model, release[:12])
        return True

    def on_stopped(self) -> None:
        """The agent was asked to end: this start counts neither as healthy nor as unhealthy."""
        self._version_manager.on_stopped()
        if self._current.unhealthy_starts > self._starts_before:
            self._persist_best_effort(
                activation.with_start_uncounted(self._current, self._starts_before), "this start stays counted"
            )

    def installed(self) -> InstalledState:
        """What is on disk and what the engine serves."""
        current = self._current
        own = self._version_manager
        running = {model: active.digest for model, active in self._engine.serving.items()}
        trials = {model: slots.trial for model, slots in current.models.items() if slots.trial}
        committed = {model: slots.committed for model, slots in current.models.items() if slots.committed}
        return InstalledState(
            running={**running, **own.running},
            trials={**trials, **(own.running if own.on_trial else {})},
            committed={**committed, **own.committed},
            served_before=own.served,
            offline_before=own.offline,
            held=frozenset(current.safe_mode.held if current.safe_mode else ()),
            safe_mode=current.safe_mode.reason if current.safe_mode else "",
            starts=current.unhealthy_starts,
        )

    def _stored_statement(self) -> Statement | None:
        """The last accepted statement, if its signatures still verify; what runs does not depend on it."""
        if not self._current.statement:
            return None
        try:
            proof = self._trust.proof()
            stored = verify_statement_offline(self._current.statement, self._identity.device, proof, self._root)
        except EdgeError as error:
            log.warning("the stored statement cannot be verified until the controller is reached: %s", error)
            return None
        self._adopt_statement(stored)
        return stored

    def _adopt_statement(self, statement: Statement) -> None:
        """Adopt the releases, keys and gateway of an accepted statement."""
        self._keys.use_statement(statement)
        self._own = {wanted.release for wanted in statement.releases}
        self._kept_for_others = {wanted.release for wanted in statement.gateway_releases}
        self._wanted = self._own | self._kept_for_others
        self._urgent = {
            wanted.release for wanted in (*statement.releases, *statement.gateway_releases) if wanted.fetch_now
        }
        self._use_gateway(statement.gateway)

    @property
    def built_for(self) -> str:
        """Tag of the agent builds that fit this machine; empty where the agent cannot change its version."""
        return self._version_manager.built_for

    def connect(self, uplink: Uplink) -> None:
        """Set the uplink, by which releases are fetched and reports are sent."""
        self._uplink = uplink

    def _needs_broker(self) -> bool:
        """Whether the next version of the agent must reach the broker to be healthy. Not where a release bundle brought
        the statement and the broker is unreachable now."""
        return not self._is_statement_from_bundle or (self._uplink is not None and bool(self._uplink.connected))

    @property
    def _connected_uplink(self) -> Uplink:
        """The uplink; LinkError before `connect`."""
        if self._uplink is None:
            raise LinkError("not connected yet")
        return self._uplink

    @property
    def _fetch(self) -> Fetch:
        """Source of metadata: the release bundle that is being applied, or the uplink."""
        return self._bundle_fetcher.fetch if self._bundle_fetcher is not None else self._connected_uplink.metadata.fetch

    # The steps

    def accept_statement(self, raw: bytes) -> Statement:
        """Refresh the metadata and verify the statement. An accepted statement is stored for the next start and
        returned; TrustError where it must not be believed."""
        self._trust.refresh(self._fetch)
        statement = self._trust.verify_statement(raw, self._identity.device, for_install=True)
        self._is_statement_from_bundle = self._bundle_fetcher is not None
        was_in_safe_mode = self._current.safe_mode is not None
        self._persist(activation.with_statement(self._current, raw, statement.counter))
        self._version_manager.on_statement(statement.counter)
        self._adopt_statement(statement)
        if was_in_safe_mode and self._current.safe_mode is None:
            log.warning("safe mode ends: the controller has said something new")
        return statement

    def apply_bundle_at(
        self, path: str, on_statement: Callable[[Statement], None], superseded: Callable[[], bool]
    ) -> str:
        """Apply the release bundle at that path by `apply_bundle`; which releases it lacks, for people, or an empty
        text."""
        fetcher = BundleFetcher(open_bundle(Path(path)), self.on_bundle_progress)
        try:
            fetcher.index()
            missing = self.apply_bundle(fetcher, on_statement, superseded)
        finally:
            fetcher.close()
        names = ", ".join(release[:12] for release in missing)
        return f"not in the bundle, or not for this device as it runs now: {names}" if missing else ""

    def apply_bundle(
        self, fetcher: BundleFetcher, on_statement: Callable[[Statement], None], superseded: Callable[[], bool]
    ) -> tuple[str, ...]:
        """Accept the bundle's statement, then fetch and stage from the bundle every release that the statement wants
        and that is not here.

        `on_statement` is called with the statement. Returns the releases that the bundle lacks, which the network may
        bring. Nothing is copied unless there is room for all of it.
        """
        self._bundle_fetcher = fetcher
        try:
            on_statement(self.accept_statement(fetcher.statement(self._identity.device)))
            wanted = [release for release in sorted(self._wanted) if self._is_missing(release)]
            carried = [release for release in wanted if self._fetch_bundled_manifest(release)]
            self._make_room(carried)
            for release in carried:
                if superseded() or not self.fetch_missing(release, superseded):
                    break
                self.stage(release)
            return tuple(release for release in wanted if not self.progress(release).staged)
        finally:
            self._bundle_fetcher = None

    def _is_missing(self, release: str) -> bool:
        """Whether the release is neither complete on disk nor refused."""
        progress = self.progress(release)
        return not (progress.staged and progress.whole) and not progress.refused

    def _fetch_bundled_manifest(self, release: str) -> bool:
        """Fetch the release's manifest from the bundle; False where the bundle lacks it, or the release does not fit
        this machine as it runs now."""
        try:
            self.fetch_manifest(release)
        except (LinkError, UsageError) as error:  # not in the bundle, or not for this machine as it runs now
            log.warning("release %s is not taken from the bundle: %s", release[:12], error)
            return False
        return True

    def _make_room(self, releases: Sequence[str]) -> None:
        """Make room for all of these releases together, before the first byte of them is written."""
        layouts = [self._layout(release) for release in releases]
        missing_by_layout = [(layout, self._store.assembly(layout).missing()) for layout in layouts]
        further_bytes = sum(
            layout.bytes_of(missing) + MANIFEST_ALLOWANCE_BYTES for layout, missing in missing_by_layout[1:]
        )
        for layout, missing in missing_by_layout[:1]:
            self._store.make_room(layout, missing, {*self._protected(), *releases}, further_bytes)

    def _layout(self, release: str) -> ReleaseLayout:
        manifest = self._manifest_of(release).manifest
        return ReleaseLayout.from_manifest(release, manifest, self._slices(release, manifest))

    def fetch_manifest(self, release: str) -> None:
        """Fetch and verify the manifest, with the signed metadata that proves it offline (for a recut also of its base
        release). A release whose content keys are missing here fails now, before its chunks are fetched."""
        raw, proof = self._trust.manifest_with_proof(release, self._fetch)
        verified = _VerifiedManifest(raw, proof, verify_manifest(raw, proof, self._root))
        if is_agent_release(verified.manifest):
            self._version_manager.slices(verified.manifest)
        elif self._runs(release):
            self._keys.for_device(release, verified.manifest, self._own_slices(verified.manifest))
        if release in self._kept_for_others:
            self._keys.for_gateway(release, verified.manifest)
        self._manifests[release] = verified

    def fetch_missing(self, release: str, superseded: Callable[[], bool]) -> bool:
        """Fetch the missing chunks, if there is room for them and the download window is open; False where
        `superseded()` interrupted it. NotNow outside the window, NoRoom without room."""
        self._download_window.check_power(release in self._urgent)
        layout = self._layout(release)
        assembly = self._store.assembly(layout)
        assembly.link_shared_files()
        absent = assembly.missing()
        self._store.make_room(layout, absent, self._protected())
        missing = assembly.copy_shared_chunks(absent)
        if not missing:
            return True
        log.info("release %s: %d of %d chunks are missing", release[:12], len(missing), len(layout.sizes))
        all_chunks = tuple(self._manifest_of(release).manifest.chunk_list())
        if self._bundle_fetcher is not None:  # the operator who brought the bundle chose the hour: no download window
            self._bundle_fetcher.fetch_chunks(release, missing, all_chunks, assembly.put_all, superseded)
            return not superseded()
        urgent = release in self._urgent
        self._download_window.check(urgent)

        def stop() -> bool:
            return superseded() or self._download_window.is_held(urgent)

        self._connected_uplink.chunks.fetch(release, missing, all_chunks, assembly.put_all, stop)
        if not superseded():
            self._download_window.check(urgent)
        return not superseded()

    def stage(self, release: str) -> None:
        """Turn the assembled slices into a release on disk, by a rename. LinkError where chunks were damaged on disk
        meanwhile and must be fetched again."""
        verified = self._manifest_of(release)
        slices = self._slices(release, verified.manifest)
        assembly = self._store.assembly(ReleaseLayout.from_manifest(release, verified.manifest, slices))
        assembly.folder.mkdir(parents=True, exist_ok=True)
        try:
            adopt_release(
                self._folder.releases, release, verified.raw, verified.proof, assembly.folder, slices,
                bootstrap_root=self._root,
            )  # fmt: skip
        except TrustError as error:
            if assembly.missing():
                raise LinkError(f"release {release[:12]} was spoilt on disk: it is completed again") from error
            raise
        if release in self._kept_for_others and (keys := self._keys.for_gateway(release, verified.manifest)):
            write_keys(self._folder.releases / release, keys)

    def verify(self, release: str) -> None:
        """Load the release and run its golden inputs; the loaded release is the one that `activate` serves.

        The attempt is recorded on disk before: a load that ends this process is not repeated once it has happened
        `UNHEALTHY_STARTS` times.
        """
        if is_agent_release(self._manifest_of(release).manifest):
            return self._version_manager.verify(self._open(release), self._current.counter)
        self._persist(activation.with_load_started(self._current, release))
        active = None
        try:
            active = self._load(release)
            self._drifts[release] = self._drift(active, self._run_golden(active))
            self._tune(active)
        # Only exceptions: a load that ends the process never gets here, so its attempt stays counted on disk.
        except Exception:
            if active is not None:
                active.retire()
            self._persist_best_effort(activation.with_load_finished(self._current, release), "this try stays counted")
            raise
        self._persist_best_effort(activation.with_load_finished(self._current, release), "this try stays counted")
        self._loaded[release] = active

    def activate(self, model: str, release: str) -> None:
        """Activate by one rename of `current.json`, then let the engine serve the release. The release that ran before
        stays complete on disk."""
        if model == AGENT_MODEL:
            manifest, serving = self._open(release).manifest, self._engine.serving
            counter = self._current.counter
            return self._version_manager.activate(manifest, release, serving, counter, online=self._needs_broker())
        active = self._loaded.get(release) or self._load(release)
        if active.model != model:
            raise TrustError(f"release {release[:12]} is of model {active.model!r}, not of {model!r}")
        self._persist(activation.with_activated(self._current, model, release))
        self._engine.serve(model, active)
        self._loaded.pop(release, None)
        has_runnable_golden = bool(active.manifest.golden) and active.plan.local is not None
        self._on_activated(model, release, self._drifts.pop(release, None), True if has_runnable_golden else None)
        on_trial = ", on trial" if self._current.models[model].trial else ""
        log.info("activated %s from release %s%s", model, release[:12], on_trial)

    def reverify(self, model: str) -> None:
        """Run the golden inputs on the serving release again; InferenceFailed where it fails them."""
        active = self._engine.serving.get(model)
        if active is not None:
            self._run_golden(active)

    def commit(self, model: str) -> None:
        """Commit the release on trial, once the local endpoint has answered."""
        self._check_endpoint()
        if model == AGENT_MODEL:
            return self._version_manager.commit()
        self._persist(activation.with_trial_committed(self._current, model))
        if not self._current.unhealthy_starts:  # no model is on trial any more: this start counts as healthy
            self._version_manager.mark_start_healthy()
        self._starts_before = min(self._starts_before, self._current.unhealthy_starts)
        log.info("%s is committed to release %s", model, self._current.models[model].committed[:12])

    def roll_back(self, model: str, reason: str) -> None:
        """Serve the committed release again, then record the rollback on disk.

        In this order, a power cut between the two only tries the bad release once more, and that start is counted.
        Where no committed release can be loaded the model is not served: no answer is better than a wrong one.
        """
        if model == AGENT_MODEL:
            return self._version_manager.roll_back(reason)
        slots = self._current.models[model]
        log.error("%s goes back from release %s: %s", model, slots.trial[:12], reason)
        serving = self._engine.serving.get(model)
        is_already_back = serving is not None and serving.digest == slots.committed
        if not is_already_back and not (slots.committed and self._try_serve(model, slots.committed)):
            self._engine.drop(model)
        self._persist(activation.with_rollback(self._current, model, reason))

    def mark_start_healthy(self) -> None:
        """Clear the count of starts, once the local endpoint has answered."""
        self._check_endpoint()
        self._version_manager.mark_start_healthy()
        self._persist(activation.with_start_healthy(self._current))
        self._starts_before = 0

    def retire(self, model: str) -> None:
        """Stop serving a model that no statement wants here."""
        self._persist(activation.without_model(self._current, model))
        self._engine.drop(model)
        log.info("retired %s", model)

    def collect_garbage(self, want: Statement) -> None:
        """Remove releases that neither run nor are wanted, and all loose chunks, because what is wanted is staged."""
        unwanted = set(self._current.models) - {wanted.model for wanted in want.releases} - set(self._engine.serving)
        for model in unwanted:  # damaged on disk, so never served in this run, and no longer wanted
            self._persist(activation.without_model(self._current, model))
        needed = {*self._protected(), *(wanted.release for wanted in (*want.releases, *want.gateway_releases))}
        self._store.remove_others(needed)
        self._version_manager.collect_garbage(needed)
        self._manifests = {release: verified for release, verified in self._manifests.items() if release in needed}
        for release in set(self._loaded) - needed:
            self._loaded.pop(release).retire()
            self._drifts.pop(release, None)

    def report(
        self,
        counter: int,
        models: tuple[ModelState, ...],
        safe_mode: str,
        trouble: str,
        kept: tuple[ModelState, ...],
    ) -> None:
        """Send a report to the controller."""
        self._connected_uplink.report(counter, models, safe_mode, trouble, kept)

    def progress(self, release: str) -> ReleaseProgress:
        """Progress of a release by what is on disk now; every byte is hashed."""
        reason = self._current.rejected.get(release) or self._version_manager.bad_reason(release)
        if reason is not None:
            return ReleaseProgress(refused=reason, bad=True)
        if (reason := self._version_manager.refusal_reason(release)) is not None:
            return ReleaseProgress(refused=reason)
        try:
            verified = self._manifests.get(release) or self._stored_manifest(release)
            if verified is None:
                return ReleaseProgress()
            self._manifests[release] = verified
            staged = self._is_staged(release, verified.manifest)
            slices = set() if staged else self._slices(release, verified.manifest)
            missing = self._store.assembly(ReleaseLayout.from_manifest(release, verified.manifest, slices)).missing()
            return ReleaseProgress(manifest=True, whole=not missing, staged=staged)
        except (EdgeError, OSError) as error:
            if is_final(error):
                return ReleaseProgress(refused=str(error))
            # A disk that is full or fails at present: the next step fails with the same error, and is retried.
            return ReleaseProgress(manifest=release in self._manifests, trouble=str(error))

    # Helpers of the steps

    def _persist(self, current: Current) -> None:
        """Write the activation state and adopt it. OSError where the disk refuses; then nothing has changed."""
        if current != self._current:
            self._folder.write_current(current)
            self._current = current

    def _persist_best_effort(self, current: Current, consequence: str) -> None:
        """Adopt `current` in memory and try to write it. A disk error is logged with its `consequence`, not raised."""
        try:
            self._persist(current)
        except OSError as error:
            log.warning("cannot write current.json, %s: %s", consequence, error.strerror)
            self._current = current

    def _run_golden(self, active: LoadedRelease) -> list[dict[str, Tensor]]:
        """The outputs for each golden input; InferenceFailed where one differs from the whole model's."""
        manifest = active.manifest
        chunk = self._golden_chunk(active)
        return [check_golden(active, golden, chunk) for golden in manifest.golden]

    def _check_golden(self, active: LoadedRelease) -> None:
        self._run_golden(active)

    def _golden_chunk(self, active: LoadedRelease) -> Callable[[str], bytes]:
        keys = self._keys.for_device(active.digest, active.manifest, self._own_slices(active.manifest))
        return decrypting_chunk_source(active.manifest, keys, self._chunk)

    def _drift(self, active: LoadedRelease, answers: Sequence[Mapping[str, Tensor]]) -> Drift | None:
        """How far the release's golden answers differ from those of the serving release. None where that cannot be
        measured: it is information for people and rollout gates, and never delays an update."""
        serving = self._engine.serving.get(active.model)
        if serving is None or serving.plan.local is None or serving.inputs != active.inputs:
            return None
        serving.lease()  # so that its worker is not ended during the comparison
        try:
            chunk = self._golden_chunk(active)
            order, until = serving.order(serving.plan.local.device), perf_counter() + LONGEST_COMPARISON_S
            drifts = []
            for golden, after in zip(active.manifest.golden, answers, strict=True):
                outputs = serving.run(order, golden_inputs(golden, chunk), until=until)
                drifts.append(drift_of({output.name: outputs[output.name] for output in serving.outputs}, after))
            return worst_drift(drift for drift in drifts if drift is not None)
        except EdgeError as error:
            log.info("%s: the drift from release %s is not known: %s", active.model, serving.digest[:12], error)
            return None
        finally:
            serving.end_lease()

    def _tune(self, active: LoadedRelease) -> None:
        """Measure the engine options of a loaded release, on its first golden input or on a synthetic one."""
        golden = active.manifest.golden
        if self._tuner is None or active.plan.local is None:
            return
        if golden:
            inputs: Tensors | None = golden_inputs(golden[0], self._golden_chunk(active))
        else:
            inputs = make_synthetic_inputs(active)
        if inputs is None:
            return
        check = (lambda: self._check_golden(active)) if golden else unchanged_answers_check(active, inputs)
        alone = not set(self._engine.serving) - {active.model}
        self._tuner.tune(active, inputs, check, alone=alone)
        self._stop_spinning(active.model)

    def _stop_spinning(self, newcomer: str = "") -> None:
        """Stop the spinning of idle threads where several releases serve: spinning threads of one slow down the other.
        `newcomer`: a model that is about to serve."""
        serving = self._engine.serving
        if self._tuner is not None and len({*serving, newcomer} - {""}) > 1:
            for release in serving.values():
                self._tuner.stop_spinning(release)

    def _load(self, release: str) -> LoadedRelease:
        return load_release(self._open_with_keys(release), self._identity.device_class, self._start_host, self._floor)

    def _open_with_keys(self, release: str) -> StoredRelease:
        """The release with the content keys of the slices that run here, where it is encrypted."""
        opened = self._open(release)
        return replace(opened, keys=self._keys.for_device(release, opened.manifest, self._own_slices(opened.manifest)))

    def _open(self, release: str) -> StoredRelease:
        """The release as stored on disk, verified."""
        return open_release(self._folder.releases, release, self._root)

    def _manifest_of(self, release: str) -> _VerifiedManifest:
        """The verified manifest; LinkError where it is not here."""
        verified = self._manifests.get(release) or self._stored_manifest(release)
        if verified is None:
            raise LinkError(f"the manifest of release {release[:12]} is not here")
        return verified

    def _stored_manifest(self, release: str) -> _VerifiedManifest | None:
        """The verified manifest of a staged release; None where it is not staged."""
        try:
            home = self._open(release).folder
        except TrustError:
            return None
        raw = (home / "manifest.json").read_bytes()
        proof = {path.name: path.read_bytes() for path in (home / "proof").glob("*.json")}
        return _VerifiedManifest(raw, proof, verify_manifest(raw, proof, self._root))

    def _is_staged(self, release: str, manifest: Manifest) -> bool:
        """Whether the wanted slices are on disk, and for a gateway the content keys of what it runs for others."""
        try:
            opened = self._open(release)
            needs_keys = release in self._kept_for_others and needed_keys(
                manifest, gateway_slices(manifest), golden=False
            )
            return opened.has_slices(self._slices(release, manifest)) and (not needs_keys or has_keys(opened.folder))
        except TrustError:
            return False

    def _slices(self, release: str, manifest: Manifest) -> set[str]:
        """Names of the slices to store: those of this device's class where the release runs here, and the gateway's
        where it is kept for others."""
        if is_agent_release(manifest):
            return self._version_manager.slices(manifest)
        own = self._own_slices(manifest) if self._runs(release) else set()
        return own | (gateway_slices(manifest) if release in self._kept_for_others else set())

    def _own_slices(self, manifest: Manifest) -> set[str]:
        """Names of the slices that this device's class runs."""
        return device_slices(plan_for(manifest, self._identity.device_class, self._floor), manifest)

    def _runs(self, release: str) -> bool:
        """Whether this device runs the release itself, now or again, rather than storing it for other devices only."""
        used = {slot for slots in self._current.models.values() for slot in (slots.committed, slots.trial)}
        return release in self._own or release in used or release not in self._kept_for_others

    def _protected(self) -> set[str]:
        """Releases that are never evicted: in a slot, wanted, or a version of the agent that may start again."""
        used = {release for slots in self._current.models.values() for release in (slots.committed, slots.trial)}
        return {*used, *self._wanted, *self._version_manager.protected} - {""}

    def _chunk(self, sha256: str) -> bytes:
        """A loose chunk by its digest; LinkError where it is missing."""
        data = self._store.get(sha256)
        if data is None:
            raise LinkError(f"chunk {sha256[:12]} has gone again")
        return data
