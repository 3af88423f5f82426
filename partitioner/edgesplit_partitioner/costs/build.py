"""The cost table of a model on a device, further tiers and this machine as the cloud: measured and predicted figures in
one `Costs`.

Pure functions. Measuring is in `profiling`, predicting in `costs.predict`, planning in `planner`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from edgesplit.device_profile import DeviceProfile
from edgesplit.errors import UsageError
from edgesplit.input_spec import FRAME
from edgesplit_partitioner import edgetpu
from edgesplit_partitioner.costs.model import Costs, LayerCost, PictureInput, RelativeInterval, TensorCost, check_costs
from edgesplit_partitioner.costs.predict import (
    Prediction,
    Predictor,
    as_agents_run,
    as_servers_run,
    predict_intervals,
    predict_joules,
    predicted_basis,
)
from edgesplit_partitioner.ir.graph import Layer, LayerGraph
from edgesplit_partitioner.ir.pictures import jpeg_bytes, picture_spec, spec_text

DEVICE = "device"
"""Name of the tier that predicted or measured device seconds belong to."""
CLOUD = "cloud"
"""Name of the last tier; its seconds are measured on this machine."""


def build_costs(
    model_name: str,
    graph: LayerGraph,
    *,
    profile: DeviceProfile,
    cloud_s: Mapping[str, float],
    tensors: Mapping[str, TensorCost],
    frame_bytes: int = 0,
    device_s: Mapping[str, float] | None = None,
    basis: Mapping[str, str] | None = None,
    model_format: str = "onnx",
) -> Costs:
    """Costs on the tiers `device` and `cloud`; UsageError where a layer has no cloud seconds.

    `cloud_s`: measured seconds by layer. `tensors`: from `measure_samples`; a tensor left out travels raw at its
    declared size. `device_s`: measured on such a device; predicted from the profile where it is not given. `basis`:
    overrides what the costs state as the source of each tier's seconds. `model_format`: of the model file; profiles of
    onnxruntime predict TFLite models poorly, and the costs' intervals are wider then.
    """
    missing = [layer.name for layer in graph.layers if layer.name not in cloud_s]
    if missing:
        raise UsageError(f"no cloud seconds for {len(missing)} layers, {missing[0]!r} among them: measure them first")
    effective_profile = _device_profile(profile, graph, model_format)
    predicted = predict_intervals(graph, effective_profile, model_format)
    on_device_s = {**{name: prediction.seconds for name, prediction in predicted.items()}, **(device_s or {})}
    joules = predict_joules(on_device_s, profile)
    sized = {name: _tensor_cost(graph, name, tensors, frame_bytes, profile) for name in graph.tensors}
    layers = tuple(
        LayerCost(
            name=layer.name,
            reads=layer.reads,
            writes={name: sized[name] for name in layer.writes},
            seconds={DEVICE: on_device_s[layer.name], CLOUD: cloud_s[layer.name]},
            joules={DEVICE: joules[layer.name]},
            weight_bytes=layer.weight_bytes,
            between={} if device_s else {DEVICE: _seconds_range(predicted[layer.name])},
            operator=main_operator(layer),
        )
        for layer in graph.layers
    )
    costs = Costs(
        model=model_name,
        tiers=(DEVICE, CLOUD),
        inputs={name: sized[name] for name in graph.inputs},
        outputs=graph.outputs,
        layers=layers,
        idle_watts={DEVICE: profile.idle_watts.value},
        raw_inputs=tuple(sorted(graph.raw_tensors)),
        pictures=_pictures(graph),
        device_class=profile.name,
        basis=_basis(graph, profile, device_s is not None, model_format) | dict(basis or {}),
        intervals={} if device_s else {DEVICE: _whole_model_factors(effective_profile, model_format)},
    )
    check_costs(costs)
    return costs


def costs_for_device(costs: Costs, graph: LayerGraph, profile: DeviceProfile, model_format: str = "onnx") -> Costs:
    """Costs of the same model for another device: the measurements of the last tier and of the tensors are kept, the
    device's figures are predicted from `profile`."""
    last_tier, tensors = costs.tiers[-1], costs.tensors

    def measured(seconds: Mapping[str, float]) -> dict[str, float]:
        # Seconds on other tiers were scaled from those of the last one, by another device's profile.
        return {CLOUD: seconds[last_tier]} if last_tier in seconds else {}

    return build_costs(
        costs.model,
        graph,
        profile=profile,
        cloud_s={layer.name: layer.seconds[last_tier] for layer in costs.layers},
        tensors={name: cost.with_codec_seconds(measured) for name, cost in tensors.items()},
        frame_bytes=tensors[FRAME].bytes if FRAME in tensors else 0,
        basis={CLOUD: costs.basis[last_tier]} if last_tier in costs.basis else {},
        model_format=model_format,
    )


def with_tier(costs: Costs, graph: LayerGraph, name: str, profile: DeviceProfile, model_format: str = "onnx") -> Costs:
    """The costs with one more tier before the last, its seconds predicted from a device profile; UsageError where the
    name is empty or taken.

    A gateway has mains power, so no objective counts its joules and they are left out. Its offload server runs slices
    as they were cut, on one thread, so the profile's tuned fits do not apply.
    """
    if name in costs.tiers or not name:
        raise UsageError(f"the tier {name!r} is there already: the costs have {', '.join(costs.tiers)}")
    effective_profile = as_servers_run(edgetpu.effective_profile(profile, graph, model_format), model_format)
    predicted = predict_intervals(graph, effective_profile, model_format)
    slowdown = profile.zstd_slowdown.value
    last_tier = costs.tiers[-1]

    def scaled(by_tier: Mapping[str, float]) -> dict[str, float]:
        return {**by_tier, name: by_tier[last_tier] * slowdown} if last_tier in by_tier else dict(by_tier)

    sized = costs.with_tensors(lambda _, tensor: tensor.with_codec_seconds(scaled))
    layers = tuple(
        msgspec.structs.replace(
            layer,
            seconds={**layer.seconds, name: predicted[layer.name].seconds},
            between={**layer.between, name: _seconds_range(predicted[layer.name])},
        )
        for layer in sized.layers
    )
    extended = msgspec.structs.replace(
        sized,
        tiers=(*costs.tiers[:-1], name, last_tier),
        layers=layers,
        basis={**costs.basis, name: predicted_basis(graph, effective_profile, model_format)},
        intervals={**costs.intervals, name: _whole_model_factors(effective_profile, model_format)},
    )
    check_costs(extended)
    return extended


def _pictures(graph: LayerGraph) -> dict[str, PictureInput]:
    """Inputs that look like pictures; none where a frame is decoded by the graph's own input layer."""
    if FRAME in graph.inputs:
        return {}
    specs = {name: picture_spec(graph.tensors[name]) for name in graph.inputs}
    return {
        name: PictureInput(jpeg_bytes=jpeg_bytes(spec), input_spec=spec_text(spec))
        for name, spec in specs.items()
        if spec is not None
    }


def main_operator(layer: Layer) -> str:
    """Class of the operator with the most FLOPs, or the most bytes moved where nothing is computed; empty for a layer
    without operators."""
    main = max(layer.work, key=lambda work: (work.flops, work.bytes_moved), default=None)
    return main.operator if main else ""


def _seconds_range(prediction: Prediction) -> tuple[float, float]:
    return min(prediction.low_s, prediction.seconds), max(prediction.high_s, prediction.seconds)


def _whole_model_factors(profile: DeviceProfile, model_format: str) -> RelativeInterval:
    whole = Predictor(profile, model_format).whole_interval
    return RelativeInterval(low=whole.low, high=whole.high, coverage=whole.coverage)


def _device_profile(profile: DeviceProfile, graph: LayerGraph, model_format: str) -> DeviceProfile:
    """The profile that predicts what an agent of this class takes for the model."""
    return as_agents_run(edgetpu.effective_profile(profile, graph, model_format), graph, model_format)


def _basis(graph: LayerGraph, profile: DeviceProfile, measured: bool, model_format: str) -> dict[str, str]:
    effective_profile = _device_profile(profile, graph, model_format)
    device = f"measured: on a {profile.name}" if measured else predicted_basis(graph, effective_profile, model_format)
    device += edgetpu.compilation_note(profile, graph, model_format)
    return {DEVICE: device, CLOUD: "measured: on this machine"}


def _tensor_cost(
    graph: LayerGraph, name: str, tensors: Mapping[str, TensorCost], frame_bytes: int, profile: DeviceProfile
) -> TensorCost:
    """The tensor's sizes, with the device's codec seconds scaled from this machine's."""

    def with_device(seconds: Mapping[str, float]) -> dict[str, float]:
        """With the device's own seconds where they were measured, else this machine's times the profile's slowdown."""
        scaled = {DEVICE: seconds[CLOUD] * profile.zstd_slowdown.value} if CLOUD in seconds else {}
        return {**scaled, **seconds}

    cost = tensors.get(name, TensorCost(bytes=graph.tensors[name].bytes)).with_codec_seconds(with_device)
    return msgspec.structs.replace(cost, bytes=frame_bytes) if name == FRAME and frame_bytes else cost
