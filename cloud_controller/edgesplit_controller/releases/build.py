"""From plans to a signed release: slices cut, manifest signed, chunks kept, the offload server's folder written.

One release serves every target of a deployment: a plan per device class, slices that all plans share, each weight once.
The same model with the same plans is the same release again. A model's first release needs the release key; after it,
another cut can be signed by the planner (`recut_of`), which devices believe as far as it is one. Callers run this in a
worker thread, one at a time.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

import msgspec
from sqlalchemy import select

from edgesplit.crypto.key_file import write_keys
from edgesplit.errors import MalformedMessage, ModelRefused, NotFound, TrustError, UsageError
from edgesplit.identifiers import ModelRef, sha256_hex
from edgesplit.limits import LIMITS
from edgesplit.plan import Link, Plan
from edgesplit.release.agent_release import is_agent
from edgesplit.release.fingerprint import anatomy_file, decode_anatomy, encode_anatomy
from edgesplit.release.manifest import (
    Chunk,
    Golden,
    Manifest,
    Slice,
    TensorSpec,
    decode_manifest,
    encode_manifest,
    release_digest,
)
from edgesplit.release.recut import check_recut
from edgesplit.release_store import stored_releases, write_release
from edgesplit.trust.store import PLANNER
from edgesplit_controller.errors import unknown
from edgesplit_controller.model_registry.golden import GoldenPair, golden_pairs
from edgesplit_controller.model_registry.registry import LoadedModel, Registry
from edgesplit_controller.planning.planner_service import Planning, Through, Wish, device_profile
from edgesplit_controller.releases.content_keys import ContentKeys
from edgesplit_controller.storage.blobs import BlobLost, BlobStore
from edgesplit_controller.storage.database import Database, Model, Release, record
from edgesplit_controller.tuf.repository import RELEASE_KEY_ELSEWHERE
from edgesplit_partitioner.costs.from_telemetry import Measured
from edgesplit_partitioner.edgetpu import CompiledCut, compiled_cuts, is_edge_tpu
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.slicing import CutSlice, as_release_plan, atoms, cut_sets, cut_slices

log = logging.getLogger(__name__)

REMEMBERED = 8
"""Releases whose manifest is kept in memory."""


class Repository(Protocol):
    """What is needed of the TUF repository."""

    @property
    def root_bytes(self) -> bytes:
        """The root that devices begin to trust with."""
        ...

    def add_release(self, raw_manifest: bytes) -> str:
        """Sign the manifest as a target; its digest. Conflict where the release key lies elsewhere."""
        ...

    def add_signed(self, raw_targets: bytes, raw_manifests: Sequence[bytes]) -> None:
        """Publish a list of releases that was signed elsewhere."""
        ...

    def releases(self) -> Sequence[str]:
        """Digests of what the release key signed."""
        ...

    def add_recut(self, raw_manifest: bytes) -> str:
        """Sign the manifest with the planner's key as another cut of a release; its digest."""
        ...

    def add_anatomy(self, raw: bytes) -> None:
        """Keep what a release's manifest calls its model's anatomy."""
        ...

    @property
    def signs_releases(self) -> bool:
        """Does the release key lie here?"""
        ...

    def recuts(self) -> Sequence[str]:
        """Digests of what the planner's key signed."""
        ...

    def proof(self, digest: str) -> Mapping[str, bytes]:
        """The metadata that leads from the root to that release."""
        ...


class Releasing:
    """The releases of one controller."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        registry: Registry,
        planning: Planning,
        repository: Repository,
        *,
        offload_releases: Path,
        content_keys: ContentKeys,
        now: Callable[[], float],
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._registry = registry
        self._planning = planning
        self._repository = repository
        self._offload_releases = offload_releases
        self._content_keys = content_keys
        self._now = now
        self._manifests: OrderedDict[str, tuple[Manifest, tuple[str, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(
        self,
        model: Model,
        links: Mapping[str, Link],
        wish: Wish,
        *,
        recut: bool = False,
        through: Mapping[str, Through] | None = None,
        measured: Mapping[str, Measured] | None = None,
    ) -> tuple[str, Manifest]:
        """The release of `model` for these device classes (each with the first link that it is planned for, the gateway
        at its end, if there is one, and what it measured at work, if that shall count), to be signed: with `recut` by
        the planner, as another cut of the model's newest release.

        Everything that a device or the offload server may ask for is kept; nothing is known of it yet. UsageError where
        there is no release to cut anew.
        """
        base = self._newest_base(model) if recut else None
        if recut and base is None:
            raise UsageError(
                f"{model.ref} was never released, and the first release of a model needs the release key: "
                + ("deploy it once without --recut" if self._repository.signs_releases else RELEASE_KEY_ELSEWHERE)
            )
        loaded = self._registry.load(model)
        planned = {
            device_class: self._planning.plan(
                model, device_class, link, wish, (through or {}).get(device_class), (measured or {}).get(device_class)
            )
            for device_class, link in links.items()
        }
        tables = {
            device_class: msgspec.structs.replace(
                one.table, offload=wish.offload, providers=device_profile(device_class).providers
            )
            for device_class, one in planned.items()
        }
        layer_s = {
            device_class: {layer.name: layer.seconds["device"] for layer in one.costs.layers}
            for device_class, one in planned.items()
        }
        if base is not None:
            return self._recut(model, loaded, base, tables, layer_s, wish)
        cut = cut_for(loaded, tables.values())
        plans = {
            device_class: release_plan(table, cut, layer_s[device_class]) for device_class, table in tables.items()
        }
        pairs = golden_pairs(loaded, self._registry.samples(model, 2), model.name)
        compiled = [one for name, plan in plans.items() for one in compiled_for(loaded, cut, name, plan)]
        made = make_manifest(model, loaded, cut, plans, pairs)
        anatomy = b"" if wish.encrypt else anatomy_of(loaded)  # digests of weights would tell what is encrypted
        made = msgspec.structs.replace(
            made,
            compiled=tuple(one.compiled for one in compiled),
            anatomy=anatomy_file(anatomy) if anatomy else None,
        )
        contents = [*cut, *(one.cut for one in compiled)]
        if wish.encrypt:
            made, contents, pairs = self._content_keys.seal(made, contents, pairs)
        if anatomy:
            self._repository.add_anatomy(anatomy)
            self._blobs.put(anatomy)
        manifest = self._with_known_date(model, made)
        return self._keep(model, manifest, contents, pairs), manifest

    def _newest_base(self, model: Model) -> tuple[str, Manifest] | None:
        """The newest release of the model that the release key signed."""
        signed = set(self._repository.releases())
        with self._database.read() as session:
            of_model = select(Release.digest).where(Release.model_id == model.id).order_by(Release.created.desc())
            digests = session.scalars(of_model).all()
        newest = next((digest for digest in digests if digest in signed), None)
        return None if newest is None else (newest, self.manifest(newest))

    def _recut(
        self,
        model: Model,
        loaded: LoadedModel,
        base_release: tuple[str, Manifest],
        tables: Mapping[str, Plan],
        layer_s: Mapping[str, Mapping[str, float]],
        wish: Wish,
    ) -> tuple[str, Manifest]:
        """The base in other tables: over its own slices where they do, else cut anew. The base itself where nothing
        differs from it."""
        digest, base = base_release
        if wish.encrypt and not base.is_encrypted:
            raise UsageError(f"release {digest[:12]} is in clear: to encrypt it needs the release key")
        as_they_are = all(fits(table, base.slices) for table in tables.values())
        cut = [CutSlice(one, {}) for one in base.slices] if as_they_are else cut_for(loaded, tables.values())
        plans = {name: release_plan(table, cut, layer_s[name]) for name, table in tables.items()}
        if as_they_are and plans == base.plans:
            return digest, base
        made = msgspec.structs.replace(
            base,
            slices=tuple(one.slice for one in cut),
            plans=plans,
            compiled=base.compiled if as_they_are else (),
            anatomy=None,
            recut_of=digest,
        )
        raw_anatomy = self._blobs.get(base.anatomy.sha256) if base.anatomy else b""
        if base.anatomy and not as_they_are and anatomy_of(loaded) != raw_anatomy:
            raise UsageError(
                f"{model.ref} is no longer prepared here as it was when release {digest[:12]} was made (another version"
                " of onnxruntime or onnx?): to cut it elsewhere now needs the release key"
            )
        try:
            check_recut(made, base, decode_anatomy(raw_anatomy, base.anatomy) if base.anatomy else None)
        except TrustError as error:
            raise UsageError(f"release {digest[:12]} cannot be cut like this by the planner: {error}") from error
        manifest = self._with_known_date(model, made)
        return self._keep(model, manifest, [] if as_they_are else cut, []), manifest

    def manifest(self, digest: str) -> Manifest:
        """The manifest of a release that is known; NotFound otherwise."""
        found = self._known(digest)
        if found is None:
            raise unknown("release", digest, (release.digest for release in self.all()))
        return found[0]

    def find(self, digest: str) -> Manifest | None:
        """The manifest of a release, None for one that is not known."""
        found = self._known(digest)
        return found[0] if found else None

    def split_by_gateway(self, digest: str) -> str:
        """The model's name, where some plan of that release has a tier between device and cloud; empty for any other,
        and for a release that is not known."""
        manifest = self.find(digest)
        if manifest is None or not any(plan.has_gateway for plan in manifest.plans.values()):
            return ""
        return ModelRef.parse(manifest.model).name

    def chunks_of(self, digest: str) -> tuple[str, ...]:
        """The chunks of a release in the order in which devices count them; none for a release that is not known."""
        found = self._known(digest)
        return found[1] if found else ()

    def all(self) -> Sequence[Release]:
        """Every release, oldest first."""
        with self._database.read() as session:
            return session.scalars(select(Release).order_by(Release.created)).all()

    def publish(self, model: Model, digest: str, wish: Wish, signed: bytes | None = None) -> None:
        """Make a prepared release known: signed here, or by `signed`, a list of releases with it, signed elsewhere."""
        raw = self._blobs.get(digest)
        manifest = decode_manifest(raw)
        if manifest.recut_of:
            self._repository.add_recut(raw)
        elif signed is not None and digest not in self._repository.releases():
            self._repository.add_signed(signed, [raw])
        else:
            self._repository.add_release(raw)
        self._shelve(digest, raw)
        with self._database.write() as session:
            if session.get(Release, digest) is None:
                by = {**signature(manifest), "key": "elsewhere" if signed is not None else "controller"}
                options = {**wish.as_options(), **signature(manifest)}
                session.add(Release(digest=digest, model_id=model.id, created=self._now(), options=options))
                record(session, self._now(), "operator", "release.made", digest, model=model.ref, **by)

    def prepared(self, model: Model, digest: str) -> Manifest:
        """The manifest of a release that was prepared for that model; NotFound for another."""
        try:
            manifest = decode_manifest(self._blobs.get(sha256_hex(digest)))
        except (BlobLost, MalformedMessage) as error:
            raise NotFound(f"release {digest[:12]} was not prepared here: deploy again") from error
        if manifest.model != model.ref:
            raise UsageError(f"release {digest[:12]} is of {manifest.model}, not of {model.ref}")
        return manifest

    def raw(self, digest: str) -> bytes:
        """The manifest of a prepared release, as it is signed."""
        return self._blobs.get(digest)

    def follow_keys(self) -> None:
        """After the release key or the root changed: what the offload server has is proved by the newest root."""
        on_shelf = set(stored_releases(self._offload_releases))
        signed = {*self._repository.releases(), *self._repository.recuts()}
        for release in self.all():
            if release.digest in on_shelf & signed:
                self._shelve(release.digest, self._blobs.get(release.digest))

    def shelve_all(self) -> None:
        """Put every signed release on the offload server's shelf that is not there: after a restore."""
        on_shelf = set(stored_releases(self._offload_releases))
        for digest in sorted({*self._repository.releases(), *self._repository.recuts()} - on_shelf):
            try:
                self._shelve(digest, self._blobs.get(digest))
            except BlobLost as error:
                log.error("release %s cannot be served by the offload server: %s", digest[:12], error)

    def _shelve(self, digest: str, raw: bytes) -> None:
        manifest = decode_manifest(raw)
        if is_agent(manifest):
            return  # no half of it runs here
        write_release(
            self._offload_releases, digest, raw, self._repository.proof(digest), self._blobs.get,
            bootstrap_root=self._repository.root_bytes,
        )  # fmt: skip
        if manifest.is_encrypted:
            write_keys(self._offload_releases / digest, self._content_keys.remote_keys(manifest))

    def _keep(self, model: Model, manifest: Manifest, cut: Sequence[CutSlice], pairs: Sequence[GoldenPair]) -> str:
        """Keep everything a device or the offload server may ask for."""
        raw = encode_manifest(manifest)
        if len(raw) > LIMITS.manifest_bytes:
            raise ModelRefused(f"{model.ref}: its manifest has {len(raw)} bytes, at most {LIMITS.manifest_bytes}")
        decode_manifest(raw)
        self._blobs.put_all(chunk for one in cut for runs in one.runs.values() for chunk in runs)
        self._blobs.put_all(body for pair in pairs for body in (pair.request, pair.response))
        return self._blobs.put(raw)

    def take(self, model: Model, made: Manifest) -> tuple[str, Manifest]:
        """A release whose chunks are kept already, to be signed; with the date of the same one, where it is known."""
        manifest = self._with_known_date(model, made)
        return self._keep(model, manifest, [], []), manifest

    def _with_known_date(self, model: Model, manifest: Manifest) -> Manifest:
        """With the date of a release that is the same in all else, so that it is that release."""
        with self._database.read() as session:
            of_model = select(Release.digest).where(Release.model_id == model.id).order_by(Release.created.desc())
            known = session.scalars(of_model.limit(REMEMBERED)).all()
        for digest in known:
            dated = msgspec.structs.replace(manifest, created=self.manifest(digest).created)
            if release_digest(encode_manifest(dated)) == digest:
                return dated
        return msgspec.structs.replace(manifest, created=iso_time(self._now()))

    def _known(self, digest: str) -> tuple[Manifest, tuple[str, ...]] | None:
        with self._lock:
            if digest in self._manifests:
                self._manifests.move_to_end(digest)
                return self._manifests[digest]
        with self._database.read() as session:
            if session.get(Release, digest) is None:
                return None
        manifest = decode_manifest(self._blobs.get(digest))
        found = manifest, tuple(manifest.chunk_list())
        with self._lock:
            self._manifests[digest] = found
            while len(self._manifests) > REMEMBERED:
                self._manifests.popitem(last=False)
        return found


def signature(manifest: Manifest) -> dict[str, str]:
    """Who signed a release, and the release that it is another cut of where the planner did, for people."""
    if not manifest.recut_of:
        return {"signed_by": "targets"}
    return {"signed_by": PLANNER, "recut_of": manifest.recut_of}


def fits(table: Plan, slices: Iterable[Slice]) -> bool:
    """Is every row of the table (in layers) a union of these slices?"""
    rows = cut_sets(table)
    return all(row.issuperset(one.layers) or row.isdisjoint(one.layers) for one in slices for row in rows)


def anatomy_of(loaded: LoadedModel) -> bytes:
    """The model's anatomy as it is signed; empty where it has none, or one that no device would read."""
    anatomy = loaded.prepared.anatomy(loaded.graph)
    raw = b"" if anatomy is None else encode_anatomy(anatomy)
    return raw if len(raw) <= LIMITS.anatomy_bytes else b""


def cut_for(loaded: LoadedModel, tables: Iterable[Plan]) -> list[CutSlice]:
    """Slices of which every row of every table is a union."""
    sets = {one for table in tables for one in cut_sets(table)}
    pieces = atoms(loaded.graph, sorted(sets, key=lambda layers: (len(layers), sorted(layers))))
    return cut_slices(loaded.prepared, loaded.graph, pieces, loaded.spec)


def compiled_for(loaded: LoadedModel, cut: Sequence[CutSlice], device_class: str, plan: Plan) -> list[CompiledCut]:
    """The plan's device halves for this class's accelerator, where it has one."""
    if not is_edge_tpu(device_profile(device_class)):
        return []
    rows = [frozenset(row.device) for row in plan.rows]
    return compiled_cuts(loaded.prepared, loaded.graph, cut, device_class, rows)


def release_plan(table: Plan, cut: Sequence[CutSlice], layer_s: Mapping[str, float]) -> Plan:
    """The table in slices, with what each slice takes on this device class."""
    slice_s = {one.slice.name: sum(layer_s[layer] for layer in one.slice.layers) for one in cut}
    return as_release_plan(table, cut, slice_s)


def make_manifest(
    model: Model, loaded: LoadedModel, cut: Sequence[CutSlice], plans: Mapping[str, Plan], pairs: Sequence[GoldenPair]
) -> Manifest:
    """The release's description, its date still to be set."""
    return Manifest(
        model=model.ref,
        model_sha256=model.sha256,
        created="",
        input_spec=loaded.spec,
        inputs=tuple(_spec(loaded.graph, name) for name in loaded.graph.inputs),
        outputs=tuple(_spec(loaded.graph, name) for name in loaded.graph.outputs),
        slices=tuple(one.slice for one in cut),
        plans=dict(plans),
        golden=tuple(_golden(pair) for pair in pairs),
    )


def iso_time(seconds: float) -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.fromtimestamp(int(seconds), timezone.utc).isoformat().replace("+00:00", "Z")


def _spec(graph: LayerGraph, name: str) -> TensorSpec:
    tensor = graph.tensors[name]
    return TensorSpec(name=name, datatype=tensor.datatype, shape=tensor.shape)


def _golden(pair: GoldenPair) -> Golden:
    return Golden(request=_chunk(pair.request), response=_chunk(pair.response))


def _chunk(data: bytes) -> Chunk:
    return Chunk(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
