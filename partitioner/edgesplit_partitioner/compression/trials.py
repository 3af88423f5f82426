"""Variants that are made and tried on the choosing half of the samples: each method, each way to find ranges, and int8
with the layers that hurt most in float."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import msgspec

from edgesplit.errors import ModelRefused
from edgesplit_partitioner.compression.evaluation import Evaluator, mean_error
from edgesplit_partitioner.compression.evaluation_child import Outcome
from edgesplit_partitioner.compression.gate import GateTerms, judge, samples_needed
from edgesplit_partitioner.compression.maker import Maker
from edgesplit_partitioner.compression.maker_job import MakeJob
from edgesplit_partitioner.compression.recipe import AppliedMethod, Calibration, Method
from edgesplit_partitioner.compression.search import Candidate, LayerHarm, fewest_float_layers

Progress = Callable[[str], None]
"""Called with what is being done now, as in `int8: layer 3 of 26 quantised alone`."""
RANKING_SAMPLES: Final = 24
"""Most samples of the choosing half on which a single layer is tried."""
CHOOSING_DELTA: Final = 0.25
"""Part of delta by which the choosing half is judged, where it has the samples for it: a variant that passes here by a
margin is likely to be confirmed."""


@dataclass
class Trials:
    """Variants that are made and tried on the choosing half."""

    maker: Maker
    evaluator: Evaluator
    labelled: bool
    """Whether accuracy is judged beside agreement."""
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
        evidence = self.evaluator.evidence(self.choosing, outcomes, self.terms.delta)
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
        needed = samples_needed(stricter, labelled=self.labelled)
        terms = stricter if len(outcomes) >= needed else self.terms
        evidence = self.evaluator.evidence(self.choosing, outcomes, terms.delta)
        return judge(terms, evidence).passed

    def _is_over(self) -> bool:
        return monotonic() - self._began > self.limit_s
