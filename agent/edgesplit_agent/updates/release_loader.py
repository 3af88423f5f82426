"""Loads staged releases and tries them before they serve: golden inputs, drift from the serving release, and engine
options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Protocol

from edgesplit.crypto.slice_encryption import decrypting_chunk_source
from edgesplit.errors import EdgeError, LinkError
from edgesplit.runtime import Tensor
from edgesplit_agent.releases.chunk_store import ChunkStore
from edgesplit_agent.releases.golden_result import GoldenResult, golden_result
from edgesplit_agent.releases.loaded_release import (
    LoadedRelease,
    check_golden,
    golden_inputs,
    golden_ranges,
    load_release,
)
from edgesplit_agent.releases.output_drift import Drift, drift_of, worst_drift
from edgesplit_agent.releases.synthetic_inputs import make_synthetic_inputs, unchanged_answers_check
from edgesplit_agent.releases.tuner import Tuner
from edgesplit_agent.updates.assignment import Assignment
from edgesplit_agent.updates.trusted_manifests import TrustedManifests
from edgesplit_agent.worker.host import StartHost

log = logging.getLogger(__name__)

LONGEST_COMPARISON_S = 30.0
"""Timeout of running the golden inputs on the previous release to measure the drift."""
FEW_GOLDENS = 2
"""Golden inputs on which drift and engine options are measured: where gates judge answers there are a hundred."""


class ServingEngine(Protocol):
    """The part of the engine that updates need."""

    @property
    def serving(self) -> Mapping[str, LoadedRelease]:
        """The serving release by model."""
        ...

    def serve(self, model: str, release: LoadedRelease) -> None:
        """Answer requests for `model` by this release from now on."""

    def drop(self, model: str) -> None:
        """Stop answering requests for `model`."""


@dataclass(frozen=True, slots=True)
class TriedRelease:
    """A loaded release, and what trying it showed."""

    release: LoadedRelease
    drift: Drift | None
    """From the serving release, by golden answers."""
    golden: GoldenResult | None
    """None: it has no golden input that can run on this device alone."""


@dataclass(frozen=True)
class ReleaseLoader:
    """Decrypts and loads releases for this class of device."""

    store: ChunkStore
    manifests: TrustedManifests
    assignment: Assignment
    engine: ServingEngine
    start_host: StartHost
    tuner: Tuner | None = None

    def load(self, release: str) -> LoadedRelease:
        """Load the release, with the content keys of the slices that run here where it is encrypted."""
        opened = self.manifests.open(release)
        decrypted = replace(opened, keys=self.assignment.own_keys(release, opened.manifest))
        active = load_release(decrypted, self.assignment.device_class, self.start_host, self.assignment.floor)
        if self.tuner is not None:
            self.tuner.price(active)
        return active

    def load_and_try(self, release: str) -> TriedRelease:
        """Load the release, run its golden inputs and measure its engine options. InferenceFailed where a golden answer
        differs."""
        active = self.load(release)
        try:
            answers = self.run_golden(active)
            drift = self._drift(active, answers)
            self._tune(active)
        except Exception:
            active.retire()
            raise
        return TriedRelease(active, drift, self._golden_result(active, answers))

    def load_untried(self, release: str) -> TriedRelease:
        """Load a release that passed its golden inputs in an earlier run of the agent."""
        active = self.load(release)
        return TriedRelease(active, None, GoldenResult() if active.has_runnable_golden else None)

    @staticmethod
    def _golden_result(active: LoadedRelease, answers: Sequence[Mapping[str, Tensor]]) -> GoldenResult | None:
        """What the golden answers showed; None where the release has none that can run on this device alone."""
        if not active.has_runnable_golden:
            return None
        return golden_result(active.manifest.golden, answers, active.manifest.outputs)

    def run_golden(self, active: LoadedRelease, most: int | None = None) -> list[dict[str, Tensor]]:
        """The outputs for each golden input, or for the first `most`; InferenceFailed where one differs from the whole
        model's."""
        chunk, answers = self._golden_chunk(active), list[dict[str, Tensor]]()
        goldens = [(golden, active.manifest.variant_of_golden(n)) for n, golden in enumerate(active.manifest.golden)]
        for variant in dict.fromkeys(variant for _, variant in goldens):
            own = [golden for golden, of_variant in goldens if of_variant == variant]
            ranges = golden_ranges(own, chunk) if active.plan.local is not None else {}
            answers += [check_golden(active, golden, chunk, ranges, variant) for golden in own[:most]]
        return answers

    def _golden_chunk(self, active: LoadedRelease) -> Callable[[str], bytes]:
        keys = self.assignment.own_keys(active.digest, active.manifest)
        return decrypting_chunk_source(active.manifest, keys, self._chunk)

    def _chunk(self, sha256: str) -> bytes:
        """A loose chunk by its digest; LinkError where it is missing."""
        data = self.store.get(sha256)
        if data is None:
            raise LinkError(f"chunk {sha256[:12]} is missing on disk")
        return data

    def _drift(self, active: LoadedRelease, answers: Sequence[Mapping[str, Tensor]]) -> Drift | None:
        """How far the release's golden answers differ from those of the serving release. None where that cannot be
        measured: it is information for people and rollout gates, and never delays an update."""
        serving = self.engine.serving.get(active.model)
        if serving is None or serving.plan.local is None or serving.inputs != active.inputs:
            return None
        if serving.manifest.family or active.manifest.family:  # which variant answers is no drift
            return None
        serving.lease()  # so that its worker is not ended during the comparison
        try:
            chunk = self._golden_chunk(active)
            order, until = serving.order(serving.plan.local.device), perf_counter() + LONGEST_COMPARISON_S
            drifts = []
            for golden, after in zip(active.manifest.golden[:FEW_GOLDENS], answers, strict=False):
                outputs = serving.run(order, golden_inputs(golden, chunk), until=until)
                drifts.append(drift_of({output.name: outputs[output.name] for output in serving.outputs}, after))
            return worst_drift(drift for drift in drifts if drift is not None)
        except EdgeError as error:
            log.info("%s: the drift from release %s cannot be measured: %s", active.model, serving.digest[:12], error)
            return None
        finally:
            serving.end_lease()

    def _tune(self, active: LoadedRelease) -> None:
        """Measure the engine options of a loaded release, on its first golden input or on a synthetic one."""
        golden = active.manifest.golden
        if self.tuner is None or active.plan.local is None:
            return
        inputs = golden_inputs(golden[0], self._golden_chunk(active)) if golden else make_synthetic_inputs(active)
        if inputs is None:
            return
        check = partial(self.run_golden, active, FEW_GOLDENS) if golden else unchanged_answers_check(active, inputs)
        self.tuner.tune(active, inputs, check, alone=not set(self.engine.serving) - {active.model})
        self.tuner.price(active)
        self.stop_spinning(active.model)

    def stop_spinning(self, newcomer: str = "") -> None:
        """Stop the spinning of idle threads where several releases serve: spinning threads of one slow down the other.
        `newcomer`: a model that is about to serve."""
        serving = self.engine.serving
        if self.tuner is not None and len({*serving, newcomer} - {""}) > 1:
            for release in serving.values():
                self.tuner.stop_spinning(release)
