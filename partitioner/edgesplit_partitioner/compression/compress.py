"""Makes the compressed variant of a model and passes it through the gate (`compress`), or passes one made elsewhere
through it (`confirm`).

One half of the samples chooses: ranges are measured on it, methods are compared on it, and layers that change most
answers on it stay in float. The other half judges the one variant that was chosen, once, so that its bounds hold.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.errors import InfeasibleLimits, ModelRefused, UsageError
from edgesplit.input_spec import InputSpec
from edgesplit_partitioner.compression.evaluation import Evaluator, StoredSamples, mean_error, store_samples
from edgesplit_partitioner.compression.evaluation_child import Outcome
from edgesplit_partitioner.compression.gate import (
    Evidence,
    GateTerms,
    Verdict,
    check_terms,
    judge,
    samples_needed,
    weigh,
)
from edgesplit_partitioner.compression.maker import Maker
from edgesplit_partitioner.compression.maker_job import MakeJob, MakeResult
from edgesplit_partitioner.compression.recipe import AppliedMethod, Calibration, Method, Recipe
from edgesplit_partitioner.compression.search import Candidate, LayerHarm, best_of, fewest_float_layers
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format import archive
from edgesplit_partitioner.profiling.codec_loss import split_halves
from edgesplit_partitioner.profiling.layers import Sample

Progress = Callable[[str], None]
"""Called with what is being done now, as in `int8: layer 3 of 26 quantised alone`."""
CALIBRATION_SAMPLES: Final = 64
"""Most samples of the choosing half on which ranges are measured: more change them little."""
RANKING_SAMPLES: Final = 24
"""Most samples of the choosing half on which a single layer is tried."""
CHOOSING_DELTA: Final = 0.25
"""Part of delta by which the choosing half is judged, where it has the samples for it: a variant that passes here by a
margin is likely to be confirmed."""
LIMIT_S: Final = 1800.0
"""Seconds after which no further layer is tried."""
TARGET_NAMES: Final[Mapping[str, str]] = {"onnx": "variant.onnx", "tflite": "variant.tflite"}


class CompressionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The variant that the choosing half selected and the confirming half judged."""

    verdict: Verdict
    evidence: Evidence
    """On the confirming half, which chose nothing."""
    chosen_on: Evidence
    """On the choosing half."""
    recipe: Recipe
    path: Path | None
    """The variant's file in `out_folder`, where the gate was passed. Its lengths are settled: it needs no bindings."""
    base_bytes: int
    variant_bytes: int
    base_run_s: float
    """Median seconds of a run on one thread of this machine."""
    variant_run_s: float
    harms: tuple[LayerHarm, ...] = ()
    """Layers ranked by harm, the worst first, as far as they were tried."""


def compress(
    model_path: Path,
    method: Method,
    samples: Sequence[Sample],
    rule: AnswerRule,
    terms: GateTerms,
    *,
    out_folder: Path,
    labels: Sequence[int | None] = (),
    spec: InputSpec | None = None,
    bindings: Mapping[str, int] | None = None,
    progress: Progress | None = None,
    limit_s: float = LIMIT_S,
) -> CompressionResult:
    """The model's variant by this method. One half of the samples chooses the layers that stay in float (and the method
    under `auto`), the other half confirms, once.

    `samples` are encoded frames (then `spec` decodes them) or tensors by input name; `labels` the class of each where
    all are known. InfeasibleLimits where there are too few samples for any variant to pass; ModelRefused where the
    model cannot be compressed by the method; UsageError for terms that are not possible.
    """
    check_terms(terms)
    _check_labels(samples, labels)
    choosing, confirming = split_halves(len(samples))
    labelled = _are_labelled(labels, rule)
    needed = samples_needed(terms, labelled=labelled)
    if len(confirming) < needed:
        raise InfeasibleLimits(
            f"{len(samples)} samples are too few: one half chooses, the other confirms, and that takes {needed} for"
            f" these terms; give {2 * needed} or more"
        )
    raw = archive.read_model_bytes(model_path)
    base = prepare_model(raw, bindings)
    with tempfile.TemporaryDirectory(prefix="edgesplit-compress-") as name:
        folder = Path(name)
        stored = store_samples(folder / "samples", samples, spec, labels if labelled else ())
        calibration = choosing[:: -(-len(choosing) // CALIBRATION_SAMPLES)]
        with (
            Maker(folder, raw, base, bindings or {}, [stored.files[number] for number in calibration]) as maker,
            Evaluator(folder, base, rule, stored) as evaluator,
        ):
            trials = _Trials(maker, evaluator, stored, choosing, terms, progress or (lambda _: None), limit_s)
            chosen = best_of(trials.candidates(method))
            trials.progress(f"{chosen.job.method}: confirming on {len(confirming)} other samples")
            variant_raw = chosen.file.read_bytes()
            variant = prepare_model(variant_raw)
            confirmed = evaluator.outcomes(variant, confirming, rule, stored)
            evidence = _evidence(evaluator, stored, confirming, confirmed.outcomes, terms.delta)
            verdict = judge(terms, evidence)
            path = None
            if verdict.passed:
                path = out_folder / TARGET_NAMES[base.format]
                path.write_bytes(variant_raw)
            return CompressionResult(
                verdict=verdict,
                evidence=evidence,
                chosen_on=chosen.evidence,
                recipe=_recipe(chosen, base, stored, calibration),
                path=path,
                base_bytes=len(raw),
                variant_bytes=len(variant_raw),
                base_run_s=evaluator.base_run_s,
                variant_run_s=confirmed.run_s,
                harms=tuple(trials.harms),
            )


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
) -> tuple[Verdict, Evidence]:
    """Judge a variant made elsewhere on all samples, none of which may have been used to make or choose it.

    A variant may have an input spec of its own, by which it decodes the same frames; inputs of its own
    (`variant_samples`, one for each sample, where they are tensors); and an answer rule of its own.
    """
    check_terms(terms)
    _check_labels(samples, labels)
    if variant_samples and len(variant_samples) != len(samples):
        raise UsageError(f"{len(variant_samples)} samples for the variant, {len(samples)} for its base: give pairs")
    labelled = _are_labelled(labels, rule)
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
            evidence = _evidence(evaluator, stored, numbers, found.outcomes, terms.delta)
    return judge(terms, evidence), evidence


@dataclass
class _Trials:
    """Variants that are made and tried on the choosing half."""

    maker: Maker
    evaluator: Evaluator
    stored: StoredSamples
    choosing: Sequence[int]
    terms: GateTerms
    progress: Progress
    limit_s: float
    harms: list[LayerHarm] = field(default_factory=list)
    _made: int = 0
    _began: float = field(default_factory=monotonic)

    def candidates(self, method: Method) -> list[Candidate]:
        """The variants to choose from. ModelRefused where the method makes none; `auto` leaves such methods out."""
        if method == "int8":
            return self._int8()
        if method != "auto":
            return [self._try(method)]
        found: list[Candidate] = []
        refusals: list[str] = []
        for applied in ("int8", "int8-dynamic", "fp16"):
            try:
                found += self._int8() if applied == "int8" else [self._try(applied)]
            except ModelRefused as refusal:
                refusals.append(f"{applied}: {refusal}")
        if not found:
            raise ModelRefused("; ".join(refusals))
        return found

    def _int8(self) -> list[Candidate]:
        """All layers, by both ways to find ranges; then, where neither passes, with the worst layers in float."""
        found = [self._try("int8", "minmax"), self._try("int8", "percentile")]
        best = min(found, key=lambda candidate: candidate.rank)
        if best.passes:
            return [best]
        self.harms = self._rank(best)
        ranked = [harm.layer for harm in self.harms]
        return [
            best,
            *fewest_float_layers(
                ranked,
                len(best.made.layers),
                lambda layers: self._try("int8", best.job.calibration, layers),
                self._is_over,
            ),
        ]

    def _try(self, method: AppliedMethod, calibration: Calibration = "", float_layers: Sequence[str] = ()) -> Candidate:
        """Make a variant and evaluate it on the choosing half."""
        kept = f", {len(float_layers)} layers in float" if float_layers else ""
        self.progress(f"{' '.join(filter(None, (method, calibration)))}{kept}: {len(self.choosing)} samples")
        job = self._job(method, calibration, float_layers=tuple(float_layers))
        file, made = self.maker.make(job)
        outcomes = self.evaluator.outcomes_of_file(file, self.choosing).outcomes
        evidence = _evidence(self.evaluator, self.stored, self.choosing, outcomes, self.terms.delta)
        return Candidate(job, made, file, evidence, mean_error(outcomes), self._passes(outcomes))

    def _rank(self, whole: Candidate) -> list[LayerHarm]:
        """Each layer's harm where it alone is quantised, the worst first; layers that the time did not suffice for are
        left out."""
        numbers = self.choosing[:: -(-len(self.choosing) // RANKING_SAMPLES)]
        harms = []
        for position, layer in enumerate(whole.made.layers, 1):
            if self._is_over():
                break
            self.progress(f"int8: layer {position} of {len(whole.made.layers)} quantised alone")
            file, _ = self.maker.make(self._job("int8", whole.job.calibration, only=(layer,)))
            outcomes = self.evaluator.outcomes_of_file(file, numbers).outcomes
            file.unlink()
            changed = sum(outcome.differs for outcome in outcomes)
            harms.append(LayerHarm(layer=layer, changed=changed, samples=len(numbers), error=mean_error(outcomes)))
        return sorted(harms, key=lambda harm: (-harm.error, -harm.changed, harm.layer))

    def _job(
        self,
        method: AppliedMethod,
        calibration: Calibration,
        *,
        float_layers: tuple[str, ...] = (),
        only: tuple[str, ...] = (),
    ) -> MakeJob:
        self._made += 1
        return MakeJob(
            file=f"made-{self._made}.model",
            method=method,
            calibration=calibration,
            float_layers=float_layers,
            only=only,
        )

    def _passes(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether the choosing half keeps the terms, by a margin where it has the samples for one."""
        stricter = msgspec.structs.replace(self.terms, delta=self.terms.delta * CHOOSING_DELTA)
        needed = samples_needed(stricter, labelled=bool(self.stored.labels))
        terms = stricter if len(outcomes) >= needed else self.terms
        evidence = _evidence(self.evaluator, self.stored, self.choosing, outcomes, terms.delta)
        return judge(terms, evidence).passed

    def _is_over(self) -> bool:
        return monotonic() - self._began > self.limit_s


def _evidence(
    evaluator: Evaluator, stored: StoredSamples, numbers: Sequence[int], outcomes: Sequence[Outcome], delta: float
) -> Evidence:
    """The evidence in these samples' outcomes."""
    return weigh(
        [outcome.differs for outcome in outcomes],
        [bool(evaluator.base_right(number)) for number in numbers] if stored.labels else (),
        [bool(outcome.right) for outcome in outcomes] if stored.labels else (),
        delta=delta,
        samples_digest=stored.digest(numbers),
    )


def _recipe(chosen: Candidate, base: PreparedModel, stored: StoredSamples, calibration: Sequence[int]) -> Recipe:
    made: MakeResult = chosen.made
    has_ranges = chosen.job.method == "int8"
    return Recipe(
        method=chosen.job.method,
        format="onnx" if base.format == "onnx" else "tflite",
        per_channel=chosen.job.method != "fp16",
        calibration=chosen.job.calibration,
        calibration_samples=len(calibration) if has_ranges else 0,
        calibration_digest=stored.digest(calibration) if has_ranges else "",
        float_layers=chosen.job.float_layers,
        without_kernel=made.without_kernel,
        opset=made.opset,
        tools=made.tools,
    )


def _renamed(rule: AnswerRule, base: PreparedModel, variant: PreparedModel) -> AnswerRule:
    """The rule for a variant whose outputs have other names, in the base's order."""
    names = {ours.name: theirs.name for ours, theirs in zip(base.outputs, variant.outputs, strict=False)}
    own = {output.name for output in variant.outputs}
    return msgspec.structs.replace(
        rule, outputs=tuple(name if name in own else names.get(name, name) for name in rule.outputs)
    )


def _check_labels(samples: Sequence[Sample], labels: Sequence[int | None]) -> None:
    if labels and len(labels) != len(samples):
        raise UsageError(f"{len(labels)} labels for {len(samples)} samples")


def _are_labelled(labels: Sequence[int | None], rule: AnswerRule) -> bool:
    """Whether accuracy can be measured: every sample has a label, and the answer is a class."""
    return bool(labels) and None not in labels and rule.kind == "class"
