"""Rollouts over a database and message-level devices: stages, thresholds, rollback, precedence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from edgesplit.errors import NotFound, UsageError
from edgesplit.mqtt import messages
from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit_controller.errors import Conflict
from edgesplit_controller.rollout import engine, store
from edgesplit_controller.rollout.commands import Verb
from edgesplit_controller.rollout.metrics import rollout_counter
from edgesplit_controller.rollout.request import ALL_AT_ONCE
from edgesplit_controller.rollout.states import MEMBER_STATES, NOTHING, Member
from edgesplit_controller.storage.tables.core import Desired, Event, ReleaseRow
from support.rollout_harness import BAD, NEW, NEWER, OLD, RolloutHarness


@pytest.fixture
def world(tmp_path: Path) -> RolloutHarness:
    return RolloutHarness(tmp_path)


def fleet(count: int) -> list[str]:
    """So many names."""
    return [f"cam-{number:03d}" for number in range(count)]


def assigned_count(world: RolloutHarness, release: str = NEW) -> int:
    """Number of devices with a statement for the release."""
    return sum(device.wanted == release for device in world.fleet.values())


def test_a_plain_deployment_states_every_device_at_once(world: RolloutHarness) -> None:
    """One stage of all devices, stated before the call returns; finished when they run it."""
    world.enrol(*fleet(10), runs="")
    number = world.deploy(NEW)
    assert {device.wanted for device in world.fleet.values()} == {NEW}
    assert world.state(number) == "running"
    world.settle()
    assert world.state(number) == "finished" and set(world.running().values()) == {NEW}


def test_stages_run_one_after_the_other(world: RolloutHarness) -> None:
    """Ten per cent, then half, then all: no device of the next stage gets its statement before the stage before has
    ended well."""
    world.enrol(*fleet(20))
    number = world.deploy(NEW, stages=("10%", "50%", "100%"))
    assert assigned_count(world) == 2
    world.step()
    assert assigned_count(world) == 2
    world.work(times=2)
    world.step()
    assert assigned_count(world) == 2  # on trial
    world.work()
    world.step()
    assert assigned_count(world) == 10 and world.shown(number)["stage"] == 2
    world.settle()
    assert world.state(number) == "finished" and set(world.running().values()) == {NEW}
    assert [stage["succeeded"] for stage in world.shown(number)["stages"]] == [2, 8, 10]


def test_a_bad_release_stops_at_the_failure_threshold_and_rolls_back(world: RolloutHarness) -> None:
    """The canaries fail, run their previous release, and get statements for it; no other device got one for the new
    release."""
    world.enrol(*fleet(40))
    number = world.deploy(BAD, stages=("10%", "100%"))
    world.settle()
    shown = world.shown(number)
    assert shown["state"] == "failed" and shown["states"]["rolled back"] == 4 and shown["states"]["skipped"] == 36
    assert set(world.running().values()) == {OLD}
    assert {device.wanted for device in world.fleet.values()} == {OLD}
    assert sum(BAD in device.ran for device in world.fleet.values()) == 4
    assert shown["failures"][0]["count"] == 4 and "stage 1: " in shown["reason"]
    assert not world.broken()


def test_failures_are_grouped_by_cause(world: RolloutHarness) -> None:
    """Digests and figures differ from device to device; the cause is one."""
    world.enrol(*fleet(6))
    number = world.deploy(BAD)
    world.settle()
    (one,) = world.shown(number)["failures"]
    assert one["count"] == 6 and len(one["devices"]) == 5
    assert one["kind"] == "rolled back: golden inputs of … differ by N" and BAD[:12] in one["example"]


@pytest.mark.parametrize(("when_failed", "state", "runs"), [("stay", "failed", NEW), ("rollback", "rolled back", OLD)])
def test_succeeded_devices_roll_back_only_with_that_option(
    world: RolloutHarness, when_failed: str, state: str, runs: str
) -> None:
    """A rollout that fails late leaves what runs well, or takes all of it back."""
    world.enrol(*fleet(10))
    number = world.deploy(NEW, stages=("50%",), abort_when_failed="20%", when_failed=when_failed)
    world.settle(until=lambda: world.shown(number)["stage"] == 2)
    canaries = [name for name, release in world.running().items() if release == NEW]
    assert len(canaries) == 5
    world.bad.add(NEW)
    world.settle()
    assert world.state(number) == state
    assert {world.running()[name] for name in canaries} == {runs}
    assert {world.running()[name] for name in set(fleet(10)) - set(canaries)} == {OLD}


def test_a_plain_deployment_keeps_the_new_release_desired_on_failure(world: RolloutHarness) -> None:
    """Failing devices run their previous release and may recover by themselves, for instance from a full disk. Aborting
    the rollout rolls them back, too."""
    world.enrol(*fleet(3))
    world.fleet["cam-000"].mood, world.fleet["cam-001"].mood = "stuck", "frail"
    number = world.deploy(NEW)
    world.settle(most=5)
    assert world.members(number)["cam-001"]["state"] == "failed" and world.state(number) == "running"
    assert world.fleet["cam-001"].wanted == NEW and world.fleet["cam-001"].runs == OLD
    world.fleet["cam-001"].mood, world.fleet["cam-001"].state = "good", "fetching"
    world.settle(most=5)
    assert world.members(number)["cam-001"]["state"] == "succeeded" and not world.shown(number)["failures"]
    world.rollouts.command(number, "rollback")
    world.settle()
    assert set(world.running().values()) == {OLD} and {device.wanted for device in world.fleet.values()} == {OLD}


def test_a_rollback_restores_each_devices_previous_release(world: RolloutHarness) -> None:
    """A device that ran nothing of the model runs nothing of it again. A second rollback finds nothing to do."""
    world.enrol("a", "b", runs=OLD)
    world.enrol("c", runs=NEWER)
    world.enrol("d", runs="")
    number = world.deploy(NEW)
    world.settle()
    world.rollouts.command(number, "rollback")
    world.settle()
    assert world.state(number) == "rolled back"
    assert world.running() == {"a": OLD, "b": OLD, "c": NEWER, "d": ""}
    with pytest.raises(Conflict, match="deploy its release again"):
        world.rollouts.command(number, "rollback")
    again = world.deploy(NEW)
    world.settle()
    world.rollouts.command(again, "rollback")
    world.settle()
    assert world.running() == {"a": OLD, "b": OLD, "c": NEWER, "d": ""}
    assert not world.broken()


def desired_releases(world: RolloutHarness) -> set[str]:
    """Releases that are desired of any device, by the database."""
    with world.database.read() as session:
        return {row.release for row in session.scalars(select(Desired))}


def test_rolling_back_a_first_release_removes_it(world: RolloutHarness) -> None:
    """It was called rolled back and ran on. The statement no longer names the model, and the rollout says how many
    devices confirmed that."""
    world.enrol("a", "b", runs="")
    number = world.deploy(NEW)
    world.settle()
    assert world.state(number) == "finished" and desired_releases(world) == {NEW}
    world.rollouts.command(number, "rollback", "olga")
    assert {device.wanted for device in world.fleet.values()} == {""} and desired_releases(world) == set()
    assert world.state(number) == "rolling back" and world.running() == {"a": NEW, "b": NEW}
    world.settle()
    shown = world.shown(number)
    assert world.running() == {"a": "", "b": ""} and shown["states"]["rolled back"] == 2
    assert shown["reason"] == "rolled back by olga; 2 of 2 devices are back to what they ran before"
    assert {member["previous"] for member in world.members(number).values()} == {"nothing"}
    again = world.deploy(NEWER)
    world.settle()
    assert world.state(again) == "finished" and set(world.running().values()) == {NEWER}
    assert not world.broken()


def test_a_device_that_is_off_is_not_counted_as_rolled_back(world: RolloutHarness) -> None:
    """It is assigned nothing, and the rollout says that it has not confirmed; it obeys once it is back."""
    world.enrol("a", "b", runs="")
    number = world.deploy(NEW)
    world.settle()
    world.fleet["b"].mood = "silent"
    world.rollouts.command(number, "rollback")
    world.settle(seconds=60.0)
    assert "1 of 2 devices are back to what they ran before; 1 have not confirmed it" in world.shown(number)["reason"]
    assert world.running() == {"a": "", "b": NEW}
    world.fleet["b"].mood = "good"
    world.state_all()
    world.work(times=2)
    assert world.running() == {"a": "", "b": ""}


def test_a_rollback_that_would_change_nothing_is_refused(world: RolloutHarness) -> None:
    """The same release deployed again, and devices that a newer rollout took over: each says why, and what to do."""
    world.enrol("a", runs=NEW)
    same = world.deploy(NEW)
    world.settle()
    with pytest.raises(Conflict, match=r"ran this release before it, too; deploy another version .*edgectl deploy m@"):
        world.rollouts.command(same, "rollback")
    assert world.state(same) == "finished" and world.running() == {"a": NEW}
    newer = world.deploy(NEWER)
    world.settle()
    with pytest.raises(Conflict, match=f"rollout {newer} decides .*`edgectl rollout rollback {newer}`"):
        world.rollouts.command(same, "rollback")
    assert world.running() == {"a": NEWER}


def test_aborting_a_first_rollout_withdraws_it_from_devices_that_are_off(world: RolloutHarness) -> None:
    """A device that was off during an aborted rollout must not begin to run the release when it is back."""
    world.enrol("a", runs="")
    world.fleet["a"].mood = "silent"
    number = world.deploy(NEW)
    world.rollouts.command(number, "abort")
    world.settle(seconds=60.0)
    assert world.state(number) == "aborted"
    world.fleet["a"].mood = "good"
    world.state_all()
    world.work(times=4)
    assert world.running() == {"a": ""} and NEW not in world.fleet["a"].ran


def test_a_model_is_undeployed_in_stages(world: RolloutHarness) -> None:
    """As it is deployed: the next stage loses it once the devices of the one before have confirmed its end."""
    world.enrol(*fleet(20))
    number = world.deploy(NOTHING, stages=("10%", "100%"))
    assert sum(not device.wanted for device in world.fleet.values()) == 2
    world.step()
    assert sum(not device.wanted for device in world.fleet.values()) == 2
    world.settle()
    shown = world.shown(number)
    assert shown["state"] == "finished" and shown["withdraws"] and set(world.running().values()) == {""}
    with world.database.read() as session:
        assert session.scalars(select(Desired)).all() == []
    assert not world.broken()


@pytest.mark.parametrize(("verb", "state"), [("rollback", "rolled back"), ("abort", "aborted")])
def test_an_undeployment_is_taken_back(world: RolloutHarness, verb: Verb, state: str) -> None:
    """By a rollback every device gets the release that it ran before, by aborting those that have not confirmed."""
    world.enrol(*fleet(4))
    world.fleet["cam-000"].mood = "silent"
    number = world.deploy(NOTHING)
    world.work(times=2)
    world.step()
    assert sorted(world.running().values()) == ["", "", "", OLD]
    world.rollouts.command(number, verb)
    world.fleet["cam-000"].mood = "good"
    world.state_all()
    world.settle()
    assert world.state(number) == state
    assert list(world.running().values()).count(OLD) == (4 if verb == "rollback" else 1)
    assert world.fleet["cam-000"].runs == OLD and not world.broken()


def test_an_older_rollout_does_not_bring_an_undeployed_model_back(world: RolloutHarness) -> None:
    """Neither in progress, where devices still wait for it, nor rolled back after its end: the newer one decides."""
    world.enrol(*fleet(4))
    ended = world.deploy(NEW)
    world.settle()
    waiting = world.deploy(NEWER, stages=("25%", "100%"))
    number = world.deploy(NOTHING)
    world.settle()
    assert world.state(number) == "finished" and world.state(waiting) == "superseded"
    with pytest.raises(Conflict, match=f"rollout {number} decides what its devices run now"):
        world.rollouts.command(ended, "rollback")
    world.settle()
    assert set(world.running().values()) == {""}


def test_a_device_that_does_not_answer_times_out_of_an_undeployment(world: RolloutHarness) -> None:
    """It does not hold up the others; its statement no longer names the model, so it ends it when it is back."""
    world.enrol(*fleet(3))
    world.fleet["cam-000"].mood = "silent"
    number = world.deploy(NOTHING, device_timeout="60s")
    world.settle(seconds=30.0)
    assert world.state(number) == "finished"
    assert world.members(number)["cam-000"]["state"] == "timed out" and world.fleet["cam-000"].runs == OLD
    world.fleet["cam-000"].mood = "good"
    world.state_all()
    world.work()
    assert world.fleet["cam-000"].runs == ""


def test_a_release_that_was_removed_is_not_returned_to(world: RolloutHarness) -> None:
    """The rollback is refused where all devices would return to it, and says what to do."""
    world.enrol(*fleet(2), runs="")
    world.deploy(NEW)
    world.settle()
    number = world.deploy(NOTHING)
    world.settle()
    with world.database.write() as session:
        session.delete(session.get_one(ReleaseRow, NEW))
    with pytest.raises(Conflict, match="the release that its devices ran before was removed; deploy the model"):
        world.rollouts.command(number, "rollback")


def test_an_older_rollout_does_not_bring_a_withdrawn_model_back(world: RolloutHarness) -> None:
    """Two first releases, one over the other: rolling back the newer one withdraws the model, and the older one, still
    in progress, has lost the device."""
    world.enrol("a", runs="")
    world.fleet["a"].mood = "stuck"
    older = world.deploy(NEW)
    newer = world.deploy(NEWER)
    world.rollouts.command(newer, "rollback")
    world.fleet["a"].mood = "good"
    world.settle()
    assert world.running() == {"a": ""} and desired_releases(world) == set()
    assert world.members(older)["a"]["state"] == "superseded" and world.state(newer) == "rolled back"


def test_the_agents_own_first_release_is_not_rolled_back(tmp_path: Path) -> None:
    """An agent cannot be removed by a statement: the rollback is refused, and says what to do instead."""
    world = RolloutHarness(tmp_path, model=AGENT_MODEL)
    world.enrol("a", runs="")
    number = world.deploy(NEW)
    world.settle()
    with pytest.raises(Conflict, match="no earlier release of the agent"):
        world.rollouts.command(number, "rollback")
    assert world.state(number) == "finished" and world.running() == {"a": NEW}


def test_a_silent_device_times_out_and_blocks_no_other(world: RolloutHarness) -> None:
    """A device that was silent from the start is no evidence against the release; one that began and never ended is."""
    world.enrol(*fleet(20))
    world.fleet["cam-003"].mood = "silent"
    number = world.deploy(NEW, stages=("50%",), device_timeout="10m", abort_when_failed="50%")
    world.settle(seconds=60.0)
    assert world.state(number) == "finished" and world.members(number)["cam-003"]["state"] == "timed out"
    assert sum(runs == NEW for runs in world.running().values()) == 19
    world.fleet["cam-004"].mood = "stuck"
    heard = world.deploy(NEWER, ["cam-004", "cam-005"], device_timeout="10m", abort_when_failed="50%")
    world.settle(seconds=60.0)
    assert world.state(heard) == "failed" and world.members(heard)["cam-004"]["counts"]


@pytest.mark.parametrize(("policy", "state"), [("never", "finished"), ("heard", "finished"), ("all", "failed")])
def test_timed_out_devices_count_as_failures_by_option(world: RolloutHarness, policy: str, state: str) -> None:
    """The operator decides whether silent devices count against the release."""
    world.enrol(*fleet(4))
    world.fleet["cam-000"].mood = "silent"
    number = world.deploy(NEW, device_timeout="5m", abort_when_failed="25%", timeouts_count=policy)
    world.settle(seconds=60.0)
    assert world.state(number) == state


def test_a_device_after_its_timeout_still_installs_the_release(world: RolloutHarness) -> None:
    """Its statement is retained: after the timeout the rollout only stops waiting for it."""
    world.enrol(*fleet(3))
    world.fleet["cam-001"].mood = "silent"
    number = world.deploy(NEW, device_timeout="2m")
    world.settle(seconds=60.0)
    assert world.state(number) == "finished"
    world.fleet["cam-001"].mood = "good"
    world.state_all()
    world.work(times=3)
    assert world.running()["cam-001"] == NEW


def test_a_stage_without_evidence_pauses_the_rollout(world: RolloutHarness) -> None:
    """All canaries were offline: the rollout pauses with the reason, and an operator may resume it."""
    world.enrol(*fleet(10))
    number = world.deploy(NEW, stages=("1",), device_timeout="2m")
    (canary,) = [name for name, member in world.members(number).items() if member["state"] == "assigned"]
    world.fleet[canary].wanted, world.fleet[canary].mood = OLD, "silent"
    world.settle(seconds=60.0, until=lambda: world.state(number) == "paused")
    assert "no device succeeded" in world.shown(number)["reason"]
    assert sum(member["state"] == "queued" for member in world.members(number).values()) == 9
    world.rollouts.command(number, "resume")
    world.settle()
    assert world.state(number) == "finished"


def test_a_failed_gate_rolls_a_device_on_trial_back(world: RolloutHarness) -> None:
    """The release runs, but its p95 is too high: the device goes back with the reason, and the next stage never
    begins."""
    world.enrol(*fleet(10))
    number = world.deploy(NEW, stages=("1",), gates=("p95<150ms",), gate_after="50 requests / 10m")
    (canary,) = [name for name, member in world.members(number).items() if member["state"] == "assigned"]
    world.work(times=3)
    world.step()
    assert world.members(number)[canary]["state"] == "trial" and world.fleet[canary].runs == NEW
    world.evidence[canary] = {"requests": 60, "latency_p95_s": 0.3}
    world.step()
    assert world.fleet[canary].wanted == OLD
    world.settle()
    shown = world.shown(number)
    assert shown["state"] == "failed" and world.fleet[canary].runs == OLD
    assert shown["failures"][0]["kind"] == "gate p95<150ms" and "300 ms" in shown["failures"][0]["example"]


def test_passed_gates_start_the_next_stage(world: RolloutHarness) -> None:
    """Enough requests, fast enough: succeeded."""
    world.enrol(*fleet(4))
    world.evidence = {name: {"requests": 60, "latency_p95_s": 0.1} for name in fleet(4)}
    number = world.deploy(NEW, stages=("1",), gates=("p95<150ms",))
    world.settle()
    assert world.state(number) == "finished" and set(world.running().values()) == {NEW}


def test_unjudged_gates_pause_the_rollout(world: RolloutHarness) -> None:
    """A canary without a request is no evidence about latency."""
    world.enrol(*fleet(4))
    number = world.deploy(NEW, stages=("1",), gates=("p95<150ms",), gate_after="10m")
    world.settle(seconds=60.0, until=lambda: world.state(number) == "paused")
    assert world.state(number) == "paused" and "p95<150ms" in world.shown(number)["reason"]


def test_a_newer_rollout_supersedes_devices_in_any_state(world: RolloutHarness) -> None:
    """Queued, assigned, fetching, on trial, failed, timed out, succeeded: each goes to the newer, and back from it to
    what last ran well."""
    world.enrol(*fleet(12))
    number = world.deploy(NEW, stages=("50%",), device_timeout="5m", abort_when_failed="never")
    first = [name for name, member in world.members(number).items() if member["state"] == "assigned"]
    world.fleet[first[0]].mood, world.fleet[first[1]].mood = "silent", "stuck"
    for place, name in enumerate(first[2:]):
        for _ in range(place):
            world.fleet[name].work(world.bad)
    world.speak()
    world.step()
    states = {member["state"] for member in world.members(number).values()}
    assert {"queued", "assigned", "fetching", "trial", "succeeded"} <= states
    for name in first[:2]:
        world.fleet[name].mood = "good"
    well = [name for name in first if world.fleet[name].runs == NEW]
    newer = world.deploy(NEWER)
    previous = {name: member["previous"] for name, member in world.members(newer).items()}
    assert {name for name in previous if previous[name] == NEW} == set(well) and set(previous.values()) == {OLD, NEW}
    world.settle()
    assert set(world.running().values()) == {NEWER} and world.state(newer) == "finished"
    assert world.shown(number)["superseded_by"] == newer and world.state(number) in ("superseded", "finished")
    assert not world.broken()


def test_of_two_concurrent_rollouts_the_newer_wins_shared_devices(world: RolloutHarness) -> None:
    """The older continues with its other devices and shows the reason."""
    world.enrol(*fleet(6))
    older = world.deploy(NEW, stages=("1",))
    newer = world.deploy(NEWER, fleet(3))
    world.settle()
    assert [world.running()[name] for name in fleet(6)] == [NEWER] * 3 + [NEW] * 3
    assert world.shown(older)["superseded_by"] == newer and world.shown(older)["states"]["superseded"] >= 2
    assert world.state(older) == "finished" and world.state(newer) == "finished"


def test_unless_busy_refuses_with_the_active_rollouts_number(world: RolloutHarness) -> None:
    """`--unless-busy` names the active rollout, and creates none."""
    world.enrol(*fleet(6))
    older = world.deploy(NEW, stages=("1",))
    with pytest.raises(Conflict, match=f"rollout {older} brings m to"):
        world.deploy(NEWER, fleet(3), unless_busy=True)
    assert [rollout["id"] for rollout in world.rollouts.list_views(10)][-1] == older


def test_rolling_back_a_superseded_rollout_changes_nothing(world: RolloutHarness) -> None:
    """Its devices belong to the newer rollout."""
    world.enrol(*fleet(3))
    older = world.deploy(NEW)
    world.settle()
    world.deploy(NEWER, ["cam-000"])
    world.settle()
    world.rollouts.command(older, "rollback")
    world.settle()
    assert world.running() == {"cam-000": NEWER, "cam-001": OLD, "cam-002": OLD}
    assert world.state(older) == "rolled back"


def test_a_scheduled_rollout_supersedes_at_its_start_time(world: RolloutHarness) -> None:
    """Until then the earlier rollout continues."""
    world.enrol(*fleet(4))
    older = world.deploy(NEW, stages=("1",), approve_stages=(2,))
    newer = world.deploy(NEWER, at="2027-01-15T09:00Z")
    assert world.state(newer) == "scheduled" and world.shown(older)["superseded_by"] is None
    world.settle(until=lambda: world.state(older) == "waiting")
    world.now = 1_800_003_600.0
    world.step()
    assert world.shown(older)["superseded_by"] == newer
    world.settle()
    assert set(world.running().values()) == {NEWER}


def test_pause_resume_approve_and_abort_take_effect_immediately(world: RolloutHarness) -> None:
    """An action that does not apply to the rollout's state is refused."""
    world.enrol(*fleet(10))
    number = world.deploy(NEW, stages=("20%", "50%"), approve=True)
    assert world.state(number) == "waiting" and all(device.wanted == OLD for device in world.fleet.values())
    world.rollouts.command(number, "approve")
    assert assigned_count(world) == 2
    world.rollouts.command(number, "pause", "anna")
    assert world.shown(number)["reason"] == "paused by anna"
    world.work(times=3)
    world.step()
    assert assigned_count(world) == 2
    with pytest.raises(Conflict, match="does not wait for approval: it is paused"):
        world.rollouts.command(number, "approve")
    world.rollouts.command(number, "resume")
    assert world.state(number) == "waiting" and "approval of stage 2" in world.shown(number)["waits_for"]
    world.rollouts.command(number, "approve")
    assert assigned_count(world) == 5
    world.rollouts.command(number, "abort")
    assert assigned_count(world) == 2  # those on their way go back at once
    world.settle()
    assert world.state(number) == "aborted" and sum(runs == NEW for runs in world.running().values()) == 2
    for verb in ("pause", "resume", "approve", "abort"):
        with pytest.raises(Conflict, match="it is aborted"):
            world.rollouts.command(number, verb)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        world.rollouts.command(number + 1, "pause")


def test_a_constant_rate_limit_is_kept(world: RolloutHarness) -> None:
    """Sixty a minute is one a second, however often the loop runs, and a pause saves none up."""
    world.enrol(*fleet(30))
    number = world.deploy(NEW, rate="60/min")
    assert assigned_count(world) == 1
    for seconds in range(1, 6):
        world.step(0.5)
        world.step(0.5)
        assert assigned_count(world) == 1 + seconds
    world.rollouts.command(number, "pause")
    world.step(3_600.0)
    world.rollouts.command(number, "resume")
    assert assigned_count(world) <= 9
    world.settle(seconds=30.0)
    assert world.state(number) == "finished"


def test_an_exponential_rate_limit_grows(world: RolloutHarness) -> None:
    """Two in the first ten minutes, four in the next, then eight."""
    world.enrol(*fleet(30))
    world.deploy(NEW, rate="exponential:base=2,factor=2,every=10m")
    counts = []
    for _ in range(5):
        counts.append(assigned_count(world))
        world.step(599.0)
        assert assigned_count(world) == counts[-1]
        world.step(1.0)
    assert counts == [2, 6, 14, 30, 30]


def test_devices_are_stated_only_within_the_hours(world: RolloutHarness) -> None:
    """Devices that already got their statement continue outside of them."""
    world.now = 1_800_000_000.0  # 08:00 UTC
    world.enrol(*fleet(2), runs="")
    number = world.deploy(NEW, between="01:00-05:00+01:00")
    assert all(not device.wanted for device in world.fleet.values())
    assert "the hours 01:00-05:00 +01:00, in 16h" in world.shown(number)["waits_for"]
    world.step(15 * 3_600.0 + 3_599)
    assert all(not device.wanted for device in world.fleet.values())
    world.step(1.0)
    assert all(device.wanted == NEW for device in world.fleet.values())


def test_only_a_following_rollout_takes_in_new_devices(world: RolloutHarness) -> None:
    """A rollout keeps the devices that it resolved; with `--follow` devices that match later join its last stage, until
    a newer rollout takes over."""
    world.enrol(*fleet(2), group="cams")
    plain = world.deploy(NEW, ["group=cams"])
    world.settle()
    world.enrol("late-1", runs="", group="cams")
    world.rollouts.add_matching_devices()
    world.step()
    assert world.fleet["late-1"].wanted == "" and world.state(plain) == "finished"
    following = world.deploy(NEWER, ["group=cams"], follow=True)
    world.settle(most=5)
    assert world.state(following) == "running" and world.running()["late-1"] == NEWER
    world.enrol("late-2", runs="", group="cams")
    world.enrol("other", runs="", group="doors")
    world.rollouts.add_matching_devices()
    world.settle(most=5)
    assert world.running()["late-2"] == NEWER and world.fleet["other"].wanted == ""
    world.deploy(NEW, ["group=cams"])
    world.settle()
    world.enrol("late-3", runs="", group="cams")
    world.rollouts.add_matching_devices()
    world.settle(most=5)
    assert world.fleet["late-3"].wanted == "" and not world.active


def test_a_device_silent_during_rollback_does_not_block_the_end(world: RolloutHarness) -> None:
    """The rollout waits for a while and then only reports it: the device obeys whenever it comes. (Once it stayed
    `told`, and the rollout `aborting`, for a day.)"""
    world.enrol(*fleet(3))
    number = world.deploy(NEW)
    world.fleet["cam-001"].mood = "silent"
    world.rollouts.command(number, "abort")
    world.settle(seconds=61.0, most=15)
    assert world.state(number) == "aborted"
    one = world.members(number)["cam-001"]
    assert one["state"] == "timed out" and one["cause"] == "it has not confirmed the rollback yet"
    world.fleet["cam-001"].mood = "good"
    world.state_all()
    world.work(times=4)
    assert set(world.running().values()) == {OLD}


def test_a_revoked_device_is_skipped(world: RolloutHarness) -> None:
    """Before and after it got its statement."""
    world.enrol(*fleet(6))
    number = world.deploy(NEW, stages=("50%",))
    members = world.members(number)
    first = next(name for name, member in members.items() if member["state"] == "assigned")
    queued = next(name for name, member in members.items() if member["state"] == "queued")
    for name in (first, queued):
        world.devices.revoke(name)
        del world.fleet[name]
    world.settle()
    assert world.state(number) == "finished"
    assert {world.members(number)[name]["state"] for name in (first, queued)} == {"skipped"}


def test_canaries_are_chosen_by_hash_and_preference(world: RolloutHarness) -> None:
    """Reproducible from the rollout's number; devices with the preferred label come first."""
    world.enrol(*fleet(50))
    world.enrol("lab-1", "lab-2", "lab-3", kind="lab")
    first = [name for name, member in world.members(world.deploy(NEW, stages=("3",))).items() if member["stage"] == 1]
    second = [name for name, member in world.members(world.deploy(NEW, stages=("3",))).items() if member["stage"] == 1]
    assert first != second
    number = world.deploy(NEW, stages=("3",), prefer="kind=lab")
    stages = {name: member["stage"] for name, member in world.members(number).items()}
    assert sorted(name for name, stage in stages.items() if stage == 1) == ["lab-1", "lab-2", "lab-3"]


def test_a_device_without_statement_fails_and_blocks_no_other(
    world: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its statement cannot be made; the others' can."""
    world.enrol(*fleet(3))
    assign = world.director.assign

    def refuse(session: object, device: str, *rest: object) -> int:
        if device == "cam-001":
            raise Conflict("too many content keys")
        return assign(session, device, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(world.director, "assign", refuse)
    number = world.deploy(NEW)
    world.settle()
    assert world.running() == {"cam-000": NEW, "cam-001": OLD, "cam-002": NEW}
    assert world.members(number)["cam-001"]["state"] == "failed" and world.state(number) == "finished"


def test_devices_and_active_rollouts_are_bounded(tmp_path: Path) -> None:
    """Too many devices are refused before anything is created, and so are too many active rollouts."""
    world = RolloutHarness(tmp_path, most_active=1)
    world.enrol("a")
    world.deploy(NEW)
    with pytest.raises(Conflict, match="1 rollouts are active"):
        world.deploy(NEWER)
    with pytest.raises(UsageError, match="at most 20000"):
        world.rollouts.checked_terms(ALL_AT_ONCE, 20_001)


def test_rollout_steps_are_recorded_as_events(world: RolloutHarness) -> None:
    """Its creator, each stage, the operators' actions, the end."""
    world.enrol(*fleet(4))
    number = world.deploy(BAD, stages=("1",))
    world.rollouts.command(number, "pause", "anna")
    world.rollouts.command(number, "resume", "anna")
    world.settle()
    with world.database.read() as session:
        events = [
            (event.who, event.what) for event in session.query(Event).order_by(Event.id) if event.subject == str(number)
        ]
    assert events == [
        ("operator", "deployment.made"), ("controller", "rollout.began"), ("controller", "rollout.stage"),
        ("anna", "rollout.pause"), ("anna", "rollout.resume"), ("controller", "rollout.failing"),
        ("controller", "rollout.failed"),
    ]  # fmt: skip


def test_rollouts_and_devices_are_counted_by_state(world: RolloutHarness) -> None:
    """For active rollouts; every state is listed, also an empty one."""
    world.enrol(*fleet(20))
    first = world.deploy(NEW, stages=("10%", "100%"))
    count = rollout_counter(world.database)
    assert (count().rollouts["running"], count().rollouts["finished"]) == (1, 0)
    assert (count().devices["assigned"], count().devices["queued"]) == (2, 18)
    assert set(count().devices) == set(MEMBER_STATES) and sum(count().devices.values()) == 20
    world.settle()
    assert world.state(first) == "finished"
    assert count().rollouts["finished"] == 1 and not any(count().devices.values())


# ---- a large fleet --------------------------------------------------------------------------------------------------


def test_concurrent_fetches_are_bounded_and_silent_devices_free_their_slot(tmp_path: Path) -> None:
    """Ten thousand devices got statements within a minute, and each waited for all others' chunks: 260 a minute came
    through. The next devices get their statements as slots become free; a statement sent a minute ago occupies none."""
    world = RolloutHarness(tmp_path, most_fetching=10)
    world.enrol(*fleet(40))
    silent = fleet(40)[::4]
    for name in silent:
        world.fleet[name].mood = "silent"
    number = world.deploy(NEW, stages=("100%",))
    on_the_way = []
    for _ in range(60):
        world.work()
        world.step(seconds=20.0)
        states = world.shown(number)["states"]
        on_the_way.append(states["assigned"] + states["fetching"])
    assert max(on_the_way[:2]) <= 10
    assert {world.running()[name] for name in set(fleet(40)) - set(silent)} == {NEW}
    assert world.shown(number)["states"]["queued"] == 0


def test_offline_devices_take_no_fetch_slot(tmp_path: Path) -> None:
    """A fleet that is switched off gets its statements within a few steps, and acts upon them when it comes back."""
    world = RolloutHarness(tmp_path, most_fetching=5)
    world.enrol(*fleet(20))
    world.devices.ingest([(name, messages.Death(1)) for name in fleet(20)])
    world.deploy(NEW)
    for _ in range(3):
        world.step()
    assert {device.wanted for device in world.fleet.values()} == {NEW}


def test_a_step_reads_only_devices_with_news(world: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all that are awaited: of thousands most have not reported anything new."""
    world.enrol(*fleet(30))
    for name in fleet(30)[3:]:
        world.fleet[name].mood = "stuck"
    world.deploy(NEW)
    world.work()
    world.step()
    world.now += 2 * engine.OVERLAP_S
    world.rollouts.step_all()
    read: list[int] = []
    members = store.members_for_step

    def counted(*asked: Any) -> list[Member]:
        found = members(*asked)
        read.append(len(found))
        return found

    monkeypatch.setattr(store, "members_for_step", counted)
    world.fleet["cam-000"].work(())
    world.devices.ingest([("cam-000", report) for report in [world.fleet["cam-000"].report()] if report])
    world.step(seconds=0.5)
    assert read and max(read) == 1


@pytest.mark.parametrize("what", ["times out", "revoked", "superseded"])
def test_a_step_detects_changes_without_reports(world: RolloutHarness, what: str) -> None:
    """Timeouts, operators and other rollouts move silent devices, although only changed rows are read."""
    world.enrol(*fleet(6))
    for device in world.fleet.values():
        device.mood = "stuck"
    number = world.deploy(NEW, device_timeout="1m")
    world.work()
    world.step()
    world.step(seconds=2 * engine.OVERLAP_S)
    if what == "times out":
        world.step(seconds=45.0)
        assert world.shown(number)["states"]["timed out"] == 6
    elif what == "revoked":
        world.devices.revoke("cam-000")
        world.step()
        assert world.members(number)["cam-000"]["state"] == "skipped"
    else:
        world.deploy(NEWER, ["cam-001"])
        world.step()
        assert world.members(number)["cam-001"]["state"] == "superseded"


def test_a_clock_set_back_loses_no_report(world: RolloutHarness) -> None:
    """The time of the last step lies in the future: every device is read again."""
    world.enrol(*fleet(4))
    number = world.deploy(NEW)
    world.work()
    world.step()
    world.now -= 86_400.0
    world.settle(most=10)
    assert world.state(number) == "finished"
