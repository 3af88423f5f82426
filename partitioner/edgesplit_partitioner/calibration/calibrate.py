"""Calibration: a device profile of this machine, from a few minutes of microbenchmarks.

`measure_points` times the operator grid and the small networks in a child process; `fit_points` is pure: times in, a
`CalibrationFit` out. `calibrate` does both and adds the other figures of a profile. Figures that cannot be measured
here (watts, storage) are copied from a shipped profile, and their source states that.
"""

from __future__ import annotations

import io
import math
import os
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from time import perf_counter
from typing import Any, Final

import msgspec
import numpy as np
import zstandard
from PIL import Image

from edgesplit.device_profile import CalibrationFit, DeviceProfile, Figure, Interval, OperatorFit, Rates
from edgesplit.errors import UsageError
from edgesplit.input_spec import parse_input_spec
from edgesplit.runtime.options import EngineOptions
from edgesplit_partitioner.calibration import operator_grid
from edgesplit_partitioner.calibration.child import BatchTimes, CalibrationJob
from edgesplit_partitioner.calibration.design import Design, Engine, design_of
from edgesplit_partitioner.costs.regression import (
    COVERAGE,
    FamilyPredictor,
    fit_family,
    fit_plane,
    predictors_by_family,
    residual_interval,
)
from edgesplit_partitioner.ir.graph import OperatorWork
from edgesplit_partitioner.onnx_format.operator_features import FEATURES
from edgesplit_partitioner.profiling.layers import Progress, synthetic_frame
from edgesplit_partitioner.profiling.machine_load import load_between, read_counters
from edgesplit_partitioner.sandbox.child_process import ChildFailed, run_child
from edgesplit_partitioner.sandbox.limits import measurement_limits

CHILD: Final = "edgesplit_partitioner.calibration.child"
"""Module of the child process."""
AS_CUT: Final = EngineOptions()
"""Slices as they were cut, on one thread."""
LEAST_LIMIT_S: Final = 900.0
"""Seconds that a measurement may take beyond four times its share: the networks and a quarter of the operators are
measured on any machine, however slow or busy."""
MOST_CORES: Final = 8
"""Most threads of the tuned measurement."""
MIN_NETWORKS: Final = 5
"""Networks that must have been measured for a fit."""
LEAST_SHARE: Final = 0.02
"""Least part of a grid point's time that is its operator's: what is less was lost in noise."""
CORRECTION_RANGE: Final = (0.5, 1.5)
"""Range of `NetworkFit.correction`, to which it is clipped: beyond it, the measurement is wrong rather than the sum
over operators."""
MIN_HALF_WIDTH: Final = 0.05
"""Minimum half-width of a whole network's interval: the same machine differs that much from one hour to the next."""
CACHE_SIZES: Final = tuple(float(mebibytes << 20) for mebibytes in (2, 4, 8, 16, 32))
"""Candidates, in bytes, of the weight size from which weights are fetched from memory in every run."""
ZSTD_HOST_BYTES_PER_S: Final = 440e6
"""Result of `zstd_bytes_per_s` on the machine of `generic-x86` (best of 9 runs, November 2026)."""
BYTES_COPIED: Final = 64 << 20
"""Size of the array whose copying measures the memory's rate."""
CLASS_OF_RATE: Final[Mapping[str, str]] = {
    "dense_conv_flops_per_s": "conv",
    "depthwise_flops_per_s": "depthwise",
    "gemm_flops_per_s": "gemm",
    "elementwise_per_s": "elementwise",
}
"""The class of operators from which each rate is computed."""


@dataclass(slots=True)
class CalibrationTimes:
    """All measured times, by index into the grid and into the networks; one value per visit."""

    points: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of each grid point."""
    around: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds within those of each grid point that are not its operator's."""
    networks: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of each network."""
    empty_s: list[float] = field(default_factory=list)
    """Seconds of a run that computes nothing."""
    tensor_s: list[float] = field(default_factory=list)
    """Seconds of each further input or output of a run."""

    def add(self, batch: BatchTimes) -> None:
        """Add the times of one visit to one batch."""
        times = self.networks if batch.whole else self.points
        for index, seconds in batch.seconds.items():
            times[index].append(seconds)
        for index, seconds in batch.around.items():
            self.around[index].append(seconds)
        self.empty_s.append(batch.empty_s)
        self.tensor_s.append(batch.tensor_s)

    def operator_s(self) -> dict[int, float]:
        """Seconds of the operator of each grid point. Of several visits the fastest counts, since disturbances only
        add time: of differences the least would be the one whose smaller term was disturbed."""
        return {
            index: max(min(seconds) - min(self.around.get(index, (0.0,))), LEAST_SHARE * min(seconds))
            for index, seconds in self.points.items()
        }


def calibrate(
    name: str, *, base: DeviceProfile, minutes: float, threads: int, today: str, progress: Progress | None = None
) -> DeviceProfile:
    """This machine's profile with the given name. Figures that cannot be measured here come from `base`; `today` is the
    date in the sources. UsageError where the measurement fails or gives too little."""
    jobs, before = measured_jobs(threads, os.cpu_count() or 1), read_counters()
    times: list[CalibrationTimes] = []
    for position, (engine, setup) in enumerate(jobs):
        share = progress and _share_of(progress, position, len(jobs))
        times.append(measure_points(minutes / len(jobs), setup, share, engine=engine))
        if setup.spinning:  # single operators are those of the same threads without spinning
            times[-1].points, times[-1].around = times[-2].points, times[-2].around
    load = load_between(before, read_counters(), [])
    exact, *tuned = [
        fit_points(
            measured, machine=machine_name(), runtime=runtime_name(engine), today=today, setup=setup, engine=engine
        )
        for measured, (engine, setup) in zip(times, jobs, strict=True)
    ]
    profile = to_profile(name, exact, times[0], base, threads, tuple(tuned))
    if not load.is_busy:
        return profile
    busy = f"{profile.description}, on a busy machine ({load}): calibrate again when it is quiet"
    return msgspec.structs.replace(profile, description=busy)


def measured_jobs(threads: int, cores: int) -> list[tuple[Engine, EngineOptions]]:
    """The engines and options to measure: onnxruntime with slices as they were cut; fused and merged, as agents run
    them where that is faster, on one thread and on all cores; and LiteRT on as many, where it is installed."""
    counts = sorted({1, min(cores, MOST_CORES)})
    jobs: list[tuple[Engine, EngineOptions]] = [("onnxruntime", EngineOptions(threads=threads))]
    fused = [EngineOptions(threads=count, optimise="fast", merge=True) for count in counts]
    fused += [msgspec.structs.replace(fused[-1], spinning=True)] if counts[-1] > 1 else []
    jobs.extend(("onnxruntime", setup) for setup in fused)
    if find_spec("ai_edge_litert") is not None:
        jobs.extend(("litert", EngineOptions(threads=count)) for count in counts)
    return jobs


def _share_of(progress: Progress, position: int, count: int) -> Progress:
    """Progress of the whole calibration from that of one of `count` measurements of about the same length."""
    return lambda done, total: progress(position * total + done, count * total)


def measure_points(
    minutes: float,
    setup: EngineOptions = AS_CUT,
    progress: Progress | None = None,
    *,
    engine: Engine = "onnxruntime",
) -> CalibrationTimes:
    """Times of the grid and the networks, measured in a child process for `minutes`; UsageError for invalid arguments
    and where the child process fails."""
    if not 0 < minutes <= 240:
        raise UsageError("calibrating takes between a fraction of a minute and four hours")
    if setup.threads > (os.cpu_count() or 1):
        raise UsageError(
            f"{setup.threads} threads on {os.cpu_count()} cores would compete:"
            " slices run with one thread per core at most"
        )
    job = CalibrationJob(seconds=60.0 * minutes, setup=setup, engine=engine)
    times = CalibrationTimes()
    lines = 0

    def on_line(line: bytes) -> None:
        nonlocal lines
        lines += 1
        batch_times = msgspec.json.decode(line, type=BatchTimes)
        times.add(batch_times)
        if progress is not None:
            progress(min(lines, job.visits * batch_times.batches), job.visits * batch_times.batches)

    try:
        limit_s = 4 * job.seconds + LEAST_LIMIT_S
        limits = measurement_limits(0, None, limit_s)
        run_child(CHILD, limits=limits, limit_s=limit_s, job=msgspec.json.encode(job), on_line=on_line)
    except ChildFailed as error:
        raise UsageError(f"calibrating failed: {error}") from error
    return times


def fit_points(
    times: CalibrationTimes,
    *,
    machine: str,
    runtime: str,
    today: str,
    setup: EngineOptions = AS_CUT,
    engine: Engine = "onnxruntime",
) -> CalibrationFit:
    """The fit of the measured times. Of several visits the fastest counts, since disturbances only add time."""
    design = design_of(engine)
    works = {index: design.point_work(index) for index in times.points}
    operators = tuple(_operator_fits(works, times.operator_s()))
    run_s, tensor_s = min(times.empty_s), statistics.median(times.tensor_s)
    networks = _network_times(times, operators, run_s, design, fused=setup.optimise == "fast")
    whole = fit_networks(networks)
    visit_spread = float(np.quantile([network.spread for network in networks], COVERAGE))
    low, high = residual_interval(whole.residuals)
    return CalibrationFit(
        runtime=runtime,
        machine=machine,
        taken=today,
        run_s=float(f"{run_s:.4g}"),
        tensor_s=float(f"{tensor_s:.4g}"),
        correction=round(whole.correction, 4),
        cached_bytes=whole.cached_bytes,
        uncached_s_per_byte=float(f"{whole.uncached_s_per_byte:.4g}"),
        whole=Interval(
            low=min(low, 1 / max(visit_spread, 1 + MIN_HALF_WIDTH)),
            high=max(high, visit_spread, 1 + MIN_HALF_WIDTH),
            coverage=COVERAGE,
            basis="measured",
            source=f"{len(networks)} small networks drawn at random, measured over predicted, {today}; no narrower "
            f"than two visits to one network are apart.",
        ),
        operators=operators,
        setup=setup,
    )


@dataclass(frozen=True, slots=True)
class NetworkTime:
    """Time of one whole network."""

    measured_s: float
    """Seconds of a run, without those of an empty run."""
    summed_s: float
    """Sum over its operators, by their fits."""
    weight_bytes: float
    """Bytes of its weights."""
    spread: float
    """Slowest over fastest visit."""


@dataclass(frozen=True, slots=True)
class NetworkFit:
    """Fit of whole networks: measured = correction x summed + uncached_s_per_byte x weight bytes, the second term only
    for networks with more than `cached_bytes` of weights."""

    correction: float
    cached_bytes: float
    uncached_s_per_byte: float
    residuals: tuple[float, ...]
    """Logarithms of measured over predicted seconds, per network."""


def fit_networks(networks: Sequence[NetworkTime]) -> NetworkFit:
    """The fit with the cache size, among a few candidates, that leaves the least sum of absolute residuals."""
    ordinary = [network for network in networks if network.weight_bytes <= CACHE_SIZES[0]] or networks
    # Medians, which a few disturbed networks do not move. The correction comes from networks whose weights fit into the
    # smallest cache size, the cost of uncached weights from the time that larger ones take beyond it.
    median_ratio = float(np.median([network.measured_s / network.summed_s for network in ordinary]))
    correction = float(np.clip(median_ratio, *CORRECTION_RANGE))
    fits = []
    for cached in CACHE_SIZES:
        uncached = [network for network in networks if network.weight_bytes > cached]
        extra_s_per_byte = [
            (network.measured_s - correction * network.summed_s) / network.weight_bytes for network in uncached
        ]
        s_per_byte = max(float(np.median(extra_s_per_byte)), 0.0) if extra_s_per_byte else 0.0
        residuals = tuple(
            math.log(
                network.measured_s
                / (correction * network.summed_s + s_per_byte * network.weight_bytes * (network.weight_bytes > cached))
            )
            for network in networks
        )
        fits.append(NetworkFit(correction, float(cached), s_per_byte, residuals))
    return min(fits, key=lambda fit: sum(map(abs, fit.residuals)))


def _operator_fits(works: Mapping[int, OperatorWork], seconds: Mapping[int, float]) -> Iterator[OperatorFit]:
    """The fit of each family with enough points, then of each class over all its families."""
    families: dict[str, list[int]] = defaultdict(list)
    classes: dict[str, list[int]] = defaultdict(list)
    for index, work in works.items():
        if work.family:
            families[work.family].append(index)
        if work.flops or work.bytes_moved:
            classes[work.operator].append(index)
    for family, indices in sorted(families.items()):
        if len(indices) >= len(works[indices[0]].sizes) + 2:
            yield fit_family(family, [works[index].sizes for index in indices], [seconds[index] for index in indices])
    for operator, indices in sorted(classes.items()):
        sizes = [(works[index].flops, works[index].bytes_moved) for index in indices]
        yield fit_plane(f"class:{operator}", sizes, [seconds[index] for index in indices])


def _network_times(
    times: CalibrationTimes, operators: Sequence[OperatorFit], run_s: float, design: Design, *, fused: bool
) -> list[NetworkTime]:
    """Times of the networks all of whose operator families were measured; UsageError with fewer than `MIN_NETWORKS`."""
    predictors = predictors_by_family(operators, FEATURES)
    networks = []
    for index, seconds in sorted(times.networks.items()):
        timed = [_operator_s(work, predictors) for work in design.network_works(index, fused=fused)]
        known = [operator_s for operator_s in timed if operator_s is not None]
        if len(known) < len(timed):
            continue
        networks.append(
            NetworkTime(
                measured_s=max(min(seconds) - run_s, 1e-7),
                summed_s=sum(known),
                weight_bytes=design.weight_bytes(index),
                spread=max(seconds) / min(seconds),
            )
        )
    if len(networks) < MIN_NETWORKS:
        raise UsageError("calibration: too little was measured in the time given: give it more minutes")
    return networks


def _operator_s(work: OperatorWork, predictors: Mapping[str, FamilyPredictor]) -> float | None:
    """Seconds of an operator by the fit of its family, or else of its class; None where neither was measured."""
    if not (work.flops or work.bytes_moved) and work.family not in predictors:
        return 0.0
    if work.family in predictors:
        return predictors[work.family].seconds(work.sizes)
    by_class = predictors.get(f"class:{work.operator}") if not work.family else None
    return None if by_class is None else by_class.seconds((work.flops, work.bytes_moved))


def to_profile(
    name: str,
    fit: CalibrationFit,
    times: CalibrationTimes,
    base: DeviceProfile,
    threads: int,
    tuned: tuple[CalibrationFit, ...] = (),
) -> DeviceProfile:
    """A device profile with the fit; its other figures are measured here or copied from `base`."""
    source = f"Measured on this machine, {fit.taken}: {fit.machine}, {fit.runtime}, {threads} thread(s)"
    return DeviceProfile(
        format=base.format,
        name=name,
        description=f"{fit.machine}, {fit.runtime}, {threads} thread(s), calibrated {fit.taken}",
        threads=threads,
        memory_bytes=_measured_figure(
            _memory_bytes(), f"{source}: physical memory, the system's share not subtracted."
        ),
        rates=_rates(source, times, base),
        operator_overhead_s=_measured_figure(_overhead_s(times), f"{source}: the cheapest operators of the grid."),
        runtime_factor=_measured_figure(1.0, f"{source}: with the runtime that runs the slices."),
        zstd_slowdown=_measured_figure(
            ZSTD_HOST_BYTES_PER_S / zstd_bytes_per_s(), f"{source}: zstd level 1 over the stand-in for activations."
        ),
        idle_watts=_copied_figure(base.idle_watts, base.name),
        active_watts=_copied_figure(base.active_watts, base.name),
        setup=fit.setup,
        fit=fit,
        tuned=tuned,
    )


def _rates(source: str, times: CalibrationTimes, base: DeviceProfile) -> Rates:
    """One rate per class, for display and for operators without a fit: the upper quartile over the grid."""
    grid = operator_grid.grid()
    flops_per_s: dict[str, list[float]] = defaultdict(list)
    for index, seconds in times.operator_s().items():
        work = operator_grid.point_work(grid[index])
        flops_per_s[work.operator].append(work.flops / seconds)
    figures = {
        rate: _measured_figure(
            float(np.quantile(flops_per_s[operator], 0.75)),
            f"{source}: operations per second, upper quartile over the calibration's {operator} operators.",
        )
        for rate, operator in CLASS_OF_RATE.items()
    }
    return Rates(
        **figures,
        memory_bytes_per_s=_measured_figure(_copy_bytes_per_s(), f"{source}: copying 64 MiB, read plus written."),
        weight_load_bytes_per_s=_copied_figure(base.rates.weight_load_bytes_per_s, base.name),
        jpeg_pixels_per_s=_measured_figure(
            _jpeg_pixels_per_s(), f"{source}: decoding the stand-in frame, 640x480 at quality 85."
        ),
    )


def _measured_figure(value: float, source: str) -> Figure:
    return Figure(value=float(f"{value:.4g}"), basis="measured", source=source)


def _copied_figure(figure: Figure, name: str) -> Figure:
    """A figure that cannot be measured here, copied from the profile `name`; its basis is `assumption`, since it is
    only as good as the two machines are alike."""
    return Figure(value=figure.value, basis="assumption", source=f"As in {name}, not measured here. {figure.source}")


def _overhead_s(times: CalibrationTimes) -> float:
    """Fixed time per operator: the 2 % quantile over the grid, that is its cheapest operators."""
    return float(np.quantile([*times.operator_s().values()], 0.02))


def _memory_bytes() -> float:
    """Physical memory of this machine."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _copy_bytes_per_s() -> float:
    """Rate of copying an array, bytes read plus bytes written."""
    source = np.ones(BYTES_COPIED, np.uint8)
    target = np.empty_like(source)
    return 2 * BYTES_COPIED / _best_s(lambda: np.copyto(target, source))


def zstd_bytes_per_s() -> float:
    """Rate of compressing 1 MiB that resembles an activation after a ReLU: half zeros, half noise."""
    values = np.maximum(np.random.default_rng(0).standard_normal(1 << 18, dtype=np.float32), 0)
    raw = values.tobytes()
    compressor = zstandard.ZstdCompressor(level=1)
    return len(raw) / _best_s(lambda: compressor.compress(raw))


def _jpeg_pixels_per_s() -> float:
    """Rate of decoding a synthetic JPEG."""
    frame = synthetic_frame(parse_input_spec("image/jpeg 640x480 q85 rgb nchw"))
    return 640 * 480 / _best_s(lambda: Image.open(io.BytesIO(frame)).load())


def _best_s(work: Callable[[], object], repeats: int = 9) -> float:
    """Seconds of the fastest of `repeats` calls."""
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return min(seconds)


def machine_name() -> str:
    """Name of the processor as the system reports it, and the number of cores."""
    name = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        entries = {key.strip(): value.strip() for key, value in fields.items()}
        name = entries.get("Model") or entries.get("model name") or ""
    except OSError:
        pass
    return f"{name or os.uname().machine}, {os.cpu_count()} cores"


def runtime_name(engine: Engine = "onnxruntime") -> str:
    """Name and version of the runtime that executes the grid."""
    if engine == "litert":
        return f"LiteRT {version('ai-edge-litert')}"
    return f"onnxruntime {version('onnxruntime')}"


def profile_text(profile: DeviceProfile, as_json: bool) -> str:
    """The profile as the text of a file: JSON, or YAML with one line per operator fit."""
    fields = msgspec.to_builtins(profile)
    if as_json:
        return msgspec.json.format(msgspec.json.encode(fields)).decode() + "\n"
    import yaml

    fits = {"fit": fields.pop("fit"), "tuned": fields.pop("tuned")}
    text = yaml.safe_dump(
        {key: value for key, value in fields.items() if value is not None}, sort_keys=False, width=116
    )
    text = (
        f"# {profile.description}\n# Written by `edgectl calibrate`; the schema is in docs/device-profiles.md.\n{text}"
    )
    if fits["fit"] is None:
        return text
    text += "fit:\n" + _fit_text(fits["fit"], "  ")
    for position, fit in enumerate(fits["tuned"]):
        text += ("" if position else "tuned:\n") + "  -\n" + _fit_text(fit, "    ")
    return text


def _fit_text(fit: dict[str, Any], indent: str) -> str:
    """A fit as YAML, with one line per operator."""
    import yaml

    operators = fit.pop("operators")
    text = textwrap.indent(yaml.safe_dump(fit, sort_keys=False, width=116), indent)
    lines = (f"{indent}  - {msgspec.json.encode(operator).decode()}\n" for operator in operators)
    return f"{text}{indent}operators:\n{''.join(lines)}"
