"""Calibration: a device profile of this machine, from a few minutes of microbenchmarks.

`measure_points` times the operator grid and the small networks in a child process, of which `fits` makes the fits;
`calibrate` does both and adds the other figures of a profile. Figures that cannot be measured here (watts, storage) are
copied from a shipped profile, and their source states that.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from time import perf_counter
from typing import Any, Final

import msgspec
import numpy as np
import zstandard
from PIL import Image

from edgesplit.device_profile import CalibrationFit, DeviceProfile, Figure, Rates
from edgesplit.errors import UsageError
from edgesplit.input_spec import parse_input_spec
from edgesplit.runtime.options import EngineOptions
from edgesplit_partitioner.calibration import operator_grid
from edgesplit_partitioner.calibration.child import BatchTimes, CalibrationJob
from edgesplit_partitioner.calibration.design import Engine, has_spinning_pool
from edgesplit_partitioner.calibration.fits import AS_CUT, CalibrationTimes, fit_jobs
from edgesplit_partitioner.profiling.layers import Progress, synthetic_frame
from edgesplit_partitioner.profiling.machine_load import load_between, read_counters
from edgesplit_partitioner.sandbox.child_process import ChildFailed, run_child
from edgesplit_partitioner.sandbox.limits import measurement_limits

CHILD: Final = "edgesplit_partitioner.calibration.child"
"""Module of the child process."""
LEAST_LIMIT_S: Final = 900.0
"""Seconds that a measurement may take beyond four times its share: the networks and a quarter of the operators are
measured on any machine, however slow or busy."""
MOST_CORES: Final = 8
"""Most threads of the tuned measurement."""
NETWORKS_PART: Final = 0.35
"""Time for a measurement of networks alone, relative to one of networks and operators."""
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


def calibrate(
    name: str, *, base: DeviceProfile, minutes: float, threads: int, today: str, progress: Progress | None = None
) -> DeviceProfile:
    """This machine's profile with the given name. Figures that cannot be measured here come from `base`; `today` is the
    date in the sources. UsageError where the measurement fails or gives too little."""
    jobs, before = measured_jobs(threads, os.cpu_count() or 1), read_counters()
    parts = [NETWORKS_PART if has_spinning_pool(engine, setup) else 1.0 for engine, setup in jobs]
    times: list[CalibrationTimes] = []
    for position, (engine, setup) in enumerate(jobs):
        share = progress and _share_of(progress, position, len(jobs))
        times.append(measure_points(minutes * parts[position] / sum(parts), setup, share, engine=engine))
    load = load_between(before, read_counters(), [])
    exact, *tuned = fit_jobs(times, jobs, machine=machine_name(), today=today)
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
