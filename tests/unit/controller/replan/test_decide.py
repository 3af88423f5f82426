"""The decision to replace a table: only for true drift that costs something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from edgesplit.plan import Conditions, Link, Plan
from edgesplit_controller.replan.decide import (
    ConfidencePolicy,
    Verdict,
    compare_tables,
    missing_evidence,
    remaining_cool_down_s,
)
from edgesplit_controller.replan.evidence import Observation, TelemetryEvidence, estimate, measurements_of
from edgesplit_controller.replan.pricing import (
    MOST_OBSERVATIONS,
    compare_costs,
    price_in_use,
    price_new,
    split_in_time,
    thin_out,
)
from edgesplit_partitioner import plan as make_plan
from edgesplit_partitioner.costs.from_telemetry import with_measurements
from support.replan_samples import LINK, MODEL, RELEASE, Fleet, costs_of, device_measurements, world

DOUBT = ConfidencePolicy(least_devices=3, observe_s=20.0)
NAMES = ("a", "b", "c", "d", "e")
THIN = Link(up_bytes_per_s=1e6, down_bytes_per_s=4e6, rtt_s=0.01)
ENERGY: dict[str, Any] = {"objective": "energy", "limits": {"deadline_s": 0.034}}


def verdict(told: dict[str, list[TelemetryEvidence]], doubt: ConfidencePolicy = DOUBT, **wish: Any) -> Verdict:
    """Of the world's plan, by what these devices told."""
    costs, plan, layers = world(**wish)
    heard = device_measurements(plan, told)
    seen = estimate(heard, plan, layers)
    made = make_plan(with_measurements(costs, seen), {"device-cloud": seen.planned_link}, **wish)
    return compare_tables(heard, price_in_use(plan, layers, made.costs), price_new(made.table), seen.fixed_s, doubt)


def fleet(**wish: Any) -> Fleet:
    return Fleet(world(**wish)[1])


def telemetry_of(one: Fleet, names: Sequence[str] = NAMES, **more: Any) -> dict[str, list[TelemetryEvidence]]:
    return {name: one.telemetry(name, **more) for name in names}


def test_a_much_slower_layer_changes_the_table() -> None:
    """The profile was wrong about one layer: the table in use has no row that avoids it alone, another one does."""
    costs = costs_of(remote_part=1.0, image_bytes=60_000)
    plan, layers = world(costs)[1:]
    slow = Fleet(plan, slow={"s-head": 30.0})
    heard = device_measurements(plan, telemetry_of(slow))
    seen = estimate(heard, plan, layers)
    made = make_plan(with_measurements(costs, seen), {"device-cloud": seen.planned_link})
    found = compare_tables(heard, price_in_use(plan, layers, made.costs), price_new(made.table), 0.0, DOUBT)
    assert found.moves and found.gain > 0.25 and found.gain_low > 0.2, found
    assert "saves" in found.reason and found.new_s < found.old_s


def test_a_missed_deadline_changes_the_table_at_higher_cost() -> None:
    """Devices minimise energy and take the row that does; on the measured link that row is late."""
    found = verdict(telemetry_of(replace(fleet(**ENERGY), link=THIN)), **ENERGY)
    assert found.moves and (found.broken_before, found.broken_after) == (1.0, 0.0), found
    assert "breaks a limit in 0% of the time instead of 100%" in found.reason


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_change_the_table(seed: int) -> None:
    """Everything as planned, within a fifth."""
    noisy = replace(fleet(), noise=0.2, seed=seed)
    found = verdict(telemetry_of(noisy))
    assert not found.moves and "fits the measurements" in found.reason, found


def test_a_bandwidth_covered_by_the_table_changes_nothing() -> None:
    """The table holds the best row for every bandwidth: devices choose it by themselves."""
    found = verdict(telemetry_of(replace(fleet(), link=THIN)))
    assert not found.moves and abs(found.gain) < 0.02, found


def test_one_lying_device_changes_nothing() -> None:
    """Of three devices one claims to miss its deadline all the time."""
    honest = fleet(**ENERGY)
    told = telemetry_of(honest, NAMES[:2]) | {"liar": replace(honest, link=THIN).telemetry("liar")}
    found = verdict(told, **ENERGY)
    assert not found.moves and found.broken_before == 0.0


def test_a_temporary_outage_changes_nothing() -> None:
    """The newer half of the evidence is bad, the older half was good."""
    links = [LINK] * 10 + [THIN] * 10
    found = verdict(telemetry_of(fleet(**ENERGY), links=links), **ENERGY)
    assert not found.moves and "only for a part of the observed time" in found.reason, found


def test_an_oscillating_link_does_not_oscillate_the_table() -> None:
    """Good and bad by turns: whichever table is in use, the decision never proposes the table that the opposite
    decision would replace."""
    links = [LINK, LINK, THIN, THIN]
    there = verdict(telemetry_of(fleet(**ENERGY), links=links), **ENERGY)
    costs, plan, layers = world(**ENERGY)
    heard = device_measurements(plan, telemetry_of(Fleet(plan), links=links))
    seen = estimate(heard, plan, layers)
    other = make_plan(with_measurements(costs, seen), {"device-cloud": seen.planned_link}, **ENERGY)
    costs_then, plan_then, layers_then = world(link=seen.planned_link, **ENERGY)
    heard_then = device_measurements(plan_then, telemetry_of(Fleet(plan_then), links=links))
    believed_then = estimate(heard_then, plan_then, layers_then)
    back = make_plan(
        with_measurements(costs_then, believed_then), {"device-cloud": believed_then.planned_link}, **ENERGY
    )
    again = compare_tables(
        heard_then, price_in_use(plan_then, layers_then, back.costs), price_new(back.table), 0.0, DOUBT
    )
    assert not (there.moves and again.moves), (there, again)
    assert other.table.rows


def test_the_same_table_has_no_gain() -> None:
    """Whatever was measured and whatever rows devices took: equal rows cost the same."""
    costs, plan, layers = world(**ENERGY)
    moments = device_measurements(plan, telemetry_of(replace(Fleet(plan), link=THIN)))[0].observations
    table = make_plan(costs, {"device-cloud": LINK}, **ENERGY).table
    stubborn = [msgspec.structs.replace(observation.window, row="local") for observation in moments]
    for observations in (
        moments,
        [Observation(observation.at, observation.link, w) for observation, w in zip(moments, stubborn, strict=True)],
    ):
        old, new = compare_costs(price_in_use(plan, layers, costs), price_new(table), observations)
        assert old == new


def test_rows_a_device_avoided_promise_no_gain() -> None:
    """The device ran locally although the table preferred another row: it has reasons that telemetry does not show, and
    a table with the same rows promises nothing."""
    costs, plan, layers = world(**ENERGY)
    quick = Conditions(link=LINK)
    alone = [
        Observation(observation.at, observation.link, msgspec.structs.replace(observation.window, row="local"))
        for observation in device_measurements(plan, telemetry_of(Fleet(plan)))[0].observations
    ]
    table = price_in_use(plan, layers, costs)
    best = table.best(quick)
    assert best is not None and not best.is_local
    old, new = compare_costs(table, price_new(make_plan(costs, {"device-cloud": LINK}, **ENERGY).table), alone)
    assert new.cost == old.cost


def test_missing_evidence_is_reported() -> None:
    """Too few devices, or too short a time."""
    plan = world()[1]
    told = telemetry_of(Fleet(plan), moments=8)
    assert (
        missing_evidence(device_measurements(plan, told), ConfidencePolicy(least_devices=9, observe_s=1.0))
        == "5 of 9 devices have reported enough"
    )
    assert (
        missing_evidence(device_measurements(plan, told), ConfidencePolicy(least_devices=2, observe_s=60.0))
        == "observed for 14 of 60 s"
    )
    assert not missing_evidence(device_measurements(plan, told), ConfidencePolicy(least_devices=2, observe_s=14.0))
    assert "0 of 2" in missing_evidence(
        device_measurements(plan, telemetry_of(Fleet(plan), moments=3)),
        ConfidencePolicy(least_devices=2, observe_s=1.0),
    )


def test_the_cool_down_doubles_with_recent_changes() -> None:
    """It doubles with each change of the last week, and is a week at most."""
    doubt = ConfidencePolicy(cool_down_s=100.0)
    assert remaining_cool_down_s([], 0.0, doubt) == 0.0
    assert remaining_cool_down_s([1_000.0], 1_030.0, doubt) == 70.0
    assert remaining_cool_down_s([900.0, 1_000.0], 1_030.0, doubt) == 170.0
    assert remaining_cool_down_s([800.0, 900.0, 1_000.0], 1_500.0, doubt) == 0.0
    assert remaining_cool_down_s([1_000.0 - 8 * 86_400, 1_000.0], 1_030.0, doubt) == 70.0
    assert remaining_cool_down_s([float(number) for number in range(40)], 39.0, doubt) == 7 * 86_400.0


def test_evidence_is_halved_at_one_time_and_thinned_evenly() -> None:
    """A device that came late has no older half; the newest sample always counts."""
    plan = world()[1]
    told = {"a": Fleet(plan).telemetry("a", 10), "b": Fleet(plan).telemetry("b", 10)[6:]}
    older, newer = split_in_time(device_measurements(plan, told))
    assert [len(observations) for observations in older] == [5, 0] and [
        len(observations) for observations in newer
    ] == [5, 4]
    many = measurements_of("a", Fleet(plan).telemetry("a", 1_000), MODEL, RELEASE, plan)
    assert many is not None
    some = thin_out(many.observations)
    assert (
        len(some) <= MOST_OBSERVATIONS
        and some[-1] is many.observations[-1]
        and some == sorted(some, key=lambda one: one.at)
    )


def test_rows_are_compared_by_content_not_by_name() -> None:
    """The planner's row in layers and the release's in slices are the same route."""
    costs, plan, layers = world()
    table: Plan = make_plan(costs, {"device-cloud": LINK}).table
    old, new = price_in_use(plan, layers, costs), price_new(table)
    assert dict(old.identities) == dict(new.identities)
