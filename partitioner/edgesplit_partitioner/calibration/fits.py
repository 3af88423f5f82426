"""Fits of a calibration: measured times in, a `CalibrationFit` for each engine and its options out. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from edgesplit.device_profile import CalibrationFit, Interval, OperatorFit
from edgesplit.errors import UsageError
from edgesplit.runtime.options import EngineOptions
from edgesplit_partitioner.calibration.child import BatchTimes
from edgesplit_partitioner.calibration.design import Design, Engine, design_of, has_spinning_pool, runtime_name
from edgesplit_partitioner.calibration.thread_sharing import NetworkSharing, fit_sharing
from edgesplit_partitioner.costs.regression import (
    COVERAGE,
    FamilyPredictor,
    fit_family,
    fit_plane,
    predictors_by_family,
    residual_interval,
)
from edgesplit_partitioner.ir.channel_blocks import BLOCK_SIZES
from edgesplit_partitioner.ir.graph import OperatorWork
from edgesplit_partitioner.onnx_format.operator_features import FEATURES

AS_CUT: Final = EngineOptions()
"""Slices as they were cut, on one thread."""
MIN_NETWORKS: Final = 5
"""Networks that must have been measured for a fit."""
TOO_LITTLE: Final = "calibration: too little was measured in the time given: give it more minutes"
LEAST_SHARE: Final = 0.02
"""Least part of a grid point's time that is its operator's: what is less was lost in noise."""
RUN_QUANTILE: Final = 0.25
"""Quantile of an empty run's times over all visits, of which there are as many as batches: about the least of the few
visits that a network or an operator has."""
CORRECTION_RANGE: Final = (0.5, 1.5)
"""Range of `NetworkFit.correction`, to which it is clipped: beyond it, the measurement is wrong rather than the sum
over operators."""
MIN_HALF_WIDTH: Final = 0.05
"""Minimum half-width of a whole network's interval: the same machine differs that much from one hour to the next."""
CACHE_SIZES: Final = tuple(float(mebibytes << 20) for mebibytes in (2, 4, 8, 16, 32))
"""Candidates, in bytes, of the weight size from which weights are fetched from memory in every run."""


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


def fit_jobs(
    times: Sequence[CalibrationTimes], jobs: Sequence[tuple[Engine, EngineOptions]], *, machine: str, today: str
) -> list[CalibrationFit]:
    """The fits of all measurements, in their order. Where only networks were timed, the operators are those of the same
    engine and optimisation on one thread, as several threads share them."""
    fits: list[CalibrationFit] = []
    complete: list[CalibrationTimes] = []
    for measured, (engine, setup) in zip(times, jobs, strict=True):
        if has_spinning_pool(engine, setup):
            single = jobs.index((engine, msgspec.structs.replace(setup, threads=1, spinning=False)))
            points = _shared_points(measured, complete[single], fits[single], setup, design_of(engine))
            complete.append(replace(measured, points=points, around={}))
        else:
            complete.append(_levelled(measured, design_of(engine), fused=setup.optimise == "fast"))
        runtime = runtime_name(engine)
        fits.append(fit_points(complete[-1], machine=machine, runtime=runtime, today=today, setup=setup, engine=engine))
    return fits


def _levelled(times: CalibrationTimes, design: Design, *, fused: bool) -> CalibrationTimes:
    """The times with those of operators multiplied by `datatype_factors`."""
    works = {index: design.point_work(index) for index in times.points}
    if not any("/" in work.family for work in works.values()):
        return times
    operators = tuple(_operator_fits(works, times.operator_s()))
    factors = datatype_factors(_network_times(times, operators, _run_s(times), design, fused=fused))

    def scaled(seconds: Mapping[int, list[float]]) -> dict[int, list[float]]:
        return {
            index: [factors.get(works[index].family.partition("/")[2], 1.0) * one for one in visits]
            for index, visits in seconds.items()
        }

    return replace(times, points=scaled(times.points), around=scaled(times.around))


def _shared_points(
    several: CalibrationTimes, one: CalibrationTimes, fit: CalibrationFit, setup: EngineOptions, design: Design
) -> dict[int, list[float]]:
    """Seconds of the grid's points on several threads, from those on one thread, whose fit is `fit`."""
    predictors, fused = predictors_by_family(fit.operators, FEATURES), setup.optimise == "fast"
    networks = []
    for index in sorted(set(several.networks) & set(one.networks)):
        operators = [(work, _operator_s(work, predictors)) for work in design.network_works(index, fused=fused)]
        known = [(work, seconds) for work, seconds in operators if seconds is not None]
        if len(known) == len(operators):
            one_s = max(min(one.networks[index]) - _run_s(one), 1e-7)
            several_s = max(min(several.networks[index]) - _run_s(several), 1e-7)
            networks.append(NetworkSharing(known, one_s, several_s))
    if len(networks) < MIN_NETWORKS:
        raise UsageError(TOO_LITTLE)
    sharing = fit_sharing(networks, setup.threads)
    return {index: [sharing.seconds(design.point_work(index), one_s)] for index, one_s in one.operator_s().items()}


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
    run_s, tensor_s = _run_s(times), statistics.median(times.tensor_s)
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
        correction=float(f"{whole.correction:.5g}"),
        cached_bytes=whole.cached_bytes,
        uncached_s_per_byte=float(f"{whole.uncached_s_per_byte:.4g}"),
        whole=Interval(
            low=min(low, 1 / max(visit_spread, 1 + MIN_HALF_WIDTH)),
            high=max(high, visit_spread, 1 + MIN_HALF_WIDTH),
            coverage=COVERAGE,
            basis="measured",
            source=f"{len(networks)} small networks drawn at random, measured over predicted, {today}; no narrower "
            f"than the two fastest visits to one network are apart.",
        ),
        operators=operators,
        setup=setup,
    )


def _run_s(times: CalibrationTimes) -> float:
    """Seconds of a run that computes nothing."""
    return float(np.quantile(times.empty_s, RUN_QUANTILE))


@dataclass(frozen=True, slots=True)
class NetworkTime:
    """Time of one whole network."""

    run_s: float
    """Seconds of an empty run."""
    measured_s: float
    """Seconds of a run, without those of an empty run."""
    summed_s: float
    """Sum over its operators, by their fits."""
    weight_bytes: float
    """Bytes of its weights."""
    spread: float
    """Second fastest over fastest visit."""
    datatype: str = ""
    """Datatype of its weights, as in its operators' families after the slash."""

    @property
    def is_ordinary(self) -> bool:
        """Whether its operators take the most of its time, with weights that any cache holds."""
        return self.weight_bytes <= CACHE_SIZES[0] and self.measured_s >= self.run_s

    def log_residual(self, predicted_s: float) -> float:
        """Logarithm of measured over predicted seconds, with those of an empty run."""
        return math.log((self.measured_s + self.run_s) / (predicted_s + self.run_s))


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
    # Medians, which a few disturbed networks do not move. The correction comes from networks whose weights fit into the
    # smallest cache size, the cost of uncached weights from the time that larger ones take beyond it.
    correction = _median_ratio(networks)
    fits = []
    for cached in CACHE_SIZES:
        uncached = [network for network in networks if network.weight_bytes > cached]
        extra_s_per_byte = [
            (network.measured_s - correction * network.summed_s) / network.weight_bytes for network in uncached
        ]
        s_per_byte = max(float(np.median(extra_s_per_byte)), 0.0) if extra_s_per_byte else 0.0
        residuals = tuple(
            network.log_residual(
                correction * network.summed_s + s_per_byte * network.weight_bytes * (network.weight_bytes > cached)
            )
            for network in networks
        )
        fits.append(NetworkFit(correction, float(cached), s_per_byte, residuals))
    return min(fits, key=lambda fit: sum(map(abs, fit.residuals)))


def datatype_factors(networks: Sequence[NetworkTime]) -> dict[str, float]:
    """What each datatype's operators are multiplied by, beyond the correction of all networks: how much more networks
    of that datatype take than their sum, over what all networks do. 1 where there is one datatype."""
    common = _median_ratio(networks)
    by_datatype: dict[str, list[NetworkTime]] = defaultdict(list)
    for network in networks:
        by_datatype[network.datatype].append(network)
    return {datatype: _median_ratio(group) / common for datatype, group in by_datatype.items()}


def _median_ratio(networks: Sequence[NetworkTime]) -> float:
    """Median of measured over summed seconds of the ordinary networks, else of all; within `CORRECTION_RANGE`."""
    chosen = [network for network in networks if network.is_ordinary] or networks
    return float(np.clip(np.median([network.measured_s / network.summed_s for network in chosen]), *CORRECTION_RANGE))


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
        needed = _needed_columns(family, len(works[indices[0]].sizes))
        if len(indices) >= min(needed) + 2:
            sizes = [works[index].sizes for index in indices]
            yield fit_family(family, sizes, [seconds[index] for index in indices], needed)
    for operator, indices in sorted(classes.items()):
        sizes = [(works[index].flops, works[index].bytes_moved) for index in indices]
        yield fit_plane(f"class:{operator}", sizes, [seconds[index] for index in indices])


def _needed_columns(family: str, columns: int) -> list[int]:
    """Numbers of columns to try for a family's fit: without those of `BLOCK_SIZES`, with their first kind, with all."""
    blocks = sum(name in BLOCK_SIZES for name in FEATURES.get(family.partition("/")[0], ()))
    return [columns - blocks, columns - blocks // 2, columns]


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
                run_s=run_s,
                measured_s=max(min(seconds) - run_s, 1e-7),
                summed_s=sum(known),
                weight_bytes=design.weight_bytes(index),
                spread=sorted(seconds)[:2][-1] / min(seconds),
                datatype=design.datatype(index),
            )
        )
    if len(networks) < MIN_NETWORKS:
        raise UsageError(TOO_LITTLE)
    return networks


def _operator_s(work: OperatorWork, predictors: Mapping[str, FamilyPredictor]) -> float | None:
    """Seconds of an operator by the fit of its family, or else of its class; None where neither was measured."""
    if not (work.flops or work.bytes_moved) and work.family not in predictors:
        return 0.0
    if work.family in predictors:
        return predictors[work.family].seconds(work.sizes)
    by_class = predictors.get(f"class:{work.operator}") if not work.family else None
    return None if by_class is None else by_class.seconds((work.flops, work.bytes_moved))
