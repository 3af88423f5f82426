"""A model's costs on one device class and this machine's cloud: what was measured and what was predicted, as one table.

Pure: the measuring is measure.py's, the predicting predict.py's, the planning planner.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from edgesplit.device_profile import DeviceProfile
from edgesplit.errors import UsageError
from edgesplit.input_spec import FRAME
from edgesplit_partitioner import edgetpu
from edgesplit_partitioner.costs.model import CodecCost, Costs, Factors, LayerCost, TensorCost, check_costs
from edgesplit_partitioner.costs.predict import (
    Prediction,
    Predictor,
    predict_intervals,
    predict_joules,
    predicted_basis,
)
from edgesplit_partitioner.ir.graph import Layer, LayerGraph

DEVICE = "device"
CLOUD = "cloud"


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
    """Costs on the tiers `device` and `cloud`.

    `cloud_s`: measured seconds by layer. `tensors`: from `measure_samples`; one left out travels raw at its declared
    size. `device_s`: measured on such a device; predicted from the profile where it is not given. `basis`: overrides
    what the costs say of where each tier's seconds come from. `model_format`: of the model file; profiles of
    onnxruntime say little of TFLite, and the costs' intervals then say so.
    """
    missing = [layer.name for layer in graph.layers if layer.name not in cloud_s]
    if missing:
        raise UsageError(f"no cloud seconds for {len(missing)} layers, {missing[0]!r} among them: measure them first")
    runs = edgetpu.runs_on(profile, graph, model_format)
    predicted = predict_intervals(graph, runs, model_format)
    on_device_s = {**{name: one.seconds for name, one in predicted.items()}, **(device_s or {})}
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
            between={} if device_s else {DEVICE: _between(predicted[layer.name])},
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
        raw_inputs=tuple(sorted(graph.raw)),
        device_class=profile.name,
        basis=_basis(graph, profile, device_s is not None, model_format) | dict(basis or {}),
        intervals={} if device_s else {DEVICE: _factors(runs, model_format)},
    )
    check_costs(costs)
    return costs


def for_device(costs: Costs, graph: LayerGraph, profile: DeviceProfile, model_format: str = "onnx") -> Costs:
    """Costs of the same model for another device: what the last tier and the tensors were measured at stays."""
    here = costs.tiers[-1]
    tensors = {**costs.inputs, **{name: cost for layer in costs.layers for name, cost in layer.writes.items()}}
    measured = {name: _measured_at(here, cost) for name, cost in tensors.items()}
    basis = {CLOUD: costs.basis[here]} if here in costs.basis else {}
    return build_costs(
        costs.model,
        graph,
        profile=profile,
        cloud_s={layer.name: layer.seconds[here] for layer in costs.layers},
        tensors=measured,
        frame_bytes=tensors[FRAME].bytes if FRAME in tensors else 0,
        basis=basis,
        model_format=model_format,
    )


def _measured_at(tier: str, cost: TensorCost) -> TensorCost:
    """The tensor's costs without what was scaled from that tier's for others."""
    codecs = {
        name: msgspec.structs.replace(
            one,
            encode_s={CLOUD: one.encode_s[tier]} if tier in one.encode_s else {},
            decode_s={CLOUD: one.decode_s[tier]} if tier in one.decode_s else {},
        )
        for name, one in cost.codecs.items()
    }
    return msgspec.structs.replace(cost, codecs=codecs)


def with_tier(costs: Costs, graph: LayerGraph, name: str, profile: DeviceProfile, model_format: str = "onnx") -> Costs:
    """The costs with one more tier before the last, its seconds predicted from a device profile.

    A gateway is no battery: its joules are nobody's objective and are left out.
    """
    if name in costs.tiers or not name:
        raise UsageError(f"the tier {name!r} is there already: the costs have {', '.join(costs.tiers)}")
    runs = edgetpu.runs_on(profile, graph, model_format)
    predicted = predict_intervals(graph, runs, model_format)
    slower = profile.zstd_slowdown.value
    here = costs.tiers[-1]

    def scaled(by_tier: Mapping[str, float]) -> dict[str, float]:
        return {**by_tier, name: by_tier[here] * slower} if here in by_tier else dict(by_tier)

    def sized(cost: TensorCost) -> TensorCost:
        codecs = {
            codec: msgspec.structs.replace(one, encode_s=scaled(one.encode_s), decode_s=scaled(one.decode_s))
            for codec, one in cost.codecs.items()
        }
        return msgspec.structs.replace(cost, codecs=codecs)

    layers = tuple(
        msgspec.structs.replace(
            layer,
            seconds={**layer.seconds, name: predicted[layer.name].seconds},
            between={**layer.between, name: _between(predicted[layer.name])},
            writes={tensor: sized(cost) for tensor, cost in layer.writes.items()},
        )
        for layer in costs.layers
    )
    extended = msgspec.structs.replace(
        costs,
        tiers=(*costs.tiers[:-1], name, here),
        layers=layers,
        inputs={tensor: sized(cost) for tensor, cost in costs.inputs.items()},
        basis={**costs.basis, name: predicted_basis(graph, runs, model_format)},
        intervals={**costs.intervals, name: _factors(runs, model_format)},
    )
    check_costs(extended)
    return extended


def main_operator(layer: Layer) -> str:
    """Class of the operator with the most to compute, or to move where nothing is computed."""
    main = max(layer.work, key=lambda work: (work.flops, work.bytes_moved), default=None)
    return main.operator if main else ""


def _between(one: Prediction) -> tuple[float, float]:
    return min(one.low_s, one.seconds), max(one.high_s, one.seconds)


def _factors(profile: DeviceProfile, model_format: str) -> Factors:
    whole = Predictor(profile, model_format).whole
    return Factors(low=whole.low, high=whole.high, coverage=whole.coverage)


def _basis(graph: LayerGraph, profile: DeviceProfile, measured: bool, model_format: str) -> dict[str, str]:
    runs = edgetpu.runs_on(profile, graph, model_format)
    device = f"measured: on a {profile.name}" if measured else predicted_basis(graph, runs, model_format)
    device += edgetpu.note(profile, graph, model_format)
    return {DEVICE: device, CLOUD: "measured: on this machine"}


def _tensor_cost(
    graph: LayerGraph, name: str, tensors: Mapping[str, TensorCost], frame_bytes: int, profile: DeviceProfile
) -> TensorCost:
    """The tensor's sizes, with the device's codec seconds scaled from this machine's."""
    measured = tensors.get(name)
    if measured is None:
        return TensorCost(bytes=frame_bytes if name == FRAME and frame_bytes else graph.tensors[name].bytes)
    slower = profile.zstd_slowdown.value
    codecs = {
        codec: CodecCost(
            bytes=cost.bytes,
            encode_s=_with_device(cost.encode_s, slower),
            decode_s=_with_device(cost.decode_s, slower),
            loss=cost.loss,
            confirmed_loss=cost.confirmed_loss,
        )
        for codec, cost in measured.codecs.items()
    }
    return TensorCost(bytes=frame_bytes if name == FRAME and frame_bytes else measured.bytes, codecs=codecs)


def _with_device(seconds: Mapping[str, float], slower: float) -> dict[str, float]:
    """The device's own seconds where they were measured, else this machine's times the profile's factor."""
    scaled = {DEVICE: seconds[CLOUD] * slower} if CLOUD in seconds else {}
    return {**scaled, **seconds}
