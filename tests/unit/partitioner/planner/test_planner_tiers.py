"""Any number of tiers and every objective that adds up, against trying every assignment.

`EDGESPLIT_SEED` says from which seed, printed each run; `make soak` tries twenty times as many.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgesplit.errors import InfeasibleLimits
from edgesplit.plan import Conditions, Link, choose_row, cost, latency_s
from edgesplit_partitioner import Costs, PlanResult, load_costs, plan
from support.brute_force_tiers import TIERS, Radio, Tried, busy_watts, every_assignment, random_tier_costs

EXACT = 1e-9
TIMES = max(1, int(os.environ.get("EDGESPLIT_INSTANCES", "500")) // 500)
LTE = Radio(438.39, 51.97, 1288.04, 0.26, 1210.7, 11.576, 1060.0)
Value = Callable[[Tried], float]


def instances(count: int, tiers: int, most: int, **how: float) -> Iterator[tuple[str, random.Random, Costs]]:
    """Seeded graphs of 1 to `most` layers."""
    start = int(os.environ["EDGESPLIT_SEED"])
    for seed in range(start, start + count * TIMES):
        rng = random.Random(seed)
        yield f"seed {seed}", rng, random_tier_costs(rng, rng.randrange(1, most + 1), tiers, **how)


def some_links(rng: random.Random, tiers: int) -> list[Link]:
    rates = [1e5, 1e6, 10 ** rng.uniform(3, 7)]
    return [
        Link(up_bytes_per_s=rng.choice(rates), down_bytes_per_s=rng.choice(rates), rtt_s=rng.choice([0.0, 0.01, 0.05]))
        for _ in range(tiers - 1)
    ]


def named(links: list[Any]) -> dict[str, Any]:
    return {f"{low}-{high}": link for (low, high), link in zip(itertools.pairwise(TIERS), links, strict=False)}


def check(label: str, found: PlanResult, tried: list[Tried], value: Value) -> None:
    """Best value, honest bound, and the right one among equals."""
    best = min(map(value, tried))
    assert found.value == pytest.approx(best, rel=EXACT, abs=1e-15), label
    assert found.certificate.lower_bound <= best * (1 + EXACT), label
    assert found.certificate.gap <= EXACT, label
    equal = [assignment for assignment in tried if value(assignment) <= best * (1 + 1e-11) + 1e-16]
    layers = [sum(1 for _ in names) * tier for tier, names in enumerate(found.cut.values())]
    assert (found.bytes, sum(layers)) == min(assignment.rank for assignment in equal), label


@pytest.mark.parametrize(("tiers", "most", "count"), [(3, 6, 60), (3, 7, 12), (4, 5, 25)])
@pytest.mark.parametrize("bound", [0.0, 0.15])
def test_the_optimum_matches_brute_force_over_assignments(tiers: int, most: int, count: int, bound: float) -> None:
    """Seconds, bound, and of equals the fewest bytes and the nearest layers; with layers bound to some tiers too."""
    for label, rng, costs in instances(count, tiers, most, bound=bound):
        links = some_links(rng, tiers)
        tried = list(every_assignment(costs))
        if not tried:
            with pytest.raises(InfeasibleLimits):
                plan(costs, named(links))
            continue
        found = plan(costs, named(links))
        check(label, found, tried, lambda one, links=links: one.latency_s(links))
        assert found.seconds == latency_s(found.row, Conditions(link=links[0])), label
        assert sum(found.split.values()) == pytest.approx(found.seconds, rel=EXACT, abs=1e-15), label
        assert sorted(sum(found.cut.values(), ())) == sorted(layer.name for layer in costs.layers), label


def test_limits_about_the_device_hold_with_three_tiers() -> None:
    """The raw input, the first layers and forced cuts mean the same as with two."""
    for label, rng, costs in instances(40, 3, 5):
        links, first, raw = some_links(rng, 3), rng.randrange(0, 3), rng.random() < 0.5
        kept = {
            i for i, layer in enumerate(costs.layers) if i < first or (raw and not costs.raw.isdisjoint(layer.reads))
        }
        tried = [assignment for assignment in every_assignment(costs) if all(assignment.tier_of[i] == 0 for i in kept)]
        found = plan(costs, named(links), limits={"keep_first": first, "keep_raw_input": raw})
        check(label, found, tried, lambda one, links=links: one.latency_s(links))
        forced = plan(costs, named(links), limits={"force": "edge"})
        assert len(forced.cut["edge"]) == len(costs.layers), label


@pytest.mark.parametrize(("tiers", "most", "count"), [(2, 8, 40), (3, 6, 40)])
def test_energy_follows_the_published_radio_model(tiers: int, most: int, count: int) -> None:
    """Device joules by the definition: layers, encoding, waiting, bytes by the radio's model, promotion and tail."""
    for label, rng, costs in instances(count, tiers, most):
        links = some_links(rng, tiers)
        radio = rng.choice([None, LTE, dataclasses.replace(LTE, tail_s=0.0, promotion_s=0.0)])
        first = {name: getattr(links[0], name) for name in ("up_bytes_per_s", "down_bytes_per_s", "rtt_s")}
        given = named([first | ({"radio": dataclasses.asdict(radio)} if radio else {}), *links[1:]])
        idle, busy = costs.idle_watts["device"], busy_watts(costs)
        tried = list(every_assignment(costs))

        def joules(one: Tried, links: Any = links, idle: float = idle, busy: float = busy, radio: Any = radio) -> float:
            return one.energy_j(links, idle, busy, radio)

        found = plan(costs, given, objective="energy")
        check(label, found, tried, joules)
        assert found.joules == pytest.approx(found.value, rel=EXACT), label
        both = plan(costs, given, objective={"latency": 3.0, "energy": 0.5})
        check(label, both, tried, lambda one, links=links: 3.0 * one.latency_s(links) + 0.5 * joules(one))


def test_p95_of_one_varying_link_is_exact() -> None:
    """The p95 of latency over a trace: the least latency that is not exceeded in 95 % of its moments."""
    for label, rng, costs in instances(60, rng_tiers := 3, 5):
        links = some_links(rng, rng_tiers)
        varying, moments = rng.randrange(2), rng.randrange(1, 41)
        trace = [10 ** rng.uniform(3, 7) for _ in range(moments)]
        weights = [rng.random() for _ in trace] if rng.random() < 0.5 else []
        both_ways = rng.random() < 0.5
        down = [rate * 2 for rate in trace] if both_ways else links[varying].down_bytes_per_s
        given: list[Any] = list(links)
        given[varying] = {"up_bytes_per_s": trace, "down_bytes_per_s": down, "rtt_s": 0.01, "weights": weights}

        def at(
            moment: int, links: Any = links, varying: int = varying, trace: Any = trace, both: bool = both_ways
        ) -> Any:
            now = list(links)
            fixed = links[varying].down_bytes_per_s
            rate = trace[moment]
            now[varying] = Link(up_bytes_per_s=rate, down_bytes_per_s=rate * 2 if both else fixed, rtt_s=0.01)
            return now

        parts = weights or [1.0] * moments

        def late(one: Tried, at: Any = at, parts: list[float] = parts) -> float:
            return p95([(one.latency_s(at(i)), part) for i, part in enumerate(parts)])

        def mean(one: Tried, at: Any = at, parts: list[float] = parts) -> float:
            return sum(one.latency_s(at(i)) * part for i, part in enumerate(parts)) / sum(parts)

        tried = list(every_assignment(costs))
        found = plan(costs, named(given), objective="latency_p95")
        check(label, found, tried, late)
        assert found.seconds == pytest.approx(found.value, rel=EXACT, abs=1e-15), label
        check(label, plan(costs, named(given)), tried, mean)
        weighted = plan(costs, named(given), objective={"latency": 1.0, "latency-p95": 2.0})
        check(label, weighted, tried, lambda one: mean(one) + 2.0 * late(one))


def p95(moments: list[tuple[float, float]]) -> float:
    """The least value that is not exceeded in 95 % of the weight."""
    total, reached = sum(part for _, part in moments), 0.0
    for value, part in sorted(moments):
        reached += part
        if reached >= 0.95 * total * (1 - 1e-12):
            return value
    raise AssertionError("no moments")


def test_p95_of_several_varying_links_states_its_gap() -> None:
    """Value and bound are honest: no assignment is below the bound, and the value is that of the plan's own cut."""
    gaps = []
    for label, rng, costs in instances(25, 3, 4):
        traces = [[10 ** rng.uniform(4, 7) for _ in range(rng.randrange(2, 9))] for _ in range(2)]
        given = [
            {"up_bytes_per_s": traces[0], "down_bytes_per_s": rng.sample(traces[0], len(traces[0])), "rtt_s": 0.01},
            {"up_bytes_per_s": traces[1], "down_bytes_per_s": 1e6, "rtt_s": 0.02},
        ]
        scenes = [
            [
                Link(up_bytes_per_s=up, down_bytes_per_s=down, rtt_s=0.01),
                Link(up_bytes_per_s=other, down_bytes_per_s=1e6, rtt_s=0.02),
            ]
            for up, down in zip(traces[0], given[0]["down_bytes_per_s"], strict=True)
            for other in traces[1]
        ]
        values = {
            assignment: p95([(assignment.latency_s(links), 1.0) for links in scenes])
            for assignment in every_assignment(costs)
        }
        found = plan(costs, named(given), objective="latency_p95")
        tier_of = {name: tier for tier, names in enumerate(found.cut.values()) for name in names}
        mine = tuple(tier_of[layer.name] for layer in costs.layers)
        own = min(value for one, value in values.items() if one.tier_of == mine)
        assert found.value == pytest.approx(own, rel=EXACT), label
        assert found.certificate.lower_bound <= min(values.values()) * (1 + EXACT), label
        gaps.append(found.value - min(values.values()))
    assert sorted(gaps)[len(gaps) // 2] <= 1e-12


def test_the_table_of_three_tiers_is_best_at_every_first_bandwidth() -> None:
    """Choosing from the rows is as good as trying every assignment, whatever the first link's rate and round trip."""
    for label, rng, costs in instances(20, 3, 5):
        links = some_links(rng, 3)
        found, tried = plan(costs, named(links)), list(every_assignment(costs))
        assert len({row.name for row in found.table.rows}) == len(found.table.rows), label
        for up, rtt_s in itertools.product((1e2, 1e3, 1e4, 1e5, 1e6, 1e8), (0.0, 0.02, 0.3)):
            now = Link(up_bytes_per_s=up, down_bytes_per_s=links[0].down_bytes_per_s, rtt_s=rtt_s)
            chosen = choose_row(found.table, Conditions(link=now))
            assert chosen is not None
            best = min(assignment.latency_s([now, links[1]]) for assignment in tried)
            assert latency_s(chosen, Conditions(link=now)) == pytest.approx(best, rel=1e-7, abs=1e-15), (label, now)


def test_rows_differ_by_compression_on_a_later_link_alone() -> None:
    """Nothing goes up the first link, so its row says nothing of compression: the table once kept the slower twin."""
    packed = {"bytes": 9, "codecs": {"raw+zstd": {"bytes": 1}}}
    first = {"name": "a", "reads": [], "writes": {"t": packed}, "seconds": {"edge": 1.0}}
    second = {"name": "b", "reads": ["t"], "writes": {"o": {"bytes": 0}}, "seconds": {"cloud": 1.0}}
    costs = load_costs(
        {"model": "m", "tiers": ["device", "edge", "cloud"], "inputs": {}, "outputs": ["o"], "layers": [first, second]}
    )
    link = Link(up_bytes_per_s=1.0, down_bytes_per_s=1.0, rtt_s=0.0)
    found = plan(costs, {"device-edge": link, "edge-cloud": link})
    assert found.seconds == 3.0
    assert [latency_s(row, Conditions(link=link)) for row in found.table.rows] == [3.0]


def test_the_agent_chooses_from_an_energy_table_by_joules() -> None:
    """The device takes the row that spends least at today's bandwidth, not the fastest."""
    for label, rng, costs in instances(20, 2, 6):
        (link,) = some_links(rng, 2)
        given = {"up_bytes_per_s": link.up_bytes_per_s, "down_bytes_per_s": link.down_bytes_per_s, "rtt_s": link.rtt_s}
        radio = {"radio": dataclasses.asdict(LTE)}
        found = plan(costs, {"device-edge": given | radio}, objective={"latency": 1.0, "energy": 0.3})
        idle, busy, tried = costs.idle_watts["device"], busy_watts(costs), list(every_assignment(costs))
        for up in (1e3, 1e4, 1e5, 1e6, 1e8):
            now = Link(up_bytes_per_s=up, down_bytes_per_s=link.down_bytes_per_s, rtt_s=link.rtt_s)
            chosen = choose_row(found.table, Conditions(link=now))
            assert chosen is not None
            spent = cost(chosen, Conditions(link=now), found.table.weights, found.table.power)
            best = min(
                assignment.latency_s([now]) + 0.3 * assignment.energy_j([now], idle, busy, LTE) for assignment in tried
            )
            assert spent == pytest.approx(best, rel=1e-7, abs=1e-15), label


def test_regret_bounds_what_load_and_slow_down_cost() -> None:
    """At the planned link, for any factors in range, the table costs no more above the best than it says."""
    for label, rng, costs in instances(25, rng_tiers := 3, 4):
        links = some_links(rng, rng_tiers)
        found, tried = plan(costs, named(links)), list(every_assignment(costs))
        assert found.regret >= 0 and found.table.regret == found.regret, label
        for load, slowdown in [(1, 1), (2, 1), (8, 4), (3, 1.5), (rng.uniform(1, 8), rng.uniform(1, 4))]:
            now = Conditions(link=links[0], server_load=load, device_slowdown=slowdown)
            chosen = min(latency_s(row, now) for row in found.table.rows)
            best = min(assignment.latency_s(links, load, slowdown) for assignment in tried)
            assert chosen <= best * (1 + found.regret + EXACT) + 1e-15, (label, load, slowdown)


def test_regret_counted_a_row_that_the_table_had_dropped() -> None:
    """Of cuts equal at every bandwidth the table keeps one; the other was then counted as if it were there, and the
    regret was too small."""
    layers = [
        {"name": "a", "reads": ["i"], "writes": {"t": {"bytes": 10}}, "seconds": {"device": 1.0, "cloud": 1.0}},
        {"name": "b", "reads": ["t"], "writes": {"o": {"bytes": 0}}, "seconds": {"device": 9.0, "cloud": 1.0}},
    ]
    costs = load_costs(
        {
            "model": "m",
            "tiers": ["device", "cloud"],
            "inputs": {"i": {"bytes": 10}},
            "outputs": ["o"],
            "layers": layers,
        }
    )
    link = Link(up_bytes_per_s=100.0, down_bytes_per_s=100.0, rtt_s=0.0)
    found = plan(costs, {"device-cloud": link})
    assert found.cut["device"] == ("a",)
    slow = choose_row(found.table, Conditions(link=link, device_slowdown=4.0))
    assert slow is not None and slow.name == "remote"


def test_a_three_tier_row_assigns_layers_to_tiers() -> None:
    """The first link's figures stand in the row, the second's in its hop; the device's arithmetic needs no more."""
    costs = random_tier_costs(random.Random(5), 4, 3)
    links = [Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.0)] * 2
    rows = plan(costs, named(links)).table.rows
    for row in rows:
        for hop in row.hops:
            assert hop.tier == "cloud" and set(hop.remote) <= set(row.remote)
        assert (row.further_links_s > 0) == any(hop.up_bytes + hop.down_bytes for hop in row.hops)
    assert any(row.hops for row in rows)
