"""The explanation of a plan is true: each statement is compared with brute force."""

from __future__ import annotations

import random

import msgspec
import pytest

from edgesplit.plan import Link
from edgesplit_cli.options.plan_limits import to_options
from edgesplit_cli.views.explain import cut_text, sentences
from edgesplit_partitioner import Costs, load_costs, plan
from edgesplit_partitioner.presentation.explain import CutChange, Explanation, explain, movable, pinned, slowed
from support import brute_force_tiers as force
from support.chain_costs import chain_costs

CLOSE = 1e-6
WIFI = Link(up_bytes_per_s=2e6, down_bytes_per_s=6e6, rtt_s=0.004)
LTE = Link(up_bytes_per_s=4e5, down_bytes_per_s=1e6, rtt_s=0.02)


def least(costs: Costs, links: list[Link], *, but: tuple[int, ...] | None = None) -> float:
    """Seconds of the best assignment, one of them left out."""
    return min(assignment.latency_s(links) for assignment in force.every_assignment(costs) if assignment.tier_of != but)


def numbers(costs: Costs, cut: dict[str, tuple[str, ...]]) -> tuple[int, ...]:
    """By layer, the number of its tier."""
    at = {layer: number for number, tier in enumerate(costs.tiers) for layer in cut.get(tier, ())}
    return tuple(at[layer.name] for layer in costs.layers)


@pytest.mark.parametrize(("tiers", "layers", "instances"), [(2, 7, 10), (3, 5, 6)])
def test_the_next_best_cut_matches_brute_force(tiers: int, layers: int, instances: int) -> None:
    """Of every assignment but the plan's none is better, over random graphs with shared tensors and bound layers."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    links = [WIFI, LTE][-(tiers - 1) :]
    tried = 0
    while tried < instances:
        costs = force.random_tier_costs(rng, layers, tiers, bound=0.2)
        named = {f"{a}-{b}": one for a, b, one in zip(costs.tiers[:-1], costs.tiers[1:], links, strict=True)}
        if not any(True for _ in force.every_assignment(costs)):
            continue
        tried += 1
        made = plan(costs, named)
        found = explain(costs, named, None, made)
        others = [
            assignment for assignment in force.every_assignment(costs) if assignment.tier_of != numbers(costs, made.cut)
        ]
        if not others:
            assert found.next_best is None
            continue
        assert found.next_best is not None and found.next_exact
        assert found.next_best.value == pytest.approx(
            min(assignment.latency_s(links) for assignment in others), rel=CLOSE, abs=1e-12
        )


def test_moves_are_complete_and_their_costs_exact() -> None:
    """Each single layer that may change its tier alone, with the seconds of the resulting assignment."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(8):
        costs = force.random_tier_costs(rng, 7, 2)
        made = plan(costs, {"device-edge": LTE})
        found = explain(costs, {"device-edge": LTE}, None, made)
        mine = numbers(costs, made.cut)
        near = {
            assignment.tier_of: assignment.latency_s([LTE])
            for assignment in sorted(force.every_assignment(costs), key=lambda one: -one.latency_s([LTE]))
            if sum(a != b for a, b in zip(assignment.tier_of, mine, strict=True)) == 1
        }
        told = {
            tuple(
                costs.tiers.index(move.target) if layer.name == move.layer else here
                for layer, here in zip(costs.layers, mine, strict=True)
            ): move
            for move in (*found.inward, *found.outward)
        }
        assert set(told) == set(near)
        for tier_of, move in told.items():
            assert move.to.value == pytest.approx(near[tier_of], rel=CLOSE, abs=1e-12)
            assert move.more == pytest.approx(near[tier_of] - made.value, rel=CLOSE, abs=1e-9)
            assert sum(move.split.values()) == pytest.approx(move.to.seconds - made.seconds, abs=1e-9)


STARTS = {"uplink": LTE.up_bytes_per_s, "round trip": LTE.rtt_s, "server load": 1.0, "device slow-down": 1.0}


def at(change: CutChange, costs: Costs, value: float) -> tuple[Costs, Link]:
    """The question with the change's subject at a value."""
    if change.subject == "uplink":
        return costs, msgspec.structs.replace(LTE, up_bytes_per_s=value)
    if change.subject == "round trip":
        return costs, msgspec.structs.replace(LTE, rtt_s=value)
    return slowed(costs, ["edge"] if change.subject == "server load" else ["device"], value), LTE


def test_the_choice_changes_exactly_at_the_stated_points() -> None:
    """On the near side of each change the cut is still the best of all, beyond it no more."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    seen = 0
    for _ in range(10):
        costs = force.random_tier_costs(rng, 6, 2)
        made = plan(costs, {"device-edge": LTE})
        mine = numbers(costs, made.cut)
        for change in explain(costs, {"device-edge": LTE}, None, made).changes:
            seen += 1
            nearer = 0.99 * change.at + 0.01 * STARTS[change.subject]
            beyond = change.at * (1.01 if change.rises else 0.99)
            for value, best in ((nearer, True), (beyond, False)):
                there, link = at(change, costs, value)
                own = min(
                    assignment.latency_s([link])
                    for assignment in force.every_assignment(there)
                    if assignment.tier_of == mine
                )
                assert (own <= least(there, [link]) * (1 + 1e-7)) == best, (change, value)
    assert seen > 10


def test_a_limit_that_binds_is_named_with_its_price() -> None:
    """Without keep_first the plan would be another; without the deadline it would be the same."""
    found = explain(chain_costs(), {"device-cloud": LTE}, {"keep_first": 3, "deadline_s": 2.0})
    told = {bind.limit: bind for bind in found.limits}
    free = plan(chain_costs(), {"device-cloud": LTE})
    assert told["keep_first=3"].binds
    assert told["keep_first=3"].costs == pytest.approx(0.49 - free.value)
    assert not told["deadline_s=2.0"].binds


def test_a_binding_memory_limit_prices_the_fallback() -> None:
    """A warm fallback holds the whole model's weights; the price of giving it up is reported."""
    heavy = force_weights(chain_costs(), 90_000)
    limits = {"memory_bytes": 460_000.0}
    found = explain(heavy, {"device-cloud": LTE}, limits)
    bind = {limit.limit: limit for limit in found.limits}
    assert set(bind) == {"memory_bytes=460000.0", "fallback=warm"}
    assert bind["fallback=warm"].without.value <= found.best.value


def force_weights(costs: Costs, weight_bytes: int) -> Costs:
    """The same costs, every layer as heavy."""
    layers = tuple(msgspec.structs.replace(layer, weight_bytes=weight_bytes) for layer in costs.layers)
    return msgspec.structs.replace(costs, layers=layers)


def test_a_forced_cut_is_compared_with_the_free_optimum() -> None:
    """No next best and no changes, but the cost of forcing."""
    found = explain(chain_costs(), {"device-cloud": LTE}, {"force": "device"})
    assert found.next_best is None and not found.changes
    (bind,) = found.limits
    assert bind.binds and bind.limit == "force=device"
    assert any("--partition device" in line and "binds" in line for line in sentences(found))


@pytest.mark.parametrize("objective", ["energy", "latency_p95", "throughput", {"latency": 1.0, "energy": 0.2}])
def test_every_objective_is_explained(objective: str | dict[str, float]) -> None:
    """With values in its own unit, no cut better than the plan, and sentences for people."""
    found = explain(chain_costs(), {"device-cloud": LTE}, objective=objective)
    assert found.next_best is not None and found.next_best.value >= found.best.value * (1 - 1e-9)
    assert all(move.more >= -1e-9 for move in (*found.inward, *found.outward))
    assert found.unit == {"energy": "J", "latency_p95": "s", "throughput": "s"}.get(str(objective), "")
    assert list(sentences(found))


def sentences_of(found: Explanation) -> str:
    """All sentences."""
    return " ".join(sentences(found))


def test_explanation_sentences_give_reasons_and_alternatives() -> None:
    """The cut, where its seconds go, the pure modes, and the next best with its distance."""
    text = sentences_of(explain(chain_costs(), {"device-cloud": LTE}))
    assert "Why the cut after narrow?" in text and "device 90.0 + link" in text
    assert "All on the device takes 490.0 ms; all on cloud takes" in text
    assert "Next best is" in text and "No limit was set." in text


def test_cuts_and_limits_are_named_as_options() -> None:
    """As the command line spells them."""
    found = explain(chain_costs(), {"device-cloud": LTE}, {"force": "device"})
    assert cut_text(found.tiers, found.best) == "all on the device"
    spread = {"device": 1, "edge": 1, "cloud": 1}
    three = msgspec.structs.replace(found.best, cut=spread, last={"device": "a", "edge": "b"})
    assert cut_text(tuple(spread), three) == "device up to a, edge up to b, cloud the rest"
    assert to_options("memory_bytes=1048576") == "--memory 1MiB"
    assert to_options("deadline_s=0.1") == "--deadline 100ms"
    assert to_options("energy_joules=0.5") == "--energy 500mJ"
    assert to_options("keep_raw_input") == "--keep-raw-input"


def test_a_layer_moves_over_a_tier_that_cannot_run_it() -> None:
    """Where the next tier is not allowed, the one after it is tried; what reads it must not be left behind."""
    anywhere = {"device": 1, "edge": 1, "cloud": 1}
    first = {"name": "a", "reads": ["x"], "writes": {"y": {"bytes": 1}}, "seconds": {"device": 1, "cloud": 1}}
    second = {"name": "b", "reads": ["y"], "writes": {"z": {"bytes": 1}}, "seconds": anywhere}
    ends = {"inputs": {"x": {"bytes": 1}}, "outputs": ["z"]}
    costs = load_costs({"model": "m", "tiers": list(anywhere), **ends, "layers": [first, second]})
    assert movable(costs, costs.tiers, {"a": "device", "b": "cloud"}) == [("a", "cloud"), ("b", "edge")]
    assert movable(costs, costs.tiers, {"a": "device", "b": "edge"}) == [("b", "device"), ("b", "cloud")]
    assert [layer.tiers for layer in pinned(costs, {"a": "device", "b": "edge"}).layers] == [("device",), ("edge",)]
