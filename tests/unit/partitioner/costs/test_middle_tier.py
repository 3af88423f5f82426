"""A tier between device and cloud: priced from its profile, selected by name, planned exactly."""

from __future__ import annotations

import pytest

from edgesplit.device_profile import load_profile
from edgesplit.errors import UsageError
from edgesplit.links import parse_link
from edgesplit_partitioner import Costs, plan
from edgesplit_partitioner.costs.build import build_costs, with_tier
from edgesplit_partitioner.costs.model import CodecCost, TensorCost
from edgesplit_partitioner.costs.predict import predict_intervals
from support import onnx_models as tiny


def costs_of() -> Costs:
    """The chain on a Raspberry Pi and here, one tensor with a codec."""
    graph = tiny.prepared("chain").graph
    packed = CodecCost(bytes=10, encode_s={"cloud": 1e-4}, decode_s={"cloud": 2e-4})
    tensor = graph.layers[0].writes[0]
    return build_costs(
        "chain@1",
        graph,
        profile=load_profile("raspberrypi3b+"),
        cloud_s={layer.name: 1e-5 for layer in graph.layers},
        tensors={tensor: TensorCost(bytes=graph.tensors[tensor].bytes, codecs={"raw+zstd": packed})},
    )


def test_a_gateway_is_priced_by_its_profile() -> None:
    """Seconds as predicted for it, codec seconds from this machine's, before the last tier."""
    graph, profile = tiny.prepared("chain").graph, load_profile("jetson-nano")
    costs = with_tier(costs_of(), graph, "edge", profile)
    assert costs.tiers == ("device", "edge", "cloud")
    predicted = {name: prediction.seconds for name, prediction in predict_intervals(graph, profile).items()}
    assert {layer.name: layer.seconds["edge"] for layer in costs.layers} == predicted
    codec = costs.layers[0].writes[graph.layers[0].writes[0]].codecs["raw+zstd"]
    assert codec.encode_s["edge"] == pytest.approx(1e-4 * profile.zstd_slowdown.value)
    assert codec.decode_s["edge"] == pytest.approx(2e-4 * profile.zstd_slowdown.value)
    assert costs.basis["edge"].startswith("predicted: device profile jetson-nano")


def test_middle_tiers_keep_their_order() -> None:
    """From the device outwards; each with a link of its own in the plan."""
    graph = tiny.prepared("chain").graph
    near = with_tier(costs_of(), graph, "edge", load_profile("raspberrypi4"))
    both = with_tier(near, graph, "hub", load_profile("generic-x86"))
    assert both.tiers == ("device", "edge", "hub", "cloud")
    wifi, lte = parse_link("wifi"), parse_link("lte")
    made = plan(both, {"device-edge": wifi, "edge-hub": wifi, "hub-cloud": lte})
    assert sum(len(layers) for layers in made.cut.values()) == len(graph.layers)
    assert made.certificate.gap < 1e-9


def test_tier_names_are_unique() -> None:
    """A second tier of the same name is refused."""
    with pytest.raises(UsageError, match="there already"):
        with_tier(costs_of(), tiny.prepared("chain").graph, "cloud", load_profile("raspberrypi4"))
