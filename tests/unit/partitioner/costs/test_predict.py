"""Predicted seconds: a roofline per operator, by the rates of its class."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from edgesplit.device_profile import DeviceProfile, list_profiles, load_profile
from edgesplit_partitioner.costs.predict import Predictor, predict_intervals, predict_joules, roofline_s
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, OperatorClass, OperatorWork, Tensor

PI = load_profile("raspberrypi4")


def layer(*works: OperatorWork, name: str = "layer") -> Layer:
    """A layer of these operators that reads x and writes y."""
    return Layer(name, tuple(range(len(works))), ("x",), ("y",), (), 0, works)


def graph(*layers: Layer) -> LayerGraph:
    """Layers side by side."""
    tensors = {name: Tensor(name, "FP32", (1,), 4) for name in ("x", "y")}
    return LayerGraph(layers, tensors, ("x",), ("y",))


def without_overhead(profile: DeviceProfile) -> DeviceProfile:
    """The profile with an overhead too small to be seen."""
    overhead = msgspec.structs.replace(profile.operator_overhead_s, value=1e-18)
    return msgspec.structs.replace(profile, operator_overhead_s=overhead)


def test_a_dense_convolution_is_compute_bound() -> None:
    """It takes its operations by the dense rate, slowed by the runtime's factor."""
    expected = 1e9 * PI.runtime_factor.value / PI.rates.dense_conv_flops_per_s.value

    assert roofline_s(OperatorWork("conv", 1e9, 1e6), PI) == pytest.approx(expected + PI.operator_overhead_s.value)


def test_a_matrix_product_of_one_row_is_memory_bound() -> None:
    """AlexNet's fc6 takes as long as its 151 MB take to be read."""
    fc6 = OperatorWork("gemm", 2 * 9216 * 4096, 4.0 * 9216 * 4096)

    assert roofline_s(fc6, without_overhead(PI)) == pytest.approx(fc6.bytes_moved / PI.rates.memory_bytes_per_s.value)


@pytest.mark.parametrize("name", list_profiles())
def test_depthwise_takes_longer_than_dense_for_the_same_operations(name: str) -> None:
    """The same number of operations costs several times more in a depthwise convolution."""
    profile = load_profile(name)

    assert roofline_s(OperatorWork("depthwise", 1e9, 0), profile) > 4 * roofline_s(
        OperatorWork("conv", 1e9, 0), profile
    )


def test_a_fused_activation_costs_neither_overhead_nor_memory() -> None:
    """An activation behind a convolution is cheaper inside its layer than in one of its own."""
    conv, relu = OperatorWork("conv", 1e7, 1e6), OperatorWork("elementwise", 1e6, 8e6)
    apart_s = Predictor(PI).layer_s(layer(conv)) + Predictor(PI).layer_s(layer(relu))
    together_s = Predictor(PI).layer_s(layer(conv, relu))

    assert Predictor(PI).layer_s(layer(conv)) < together_s < apart_s - PI.operator_overhead_s.value


def test_an_addition_before_the_convolution_is_not_fused() -> None:
    """Only what follows the main operator works in the cache."""
    add, conv = OperatorWork("elementwise", 1e6, 8e6), OperatorWork("conv", 1e7, 1e6)

    assert Predictor(PI).layer_s(layer(add, conv)) == pytest.approx(roofline_s(add, PI) + roofline_s(conv, PI))


def test_the_input_layer_is_decoding_plus_resizing() -> None:
    """Decoding goes by pixels and resizing by bytes, one after the other."""
    expected = 307_200 / PI.rates.jpeg_pixels_per_s.value + 1e6 / PI.rates.memory_bytes_per_s.value

    assert roofline_s(OperatorWork("input", 307_200, 1e6), without_overhead(PI)) == pytest.approx(expected)


@pytest.mark.parametrize("operator", ["conv", "depthwise", "gemm", "elementwise", "memory", "input"])
def test_more_work_never_takes_less_time(operator: OperatorClass) -> None:
    """Seconds grow with operations and with bytes, in every class and on every device."""
    for profile in map(load_profile, list_profiles()):
        times = [roofline_s(OperatorWork(operator, 1e6 * step, 1e6 * step), profile) for step in range(5)]
        assert times == sorted(times) and times[0] == pytest.approx(profile.operator_overhead_s.value)


def test_every_layer_is_predicted_and_costs_energy() -> None:
    """Each layer has seconds, and joules are the board's active watts for as long."""
    predicted = predict_intervals(graph(layer(OperatorWork("conv", 1e9, 1e6), name="a"), layer(name="b")), PI)
    seconds = {name: prediction.seconds for name, prediction in predicted.items()}
    joules = predict_joules(seconds, PI)

    assert list(seconds) == ["a", "b"] and seconds["b"] == 0.0
    assert joules["a"] == pytest.approx(seconds["a"] * PI.active_watts.value)


RESNET50 = (OperatorWork("conv", 8.18e9, 0.0),)
MOBILENET_V1 = (OperatorWork("conv", 1.103e9, 0.0), OperatorWork("depthwise", 0.0348e9, 0.0))
MOBILENET_V2 = (OperatorWork("conv", 0.560e9, 0.0), OperatorWork("depthwise", 0.0414e9, 0.0))
NCNN_MS = {
    "raspberrypi3b+": ((RESNET50, 587), (MOBILENET_V1, 108.7), (MOBILENET_V2, 111.7)),
    "raspberrypi4": ((RESNET50, 263), (MOBILENET_V1, 61.2), (MOBILENET_V2, 61.9)),
    "jetson-nano": ((RESNET50, 204), (MOBILENET_V1, 42.1), (MOBILENET_V2, 33.8)),
}
"""Networks reduced to their two kinds of convolution, and ncnn's published times, 4 threads."""


@pytest.mark.parametrize("name", list(NCNN_MS))
def test_shipped_profiles_reproduce_the_published_times(name: str) -> None:
    """With the runtime's factor out, each profile is within 35 % of the benchmark table it was derived from."""
    profile = load_profile(name)
    as_published = msgspec.structs.replace(
        profile, runtime_factor=msgspec.structs.replace(profile.runtime_factor, value=1.0)
    )
    for works, published_ms in NCNN_MS[name]:
        assert Predictor(as_published).layer_s(layer(*works)) * 1e3 == pytest.approx(published_ms, rel=0.35)


NCNN_GAIN = {
    "raspberrypi3b+": ((RESNET50, 587 / 392), (MOBILENET_V1, 108.7 / 67.0)),
    "raspberrypi4": ((RESNET50, 263 / 197), (MOBILENET_V1, 61.2 / 34.4)),
    "raspberrypi5": ((RESNET50, 46.2 / 40.8), (MOBILENET_V1, 9.0 / 8.7)),
    "jetson-nano": ((RESNET50, 204 / 159), (MOBILENET_V1, 42.1 / 30.9)),
    "jetson-orin-nano": ((RESNET50, 39.3 / 29.9), (MOBILENET_V1, 7.5 / 6.4)),
}
"""What ncnn gains by int8, in published times."""


@pytest.mark.parametrize("name", list(NCNN_GAIN))
def test_int8_gains_what_was_published_for_the_board(name: str) -> None:
    """With the runtime's factor out, the predicted gain of int8 is within 10 % of the table it was derived from."""
    profile = load_profile(name)
    as_published = Predictor(
        msgspec.structs.replace(profile, runtime_factor=msgspec.structs.replace(profile.runtime_factor, value=1.0))
    )
    for works, gain in NCNN_GAIN[name]:
        in_int8 = layer(*(replace(work, is_int8=True) for work in works))
        assert as_published.layer_s(layer(*works)) / as_published.layer_s(in_int8) == pytest.approx(gain, rel=0.1)


@pytest.mark.parametrize("kind", ["conv", "depthwise", "gemm"])
def test_without_a_rate_for_integers_they_are_priced_as_float(kind: OperatorClass) -> None:
    """A profile that says nothing about int8 promises no gain."""
    work = OperatorWork(kind, 1e9, 1e3)
    profile = load_profile("generic-x86")
    assert roofline_s(replace(work, is_int8=True), profile) == roofline_s(work, profile)
