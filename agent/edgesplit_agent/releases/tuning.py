"""Chooses a release's engine options on this machine: by measurement, once, before it serves.

Threads compete with those of other sessions, spinning ones most, and fusing slices further pays for some models only:
neither can be predicted from core counts or tables. Each candidate therefore runs the golden input a few times, and a
candidate is chosen if it is faster by a margin and its outputs still pass. `best_setup` decides, given a function that
measures; the result is stored by release, engine version and machine.
"""

from __future__ import annotations

import logging
import os
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import msgspec

from edgesplit.atomic_files import write_durably
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.runtime.options import EngineOptions, Optimise
from edgesplit_agent.host.machine import installed_versions

log = logging.getLogger(__name__)
MARGIN = 0.05
"""Fraction by which a candidate must be faster: on a quiet machine two measurements of one setup differ by less."""
SPINNING_MARGIN = 0.10
"""Fraction by which a candidate with spinning threads must be faster: they take their cores from everything else on the
device."""
BUDGET_S = 5.0
"""Seconds after which no further candidate is measured."""
RUNS, LEAST_RUNS, RUNS_S = 9, 3, 0.4
"""Runs of each candidate: at most `RUNS`; at least `LEAST_RUNS`, and further ones only within `RUNS_S` seconds."""
MAX_STORED_RESULTS = 32
"""Number of releases whose results are stored."""
BUSY_LOAD_PER_CORE = 0.5
"""Load per core above which the measured times are not this release's alone; such a result is measured again on a quiet
machine."""
_ENGINES = ("onnxruntime", "ai-edge-litert", "tflite-runtime")


@dataclass(frozen=True, slots=True)
class TuningLimits:
    """Limits of the candidates."""

    cores: int
    """Cores of the machine."""
    threads: int = 0
    """Number of threads chosen by the operator; 0: the fastest number."""
    optimise: Optimise = "fast"
    """Whether slices may be fused further."""
    alone: bool = True
    """No other release serves here, with which spinning threads would compete."""


def best_setup(
    first: EngineOptions,
    limits: TuningLimits,
    measure: Callable[[EngineOptions], float | None],
    is_over: Callable[[], bool],
) -> tuple[EngineOptions, dict[str, float]]:
    """The setup to use, and the seconds of each one measured. `measure` returns seconds, or None for a setup that
    cannot be used.

    One option after the other is varied, and a candidate wins by a margin, so that noise below it changes nothing.
    Where `first` itself cannot be measured it stays.
    """
    times = {str(first): measure(first)}
    best, best_s = first, times[str(first)]
    for candidates in (_thread_candidates, _fused_candidates, _merged_candidates, _spinning_candidates):
        for candidate in candidates(best, limits):
            if best_s is None or is_over() or str(candidate) in times:
                continue
            seconds = times[str(candidate)] = measure(candidate)
            margin = SPINNING_MARGIN if candidate.spinning and not best.spinning else MARGIN
            if seconds is not None and seconds < best_s * (1 - margin):
                best, best_s = candidate, seconds
    return best, {name: seconds for name, seconds in times.items() if seconds is not None}


def _thread_candidates(best: EngineOptions, allowed: TuningLimits) -> Iterator[EngineOptions]:
    """Candidates by number of threads, ascending: of two that are equally fast the smaller number stays, and leaves
    cores to others."""
    counts = {1 << power for power in range(allowed.cores.bit_length()) if 1 << power <= allowed.cores}
    for count in () if allowed.threads else sorted(counts | {allowed.cores}):
        yield msgspec.structs.replace(best, threads=count)


def _fused_candidates(best: EngineOptions, allowed: TuningLimits) -> Iterator[EngineOptions]:
    if allowed.optimise == "fast":
        yield msgspec.structs.replace(best, optimise="fast")


def _merged_candidates(best: EngineOptions, allowed: TuningLimits) -> Iterator[EngineOptions]:
    if allowed.optimise == "fast":
        yield msgspec.structs.replace(best, optimise="fast", merge=True)


def _spinning_candidates(best: EngineOptions, allowed: TuningLimits) -> Iterator[EngineOptions]:
    if allowed.alone and best.threads > 1:
        yield msgspec.structs.replace(best, spinning=True)


def median_run_s(run: Callable[[], object], clock: Callable[[], float] = perf_counter) -> float:
    """Median seconds of a few runs; the first run, which fills caches, is not counted."""
    run()
    times: list[float] = []
    began = clock()
    while len(times) < LEAST_RUNS or (len(times) < RUNS and clock() - began < RUNS_S):
        start = clock()
        run()
        times.append(clock() - start)
    return statistics.median(times)


class TuningResult(msgspec.Struct, frozen=True):
    """Tuning result of one release."""

    where: str
    """Engines and machine on which it was measured."""
    setup: EngineOptions
    seconds: dict[str, float]
    """Measured seconds by setup."""
    load: float = 0.0
    """Load per core of the machine during the measurement."""
    slice_s: dict[str, float] = {}
    """Measured seconds of each slice with that setup."""


class TuningResults:
    """Tuning results in a file. A damaged file, or results of another machine, count as missing."""

    def __init__(self, file: Path, environment: str | None = None) -> None:
        self._file = file
        self._environment = environment if environment is not None else environment_key()

    def setup_of(self, release: str, allowed: TuningLimits) -> EngineOptions | None:
        """The best setup measured for that release with these engines on this machine; None where there is none, or the
        operator's limits now exclude it."""
        result = self._read().get(release)
        if result is None or result.where != self._environment:
            return None
        forbidden = allowed.optimise == "exact" and result.setup.optimise != "exact"
        return None if forbidden or allowed.threads not in (0, result.setup.threads) else result.setup

    def is_due(self, release: str, allowed: TuningLimits, load: float) -> bool:
        """Whether to measure: there is no result, or it was measured on a busy machine and the machine is quiet now."""
        if self.setup_of(release, allowed) is None:
            return True
        return self._read()[release].load > BUSY_LOAD_PER_CORE >= load

    def slice_s(self, release: str, allowed: TuningLimits) -> dict[str, float]:
        """Seconds of each slice with the best setup; empty where there is none, or the machine was busy."""
        if self.setup_of(release, allowed) is None:
            return {}
        result = self._read()[release]
        return result.slice_s if result.load <= BUSY_LOAD_PER_CORE else {}

    def store(
        self,
        release: str,
        setup: EngineOptions,
        seconds: dict[str, float],
        load: float = 0.0,
        slice_s: dict[str, float] | None = None,
    ) -> None:
        """Store a result. A disk error is logged: it only costs measuring again."""
        others = {name: result for name, result in self._read().items() if name != release}
        result = TuningResult(self._environment, setup, seconds, load, slice_s or {})
        results = dict([*others.items(), (release, result)][-MAX_STORED_RESULTS:])
        try:
            write_durably(self._file, msgspec.json.encode(results))
        except OSError as error:
            log.warning("cannot store the tuning result of release %s: %s", release[:12], error.strerror)

    def _read(self) -> dict[str, TuningResult]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, TuningResult])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}


def load_per_core() -> float:
    """Load average per core over the last minute; 0 where the system does not report it."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def environment_key() -> str:
    """Key under which measurements are valid: engine versions, processor and number of cores."""
    engines = [f"{name} {version}" for name, version in installed_versions(_ENGINES).items()]
    return f"{', '.join(engines)} on {platform.machine()}, {_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model", "CPU part"))]
    return ", ".join(sorted(set(named))) or platform.processor()


warm_up_structs(__name__)
