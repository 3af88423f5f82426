"""Seconds of each layer on a device that is not here, from its profile; each with the interval it is believed in.

A profile that was calibrated (`edgectl calibrate`) has a fit per family of operators, over their sizes. Where there is
none, a roofline per operator: the slower of its arithmetic (by the rate of its class) and its bytes (by the memory's
rate), plus the runtime's overhead. Never one FLOP/s figure: depthwise and dense convolutions differ by more than ten
times. docs/device-profiles.md shows the error of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgesplit.device_profile import DeviceProfile, Fit, Interval
from edgesplit_partitioner.costs.regression import Fitted, by_family
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, OperatorClass, Work
from edgesplit_partitioner.onnx_format.operator_features import FEATURES

FUSIBLE_MAIN: frozenset[OperatorClass] = frozenset({"conv", "depthwise", "gemm"})
"""After one of these, the layer's elementwise operators work on what is still in the cache."""
TFLITE_RUNTIMES: Final = ("libedgetpu", "LiteRT")
"""With these begins what a profile's fit names as its runtime, where it is one that runs TFLite."""
CLASS_SIZES: Final = ("elements", "elements")
"""Columns of `class:...` fits: operations and bytes."""
UNKNOWN_ERROR: Final = Interval(
    low=0.4,
    high=2.5,
    coverage=0.9,
    basis="assumption",
    source="Rates that nobody has compared with a measurement: as far apart as runtimes on one board are.",
)


OTHER_RUNTIME: Final = Interval(
    low=0.17,
    high=2.0,
    coverage=0.9,
    basis="measured",
    source="LiteRT over what onnxruntime's figures predict, of six float and int8 models, 2026: 0.16 to 1.9.",
)
"""Figures are those of onnxruntime, and the model runs on LiteRT."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds, and between what they are believed to lie (as often as the profile's intervals say, mostly 90 %)."""

    seconds: float
    low_s: float
    high_s: float


class Predictor:
    """A profile, ready to be asked often."""

    def __init__(self, profile: DeviceProfile, model_format: str = "onnx") -> None:
        self.profile = profile
        self._error = profile.error or UNKNOWN_ERROR
        self._whole = profile.fit.whole if profile.fit else self._error
        if model_format == "tflite" and not (profile.fit and profile.fit.runtime.startswith(TFLITE_RUNTIMES)):
            self._error = self._whole = OTHER_RUNTIME
        self._fits: Mapping[str, Fitted] = _by_family(profile.fit) if profile.fit else {}

    def layer_s(self, layer: Layer) -> float:
        """The sum over the layer's operators; by rates, those fused into the main one cost only their arithmetic."""
        return sum(part[0] for part in self._parts(layer))

    def together(self, layers: Sequence[Layer]) -> Prediction:
        """The sum over the layers. Errors of single operators are taken as independent, that of whole networks as
        one: squares of the intervals' logarithms are added, the former weighted with their share of the time."""
        parts = [part for layer in layers for part in self._parts(layer)]
        total_s = sum(part[0] for part in parts) + self.uncached_s(layers)
        if self.profile.fit is None or not total_s:
            return Prediction(total_s, total_s * self._error.low, total_s * self._error.high)
        whole = self._whole
        below = math.hypot(math.log(whole.low), *(seconds / total_s * math.log(low) for seconds, low, _ in parts))
        above = math.hypot(math.log(whole.high), *(seconds / total_s * math.log(high) for seconds, _, high in parts))
        return Prediction(total_s, total_s * math.exp(-below), total_s * math.exp(above))

    @property
    def whole(self) -> Interval:
        """The interval of whole networks."""
        return self._whole

    def uncached_s(self, layers: Sequence[Layer], together: Sequence[Layer] = ()) -> float:
        """What it costs to fetch the layers' weights from memory in every run, where those of all that run `together`
        (else of the layers themselves) are more than the caches keep."""
        fit = self.profile.fit
        if fit is None or sum(layer.weight_bytes for layer in together or layers) <= fit.cached_bytes:
            return 0.0
        return fit.uncached_s_per_byte * sum(layer.weight_bytes for layer in layers)

    def slice(self, layers: Sequence[Layer], tensors: int = 2) -> Prediction:
        """A slice of these layers run as one, `tensors` in and out together: what a run costs beyond its operators is
        counted, which the sum of its layers leaves out."""
        together = self.together(layers)
        if self.profile.fit is None:
            return together
        around_s = self.profile.fit.run_s + max(tensors - 2, 0) * self.profile.fit.tensor_s
        return Prediction(together.seconds + around_s, together.low_s + around_s, together.high_s + around_s)

    def _parts(self, layer: Layer) -> list[tuple[float, float, float]]:
        """Per operator: seconds, and the factors of its interval."""
        parts = []
        fused = False
        for work in layer.work:
            alone = self.profile.fit is not None or not (fused and work.operator == "elementwise")
            rated = operator_s if alone else arithmetic_s
            parts.append(
                self._fitted(work) or (rated(work, self.profile), self._error.low, self._error.high),
            )
            fused = fused or work.operator in FUSIBLE_MAIN
        return parts

    def _fitted(self, work: Work) -> tuple[float, float, float] | None:
        """Seconds and interval by the fit of the family, or else of the class; None where there is neither."""
        fit = self.profile.fit
        if fit is None or work.operator == "input":
            return None
        one, sizes = self._fits.get(work.family), work.sizes
        if one is None:
            if not (work.flops or work.bytes_moved):
                return 0.0, 1.0, 1.0
            one, sizes = self._fits.get(f"class:{work.operator}"), (work.flops, work.bytes_moved)
        if one is None:
            return None
        return one.seconds(sizes) * fit.correction, min(one.low, 1.0), max(one.high, 1.0)


def predict_layers(graph: LayerGraph, profile: DeviceProfile) -> dict[str, float]:
    """Seconds by layer on a device of this profile."""
    return {name: one.seconds for name, one in predict_intervals(graph, profile).items()}


def predict_intervals(graph: LayerGraph, profile: DeviceProfile, model_format: str = "onnx") -> dict[str, Prediction]:
    """The same with the interval of each layer.

    What a run costs beyond its operators is counted with the first layer that runs a model: on the device no other runs
    without it, unless the model has several that nothing comes before. An Edge TPU's USB takes most of the time there.
    """
    predictor = Predictor(profile, model_format)
    run_s = profile.fit.run_s if profile.fit else 0.0
    found = {}
    for layer in graph.layers:
        alone = predictor.together((layer,))
        seconds = predictor.layer_s(layer) + predictor.uncached_s((layer,), graph.layers)
        low_s, high_s = (
            seconds * end_s / alone.seconds if alone.seconds else 0.0 for end_s in (alone.low_s, alone.high_s)
        )
        if any(work.operator != "input" for work in layer.work):
            low_s, high_s = low_s + run_s * predictor.whole.low, high_s + run_s * predictor.whole.high
            seconds, run_s = seconds + run_s, 0.0
        found[layer.name] = Prediction(seconds, low_s, high_s)
    return found


def predicted_basis(graph: LayerGraph, profile: DeviceProfile, model_format: str = "onnx") -> str:
    """What costs say of predicted seconds: by which profile, and how sure the whole model's are."""
    predictor = Predictor(profile, model_format)
    whole = predictor.together(graph.layers)
    if not whole.seconds:
        return f"predicted: device profile {profile.name}"
    low, high = whole.low_s / whole.seconds, whole.high_s / whole.seconds
    sure = f"the truth is {low:.2f} to {high:.2f} times that, {predictor.whole.coverage:.0%} sure"
    other = "; its figures are not LiteRT's" if predictor.whole is OTHER_RUNTIME else ""
    return f"predicted: device profile {profile.name} ({sure}{other})"


def predict_joules(seconds: dict[str, float], profile: DeviceProfile) -> dict[str, float]:
    """Joules by layer: the board's active watts for as long as the layer takes."""
    return {name: profile.active_watts.value * layer_seconds for name, layer_seconds in seconds.items()}


def layer_s(layer: Layer, profile: DeviceProfile) -> float:
    """Seconds of one layer."""
    return Predictor(profile).layer_s(layer)


def _by_family(fit: Fit) -> Mapping[str, Fitted]:
    names = {**FEATURES, **{one.family: CLASS_SIZES for one in fit.operators if one.family.startswith("class:")}}
    return by_family(fit.operators, names)


def operator_s(work: Work, profile: DeviceProfile) -> float:
    """One operator that is not fused into another, by rates."""
    overhead_s = profile.operator_overhead_s.value
    arithmetic, memory = arithmetic_s(work, profile), memory_s(work, profile)
    if work.operator == "input":  # decoding, then resizing and scaling: one after the other
        return arithmetic + memory + overhead_s
    return max(arithmetic, memory) + overhead_s


def arithmetic_s(work: Work, profile: DeviceProfile) -> float:
    """Seconds of its operations alone, by the rate of its class."""
    rates, factor = profile.rates, profile.runtime_factor.value
    if work.operator == "input":
        return work.flops / rates.jpeg_pixels_per_s.value
    if work.operator == "conv":
        return work.flops * factor / rates.dense_conv_flops_per_s.value
    if work.operator == "depthwise":
        return work.flops / rates.depthwise_flops_per_s.value
    if work.operator == "gemm":
        return work.flops * factor / rates.gemm_flops_per_s.value
    return work.flops / rates.elementwise_per_s.value


def memory_s(work: Work, profile: DeviceProfile) -> float:
    """Seconds to move its bytes."""
    return work.bytes_moved / profile.rates.memory_bytes_per_s.value
