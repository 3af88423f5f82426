"""Registry of models by `name@version`, immutable, with their input spec and their samples.

Pushing the same content (file, input spec and bindings) under the same name returns the existing version. Which model
files are accepted is decided in `edgesplit_partitioner.onnx_format.model`; here they are stored and found.
"""

from __future__ import annotations

import hashlib
import io
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from edgesplit.errors import EdgeError, UsageError
from edgesplit.identifiers import ModelRef, model_name
from edgesplit.input_spec import InputSpec, parse_input_spec, prepare
from edgesplit.limits import LIMITS
from edgesplit.oip.protocol import check_tensors as check_inputs
from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit.release.lineage import Lineage
from edgesplit.runtime import Tensors
from edgesplit_controller.errors import Conflict, not_found
from edgesplit_controller.model_registry.interface import (
    NOTHING_SAID,
    InterfaceRequest,
    description,
    kind_of_variant,
    settle,
)
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.blobs import map_file
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Measurement, Model, Sample
from edgesplit_controller.storage.tables.retention import RemovedModelRow
from edgesplit_partitioner.costs.build import main_operator
from edgesplit_partitioner.ir.chunking import Data
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format.archive import write_stored_form
from edgesplit_partitioner.onnx_format.model import with_input_layer

MODELS = Model.name != AGENT_MODEL
"""Query condition for models proper: rows of the name `AGENT_MODEL` are versions of the agent
(`releases.agent_releases`)."""
LABELS = "labels"
"""Kind of the measurement row that holds the class labels of a model's samples."""
MOST_SAMPLES = 5_000
"""Samples stored per model, at most: half of them confirm 0.1 % of changed answers (90 % sure)."""
LOADED_MODELS = 2
"""Parsed models kept in memory (LRU cache)."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A parsed model, ready for planning and slicing: with the input layer, where there is an input spec."""

    prepared: PreparedModel
    graph: LayerGraph
    spec: InputSpec | None


class Registry:
    """The models of one controller. Thread-safe."""

    def __init__(self, database: Database, blobs: Blobs, *, now: Callable[[], float]) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now
        self._loaded: OrderedDict[tuple[str, str], LoadedModel] = OrderedDict()
        self._lock = threading.Lock()
        self._loading: dict[tuple[str, str], threading.Lock] = {}
        """Locks by model, held while it is parsed, so that two callers do not parse the same one."""

    def push(
        self, part: Path, name: str, input_text: str = "", bindings: Mapping[str, int] | None = None, *,
        lineage: Lineage | None = None, interface: InterfaceRequest = NOTHING_SAID,
    ) -> Model:  # fmt: skip
        """Store the model file at `part` (which is moved away). Raises ModelRefused or UsageError with the reason if it
        is not accepted. `interface` says what its outputs are, and its input where there is no `input_text`.

        A version that stands in for another has a `lineage`, and the base's output kind; the same content with another
        lineage is another version.
        """
        if model_name(name) == AGENT_MODEL:
            raise UsageError(f"{AGENT_MODEL} is the agent itself: `edgectl agent push` takes a kit of it")
        bound = dict(bindings or {})
        encoded_lineage = None if lineage is None else msgspec.to_builtins(lineage)
        try:
            prepared = prepare_model(map_file(part), bound)
            settled = settle(prepared, replace(interface, input=input_text) if input_text else interface)
            loaded, text = with_input_spec(prepared, settled.input_text), settled.input_text
            size = part.stat().st_size
            digest = self._blobs.put_file(part)
        finally:
            part.unlink(missing_ok=True)
        kind = settled.kind if lineage is None else kind_of_variant(prepared, self.get(lineage.base))
        shown = {**_description(loaded), **description(prepared, kind)}
        optimised = self._store_optimised(loaded)
        with self._database.write() as session:
            same_content = (Model.name == name, Model.sha256 == digest, Model.input_text == text)
            for existing in session.scalars(select(Model).where(*same_content)):
                same_kind = existing.shown.get("output_kind") == shown.get("output_kind")
                if existing.bindings == bound and same_kind and encoded_lineage in (None, existing.lineage):
                    return existing
            model = Model(
                name=name, version=next_model_version(session, name), sha256=digest, optimised_sha256=optimised,
                bytes=size, input_text=text, bindings=bound, shown=shown, created=self._now(),
                lineage=encoded_lineage,
            )  # fmt: skip
            session.add(model)
            origin = {} if lineage is None else {"base": lineage.base, "method": lineage.method}
            record_event(session, self._now(), "operator", "model.pushed", model.ref, sha256=digest, **origin)
        self._cache(model, loaded)
        return model

    def get(self, reference: str) -> Model:
        """The model named `name` (its newest version) or `name@version`; NotFound lists near matches."""
        wanted = ModelRef.parse(reference)
        if wanted.name == AGENT_MODEL:
            raise UsageError(f"{AGENT_MODEL} is the agent itself, and no model: see `edgectl agent`")
        with self._database.read() as session:
            query = select(Model).where(Model.name == wanted.name).order_by(Model.version.desc())
            versions = session.scalars(query).all()
            if not versions:
                raise not_found("model", wanted.name, session.scalars(select(Model.name).where(MODELS).distinct()))
        for model in versions:
            if wanted.version in (None, model.version):
                return model
        raise not_found("model", str(wanted), (model.ref for model in versions))

    def all(self) -> Sequence[Model]:
        """Every model, by name and version."""
        with self._database.read() as session:
            return session.scalars(select(Model).where(MODELS).order_by(Model.name, Model.version)).all()

    def variants_of(self, ref: str) -> list[Model]:
        """The versions that stand in for the model `ref` (`name@version`), oldest first."""
        with self._database.read() as session:
            query = select(Model).where(Model.lineage.is_not(None)).order_by(Model.id)
            return [row for row in session.scalars(query) if row.lineage and row.lineage["base"] == ref]

    def load(self, model: Model) -> LoadedModel:
        """The parsed model, from the cache if possible. UsageError for a family, which has no file of its own."""
        refuse_family(model)
        key = _key(model)
        with self._lock:
            loading = self._loading.setdefault(key, threading.Lock())
        try:
            with loading:
                if (known := self._cached(key)) is not None:
                    return known
                loaded = load_model(self._blobs.mapped(model.sha256), model.input_text, model.bindings)
                self._cache(model, loaded)
                return loaded
        finally:
            with self._lock:
                self._loading.pop(key, None)

    def add_samples(
        self, model: Model, frames: Iterable[bytes] = (), tensors: Iterable[bytes] = (), *,
        labels: Mapping[bytes, int] | None = None,
    ) -> int:  # fmt: skip
        """Store sample inputs (JPEG frames, or named tensors as .npz); return how many the model has now. Conflict
        beyond `MOST_SAMPLES`.

        `labels` gives the class that a sample, identified by its bytes, shows.
        """
        loaded = self.load(model)
        checked = [("frame", check_frame(loaded, frame)) for frame in frames]
        checked += [("tensors", check_tensors(loaded, archive)) for archive in tensors]
        digests = self._blobs.put_all(data for _, data in checked)
        with self._database.write() as session:
            check_stored(session, model)
            known = set(session.scalars(select(Sample.sha256).where(Sample.model_id == model.id)))
            fresh = {digest: kind for (kind, _), digest in zip(checked, digests, strict=True) if digest not in known}
            if len(known) + len(fresh) > MOST_SAMPLES:
                raise Conflict(
                    f"{model.ref} has {len(known)} samples; {len(fresh)} more are over the limit of {MOST_SAMPLES}"
                )
            session.add_all(Sample(model_id=model.id, sha256=digest, kind=kind) for digest, kind in fresh.items())
            label_of = {hashlib.sha256(sample).hexdigest(): label for sample, label in (labels or {}).items()}
            add_labels(session, model, label_of)
            return len(known) + len(fresh)

    def samples(self, model: Model, limit: int = MOST_SAMPLES) -> list[bytes | Tensors]:
        """The model's samples, oldest first: a frame as bytes, tensors as arrays by name."""
        with self._database.read() as session:
            rows = session.scalars(
                select(Sample).where(Sample.model_id == model.id).order_by(Sample.id).limit(limit)
            ).all()
        return [decode_sample(row.kind, self._blobs.get(row.sha256)) for row in rows]

    def spread_samples(self, model: Model, most: int) -> list[tuple[bytes | Tensors, int | None]]:
        """At most so many of the model's samples with their class, evenly spread; only labelled ones where there are
        any."""
        with self._database.read() as session:
            labels = stored_labels(session, model)
            rows = session.scalars(select(Sample).where(Sample.model_id == model.id).order_by(Sample.id)).all()
        known = [row for row in rows if row.sha256 in labels] or rows
        chosen = known[:: max(1, -(-len(known) // most))]
        return [(decode_sample(row.kind, self._blobs.get(row.sha256)), labels.get(row.sha256)) for row in chosen]

    @property
    def blobs(self) -> Blobs:
        """Where models and samples are stored."""
        return self._blobs

    def sample_entries(self, model: Model) -> list[tuple[str, str]]:
        """Kind (`frame` or `tensors`) and digest of each of the model's samples, oldest first."""
        entries = select(Sample.kind, Sample.sha256).where(Sample.model_id == model.id).order_by(Sample.id)
        with self._database.read() as session:
            return [(kind, digest) for kind, digest in session.execute(entries)]

    def sample_count(self, model: Model) -> int:
        """How many samples the model has."""
        with self._database.read() as session:
            return session.scalar(select(func.count()).select_from(Sample).where(Sample.model_id == model.id)) or 0

    def labels(self, model: Model, limit: int = MOST_SAMPLES) -> list[int | None]:
        """The class of each of these samples; None where no label was given."""
        chosen = select(Sample.sha256).where(Sample.model_id == model.id).order_by(Sample.id).limit(limit)
        with self._database.read() as session:
            labels = stored_labels(session, model)
            return [labels.get(digest) for digest in session.scalars(chosen)]

    def _store_optimised(self, loaded: LoadedModel) -> str:
        """Store the optimised model, which is measured and sliced. Written in parts, because it may be larger than the
        memory."""
        part = self._blobs.incoming_file()
        try:
            with part.open("wb") as target:
                write_stored_form(*loaded.prepared.message_and_data, target)
            return self._blobs.put_file(part)
        finally:
            part.unlink(missing_ok=True)

    def _cached(self, key: tuple[str, str]) -> LoadedModel | None:
        with self._lock:
            if key in self._loaded:
                self._loaded.move_to_end(key)
            return self._loaded.get(key)

    def _cache(self, model: Model, loaded: LoadedModel) -> None:
        with self._lock:
            self._loaded[_key(model)] = loaded
            while len(self._loaded) > LOADED_MODELS:
                self._loaded.popitem(last=False)


def next_model_version(session: Session, name: str) -> int:
    """The version that a new model of this name gets: one that no model had, also none that was removed."""
    newest = session.scalar(select(func.max(Model.version)).where(Model.name == name)) or 0
    removed = session.get(RemovedModelRow, name)
    return max(newest, removed.version if removed is not None else 0) + 1


def refuse_family(model: Model) -> None:
    """UsageError, which names the variants, for a family where one model is needed."""
    family = model.shown.get("family")
    if family is not None:
        variants = [str(variant["model"]) for variant in family["variants"]]
        raise UsageError(f"{model.ref} is a family: name one of its variants, {' or '.join(variants)}")


def check_stored(session: Session, model: Model) -> None:
    """Conflict if the model was removed since it was read. To be called by a transaction that adds rows about it."""
    row = session.get(Model, model.id)
    if row is None or row.ref != model.ref:
        raise Conflict(f"{model.ref} was removed meanwhile: push it again")


def load_model(raw: Data, input_text: str, bindings: Mapping[str, int]) -> LoadedModel:
    """Parse and check a model file, with its input layer if `input_text` gives an input spec, or is `auto`."""
    prepared = prepare_model(raw, bindings)
    return with_input_spec(prepared, settle(prepared, InterfaceRequest(input_text)).input_text)


def with_input_spec(prepared: PreparedModel, input_text: str) -> LoadedModel:
    """The model with the input layer of that spec, or as it is where the text is empty."""
    if not input_text:
        return LoadedModel(prepared, prepared.graph, None)
    graph, fed_spec = with_input_layer(prepared, parse_input_spec(input_text))
    return LoadedModel(prepared, graph, fed_spec)


def check_frame(loaded: LoadedModel, frame: bytes) -> bytes:
    """Return `frame` if the model's input spec can decode it; UsageError otherwise."""
    if loaded.spec is None:
        raise UsageError("this model takes tensors, not frames: it was pushed without an input spec")
    try:
        prepare(loaded.spec, frame)
    except EdgeError as error:
        raise UsageError(f"a sample is refused: {error}") from error
    return frame


def check_tensors(loaded: LoadedModel, archive: bytes) -> bytes:
    """Return `archive` if it holds exactly the tensors that the model reads, in their shapes; UsageError otherwise."""
    if loaded.spec is not None:
        raise UsageError(f"this model takes frames ({loaded.spec.media}), not tensors")
    check_inputs(read_tensors(archive), loaded.prepared.inputs)
    return archive


_ARCHIVE_ERRORS = (
    OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RuntimeError, NotImplementedError, MemoryError,
    SyntaxError, OverflowError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What zipfile and numpy raise for bytes that are no archive of arrays, or one that is encrypted or oddly packed."""


def read_tensors(archive: bytes) -> dict[str, Any]:
    """The arrays of an .npz file by name. Nothing is unpickled, and no more is unpacked than a request could hold;
    UsageError otherwise."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as zip_file:
            unpacked = sum(member.file_size for member in zip_file.infolist())
        if unpacked > LIMITS.http_body_bytes:
            raise UsageError(f"a sample has {unpacked} bytes unpacked, at most {LIMITS.http_body_bytes}")
        with np.load(io.BytesIO(archive), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except _ARCHIVE_ERRORS as error:
        raise UsageError(f"a sample is no .npz of plain arrays: {error}") from error


def decode_sample(kind: str, data: bytes) -> bytes | Tensors:
    """A stored sample: a frame as it is, tensors by name."""
    return data if kind == "frame" else read_tensors(data)


def _labels_query(model: Model) -> Select[Measurement]:
    return select(Measurement).where(Measurement.model_id == model.id, Measurement.kind == LABELS)


def stored_labels(session: Session, model: Model) -> Mapping[str, int]:
    """The class of each sample that has one, by digest."""
    row = session.scalars(_labels_query(model)).first()
    return {} if row is None else row.content


def add_labels(session: Session, model: Model, labels: Mapping[str, int]) -> None:
    """Store the class of these samples, by digest."""
    if not labels:
        return
    row = session.scalars(_labels_query(model)).first()
    if row is None:
        row = Measurement(model_id=model.id, kind=LABELS, place="operator", content={}, taken=0.0)
        session.add(row)
    row.content = {**row.content, **labels}


def _key(model: Model) -> tuple[str, str]:
    return model.ref, model.sha256


def _description(loaded: LoadedModel) -> dict[str, Any]:
    """Description of a model for the API: its inputs, outputs and layers."""
    tensors = loaded.graph.tensors

    def tensor_views(names: Iterable[str]) -> list[dict[str, Any]]:
        return [
            {"name": name, "datatype": tensors[name].datatype, "shape": list(tensors[name].shape)} for name in names
        ]

    layers = [
        {
            "name": layer.name,
            "operator": main_operator(layer),
            "weight_bytes": layer.weight_bytes,
            "output_bytes": sum(tensors[name].bytes for name in layer.writes),
        }
        for layer in loaded.graph.layers
    ]
    spec = msgspec.to_builtins(loaded.spec) if loaded.spec is not None else None
    ends = {"inputs": tensor_views(loaded.graph.inputs), "outputs": tensor_views(loaded.graph.outputs)}
    return {**ends, "layers": layers, "input_spec": spec}
