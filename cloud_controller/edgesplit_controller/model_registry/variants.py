"""Versions that stand in for another: compressed here, or made elsewhere and pushed. Both pass the same gate
(`edgesplit_partitioner.compression`) before anything is stored, and the version keeps its lineage."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgesplit.answers.answer_rule import AnswerRule, infer_answer_rule, parse_answer_rule
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.release.lineage import Lineage, VariantEvidence
from edgesplit.release.manifest import TensorSpec
from edgesplit_controller.job_progress import report_step
from edgesplit_controller.model_registry.registry import LoadedModel, Registry, load_model
from edgesplit_controller.model_registry.sample_sets import SampleSet, SampleSets
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.blobs import map_file
from edgesplit_controller.storage.tables.core import Model
from edgesplit_partitioner.compression.compress import compress
from edgesplit_partitioner.compression.confirm import confirm
from edgesplit_partitioner.compression.gate import GateTerms, Verdict
from edgesplit_partitioner.compression.recipe import Method, Recipe
from edgesplit_partitioner.compression.search import LayerHarm

LIMIT_S = 3_000.0
"""Time limit of one compression."""
NAMED_LAYERS = 8
"""Layers that the error of a missed gate names, the most harmful first."""


@dataclass(frozen=True, slots=True)
class GateRequest:
    """What a version must keep, and on which samples that is seen."""

    terms: GateTerms
    samples: str
    """Digest of a sample set of the base."""
    answer: str = ""
    """What an answer is, in the command line's notation; empty: as the outputs say."""


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """A version that passed the gate and was stored."""

    model: Model
    verdict: Verdict


class Variants:
    """Makes, judges and stores versions that stand in for another."""

    def __init__(self, blobs: Blobs, registry: Registry, sample_sets: SampleSets) -> None:
        self._blobs = blobs
        self._registry = registry
        self._sample_sets = sample_sets

    def compress(self, base: Model, method: Method, request: GateRequest) -> StoredVariant:
        """A compressed version of `base` under its name. InfeasibleLimits if no variant passes the gate: nothing is
        stored then."""
        loaded = self._registry.load(base)
        rule = answer_rule(base.ref, loaded, request.answer)
        chosen = self._sample_sets.get(base, request.samples)
        with tempfile.TemporaryDirectory(prefix="edgesplit-compress-") as name:
            folder = Path(name)
            result = compress(
                self._file_of(base, folder), method, self._sample_sets.samples(base, chosen), rule, request.terms,
                labels=labels_of(chosen), spec=loaded.spec, bindings=base.bindings, out_folder=folder,
                progress=report_step, limit_s=LIMIT_S,
            )  # fmt: skip
            if not result.verdict.passed or result.path is None:
                raise InfeasibleLimits(missed_text(result.verdict, result.harms))
            report_step("storing the version")
            part = self._blobs.incoming_file()
            shutil.copyfile(result.path, part)
        made_from = _lineage(base, chosen, request.terms, rule, result.evidence, result.recipe)
        variant = self._registry.push(part, base.name, base.input_text, lineage=made_from)
        self._sample_sets.inherit(base, variant, chosen)
        return StoredVariant(variant, result.verdict)

    def push(
        self, base: Model, part: Path, name: str, input_text: str, bindings: Mapping[str, int], request: GateRequest
    ) -> StoredVariant:
        """Store the model file at `part` (which is moved away), made elsewhere, as a version of `name` that stands in
        for `base`; without an input spec of its own it has the base's. UsageError if its answers mean something else;
        InfeasibleLimits if it misses the gate: nothing is stored then."""
        try:
            return self._judge_and_store(base, part, name, input_text, bindings, request)
        finally:
            part.unlink(missing_ok=True)

    def _judge_and_store(
        self, base: Model, part: Path, name: str, input_text: str, bindings: Mapping[str, int], request: GateRequest
    ) -> StoredVariant:
        ours = self._registry.load(base)
        text = input_text or base.input_text
        theirs = load_model(map_file(part), text, bindings)
        rule = answer_rule(base.ref, ours, request.answer)
        variant_rule = rule_of_variant(base.ref, ours, rule, theirs, request.answer)
        chosen = self._sample_sets.get(base, request.samples)
        with tempfile.TemporaryDirectory(prefix="edgesplit-variant-") as folder:
            verdict, evidence = confirm(
                self._file_of(base, Path(folder)), part, self._sample_sets.samples(base, chosen), rule, request.terms,
                variant_rule=variant_rule, labels=labels_of(chosen), spec=ours.spec, variant_spec=theirs.spec,
                bindings=base.bindings, variant_bindings=dict(bindings), progress=report_step,
            )  # fmt: skip
        if not verdict.passed:
            raise InfeasibleLimits(missed_text(verdict, ()))
        made_from = _lineage(base, chosen, request.terms, rule, evidence, None)
        variant = self._registry.push(part, name, text, bindings, lineage=made_from)
        self._sample_sets.inherit(base, variant, chosen)
        return StoredVariant(variant, verdict)

    def _file_of(self, model: Model, folder: Path) -> Path:
        """The model's file as it was pushed, copied into `folder`: the store may be far away."""
        path = folder / "base.model"
        with path.open("wb") as file:
            file.write(self._blobs.mapped(model.sha256))
        return path


def answer_rule(ref: str, loaded: LoadedModel, text: str) -> AnswerRule:
    """What an answer of this model is. UsageError if nothing is said and its outputs leave it open."""
    outputs = loaded.prepared.outputs
    rule = parse_answer_rule(text, outputs) if text else infer_answer_rule(outputs)
    if rule is None:
        raise UsageError(
            f"{ref} gives {described(outputs)}, which may mean anything: say what an answer is (--answer class:OUTPUT,"
            " boxes:LAYOUT or close:0.01)"
        )
    return rule


def rule_of_variant(base: str, ours: LoadedModel, rule: AnswerRule, theirs: LoadedModel, text: str) -> AnswerRule:
    """What an answer of the variant is. UsageError, which names the outputs of both, if it cannot mean the same as the
    base's."""
    try:
        variant = parse_answer_rule("class" if rule.kind == "class" else text, theirs.prepared.outputs)
    except UsageError:
        variant = None
    mine = [spec for spec in ours.prepared.outputs if spec.name in rule.outputs]
    other = [spec for spec in theirs.prepared.outputs if variant is not None and spec.name in variant.outputs]
    if variant is None or not _is_comparable(rule, mine, other):
        raise UsageError(
            f"the outputs mean different things: {base} gives {described(ours.prepared.outputs)}, the variant"
            f" {described(theirs.prepared.outputs)}; a variant answers with the same classes, boxes or values as its"
            " base"
        )
    return variant


def _is_comparable(rule: AnswerRule, ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> bool:
    """Whether answers from these outputs can mean the same."""
    if rule.kind == "class":
        return [_elements(spec) for spec in ours] == [_elements(spec) for spec in theirs]
    if rule.kind == "boxes":  # as many numbers to a box; how many boxes there are depends on the input's size
        return [spec.shape[-1:] for spec in ours] == [spec.shape[-1:] for spec in theirs]
    return list(ours) == list(theirs)


def described(outputs: Sequence[TensorSpec]) -> str:
    """Output tensors for people."""
    return ", ".join(f"{spec.name!r} ({spec.datatype} {list(spec.shape)})" for spec in outputs) or "nothing"


def labels_of(chosen: SampleSet) -> list[int | None]:
    """The labels of a set in which every sample has one; none where no sample has. UsageError between the two."""
    if chosen.labelled not in (0, len(chosen.content)):
        missing = len(chosen.content) - chosen.labelled
        raise UsageError(f"{missing} of {len(chosen.content)} samples have no label: label all of them, or none")
    return chosen.labels if chosen.labelled else []


def missed_text(verdict: Verdict, harms: Sequence[LayerHarm]) -> str:
    """Why nothing was stored, and which layers harm most."""
    text = f"{verdict.sentence}. Nothing was stored"
    if not harms:
        return text
    ranked = ", ".join(f"{harm.layer} ({harm.changed} of {harm.samples} changed)" for harm in harms[:NAMED_LAYERS])
    more = f" and {len(harms) - NAMED_LAYERS} more" if len(harms) > NAMED_LAYERS else ""
    return f"{text}. Layers by what each harms when it alone is compressed: {ranked}{more}"


def _elements(spec: TensorSpec) -> int:
    return math.prod(abs(length) for length in spec.shape)


def _lineage(
    base: Model, chosen: SampleSet, terms: GateTerms, rule: AnswerRule, evidence: VariantEvidence, recipe: Recipe | None
) -> Lineage:
    return Lineage(
        base=base.ref, base_sha256=base.sha256, answer=rule.to_text(), samples_sha256=chosen.sha256,
        evidence=evidence,
        allowed_accuracy_loss=terms.allowed_accuracy_loss, least_agreement=terms.least_agreement,
        recipe={} if recipe is None else msgspec.json.decode(msgspec.json.encode(recipe)),
    )  # fmt: skip
