"""When another table moves: true drift that costs something, and nothing else."""

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
from support.replan_samples import LINK, MODEL, RELEASE, Fleet, costs_of, voices, world

DOUBT = ConfidencePolicy(least_devices=3, observe_s=20.0)
NAMES = ("a", "b", "c", "d", "e")
THIN = Link(up_bytes_per_s=1e6, down_bytes_per_s=4e6, rtt_s=0.01)
ENERGY: dict[str, Any] = {"objective": "energy", "limits": {"deadline_s": 0.034}}


def verdict(told: dict[str, list[TelemetryEvidence]], doubt: ConfidencePolicy = DOUBT, **wish: Any) -> Verdict:
    """Of the world's plan, by what these devices told."""
    costs, plan, layers = world(**wish)
    heard = voices(plan, told)
    seen = estimate(heard, plan, layers)
    made = make_plan(with_measurements(costs, seen), {"device-cloud": seen.planned_link}, **wish)
    return compare_tables(heard, price_in_use(plan, layers, made.costs), price_new(made.table), seen.fixed_s, doubt)


def fleet(**wish: Any) -> Fleet:
    return Fleet(world(**wish)[1])


def told_by(one: Fleet, names: Sequence[str] = NAMES, **more: Any) -> dict[str, list[TelemetryEvidence]]:
    return {name: one.tells(name, **more) for name in names}


def test_a_layer_that_is_far_slower_than_predicted_moves_the_cut() -> None:
    """The profile was wrong about one layer: the table in use has no row that avoids it alone, another one does."""
    costs = costs_of(remote_part=1.0, image_bytes=60_000)
    plan, layers = world(costs)[1:]
    slow = Fleet(plan, slow={"s-head": 30.0})
    heard = voices(plan, told_by(slow))
    seen = estimate(heard, plan, layers)
    made = make_plan(with_measurements(costs, seen), {"device-cloud": seen.planned_link})
    found = compare_tables(heard, price_in_use(plan, layers, made.costs), price_new(made.table), 0.0, DOUBT)
    assert found.moves and found.gain > 0.25 and found.gain_low > 0.2, found
    assert "saves" in found.reason and found.new_s < found.old_s


def test_a_link_that_makes_devices_break_their_deadline_moves_it_though_it_costs_more() -> None:
    """Devices are told to save joules and take the row that does; on the measured link that row is late."""
    found = verdict(told_by(replace(fleet(**ENERGY), link=THIN)), **ENERGY)
    assert found.moves and (found.broken_before, found.broken_after) == (1.0, 0.0), found
    assert "breaks a limit in 0% of the time instead of 100%" in found.reason


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_nothing(seed: int) -> None:
    """Everything as planned, give or take a fifth."""
    noisy = replace(fleet(), noise=0.2, seed=seed)
    found = verdict(told_by(noisy))
    assert not found.moves and "fits the measurements" in found.reason, found


def test_a_link_that_the_table_knows_is_no_reason() -> None:
    """The table holds the best row for every bandwidth: devices take it by themselves."""
    found = verdict(told_by(replace(fleet(), link=THIN)))
    assert not found.moves and abs(found.gain) < 0.02, found


def test_one_liar_moves_nothing() -> None:
    """Of three devices one claims to break its deadline all the time."""
    honest = fleet(**ENERGY)
    told = told_by(honest, NAMES[:2]) | {"liar": replace(honest, link=THIN).tells("liar")}
    found = verdict(told, **ENERGY)
    assert not found.moves and found.broken_before == 0.0


def test_an_outage_of_a_while_moves_nothing() -> None:
    """The newer part of what was watched is bad, the older was good."""
    links = [LINK] * 10 + [THIN] * 10
    found = verdict(told_by(fleet(**ENERGY), links=links), **ENERGY)
    assert not found.moves and "only for a part of the observed time" in found.reason, found


def test_a_swinging_link_does_not_make_the_table_swing() -> None:
    """Good and bad by turns: whichever table is in use, the verdict on it is not to move to the one that the other
    verdict would move from."""
    links = [LINK, LINK, THIN, THIN]
    there = verdict(told_by(fleet(**ENERGY), links=links), **ENERGY)
    costs, plan, layers = world(**ENERGY)
    heard = voices(plan, told_by(Fleet(plan), links=links))
    seen = estimate(heard, plan, layers)
    other = make_plan(with_measurements(costs, seen), {"device-cloud": seen.planned_link}, **ENERGY)
    costs_then, plan_then, layers_then = world(link=seen.planned_link, **ENERGY)
    heard_then = voices(plan_then, told_by(Fleet(plan_then), links=links))
    believed_then = estimate(heard_then, plan_then, layers_then)
    back = make_plan(
        with_measurements(costs_then, believed_then), {"device-cloud": believed_then.planned_link}, **ENERGY
    )
    again = compare_tables(
        heard_then, price_in_use(plan_then, layers_then, back.costs), price_new(back.table), 0.0, DOUBT
    )
    assert not (there.moves and again.moves), (there, again)
    assert other.table.rows


def test_a_table_is_worth_nothing_beside_itself() -> None:
    """Whatever was measured and whatever rows devices took: the same rows are the same bill."""
    costs, plan, layers = world(**ENERGY)
    moments = voices(plan, told_by(replace(Fleet(plan), link=THIN)))[0].observations
    table = make_plan(costs, {"device-cloud": LINK}, **ENERGY).table
    stubborn = [msgspec.structs.replace(one.window, row="local") for one in moments]
    for each in (moments, [Observation(one.at, one.link, w) for one, w in zip(moments, stubborn, strict=True)]):
        old, new = compare_costs(price_in_use(plan, layers, costs), price_new(table), each)
        assert old == new


def test_what_a_device_did_not_take_it_is_not_expected_to_take_from_another_table() -> None:
    """It stayed alone though the table called another row better: it knows more of its link than it tells, and a table
    with the same rows promises nothing."""
    costs, plan, layers = world(**ENERGY)
    quick = Conditions(link=LINK)
    alone = [
        Observation(one.at, one.link, msgspec.structs.replace(one.window, row="local"))
        for one in voices(plan, told_by(Fleet(plan)))[0].observations
    ]
    table = price_in_use(plan, layers, costs)
    best = table.best(quick)
    assert best is not None and not best.is_local
    old, new = compare_costs(table, price_new(make_plan(costs, {"device-cloud": LINK}, **ENERGY).table), alone)
    assert new.cost == old.cost


def test_what_is_missing_is_said() -> None:
    """Devices, or time."""
    plan = world()[1]
    told = told_by(Fleet(plan), moments=8)
    assert (
        missing_evidence(voices(plan, told), ConfidencePolicy(least_devices=9, observe_s=1.0))
        == "5 of 9 devices have reported enough"
    )
    assert (
        missing_evidence(voices(plan, told), ConfidencePolicy(least_devices=2, observe_s=60.0))
        == "observed for 14 of 60 s"
    )
    assert not missing_evidence(voices(plan, told), ConfidencePolicy(least_devices=2, observe_s=14.0))
    assert "0 of 2" in missing_evidence(
        voices(plan, told_by(Fleet(plan), moments=3)), ConfidencePolicy(least_devices=2, observe_s=1.0)
    )


def test_after_a_change_nothing_moves_for_a_while_and_longer_after_several() -> None:
    """The wait doubles with each change of the last week, and is a week at most."""
    doubt = ConfidencePolicy(cool_down_s=100.0)
    assert remaining_cool_down_s([], 0.0, doubt) == 0.0
    assert remaining_cool_down_s([1_000.0], 1_030.0, doubt) == 70.0
    assert remaining_cool_down_s([900.0, 1_000.0], 1_030.0, doubt) == 170.0
    assert remaining_cool_down_s([800.0, 900.0, 1_000.0], 1_500.0, doubt) == 0.0
    assert remaining_cool_down_s([1_000.0 - 8 * 86_400, 1_000.0], 1_030.0, doubt) == 70.0
    assert remaining_cool_down_s([float(number) for number in range(40)], 39.0, doubt) == 7 * 86_400.0


def test_time_is_halved_for_all_devices_at_the_same_moment_and_moments_are_thinned_evenly() -> None:
    """A device that came late has no older half; the newest moment always counts."""
    plan = world()[1]
    told = {"a": Fleet(plan).tells("a", 10), "b": Fleet(plan).tells("b", 10)[6:]}
    older, newer = split_in_time(voices(plan, told))
    assert [len(each) for each in older] == [5, 0] and [len(each) for each in newer] == [5, 4]
    many = measurements_of("a", Fleet(plan).tells("a", 1_000), MODEL, RELEASE, plan)
    assert many is not None
    some = thin_out(many.observations)
    assert (
        len(some) <= MOST_OBSERVATIONS
        and some[-1] is many.observations[-1]
        and some == sorted(some, key=lambda one: one.at)
    )


def test_rows_are_what_they_are_whatever_they_are_called() -> None:
    """The planner's row in layers and the release's in slices are one way."""
    costs, plan, layers = world()
    table: Plan = make_plan(costs, {"device-cloud": LINK}).table
    old, new = price_in_use(plan, layers, costs), price_new(table)
    assert dict(old.identities) == dict(new.identities)
