"""Limits on sums, through `plan`: their effect on the cut and its table, and the refusal when they are infeasible."""

from __future__ import annotations

import itertools
import os
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Conditions, Link, latency_s, slowest_stage_s
from edgesplit_partitioner import Costs, load_costs, plan
from edgesplit_partitioner.formulation.constraints import Limits
from edgesplit_partitioner.milp.conflict import LimitsInConflict
from edgesplit_partitioner.milp.model import StopCriteria, stopped_text
from support.brute_force_limits import Trial, every_trial, keeps, random_instance

LINK = Link(up_bytes_per_s=1e4, down_bytes_per_s=1e6, rtt_s=0.0)
LINKS = {"device-cloud": LINK}


def camera(**more: Any) -> Costs:
    """conv -> head, on a link so slow that all-local is best: 2 s, against 1.1 s + 0.2 s for the features' 2,000 bytes
    with head remote, and 0.2 s + 3 s for the frame.
    """
    int8 = {"bytes": 500, "encode_s": {"device": 0.001}, "decode_s": {"cloud": 0.001}, "loss": 0.01}
    features = {"bytes": 9000, "codecs": {"int8": int8}}
    rows = [
        {"name": "conv", "reads": ["frame"], "writes": {"features": features}, "weight_bytes": 1000},
        {"name": "head", "reads": ["features"], "writes": {"out": {"bytes": 8}}, "weight_bytes": 50_000},
    ]
    for row in rows:
        row |= {"seconds": {"device": 0.5, "cloud": 0.05}, "joules": {"device": 2.0}}
    given = {"model": "camera@1", "tiers": ["device", "cloud"], "inputs": {"frame": {"bytes": 30_000}}}
    return load_costs(given | {"outputs": ["out"], "layers": rows, "idle_watts": {"device": 1.0}} | more)


def device_layers(**limits: Any) -> tuple[str, ...]:
    return plan(camera(), LINKS, limits=limits).cut["device"]


def test_memory_moves_layers_away_unless_the_fallback_keeps_them() -> None:
    """The head's weights do not fit; with a warm fallback nothing does, since it keeps them all."""
    assert device_layers(fallback="none") == ("conv", "head")
    assert device_layers(fallback="none", memory_bytes=45_000) == ("conv",)
    assert device_layers(fallback="none", memory_bytes=30_000) == ()
    with pytest.raises(LimitsInConflict) as refused:
        device_layers(memory_bytes=45_000)
    assert refused.value.conflict == ("memory_bytes=45000", "fallback=warm")
    assert "memory_bytes=81000 instead of 45000" in str(refused.value)
    assert "fallback=cold or none" in str(refused.value)


def test_memory_includes_the_warm_fallback() -> None:
    """Weights of the whole model where warm; the peak is frame and features while conv runs."""
    warm = plan(camera(), LINKS, limits={"memory_bytes": 1e6}).memory
    assert (warm.weight_bytes, warm.peak_bytes, warm.bytes) == (51_000, 39_000, 90_000)
    none = plan(camera(), LINKS, limits={"force": "cloud", "fallback": "none"})
    assert (none.memory.weight_bytes, none.memory.peak_bytes) == (0, 30_000)
    assert none.to_builtins()["memory"] == {"weights": 0, "peak": 30_000, "bytes": 30_000}


def test_an_infeasible_deadline_is_refused_with_a_feasible_one() -> None:
    """A lossy codec makes an earlier deadline possible, once it is allowed."""
    with pytest.raises(LimitsInConflict) as refused:
        device_layers(deadline_s=0.7)
    assert refused.value.conflict == ("deadline_s=0.7",)
    assert refused.value.relaxations[0].least == pytest.approx(1.0)
    assert "deadline_s=1 instead of 0.7" in str(refused.value)
    assert device_layers(deadline_s=0.7, max_loss=0.01) == ("conv",)


@pytest.mark.parametrize("tenths", range(10))
def test_the_suggested_relaxation_is_feasible_as_printed(tenths: int) -> None:
    """Rounded to six digits it once fell short of the least value, and following the suggestion gave the same
    refusal."""
    seconds = 1.347990 + tenths * 1e-7
    ends: dict[str, Any] = {"model": "m", "tiers": ["device", "cloud"], "inputs": {}, "outputs": []}
    costs = load_costs(ends | {"layers": [{"name": "a", "reads": [], "writes": {}, "seconds": {"device": seconds}}]})
    with pytest.raises(LimitsInConflict) as refused:
        plan(costs, LINKS, limits={"deadline_s": 1.0})
    told = float(re.findall(r"deadline_s=(\S+) instead", str(refused.value))[0])
    assert told == pytest.approx(seconds, rel=1e-5)
    assert plan(costs, LINKS, limits={"deadline_s": told}).seconds == seconds


def test_a_too_small_loss_allowance_names_both_limits() -> None:
    """Each with the value it would need while the other is kept."""
    with pytest.raises(LimitsInConflict) as refused:
        device_layers(deadline_s=0.7, max_loss=0.005)
    assert refused.value.conflict == ("deadline_s=0.7", "max_loss=0.005")
    assert [relaxation.least for relaxation in refused.value.relaxations] == [pytest.approx(1.0), pytest.approx(0.01)]


def test_keep_first_conflicts_with_memory() -> None:
    """The largest feasible number is reported."""
    with pytest.raises(LimitsInConflict) as refused:
        device_layers(keep_first=2, memory_bytes=45_000, fallback="none")
    assert set(refused.value.conflict) == {"keep_first=2", "memory_bytes=45000"}
    assert "keep_first=1" in str(refused.value)


def test_several_conflicts_suggest_a_joint_relaxation() -> None:
    """Relaxing one limit would not be enough; all that are named together are, and none of them can be left out."""
    impossible = {"deadline_s": 0.01, "energy_joules": 0.001, "fallback": "none"}
    with pytest.raises(LimitsInConflict) as refused:
        device_layers(**impossible)
    found = {relaxation.name.partition("=")[0]: relaxation.least for relaxation in refused.value.together}
    assert set(found) == {"deadline_s", "energy_joules"}
    assert "is not enough" not in str(refused.value)
    assert "Enough would be, together: " in str(refused.value)
    enough = {name: least * (1 + 1e-6) for name, least in found.items() if least is not None}
    device_layers(**impossible | enough)
    for name in found:
        with pytest.raises(LimitsInConflict):
            device_layers(**impossible | enough | {name: impossible[name]})


def test_an_energy_limit_needs_known_joules() -> None:
    """A limit on an unknown quantity is refused, not ignored."""
    costs = camera()
    bare = {layer: {} for layer in ("conv", "head")}
    layers = [
        {"name": layer.name, "reads": layer.reads, "writes": {w: {"bytes": 1} for w in layer.writes}}
        for layer in costs.layers
    ]
    for layer in layers:
        layer |= {"seconds": {"device": 1.0, "cloud": 1.0}, "joules": bare[str(layer["name"])]}
    with pytest.raises(UsageError, match="no joules on 'device' for 2 layers"):
        plan(camera(layers=layers), LINKS, limits={"energy_joules": 1.0})


def test_the_energy_objective_offloads_what_costs_more_than_waiting() -> None:
    """All-local spends 4 J; waiting for the frame, at 1 W, 3.1 J."""
    assert device_layers(energy_joules=3.5) in ((), ("conv",))
    kept = plan(camera(), LINKS, limits={"energy_joules": 3.5})
    assert kept.joules is not None and kept.joules <= 3.5
    assert all(row.device_joules is None or not row.is_local for row in kept.table.rows)


def test_the_throughput_objective_minimises_the_slowest_stage() -> None:
    """0.5 s on the device with head remote, if its features took less than that on the link; here they take 0.9 s."""
    found = plan(camera(), LINKS, objective="throughput")
    assert found.cut["device"] == ("conv",)
    assert found.value == pytest.approx(0.9) == slowest_stage_s(found.row, Conditions(link=LINK))
    assert found.certificate.gap == 0.0


def test_the_optimality_gap_is_stated() -> None:
    """With either solver."""
    for limits in ({}, {"memory_bytes": 1e6}, {"deadline_s": 2.0}):
        certificate = plan(camera(), LINKS, limits=limits).certificate
        assert 0.0 <= certificate.gap <= 1e-6 and certificate.lower_bound > 0


@pytest.mark.parametrize("batch", range(4))
def test_the_table_keeps_the_limits_and_is_best_at_every_bandwidth(batch: int) -> None:
    """Of the assignments that keep memory and loss, at 25 bandwidths; a deadline is kept on the planned link."""
    start = int(os.environ["EDGESPLIT_SEED"]) + 8 * batch
    for seed in range(start, start + 8):
        check_table(f"seed {seed}", random.Random(seed))


@pytest.mark.parametrize("tiers", [2, 3])
def test_plan_figures_match_brute_force(tiers: int) -> None:
    """Value, seconds, bytes and memory of a plan under limits are those of the best assignment."""
    start = int(os.environ["EDGESPLIT_SEED"])
    for seed in range(start, start + 12):
        rng = random.Random(seed)
        instance = random_instance(rng, rng.randrange(1, 7 if tiers == 2 else 5), tiers, lossy=False)
        trials = every_trial(instance, lossy=False)
        if not trials:
            continue
        objective = rng.choice(["latency", "throughput"])
        given = {"memory_bytes": rng.choice(trials).memory, "deadline_s": rng.choice(trials).latency * 2}
        limits = Limits(**given, fallback="none")
        possible = [trial for trial in trials if keeps(trial, instance, limits)]
        links = dict(zip((f"{a}-{b}" for a, b in itertools.pairwise(instance.tiers)), instance.links, strict=True))
        if not possible:
            with pytest.raises(InfeasibleLimits):
                plan(instance.costs, links, objective=objective, limits=limits, codecs=instance.codecs)
            continue
        found = plan(instance.costs, links, objective=objective, limits=limits, codecs=instance.codecs)
        best = min(trial.value(objective) for trial in possible)
        assert found.value == pytest.approx(best, rel=1e-6, abs=1e-12), seed
        tier = tuple(
            next(k for k, name in enumerate(instance.tiers) if layer.name in found.cut[name])
            for layer in instance.costs.layers
        )
        mine = [
            assignment
            for assignment in possible
            if assignment.tier == tier and assignment.value(objective) <= best * (1 + 1e-6) + 1e-12
        ]
        figures = {(round(assignment.latency, 9), assignment.bytes, assignment.memory) for assignment in mine}
        assert (round(found.seconds, 9), found.bytes, found.memory.bytes) in figures, seed


def check_table(label: str, rng: random.Random) -> None:
    lossy = rng.random() < 0.5
    instance = random_instance(rng, rng.randrange(1, 5 if lossy else 7), 2, lossy=lossy)
    measured = {name for tensor in instance.costs.tensors.values() for name in tensor.codecs}
    codecs = tuple(name for name in instance.codecs if name in measured or name.startswith("raw"))
    instance = replace(instance, codecs=codecs)
    trials = every_trial(instance, lossy=lossy)
    if not trials:
        return
    given: dict[str, Any] = {"fallback": rng.choice(["cold", "none"]), "memory_bytes": rng.choice(trials).memory}
    if lossy:
        given["max_loss"] = rng.choice(trials).loss + 1e-6
    limits = Limits(**given)
    possible = [trial for trial in trials if keeps(trial, instance, limits)]
    if not possible:
        with pytest.raises(InfeasibleLimits):
            plan(instance.costs, {"device-cloud": instance.links[0]}, limits=limits, codecs=codecs)
        return
    link = instance.links[0]
    limits = Limits(**given, deadline_s=min(trial.latency for trial in possible) * rng.choice([1.0, 1.5]))
    rows = plan(instance.costs, {"device-cloud": link}, limits=limits, codecs=codecs).table.rows
    chosen = min(latency_s(row, Conditions(link=link)) for row in rows)
    assert limits.deadline_s is not None and chosen <= limits.deadline_s * (1 + 1e-9), label
    placed = {tuple(int(layer.name not in row.layers) for layer in instance.costs.layers) for row in rows}
    assert placed <= {trial.tier for trial in possible}, label
    for step in range(25):
        now = Link(up_bytes_per_s=10 ** (2 + step / 4), down_bytes_per_s=link.down_bytes_per_s, rtt_s=link.rtt_s)
        best = min(seconds_at(trial, instance.links[0], now) for trial in possible)
        found = min(latency_s(row, Conditions(link=now)) for row in rows)
        assert found == pytest.approx(best, rel=1e-6, abs=1e-12), (label, now)


def seconds_at(trial: Trial, planned: Link, now: Link) -> float:
    """A trial's latency with another uplink."""
    return trial.latency + trial.up_bytes * (1 / now.up_bytes_per_s - 1 / planned.up_bytes_per_s)


def test_all_local_was_not_in_the_table_where_it_beats_a_cut_that_sends_nothing_up() -> None:
    """Without a fallback: the cut is better without a round trip, all-local with one."""
    check_table("as found", random.Random(487003115))


def test_throughput_at_one_bit_per_second_is_planned() -> None:
    """The prices of a 1 bit/s link are 1e12 times those of the layers: "nothing found within 60 s" after 0.8 s."""
    slow = {"device-cloud": Link(up_bytes_per_s=0.125, down_bytes_per_s=0.125, rtt_s=0.05)}
    layers = [
        {
            "name": f"l{number}",
            "reads": [f"t{number}"],
            "writes": {f"t{number + 1}": {"bytes": 600_000}},
            "seconds": {"device": 1e-6, "cloud": 1e-7},
        }
        for number in range(20)
    ]
    given = {"model": "deep@1", "tiers": ["device", "cloud"], "inputs": {"t0": {"bytes": 600_000}}, "layers": layers}
    planned = plan(load_costs(given | {"outputs": ["t20"]}), slow, objective="throughput")
    assert planned.row.is_local
    assert planned.value == pytest.approx(20e-6)


def test_a_solver_failure_was_reported_as_a_lack_of_time() -> None:
    """Only a time limit that was reached is called one; a failure names the solver's status."""
    stop = StopCriteria(time_limit_s=60.0)
    assert "within 60 s" in stopped_text(1, "Time limit reached. (HiGHS Status 13: Time limit reached)", stop)
    failed = stopped_text(4, "(HiGHS Status 4: Solve error)", stop)
    assert "60 s" not in failed and "status 4" in failed and "Solve error" in failed
