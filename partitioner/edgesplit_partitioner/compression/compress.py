"""Makes the compressed variant of a model and passes it through the gate.

One half of the samples chooses: ranges are measured on it, methods are compared on it, and layers that change most
answers on it stay in float (`trials`). The other half judges the one variant that was chosen, once, so that its bounds
hold.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.errors import InfeasibleLimits
from edgesplit.input_spec import InputSpec
from edgesplit.release.lineage import VariantEvidence
from edgesplit_partitioner.compression.evaluation import (
    Evaluator,
    StoredSamples,
    are_labelled,
    check_labels,
    store_samples,
)
from edgesplit_partitioner.compression.evaluation_child import EvaluationResult
from edgesplit_partitioner.compression.gate import GateTerms, Verdict, check_terms, judge, samples_needed
from edgesplit_partitioner.compression.maker import Maker
from edgesplit_partitioner.compression.maker_job import MakeResult
from edgesplit_partitioner.compression.recipe import Method, Recipe
from edgesplit_partitioner.compression.search import Candidate, LayerHarm, best_of
from edgesplit_partitioner.compression.trials import MadeVariants, Progress, Trials
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format import archive
from edgesplit_partitioner.profiling.codec_loss import split_halves
from edgesplit_partitioner.profiling.layers import Sample

CALIBRATION_SAMPLES: Final = 64
"""Most samples of the choosing half on which ranges are measured: more change them little."""
LIMIT_S: Final = 1800.0
"""Seconds after which no further layer is tried."""
TARGET_NAMES: Final[Mapping[str, str]] = {"onnx": "variant.onnx", "tflite": "variant.tflite"}


class CompressionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The variant that the choosing half selected and the confirming half judged."""

    verdict: Verdict
    evidence: VariantEvidence
    """On the confirming half, which chose nothing."""
    chosen_on: VariantEvidence
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
    check_labels(samples, labels)
    _check_count(len(samples), terms, labelled=are_labelled(labels, rule))
    with Compressor(
        model_path, samples, rule, labels=labels, spec=spec, bindings=bindings, progress=progress
    ) as compressor:
        return compressor.compress(method, terms, out_folder=out_folder, limit_s=limit_s)


class Compressor:
    """Makes variants of one model, on the same samples, for any number of terms: what was measured for one is kept for
    the others. Its child processes are killed on exit."""

    def __init__(
        self,
        model_path: Path,
        samples: Sequence[Sample],
        rule: AnswerRule,
        *,
        labels: Sequence[int | None] = (),
        spec: InputSpec | None = None,
        bindings: Mapping[str, int] | None = None,
        progress: Progress | None = None,
    ) -> None:
        check_labels(samples, labels)
        self._rule, self._progress = rule, progress or (lambda _: None)
        self._labelled = are_labelled(labels, rule)
        self._count = len(samples)
        self._choosing, self._confirming = split_halves(len(samples))
        raw = archive.read_model_bytes(model_path)
        self._base, self._base_bytes = prepare_model(raw, bindings), len(raw)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgesplit-compress-")))
            self._stored = store_samples(folder / "samples", samples, spec, labels if self._labelled else ())
            self._calibration = self._choosing[:: -(-len(self._choosing) // CALIBRATION_SAMPLES)]
            files = [self._stored.files[number] for number in self._calibration]
            maker = stack.enter_context(Maker(folder, raw, self._base, bindings or {}, files))
            self._evaluator = stack.enter_context(Evaluator(folder, self._base, rule, self._stored))
            self._variants = MadeVariants(maker, self._evaluator, self._choosing, self._progress)
            self._confirmed: dict[Path, EvaluationResult] = {}
            self._children = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._children.close()

    def compress(
        self, method: Method, terms: GateTerms, *, out_folder: Path, limit_s: float = LIMIT_S
    ) -> CompressionResult:
        """The variant by this method for these terms; raises as the function `compress` does."""
        check_terms(terms)
        _check_count(self._count, terms, labelled=self._labelled)
        trials = Trials(self._variants, self._labelled, terms, limit_s)
        chosen = best_of(trials.candidates(method))
        confirmed = self._confirm(chosen)
        evidence = self._evaluator.evidence(self._confirming, confirmed.outcomes, terms.delta)
        verdict = judge(terms, evidence)
        path = None
        if verdict.passed:
            path = out_folder / TARGET_NAMES[self._base.format]
            shutil.copyfile(chosen.file, path)
        return CompressionResult(
            verdict=verdict,
            evidence=evidence,
            chosen_on=chosen.evidence,
            recipe=_recipe(chosen, self._base, self._stored, self._calibration),
            path=path,
            base_bytes=self._base_bytes,
            variant_bytes=chosen.size,
            base_run_s=self._evaluator.base_run_s,
            variant_run_s=confirmed.run_s,
            harms=tuple(trials.harms),
        )

    def _confirm(self, chosen: Candidate) -> EvaluationResult:
        """What the chosen variant answers to the samples that chose nothing."""
        if chosen.file not in self._confirmed:
            self._progress(f"{chosen.job.method}: confirming on {len(self._confirming)} other samples")
            variant = prepare_model(chosen.file.read_bytes())
            self._confirmed[chosen.file] = self._evaluator.outcomes(variant, self._confirming, self._rule, self._stored)
        return self._confirmed[chosen.file]


def _check_count(samples: int, terms: GateTerms, *, labelled: bool) -> None:
    """InfeasibleLimits, with the number that it takes, where so few samples cannot show these terms."""
    _, confirming = split_halves(samples)
    needed = samples_needed(terms, labelled=labelled)
    if len(confirming) < needed:
        raise InfeasibleLimits(
            f"{samples} samples are too few: one half chooses, the other confirms, and that takes {needed} for"
            f" these terms; give {2 * needed} or more"
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
