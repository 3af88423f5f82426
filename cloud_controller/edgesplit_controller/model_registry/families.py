"""Families: models of one task whose answers mean the same, each with its accuracy on the family's labelled samples, or
with its agreement with one of them, the reference, where samples have no labels.

A family is a row of the table of models, as a version of the agent is, so that it is deployed, rolled out and removed
by its name like a model; its file is the document that `FamilyDocument` describes. The file alone contains what every
variant answers to the samples, which are not kept: by these answers a cascade is calibrated without a run of a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit import identifiers
from edgesplit.errors import UsageError
from edgesplit.identifiers import model_name
from edgesplit.limits import LIMITS
from edgesplit_controller.errors import Conflict
from edgesplit_controller.model_registry.family_answers import (
    RuledVariant,
    Sample,
    check_same_meaning,
    check_truth,
    family_answers,
    output_spec,
    variant_rule,
)
from edgesplit_controller.model_registry.registry import Registry, next_model_version
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Model
from edgesplit_partitioner.bounds.binomial import lower_share
from edgesplit_partitioner.planner.cascade_calibration import FamilyAnswers

UNSURE = 0.1
"""Probability with which the lower bound of an accuracy may be wrong."""
FEWEST_SAMPLES = 20
"""Samples that a family needs, at least."""


class FamilyVariant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variant as the family's document contains it."""

    name: str
    model: str
    """`name@version`."""
    right: int
    """Samples that it answered right; where they have no labels, as the reference does."""
    least_accuracy: float
    """Lower bound of its accuracy, or of its agreement, 90 % sure."""
    answer: str = ""
    """Its answer rule, on its own outputs; empty in families that were made before 0.3: their class."""
    labels: tuple[int, ...] = ()
    """Label of each class index of its output; empty: the index itself."""


class FamilyDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a family is."""

    format: str = "edgesplit.family/1"
    variants: tuple[FamilyVariant, ...]
    samples: int
    samples_sha256: str
    """Digest of the samples and their labels."""
    reference: str = ""
    """Variant that the others were compared with, as the samples have no labels. Empty: they have."""
    answers: FamilyAnswers | None = None
    """What the variants answer to the samples; None in the row of the table of models, and in files of versions before
    0.3."""

    def accuracy(self, variant: FamilyVariant) -> float:
        """Share of the samples that a variant answers right, or as the reference does."""
        return variant.right / self.samples


class VariantRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A variant of a family to be made: a model by its reference, and what its answers mean."""

    model: str
    labels: tuple[int, ...] = ()
    answer: str = ""
    """Its answer rule; empty: the family's."""


class Families:
    """The families of one controller."""

    def __init__(self, database: Database, blobs: Blobs, registry: Registry, *, now: Callable[[], float]) -> None:
        self._database = database
        self._blobs = blobs
        self._registry = registry
        self._now = now

    def create(
        self, name: str, variants: Sequence[VariantRequest], samples: Sequence[Sample], *, answer: str = "",
        reference: str = "",
    ) -> Model:  # fmt: skip
        """Heavy. Run every variant on the samples and store the family as `name@version`; the version that exists where
        nothing differs. `answer`: the answer rule; empty: of classifiers. `reference`: the model that the others are
        compared with where samples have no labels; empty: the last one.

        UsageError where variants do not take the same inputs, their outputs mean different things, or there are too few
        samples.
        """
        if not 2 <= len(variants) <= LIMITS.variants:
            raise UsageError(f"a family has 2 to {LIMITS.variants} variants, not {len(variants)}")
        if len(samples) < FEWEST_SAMPLES:
            raise UsageError(
                f"{len(samples)} samples are too few to tell variants apart: give at least {FEWEST_SAMPLES}"
            )
        models = [self._registry.get(variant.model) for variant in variants]
        names = variant_names(models)
        ruled = [self._ruled(*one, answer) for one in zip(names, models, variants, strict=True)]
        _check_inputs(ruled)
        check_same_meaning(ruled)
        is_labelled = check_truth(ruled[0].rule.kind, [truth for _, truth in samples])
        if is_labelled and reference:
            raise UsageError(f"the samples have labels, by which {reference} is judged too: leave the reference out")
        compared_with = "" if is_labelled else _named(reference, ruled)
        answers = family_answers(ruled, samples, compared_with)
        document = FamilyDocument(
            variants=tuple(_measured(one, answers) for one in ruled), samples=len(samples),
            samples_sha256=_digest_of(samples), reference=compared_with, answers=answers,
        )  # fmt: skip
        return self._store(model_name(name), document, models, ruled[0])

    def _ruled(self, name: str, model: Model, variant: VariantRequest, answer: str) -> RuledVariant:
        loaded = self._registry.load(model)
        return RuledVariant(
            name, model.ref, loaded, variant_rule(name, loaded, variant.answer or answer, variant.labels)
        )

    def answers(self, model: Model) -> FamilyAnswers:
        """What the variants of a stored family answer to its samples. UsageError for a model, and for a family of a
        version that did not keep answers."""
        if family_of(model) is None:
            raise UsageError(f"{model.ref} is no family: a cascade is of two variants of one (`edgectl family create`)")
        answers = msgspec.json.decode(self._blobs.get(model.sha256), type=FamilyDocument).answers
        if answers is None:
            raise UsageError(
                f"{model.ref} was made by a version that did not keep what its variants answer to the samples: create"
                " it again with the same samples (edgectl family create)"
            )
        return answers

    def _store(self, name: str, document: FamilyDocument, models: Sequence[Model], first: RuledVariant) -> Model:
        raw = msgspec.json.encode(document)
        digest = self._blobs.put(raw)
        inputs = [output_spec(first.loaded, tensor) for tensor in first.loaded.graph.inputs]
        with self._database.write() as session:
            for existing in session.scalars(select(Model).where(Model.name == name)):
                if existing.sha256 == digest:
                    return existing
            if any(
                model.shown.get("family") is None for model in session.scalars(select(Model).where(Model.name == name))
            ):
                raise Conflict(f"{name} is a model: give the family another name")
            for model in models:
                if session.get(Model, model.id) is None:
                    raise Conflict(f"{model.ref} was removed meanwhile: push it again")
            row = Model(
                name=name, version=next_model_version(session, name), sha256=digest, optimised_sha256=digest,
                bytes=len(raw), input_text="", bindings={}, created=self._now(),
                shown={
                    "inputs": msgspec.to_builtins(inputs), "outputs": msgspec.to_builtins(first.family_outputs),
                    "layers": [], "input_spec": None,
                    "family": msgspec.to_builtins(msgspec.structs.replace(document, answers=None)),
                },
            )  # fmt: skip
            session.add(row)
            record_event(
                session, self._now(), "operator", "family.created", row.ref,
                variants=[variant.model for variant in document.variants],
            )  # fmt: skip
        return row


def family_to_dict(model: Model) -> dict[str, Any]:
    """A family as the API returns it. UsageError for a model."""
    document = family_of(model)
    if document is None:
        raise UsageError(f"{model.ref} is a model and no family: see `edgectl model show {model.ref}`")
    variants = [
        {**msgspec.to_builtins(variant), "accuracy": document.accuracy(variant)} for variant in document.variants
    ]
    return {
        "family": model.ref, "samples": document.samples, "reference": document.reference,
        "created_at": model.created, "variants": variants,
    }  # fmt: skip


def family_of(model: Model) -> FamilyDocument | None:
    """The document of a family; None for a model."""
    document = model.shown.get("family")
    return None if document is None else msgspec.convert(document, FamilyDocument)


def families_with(session: Session, models: Sequence[Model]) -> list[Model]:
    """The families that have one of these models as a variant."""
    refs = {model.ref for model in models}
    found = []
    for row in session.scalars(select(Model)):
        document = family_of(row)
        if document is not None and refs & {variant.model for variant in document.variants}:
            found.append(row)
    return found


def variant_names(models: Sequence[Model]) -> list[str]:
    """Names for the variants: of the models, with their versions where two are of one name. UsageError for a model that
    is there twice."""
    refs = [model.ref for model in models]
    if len(set(refs)) != len(refs):
        raise UsageError(f"a variant is named twice: {', '.join(refs)}")
    plain = [model.name for model in models]
    named = [
        model.name if plain.count(model.name) == 1 else f"{model.name}-{model.version}" for model in models
    ]  # fmt: skip
    short = [identifiers.variant_name(name.replace(".", "-")[:31].rstrip("-_")) for name in named]
    if len(set(short)) != len(short):
        raise UsageError(f"the names of the variants {', '.join(named)} do not differ in their first 31 characters")
    return short


def ruled_variant(variant: FamilyVariant, registry: Registry) -> RuledVariant:
    """A family's variant with its model, and the rule by which it was measured."""
    loaded = registry.load(registry.get(variant.model))
    rule = variant_rule(variant.name, loaded, variant.answer, variant.labels)
    return RuledVariant(variant.name, variant.model, loaded, rule)


def _measured(variant: RuledVariant, answers: FamilyAnswers) -> FamilyVariant:
    """A variant with what its answers say of it."""
    right = sum(answers.right(variant.name))
    is_reference = variant.name == answers.reference  # which agrees with itself, and nothing is uncertain about that
    return FamilyVariant(
        name=variant.name, model=variant.ref, right=right, answer=variant.rule.to_text(), labels=variant.rule.labels,
        least_accuracy=1.0 if is_reference else lower_share(right, answers.samples, UNSURE),
    )  # fmt: skip


def _named(reference: str, variants: Sequence[RuledVariant]) -> str:
    """Name of the variant that a user calls the reference; of the last one where nothing is said."""
    if not reference:
        return variants[-1].name
    for one in variants:
        if reference in (one.name, one.ref, one.ref.partition("@")[0]):
            return one.name
    raise UsageError(f"{reference} is none of the variants {', '.join(one.ref for one in variants)}")


def _check_inputs(variants: Sequence[RuledVariant]) -> None:
    """UsageError where two variants take different inputs: a request must be one for all of them."""
    taken = [[output_spec(one.loaded, name) for name in one.loaded.graph.inputs] for one in variants]
    for one, inputs in zip(variants, taken, strict=True):
        if inputs != taken[0]:
            raise UsageError(
                f"{variants[0].name} and {one.name} take different inputs: push both with an input spec, so that both"
                " take frames"
            )


def _digest_of(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample, label in samples:
        parts: Mapping[str, Any] = {"frame": sample} if isinstance(sample, bytes) else sample
        for name in sorted(parts):
            data = parts[name] if isinstance(parts[name], bytes) else parts[name].tobytes()
            digest.update(hashlib.sha256(name.encode() + data).digest())
        digest.update(label.to_bytes(8, "big", signed=True) if isinstance(label, int) else msgspec.json.encode(label))
    return digest.hexdigest()
