"""Intervals of predicted seconds: from the profile to the printed plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgesplit.device_profile import load_profile
from edgesplit.errors import UsageError
from edgesplit_partitioner import describe, load_costs, plan
from edgesplit_partitioner.costs.build import build_costs, with_tier
from edgesplit_partitioner.costs.intervals import row_interval, tier_interval
from edgesplit_partitioner.costs.model import Costs
from edgesplit_partitioner.costs.predict import OTHER_RUNTIME, Predictor, predicted_basis
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, OperatorWork, Tensor
from edgesplit_partitioner.profiling.slices import with_tier_factor

PI = load_profile("raspberrypi4")
LINKS: dict[str, Any] = {"device-cloud": {"up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6, "rtt_s": 0.01}}
LAYERS = tuple(
    Layer(f"l{n}", (n,), (f"t{n}",), (f"t{n + 1}",), (), 0, (OperatorWork("conv", 1e8 * (n + 1), 1e5),))
    for n in range(3)
)
GRAPH = LayerGraph(LAYERS, {f"t{n}": Tensor(f"t{n}", "FP32", (100,), 400) for n in range(4)}, ("t0",), ("t3",))


def costs_of(**given: Any) -> Costs:
    """Three convolutions, predicted on a Raspberry Pi 4."""
    cloud_s = {layer.name: 0.01 for layer in LAYERS}
    return build_costs("net@1", GRAPH, **{"profile": PI, "cloud_s": cloud_s, "tensors": {}, **given})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_costs_give_the_predictors_interval_for_a_cut(count: int) -> None:
    """The two figures that costs carry are enough: no profile is needed for the interval of a cut's seconds."""
    found = tier_interval(costs_of(), "device", {layer.name for layer in LAYERS[:count]})
    told = Predictor(PI).predict_sum(LAYERS[:count])

    assert found is not None and PI.error is not None
    assert (found.low_s, found.high_s) == pytest.approx((told.low_s, told.high_s))
    assert found.coverage == PI.error.coverage


def test_independent_layer_errors_partly_cancel_and_shared_ones_do_not() -> None:
    """Two like layers, each off by a factor of 2: together by less, but never by less than whole networks are."""
    layers = [
        {"name": name, "reads": [read], "writes": {wrote: {"bytes": 1}}, "seconds": {"device": 1.0, "cloud": 0.1}}
        | {"between": {"device": [0.5, 2.0]}}
        for name, read, wrote in (("a", "x", "y"), ("b", "y", "z"))
    ]
    costs = load_costs(
        {"format": "edgesplit.costs/1", "model": "m", "tiers": ["device", "cloud"], "inputs": {"x": {"bytes": 1}}}
        | {"outputs": ["z"], "layers": layers, "intervals": {"device": {"low": 0.8, "high": 1.25}}}
    )
    one, both = tier_interval(costs, "device", {"a"}), tier_interval(costs, "device", {"a", "b"})

    assert one is not None and both is not None
    assert one.high_s == pytest.approx(2.0)
    assert 1.25 < both.high_s / 2 < 2.0


def test_a_plan_states_its_interval_and_each_candidates() -> None:
    """In JSON and for people; what runs in the measured cloud alone has none."""
    made = describe(costs_of(), LINKS)
    by_name = {candidate["name"]: candidate for candidate in made["candidates"]}

    assert by_name["remote"]["between"] is None
    local = by_name["local"]
    assert local["between"]["low_s"] < local["total_s"] < local["between"]["high_s"]
    best = by_name[made["best"]]
    assert made["between"] == best["between"]


def test_errors_of_two_predicted_tiers_add_as_independent() -> None:
    """A gateway is predicted too: the plan's interval is wider than by either alone, and narrower than by their sum."""
    costs = with_tier(costs_of(), GRAPH, "edge", load_profile("jetson-nano"))
    links = {"device-edge": LINKS["device-cloud"], "edge-cloud": LINKS["device-cloud"]}
    made = plan(costs, links, limits={"keep_first": 1})
    found = [tier_interval(costs, tier, names) for tier, names in made.cut.items()]
    known = [item for item in found if item is not None]
    between = row_interval(costs, made.tiers, made.row, made.seconds)

    assert between == made.between and between is not None
    above = between.high_s - made.seconds
    assert above <= sum(item.high_s for item in known)


def test_a_tflite_model_got_the_interval_of_onnxruntime_figures() -> None:
    """LiteRT took a fifth of the prediction where the plan said four fifths at least."""
    costs = costs_of(profile=load_profile("generic-x86"), model_format="tflite")

    assert costs.intervals["device"].low == OTHER_RUNTIME.low
    assert "not LiteRT's" in costs.basis["device"]
    assert "not LiteRT's" not in predicted_basis(GRAPH, load_profile("coral-usb-rpi4"), "tflite")


def test_a_measured_tier_has_no_interval() -> None:
    """Measured on such a device, or corrected by slices measured whole: the prediction does not count any more."""
    measured = costs_of(device_s={layer.name: 0.02 for layer in LAYERS})

    assert not measured.intervals and not any(layer.between for layer in measured.layers)
    assert not with_tier_factor(costs_of(), "device", 1.1).intervals


@pytest.mark.parametrize(
    "changes",
    [
        {"intervals": {"device": {"low": 1.2, "high": 1.5}}},
        {"intervals": {"device": {"low": 0.0, "high": 1.5}}},
        {"intervals": {"moon": {"low": 0.9, "high": 1.5}}},
        {"between": {"device": [2.0, 3.0]}},
        {"between": {"moon": [0.0, 1.0]}},
    ],
)
def test_an_invalid_interval_is_refused(changes: dict[str, Any]) -> None:
    """A costs file may come from anywhere."""
    fields = msgspec.to_builtins(costs_of())
    place = fields["layers"][0] if "between" in changes else fields
    place.update(changes)

    with pytest.raises(UsageError, match=r"interval|between"):
        load_costs(fields)


def test_intervals_round_trip_through_a_costs_file(tmp_path: Path) -> None:
    """Written and read again they are the same."""
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode(costs_of()))

    assert load_costs(file) == costs_of()
