"""The hands of the update loop: what each step does to this device's disk, trust and engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from edgesplit.errors import EdgeError, LinkError, TrustError
from edgesplit.messages import ModelState
from edgesplit.plan import Plan
from edgesplit.release import Manifest, Statement
from edgesplit.releases import Release, adopt_release, open_release
from edgesplit.runtime import Runtime
from edgesplit.trust import Fetch, TrustStore, verify_manifest, verify_statement_offline
from edgesplit_agent.active import ActiveRelease, check_golden, device_slices, load, plan_for
from edgesplit_agent.chunks import ChunkStore, Layout
from edgesplit_agent.engine import Engine
from edgesplit_agent.fetch_hours import FetchHours
from edgesplit_agent.folder import Current, DataFolder, Identity
from edgesplit_agent.updates import ReleaseState
from edgesplit_agent.uplink import Uplink

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Paper:
    """A release's manifest, verified, with what proves it."""

    raw: bytes
    proof: dict[str, bytes]
    manifest: Manifest


class Work:
    """Implements `updates.Hands` over the data folder."""

    def __init__(
        self,
        folder: DataFolder,
        identity: Identity,
        engine: Engine,
        store: ChunkStore,
        make_runtime: Callable[[Plan], Runtime],
        hours: FetchHours,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._engine = engine
        self._make_runtime = make_runtime
        self._root = identity.tuf_root.encode()
        self._trust = TrustStore(folder.trust, self._root)
        self._store = store
        self._papers: dict[str, _Paper] = {}
        self._loaded: dict[str, ActiveRelease] = {}
        self._current = folder.current()
        self._wanted: set[str] = set()
        """Releases that the newest believed statement names."""
        self._urgent: set[str] = set()
        """Those of them that are fetched at any hour."""
        self._hours = hours
        self._uplink: Uplink | None = None

    def boot(self) -> tuple[Statement | None, dict[str, str]]:
        """Serve what ran last, without a network: signatures and digests are checked anew, expiry is not.

        A model whose slices are spoiled is left out, to be fetched again; the others go on.
        """
        running: dict[str, str] = {}
        for model, release in self._current.models.items():
            try:
                self._engine.serve(model, self._load(release))
                running[model] = release
                log.info("serving %s from release %s", model, release[:12])
            except (EdgeError, OSError) as error:
                log.error("%s cannot be served from what is here: %s", model, error)
        return self._stored_statement(), running

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
        self._wanted = {one.release for one in statement.releases}
        self._urgent = {one.release for one in statement.releases if one.now}

    def connect(self, uplink: Uplink) -> None:
        """From now on there is a network to fetch by and report to."""
        self._uplink = uplink

    @property
    def _net(self) -> Uplink:
        if self._uplink is None:
            raise LinkError("not connected yet")
        return self._uplink

    @property
    def _fetch(self) -> Fetch:
        return self._net.metadata.fetch

    # The steps

    def consider(self, raw: bytes) -> Statement:
        """Refresh the metadata, then believe the statement or not. A believed one is kept for the next start."""
        self._trust.refresh(self._fetch)
        statement = self._trust.statement(raw, self._identity.device, install=True)
        self._commit(Current(statement=raw, counter=statement.counter, models=self._current.models))
        self._wants(statement)
        return statement

    def fetch_manifest(self, release: str) -> None:
        """Get the manifest, and what proves it without a network."""
        raw = self._trust.manifest(release, self._fetch)
        proof = self._trust.proof()
        self._papers[release] = _Paper(raw, proof, verify_manifest(raw, proof, self._root))

    def fetch_missing(self, release: str, superseded: Callable[[], bool]) -> bool:
        """Get the chunks that are not here, if there is room for them and now is the time."""
        manifest = self._paper(release).manifest
        layout = Layout.of(release, manifest, self._slices(manifest))
        assembly = self._store.assembly(layout)
        assembly.link()
        self._store.make_room(layout, assembly.missing(), self._protected())
        missing = assembly.copy(assembly.missing())
        if not missing:
            return True
        urgent = release in self._urgent
        self._hours.check(urgent)
        log.info("release %s: %d of %d chunks are missing", release[:12], len(missing), len(layout.sizes))

        def stop() -> bool:
            return superseded() or not (urgent or self._hours.open)

        self._net.chunks.fetch(release, missing, tuple(manifest.chunk_list()), assembly.put_all, stop)
        if not superseded():
            self._hours.check(urgent)
        return not superseded()

    def stage(self, release: str) -> None:
        """Make this class's slices, which lie ready, the release: a rename."""
        paper = self._paper(release)
        slices = self._slices(paper.manifest)
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

    def verify(self, release: str) -> None:
        """Load it, and let it answer its golden inputs. What is loaded here is what will serve."""
        active = self._load(release)
        for golden in active.manifest.golden:
            check_golden(active, golden, self._chunk)
        self._loaded[release] = active

    def activate(self, model: str, release: str) -> None:
        """One rename of `current.json`; then the engine answers by it."""
        active = self._loaded.get(release) or self._load(release)
        if active.model != model:
            raise TrustError(f"release {release[:12]} is of model {active.model!r}, not of {model!r}")
        models = {**self._current.models, model: release}
        self._commit(Current(statement=self._current.statement, counter=self._current.counter, models=models))
        self._engine.serve(model, active)
        self._loaded.pop(release, None)
        log.info("activated %s from release %s", model, release[:12])

    def retire(self, model: str) -> None:
        """Forget a model that nobody wants here."""
        models = {name: release for name, release in self._current.models.items() if name != model}
        self._commit(Current(statement=self._current.statement, counter=self._current.counter, models=models))
        self._engine.drop(model)
        log.info("retired %s", model)

    def clean(self, want: Statement) -> None:
        """Drop releases that neither run nor are wanted, and every chunk: what is wanted is staged."""
        kept = {*self._protected(), *(one.release for one in want.releases)}
        self._store.forget(kept)
        self._papers = {release: paper for release, paper in self._papers.items() if release in kept}
        self._loaded = {release: active for release, active in self._loaded.items() if release in kept}

    def report(self, counter: int, models: tuple[ModelState, ...]) -> None:
        """Tell the controller."""
        self._net.report(counter, models)

    def look(self, release: str) -> ReleaseState:
        """How far it has come by what is on disk now, every byte hashed."""
        try:
            paper = self._papers.get(release) or self._from_disk(release)
            if paper is None:
                return ReleaseState()
            self._papers[release] = paper
            staged = self._is_staged(release, paper.manifest)
            slices = set() if staged else self._slices(paper.manifest)
            missing = self._store.assembly(Layout.of(release, paper.manifest, slices)).missing()
            return ReleaseState(manifest=True, whole=not missing, staged=staged)
        except EdgeError as error:
            return ReleaseState(refused=str(error))

    # What they are made of

    def _commit(self, current: Current) -> None:
        self._folder.write_current(current)
        self._current = current

    def _load(self, release: str) -> ActiveRelease:
        return load(self._open(release), self._identity.device_class, self._make_runtime)

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
            return self._open(release).has_slices(self._slices(manifest))
        except TrustError:
            return False

    def _slices(self, manifest: Manifest) -> set[str]:
        return device_slices(plan_for(manifest, self._identity.device_class), manifest)

    def _protected(self) -> set[str]:
        """Releases that are never dropped for another's sake: what runs, and what is wanted."""
        return {*self._current.models.values(), *self._wanted}

    def _chunk(self, sha256: str) -> bytes:
        data = self._store.get(sha256)
        if data is None:
            raise LinkError(f"chunk {sha256[:12]} has gone again")
        return data
