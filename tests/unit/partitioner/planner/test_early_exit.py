"""Plans with an early exit: the best cut against every cut at every share, prices, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from edgesplit.cascade import EXIT, WHOLE
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit_partitioner import Costs, load_costs, plan
from edgesplit_partitioner.planner.cascade import PlannedLinks, cascade_figures, figures_of
from edgesplit_partitioner.planner.cascade_calibration import (
    CLASS_SCORES,
    CascadeRequest,
    FamilyAnswers,
    VariantAnswers,
)
from edgesplit_partitioner.planner.early_exit import check_exit, layers_for, on_device, plan_exit, rows_at_exit
from edgesplit_partitioner.presentation.plan_json import describe_exit
from support.brute_force import every_cut, random_costs

LINKS = {"device-cloud": {"up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6, "rtt_s": 0.02}}
REQUEST = CascadeRequest(changed=0.05, exit_output="early")
SHARES = (0.001, 0.01, 0.1, 0.3, 0.7, 1.0)


def costs(**changes: Any) -> Costs:
    """A stem, a head on it whose output is `early`, and a long body to `final`."""

    def layer(name: str, reads: list[str], writes: str, size: int, device_s: float) -> dict[str, Any]:
        return {
            "name": name, "reads": reads, "writes": {writes: {"bytes": size}},
            "seconds": {"device": device_s, "cloud": device_s / 20}, "joules": {"device": 4 * device_s},
        }  # fmt: skip

    return load_costs(
        {
            "model": "birds@1", "tiers": ["device", "cloud"], "inputs": {"frame": {"bytes": 600_000}},
            "outputs": ["early", "final"], "idle_watts": {"device": 2.0},
            "layers": [
                layer("stem", ["frame"], "trunk", 60_000, 0.02), layer("head", ["trunk"], "early", 40, 0.002),
                layer("body", ["trunk"], "deep", 20_000, 0.2), layer("classify", ["deep"], "final", 40, 0.1),
            ],
            **changes,
        }
    )  # fmt: skip


def answers(count: int = 300, wrong: int = 3, vague: int = 100) -> FamilyAnswers:
    """The exit is sure of all but `vague` samples; of these it answers all but `wrong` otherwise."""
    truth = tuple(number % 5 for number in range(count))
    labels = tuple((label + (number >= count - vague + wrong)) % 5 for number, label in enumerate(truth))
    sure: tuple[float | None, ...] = tuple(1.0 - number / count for number in range(count))
    given = {
        EXIT: VariantAnswers(labels=labels, scores=dict.fromkeys(CLASS_SCORES, sure)),
        WHOLE: VariantAnswers(labels=truth, scores=dict.fromkeys(CLASS_SCORES, sure)),
    }
    return FamilyAnswers(answer="class:final", truth=truth, variants=given)


@pytest.mark.parametrize("seed", range(25))
def test_the_best_cut_is_the_best_at_every_share_that_goes_on(seed: int) -> None:
    """Random graphs and links: of all cuts with the exit on the device, the planner's costs least for every share,
    each priced from its own layers."""
    rng = random.Random(seed)
    graph = random_costs(rng, rng.randrange(2, 7))
    exit_output = rng.choice([name for layer in graph.layers for name in layer.writes])
    held = layers_for(graph.layers, exit_output)
    before_s = sum(layer.seconds["device"] for layer in graph.layers if layer.name in held)
    up, down, rtt = 10 ** rng.uniform(4, 7), 10 ** rng.uniform(4, 7), rng.choice([0.0, 0.03])
    link = {"device-cloud": {"up_bytes_per_s": up, "down_bytes_per_s": down, "rtt_s": rtt}}
    found = plan(on_device(graph, exit_output), link).seconds
    cuts = [cut for cut in every_cut(graph) if held <= cut.on_device]
    for share in SHARES:
        least = min(before_s + share * (cut.seconds(up, down, rtt) - before_s) for cut in cuts)
        assert before_s + share * (found - before_s) == pytest.approx(least, rel=1e-9, abs=1e-12), (seed, share)


@pytest.mark.parametrize("objective", ["latency", "energy"])
def test_a_request_that_goes_on_costs_what_the_row_does(objective: str) -> None:
    """Split at the exit and added up again, for every row of the table: nothing is counted twice or lost."""
    planned = plan_exit(costs(), LINKS, REQUEST, answers(), objective=objective)
    result = planned.result
    links, power = PlannedLinks(result.links, result.tier_links), result.table.power
    assert power is not None
    for row in result.table.rows:
        first, rest = rows_at_exit(result.costs, "early", row)
        assert first.device_s == pytest.approx(0.022) and first.device_joules == pytest.approx(0.088)
        both, whole = cascade_figures(first, rest, 1.0, 0.0, links, power), figures_of(row, links, power)
        assert both.seconds == pytest.approx(whole.seconds) and both.joules == pytest.approx(whole.joules)
        assert (both.up_bytes, both.server_runs) == (whole.up_bytes, whole.server_runs)


def test_the_exit_is_planned_priced_and_said() -> None:
    """Every row computes it on the device; two thirds of the frames and the few that may differ stay."""
    planned = plan_exit(costs(), LINKS, REQUEST, answers())
    cascade, table = planned.planned.cascade, planned.result.table
    assert table.cascade == cascade and (cascade.first, cascade.second, cascade.exit_output) == (EXIT, WHOLE, "early")
    assert all({"stem", "head"} <= set(row.layers) for row in table.rows) and len(table.rows) > 1
    assert 0.2 < cascade.escalated < 1 / 3 and cascade.answer == "class:final" and cascade.accuracy == 0.0
    part, figures = planned.planned.part, planned.planned.figures
    assert (part.layers, part.of_layers) == (2, 4) and part.seconds == pytest.approx(0.022)
    assert figures.seconds == pytest.approx(0.022 + cascade.escalated * (planned.result.seconds - 0.022))
    assert figures.p95_s == pytest.approx(planned.result.seconds)
    assert planned.planned.gain > 1 and "it gains on the planned link" in planned.planned.gain_text
    assert planned.planned.text.endswith("at most 5 % of answers differ (90 % sure, 300 samples)")
    told = describe_exit(planned)
    assert told["exit"]["row"] == told["best"] and told["table"]["cascade"]["exit_output"] == "early"
    assert plan(costs(), LINKS).table.cascade is None


def test_a_forced_cut_keeps_the_exit() -> None:
    """All on the device may end early; what would send before the exit is refused."""
    local = plan_exit(costs(), LINKS, REQUEST, answers(), limits={"force": "device"})
    assert local.planned.row == "local" and local.planned.figures.server_runs == 0
    with pytest.raises(InfeasibleLimits, match="no cut satisfies both"):
        plan_exit(costs(), LINKS, REQUEST, answers(), limits={"force_after": "stem"})


def test_several_scores_divide_the_certainty() -> None:
    """Each is tried; the promise holds whichever is taken."""
    planned = plan_exit(costs(), LINKS, msgspec.structs.replace(REQUEST, scores=CLASS_SCORES), answers()).planned
    alone = plan_exit(costs(), LINKS, REQUEST, answers()).planned
    assert [one.score for one in planned.tried] == list(CLASS_SCORES) and len(alone.tried) == 1
    assert planned.cascade.escalated >= alone.cascade.escalated


@pytest.mark.parametrize(
    ("outputs", "exit_output", "told"),
    [
        (("early", "final"), "erly", "no output 'erly' to exit by, only early, final"),
        (("early", "final", "deep"), "early", "beside it the model has 2: final, deep"),
        (("early",), "early", "beside it the model has 0: none"),
        (("trunk", "final"), "final", "needs every layer that trunk needs"),
        (("frame", "final"), "frame", "is an input of the model"),
    ],
)
def test_what_is_no_exit_is_refused(outputs: tuple[str, ...], exit_output: str, told: str) -> None:
    """With what to name instead."""
    with pytest.raises(UsageError, match=told):
        check_exit(costs().layers, outputs, exit_output)


@pytest.mark.parametrize("objective", ["latency_p95", "throughput"])
def test_objectives_that_depend_on_the_share_are_refused(objective: str) -> None:
    """Their best cut is not that of whole requests."""
    with pytest.raises(UsageError, match="give latency or energy"):
        plan_exit(costs(), LINKS, REQUEST, answers(), objective=objective)


def test_samples_that_promise_nothing_are_refused() -> None:
    """Too few, and how many it takes; or so many that differ that nothing stays."""
    with pytest.raises(
        InfeasibleLimits, match=r"20 samples are too few .*at least 45; give the model more .edgectl prof"
    ):
        plan_exit(costs(), LINKS, REQUEST, answers(20, 0, 0))
    with pytest.raises(InfeasibleLimits, match="no frame stays at the exit early"):
        plan_exit(costs(), LINKS, msgspec.structs.replace(REQUEST, changed=0.01), answers(300, 0, 300))


def test_an_exit_that_the_device_cannot_run_is_refused() -> None:
    """Its layer is named."""
    given = msgspec.to_builtins(costs())
    given["layers"][1]["tiers"] = ["cloud"]
    with pytest.raises(InfeasibleLimits, match="layer 'head' cannot run on the device"):
        plan_exit(load_costs(given), LINKS, REQUEST, answers())
    with pytest.raises(UsageError, match="leave the variants out"):
        plan_exit(costs(), LINKS, msgspec.structs.replace(REQUEST, variants=("a", "b")), answers())
