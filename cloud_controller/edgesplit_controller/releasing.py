"""From plans to a signed release: slices cut, manifest signed, chunks kept, the offload server's folder written.

One release serves every target of a deployment: a plan per device class, slices that all plans share, each weight once.
The same model with the same plans is the same release again. Callers run this in a worker thread, one at a time.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

import msgspec
from sqlalchemy import select

from edgesplit.errors import MalformedMessage, ModelRefused, NotFound, UsageError
from edgesplit.limits import LIMITS
from edgesplit.names import sha256_hex
from edgesplit.plan import Link, Plan
from edgesplit.release import Chunk, Golden, Manifest, TensorSpec, decode_manifest, encode_manifest, release_digest
from edgesplit.releases import stored_releases, write_release
from edgesplit_controller.blobs import BlobLost, BlobStore
from edgesplit_controller.database import Database, Model, Release, record
from edgesplit_controller.golden import GoldenPair, golden_pairs
from edgesplit_controller.planning import Planning, Wish, device_profile
from edgesplit_controller.refusals import unknown
from edgesplit_controller.registry import LoadedModel, Registry
from edgesplit_partitioner.edgetpu import CompiledCut, compiled_cuts, is_edge_tpu
from edgesplit_partitioner.graph import LayerGraph
from edgesplit_partitioner.slicing import CutSlice, as_release_plan, atoms, chunk_bytes, cut_slices

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
        """Digests of all signed releases."""
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
        now: Callable[[], float],
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._registry = registry
        self._planning = planning
        self._repository = repository
        self._offload_releases = offload_releases
        self._now = now
        self._manifests: OrderedDict[str, tuple[Manifest, frozenset[str]]] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, model: Model, links: Mapping[str, Link], wish: Wish) -> tuple[str, Manifest]:
        """The release of `model` for these device classes (each with the link it is planned for), to be signed.

        Everything that a device or the offload server may ask for is kept; nothing is known of it yet.
        """
        loaded = self._registry.load(model)
        planned = {
            device_class: self._planning.plan(model, device_class, link, wish) for device_class, link in links.items()
        }
        tables = {device_class: one.table for device_class, one in planned.items()}
        cut = cut_for(loaded, tables.values())
        plans = {
            device_class: release_plan(
                table, cut, {layer.name: layer.seconds["device"] for layer in planned[device_class].costs.layers}
            )
            for device_class, table in tables.items()
        }
        pairs = golden_pairs(loaded, self._registry.samples(model, 2), model.name)
        compiled = [one for name, plan in plans.items() for one in compiled_for(loaded, cut, name, plan)]
        made = make_manifest(model, loaded, cut, plans, pairs)
        made = msgspec.structs.replace(made, compiled=tuple(one.compiled for one in compiled))
        manifest = self._with_known_date(model, made)
        return self._keep(model, manifest, [*cut, *(one.cut for one in compiled)], pairs), manifest

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

    def chunks_of(self, digest: str) -> frozenset[str]:
        """The chunks of a release, golden ones included; none for a release that is not known."""
        found = self._known(digest)
        return found[1] if found else frozenset()

    def all(self) -> Sequence[Release]:
        """Every release, oldest first."""
        with self._database.read() as session:
            return session.scalars(select(Release).order_by(Release.created)).all()

    def publish(self, model: Model, digest: str, wish: Wish, signed: bytes | None = None) -> None:
        """Make a prepared release known: signed here, or by `signed`, a list of releases with it, signed elsewhere."""
        raw = self._blobs.get(digest)
        if signed is not None and digest not in self._repository.releases():
            self._repository.add_signed(signed, [raw])
        else:
            self._repository.add_release(raw)
        self._shelve(digest, raw)
        with self._database.write() as session:
            if session.get(Release, digest) is None:
                session.add(Release(digest=digest, model_id=model.id, created=self._now(), options=wish.as_options()))
                by = "release key elsewhere" if signed is not None else "controller"
                record(session, self._now(), "operator", "release.made", digest, model=model.ref, signed=by)

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
        signed = set(self._repository.releases())
        for release in self.all():
            if release.digest in on_shelf & signed:
                self._shelve(release.digest, self._blobs.get(release.digest))

    def _shelve(self, digest: str, raw: bytes) -> None:
        write_release(
            self._offload_releases, digest, raw, self._repository.proof(digest), self._blobs.get,
            bootstrap_root=self._repository.root_bytes,
        )  # fmt: skip

    def _keep(self, model: Model, manifest: Manifest, cut: Sequence[CutSlice], pairs: Sequence[GoldenPair]) -> str:
        """Keep everything a device or the offload server may ask for."""
        raw = encode_manifest(manifest)
        if len(raw) > LIMITS.manifest_bytes:
            raise ModelRefused(f"{model.ref}: its manifest has {len(raw)} bytes, at most {LIMITS.manifest_bytes}")
        decode_manifest(raw)
        self._blobs.put_all(chunk_bytes(cut).values())
        self._blobs.put_all(body for pair in pairs for body in (pair.request, pair.response))
        return self._blobs.put(raw)

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

    def _known(self, digest: str) -> tuple[Manifest, frozenset[str]] | None:
        with self._lock:
            if digest in self._manifests:
                self._manifests.move_to_end(digest)
                return self._manifests[digest]
        with self._database.read() as session:
            if session.get(Release, digest) is None:
                return None
        manifest = decode_manifest(self._blobs.get(digest))
        found = manifest, frozenset(manifest.chunks()) | frozenset(_golden_chunks(manifest))
        with self._lock:
            self._manifests[digest] = found
            while len(self._manifests) > REMEMBERED:
                self._manifests.popitem(last=False)
        return found


def cut_for(loaded: LoadedModel, tables: Iterable[Plan]) -> list[CutSlice]:
    """Slices of which every row of every table is a union."""
    device_sets = {frozenset(row.layers) for table in tables for row in table.rows}
    pieces = atoms(loaded.graph, sorted(device_sets, key=lambda layers: (len(layers), sorted(layers))))
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


def _golden_chunks(manifest: Manifest) -> Iterable[str]:
    return (chunk.sha256 for golden in manifest.golden for chunk in (golden.request, golden.response))
