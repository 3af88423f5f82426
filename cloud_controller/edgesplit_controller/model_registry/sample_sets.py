"""Sets of a model's samples with their labels, named by their digest: what versions are compared on, and what a lineage
refers to. A set is stored when it is first named and never changed, whatever labels or samples the model gets later."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import msgspec
from sqlalchemy import select

from edgesplit.errors import UsageError
from edgesplit_controller.errors import not_found
from edgesplit_controller.model_registry.registry import add_labels, check_stored, decode_sample, stored_labels
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Model, Sample, SampleSetRow
from edgesplit_partitioner.profiling.layers import Sample as SampleInput


@dataclass(frozen=True, slots=True)
class SampleSet:
    """A set of samples of one model."""

    sha256: str
    content: tuple[tuple[str, int | None], ...]
    """Digest of each sample with its class, sorted."""

    @property
    def labels(self) -> list[int | None]:
        """The class of each sample."""
        return [label for _, label in self.content]

    @property
    def labelled(self) -> int:
        """Samples with a class."""
        return sum(label is not None for label in self.labels)

    @classmethod
    def of(cls, labels: dict[str, int | None]) -> SampleSet:
        """The set of these samples, by digest."""
        content = tuple(sorted(labels.items(), key=lambda item: item[0]))
        return cls(hashlib.sha256(msgspec.json.encode(content)).hexdigest(), content)


class BlobSamples(Sequence[SampleInput]):
    """Samples that are read from the blob store when they are used: all of them may not fit into memory."""

    def __init__(self, blobs: Blobs, entries: Sequence[tuple[str, str]]) -> None:
        """`entries`: kind and digest of each sample."""
        self._blobs = blobs
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, at: int) -> SampleInput: ...
    @overload
    def __getitem__(self, at: slice) -> BlobSamples: ...
    def __getitem__(self, at: int | slice) -> SampleInput | BlobSamples:
        if isinstance(at, slice):
            return BlobSamples(self._blobs, self._entries[at])
        kind, digest = self._entries[at]
        return decode_sample(kind, self._blobs.get(digest))


class SampleSets:
    """The sample sets of one controller."""

    def __init__(self, database: Database, blobs: Blobs, *, now: Callable[[], float]) -> None:
        self._database = database
        self._blobs = blobs
        self._now = now

    def create(self, model: Model, digests: Sequence[str]) -> SampleSet:
        """The set of these stored samples with the labels that they have now. UsageError for one that the model does
        not have."""
        with self._database.write() as session:
            check_stored(session, model)
            known = set(session.scalars(select(Sample.sha256).where(Sample.model_id == model.id)))
            if missing := sorted(set(digests) - known):
                raise UsageError(f"{model.ref} has no sample {missing[0][:16]}: send it first")
            if not digests:
                raise UsageError("a set needs samples")
            labels = stored_labels(session, model)
            made = SampleSet.of({digest: labels.get(digest) for digest in digests})
            if session.get(SampleSetRow, (model.id, made.sha256)) is None:
                content = [list(entry) for entry in made.content]
                row = SampleSetRow(model_id=model.id, sha256=made.sha256, content=content, created=self._now())
                session.add(row)
        return made

    def get(self, model: Model, sha256: str) -> SampleSet:
        """The set with this digest; NotFound otherwise."""
        with self._database.read() as session:
            row = session.get(SampleSetRow, (model.id, sha256))
            if row is None:
                of_model = select(SampleSetRow.sha256).where(SampleSetRow.model_id == model.id)
                raise not_found("sample set", sha256, session.scalars(of_model))
            return SampleSet(row.sha256, tuple((digest, label) for digest, label in row.content))

    def samples(self, model: Model, chosen: SampleSet) -> BlobSamples:
        """The samples of a set, in its order: frames as bytes, tensors by name."""
        with self._database.read() as session:
            of_model = select(Sample.sha256, Sample.kind).where(Sample.model_id == model.id)
            kinds = {row.sha256: row.kind for row in session.execute(of_model)}
        return BlobSamples(self._blobs, [(kinds[digest], digest) for digest, _ in chosen.content])

    def inherit(self, base: Model, variant: Model, chosen: SampleSet) -> None:
        """Give a variant the samples of the set that judged it, with their labels, where both decode the same input."""
        if variant.input_text != base.input_text or variant.shown["inputs"] != base.shown["inputs"]:
            return
        with self._database.write() as session:
            check_stored(session, variant)
            of_base = select(Sample).where(Sample.model_id == base.id).order_by(Sample.id)
            known = set(session.scalars(select(Sample.sha256).where(Sample.model_id == variant.id)))
            in_set = {digest for digest, _ in chosen.content} - known
            rows = [row for row in session.scalars(of_base) if row.sha256 in in_set]
            session.add_all(Sample(model_id=variant.id, sha256=row.sha256, kind=row.kind) for row in rows)
            add_labels(session, variant, {digest: label for digest, label in chosen.content if label is not None})
