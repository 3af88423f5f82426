"""The hands of the update loop: what each step does to this device's disk, trust and engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

from edgesplit.crypto.key_file import has_keys, write_keys
from edgesplit.crypto.slice_encryption import golden_chunks, needed_keys
from edgesplit.errors import EdgeError, LinkError, TrustError, UsageError
from edgesplit.identifiers import ModelRef
from edgesplit.mqtt.messages import ModelState
from edgesplit.release.agent_release import AGENT, is_agent
from edgesplit.release.manifest import Gateway, Manifest, Statement, device_slices, gateway_slices
from edgesplit.release.privacy_floor import Floor
from edgesplit.release_store import Release, adopt_release, open_release, stored_releases
from edgesplit.runtime import Tensor, Tensors
from edgesplit.trust.store import Fetch, TrustStore, verify_manifest, verify_statement_offline
from edgesplit_agent.control.mqtt_uplink import Uplink
from edgesplit_agent.releases.chunk_store import ChunkStore, Layout
from edgesplit_agent.releases.content_keys import GivenKeys
from edgesplit_agent.releases.disk_quota import PAPERS_BYTES
from edgesplit_agent.releases.loaded_release import ActiveRelease, check_golden, golden_inputs, load, plan_for
from edgesplit_agent.releases.output_drift import Drift, drift_of, worst
from edgesplit_agent.releases.synthetic_inputs import like_now, made_up_inputs
from edgesplit_agent.releases.tuner import Tuner
from edgesplit_agent.self_update.manager import OwnVersion
from edgesplit_agent.state import slots as activation
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.state.slots import Current, Slots
from edgesplit_agent.updates.bundle.fetcher import Carrier
from edgesplit_agent.updates.bundle.reader import open_bundle
from edgesplit_agent.updates.download_window import FetchHours
from edgesplit_agent.updates.reconciler import ReleaseState, Standing, is_final
from edgesplit_agent.worker.host import StartHost

log = logging.getLogger(__name__)

LONGEST_COMPARISON_S = 30.0
Activated = Callable[[str, str, "Drift | None", "bool | None"], None]
"""Model, release, its drift from the one before, and whether its golden inputs were answered well (None: it has none
that can be run here)."""


@dataclass(frozen=True, slots=True)
class _Paper:
    """A release's manifest, verified, with what proves it."""

    raw: bytes
    proof: dict[str, bytes]
    manifest: Manifest


class Serves(Protocol):
    """What is needed of the engine."""

    @property
    def serving(self) -> Mapping[str, ActiveRelease]:
        """What is answered now, by model."""
        ...

    def serve(self, model: str, release: ActiveRelease) -> None:
        """Answer `model` by this release from now on."""
        ...

    def drop(self, model: str) -> None:
        """Answer `model` no more."""
        ...


class Work:
    """Implements `updates.Hands` over the data folder."""

    def __init__(
        self,
        folder: DataFolder,
        identity: Identity,
        engine: Serves,
        store: ChunkStore,
        start_host: StartHost,
        *,
        floor: Floor | None = None,
        endpoint: Callable[[], None] = lambda: None,
        hours: FetchHours | None = None,
        tuner: Tuner | None = None,
        lead: Callable[[Gateway | None], None] = lambda gateway: None,
        activated: Activated = lambda model, release, drift, golden_ok: None,
        own_version: OwnVersion | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`endpoint` raises where applications are not answered; `lead` is told whom to offload to, by each statement
        that is believed; `activated` of each release that answers from then on; `now` is the wall clock, in Unix
        seconds."""
        self._own_version = own_version or OwnVersion(folder)
        self._lead = lead
        self._activated = activated
        self._compared: dict[str, Drift | None] = {}
        """Of what is loaded and does not serve yet: how far its golden answers lie from those of what serves."""
        self._folder = folder
        self._identity = identity
        self._engine = engine
        self._start_host = start_host
        self._floor = floor
        self._tuner = tuner
        self._root = identity.tuf_root.encode()
        self._trust = TrustStore(folder.trust, self._root, now=now)
        self._endpoint = endpoint
        self._store = store
        self._papers: dict[str, _Paper] = {}
        self._loaded: dict[str, ActiveRelease] = {}
        self._current = Current()
        self._starts_before = 0
        self._wanted: set[str] = set()
        """Releases that the newest believed statement names."""
        self._own: set[str] = set()
        """Those of them that this device runs itself."""
        self._kept: set[str] = set()
        """Those of them that it keeps for devices behind it."""
        self._urgent: set[str] = set()
        """Those of them that are fetched at any hour."""
        self._hours = hours or FetchHours(())
        self._keys = GivenKeys(folder.encryption_key_file, identity, folder.releases)
        self._uplink: Uplink | None = None
        self._by_bundle = False
        """The newest statement came so."""
        self._carrier: Carrier | None = None
        """In the uplink's place while a bundle is taken."""
        self.told_of_bundle: Callable[[int, int], None] = lambda done, of: None
        """Told of bytes of a release copied from a bundle, and of how many."""

    def boot(self) -> Statement | None:
        """Serve what ran last, without a network: signatures and digests are checked anew, expiry is not. Returns what
        was wanted when we stopped.

        A release on trial whose slices are spoiled gives way to the one before it; a model of which nothing is whole is
        left out, to be fetched again; the others go on. In safe mode nothing is loaded.
        """
        self._begin()
        want = self._stored_statement()  # with the keys that loading needs
        if self._current.safe is not None:
            log.error("safe mode, no model is loaded: %s", self._current.safe.reason)
            return want
        for model, slots in list(self._current.models.items()):
            if self._serves(model, slots.running) or not slots.trial:
                continue
            self._keep(activation.withdrawn(self._current, model), "what was on trial is spoilt")
            if slots.committed:
                self._serves(model, slots.committed)
        self._calm()
        return want

    def _begin(self) -> None:
        """Count this start, on disk before anything is loaded. A disk that cannot be written stops nobody."""
        found = self._found()
        self._starts_before = found.starts
        # Of a version on trial each start that ends badly is its own fault, and the launcher has counted it.
        begun = found if self._own_version.on_trial else activation.begun(found)
        if begun.starts == 1:  # the count has led to something, and begins anew
            self._starts_before = 0
        for release in sorted(set(begun.bad) - set(found.bad)):
            log.error("release %s is not loaded again: %s", release[:12], begun.bad[release])
        self._keep(begun, "this start is not counted")

    def _found(self) -> Current:
        return self._folder.current() or Current(models=self._rebuilt())

    def rest(self) -> None:
        """Know what is here without serving it, where no agent runs: for `take` alone."""
        self._current = self._found()

    def _rebuilt(self) -> dict[str, Slots]:
        """What ran, where `current.json` is lost: of each model the whole release that has been here longest, which is
        the likeliest to be a good one, on trial. The next statement puts right what is wrong."""
        found: dict[str, Slots] = {}
        shelf = self._folder.releases
        for release in sorted(stored_releases(shelf), key=lambda name: (shelf / name).stat().st_mtime):
            try:
                opened = self._open(release)
                model = ModelRef.parse(opened.manifest.model).name
                if model == AGENT:
                    continue
                if model not in found and opened.has_slices(self._own_slices(opened.manifest)):
                    found[model] = Slots(trial=release)
                    log.warning("current.json is lost: %s runs from release %s, found here", model, release[:12])
            except EdgeError as error:
                log.warning("release %s cannot be used: %s", release[:12], error)
        return found

    def _serves(self, model: str, release: str) -> bool:
        """Load a release and answer by it; False, and why in the log, if it cannot be."""
        try:
            self._engine.serve(model, self._load(release))
        except (EdgeError, OSError) as error:
            log.error("%s cannot be served from release %s as it is here: %s", model, release[:12], error)
            return False
        log.info("serving %s from release %s", model, release[:12])
        return True

    def stopped(self) -> None:
        """We end because we were asked to: this start is neither good nor bad."""
        self._own_version.stopped()
        if self._current.starts > self._starts_before:
            self._keep(activation.stopped(self._current, self._starts_before), "this start stays counted")

    def standing(self) -> Standing:
        """What is on disk, and what is served."""
        now = self._current
        own = self._own_version
        running = {model: active.digest for model, active in self._engine.serving.items()}
        trials = {model: slots.trial for model, slots in now.models.items() if slots.trial}
        committed = {model: slots.committed for model, slots in now.models.items() if slots.committed}
        return Standing(
            running={**running, **own.running},
            trials={**trials, **(own.running if own.on_trial else {})},
            committed={**committed, **own.committed},
            served_before=own.served,
            offline_before=own.offline,
            held=frozenset(now.safe.held if now.safe else ()),
            safe_mode=now.safe.reason if now.safe else "",
            starts=now.starts,
        )

    def _stored_statement(self) -> Statement | None:
        """What was wanted when we stopped, if that can still be believed; what runs does not hang on it."""
        if not self._current.statement:
            return None
        try:
            proof = self._trust.proof()
            stored = verify_statement_offline(self._current.statement, self._identity.device, proof, self._root)
        except EdgeError as error:
            log.warning("the stored statement cannot be verified until the controller is reached: %s", error)
            return None
        self._wants(stored)
        return stored

    def _wants(self, statement: Statement) -> None:
        self._keys.take(statement)
        self._own = {one.release for one in statement.releases}
        self._kept = {one.release for one in statement.keeps}
        self._wanted = self._own | self._kept
        self._urgent = {one.release for one in (*statement.releases, *statement.keeps) if one.now}
        self._lead(statement.gateway)

    @property
    def built_for(self) -> str:
        """Which builds of the agent fit here; empty where it cannot change its version."""
        return self._own_version.built_for

    def connect(self, uplink: Uplink) -> None:
        """From now on there is a network to fetch by and report to."""
        self._uplink = uplink

    def _needs_broker(self) -> bool:
        """Must the agent's next version reach it? Not where a bundle brought the word for it, and there is none now."""
        return not self._by_bundle or (self._uplink is not None and bool(self._uplink.connected))

    @property
    def _net(self) -> Uplink:
        if self._uplink is None:
            raise LinkError("not connected yet")
        return self._uplink

    @property
    def _fetch(self) -> Fetch:
        return self._carrier.fetch if self._carrier is not None else self._net.metadata.fetch

    # The steps

    def consider(self, raw: bytes) -> Statement:
        """Refresh the metadata, then believe the statement or not. A believed one is kept for the next start."""
        self._trust.refresh(self._fetch)
        statement = self._trust.statement(raw, self._identity.device, install=True)
        self._by_bundle = self._carrier is not None
        was_safe = self._current.safe is not None
        self._commit(activation.obeying(self._current, raw, statement.counter))
        self._own_version.obey(statement.counter)
        self._wants(statement)
        if was_safe and self._current.safe is None:
            log.warning("safe mode ends: the controller has said something new")
        return statement

    def take_bundle(self, path: str, believed: Callable[[Statement], None], superseded: Callable[[], bool]) -> str:
        """As `take`, by the bundle at that path; what there is to say of it."""
        carrier = Carrier(open_bundle(Path(path)), self.told_of_bundle)
        try:
            carrier.index()
            lacking = self.take(carrier, believed, superseded)
        finally:
            carrier.close()
        names = ", ".join(release[:12] for release in lacking)
        return f"not in the bundle, or not for this device as it runs now: {names}" if lacking else ""

    def take(
        self, carrier: Carrier, believed: Callable[[Statement], None], superseded: Callable[[], bool]
    ) -> tuple[str, ...]:
        """Do by what a bundle carries what `consider`, `fetch_manifest`, `fetch_missing` and `stage` do by the network,
        for every release that is wanted and not here; `believed` is told of its statement. What the bundle lacks is
        returned: the network may bring it. Nothing is copied unless there is room for all of it."""
        self._carrier = carrier
        try:
            believed(self.consider(carrier.statement(self._identity.device)))
            wanted = [release for release in sorted(self._wanted) if self._is_lacking(release)]
            carried = [release for release in wanted if self._carries_manifest(release)]
            self._make_room(carried)
            for release in carried:
                if superseded() or not self.fetch_missing(release, superseded):
                    break
                self.stage(release)
            return tuple(release for release in wanted if not self.look(release).staged)
        finally:
            self._carrier = None

    def _is_lacking(self, release: str) -> bool:
        state = self.look(release)
        return not (state.staged and state.whole) and not state.refused

    def _carries_manifest(self, release: str) -> bool:
        try:
            self.fetch_manifest(release)
        except (LinkError, UsageError) as error:  # not in it, or not for this machine as it runs now
            log.warning("release %s is not taken from the bundle: %s", release[:12], error)
            return False
        return True

    def _make_room(self, releases: Sequence[str]) -> None:
        """For all of these together, before the first of their bytes."""
        layouts = [self._layout(release) for release in releases]
        absent = [(layout, self._store.assembly(layout).missing()) for layout in layouts]
        beside = sum(layout.bytes_of(missing) + PAPERS_BYTES for layout, missing in absent[1:])
        for layout, missing in absent[:1]:
            self._store.make_room(layout, missing, {*self._protected(), *releases}, beside)

    def _layout(self, release: str) -> Layout:
        manifest = self._paper(release).manifest
        return Layout.of(release, manifest, self._slices(release, manifest))

    def fetch_manifest(self, release: str) -> None:
        """Get the manifest, and what proves it without a network: of a recut also what it is a recut of. What cannot be
        decrypted here is not fetched."""
        raw, proof = self._trust.proven(release, self._fetch)
        paper = _Paper(raw, proof, verify_manifest(raw, proof, self._root))
        if is_agent(paper.manifest):
            self._own_version.slices(paper.manifest)
        elif self._runs(release):
            self._keys.of(release, paper.manifest, self._own_slices(paper.manifest))
        if release in self._kept:
            self._keys.far(release, paper.manifest)
        self._papers[release] = paper

    def fetch_missing(self, release: str, superseded: Callable[[], bool]) -> bool:
        """Get the chunks that are not here, if there is room for them and now is the time."""
        self._hours.check_power(release in self._urgent)
        layout = self._layout(release)
        assembly = self._store.assembly(layout)
        assembly.link()
        absent = assembly.missing()
        self._store.make_room(layout, absent, self._protected())
        missing = assembly.copy(absent)
        if not missing:
            return True
        log.info("release %s: %d of %d chunks are missing", release[:12], len(missing), len(layout.sizes))
        listed = tuple(self._paper(release).manifest.chunk_list())
        if self._carrier is not None:  # whoever brought it here chose the hour
            self._carrier.chunks(release, missing, listed, assembly.put_all, superseded)
            return not superseded()
        urgent = release in self._urgent
        self._hours.check(urgent)

        def stop() -> bool:
            return superseded() or self._hours.held(urgent)

        self._net.chunks.fetch(release, missing, listed, assembly.put_all, stop)
        if not superseded():
            self._hours.check(urgent)
        return not superseded()

    def stage(self, release: str) -> None:
        """Make the slices that are wanted here, which lie ready, the release: a rename."""
        paper = self._paper(release)
        slices = self._slices(release, paper.manifest)
        assembly = self._store.assembly(Layout.of(release, paper.manifest, slices))
        assembly.folder.mkdir(parents=True, exist_ok=True)
        try:
            adopt_release(
                self._folder.releases, release, paper.raw, paper.proof, assembly.folder, slices,
                bootstrap_root=self._root,
            )  # fmt: skip
        except TrustError as error:
            if assembly.missing():
                raise LinkError(f"release {release[:12]} was spoilt on disk: it is completed again") from error
            raise
        if release in self._kept and (keys := self._keys.far(release, paper.manifest)):
            write_keys(self._folder.releases / release, keys)

    def verify(self, release: str) -> None:
        """Load it, and let it answer its golden inputs. What is loaded here is what will serve.

        That it is tried is on disk before: a load that ends this process, often enough, is not tried again.
        """
        if is_agent(self._paper(release).manifest):
            return self._own_version.verify(self._open(release), self._current.counter)
        self._commit(activation.trying(self._current, release))
        active = None
        try:
            active = self._load(release)
            self._compared[release] = self._drift(active, self._answer_golden(active))
            self._tune(active)
        except Exception:  # not what ends the process: that stays counted
            if active is not None:
                active.retire()
            self._keep(activation.tried(self._current, release), "this try stays counted")
            raise
        self._keep(activation.tried(self._current, release), "this try stays counted")
        self._loaded[release] = active

    def activate(self, model: str, release: str) -> None:
        """One rename of `current.json`; then the engine answers by it. What ran before stays here, whole."""
        if model == AGENT:
            manifest, serving = self._open(release).manifest, self._engine.serving
            counter = self._current.counter
            return self._own_version.activate(manifest, release, serving, counter, online=self._needs_broker())
        active = self._loaded.get(release) or self._load(release)
        if active.model != model:
            raise TrustError(f"release {release[:12]} is of model {active.model!r}, not of {model!r}")
        self._commit(activation.activated(self._current, model, release))
        self._engine.serve(model, active)
        self._loaded.pop(release, None)
        checked = bool(active.manifest.golden) and active.plan.local is not None
        self._activated(model, release, self._compared.pop(release, None), True if checked else None)
        on_trial = ", on trial" if self._current.models[model].trial else ""
        log.info("activated %s from release %s%s", model, release[:12], on_trial)

    def check_again(self, model: str) -> None:
        """The golden inputs once more, of what serves now."""
        active = self._engine.serving.get(model)
        if active is not None:
            self._answer_golden(active)

    def commit(self, model: str) -> None:
        """The release on trial was healthy, and applications reach it."""
        self._endpoint()
        if model == AGENT:
            return self._own_version.commit()
        self._commit(activation.committed(self._current, model))
        if not self._current.starts:  # with the last model on trial, this start is a good one
            self._own_version.found_healthy()
        self._starts_before = min(self._starts_before, self._current.starts)
        log.info("%s is committed to release %s", model, self._current.models[model].committed[:12])

    def roll_back(self, model: str, reason: str) -> None:
        """Answer by what was committed before, then say so on disk: a power cut between tries the bad one once more,
        which is counted. With nothing whole to go back to the model is not answered at all, which beats wrongly."""
        if model == AGENT:
            return self._own_version.roll_back(reason)
        slots = self._current.models[model]
        log.error("%s goes back from release %s: %s", model, slots.trial[:12], reason)
        serving = self._engine.serving.get(model)
        went_back = serving is not None and serving.digest == slots.committed
        if not went_back and not (slots.committed and self._serves(model, slots.committed)):
            self._engine.drop(model)
        self._commit(activation.rolled_back(self._current, model, reason))

    def find_healthy(self) -> None:
        """This start was a good one."""
        self._endpoint()
        self._own_version.found_healthy()
        self._commit(activation.found_healthy(self._current))
        self._starts_before = 0

    def retire(self, model: str) -> None:
        """Forget a model that nobody wants here."""
        self._commit(activation.retired(self._current, model))
        self._engine.drop(model)
        log.info("retired %s", model)

    def clean(self, want: Statement) -> None:
        """Drop releases that neither run nor are wanted, and every chunk: what is wanted is staged."""
        unwanted = set(self._current.models) - {one.model for one in want.releases} - set(self._engine.serving)
        for model in unwanted:  # spoilt, so that it never ran, and nobody asks for it any more
            self._commit(activation.retired(self._current, model))
        kept = {*self._protected(), *(one.release for one in (*want.releases, *want.keeps))}
        self._store.forget(kept)
        self._own_version.clean(kept)
        self._papers = {release: paper for release, paper in self._papers.items() if release in kept}
        for release in set(self._loaded) - kept:
            self._loaded.pop(release).retire()
            self._compared.pop(release, None)

    def report(
        self,
        counter: int,
        models: tuple[ModelState, ...],
        safe_mode: str,
        trouble: str,
        kept: tuple[ModelState, ...],
    ) -> None:
        """Tell the controller."""
        self._net.report(counter, models, safe_mode, trouble, kept)

    def look(self, release: str) -> ReleaseState:
        """How far it has come by what is on disk now, every byte hashed."""
        reason = self._current.bad.get(release) or self._own_version.why_bad(release)
        if reason is not None:
            return ReleaseState(refused=reason, bad=True)
        if (reason := self._own_version.why_refused(release)) is not None:
            return ReleaseState(refused=reason)
        try:
            paper = self._papers.get(release) or self._from_disk(release)
            if paper is None:
                return ReleaseState()
            self._papers[release] = paper
            staged = self._is_staged(release, paper.manifest)
            slices = set() if staged else self._slices(release, paper.manifest)
            missing = self._store.assembly(Layout.of(release, paper.manifest, slices)).missing()
            return ReleaseState(manifest=True, whole=not missing, staged=staged)
        except (EdgeError, OSError) as error:
            if is_final(error):
                return ReleaseState(refused=str(error))
            # A disk that is full or fails just now: the next step meets it again, and waits.
            return ReleaseState(manifest=release in self._papers, trouble=str(error))

    # What they are made of

    def _commit(self, current: Current) -> None:
        """OSError where the disk does not take it; then nothing has changed."""
        if current != self._current:
            self._folder.write_current(current)
            self._current = current

    def _keep(self, current: Current, else_: str) -> None:
        """As `_commit`, for what this process goes by also if the disk does not take it; `else_` says what is lost."""
        try:
            self._commit(current)
        except OSError as error:
            log.warning("cannot write current.json, %s: %s", else_, error.strerror)
            self._current = current

    def _answer_golden(self, active: ActiveRelease) -> list[dict[str, Tensor]]:
        """The outputs for each golden input; InferenceFailed where one is not what it should be."""
        manifest = active.manifest
        chunk = self._golden_chunk(active)
        return [check_golden(active, golden, chunk) for golden in manifest.golden]

    def _check_golden(self, active: ActiveRelease) -> None:
        self._answer_golden(active)

    def _golden_chunk(self, active: ActiveRelease) -> Callable[[str], bytes]:
        keys = self._keys.of(active.digest, active.manifest, self._own_slices(active.manifest))
        return golden_chunks(active.manifest, keys, self._chunk)

    def _drift(self, active: ActiveRelease, answers: Sequence[Mapping[str, Tensor]]) -> Drift | None:
        """How far the golden answers of what shall serve lie from those of what serves. None where that cannot be
        told: it is for people and gates to know, and holds nothing up."""
        before = self._engine.serving.get(active.model)
        if before is None or before.plan.local is None or before.inputs != active.inputs:
            return None
        before.lease()  # it must not be ended meanwhile
        try:
            chunk = self._golden_chunk(active)
            order, until = before.order(before.plan.local.device), perf_counter() + LONGEST_COMPARISON_S
            drifts = []
            for golden, after in zip(active.manifest.golden, answers, strict=True):
                live = before.run(order, golden_inputs(golden, chunk), until=until)
                drifts.append(drift_of({one.name: live[one.name] for one in before.outputs}, after))
            return worst(drift for drift in drifts if drift is not None)
        except EdgeError as error:
            log.info("%s: the drift from release %s is not known: %s", active.model, before.digest[:12], error)
            return None
        finally:
            before.give_back()

    def _tune(self, active: ActiveRelease) -> None:
        golden = active.manifest.golden
        if self._tuner is None or active.plan.local is None:
            return
        if golden:
            inputs: Tensors | None = golden_inputs(golden[0], self._golden_chunk(active))
        else:
            inputs = made_up_inputs(active)
        if inputs is None:
            return
        check = (lambda: self._check_golden(active)) if golden else like_now(active, inputs)
        alone = not set(self._engine.serving) - {active.model}
        self._tuner.tune(active, inputs, check, alone=alone)
        self._calm(active.model)

    def _calm(self, newcomer: str = "") -> None:
        """Where several releases serve, none has threads that spin."""
        serving = self._engine.serving
        if self._tuner is not None and len({*serving, newcomer} - {""}) > 1:
            for one in serving.values():
                self._tuner.calm(one)

    def _load(self, release: str) -> ActiveRelease:
        return load(self._opened(release), self._identity.device_class, self._start_host, self._floor)

    def _opened(self, release: str) -> Release:
        """The release with the keys of what runs here, where it is encrypted."""
        opened = self._open(release)
        return replace(opened, keys=self._keys.of(release, opened.manifest, self._own_slices(opened.manifest)))

    def _open(self, release: str) -> Release:
        return open_release(self._folder.releases, release, self._root)

    def _paper(self, release: str) -> _Paper:
        paper = self._papers.get(release) or self._from_disk(release)
        if paper is None:
            raise LinkError(f"the manifest of release {release[:12]} is not here")
        return paper

    def _from_disk(self, release: str) -> _Paper | None:
        try:
            home = self._open(release).folder
        except TrustError:
            return None
        raw = (home / "manifest.json").read_bytes()
        proof = {path.name: path.read_bytes() for path in (home / "proof").glob("*.json")}
        return _Paper(raw, proof, verify_manifest(raw, proof, self._root))

    def _is_staged(self, release: str, manifest: Manifest) -> bool:
        try:
            opened = self._open(release)
            sealed = release in self._kept and needed_keys(manifest, gateway_slices(manifest), golden=False)
            return opened.has_slices(self._slices(release, manifest)) and (not sealed or has_keys(opened.folder))
        except TrustError:
            return False

    def _slices(self, release: str, manifest: Manifest) -> set[str]:
        """What is to lie here of a release: this class's slices where it runs here, the far ones where it is kept."""
        if is_agent(manifest):
            return self._own_version.slices(manifest)
        own = self._own_slices(manifest) if self._runs(release) else set()
        return own | (gateway_slices(manifest) if release in self._kept else set())

    def _own_slices(self, manifest: Manifest) -> set[str]:
        return device_slices(plan_for(manifest, self._identity.device_class, self._floor), manifest)

    def _runs(self, release: str) -> bool:
        """Is it this device's to run, now or again? What is kept for others alone is not."""
        ran = {one for slots in self._current.models.values() for one in (slots.committed, slots.trial)}
        return release in self._own or release in ran or release not in self._kept

    def _protected(self) -> set[str]:
        """Releases that are never dropped for another's sake: what runs or would in its place, and what is wanted."""
        ran = {release for slots in self._current.models.values() for release in (slots.committed, slots.trial)}
        return {*ran, *self._wanted, *self._own_version.kept} - {""}

    def _chunk(self, sha256: str) -> bytes:
        data = self._store.get(sha256)
        if data is None:
            raise LinkError(f"chunk {sha256[:12]} has gone again")
        return data
