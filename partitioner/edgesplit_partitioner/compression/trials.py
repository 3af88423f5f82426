"""Variants that are made and tried on the choosing half of the samples: each method, each way to find ranges, and int8
with the layers that hurt most in float. What was made for one allowance is kept for the next (`MadeVariants`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from edgesplit.errors import ModelRefused
from edgesplit.release.lineage import VariantEvidence
from edgesplit_partitioner.compression.evaluation import Evaluator, mean_error
from edgesplit_partitioner.compression.evaluation_child import Outcome
from edgesplit_partitioner.compression.gate import GateTerms, judge, samples_needed
from edgesplit_partitioner.compression.maker import Maker
from edgesplit_partitioner.compression.maker_job import MakeJob, MakeResult
from edgesplit_partitioner.compression.recipe import AppliedMethod, Calibration, Method
from edgesplit_partitioner.compression.search import Candidate, LayerHarm, fewest_float_layers

Progress = Callable[[str], None]
"""Called with what is being done now, as in `int8: layer 3 of 26 quantised alone`."""
RANKING_SAMPLES: Final = 24
"""Most samples of the choosing half on which a single layer is tried."""
RANKING_SHARE: Final = 0.5
"""Share of the time limit after which no further layer is ranked, so that those that were can be tried in float."""
CHOOSING_DELTA: Final = 0.25
"""Part of delta by which the choosing half is judged, where it has the samples for it: a variant that passes here by a
margin is likely to be confirmed."""


@dataclass(frozen=True, slots=True)
class MadeVariant:
    """A variant's file, and its outcomes on the choosing half."""

    job: MakeJob
    made: MakeResult
    file: Path
    outcomes: Sequence[Outcome]


@dataclass
class MadeVariants:
    """The variants of one model, each made and evaluated on the choosing half once, whatever the terms."""

    maker: Maker
    evaluator: Evaluator
    choosing: Sequence[int]
    progress: Progress
    _variants: dict[tuple[AppliedMethod, Calibration, tuple[str, ...]], MadeVariant] = field(default_factory=dict)
    _refusals: dict[AppliedMethod, ModelRefused] = field(default_factory=dict)
    _harms: dict[tuple[Calibration, str], LayerHarm] = field(default_factory=dict)
    _made: int = 0

    def variant(
        self, method: AppliedMethod, calibration: Calibration = "", float_layers: tuple[str, ...] = ()
    ) -> MadeVariant:
        """A variant by this method; ModelRefused where the method does not apply to the model."""
        key = (method, calibration, float_layers)
        if method in self._refusals:
            raise self._refusals[method]
        if key not in self._variants:
            kept = f", {len(float_layers)} layers in float" if float_layers else ""
            self.progress(f"{' '.join(filter(None, (method, calibration)))}{kept}: {len(self.choosing)} samples")
            job = MakeJob(file=self._next_file(), method=method, calibration=calibration, float_layers=float_layers)
            try:
                file, made = self.maker.make(job)
            except ModelRefused as refusal:
                self._refusals[method] = refusal
                raise
            outcomes = self.evaluator.outcomes_of_file(file, self.choosing).outcomes
            self._variants[key] = MadeVariant(job, made, file, outcomes)
        return self._variants[key]

    def harm(self, layer: str, calibration: Calibration, position: int, total: int) -> LayerHarm:
        """What changes where this layer alone is quantised, the layer at `position` of `total`."""
        if (calibration, layer) not in self._harms:
            self.progress(f"int8: layer {position} of {total} quantised alone")
            numbers = self.choosing[:: -(-len(self.choosing) // RANKING_SAMPLES)]
            job = MakeJob(file=self._next_file(), method="int8", calibration=calibration, only=(layer,))
            file, _ = self.maker.make(job)
            outcomes = self.evaluator.outcomes_of_file(file, numbers).outcomes
            file.unlink()
            changed = sum(outcome.differs for outcome in outcomes)
            self._harms[calibration, layer] = LayerHarm(
                layer=layer, changed=changed, samples=len(numbers), error=mean_error(outcomes)
            )
        return self._harms[calibration, layer]

    def _next_file(self) -> str:
        self._made += 1
        return f"made-{self._made}.model"


@dataclass
class Trials:
    """The variants that are tried for certain terms, on the choosing half."""

    variants: MadeVariants
    labelled: bool
    """Whether accuracy is judged beside agreement."""
    terms: GateTerms
    limit_s: float
    harms: list[LayerHarm] = field(default_factory=list)
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
        """A variant as these terms judge it."""
        variant = self.variants.variant(method, calibration, tuple(float_layers))
        evidence = self._evidence(variant.outcomes, self.terms)
        passes = self._passes(variant.outcomes)
        return Candidate(variant.job, variant.made, variant.file, evidence, mean_error(variant.outcomes), passes)

    def _rank(self, whole: Candidate) -> list[LayerHarm]:
        """Each layer's harm where it alone is quantised, the worst first; layers that the time did not suffice for are
        left out."""
        harms: list[LayerHarm] = []
        layers = whole.made.layers
        for position, layer in enumerate(layers, 1):
            if self._is_over(RANKING_SHARE):
                break
            harms.append(self.variants.harm(layer, whole.job.calibration, position, len(layers)))
        return sorted(harms, key=lambda harm: (-harm.error, -harm.changed, harm.layer))

    def _passes(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether the choosing half keeps the terms, by a margin where it has the samples for one."""
        stricter = msgspec.structs.replace(self.terms, delta=self.terms.delta * CHOOSING_DELTA)
        needed = samples_needed(stricter, labelled=self.labelled)
        terms = stricter if len(outcomes) >= needed else self.terms
        return judge(terms, self._evidence(outcomes, terms)).passed

    def _evidence(self, outcomes: Sequence[Outcome], terms: GateTerms) -> VariantEvidence:
        return self.variants.evaluator.evidence(self.variants.choosing, outcomes, terms.delta)

    def _is_over(self, share: float = 1.0) -> bool:
        return monotonic() - self._began > share * self.limit_s
