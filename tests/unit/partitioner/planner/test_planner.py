"""Plans of small graphs that can be computed by hand."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import msgspec
import pytest

from edgesplit.errors import UsageError
from edgesplit.plan import Conditions, Link, latency_s
from edgesplit_partitioner import Costs, candidates, load_costs, plan
from support import REPOSITORY
from support.brute_force import random_costs

LINK = Link(up_bytes_per_s=1000.0, down_bytes_per_s=2000.0, rtt_s=0.0)


def layer(name: str, reads: str, writes: dict[str, Any], device: float, cloud: float, **more: Any) -> dict[str, Any]:
    """A layer; `writes` gives raw bytes, or a whole tensor."""
    tensors = {tensor: size if isinstance(size, dict) else {"bytes": size} for tensor, size in writes.items()}
    seconds = {"device": device, "cloud": cloud}
    return {"name": name, "reads": reads.split(), "writes": tensors, "seconds": seconds, **more}


def graph(*layers: dict[str, Any], inputs: dict[str, int], outputs: str) -> Costs:
    """Costs on two tiers."""
    sizes = {name: {"bytes": size} for name, size in inputs.items()}
    return load_costs(
        {
            "model": "small",
            "tiers": ["device", "cloud"],
            "inputs": sizes,
            "outputs": outputs.split(),
            "layers": list(layers),
        }
    )


def links(link: Link = LINK) -> dict[str, Link]:
    return {"device-cloud": link}


@pytest.fixture
def narrow() -> Costs:
    """A chain whose middle is narrow: cutting there is best on a slow link."""
    return graph(
        layer("a", "in", {"t": 10}, 0.1, 0.01, joules={"device": 0.5}),
        layer("b", "t", {"out": 4}, 1.0, 0.1, joules={"device": 5.0}),
        inputs={"in": 1000},
        outputs="out",
    )


def test_the_cut_is_where_little_crosses(narrow: Costs) -> None:
    """device 0.1 + up 10 B + cloud 0.1 + down 4 B beats 1.1 alone and 1.112 all sent."""
    found = plan(narrow, links())
    assert found.cut == {"device": ("a",), "cloud": ("b",)}
    assert found.seconds == pytest.approx(0.1 + 0.01 + 0.1 + 0.002)
    assert found.split == pytest.approx({"device": 0.1, "encode": 0, "link": 0.012, "decode": 0, "remote": 0.1})
    assert (found.bytes, found.joules) == (14, 0.5)
    assert found.certificate.all_local == pytest.approx(1.1)
    assert found.certificate.all_remote == pytest.approx(1.0 + 0.11 + 0.002)
    assert found.certificate.gap == pytest.approx(0, abs=1e-12)
    assert found.gain == pytest.approx(1.1 / found.seconds)


def test_planner_latency_equals_the_agents_latency(narrow: Costs) -> None:
    """The planner's latency is `edgesplit.plan.latency_s` of its row, to the last bit."""
    for rtt_s in (0.0, 0.05, 3.0):
        link = Link(up_bytes_per_s=1000.0, down_bytes_per_s=2000.0, rtt_s=rtt_s)
        found = plan(narrow, links(link))
        assert found.seconds == latency_s(found.row, Conditions(link=link))
        assert found.row in found.table.rows


def test_a_long_round_trip_keeps_everything_local(narrow: Costs) -> None:
    """The round trip is paid once as soon as anything crosses, and then all-local is better."""
    assert plan(narrow, links(Link(up_bytes_per_s=1000.0, down_bytes_per_s=2000.0, rtt_s=0.88))).row.name == "cut-1"
    assert plan(narrow, links(Link(up_bytes_per_s=1000.0, down_bytes_per_s=2000.0, rtt_s=0.89))).row.name == "local"


def test_the_table_is_named_from_the_most_remote(narrow: Costs) -> None:
    """On an endless link all is sent, on a slow one the middle, on a dead one nothing; the ranges say where."""
    found = plan(narrow, links())
    assert [row.name for row in found.table.rows] == ["remote", "cut-1", "local"]
    assert [row.layers for row in found.table.rows] == [(), ("a",), ("a", "b")]
    assert [row.remote for row in found.table.rows] == [("a", "b"), ("b",), ()]
    assert found.table.rows[1].split_after == "a"
    # remote 0.112 + 1000 x meets cut 0.202 + 10 x at x = 0.09/990; the cut meets 1.1 at x = 0.0898.
    assert found.ranges["remote"] == pytest.approx((11000.0, float("inf")))
    assert found.ranges["cut-1"] == pytest.approx((10 / 0.898, 11000.0))
    assert found.ranges["local"] == pytest.approx((0.0, 10 / 0.898))


def test_a_tensor_read_twice_crosses_once() -> None:
    """Charged per reader, the cut after `a` would cost 0.2 s more and lose to staying local."""
    costs = graph(
        layer("a", "in", {"t": 200}, 0.0, 0.0),
        layer("b", "t", {"u": 1000}, 0.2, 0.0),
        layer("c", "t u", {"out": 0}, 0.15, 0.0),
        inputs={"in": 9999},
        outputs="out",
    )
    found = plan(costs, links())
    assert found.row.sends == ("t",)
    assert found.seconds == pytest.approx(0.2)


def test_an_input_read_by_several_layers_crosses_once() -> None:
    """Both readers run remotely for one upload."""
    costs = graph(
        layer("a", "in", {"t": 1}, 0.3, 0.0),
        layer("b", "in", {"u": 1}, 0.3, 0.0),
        layer("c", "t u", {"out": 0}, 0.0, 0.0),
        inputs={"in": 500},
        outputs="out",
    )
    found = plan(costs, links())
    assert (found.row.name, found.row.sends, found.seconds) == ("remote", ("in",), pytest.approx(0.5))


def test_an_output_with_readers_is_charged_in_one_direction() -> None:
    """Made on the device it goes up and not down; made remotely it comes down and not up."""
    costs = graph(
        layer("a", "in", {"t": 100}, 0.01, 0.0),
        layer("b", "t", {"out": 0}, 9.0, 0.0),
        inputs={"in": 5000},
        outputs="t out",
    )
    found = plan(costs, links())
    assert found.row.sends == ("t",) and found.row.receives == ("out",)
    remote = next(candidate.row for candidate in candidates(costs, links()) if candidate.row.name == "remote")
    assert remote.sends == ("in",) and remote.receives == ("t", "out")
    assert (remote.up_bytes, remote.down_bytes) == (5000, 100)


def test_a_tensor_passes_through_beside_the_cut() -> None:
    """An early tensor and an input read late cross together with the last one made."""
    costs = graph(
        layer("a", "in", {"t": 10}, 0.1, 0.0),
        layer("b", "t", {"u": 20}, 0.1, 9.0),
        layer("c", "t u side", {"out": 0}, 9.0, 0.0),
        inputs={"in": 5000, "side": 30},
        outputs="out",
    )
    found = plan(costs, links())
    assert set(found.row.sends) == {"t", "u", "side"}
    assert found.row.up_bytes == 60


def test_an_input_that_is_an_answer_costs_nothing() -> None:
    """It is on the device already."""
    costs = graph(layer("a", "in", {"out": 0}, 9.0, 0.0), inputs={"in": 10}, outputs="out in")
    assert plan(costs, links()).row.receives == ("out",)


def test_ties_go_to_fewer_bytes_then_to_more_local() -> None:
    """Of cuts with equal seconds the one that sends least is taken, and of those the one that keeps most."""
    costs = graph(
        layer("a", "in", {"t": 100}, 0.1, 0.0),
        layer("b", "t", {"u": 100}, 0.0, 0.0),
        layer("c", "u", {"v": 50}, 0.05, 0.0),
        layer("d", "v", {"out": 0}, 0.05, 0.0),
        inputs={"in": 200},
        outputs="out",
    )
    # All seven ways cost 0.2 s; only all-local sends nothing.
    assert plan(costs, links()).row.name == "local"
    kept = plan(costs, links(), limits={"fallback": "none"})
    assert kept.row.name == "local"
    no_end = load_costs(_with_tiers(costs, "d", ["cloud"]))
    assert plan(no_end, links()).cut["device"] == ("a", "b", "c")
    no_end = load_costs(_with_tiers(costs, "c", ["cloud"]))
    assert plan(no_end, links()).cut["device"] == ("a", "b")


def _with_tiers(costs: Costs, name: str, tiers: list[str]) -> dict[str, Any]:
    plain = msgspec.to_builtins(costs)
    for layer in plain["layers"]:
        layer["tiers"] = tiers if layer["name"] == name else layer["tiers"]
    return dict(plain)


def test_compression_applies_to_the_whole_request() -> None:
    """One row is sent raw and one compressed; a tensor never measured compressed counts raw in both."""
    packed = {"bytes": 25, "encode_s": {"device": 0.02}, "decode_s": {"cloud": 0.01}}
    costs = graph(
        layer("a", "in", {"t": {"bytes": 100, "codecs": {"raw+zstd": packed}}, "u": 10}, 0.1, 0.1),
        layer("b", "t u", {"out": 0}, 9.0, 0.0),
        inputs={"in": 50_000},
        outputs="out",
    )
    slow, fast = plan(costs, links()), plan(costs, links(Link(up_bytes_per_s=1e5, down_bytes_per_s=1e5, rtt_s=0.0)))
    assert slow.row.compress and slow.row.up_bytes == 35
    assert slow.split == pytest.approx({"device": 0.1, "encode": 0.02, "link": 0.035, "decode": 0.01, "remote": 0.0})
    assert not fast.row.compress and fast.row.up_bytes == 110
    assert not plan(costs, links(), codecs=("raw",)).row.compress
    rows = {(row.split_after, row.compress) for row in slow.table.rows}
    assert {("a", False), ("a", True)} <= rows
    assert len({row.name for row in slow.table.rows}) == len(slow.table.rows)


def test_rates_of_both_directions_count() -> None:
    """Answers come down at the downlink's rate."""
    costs = graph(layer("a", "in", {"out": 1000}, 9.0, 0.0), inputs={"in": 10}, outputs="out")
    link = Link(up_bytes_per_s=1000.0, down_bytes_per_s=500.0, rtt_s=0.1)
    assert plan(costs, links(link)).seconds == pytest.approx(0.1 + 0.01 + 2.0)


def test_branches_of_two_inputs_are_cut_independently() -> None:
    """A cut that no order of the layers shows: one camera's branch runs on the device, the other's does not."""
    costs = graph(
        layer("left", "big", {"t": 10}, 0.1, 0.0),
        layer("right", "small", {"u": 5000}, 0.5, 0.0),
        layer("fuse", "t u", {"out": 0}, 9.0, 0.0),
        inputs={"big": 9000, "small": 20},
        outputs="out",
    )
    found = plan(costs, links())
    assert found.cut["device"] == ("left",)
    assert set(found.row.sends) == {"small", "t"}


def test_joules_are_unknown_where_one_layer_has_none(narrow: Costs) -> None:
    """Never a sum with a missing part."""
    costs = graph(
        layer("a", "in", {"t": 10}, 0.1, 0.01), layer("b", "t", {"out": 4}, 1.0, 0.1), inputs={"in": 9}, outputs="out"
    )
    assert plan(costs, links()).joules is None
    assert plan(narrow, links()).table.row("remote").device_joules == 0.0


def test_a_link_selects_two_of_three_tiers() -> None:
    """Costs that know an edge tier are planned for the pair that the link names."""
    costs = load_costs(
        {
            "model": "three",
            "tiers": ["device", "edge", "cloud"],
            "inputs": {"in": {"bytes": 10}},
            "outputs": ["out"],
            "layers": [
                {
                    "name": "a",
                    "reads": ["in"],
                    "writes": {"out": {"bytes": 0}},
                    "seconds": {"device": 1.0, "edge": 0.5, "cloud": 0.1},
                }
            ],
        }
    )
    assert plan(costs, {"device-edge": LINK}).cut == {"device": (), "edge": ("a",)}
    assert plan(costs, {"device-edge": LINK}).seconds == pytest.approx(0.51)
    assert plan(costs, links()).seconds == pytest.approx(0.11)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"objective": "speed"}, "supported: latency"),
        ({"objective": {}}, "above 0"),
        ({"objective": {"latency": -1.0}}, "at least 0"),
        ({"objective": {"latency": 1.0, "throughput": 1.0}}, "cannot be weighed"),
        ({"codecs": ("int8",)}, "supported: raw, raw\\+zstd"),
        ({"codecs": ()}, "supported"),
        ({"limits": {"kep_first": 1}}, "kep_first"),
        ({"limits": {"keep_first": -1}}, "keep_first"),
        ({"limits": {"force": "bb"}}, "no layer is called 'bb'; did you mean"),
        ({"limits": {"force": "a", "force_after": "b"}}, "not both"),
        ({"links": {}}, "one link is supported"),
        ({"links": {"device-cloud": LINK, "cloud-moon": LINK}}, "one link is supported"),
        ({"links": {"cloud-device": LINK}}, "device-cloud"),
        ({"links": {"device-cloud": {"up_bytes_per_s": 1.0}}}, "down_bytes_per_s"),
        ({"links": {"device-cloud": {"up_bytes_per_s": 0, "down_bytes_per_s": 1, "rtt_s": 0}}}, "above 0"),
        ({"links": {"device-cloud": {"up_bytes_per_s": 1, "down_bytes_per_s": 1, "rtt_s": -1}}}, "round trip"),
    ],
)
def test_invalid_arguments_are_usage_errors(narrow: Costs, given: dict[str, Any], said: str) -> None:
    """The text gives the reason or the supported values."""
    given = {"links": links(), **given}
    with pytest.raises(UsageError, match=said):
        plan(narrow, given.pop("links"), **given)


def test_costs_without_layers_are_a_usage_error() -> None:
    """There is nothing to cut."""
    with pytest.raises(UsageError, match="no layers"):
        plan(graph(inputs={"in": 1}, outputs="in"), links())


@pytest.mark.parametrize("seed", range(8))
def test_a_cut_had_another_number_once_others_were_dropped(seed: int) -> None:
    """`cut-4` of `plan` was `cut-3` of `deploy`. A cut has one name in each table: at another link, under other limits,
    and where it is not in the table at all. Its number is that of the layers on the device."""
    costs = random_costs(random.Random(seed), 9)
    names: dict[tuple[tuple[str, ...], bool], str] = {}
    for rate, keep_first in itertools.product((1e3, 1e5, 1e7), (0, 2)):
        link = Link(up_bytes_per_s=rate, down_bytes_per_s=rate, rtt_s=0.001)
        for candidate in plan(costs, links(link), limits={"keep_first": keep_first}).candidates():
            row = candidate.row
            if row.name.startswith("cut-"):
                assert row.name.split("-")[1] == str(len(row.layers))
                assert names.setdefault((row.layers, row.compress), row.name) == row.name
    assert len(set(names.values())) == len(names) > 0


def test_a_plan_converts_to_plain_json_values(narrow: Costs) -> None:
    """Infinite rates become null; nothing else is lost."""
    plain = json.loads(json.dumps(plan(narrow, links()).to_builtins(), allow_nan=False))
    assert plain["row"] == "cut-1" and plain["cut"]["cloud"] == ["b"]
    assert plain["ranges"]["remote"][1] is None
    assert [row["name"] for row in plain["table"]["rows"]] == ["remote", "cut-1", "local"]


def test_free_layers_on_an_infinite_link_divide_nothing_by_zero() -> None:
    """Zero costs everywhere, and nothing is sent."""
    costs = graph(layer("a", "in", {"out": 0}, 0.0, 0.0), inputs={"in": 0}, outputs="out")
    found = plan(costs, links(Link(up_bytes_per_s=float("inf"), down_bytes_per_s=float("inf"), rtt_s=0.0)))
    assert (found.row.name, found.seconds, found.certificate.gap) == ("local", 0.0, 0.0)


def test_candidates_show_the_table_the_pure_modes_and_some_more() -> None:
    """A reader sees prefix cuts at narrow places beside the rows, the best marked, all-remote last resort or not."""
    layers = [layer(f"l{i}", f"t{i}", {f"t{i + 1}": 50 + 40 * (i % 2)}, 0.01, 0.001) for i in range(30)]
    costs = graph(*layers, inputs={"t0": 60}, outputs="t30")
    shown = candidates(costs, links(), {"keep_first": 2})
    names = [row.row.name for row in shown]
    assert names[0] == "remote" and names[-1] == "local" and len(names) == 10 == len(set(names))
    assert [row.allowed for row in shown] == [False] + [True] * 9
    assert [row.row.name for row in shown if row.best] == [plan(costs, links(), limits={"keep_first": 2}).row.name]
    for candidate in shown:
        assert candidate.seconds == latency_s(candidate.row, Conditions(link=LINK))
        assert candidate.in_table == (candidate.row in plan(costs, links(), limits={"keep_first": 2}).table.rows)


def test_the_example_in_the_docs_gives_the_printed_plan() -> None:
    """docs/costs.md: the file there is complete, and planning it gives the figures printed beneath it."""
    page = (REPOSITORY / "docs" / "costs.md").read_text()
    costs = load_costs(json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0]))
    found = plan(costs, {"device-cloud": {"up_bytes_per_s": 731250, "down_bytes_per_s": 1720000, "rtt_s": 0.06}})
    printed = [
        f"{cut.row.name:10} {' '.join(cut.row.layers) or '-':18} {cut.row.up_bytes:>7} {cut.seconds * 1000:>7.1f}"
        + (" <- best" if cut.best else "")
        for cut in candidates(costs, {"device-cloud": found.link})
    ]
    assert "\n".join(printed) in page
    assert found.row.name == "cut-3-zstd" and found.row.compress


@pytest.mark.parametrize("seed", range(20))
def test_six_rows_had_one_layers_name_and_forcing_it_gave_a_seventh_cut(seed: int) -> None:
    """A cut through branches was named after the last of its layers. Each name now stands for one cut and forces it."""
    costs = random_costs(random.Random(seed), 9)
    slow = links(Link(up_bytes_per_s=1e5, down_bytes_per_s=1e5, rtt_s=0.001))
    layers_by_name: dict[str, tuple[str, ...]] = {}
    for candidate in plan(costs, slow).candidates():
        row = candidate.row
        assert layers_by_name.setdefault(row.split_after, row.layers) == row.layers
    for name, layers in layers_by_name.items():
        if name:
            forced = plan(costs, slow, limits={"force_after": name})
            assert (forced.row.layers, forced.row.split_after) == (layers, name)


def test_a_cut_through_branches_is_named_after_the_last_layer_of_each() -> None:
    """In the order of the model; a name with an unknown layer says which one it is."""
    branched = graph(
        layer("stem", "in", {"s": 1000}, 0.1, 0.01),
        layer("left", "s", {"l": 5}, 0.1, 0.01),
        layer("right", "s", {"r": 5}, 0.1, 0.01),
        layer("head", "l r", {"out": 4}, 5.0, 0.1),
        inputs={"in": 1000},
        outputs="out",
    )
    found = plan(branched, links())
    assert found.row.layers == ("stem", "left", "right") and found.row.split_after == "left + right"
    assert plan(branched, links(), limits={"force_after": "left+right"}).row.layers == found.row.layers
    assert plan(branched, links(), limits={"force_after": "right"}).row.layers == ("stem", "right")
    with pytest.raises(UsageError, match=r"no layer is called 'rihgt'; did you mean right"):
        plan(branched, links(), limits={"force_after": "left + rihgt"})
