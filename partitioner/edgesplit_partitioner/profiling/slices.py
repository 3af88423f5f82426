"""Chosen slices timed whole on this machine: what a plan is checked with before it is trusted.

Sums over layers miss what slices cost beyond their operators and overstate what runs on without a pause between
operators. `measure_slices` runs the slices of a table one after the other, each on what the ones before wrote, in a
child process (`python -m edgesplit_partitioner.profiling.slices FOLDER`); `whole_factor` compares, `corrected` makes
use of it. Input slices, which run no model, are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import INPUT_LAYER
from edgesplit.release.manifest import Slice, TensorSpec
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.profiling.ort_profile import LayerTime
from edgesplit_partitioner.sandbox.exit_status import check_not_interrupted
from edgesplit_partitioner.slicing import CutSlice

T = TypeVar("T")
CHILD: Final = (sys.executable, "-m", "edgesplit_partitioner.profiling.slices")
LIMIT_S: Final = 600.0
DTYPES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    **{f"{sign}{bits}": f"{sign.lower()}{bits}" for sign in ("INT", "UINT") for bits in (8, 16, 32, 64)},
}
FACTORS: Final = (0.25, 4.0)
"""A factor beyond these is a disturbed measurement, or another model: not used."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is to do: the slices lie in folders `0`, `1`, ... in the order in which they run."""

    slices: tuple[Slice, ...]
    runs: int
    warmup: int
    threads: int
    seconds: float
    """Stop after so long, with what was measured by then; at least three runs."""


def measure_slices(
    slices: Sequence[CutSlice], *, runs: int = 20, warmup: int = 3, threads: int = 1, seconds: float = 20.0
) -> dict[str, LayerTime]:
    """Median and 95th percentile of each slice's run by the slice's name; ModelRefused where one cannot run.

    The first inputs are noise; what is between slices is what the ones before wrote.
    """
    if runs < 1 or warmup < 0 or threads < 1:
        raise UsageError("measuring needs at least one run and one thread")
    wanted = [one for one in slices if one.slice.format != "input"]
    if not wanted:
        return {}
    with TemporaryDirectory(prefix="edgesplit-slices-") as name:
        folder = Path(name)
        for place, one in enumerate(wanted):
            (folder / str(place)).mkdir()
            one.write(folder / str(place))
        job = Job(slices=tuple(one.slice for one in wanted), runs=runs, warmup=warmup, threads=threads, seconds=seconds)
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        times = _child(folder)
    return {one.slice.name: LayerTime.of(seen) for one, seen in zip(wanted, times, strict=True)}


class SliceTime(msgspec.Struct, frozen=True, kw_only=True):
    """One slice as it runs whole, beside the sum over its layers."""

    layers: tuple[str, ...]
    median_s: float
    p95_s: float
    summed_s: float | None
    """None where a layer of it was not measured."""


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """Slices measured whole."""

    slices: tuple[SliceTime, ...] = ()
    factor: float | None = None
    """What they take over the sum of their layers; None where that cannot be told."""


def measured_whole(slices: Sequence[CutSlice], layer_s: Mapping[str, float], *, runs: int = 20) -> Whole:
    """These slices' own times, and how they compare with `layer_s`; ModelRefused where one cannot run."""
    times = measure_slices(slices, runs=runs)
    plain = [one.slice for one in slices if one.slice.name in times]
    told = tuple(
        SliceTime(
            layers=one.layers,
            median_s=times[one.name].median_s,
            p95_s=times[one.name].p95_s,
            summed_s=sum(layer_s[layer] for layer in one.layers) if set(one.layers) <= layer_s.keys() else None,
        )
        for one in plain
    )
    return Whole(slices=told, factor=whole_factor(times, plain, layer_s))


Cuts = tuple[frozenset[str], ...]
"""Each the layers on the device."""


def believed(
    costs: Costs, tier: str, cuts_of: Callable[[Costs], Cuts], factor_of: Callable[[Cuts], float | None]
) -> Costs:
    """The costs with a tier's seconds as the slices of the chosen cuts take whole; where that changes the choice, as
    those of the new one do. `cuts_of` plans, `factor_of` measures."""
    checked, factors = costs, dict[Cuts, "float | None"]()
    for _ in range(2):
        cuts = cuts_of(checked)
        if cuts not in factors:
            factors[cuts] = factor_of(cuts)
        factor = factors[cuts]
        again = costs if factor is None else corrected(costs, tier, factor)
        if again == checked:
            break
        checked = again
    return checked


def whole_factor(times: Mapping[str, LayerTime], slices: Sequence[Slice], layer_s: Mapping[str, float]) -> float | None:
    """What the slices took whole over the sum of their layers: one factor for all, so that no slice's noise moves a
    cut. None where nothing can be compared."""
    both = [one for one in slices if one.name in times and all(layer in layer_s for layer in one.layers)]
    summed_s = sum(layer_s[layer] for one in both for layer in one.layers)
    whole_s = sum(times[one.name].median_s for one in both)
    if summed_s <= 0 or whole_s <= 0:
        return None
    factor = whole_s / summed_s
    return factor if FACTORS[0] <= factor <= FACTORS[1] else None


def corrected(costs: Costs, tier: str, factor: float) -> Costs:
    """The costs with all of a tier's seconds but the input layer's times the factor, and a word about it."""
    layers = tuple(
        msgspec.structs.replace(
            layer, seconds={**layer.seconds, tier: layer.seconds[tier] * factor}, between=_without(layer.between, tier)
        )
        if layer.name != INPUT_LAYER and tier in layer.seconds
        else layer
        for layer in costs.layers
    )
    word = f"{costs.basis.get(tier, 'measured')}, times {factor:.3f}: slices measured whole"
    intervals = _without(costs.intervals, tier)
    return msgspec.structs.replace(costs, layers=layers, basis={**costs.basis, tier: word}, intervals=intervals)


def _without(by_tier: Mapping[str, T], tier: str) -> dict[str, T]:
    """What was predicted of the tier counts no more once it was measured."""
    return {name: one for name, one in by_tier.items() if name != tier}


def _child(folder: Path) -> list[list[float]]:
    """Seconds by slice and run; ModelRefused if the child fails, dies or hangs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.run(
            [*CHILD, str(folder)], capture_output=True, timeout=LIMIT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ModelRefused(f"the slices did not end within {LIMIT_S:.0f} s") from error
    if child.returncode:
        check_not_interrupted(child.returncode)
        lines = child.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ModelRefused(f"the slices cannot run here: {lines[-1][:300] if lines else f'status {child.returncode}'}")
    return msgspec.json.decode((folder / "seconds.json").read_bytes(), type=list[list[float]])


# The child's side.


def main(folder: Path) -> None:
    """Do the folder's job."""
    from edgesplit.runtime.dispatch import EngineByFormat  # engines load in the child only

    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    engine = EngineByFormat(job.threads)
    programs = [engine.load(one, folder / str(place)) for place, one in enumerate(job.slices)]
    made = {tensor.name for one in job.slices for tensor in one.outputs}
    given = {tensor.name: _noise(tensor) for one in job.slices for tensor in one.inputs if tensor.name not in made}
    times: list[list[float]] = [[] for _ in programs]
    begun = perf_counter()
    for step in range(job.warmup + job.runs):
        if step >= job.warmup + 3 and perf_counter() - begun > job.seconds:
            break
        live: dict[str, npt.NDArray[np.generic]] = dict(given)
        for place, (one, program) in enumerate(zip(job.slices, programs, strict=True)):
            feeds = {tensor.name: live[tensor.name] for tensor in one.inputs}
            program.run(feeds)  # on its own tier a slice finds the caches as it left them itself
            start = perf_counter()
            written = program.run(feeds)
            took_s = perf_counter() - start
            live.update(written)
            if step >= job.warmup:
                times[place].append(took_s)
    (folder / "seconds.json").write_bytes(msgspec.json.encode(times))


def _noise(tensor: TensorSpec) -> npt.NDArray[np.generic]:
    """Values between 0 and 1, ones for whole numbers; a length known only at run time is 1."""
    dtype = np.dtype(DTYPES.get(tensor.datatype, "float32"))
    lengths = [max(length, 1) for length in tensor.shape]
    values = np.random.default_rng(0).random(lengths)
    return values.astype(dtype) if dtype.kind == "f" else np.ones(lengths, dtype)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:  # the parent translates: this process only has its exit status and one line
        print(" ".join(str(error).split())[:2000], file=sys.stderr)
        sys.exit(1)
