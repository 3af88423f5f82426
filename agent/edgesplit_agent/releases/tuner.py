"""Tunes the engine options of a release that is loaded and has answered its golden inputs; `tuning` decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import msgspec

from edgesplit.errors import EdgeError
from edgesplit.runtime import Tensors, Timing
from edgesplit.runtime.options import EngineOptions
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.releases.tuning import (
    BUDGET_S,
    LEAST_RUNS,
    TuningLimits,
    TuningResults,
    best_setup,
    load_per_core,
    median_run_s,
)
from edgesplit_agent.worker.supervised_host import SupervisedHost

log = logging.getLogger(__name__)


def slice_seconds(active: LoadedRelease, order: Sequence[str], inputs: Tensors) -> dict[str, float]:
    """Median seconds of each slice in the worker, over a few runs; empty where they fail."""
    runs: dict[str, list[float]] = {}
    try:
        for _ in range(LEAST_RUNS):
            timing = Timing()
            active.run(order, inputs, timing)
            for name, seconds in timing.seconds.items():
                runs.setdefault(name, []).append(seconds)
    except EdgeError as error:
        log.warning("release %s: its slices cannot be timed: %s", active.digest[:12], error)
        return {}
    return {name: median(seconds) for name, seconds in runs.items()}


@dataclass(frozen=True)
class Tuner:
    """Tunes the releases of one device."""

    results: TuningResults
    allowed: TuningLimits
    budget_s: float = BUDGET_S
    load: Callable[[], float] = load_per_core
    """The machine's load per core, which is recorded with each measurement."""

    def setup_of(self, release: str, default: EngineOptions) -> EngineOptions:
        """The setup that was measured to be best for that release here, if it uses the accelerators of `default`;
        otherwise `default`."""
        tuned_setup = self.results.setup_of(release, self.allowed)
        return tuned_setup if tuned_setup is not None and tuned_setup.providers == default.providers else default

    def tune(self, active: LoadedRelease, inputs: Tensors, check: Callable[[], object], *, alone: bool = True) -> None:
        """Measure the candidate setups over `inputs` and use the fastest from now on.

        `check` raises an EdgeError where the answers are not right any more; `alone`: no other release serves here. A
        release that was tuned before is skipped, unless the machine was busy then and is quiet now; so is one that runs
        in no worker process.
        """
        host = active.host
        rows = sorted(active.plan.rows, key=lambda row: (row.is_local, len(row.device)))
        order = active.order(rows[-1].device)
        if not isinstance(host, SupervisedHost) or host.emulated or not order:
            return
        load = self.load()
        if not self.results.is_due(active.digest, self.allowed, load):
            return
        first, began = host.setup, perf_counter()

        def measure(setup: EngineOptions) -> float | None:
            try:
                if setup != host.setup:
                    host.reconfigure(setup)
                if setup.merge and not host.merged:
                    return None
                seconds = median_run_s(lambda: active.run(order, inputs))
                check()
                return seconds
            except EdgeError as error:
                log.warning("release %s does not run with %s: %s", active.digest[:12], setup, error)
                return None

        allowed = replace(self.allowed, alone=alone)
        best, times = best_setup(first, allowed, measure, lambda: perf_counter() - began > self.budget_s)
        try:
            host.reconfigure(best)
            check()
        except EdgeError as error:
            log.warning("release %s cannot use the measured setup %s: %s", active.digest[:12], best, error)
            best = first
            host.reconfigure(best)
            check()
        log.info("release %s runs with %s", active.digest[:12], best)
        self.results.store(active.digest, best, times, load, slice_seconds(active, order, inputs))

    def price(self, active: LoadedRelease) -> None:
        """Put the seconds that were measured with the release's setup into its plan, if there are any."""
        host = active.host
        if isinstance(host, SupervisedHost) and not host.emulated:
            active.price_by(self.results.slice_s(active.digest, self.allowed))

    @staticmethod
    def stop_spinning(active: LoadedRelease) -> None:
        """Switch off spinning threads, because another release serves here too."""
        host = active.host
        if isinstance(host, SupervisedHost) and host.setup.spinning:
            try:
                host.reconfigure(msgspec.structs.replace(host.setup, spinning=False))
            except EdgeError as error:
                log.warning("cannot switch off the spinning threads of release %s: %s", active.digest[:12], error)
