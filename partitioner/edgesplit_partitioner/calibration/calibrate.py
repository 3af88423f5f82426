"""A device profile of this machine, from a few minutes of microbenchmarks.

`measure_points` times the grid in a child process; `fit_points` is pure: what was seen in, a `Fit` out. `calibrate`
does both and adds the figures that a profile has besides. What cannot be measured here (watts, storage) is taken from
a shipped profile, and says so.
"""

from __future__ import annotations

import io
import math
import os
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import msgspec
import numpy as np
import onnx
import zstandard
from PIL import Image

from edgesplit.device_profile import DeviceProfile, Figure, Fit, Interval, OperatorFit, Rates
from edgesplit.errors import UsageError
from edgesplit.input_spec import parse_input_spec
from edgesplit_partitioner.calibration import operator_grid
from edgesplit_partitioner.calibration.child import Job, Seen
from edgesplit_partitioner.calibration.networks import nets
from edgesplit_partitioner.costs.regression import COVERAGE, Fitted, fit_family, fit_plane, interval
from edgesplit_partitioner.ir.graph import Work
from edgesplit_partitioner.onnx_format import nodes, operator_features
from edgesplit_partitioner.profiling.layers import stand_in_frame
from edgesplit_partitioner.sandbox.exit_status import check_not_interrupted

Progress = Callable[[int, int], None]
"""Called with the batches done and the batches in all."""

CHILD: Final = (sys.executable, "-m", "edgesplit_partitioner.calibration.child")
LEAST_NETS: Final = 5
CORRECTIONS: Final = (0.7, 1.5)
"""Beyond these, the networks show a fault of the measurement rather than of the sum."""
PORTABLE: Final = 0.05
"""Least half-width of a whole network's interval: another hour on the same machine is not the same."""
CACHES: Final = tuple(float(mebibytes << 20) for mebibytes in (2, 4, 8, 16, 32))
"""Sizes at which weights may begin to be fetched from memory anew in every run."""
ZSTD_HOST_BYTES_PER_S: Final = 440e6
"""What `zstd_bytes_per_s` gave on the machine of `generic-x86` (best of 9 runs, November 2026)."""
BYTES_COPIED: Final = 64 << 20
RATED: Final[Mapping[str, str]] = {
    "dense_conv_flops_per_s": "conv",
    "depthwise_flops_per_s": "depthwise",
    "gemm_flops_per_s": "gemm",
    "elementwise_per_s": "elementwise",
}
"""The class of operators behind each rate."""


@dataclass(slots=True)
class Times:
    """Everything that was measured, by place in the grid and among the networks; several visits each."""

    points: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    networks: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    empty_s: list[float] = field(default_factory=list)
    tensor_s: list[float] = field(default_factory=list)

    def add(self, seen: Seen) -> None:
        """What one visit saw."""
        into = self.networks if seen.whole else self.points
        for place, seconds in seen.seconds.items():
            into[place].append(seconds)
        self.empty_s.append(seen.empty_s)
        self.tensor_s.append(seen.tensor_s)


def calibrate(
    name: str, *, base: DeviceProfile, minutes: float, threads: int, today: str, progress: Progress | None = None
) -> DeviceProfile:
    """This machine's profile under that name. `base` lends what cannot be measured here; `today` goes into the
    sources."""
    times = measure_points(minutes, threads, progress)
    fit = fit_points(times, machine=machine_name(), runtime=runtime_name(), today=today)
    return as_profile(name, fit, times, base, threads)


def measure_points(minutes: float, threads: int = 1, progress: Progress | None = None) -> Times:
    """Times of the grid, in a child process; UsageError where it fails."""
    if not 0 < minutes <= 240 or threads < 1:
        raise UsageError("calibrating takes between a fraction of a minute and four hours, and at least one thread")
    if threads > (os.cpu_count() or 1):
        raise UsageError(f"{threads} threads on {os.cpu_count()} cores would fight: slices run with as many at most")
    job = Job(seconds=60.0 * minutes, threads=threads)
    times = Times()
    for done, seen in enumerate(_child(job), 1):
        times.add(seen)
        if progress is not None:
            progress(min(done, job.visits * seen.batches), job.visits * seen.batches)
    return times


def _child(job: Job) -> Iterator[Seen]:
    """What the child sees, as it comes. It is killed when it takes four times as long as it may, and a minute."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(CHILD, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as child:
        clock = threading.Timer(4 * job.seconds + 60, child.kill)
        clock.start()
        try:
            assert child.stdin is not None and child.stdout is not None and child.stderr is not None
            child.stdin.write(msgspec.json.encode(job))
            child.stdin.close()
            for line in child.stdout:
                yield msgspec.json.decode(line, type=Seen)
            errors = child.stderr.read().decode("utf-8", "replace").strip().splitlines()
            if status := child.wait():
                check_not_interrupted(status)
                killed = "it was killed, as it took too long or too much memory"
                raise UsageError(f"calibrating failed: {errors[-1] if errors else killed}")
        finally:
            clock.cancel()
            child.kill()


def fit_points(times: Times, *, machine: str, runtime: str, today: str) -> Fit:
    """The fit of what was measured. Several visits count by the best: disturbances only add."""
    grid = operator_grid.grid()
    works = {place: operator_grid.work(grid[place]) for place in times.points}
    operators = tuple(_fits(works, {place: min(seen) for place, seen in times.points.items()}))
    run_s, tensor_s = min(times.empty_s), statistics.median(times.tensor_s)
    networks = _networks(times, operators, run_s)
    whole = fit_networks(networks)
    steady = float(np.quantile([one.spread for one in networks], COVERAGE))
    low, high = interval(whole.residuals)
    return Fit(
        runtime=runtime,
        machine=machine,
        taken=today,
        run_s=float(f"{run_s:.4g}"),
        tensor_s=float(f"{tensor_s:.4g}"),
        correction=round(whole.correction, 4),
        cached_bytes=whole.cached_bytes,
        uncached_s_per_byte=float(f"{whole.uncached_s_per_byte:.4g}"),
        whole=Interval(
            low=min(low, 1 / max(steady, 1 + PORTABLE)),
            high=max(high, steady, 1 + PORTABLE),
            coverage=COVERAGE,
            basis="measured",
            source=f"{len(networks)} small networks drawn at random, measured over predicted, {today}; no narrower "
            f"than two visits to one network are apart.",
        ),
        operators=operators,
    )


@dataclass(frozen=True, slots=True)
class Network:
    """One whole network that was measured."""

    measured_s: float
    """The run itself taken off."""
    summed_s: float
    """Over its operators, by their fits."""
    weight_bytes: float
    spread: float
    """Slowest over fastest visit."""


@dataclass(frozen=True, slots=True)
class WholeFit:
    """measured = correction x summed + uncached_s_per_byte x weight bytes, the latter beyond `cached_bytes` only."""

    correction: float
    cached_bytes: float
    uncached_s_per_byte: float
    residuals: tuple[float, ...]
    """Logarithms of measured over so predicted seconds."""


def fit_networks(networks: Sequence[Network]) -> WholeFit:
    """The one of a few cache sizes that leaves the least absolute error in the logarithm."""
    ordinary = [one for one in networks if one.weight_bytes <= CACHES[0]] or networks
    middle = float(np.median([one.measured_s / one.summed_s for one in ordinary]))
    correction = float(np.clip(middle, *CORRECTIONS))
    found = []
    for cached in CACHES:
        beyond = [one for one in networks if one.weight_bytes > cached]
        extra = [(one.measured_s - correction * one.summed_s) / one.weight_bytes for one in beyond]
        each_s = max(float(np.median(extra)), 0.0) if extra else 0.0
        residuals = tuple(
            math.log(
                one.measured_s / (correction * one.summed_s + each_s * one.weight_bytes * (one.weight_bytes > cached))
            )
            for one in networks
        )
        found.append(WholeFit(correction, float(cached), each_s, residuals))
    return min(found, key=lambda one: sum(map(abs, one.residuals)))


def _fits(works: Mapping[int, Work], seconds: Mapping[int, float]) -> Iterator[OperatorFit]:
    """Each family that has points enough, then each class over all its families."""
    families: dict[str, list[int]] = defaultdict(list)
    classes: dict[str, list[int]] = defaultdict(list)
    for place, work in works.items():
        families[work.family].append(place)
        if work.flops or work.bytes_moved:
            classes[work.operator].append(place)
    for family, places in sorted(families.items()):
        if len(places) >= len(works[places[0]].sizes) + 2:
            yield fit_family(family, [works[place].sizes for place in places], [seconds[place] for place in places])
    for operator, places in sorted(classes.items()):
        sizes = [(works[place].flops, works[place].bytes_moved) for place in places]
        yield fit_plane(f"class:{operator}", sizes, [seconds[place] for place in places])


def _networks(times: Times, operators: Sequence[OperatorFit], run_s: float) -> list[Network]:
    """Those all of whose operators were measured alone too."""
    known = {one.family: Fitted(one, operator_features.FEATURES.get(one.family, ("elements",))) for one in operators}
    networks = []
    for place, seen in sorted(times.networks.items()):
        model = onnx.load_model_from_string(nets()[place])
        works = operator_grid.works(model)
        if any(work.family not in known for work in works):
            continue
        networks.append(
            Network(
                measured_s=max(min(seen) - run_s, 1e-7),
                summed_s=sum(known[work.family].seconds(work.sizes) for work in works),
                weight_bytes=float(sum(nodes.tensor_bytes(one) for one in model.graph.initializer)),
                spread=max(seen) / min(seen),
            )
        )
    if len(networks) < LEAST_NETS:
        raise UsageError("calibration: too little was measured in the time given: give it more minutes")
    return networks


def as_profile(name: str, fit: Fit, times: Times, base: DeviceProfile, threads: int) -> DeviceProfile:
    """The fit with the figures that a profile has besides: measured here, or borrowed from `base`."""
    how = f"Measured on this machine, {fit.taken}: {fit.machine}, {fit.runtime}, {threads} thread(s)"
    return DeviceProfile(
        format=base.format,
        name=name,
        description=f"{fit.machine}, {fit.runtime}, {threads} thread(s), calibrated {fit.taken}",
        threads=threads,
        memory_bytes=_measured(_memory_bytes(), f"{how}: physical memory, the system's share not subtracted."),
        rates=_rates(how, times, base),
        operator_overhead_s=_measured(_overhead_s(times), f"{how}: the cheapest operators of the grid."),
        runtime_factor=_measured(1.0, f"{how}: with the runtime that runs the slices."),
        zstd_slowdown=_measured(
            ZSTD_HOST_BYTES_PER_S / zstd_bytes_per_s(), f"{how}: zstd level 1 over the stand-in for activations."
        ),
        idle_watts=_borrowed(base.idle_watts, base.name),
        active_watts=_borrowed(base.active_watts, base.name),
        fit=fit,
    )


def _rates(how: str, times: Times, base: DeviceProfile) -> Rates:
    """One figure per class, for people and for what the fit does not know: the upper quartile over the grid."""
    grid = operator_grid.grid()
    reached: dict[str, list[float]] = defaultdict(list)
    for place, seen in times.points.items():
        work = operator_grid.work(grid[place])
        reached[work.operator].append(work.flops / min(seen))
    figures = {
        rate: _measured(
            float(np.quantile(reached[operator], 0.75)),
            f"{how}: operations per second, upper quartile over the calibration's {operator} operators.",
        )
        for rate, operator in RATED.items()
    }
    return Rates(
        **figures,
        memory_bytes_per_s=_measured(_copy_bytes_per_s(), f"{how}: copying 64 MiB, read plus written."),
        weight_load_bytes_per_s=_borrowed(base.rates.weight_load_bytes_per_s, base.name),
        jpeg_pixels_per_s=_measured(
            _jpeg_pixels_per_s(), f"{how}: decoding the stand-in frame, 640x480 at quality 85."
        ),
    )


def _measured(value: float, source: str) -> Figure:
    return Figure(value=float(f"{value:.4g}"), basis="measured", source=source)


def _borrowed(figure: Figure, name: str) -> Figure:
    """It cannot be measured here: what the other profile says is only as good as the two machines are alike."""
    return Figure(value=figure.value, basis="assumption", source=f"As in {name}, not measured here. {figure.source}")


def _overhead_s(times: Times) -> float:
    return float(np.quantile([min(seen) for seen in times.points.values()], 0.02))


def _memory_bytes() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _copy_bytes_per_s() -> float:
    source = np.ones(BYTES_COPIED, np.uint8)
    target = np.empty_like(source)
    return 2 * BYTES_COPIED / _best_s(lambda: np.copyto(target, source))


def zstd_bytes_per_s() -> float:
    """Compressing 1 MiB that is like an activation behind a rectifier: half zeros, half noise."""
    values = np.maximum(np.random.default_rng(0).standard_normal(1 << 18, dtype=np.float32), 0)
    raw = values.tobytes()
    compressor = zstandard.ZstdCompressor(level=1)
    return len(raw) / _best_s(lambda: compressor.compress(raw))


def _jpeg_pixels_per_s() -> float:
    frame = stand_in_frame(parse_input_spec("image/jpeg 640x480 q85 rgb nchw"))
    return 640 * 480 / _best_s(lambda: Image.open(io.BytesIO(frame)).load())


def _best_s(work: Callable[[], object], repeats: int = 9) -> float:
    """Seconds of the best of a few repeats."""
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return min(seconds)


def machine_name() -> str:
    """The processor as the system calls it, and how many there are."""
    name = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        found = {key.strip(): value.strip() for key, value in fields.items()}
        name = found.get("Model") or found.get("model name") or ""
    except OSError:
        pass
    return f"{name or os.uname().machine}, {os.cpu_count()} cores"


def runtime_name() -> str:
    """The engine that the grid runs on."""
    from importlib.metadata import version

    return f"onnxruntime {version('onnxruntime')}"


def profile_text(profile: DeviceProfile, as_json: bool) -> str:
    """The profile as a file: YAML with the numbers of each fit on a few lines, or JSON."""
    fields = msgspec.to_builtins(profile)
    if as_json:
        return msgspec.json.format(msgspec.json.encode(fields)).decode() + "\n"
    import yaml

    fit = fields.pop("fit")
    text = yaml.safe_dump(
        {key: value for key, value in fields.items() if value is not None}, sort_keys=False, width=116
    )
    text = (
        f"# {profile.description}\n# Written by `edgectl calibrate`; the schema is in docs/device-profiles.md.\n{text}"
    )
    if fit is None:
        return text
    operators = fit.pop("operators")
    text += yaml.safe_dump({"fit": fit}, sort_keys=False, width=116) + "  operators:\n"
    for one in operators:
        text += f"    - {msgspec.json.encode(one).decode()}\n"
    return text
