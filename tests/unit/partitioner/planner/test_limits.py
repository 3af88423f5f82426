"""Limits: the placement they force, and which of them conflict."""

from __future__ import annotations

from typing import Any

import pytest

from edgesplit.errors import InfeasibleLimits
from edgesplit.plan import Link
from edgesplit_partitioner import Costs, Limits, candidates, load_costs, plan

LINKS = {"device-cloud": Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.0)}


def camera(**tiers: list[str]) -> Costs:
    """decode -> conv -> head on a fast link: all-remote is best unless something forbids it."""
    rows: list[dict[str, Any]] = [
        {"name": "decode", "reads": ["frame"], "writes": {"pixels": {"bytes": 9000}}},
        {"name": "conv", "reads": ["pixels"], "writes": {"features": {"bytes": 500}}},
        {"name": "head", "reads": ["features"], "writes": {"out": {"bytes": 8}}},
    ]
    for row in rows:
        row |= {"seconds": {"device": 1.0, "cloud": 0.1}, "tiers": tiers.get(row["name"], [])}
    return load_costs(
        {
            "model": "camera@1",
            "tiers": ["device", "cloud"],
            "inputs": {"frame": {"bytes": 3000}},
            "outputs": ["out"],
            "layers": rows,
            "raw_inputs": ["frame", "pixels"],
            "device_class": "raspberrypi4",
            "basis": {"device": "measured on pi-7"},
        }
    )


def device_layers(costs: Costs, **limits: Any) -> tuple[str, ...]:
    return plan(costs, LINKS, limits=limits).cut["device"]


def test_keep_raw_input_keeps_raw_tensors_local() -> None:
    """Whatever reads a raw tensor, the merely decoded one included, runs on the device; the table records the limit."""
    found = plan(camera(), LINKS, limits={"keep_raw_input": True})
    assert found.cut["device"] == ("decode", "conv")
    assert found.table.private_tensors == ("frame", "pixels")
    assert found.table.limits == {"keep_raw_input": "true"}
    assert [row.name for row in found.table.rows] == ["cut-2", "local"]


def test_the_plan_states_the_earliest_cut_that_privacy_allows() -> None:
    """By layer, with all they depend on; limits that are no privacy have no part in it."""
    assert plan(camera(), LINKS, limits={"keep_raw_input": True}).table.required_local_layers == ("decode", "conv")
    assert plan(camera(), LINKS, limits={"keep_first": 1}).table.required_local_layers == ("decode",)
    assert plan(camera(), LINKS, limits={"force": "device"}).table.required_local_layers == ()


def test_keep_first_keeps_the_first_layers_local() -> None:
    """And requires no others to stay."""
    assert device_layers(camera()) == ()
    assert device_layers(camera(), keep_first=1) == ("decode",)
    assert device_layers(camera(), keep_first=99) == ("decode", "conv", "head")


def test_limits_are_parsed_from_a_value_or_a_mapping() -> None:
    """The command line's spelling is understood too."""
    assert plan(camera(), LINKS, limits=Limits(keep_first=2)).cut == plan(camera(), LINKS, limits={"keep-first": 2}).cut


@pytest.mark.parametrize(
    ("limits", "layers"),
    [
        ({"force": "device"}, ("decode", "conv", "head")),
        ({"force": "cloud"}, ()),
        ({"force": "conv"}, ("decode", "conv")),
        ({"force_after": "decode"}, ("decode",)),
    ],
)
def test_a_forced_cut_is_taken_with_all_local_behind_it(limits: dict[str, str], layers: tuple[str, ...]) -> None:
    """The table says which row was forced, so that the device does not choose a faster one."""
    found = plan(camera(), LINKS, limits=limits)
    assert found.cut["device"] == layers
    assert found.table.forced_row == found.row.name
    assert found.table.local is not None and len(found.table.rows) == (1 if len(layers) == 3 else 2)


def test_without_fallback_all_local_is_left_out() -> None:
    """Unless it is the cut."""
    assert [row.name for row in plan(camera(), LINKS, limits={"force": "conv", "fallback": "none"}).table.rows] == [
        "cut-2"
    ]
    assert plan(camera(), LINKS, limits={"fallback": "none"}).table.fallback == "none"
    assert plan(camera(), LINKS, limits={"force": "device", "fallback": "none"}).table.local is not None


def test_the_table_names_model_device_class_and_basis() -> None:
    """Model, device class and basis come from the costs."""
    table = plan(camera(), LINKS).table
    assert (table.model, table.device_class, table.basis, table.fallback) == (
        "camera@1",
        "raspberrypi4",
        "measured",
        "warm",
    )


def test_layers_run_only_on_their_tiers() -> None:
    """A device-only layer holds what it needs; a cloud-only one sends what needs it, and there is no fallback."""
    assert device_layers(camera(conv=["device"])) == ("decode", "conv")
    cloudy = plan(camera(conv=["cloud"]), LINKS)
    assert "conv" in cloudy.cut["cloud"] and "head" in cloudy.cut["cloud"]
    assert cloudy.table.local is None and cloudy.table.fallback == "none"
    assert cloudy.certificate.all_local is None


@pytest.mark.parametrize(
    ("limits", "tiers", "named"),
    [
        ({"keep_raw_input": True, "force": "cloud"}, {}, ["keep_raw_input", "force=cloud", "'decode'"]),
        ({"keep_first": 3, "force_after": "conv"}, {}, ["keep_first=3", "force_after=conv", "'head'"]),
        ({"force": "device"}, {"head": ["cloud"]}, ["force=device", "tiers of layer 'head'"]),
        ({"keep_first": 3}, {"head": ["cloud"]}, ["keep_first=3", "tiers of layer 'head'"]),
        ({}, {"decode": ["cloud"], "head": ["device"]}, ["tiers of layer 'decode'", "tiers of layer 'head'"]),
    ],
)
def test_limits_that_conflict_are_named(limits: dict[str, Any], tiers: dict[str, list[str]], named: list[str]) -> None:
    """Both of them, and the layer they meet on."""
    with pytest.raises(InfeasibleLimits) as refused:
        plan(camera(**tiers), LINKS, limits=limits)
    assert all(text in str(refused.value) for text in named)


def test_a_layer_without_an_allowed_tier_is_infeasible() -> None:
    """A layer that only the edge runs has no place on device and cloud."""
    costs = load_costs(
        {
            "model": "m",
            "tiers": ["device", "edge", "cloud"],
            "inputs": {"in": {"bytes": 1}},
            "outputs": ["out"],
            "layers": [{"name": "a", "reads": ["in"], "writes": {"out": {"bytes": 1}}, "seconds": {"edge": 1.0}}],
        }
    )
    with pytest.raises(InfeasibleLimits, match="'a' runs only on edge"):
        plan(costs, LINKS)


def test_gain_is_relative_to_the_allowed_pure_modes() -> None:
    """With the raw input kept, sending all of it is no alternative; a forced cut may gain less than 1."""
    kept = plan(camera(), LINKS, limits={"keep_raw_input": True})
    assert kept.certificate.all_remote is not None and kept.certificate.all_remote < kept.seconds
    assert kept.gain == pytest.approx(3.0 / kept.seconds) and kept.gain > 1
    forced = plan(camera(), LINKS, limits={"force": "conv"})
    assert forced.gain is not None and forced.gain < 1


def test_forbidden_all_remote_is_shown_and_marked() -> None:
    """It stays listed for comparison."""
    shown = {candidate.row.name: candidate for candidate in candidates(camera(), LINKS, {"keep_raw_input": True})}
    assert not shown["remote"].allowed and not shown["remote"].in_table
    assert shown["cut-2"].best and shown["local"].allowed


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"keep_first": 4}, "keep_first=2"),
        ({"force": "device"}, "no force=device"),
        ({"force": "cloud", "keep_raw_input": True}, "no keep_raw_input; no force=cloud"),
        ({"force": "cloud", "keep_first": 3}, "no force=cloud"),
        ({"keep_first": 4, "deadline_s": 100.0}, "keep_first=2"),
    ],
)
def test_conflicting_placement_limits_suggest_relaxations(limits: dict[str, Any], says: str) -> None:
    """The least relaxation of each, and it is feasible; a limit on a sum beside them is counted in."""
    both = ["device", "cloud"]
    layers = [
        {
            "name": f"l{i}",
            "reads": [f"t{i}"],
            "writes": {f"t{i + 1}": {"bytes": 5}},
            "seconds": {"device": 0.1, "cloud": 0.1},
            "tiers": ["cloud"] if i == 2 and limits.get("force") != "cloud" else both,
        }
        for i in range(5)
    ]
    costs = load_costs(
        {"model": "m", "tiers": both, "inputs": {"t0": {"bytes": 3}}, "outputs": ["t5"], "layers": layers}
    )
    link = {"device-cloud": Link(up_bytes_per_s=1.0, down_bytes_per_s=1.0, rtt_s=0.0)}
    with pytest.raises(InfeasibleLimits, match=f"Enough would be, the other limits kept: .*{says}"):
        plan(costs, link, limits=limits)
    if "keep_first" in says:
        assert plan(costs, link, limits={**limits, "keep_first": 2}).cut["device"] == ("l0", "l1")
        with pytest.raises(InfeasibleLimits):
            plan(costs, link, limits={**limits, "keep_first": 3})
