"""How a release's engines are set up on this machine: found out by measurement, once, before it serves.

Threads fight with those of other sessions, spinning ones most; fusing further pays for some models and not for others:
cores and tables do not tell. So each candidate runs the golden input a few times, and one that is faster by a margin,
with outputs that still pass, is taken. `tuned` decides, over a function that measures; what it finds is remembered by
release, engine and machine.
"""

from __future__ import annotations

import importlib.metadata
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
from edgesplit.msgspec_warmup import settle
from edgesplit.runtime.options import Optimise, Setup

log = logging.getLogger(__name__)
MARGIN = 0.05
"""A candidate must be faster by this part: two measurements of one setup differ by less on a quiet machine."""
SPINNING_MARGIN = 0.10
"""Spinning threads take their cores from everything else on the device."""
BUDGET_S = 5.0
"""No candidate is begun later than this."""
RUNS, LEAST_RUNS, RUNS_S = 9, 3, 0.4
"""Of each candidate: so many, at least so many, and beyond these for so long."""
REMEMBERED = 32
BUSY = 0.5
"""Beyond so much load for each core, times are others' too: what was found then is found again on a quieter day."""
_ENGINES = ("onnxruntime", "ai-edge-litert", "tflite-runtime")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be tried."""

    cores: int
    threads: int = 0
    """The operator's choice; 0: as many as are fastest."""
    optimise: Optimise = "fast"
    alone: bool = True
    """No other release serves here, with which spinning threads would fight."""


def tuned(
    first: Setup, allowed: Allowed, measure: Callable[[Setup], float | None], is_over: Callable[[], bool]
) -> tuple[Setup, dict[str, float]]:
    """The setup to use, and what each that was tried took. `measure` gives seconds, None for one that cannot be used.

    One thing after the other is varied, and a candidate wins by a margin: noise within it changes nothing. Where
    `first` itself cannot be measured it stays.
    """
    times = {str(first): measure(first)}
    best, best_s = first, times[str(first)]
    for candidates in (_threads, _fast, _merged, _spinning):
        for candidate in candidates(best, allowed):
            if best_s is None or is_over() or str(candidate) in times:
                continue
            seconds = times[str(candidate)] = measure(candidate)
            margin = SPINNING_MARGIN if candidate.spinning and not best.spinning else MARGIN
            if seconds is not None and seconds < best_s * (1 - margin):
                best, best_s = candidate, seconds
    return best, {name: seconds for name, seconds in times.items() if seconds is not None}


def _threads(best: Setup, allowed: Allowed) -> Iterator[Setup]:
    """Fewest first: of two that are as fast the one that leaves more to others stays."""
    counts = {1 << power for power in range(allowed.cores.bit_length()) if 1 << power <= allowed.cores}
    for count in () if allowed.threads else sorted(counts | {allowed.cores}):
        yield msgspec.structs.replace(best, threads=count)


def _fast(best: Setup, allowed: Allowed) -> Iterator[Setup]:
    if allowed.optimise == "fast":
        yield msgspec.structs.replace(best, optimise="fast")


def _merged(best: Setup, allowed: Allowed) -> Iterator[Setup]:
    if allowed.optimise == "fast":
        yield msgspec.structs.replace(best, optimise="fast", merge=True)


def _spinning(best: Setup, allowed: Allowed) -> Iterator[Setup]:
    if allowed.alone and best.threads > 1:
        yield msgspec.structs.replace(best, spinning=True)


def time_of(run: Callable[[], object], clock: Callable[[], float] = perf_counter) -> float:
    """The median seconds of a few runs; the first, which fills caches, is not counted."""
    run()
    times: list[float] = []
    began = clock()
    while len(times) < LEAST_RUNS or (len(times) < RUNS and clock() - began < RUNS_S):
        start = clock()
        run()
        times.append(clock() - start)
    return statistics.median(times)


class Found(msgspec.Struct, frozen=True):
    """What was found out of one release."""

    where: str
    setup: Setup
    seconds: dict[str, float]
    """By setup, as measured."""
    load: float = 0.0
    """Of the machine when it was measured, for each core."""


class Memory:
    """What was found out, in a file. One that is spoilt or of another machine is as if it were not there."""

    def __init__(self, file: Path, where: str | None = None) -> None:
        self._file = file
        self._where = where if where is not None else here()

    def setup_of(self, release: str, allowed: Allowed) -> Setup | None:
        """How that release was found to run best here, with this engine, unless the operator forbids that now."""
        found = self._read().get(release)
        if found is None or found.where != self._where:
            return None
        forbidden = allowed.optimise == "exact" and found.setup.optimise != "exact"
        return None if forbidden or allowed.threads not in (0, found.setup.threads) else found.setup

    def is_due(self, release: str, allowed: Allowed, load: float) -> bool:
        """Whether to measure: nothing is known of it, or only what was found on a busy machine that is quiet now."""
        if self.setup_of(release, allowed) is None:
            return True
        return self._read()[release].load > BUSY >= load

    def keep(self, release: str, setup: Setup, seconds: dict[str, float], load: float = 0.0) -> None:
        """Remember it, also after a restart; a disk that is full costs no more than measuring again."""
        others = {name: found for name, found in self._read().items() if name != release}
        kept = dict([*others.items(), (release, Found(self._where, setup, seconds, load))][-REMEMBERED:])
        try:
            write_durably(self._file, msgspec.json.encode(kept))
        except OSError as error:
            log.warning("cannot remember how release %s runs best: %s", release[:12], error.strerror)

    def _read(self) -> dict[str, Found]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, Found])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}


def load_per_core() -> float:
    """Of this machine over the last minute; nothing where it does not tell."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def here() -> str:
    """What measurements hold for: engines by version, and this machine's processor."""
    engines = []
    for name in _ENGINES:
        try:
            engines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{', '.join(engines)} on {platform.machine()}, {_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model", "CPU part"))]
    return ", ".join(sorted(set(named))) or platform.processor()


settle(__name__)
