"""Prediction of layer run times on a device that is not at hand, from its device profile, each with its prediction
interval.

A calibrated profile (`edgectl calibrate`) has a fit per operator family, over the operator's sizes. Where there is
none, a roofline per operator: the larger of its arithmetic time (at the rate of its class) and its memory time (bytes
at the memory's rate), plus the runtime's overhead. A single FLOP/s figure is never used: depthwise and dense
convolutions differ by more than ten times. docs/device-profiles.md shows the error of both methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from edgesplit.device_profile import DeviceProfile, Figure, Interval
from edgesplit_partitioner.costs.fused_operators import separate_by_layer
from edgesplit_partitioner.costs.regression import predictors_by_family
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, OperatorClass, OperatorWork
from edgesplit_partitioner.onnx_format.operator_features import FEATURES

FUSIBLE_MAIN: frozenset[OperatorClass] = frozenset({"conv", "depthwise", "gemm"})
"""Classes after which the layer's elementwise operators work on data that is still in the cache."""
TFLITE_RUNTIMES: Final = ("libedgetpu", "LiteRT")
"""Prefixes of `CalibrationFit.runtime` in profiles that were calibrated with a runtime for TFLite."""
TUNING_MARGIN, SPINNING_MARGIN = 0.05, 0.10
"""Fraction by which engine options must be faster for an agent to choose them, and by which those with spinning threads
(`releases.tuning` of the agent)."""
UNKNOWN_ERROR: Final = Interval(
    low=0.4,
    high=2.5,
    coverage=0.9,
    basis="assumption",
    source="Rates that were never compared with a measurement: as far apart as runtimes on one board are.",
)
"""Interval of profiles whose rates were never compared with a measurement."""


OTHER_RUNTIME: Final = Interval(
    low=0.17,
    high=2.0,
    coverage=0.9,
    basis="measured",
    source="LiteRT over what onnxruntime's figures predict, of six float and int8 models, 2026: 0.16 to 1.9.",
)
"""Interval where the profile's figures are onnxruntime's and the model runs on LiteRT."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds with their prediction interval, which covers the true value as often as the profile states
    (mostly 90 %)."""

    seconds: float
    low_s: float
    high_s: float


class Predictor:
    """Predicts layers and slices by one device profile; the profile's fits are unpacked once, so calls are cheap."""

    def __init__(self, profile: DeviceProfile, model_format: str = "onnx") -> None:
        self.profile = profile
        self._rate_error = profile.error or UNKNOWN_ERROR
        self.whole_interval = profile.fit.whole if profile.fit else self._rate_error
        """The interval of whole networks."""
        if model_format == "tflite" and not (profile.fit and profile.fit.runtime.startswith(TFLITE_RUNTIMES)):
            self._rate_error = self.whole_interval = OTHER_RUNTIME
        self._predictors = predictors_by_family(profile.fit.operators, FEATURES) if profile.fit else {}
        self._is_fused = profile.fit is not None and profile.priced_setup.optimise == "fast"
        self._fused_layers: Sequence[Layer] = ()
        self._separate_works: Mapping[str, list[OperatorWork]] = {}

    def layer_s(self, layer: Layer, running: Sequence[Layer] = ()) -> float:
        """Seconds of the layer's operators, one after the other, where the layers in `running` (by default it alone)
        run together. Without a fit, operators fused into the main one count with their arithmetic only."""
        return sum(part[0] for part in self._operator_times((layer,), running))

    def predict_sum(self, layers: Sequence[Layer], running: Sequence[Layer] = ()) -> Prediction:
        """Seconds of these layers, one after the other, with their interval, where the layers in `running` (by default
        `layers`) run together.

        Errors of single operators are taken as independent, that of whole networks as common: squares of the intervals'
        logarithms are added, the former weighted with the operator's share of the time.
        """
        parts = self._operator_times(layers, running)
        total_s = sum(part[0] for part in parts) + self.weight_fetch_s(layers)
        if self.profile.fit is None or not total_s:
            return Prediction(total_s, total_s * self._rate_error.low, total_s * self._rate_error.high)
        whole = self.whole_interval
        # A sum T of independent terms t_i has d ln T = sum of (t_i / T) d ln t_i, so squares of the weighted errors of
        # the logarithms add up (propagation of uncertainty: GUM, JCGM 100:2008, section 5.1.2). The error of whole
        # networks is common to all terms: it does not average out and enters once, with weight 1.
        log_below = math.hypot(math.log(whole.low), *(seconds / total_s * math.log(low) for seconds, low, _ in parts))
        log_above = math.hypot(
            math.log(whole.high), *(seconds / total_s * math.log(high) for seconds, _, high in parts)
        )
        return Prediction(total_s, total_s * math.exp(-log_below), total_s * math.exp(log_above))

    def weight_fetch_s(self, layers: Sequence[Layer], running: Sequence[Layer] = ()) -> float:
        """Seconds to fetch the layers' weights from memory in every run; 0 where the weights of all layers in `running`
        (by default `layers`) fit into the caches."""
        fit = self.profile.fit
        if fit is None or sum(layer.weight_bytes for layer in running or layers) <= fit.cached_bytes:
            return 0.0
        return fit.uncached_s_per_byte * sum(layer.weight_bytes for layer in layers)

    def _operator_times(self, layers: Sequence[Layer], running: Sequence[Layer]) -> list[tuple[float, float, float]]:
        """Per operator: seconds, and the low and high factor of its interval."""
        separate = self._separate(running or layers) if self._is_fused else {}
        return [part for layer in layers for part in self._times_of(separate.get(layer.name, layer.work))]

    def _separate(self, layers: Sequence[Layer]) -> Mapping[str, list[OperatorWork]]:
        """`separate_by_layer`, computed once for the layers of one graph."""
        if self._fused_layers is not layers:
            self._fused_layers, self._separate_works = layers, separate_by_layer(layers)
        return self._separate_works

    def _times_of(self, works: Sequence[OperatorWork]) -> list[tuple[float, float, float]]:
        """Per operator of one layer: seconds, and the low and high factor of its interval."""
        parts = []
        has_main = False
        for work in works:
            is_unfused = self.profile.fit is not None or not (has_main and work.operator == "elementwise")
            roofline = roofline_s if is_unfused else arithmetic_s
            parts.append(
                self._time_by_fit(work) or (roofline(work, self.profile), self._rate_error.low, self._rate_error.high)
            )
            has_main = has_main or work.operator in FUSIBLE_MAIN  # operators after it find its output in the cache
        return parts

    def _time_by_fit(self, work: OperatorWork) -> tuple[float, float, float] | None:
        """Seconds and interval factors by the fit of the family, or else of the class; None where the profile has
        neither."""
        fit = self.profile.fit
        if fit is None or work.operator == "input":
            return None
        predictor, sizes = self._predictors.get(work.family), work.sizes
        if predictor is None:
            # An operator that computes and moves nothing (a reshape) takes no time and has no error.
            if not (work.flops or work.bytes_moved):
                return 0.0, 1.0, 1.0
            predictor, sizes = self._predictors.get(f"class:{work.operator}"), (work.flops, work.bytes_moved)
        if predictor is None:
            return None
        return predictor.seconds(sizes) * fit.correction, min(predictor.low, 1.0), max(predictor.high, 1.0)


def predict_intervals(graph: LayerGraph, profile: DeviceProfile, model_format: str = "onnx") -> dict[str, Prediction]:
    """Predicted seconds with their interval, by layer, on a device with this profile.

    The cost of a run beyond its operators is added to the first layer that runs a model: on the device no other layer
    runs without that one, unless several layers have no predecessor. With an Edge TPU, USB transfers take most of that
    time.
    """
    predictor = Predictor(profile, model_format)
    run_s = profile.fit.run_s if profile.fit else 0.0
    predictions = {}
    for layer in graph.layers:
        interval = predictor.predict_sum((layer,), graph.layers)
        seconds = predictor.layer_s(layer, graph.layers) + predictor.weight_fetch_s((layer,), graph.layers)
        low_s, high_s = (
            seconds * bound_s / interval.seconds if interval.seconds else 0.0
            for bound_s in (interval.low_s, interval.high_s)
        )
        # Only the first layer that runs a model is charged with the run itself: `run_s` is 0 from then on.
        if any(work.operator != "input" for work in layer.work):
            low_s, high_s = low_s + run_s * predictor.whole_interval.low, high_s + run_s * predictor.whole_interval.high
            seconds, run_s = seconds + run_s, 0.0
        predictions[layer.name] = Prediction(seconds, low_s, high_s)
    return predictions


def as_agents_run(profile: DeviceProfile, graph: LayerGraph, model_format: str = "onnx") -> DeviceProfile:
    """The profile with the fit of the engine and the options that agents will choose for this model by measurement;
    unchanged where it has none but the first.

    Agents measure the candidates on the whole model, fewest threads first, and change for a gain above a margin.
    """
    is_tflite = model_format == "tflite"
    fits = [fit for fit in profile.tuned if fit.runtime.startswith(TFLITE_RUNTIMES) == is_tflite]
    candidates = [msgspec.structs.replace(profile, fit=fit) for fit in fits]
    # Figures of onnxruntime say little about LiteRT: they predict only where nothing else does.
    best, best_s = profile, math.inf
    for candidate in candidates if is_tflite else [profile, *candidates]:
        fit = candidate.fit
        whole_s = Predictor(candidate, model_format).predict_sum(graph.layers).seconds + (fit.run_s if fit else 0.0)
        margin = SPINNING_MARGIN if candidate.priced_setup.spinning else TUNING_MARGIN
        if whole_s < best_s * (1.0 - margin):
            best, best_s = candidate, whole_s
    return best


def as_servers_run(profile: DeviceProfile, model_format: str = "onnx") -> DeviceProfile:
    """The profile with the fit of what an offload server runs: slices as they were cut, on one thread."""
    if model_format != "tflite":
        return profile
    fits = (fit for fit in profile.tuned if fit.runtime.startswith(TFLITE_RUNTIMES))
    fit = next(fits, profile.fit)
    return msgspec.structs.replace(profile, fit=fit)


def predicted_basis(graph: LayerGraph, profile: DeviceProfile, model_format: str = "onnx") -> str:
    """Text for `Costs.basis` of predicted seconds: the profile's name, its engine options and the whole model's
    interval."""
    predictor = Predictor(profile, model_format)
    whole = predictor.predict_sum(graph.layers)
    named = f"predicted: device profile {profile.name}, {setup_text(profile)}"
    if not whole.seconds:
        return named
    low, high = whole.low_s / whole.seconds, whole.high_s / whole.seconds
    interval_text = f"actual times are {low:.2f} to {high:.2f} times that, {predictor.whole_interval.coverage:.0%} sure"
    caveat = "; its figures are not LiteRT's" if predictor.whole_interval is OTHER_RUNTIME else ""
    return f"{named} ({interval_text}{caveat})"


def setup_text(profile: DeviceProfile) -> str:
    """The engine options that a profile's predictions are for, in words for operators."""
    setup = profile.priced_setup
    threads = f"{setup.threads} thread{'s' * (setup.threads != 1)}"
    if profile.fit is not None and profile.fit.runtime.startswith(TFLITE_RUNTIMES):
        return threads  # what is fused there is fused in the file
    if setup.optimise == "fast":
        return f"{threads}{', spinning' * setup.spinning}, fused"
    return f"{threads}, unfused{'' if profile.tuned else ': agents choose faster options where there are any'}"


def predict_joules(seconds: dict[str, float], profile: DeviceProfile) -> dict[str, float]:
    """Joules by layer: the board's active watts for as long as the layer takes."""
    return {name: profile.active_watts.value * layer_seconds for name, layer_seconds in seconds.items()}


def roofline_s(work: OperatorWork, profile: DeviceProfile) -> float:
    """Seconds of one operator that is not fused into another: the roofline."""
    overhead_s = profile.operator_overhead_s.value
    arithmetic, memory = arithmetic_s(work, profile), memory_s(work, profile)
    if work.operator == "input":  # decoding, then resizing and scaling: no overlap
        return arithmetic + memory + overhead_s
    # Roofline model (Williams, Waterman, Patterson, CACM 52, 2009): arithmetic and memory traffic overlap, so the
    # slower of the two bounds the operator.
    return max(arithmetic, memory) + overhead_s


def arithmetic_s(work: OperatorWork, profile: DeviceProfile) -> float:
    """Seconds of the operator's arithmetic alone, at the rate of its class."""
    rates, factor = profile.rates, profile.runtime_factor.value
    if work.operator == "input":
        return work.flops / rates.jpeg_pixels_per_s.value
    if work.operator == "conv":
        return work.flops * factor / _rate(work, rates.dense_conv_flops_per_s, rates.dense_conv_int8_flops_per_s)
    if work.operator == "depthwise":
        return work.flops / _rate(work, rates.depthwise_flops_per_s, rates.depthwise_int8_flops_per_s)
    if work.operator == "gemm":
        return work.flops * factor / _rate(work, rates.gemm_flops_per_s, rates.gemm_int8_flops_per_s)
    return work.flops / rates.elementwise_per_s.value


def _rate(work: OperatorWork, in_float: Figure, in_int8: Figure | None) -> float:
    """The rate of a class of operators by what this one multiplies."""
    return in_int8.value if work.is_int8 and in_int8 is not None else in_float.value


def memory_s(work: OperatorWork, profile: DeviceProfile) -> float:
    """Seconds to move the operator's bytes."""
    return work.bytes_moved / profile.rates.memory_bytes_per_s.value
