"""Builds signed releases from plans: slices cut, manifest signed, chunks stored, and the offload server's folder
written.

One release serves every target of a deployment: a plan per device class, slices shared by all plans, each weight stored
once. The same model with the same plans gives the same release again. A model's first release needs the release key.
After it, another cut can be signed with the delegated planner key (`recut_of`), which devices accept only if it is a
valid recut of that release. Callers run this in a worker thread, one call at a time.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from sqlalchemy import select

from edgesplit.crypto.key_file import write_keys
from edgesplit.crypto.permitted_devices import append_permitted
from edgesplit.errors import MalformedMessage, ModelRefused, NotFound, TrustError, UsageError
from edgesplit.identifiers import ModelRef, sha256_hex
from edgesplit.limits import LIMITS
from edgesplit.output_kind import OutputKind
from edgesplit.plan import Link, Plan
from edgesplit.release.agent_release import is_agent_release
from edgesplit.release.fingerprint import decode_fingerprint, encode_fingerprint, fingerprint_file
from edgesplit.release.lineage import Lineage
from edgesplit.release.manifest import (
    Manifest,
    Slice,
    TensorSpec,
    decode_manifest,
    encode_manifest,
    release_digest,
)
from edgesplit.release.recut import check_recut
from edgesplit.release_store import stored_releases, write_release
from edgesplit.trust.verification import PLANNER
from edgesplit_controller.errors import Conflict, not_found
from edgesplit_controller.job_progress import report_step
from edgesplit_controller.model_registry.families import Families, FamilyDocument, family_of
from edgesplit_controller.model_registry.golden import MOST_JUDGED, GoldenPair, golden_pairs, judged_pairs
from edgesplit_controller.model_registry.interface import kind_of
from edgesplit_controller.model_registry.registry import LoadedModel, Registry, check_stored
from edgesplit_controller.planning.family_planning import FamilyPlanning
from edgesplit_controller.planning.planner_service import (
    GatewayHop,
    OnPriced,
    PlanningService,
    PlanOptions,
    check_for_model,
    device_profile,
)
from edgesplit_controller.releases.content_keys import ContentKeys
from edgesplit_controller.releases.family_build import build_family
from edgesplit_controller.releases.permitted_devices import PermittedDevices
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.blobs import BlobLost
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Device, Model, ReleaseRow
from edgesplit_controller.tuf.repository import RELEASE_KEY_ELSEWHERE, Repository
from edgesplit_partitioner.costs.from_telemetry import FieldMeasurements
from edgesplit_partitioner.edgetpu import CompiledCut, compiled_cuts, is_edge_tpu
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.planner.early_exit import layers_for
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_sets, cut_slices, to_release_plan

log = logging.getLogger(__name__)

CACHED_MANIFESTS = 8
"""Manifests kept in memory."""


class ReleaseBuilder:
    """The releases of one controller."""

    def __init__(
        self, database: Database, blobs: Blobs, registry: Registry, planning: PlanningService,
        repository: Repository, *, offload_releases: Path, content_keys: ContentKeys, now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._database = database
        self._blobs = blobs
        self._registry = registry
        self._planning = planning
        self._repository = repository
        self._offload_releases = offload_releases
        self._content_keys = content_keys
        self.permitted_devices = PermittedDevices(database, offload_releases)
        self._now = now
        self._manifests: OrderedDict[str, tuple[Manifest, tuple[str, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(
        self, model: Model, links: Mapping[str, Link], options: PlanOptions, *, recut: bool = False,
        gateways: Mapping[str, GatewayHop] | None = None, measured: Mapping[str, FieldMeasurements] | None = None,
        judged: Collection[str] = (), on_priced: OnPriced | None = None,
    ) -> tuple[str, Manifest]:  # fmt: skip
        """Digest and manifest of a release of `model`, to be signed; with `recut` as another cut of the model's newest
        release, to be signed by the planner.

        `links` maps each device class to the first link it is planned for; `gateways` to the gateway at the end of
        that link; `measured` to times measured in use. Golden inputs say what the answers should be for the gates of a
        rollout in `judged` (`accuracy`, `agreement`). `on_priced` gets a cascade of each device class with its price.
        All chunks that a device or the offload server may request are
        stored, but the release is not published yet. UsageError if there is no release to recut.
        """
        if (family := family_of(model)) is not None:
            if judged:
                raise UsageError(
                    f"{model.ref} is a family, whose answers are of several models: gates of accuracy and agreement"
                    " judge one. Deploy it with `--least-accuracy`"
                )
            return self._prepare_family(model, family, links, options, recut, gateways or {}, on_priced)
        check_for_model(model.ref, options)
        if recut and options.cascade is not None:
            raise UsageError(f"{model.ref}: an early exit is signed with the release key, not by a recut")
        base = self._newest_base(model) if recut else None
        if recut and base is None:
            raise UsageError(
                f"{model.ref} was never released, and the first release of a model needs the release key: "
                + ("deploy it once without --recut" if self._repository.signs_releases else RELEASE_KEY_ELSEWHERE)
            )
        if base is not None and not can_judge(base[1], judged):
            raise UsageError(
                f"release {base[0][:12]} has no labelled golden inputs, by which accuracy or agreement could be judged,"
                " and a recut cannot add any: that needs the release key"
            )
        loaded = self._registry.load(model)
        planned = {
            device_class: self._planning.plan(
                model, device_class, link, options, (gateways or {}).get(device_class),
                (measured or {}).get(device_class), on_priced,
            )
            for device_class, link in links.items()
        }  # fmt: skip
        tables = {
            device_class: msgspec.structs.replace(
                result.table, offload=options.offload, providers=device_profile(device_class).providers
            )
            for device_class, result in planned.items()
        }
        layer_s = {
            device_class: {layer.name: layer.seconds["device"] for layer in result.costs.layers}
            for device_class, result in planned.items()
        }
        if base is not None:
            return self._recut(model, loaded, base, tables, layer_s, options)
        report_step("cutting the model into slices")
        cut = cut_for(loaded, tables.values())
        plans = {
            device_class: release_plan(table, cut, layer_s[device_class]) for device_class, table in tables.items()
        }
        report_step("running the whole model on golden inputs")
        if judged:
            pairs = self._judged_pairs(model, loaded, judged)
        else:
            pairs = golden_pairs(loaded, self._registry.samples(model, 2), model.name)
        compiled = [half for name, plan in plans.items() for half in compiled_for(loaded, cut, name, plan)]
        made = make_manifest(model, loaded, cut, plans, pairs)
        # Fingerprint: digests of the model's weights by which devices check a recut against its base (`check_recut`).
        # Digests of weights would reveal the encrypted ones.
        fingerprint = b"" if options.encrypt else fingerprint_of(loaded)
        made = msgspec.structs.replace(
            made,
            compiled=tuple(half.compiled for half in compiled),
            fingerprint=fingerprint_file(fingerprint) if fingerprint else None,
        )
        contents = [*cut, *(half.cut for half in compiled)]
        if options.encrypt:
            made, contents, pairs = self._content_keys.seal(made, contents, pairs)
        if fingerprint:
            self._repository.add_fingerprint(fingerprint)
            self._blobs.put(fingerprint)
        manifest = self._with_known_date(model, made)
        return self._store(model, manifest, contents, pairs), manifest

    def _judged_pairs(self, model: Model, loaded: LoadedModel, judged: Collection[str]) -> list[GoldenPair]:
        """Golden pairs that say what the answers should be: by label, and by the base of a variant. UsageError where a
        gate would have nothing to judge by."""
        samples = self._registry.spread_samples(model, MOST_JUDGED)
        if "accuracy" in judged and not any(label is not None for _, label in samples):
            raise UsageError(
                f"a gate of accuracy needs labelled samples, and {model.ref} has none: `edgectl profile {model.name}"
                " --samples FOLDER` stores them"
            )
        base: LoadedModel | None = None
        if "agreement" in judged:
            lineage = model.lineage
            base = loaded if lineage is None else self._registry.load(self._registry.get(lineage["base"]))
        return judged_pairs(loaded, samples, model.name, base)

    def _prepare_family(
        self, model: Model, family: FamilyDocument, links: Mapping[str, Link], options: PlanOptions, recut: bool,
        gateways: Mapping[str, GatewayHop], on_priced: OnPriced | None,
    ) -> tuple[str, Manifest]:  # fmt: skip
        """Digest and manifest of a family's release, to be signed with the release key."""
        if recut:
            raise UsageError(f"{model.ref} is a family: its releases are signed with the release key, not recut")
        planning = FamilyPlanning(self._planning, self._registry)
        families = Families(self._database, self._blobs, self._registry, now=self._now)
        answers = families.answers(model) if options.cascade is not None else None
        planned = {
            device_class: planning.plan(
                model.ref, family, device_class, link, options, gateways.get(device_class), answers
            )
            for device_class, link in links.items()
        }  # fmt: skip
        for device_class, result in planned.items():
            if result.cascade is not None and on_priced is not None:
                on_priced(device_class, result.cascade)
        built = build_family(model, family, self._registry, planned)
        made, contents, pairs = built.manifest, built.contents, built.pairs
        if options.encrypt:
            made, contents, pairs = self._content_keys.seal(made, contents, pairs)
        manifest = self._with_known_date(model, made)
        return self._store(model, manifest, contents, pairs), manifest

    def _newest_base(self, model: Model) -> tuple[str, Manifest] | None:
        """Digest and manifest of the model's newest release that was signed with the release key; None if there is
        none."""
        signed = set(self._repository.releases())
        with self._database.read() as session:
            query = select(ReleaseRow.digest).where(ReleaseRow.model_id == model.id).order_by(ReleaseRow.created.desc())
            digests = session.scalars(query).all()
        newest = next((digest for digest in digests if digest in signed), None)
        return None if newest is None else (newest, self.manifest(newest))

    def _recut(
        self, model: Model, loaded: LoadedModel, base_release: tuple[str, Manifest], tables: Mapping[str, Plan],
        layer_s: Mapping[str, Mapping[str, float]], options: PlanOptions,
    ) -> tuple[str, Manifest]:  # fmt: skip
        """A recut of the base with other plan tables: over its own slices where every row is a union of them, else
        newly cut. Returns the base itself if nothing differs. UsageError if the planner key may not sign it."""
        digest, base = base_release
        if options.encrypt and not base.is_encrypted:
            raise UsageError(f"release {digest[:12]} is in clear: to encrypt it needs the release key")
        reuses_slices = all(is_union_of(table, base.slices) for table in tables.values())
        cut = (
            [CutSlice(base_slice, {}) for base_slice in base.slices]
            if reuses_slices
            else cut_for(loaded, tables.values())
        )
        plans = {name: release_plan(table, cut, layer_s[name]) for name, table in tables.items()}
        if reuses_slices and plans == base.plans:
            return digest, base
        recut = msgspec.structs.replace(
            base, slices=tuple(cut_slice.slice for cut_slice in cut), plans=plans,
            compiled=base.compiled if reuses_slices else (), fingerprint=None, recut_of=digest,
        )  # fmt: skip
        raw_fingerprint = self._blobs.get(base.fingerprint.sha256) if base.fingerprint else b""
        if base.fingerprint and not reuses_slices and fingerprint_of(loaded) != raw_fingerprint:
            raise UsageError(
                f"{model.ref} is no longer prepared here as it was when release {digest[:12]} was made (another version"
                " of onnxruntime or onnx?): to cut it elsewhere now needs the release key"
            )
        try:
            check_recut(
                recut, base, decode_fingerprint(raw_fingerprint, base.fingerprint) if base.fingerprint else None
            )
        except TrustError as error:
            raise UsageError(f"release {digest[:12]} cannot be cut like this by the planner: {error}") from error
        manifest = self._with_known_date(model, recut)
        return self._store(model, manifest, [] if reuses_slices else cut, []), manifest

    def manifest(self, digest: str) -> Manifest:
        """The manifest of a published release; NotFound otherwise."""
        cached = self._cached(digest)
        if cached is None:
            raise not_found("release", digest, (release.digest for release in self.all()))
        return cached[0]

    def find(self, digest: str) -> Manifest | None:
        """The manifest of a published release; None for an unknown one."""
        cached = self._cached(digest)
        return cached[0] if cached else None

    def has_plan_for(self, digest: str, device_class: str) -> bool:
        """Whether devices of this class can run that release; an agent's release suits every class."""
        manifest = self.find(digest)
        return manifest is not None and (is_agent_release(manifest) or device_class in manifest.plans)

    def wrap_keys_for_device(self, device: Device, digest: str) -> bytes:
        """Content keys that a device needs for a release; empty for a release in clear. A device that is
        given some may use the remote half."""
        wrapped = self._content_keys.wrap_for_device(device, digest, self.manifest(digest))
        if wrapped:
            self.permitted_devices.add(digest, device.name)
        return wrapped

    def wrap_keys_for_gateway(self, gateway: Device, digest: str) -> bytes:
        """Content keys that a gateway needs for a release; empty for a release in clear. It may use the remote half, as
        it asks the cloud for its devices."""
        wrapped = self._content_keys.wrap_for_gateway(gateway, digest, self.manifest(digest))
        if wrapped:
            self.permitted_devices.add(digest, gateway.name)
        return wrapped

    def split_by_gateway(self, digest: str) -> str:
        """The model's name if some plan of that release has a gateway tier; empty otherwise, and for an unknown
        release."""
        manifest = self.find(digest)
        if manifest is None or not any(plan.has_gateway for plan in manifest.plans.values()):
            return ""
        return ModelRef.parse(manifest.model).name

    def chunks_of(self, digest: str) -> tuple[str, ...]:
        """The chunks of a release in the order of its manifest, by which devices number them; empty for an unknown
        release."""
        cached = self._cached(digest)
        return cached[1] if cached else ()

    def all(self) -> Sequence[ReleaseRow]:
        """Every release, oldest first."""
        with self._database.read() as session:
            return session.scalars(select(ReleaseRow).order_by(ReleaseRow.created)).all()

    def publish(self, model: Model, digest: str, options: PlanOptions, signed: bytes | None = None) -> None:
        """Publish a prepared release: signed here, or by `signed`, targets metadata that lists it and was signed
        elsewhere. Conflict if the model, or the release that this is a recut of, was removed meanwhile."""
        report_step("signing the release")
        raw = self._blobs.get(digest)
        manifest = decode_manifest(raw)
        self._sign(manifest, raw, signed)
        with self._database.write() as session:
            check_stored(session, model)
            if manifest.recut_of and session.get(ReleaseRow, manifest.recut_of) is None:
                raise Conflict(f"release {manifest.recut_of[:12]} was removed meanwhile: deploy again")
            if session.get(ReleaseRow, digest) is None:
                signature_detail = {
                    **signature_view(manifest),
                    "key": "elsewhere" if signed is not None else "controller",
                }
                stored_options = {**options.as_options(), **signature_view(manifest)}
                session.add(ReleaseRow(digest=digest, model_id=model.id, created=self._now(), options=stored_options))
                record_event(
                    session, self._now(), "operator", "release.made", digest, model=model.ref, **signature_detail
                )
        # Only from here on does the row protect what was stored before from removal (`retention`): what was removed
        # just before is written again.
        self._sign(manifest, raw, signed)
        self._export_to_offload(digest, raw)

    def _sign(self, manifest: Manifest, raw: bytes, signed: bytes | None) -> None:
        """Publish the metadata that lists the release; nothing, if it is listed."""
        if manifest.recut_of:
            self._repository.add_recut(raw)
        elif signed is not None and release_digest(raw) not in self._repository.releases():
            self._repository.add_signed(signed, [raw])
        else:
            self._repository.add_release(raw)

    def prepared(self, model: Model, digest: str) -> Manifest:
        """The manifest of a release prepared for that model. NotFound if it was not prepared here, or its files were
        collected since; UsageError if it is of another model."""
        try:
            manifest = decode_manifest(self._blobs.get(sha256_hex(digest)))
            complete = all(self._blobs.touch(sha256) for sha256 in (digest, *blobs_of(manifest)))
        except (BlobLost, MalformedMessage) as error:
            raise NotFound(f"release {digest[:12]} was not prepared here: deploy again") from error
        if not complete:
            raise NotFound(f"the files of release {digest[:12]} were deleted since it was prepared: deploy again")
        if manifest.model != model.ref:
            raise UsageError(f"release {digest[:12]} is of {manifest.model}, not of {model.ref}")
        return manifest

    def raw(self, digest: str) -> bytes:
        """The manifest bytes of a prepared release, as they are signed."""
        return self._blobs.get(digest)

    def refresh_proofs(self) -> None:
        """After a change of the release key or the root: rewrite the proofs in the offload server's folder under the
        newest root."""
        exported = set(stored_releases(self._offload_releases))
        signed = {*self._repository.releases(), *self._repository.recuts()}
        for release in self.all():
            if release.digest in exported & signed:
                self._export_to_offload(release.digest, self._blobs.get(release.digest))

    def export_missing(self) -> None:
        """After a restore: write every signed release that is missing into the offload server's folder. Releases that
        were removed may still be listed, where their key is elsewhere."""
        exported, known = set(stored_releases(self._offload_releases)), {release.digest for release in self.all()}
        signed = {*self._repository.releases(), *self._repository.recuts()}
        for digest in sorted(signed & known - exported):
            try:
                self._export_to_offload(digest, self._blobs.get(digest))
            except BlobLost as error:
                log.error("release %s cannot be served by the offload server: %s", digest[:12], error)

    def forget(self, digests: Iterable[str]) -> None:
        """Drop removed releases from the cache."""
        with self._lock:
            for digest in digests:
                self._manifests.pop(digest, None)

    def _export_to_offload(self, digest: str, raw: bytes) -> None:
        """Write a release into the offload server's folder, with its proof and its keys."""
        manifest = decode_manifest(raw)
        if is_agent_release(manifest):
            return  # no half of it runs here
        write_release(
            self._offload_releases, digest, raw, self._repository.proof(digest), self._blobs.get,
            bootstrap_root=self._repository.root_bytes,
        )  # fmt: skip
        if manifest.is_encrypted:
            append_permitted(self._offload_releases / digest, ())  # an empty list: no device may use it yet
            write_keys(self._offload_releases / digest, self._content_keys.remote_keys(manifest))

    def _store(self, model: Model, manifest: Manifest, cut: Sequence[CutSlice], pairs: Sequence[GoldenPair]) -> str:
        """Store everything that a device or the offload server may request; return the digest. ModelRefused if the
        manifest is too large."""
        raw = encode_manifest(manifest)
        if len(raw) > LIMITS.manifest_bytes:
            raise ModelRefused(f"{model.ref}: its manifest has {len(raw)} bytes, at most {LIMITS.manifest_bytes}")
        decode_manifest(raw)
        self._blobs.put_all(chunk for cut_slice in cut for runs in cut_slice.runs.values() for chunk in runs)
        self._blobs.put_all(body for pair in pairs for body in (pair.request, pair.response))
        return self._blobs.put(raw)

    def prepare_stored(self, model: Model, undated: Manifest) -> tuple[str, Manifest]:
        """Digest and manifest of a release whose chunks are stored already, to be signed. The date is that of an
        identical release, if there is one."""
        manifest = self._with_known_date(model, undated)
        return self._store(model, manifest, [], []), manifest

    def _with_known_date(self, model: Model, manifest: Manifest) -> Manifest:
        """The manifest with the date of a release that is identical otherwise, so that both have one digest; else with
        the date of now."""
        with self._database.read() as session:
            query = select(ReleaseRow.digest).where(ReleaseRow.model_id == model.id).order_by(ReleaseRow.created.desc())
            digests = session.scalars(query.limit(CACHED_MANIFESTS)).all()
        for digest in digests:
            known = self.find(digest)
            if known is None:  # removed meanwhile
                continue
            dated = msgspec.structs.replace(manifest, created=known.created)
            if release_digest(encode_manifest(dated)) == digest:
                return dated
        return msgspec.structs.replace(manifest, created=iso_time(self._now()))

    def _cached(self, digest: str) -> tuple[Manifest, tuple[str, ...]] | None:
        with self._lock:
            if digest in self._manifests:
                self._manifests.move_to_end(digest)
                return self._manifests[digest]
        with self._database.read() as session:
            if session.get(ReleaseRow, digest) is None:
                return None
        manifest = decode_manifest(self._blobs.get(digest))
        entry = manifest, tuple(manifest.chunk_list())
        with self._lock:
            self._manifests[digest] = entry
            while len(self._manifests) > CACHED_MANIFESTS:
                self._manifests.popitem(last=False)
        return entry


def signature_view(manifest: Manifest) -> dict[str, str]:
    """The role that signed a release, and the release of which it is a recut, as JSON."""
    if not manifest.recut_of:
        return {"signed_by": "targets"}
    return {"signed_by": PLANNER, "recut_of": manifest.recut_of}


def can_judge(manifest: Manifest, judged: Collection[str]) -> bool:
    """Whether the golden inputs of a release say what these gates of a rollout (`accuracy`, `agreement`) judge by."""
    return ("accuracy" not in judged or any(isinstance(golden.label, int) for golden in manifest.golden)) and (
        "agreement" not in judged or any(isinstance(golden.answer, int) for golden in manifest.golden)
    )


def blobs_of(manifest: Manifest) -> Iterator[str]:
    """Digests of the blobs that a release needs besides its manifest."""
    yield from manifest.chunk_list()
    if manifest.fingerprint is not None:
        yield manifest.fingerprint.sha256


def is_union_of(table: Plan, slices: Iterable[Slice]) -> bool:
    """Whether every row of the table (in layers) is a union of these slices."""
    rows = cut_sets(table)
    return all(row.issuperset(piece.layers) or row.isdisjoint(piece.layers) for piece in slices for row in rows)


def fingerprint_of(loaded: LoadedModel) -> bytes:
    """The model's fingerprint as it is signed; empty if it has none, or one above devices' size limit."""
    fingerprint = loaded.prepared.fingerprint(loaded.graph)
    raw = b"" if fingerprint is None else encode_fingerprint(fingerprint)
    return raw if len(raw) <= LIMITS.fingerprint_bytes else b""


def cut_for(loaded: LoadedModel, tables: Iterable[Plan]) -> list[CutSlice]:
    """Slices such that every row of every table is a union of some."""
    sets = {row_layers for table in tables for row_layers in (*cut_sets(table), *exit_sets(loaded.graph, table))}
    pieces = atoms(loaded.graph, sorted(sets, key=lambda layers: (len(layers), sorted(layers))))
    return cut_slices(loaded.prepared, loaded.graph, pieces, loaded.spec)


def exit_sets(graph: LayerGraph, table: Plan) -> tuple[frozenset[str], ...]:
    """The layers up to the table's early exit, which are slices of their own so that the others need not run; empty
    where it has none."""
    cascade = table.cascade
    return (layers_for(graph.layers, cascade.exit_output),) if cascade is not None else ()


def compiled_for(loaded: LoadedModel, cut: Sequence[CutSlice], device_class: str, plan: Plan) -> list[CompiledCut]:
    """The plan's device halves compiled for this class's accelerator; empty if it has none."""
    if not is_edge_tpu(device_profile(device_class)):
        return []
    rows = [frozenset(row.device) for row in plan.rows]
    return compiled_cuts(loaded.prepared, loaded.graph, cut, device_class, rows)


def release_plan(table: Plan, cut: Sequence[CutSlice], layer_s: Mapping[str, float]) -> Plan:
    """The table in slices instead of layers, with the seconds of each slice on this device class."""
    slice_s = {cut_slice.slice.name: sum(layer_s[layer] for layer in cut_slice.slice.layers) for cut_slice in cut}
    return to_release_plan(table, cut, slice_s)


def make_manifest(
    model: Model, loaded: LoadedModel, cut: Sequence[CutSlice], plans: Mapping[str, Plan], pairs: Sequence[GoldenPair]
) -> Manifest:
    """The release's manifest, without its date. An early exit is none of its outputs."""
    exits = {plan.cascade.exit_output for plan in plans.values() if plan.cascade is not None}
    return Manifest(
        model=model.ref, model_sha256=model.sha256, created="", input_spec=loaded.spec,
        inputs=tuple(_spec(loaded.graph, name) for name in loaded.graph.inputs),
        outputs=tuple(_spec(loaded.graph, name) for name in loaded.graph.outputs if name not in exits),
        slices=tuple(cut_slice.slice for cut_slice in cut), plans=dict(plans),
        golden=tuple(pair.to_example() for pair in pairs),
        lineage=msgspec.UNSET if model.lineage is None else msgspec.convert(model.lineage, Lineage),
        output_kind=_written_kind(kind_of(model), exits),
    )  # fmt: skip


def _written_kind(kind: OutputKind | None, exits: AbstractSet[str]) -> OutputKind | msgspec.UnsetType:
    """The kind as the manifest has it: none that reads an early exit, which is no output of the release."""
    return kind if kind is not None and exits.isdisjoint(kind.outputs) else msgspec.UNSET


def iso_time(seconds: float) -> str:
    """UTC in ISO 8601, to the second."""
    return datetime.fromtimestamp(int(seconds), timezone.utc).isoformat().replace("+00:00", "Z")


def _spec(graph: LayerGraph, name: str) -> TensorSpec:
    tensor = graph.tensors[name]
    return TensorSpec(name=name, datatype=tensor.datatype, shape=tensor.shape)
