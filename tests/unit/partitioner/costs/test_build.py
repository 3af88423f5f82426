"""The costs table: complete for every layer and tensor, predicted or measured, and written as JSON without loss."""

from __future__ import annotations

import msgspec
import pytest

from edgesplit.device_profile import load_profile
from edgesplit.errors import UsageError
from edgesplit_partitioner.costs.build import build_costs, costs_for_device, main_operator
from edgesplit_partitioner.costs.model import CodecCost, Costs, TensorCost, load_costs
from edgesplit_partitioner.costs.predict import predict_intervals
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, OperatorWork, Tensor

PI = load_profile("raspberrypi4")
GRAPH = LayerGraph(
    layers=(
        Layer("input", (), ("frame",), ("x",), (), 0, (OperatorWork("input", 1e4, 1e5),)),
        Layer(
            "conv",
            (0, 1),
            ("x",),
            ("t",),
            ("w",),
            400,
            (OperatorWork("elementwise", 9e6, 8.0), OperatorWork("conv", 1e8, 1e5)),
        ),
        Layer("fc", (2,), ("t",), ("y",), (), 0, (OperatorWork("gemm", 1e4, 1e4),)),
    ),
    tensors={
        "frame": Tensor("frame", "UINT8", (-1,), 9_000),
        "x": Tensor("x", "FP32", (1, 3, 8, 8), 768),
        "t": Tensor("t", "FP32", (1, 100), 400),
        "y": Tensor("y", "FP32", (1, 10), 40),
    },
    inputs=("frame",),
    outputs=("y",),
    raw_tensors=frozenset({"frame", "x"}),
)
CLOUD_S = {"input": 0.001, "conv": 0.002, "fc": 0.0005}
TENSORS = {
    "frame": TensorCost(bytes=7_000),
    "t": TensorCost(
        bytes=400, codecs={"raw+zstd": CodecCost(bytes=100, encode_s={"cloud": 1e-5}, decode_s={"cloud": 2e-6})}
    ),
}


def costs(**changes: object) -> Costs:
    """Costs of the graph on a Raspberry Pi 4."""
    given: dict[str, object] = {"profile": PI, "cloud_s": CLOUD_S, "tensors": TENSORS, **changes}
    return build_costs("net@1", GRAPH, **given)  # type: ignore[arg-type]


def test_every_layer_has_seconds_on_both_tiers() -> None:
    """The cloud's seconds are those measured, the device's those predicted, and energy follows them."""
    made = costs()

    assert made.tiers == ("device", "cloud") and made.device_class == "raspberrypi4"
    assert {layer.name: layer.seconds["cloud"] for layer in made.layers} == CLOUD_S
    predicted = {name: prediction.seconds for name, prediction in predict_intervals(GRAPH, PI).items()}
    assert {layer.name: layer.seconds["device"] for layer in made.layers} == predicted
    for layer in made.layers:
        assert layer.joules["device"] == pytest.approx(layer.seconds["device"] * PI.active_watts.value)
    assert made.idle_watts == {"device": PI.idle_watts.value}


def test_measured_device_seconds_override_predicted_ones() -> None:
    """Layer by layer, and the basis records it."""
    made = costs(device_s={"conv": 0.5})

    assert made.layers[1].seconds["device"] == 0.5
    assert made.layers[2].seconds["device"] == predict_intervals(GRAPH, PI)["fc"].seconds
    assert made.basis["device"].startswith("measured") and costs().basis["device"].startswith("predicted")


def test_tensor_sizes_are_measured_or_else_declared() -> None:
    """Samples' sizes come first, declared sizes are the fallback, and tensors that show the raw picture are marked."""
    made = costs()

    assert made.inputs["frame"].bytes == 7_000
    assert made.layers[0].writes["x"] == TensorCost(bytes=768)
    assert made.raw == {"frame", "x"}
    assert costs(tensors={}, frame_bytes=5_000).inputs["frame"].bytes == 5_000
    assert costs(tensors={}).inputs["frame"].bytes == 9_000


def test_codec_seconds_are_scaled_to_the_device() -> None:
    """Compressing on the device takes the profile's factor longer than here."""
    codec = costs().layers[1].writes["t"].codecs["raw+zstd"]

    assert codec.bytes == 100
    assert codec.encode_s == {"cloud": 1e-5, "device": pytest.approx(1e-5 * PI.zstd_slowdown.value)}
    assert codec.decode_s["device"] == pytest.approx(2e-6 * PI.zstd_slowdown.value)


@pytest.mark.parametrize("name", ["jetson-nano", "generic-x86", "raspberrypi4"])
def test_costs_are_converted_to_another_device(name: str) -> None:
    """Measured values stay, predicted and scaled ones are computed again: the result equals costs built for that
    device."""
    other = load_profile(name)

    assert costs_for_device(costs(), GRAPH, other) == costs(profile=other)


def test_a_layer_class_is_its_heaviest_operator() -> None:
    """The operator with the most operations names the layer's class; a layer without any has none."""
    assert [layer.operator for layer in costs().layers] == ["input", "conv", "gemm"]
    assert main_operator(Layer("empty", (), (), (), (), 0, ())) == ""


def test_unmeasured_layers_are_an_error() -> None:
    """Cloud seconds for only some layers are an error that names one of the others."""
    with pytest.raises(UsageError, match="no cloud seconds for 1 layers, 'fc'"):
        costs(cloud_s={"input": 0.0, "conv": 0.0})


def test_costs_round_trip_through_their_file() -> None:
    """Costs that were built can be written as a costs file and read back the same."""
    made = costs()

    assert load_costs(msgspec.json.decode(msgspec.json.encode(made))) == made
