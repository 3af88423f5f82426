"""Prices of the engine options that agents choose: what is fused costs nothing, and the faster options are planned."""

from __future__ import annotations

import math

import msgspec
import pytest

from edgesplit.device_profile import CalibrationFit, DeviceProfile, Interval, OperatorFit, load_profile
from edgesplit.runtime.options import EngineOptions
from edgesplit_partitioner import Costs, plan
from edgesplit_partitioner.costs.build import build_costs, with_tier
from edgesplit_partitioner.costs.fused_operators import separate_by_layer, separate_operators
from edgesplit_partitioner.costs.predict import Predictor, as_agents_run, predicted_basis
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, OperatorClass, OperatorWork, Tensor

BASE = load_profile("generic-x86")
FUSED = EngineOptions(threads=1, optimise="fast", merge=True)
WHOLE = Interval(low=0.9, high=1.1, coverage=0.9, basis="measured", source="made up for a test")


def work(family: str, operator: OperatorClass = "conv") -> OperatorWork:
    return OperatorWork(operator, 1.0, 1.0, family, ())


def graph_of(*works: tuple[OperatorWork, ...]) -> LayerGraph:
    layers = tuple(Layer(f"l{n}", (n,), (f"t{n}",), (f"t{n + 1}",), (), 0, own) for n, own in enumerate(works))
    tensors = {f"t{n}": Tensor(f"t{n}", "FP32", (1000,), 4000) for n in range(len(works) + 1)}
    return LayerGraph(layers, tensors, ("t0",), (f"t{len(works)}",))


def fit(setup: EngineOptions | None, runtime: str = "onnxruntime 1", **seconds: float) -> CalibrationFit:
    """A fit in which each family takes so many seconds."""
    operators = tuple(
        OperatorFit(
            family=family, centre=(), scale=(), lowest=(), highest=(), trend=(math.log(value),), low=0.9, high=1.1
        )
        for family, value in seconds.items()
    )
    return CalibrationFit(
        runtime=runtime, machine="made up", taken="2026-11-23", run_s=0.0, tensor_s=0.0, correction=1.0,
        cached_bytes=1e9, uncached_s_per_byte=0.0, whole=WHOLE, operators=operators, setup=setup,
    )  # fmt: skip


def calibrated(exact: CalibrationFit, *tuned: CalibrationFit) -> DeviceProfile:
    return msgspec.structs.replace(BASE, fit=exact, tuned=tuned)


GRAPH = graph_of((work("small"),), (work("large"), work("Relu", "elementwise")))
EXACT = fit(EngineOptions(), small=0.010, large=0.040, Relu=0.010)


def costs_of(profile: DeviceProfile) -> Costs:
    cloud_s = {layer.name: 0.002 for layer in GRAPH.layers}
    return build_costs("net@1", GRAPH, profile=profile, cloud_s=cloud_s, tensors={})


def best_row(profile: DeviceProfile) -> str:
    link = {"up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6, "rtt_s": 0.02}
    return plan(costs_of(profile), {"device-cloud": link}).row.name


def test_plans_priced_options_that_do_not_run() -> None:
    """60 ms unfused go to the cloud, which answers in 32; the agent would have taken 15 and stays."""
    tuned = fit(FUSED, small=0.010, large=0.005, Relu=0.010)

    assert best_row(calibrated(EXACT)) != "local"
    assert best_row(calibrated(EXACT, tuned)) == "local"
    costs = costs_of(calibrated(EXACT, tuned))
    assert [layer.seconds["device"] for layer in costs.layers] == pytest.approx([0.010, 0.005])
    assert "1 thread, fused" in costs.basis["device"]


def test_options_are_priced_that_agents_choose_by_their_margins() -> None:
    """2 % faster is not enough, nor are 8 % by threads that spin."""
    exact = fit(EngineOptions(), small=0.010, large=0.040, Relu=1e-9)
    fused = fit(FUSED, small=0.010, large=0.030)
    spinning = EngineOptions(threads=2, optimise="fast", merge=True, spinning=True)

    assert as_agents_run(calibrated(exact, fit(FUSED, small=0.010, large=0.039)), GRAPH).fit == exact
    for large_s, chosen in ((0.0268, FUSED), (0.025, spinning)):
        profile = calibrated(exact, fused, fit(spinning, small=0.010, large=large_s))
        assert as_agents_run(profile, GRAPH).priced_setup == chosen


def test_a_gateways_server_runs_slices_as_they_were_cut() -> None:
    """Its options are not the agent's."""
    tuned = fit(FUSED, small=0.010, large=0.005)
    profile = calibrated(EXACT, tuned)
    costs = with_tier(costs_of(profile), GRAPH, "edge", profile)

    assert sum(layer.seconds["edge"] for layer in costs.layers) == pytest.approx(0.060)
    assert sum(layer.seconds["device"] for layer in costs.layers) == pytest.approx(0.015)


def test_a_tflite_model_is_priced_by_litert() -> None:
    """Not by onnxruntime's figures, and no ONNX model by LiteRT's."""
    litert = fit(EngineOptions(threads=2), "LiteRT 2", small=0.003, large=0.003, Relu=0.001)
    profile = calibrated(EXACT, fit(FUSED, small=0.010, large=0.005), litert)

    chosen = as_agents_run(profile, GRAPH, "tflite")
    assert chosen.fit == litert and Predictor(chosen, "tflite").whole_interval == WHOLE
    assert as_agents_run(profile, GRAPH).priced_setup == FUSED


def test_a_profile_of_an_earlier_version_says_what_it_was_measured_with() -> None:
    """One thread, unfused: nothing is priced that was not measured."""
    old = calibrated(fit(None, small=0.010, large=0.040, Relu=0.010))

    assert as_agents_run(old, GRAPH) == old
    assert old.priced_setup == EngineOptions(threads=1)
    assert "1 thread, unfused: agents choose faster options" in predicted_basis(GRAPH, old)
    assert "4 threads, fused" in predicted_basis(GRAPH, load_profile("raspberrypi4"))


@pytest.mark.parametrize(
    ("families", "left"),
    [
        ("convk Relu", "convk"),
        ("convk Add Relu", "convk"),
        ("convk Add convk", "convk convk"),
        ("convk Sigmoid Mul", "convk Sigmoid"),
        ("MaxPool Relu", "MaxPool Relu"),
        ("convk Relu Relu", "convk Relu"),
        ("Relu convk", "Relu convk"),
        ("", ""),
    ],
)
def test_fused_operators_cost_nothing_of_their_own(families: str, left: str) -> None:
    """An activation behind a convolution, or behind a sum behind one; of x * sigmoid(x) the product."""
    works = [work(name, "conv" if name == "convk" else "elementwise") for name in families.split()]

    assert [one.family for one in separate_operators(works)] == left.split()


def test_a_sum_is_fused_into_the_convolution_that_writes_a_branch() -> None:
    """It is a layer of its own; where the convolution runs elsewhere it costs what a sum costs."""
    conv, total = graph_of((work("convk"),), (work("Add", "elementwise"), work("Relu", "elementwise"))).layers

    assert separate_by_layer((conv, total))[total.name] == []
    assert [one.family for one in separate_by_layer((total,))[total.name]] == ["Add", "Relu"]
