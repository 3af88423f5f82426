"""Judges a variant that was made elsewhere (pruned, distilled, by another quantiser) against its base."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.input_spec import InputSpec
from edgesplit.release.lineage import VariantEvidence
from edgesplit_partitioner.compression.evaluation import Evaluator, are_labelled, check_labels, store_samples
from edgesplit_partitioner.compression.gate import GateTerms, Verdict, check_terms, judge, samples_needed
from edgesplit_partitioner.compression.trials import Progress
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format import archive
from edgesplit_partitioner.profiling.layers import Sample


def confirm(
    base_path: Path,
    variant_path: Path,
    samples: Sequence[Sample],
    rule: AnswerRule,
    terms: GateTerms,
    *,
    variant_rule: AnswerRule | None = None,
    labels: Sequence[int | None] = (),
    spec: InputSpec | None = None,
    variant_samples: Sequence[Sample] = (),
    variant_spec: InputSpec | None = None,
    bindings: Mapping[str, int] | None = None,
    variant_bindings: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> tuple[Verdict, VariantEvidence]:
    """Judge a variant made elsewhere on all samples, none of which may have been used to make or choose it.

    A variant may have an input spec of its own, by which it decodes the same frames; inputs of its own
    (`variant_samples`, one for each sample, where they are tensors); and an answer rule of its own.
    """
    check_terms(terms)
    check_labels(samples, labels)
    if variant_samples and len(variant_samples) != len(samples):
        raise UsageError(f"{len(variant_samples)} samples for the variant, {len(samples)} for its base: give pairs")
    labelled = are_labelled(labels, rule)
    needed = samples_needed(terms, labelled=labelled)
    if len(samples) < needed:
        raise InfeasibleLimits(f"{len(samples)} samples are too few for these terms: it takes {needed}")
    report = progress or (lambda _: None)
    base = prepare_model(archive.read_model_bytes(base_path), bindings)
    variant = prepare_model(archive.read_model_bytes(variant_path), variant_bindings)
    numbers = range(len(samples))
    with tempfile.TemporaryDirectory(prefix="edgesplit-confirm-") as name:
        folder = Path(name)
        stored = store_samples(folder / "samples", samples, spec, labels if labelled else ())
        own = stored
        if variant_spec is not None or variant_samples:
            own = store_samples(folder / "variant-samples", variant_samples or samples, variant_spec, stored.labels)
        with Evaluator(folder, base, rule, stored) as evaluator:
            report(f"comparing base and variant on {len(samples)} samples")
            found = evaluator.outcomes(variant, numbers, variant_rule or _renamed(rule, base, variant), own)
            evidence = evaluator.evidence(numbers, found.outcomes, terms.delta)
    return judge(terms, evidence), evidence


def _renamed(rule: AnswerRule, base: PreparedModel, variant: PreparedModel) -> AnswerRule:
    """The rule for a variant whose outputs have other names, in the base's order."""
    names = {ours.name: theirs.name for ours, theirs in zip(base.outputs, variant.outputs, strict=False)}
    own = {output.name for output in variant.outputs}
    return msgspec.structs.replace(
        rule, outputs=tuple(name if name in own else names.get(name, name) for name in rule.outputs)
    )
