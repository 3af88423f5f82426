"""Families: models of one task whose answers mean the same, each with its accuracy on the family's labelled samples.

A family is a row of the table of models, as a version of the agent is, so that it is deployed, rolled out and removed
by its name like a model; its file is the document that `FamilyDocument` describes. The file alone contains what every
variant answers to the samples, which are not kept: by these answers a cascade is calibrated without a run of a model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from edgesplit import identifiers
from edgesplit.answers.answer_rule import AnswerRule, infer_answer_rule
from edgesplit.answers.comparison import predicted_label
from edgesplit.answers.score import score
from edgesplit.errors import UsageError
from edgesplit.identifiers import model_name
from edgesplit.limits import LIMITS
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensors
from edgesplit_controller.errors import Conflict
from edgesplit_controller.job_progress import report_step
from edgesplit_controller.model_registry.golden import model_inputs, run_whole
from edgesplit_controller.model_registry.registry import LoadedModel, Registry, next_model_version
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Model
from edgesplit_partitioner.bounds.binomial import lower_share
from edgesplit_partitioner.planner.cascade_calibration import (
    CLASS_SCORES,
    FamilyAnswers,
    VariantAnswers,
    count_right,
)

UNSURE = 0.1
"""Probability with which the lower bound of an accuracy may be wrong."""
FEWEST_SAMPLES = 20
"""Labelled samples that a family needs, at least."""


class FamilyVariant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variant as the family's document contains it."""

    name: str
    model: str
    """`name@version`."""
    right: int
    """Samples that it answered right."""
    least_accuracy: float
    """Lower bound of its accuracy, 90 % sure."""
    labels: tuple[int, ...] = ()
    """Label of each class index of its output; empty: the index itself."""


class FamilyDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a family is."""

    format: str = "edgesplit.family/1"
    variants: tuple[FamilyVariant, ...]
    samples: int
    samples_sha256: str
    """Digest of the samples and their labels."""
    answers: FamilyAnswers | None = None
    """What the variants answer to the samples; None in the row of the table of models, and in files of versions before
    0.3."""

    def accuracy(self, variant: FamilyVariant) -> float:
        """Share of the samples that a variant answers right."""
        return variant.right / self.samples


class VariantRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A variant of a family to be made: a model by its reference, and what the classes of its output mean."""

    model: str
    labels: tuple[int, ...] = ()


Sample = tuple["bytes | Tensors", int]
"""A frame or tensors, with the label of what it shows."""


class Families:
    """The families of one controller."""

    def __init__(self, database: Database, blobs: Blobs, registry: Registry, *, now: Callable[[], float]) -> None:
        self._database = database
        self._blobs = blobs
        self._registry = registry
        self._now = now

    def create(self, name: str, variants: Sequence[VariantRequest], samples: Sequence[Sample]) -> Model:
        """Heavy. Run every variant on the labelled samples and store the family as `name@version`; the version that
        exists where nothing differs.

        UsageError where variants do not take the same inputs, their outputs mean different things, or there are too few
        samples.
        """
        if not 2 <= len(variants) <= LIMITS.variants:
            raise UsageError(f"a family has 2 to {LIMITS.variants} variants, not {len(variants)}")
        if len(samples) < FEWEST_SAMPLES:
            raise UsageError(
                f"{len(samples)} labelled samples are too few to tell variants apart: give at least {FEWEST_SAMPLES}"
            )
        models = [self._registry.get(variant.model) for variant in variants]
        names = variant_names(models)
        loaded = [self._registry.load(model) for model in models]
        rules = [
            answer_rule(name, one, variant.labels)
            for name, one, variant in zip(names, loaded, variants, strict=True)
        ]  # fmt: skip
        _check_inputs(names, loaded)
        _check_labels(names, loaded, rules)
        made, given, truth = [], dict[str, VariantAnswers](), tuple(label for _, label in samples)
        for variant, model, one, rule in zip(names, models, loaded, rules, strict=True):
            report_step(f"running {model.ref} on {len(samples)} samples")
            outputs = run_whole(one.prepared, [model_inputs(one, sample) for sample, _ in samples])
            given[variant] = answers_of(rule, outputs)
            right = count_right(given[variant].labels, truth)
            made.append(FamilyVariant(
                name=variant, model=model.ref, right=right,
                least_accuracy=lower_share(right, len(samples), UNSURE), labels=rule.labels,
            ))  # fmt: skip
        document = FamilyDocument(
            variants=tuple(made), samples=len(samples), samples_sha256=_digest_of(samples),
            answers=FamilyAnswers(answer=rules[0].to_text(), truth=truth, variants=given),
        )  # fmt: skip
        return self._store(model_name(name), document, models, loaded[0])

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

    def _store(self, name: str, document: FamilyDocument, models: Sequence[Model], first: LoadedModel) -> Model:
        raw = msgspec.json.encode(document)
        digest = self._blobs.put(raw)
        graph = first.graph

        def views(tensors: Sequence[str]) -> list[dict[str, Any]]:
            specs = [graph.tensors[tensor] for tensor in tensors]
            return [
                {"name": n, "datatype": s.datatype, "shape": list(s.shape)} for n, s in zip(tensors, specs, strict=True)
            ]

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
                    "inputs": views(graph.inputs), "outputs": views(graph.outputs), "layers": [], "input_spec": None,
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
    return {"family": model.ref, "samples": document.samples, "created_at": model.created, "variants": variants}


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


def answer_rule(variant: str, loaded: LoadedModel, labels: Sequence[int]) -> AnswerRule:
    """What the variant's answers are: classes, with these labels. UsageError where its outputs are no classes."""
    outputs = [output_spec(loaded, name) for name in loaded.graph.outputs]
    rule = infer_answer_rule(outputs)
    if rule is None:
        raise UsageError(
            f"{variant}: its outputs ({', '.join(spec.name for spec in outputs)}) are not one classification, whose"
            " accuracy labels can tell: families of other models are not supported"
        )
    return msgspec.structs.replace(rule, labels=tuple(labels))


def output_spec(loaded: LoadedModel, name: str) -> TensorSpec:
    """Specification of one of the model's tensors."""
    tensor = loaded.graph.tensors[name]
    return TensorSpec(name, tensor.datatype, tensor.shape)


def classes_of(loaded: LoadedModel) -> int:
    """Number of classes of a classifier's output."""
    count = 1
    for length in loaded.graph.tensors[loaded.graph.outputs[0]].shape:
        count *= max(1, length)
    return count


def answers_of(rule: AnswerRule, outputs: Sequence[Tensors]) -> VariantAnswers:
    """Labels and scores of a variant's outputs, in their order."""
    scores: dict[str, tuple[float | None, ...]] = {
        kind: tuple(value if math.isfinite(value) else None for value in (score(kind, rule, out) for out in outputs))
        for kind in CLASS_SCORES
    }
    return VariantAnswers(labels=tuple(predicted_label(rule, out) for out in outputs), scores=scores)


def _check_inputs(names: Sequence[str], loaded: Sequence[LoadedModel]) -> None:
    """UsageError where two variants take different inputs: a request must be one for all of them."""
    first = [output_spec(loaded[0], name) for name in loaded[0].graph.inputs]
    for name, one in zip(names, loaded, strict=True):
        if [output_spec(one, tensor) for tensor in one.graph.inputs] != first:
            raise UsageError(
                f"{names[0]} and {name} take different inputs: push both with an input spec, so that both take frames"
            )


def _check_labels(names: Sequence[str], loaded: Sequence[LoadedModel], rules: Sequence[AnswerRule]) -> None:
    """UsageError where the classes of two variants may mean different things; it names both."""
    count = classes_of(loaded[0])
    for name, one, rule in zip(names, loaded, rules, strict=True):
        classes = classes_of(one)
        if rule.labels and (len(rule.labels) != classes or max(rule.labels) >= count):
            raise UsageError(
                f"{name} has {classes} classes, and {len(rule.labels)} labels were given, each to be one of the"
                f" {count} of {names[0]}"
            )
        if not rule.labels and classes != count:
            raise UsageError(
                f"the outputs of {names[0]} and {name} mean different things: {count} and {classes} classes. Give"
                f" the label of each class of {name}, -1 for none"
            )


def _digest_of(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample, label in samples:
        parts: Mapping[str, Any] = {"frame": sample} if isinstance(sample, bytes) else sample
        for name in sorted(parts):
            data = parts[name] if isinstance(parts[name], bytes) else parts[name].tobytes()
            digest.update(hashlib.sha256(name.encode() + data).digest())
        digest.update(label.to_bytes(8, "big", signed=True))
    return digest.hexdigest()
