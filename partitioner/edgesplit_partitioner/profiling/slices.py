"""Timing of whole slices on this machine, to correct a plan that was made from sums over layers.

Sums over layers miss costs of a slice beyond its operators, and overstate operators that run without a pause in
between. `measure_slices` runs the slices of a table one after the other, each on the outputs of those before, in a
child process (`python -m edgesplit_partitioner.profiling.slices FOLDER`); `whole_factor` compares, `with_tier_factor`
applies the factor to costs. Input slices, which run no model, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from edgesplit.errors import UsageError
from edgesplit.input_spec import INPUT_LAYER
from edgesplit.release.manifest import Slice
from edgesplit.runtime.options import EngineOptions
from edgesplit_partitioner.costs.model import Costs, without_tier
from edgesplit_partitioner.ir.tensor_types import noise
from edgesplit_partitioner.profiling.ort_profile import LayerTime
from edgesplit_partitioner.sandbox.child_process import child_main, run_child
from edgesplit_partitioner.sandbox.limits import folder_bytes, measurement_limits
from edgesplit_partitioner.slicing import CutSlice

CHILD: Final = "edgesplit_partitioner.profiling.slices"
"""Module of the child process."""
TIMEOUT_S: Final = 600.0
"""Timeout of the child process."""
FACTOR_RANGE: Final = (0.25, 4.0)
"""Valid range of the factor: beyond it, the measurement was disturbed or is of another model, and is not used."""


class SliceJob(msgspec.Struct, frozen=True):
    """What the child process has to measure; the slices are in folders `0`, `1`, ... in the order in which they run."""

    slices: tuple[Slice, ...]
    runs: int
    warmup: int
    setups: tuple[EngineOptions, ...]
    """Engine options of each slice."""
    seconds: float
    """Time limit: stop after this, but not before three runs, with what was measured by then."""


def measure_slices(
    slices: Sequence[CutSlice],
    *,
    runs: int = 20,
    warmup: int = 3,
    setups: Sequence[EngineOptions] = (),
    seconds: float = 20.0,
) -> dict[str, LayerTime]:
    """Median and 95th percentile of each slice's seconds, by the slice's name. UsageError for numbers of runs below 1;
    ModelRefused where a slice cannot run. `setups`: engine options of each slice; without them slices run as they were
    cut, on one thread.

    Inputs of the model are random values; tensors between slices are outputs of the slices before.
    """
    if runs < 1 or warmup < 0:
        raise UsageError("measuring needs at least one run")
    options = setups or [EngineOptions()] * len(slices)
    chosen = [(cut, setup) for cut, setup in zip(slices, options, strict=True) if cut.slice.format != "input"]
    model_slices = [cut for cut, _ in chosen]
    if not model_slices:
        return {}
    with TemporaryDirectory(prefix="edgesplit-slices-") as name:
        folder = Path(name)
        for position, cut in enumerate(model_slices):
            (folder / str(position)).mkdir()
            cut.write(folder / str(position))
        job = SliceJob(
            tuple(cut.slice for cut in model_slices), runs, warmup, tuple(setup for _, setup in chosen), seconds
        )
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        limits = measurement_limits(folder_bytes(folder), folder, TIMEOUT_S)
        raw = run_child(CHILD, folder, limits=limits, limit_s=TIMEOUT_S, result=folder / "seconds.json")
    times = msgspec.json.decode(raw, type=list[list[float]])
    return {
        cut.slice.name: LayerTime.from_seconds(seconds_of_runs)
        for cut, seconds_of_runs in zip(model_slices, times, strict=True)
    }


class SliceTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one whole slice, with the sum over its layers."""

    layers: tuple[str, ...]
    median_s: float
    p95_s: float
    summed_s: float | None
    """None where a layer of the slice was not measured."""


class WholeSliceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of whole slices."""

    slices: tuple[SliceTime, ...] = ()
    factor: float | None = None
    """Seconds of the slices over the sum of their layers; None where it cannot be determined."""
    is_busy: bool = False
    """Whether other work on the machine may have lengthened them."""


def measure_whole_slices(
    slices: Sequence[CutSlice], layer_s: Mapping[str, float], *, runs: int = 20
) -> WholeSliceTimes:
    """Times of these slices, compared with the sums over `layer_s`; ModelRefused where a slice cannot run."""
    times = measure_slices(slices, runs=runs)
    measured = [entry.slice for entry in slices if entry.slice.name in times]
    slice_times = tuple(
        SliceTime(
            layers=entry.layers,
            median_s=times[entry.name].median_s,
            p95_s=times[entry.name].p95_s,
            summed_s=sum(layer_s[layer] for layer in entry.layers) if set(entry.layers) <= layer_s.keys() else None,
        )
        for entry in measured
    )
    return WholeSliceTimes(slices=slice_times, factor=whole_factor(times, measured, layer_s))


Cuts = tuple[frozenset[str], ...]
"""Cuts of a table, each as the set of layers on the device."""


def corrected_by_slices(
    costs: Costs, tier: str, cuts_of: Callable[[Costs], Cuts], factor_of: Callable[[Cuts], float | None]
) -> Costs:
    """The costs with a tier's seconds corrected by times of the whole slices that the plan uses.

    Plans with `cuts_of`, measures the chosen cuts with `factor_of`, corrects the tier's seconds by the factor; where
    that changes the cuts, measures and corrects once more. Each set of cuts is measured once.
    """
    current, factors = costs, dict[Cuts, "float | None"]()
    # Two rounds at most: the factors of two different cuts could move the plan back and forth for ever.
    for _ in range(2):
        cuts = cuts_of(current)
        if cuts not in factors:
            factors[cuts] = factor_of(cuts)
        factor = factors[cuts]
        next_costs = costs if factor is None else with_tier_factor(costs, tier, factor)
        if next_costs == current:
            break
        current = next_costs
    return current


def whole_factor(times: Mapping[str, LayerTime], slices: Sequence[Slice], layer_s: Mapping[str, float]) -> float | None:
    """Seconds of whole slices over the sum of their layers: one factor for all slices, so that the noise of a single
    slice moves no cut. None where nothing can be compared, or the factor is out of `FACTOR_RANGE`."""
    comparable = [entry for entry in slices if entry.name in times and all(layer in layer_s for layer in entry.layers)]
    summed_s = sum(layer_s[layer] for entry in comparable for layer in entry.layers)
    whole_s = sum(times[entry.name].median_s for entry in comparable)
    if summed_s <= 0 or whole_s <= 0:
        return None
    factor = whole_s / summed_s
    return factor if FACTOR_RANGE[0] <= factor <= FACTOR_RANGE[1] else None


def with_tier_factor(costs: Costs, tier: str, factor: float) -> Costs:
    """The costs with all of a tier's seconds but the input layer's multiplied by the factor, and a note of it in
    `basis`. The tier's prediction intervals are dropped, since it was measured."""
    layers = tuple(
        msgspec.structs.replace(
            layer,
            seconds={**layer.seconds, tier: layer.seconds[tier] * factor},
            between=without_tier(layer.between, tier),
        )
        if layer.name != INPUT_LAYER and tier in layer.seconds
        else layer
        for layer in costs.layers
    )
    basis = costs.basis.get(tier, "measured")
    note = f"{basis}; slices measured whole take {factor:.3f} times the sum of their layers"
    intervals = without_tier(costs.intervals, tier)
    return msgspec.structs.replace(costs, layers=layers, basis={**costs.basis, tier: note}, intervals=intervals)


# The child's side.


def main(folder: Path) -> None:
    """Run the job in the folder."""
    from edgesplit.runtime.dispatch import DispatchingRuntime  # engines load in the child only

    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=SliceJob)
    programs = [
        DispatchingRuntime(setup=setup).load(entry, folder / str(position))
        for position, (entry, setup) in enumerate(zip(job.slices, job.setups, strict=True))
    ]
    written_names = {tensor.name for entry in job.slices for tensor in entry.outputs}
    specs = [tensor for entry in job.slices for tensor in entry.inputs if tensor.name not in written_names]
    inputs = noise(specs, seed=0)
    times: list[list[float]] = [[] for _ in programs]
    started = perf_counter()
    for step in range(job.warmup + job.runs):
        if step >= job.warmup + 3 and perf_counter() - started > job.seconds:
            break
        tensors: dict[str, npt.NDArray[np.generic]] = dict(inputs)
        for position, (entry, program) in enumerate(zip(job.slices, programs, strict=True)):
            feeds = {tensor.name: tensors[tensor.name] for tensor in entry.inputs}
            program.run(feeds)  # untimed: on its own tier a slice finds the caches as its last run left them
            start = perf_counter()
            written = program.run(feeds)
            took_s = perf_counter() - start
            tensors.update(written)
            if step >= job.warmup:
                times[position].append(took_s)
    (folder / "seconds.json").write_bytes(msgspec.json.encode(times))


if __name__ == "__main__":
    child_main(main)
