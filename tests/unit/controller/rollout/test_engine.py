"""Rollouts, over a database and devices at the level of messages: stages, thresholds, the way back, who wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgesplit.errors import NotFound, UsageError
from edgesplit.mqtt import messages
from edgesplit_controller.errors import Conflict
from edgesplit_controller.rollout import decide, engine, store
from edgesplit_controller.rollout.metrics import rollout_counter
from edgesplit_controller.rollout.request import ALL_AT_ONCE
from edgesplit_controller.rollout.states import MEMBER_STATES, Member
from edgesplit_controller.storage.tables.core import Event
from support.rollout_harness import BAD, NEW, NEWER, OLD, RolloutHarness


@pytest.fixture
def world(tmp_path: Path) -> RolloutHarness:
    return RolloutHarness(tmp_path)


def fleet(count: int) -> list[str]:
    """So many names."""
    return [f"cam-{number:03d}" for number in range(count)]


def told(world: RolloutHarness, release: str = NEW) -> int:
    """How many devices were told of the release."""
    return sum(one.wanted == release for one in world.fleet.values())


def test_a_plain_deployment_tells_every_device_at_once(world: RolloutHarness) -> None:
    """One stage of all devices, told before the call returns; finished when they run it."""
    world.enrol(*fleet(10), runs="")
    number = world.deploy(NEW)
    assert {one.wanted for one in world.fleet.values()} == {NEW}
    assert world.state(number) == "running"
    world.settle()
    assert world.state(number) == "finished" and set(world.running().values()) == {NEW}


def test_stages_come_one_after_the_other(world: RolloutHarness) -> None:
    """Ten per cent, then half, then all: nobody of the next stage is told before the one before has ended well."""
    world.enrol(*fleet(20))
    number = world.deploy(NEW, stages=("10%", "50%", "100%"))
    assert told(world) == 2
    world.step()
    assert told(world) == 2
    world.work(times=2)
    world.step()
    assert told(world) == 2  # on trial
    world.work()
    world.step()
    assert told(world) == 10 and world.shown(number)["stage"] == 2
    world.settle()
    assert world.state(number) == "finished" and set(world.running().values()) == {NEW}
    assert [one["succeeded"] for one in world.shown(number)["stages"]] == [2, 8, 10]


def test_a_bad_release_stops_at_its_threshold_and_failing_devices_go_back(world: RolloutHarness) -> None:
    """The canaries fail, run what they ran before, and are told so; nobody else was ever told."""
    world.enrol(*fleet(40))
    number = world.deploy(BAD, stages=("10%", "100%"))
    world.settle()
    shown = world.shown(number)
    assert shown["state"] == "failed" and shown["states"]["rolled back"] == 4 and shown["states"]["skipped"] == 36
    assert set(world.running().values()) == {OLD}
    assert {one.wanted for one in world.fleet.values()} == {OLD}
    assert sum(BAD in one.ran for one in world.fleet.values()) == 4
    assert shown["failures"][0]["count"] == 4 and "stage 1: " in shown["reason"]
    assert not world.broken()


def test_failures_are_grouped_by_what_they_have_in_common(world: RolloutHarness) -> None:
    """Digests and figures differ from device to device; the cause is one."""
    world.enrol(*fleet(6))
    number = world.deploy(BAD)
    world.settle()
    (one,) = world.shown(number)["failures"]
    assert one["count"] == 6 and len(one["devices"]) == 5
    assert one["kind"] == "rolled back: golden inputs of … differ by N" and BAD[:12] in one["example"]


@pytest.mark.parametrize(("when_failed", "state", "runs"), [("stay", "failed", NEW), ("rollback", "rolled back", OLD)])
def test_devices_that_succeeded_stay_unless_the_terms_say_rollback(
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


def test_a_plain_deployment_leaves_failing_devices_to_themselves(world: RolloutHarness) -> None:
    """They run what they ran before, are still wanted to run the new one, and may mend by themselves meanwhile: a disk
    that was full. Stopping the rollout takes them back, too."""
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
    assert set(world.running().values()) == {OLD} and {one.wanted for one in world.fleet.values()} == {OLD}


def test_a_rollback_takes_everybody_to_what_they_ran_before(world: RolloutHarness) -> None:
    """Each device to its own release before; the one that had none stays. A second rollback finds nothing."""
    world.enrol("a", "b", runs=OLD)
    world.enrol("c", runs=NEWER)
    world.enrol("d", runs="")
    number = world.deploy(NEW)
    world.settle()
    world.rollouts.command(number, "rollback")
    world.settle()
    assert world.state(number) == "rolled back"
    assert world.running() == {"a": OLD, "b": OLD, "c": NEWER, "d": NEW}
    with pytest.raises(Conflict, match="deploy its release again"):
        world.rollouts.command(number, "rollback")
    again = world.deploy(NEW)
    world.settle()
    world.rollouts.command(again, "rollback")
    world.settle()
    assert world.running() == {"a": OLD, "b": OLD, "c": NEWER, "d": NEW}
    assert not world.broken()


def test_a_device_that_never_answers_times_out_and_blocks_nobody(world: RolloutHarness) -> None:
    """Silent from the start it is no proof against the release; one that began and never ended is."""
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
def test_silence_counts_by_policy(world: RolloutHarness, policy: str, state: str) -> None:
    """Whether devices that nobody hears condemn a release is the operator's to say."""
    world.enrol(*fleet(4))
    world.fleet["cam-000"].mood = "silent"
    number = world.deploy(NEW, device_timeout="5m", abort_when_failed="25%", timeouts_count=policy)
    world.settle(seconds=60.0)
    assert world.state(number) == state


def test_a_device_that_comes_late_still_runs_the_release(world: RolloutHarness) -> None:
    """What it was told is retained: after its time-out it is only not waited for."""
    world.enrol(*fleet(3))
    world.fleet["cam-001"].mood = "silent"
    number = world.deploy(NEW, device_timeout="2m")
    world.settle(seconds=60.0)
    assert world.state(number) == "finished"
    world.fleet["cam-001"].mood = "good"
    world.state_all()
    world.work(times=3)
    assert world.running()["cam-001"] == NEW


def test_a_stage_that_proved_nothing_does_not_begin_the_next(world: RolloutHarness) -> None:
    """All canaries were off: the rollout pauses and says so; an operator may go on all the same."""
    world.enrol(*fleet(10))
    number = world.deploy(NEW, stages=("1",), device_timeout="2m")
    (canary,) = [name for name, one in world.members(number).items() if one["state"] == "assigned"]
    world.fleet[canary].wanted, world.fleet[canary].mood = OLD, "silent"
    world.settle(seconds=60.0, until=lambda: world.state(number) == "paused")
    assert "no device succeeded" in world.shown(number)["reason"]
    assert sum(one["state"] == "queued" for one in world.members(number).values()) == 9
    world.rollouts.command(number, "resume")
    world.settle()
    assert world.state(number) == "finished"


def test_gates_hold_a_device_on_trial_and_send_it_back(world: RolloutHarness) -> None:
    """It runs, but its p95 is too high: it goes back, is told so, and the next stage never begins."""
    world.enrol(*fleet(10))
    number = world.deploy(NEW, stages=("1",), gates=("p95<150ms",), gate_after="50 requests / 10m")
    (canary,) = [name for name, one in world.members(number).items() if one["state"] == "assigned"]
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


def test_gates_that_are_passed_let_the_next_stage_begin(world: RolloutHarness) -> None:
    """Enough requests, fast enough: succeeded."""
    world.enrol(*fleet(4))
    world.evidence = {name: {"requests": 60, "latency_p95_s": 0.1} for name in fleet(4)}
    number = world.deploy(NEW, stages=("1",), gates=("p95<150ms",))
    world.settle()
    assert world.state(number) == "finished" and set(world.running().values()) == {NEW}


def test_gates_that_nobody_could_judge_pause_the_rollout(world: RolloutHarness) -> None:
    """A canary without a request has proved nothing about latency."""
    world.enrol(*fleet(4))
    number = world.deploy(NEW, stages=("1",), gates=("p95<150ms",), gate_after="10m")
    world.settle(seconds=60.0, until=lambda: world.state(number) == "paused")
    assert world.state(number) == "paused" and "p95<150ms" in world.shown(number)["reason"]


def test_a_newer_release_supersedes_from_any_state(world: RolloutHarness) -> None:
    """Queued, told, fetching, on trial, failed, timed out, succeeded: each goes to the newer one, and back from it to
    what last ran well."""
    world.enrol(*fleet(12))
    number = world.deploy(NEW, stages=("50%",), device_timeout="5m", abort_when_failed="never")
    first = [name for name, one in world.members(number).items() if one["state"] == "assigned"]
    world.fleet[first[0]].mood, world.fleet[first[1]].mood = "silent", "stuck"
    for place, name in enumerate(first[2:]):
        for _ in range(place):
            world.fleet[name].work(world.bad)
    world.speak()
    world.step()
    states = {one["state"] for one in world.members(number).values()}
    assert {"queued", "assigned", "fetching", "trial", "succeeded"} <= states
    for name in first[:2]:
        world.fleet[name].mood = "good"
    well = [name for name in first if world.fleet[name].runs == NEW]
    newer = world.deploy(NEWER)
    previous = {name: one["previous"] for name, one in world.members(newer).items()}
    assert {name for name in previous if previous[name] == NEW} == set(well) and set(previous.values()) == {OLD, NEW}
    world.settle()
    assert set(world.running().values()) == {NEWER} and world.state(newer) == "finished"
    assert world.shown(number)["superseded_by"] == newer and world.state(number) in ("superseded", "finished")
    assert not world.broken()


def test_two_operators_at_once_the_newer_wins_and_the_other_sees_why(world: RolloutHarness) -> None:
    """For the devices that both name; the older goes on with the others."""
    world.enrol(*fleet(6))
    older = world.deploy(NEW, stages=("1",))
    newer = world.deploy(NEWER, fleet(3))
    world.settle()
    assert [world.running()[name] for name in fleet(6)] == [NEWER] * 3 + [NEW] * 3
    assert world.shown(older)["superseded_by"] == newer and world.shown(older)["states"]["superseded"] >= 2
    assert world.state(older) == "finished" and world.state(newer) == "finished"


def test_who_asks_not_to_supersede_is_refused_with_the_number(world: RolloutHarness) -> None:
    """`--unless-busy`: the rollout that is on its way is named, and nothing is made."""
    world.enrol(*fleet(6))
    older = world.deploy(NEW, stages=("1",))
    with pytest.raises(Conflict, match=f"rollout {older} brings m to"):
        world.deploy(NEWER, fleet(3), unless_busy=True)
    assert [one["id"] for one in world.rollouts.list_views(10)][-1] == older


def test_an_older_rollout_cannot_be_rolled_back_over_a_newer_one(world: RolloutHarness) -> None:
    """Its devices are the newer one's: nothing happens to them."""
    world.enrol(*fleet(3))
    older = world.deploy(NEW)
    world.settle()
    world.deploy(NEWER, ["cam-000"])
    world.settle()
    world.rollouts.command(older, "rollback")
    world.settle()
    assert world.running() == {"cam-000": NEWER, "cam-001": OLD, "cam-002": OLD}
    assert world.state(older) == "rolled back"


def test_a_scheduled_rollout_supersedes_when_it_begins(world: RolloutHarness) -> None:
    """Until its time comes the one before goes on; then it takes over."""
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


def test_pause_resume_approve_abort(world: RolloutHarness) -> None:
    """Each takes effect at once; what does not apply is refused by the state it is in."""
    world.enrol(*fleet(10))
    number = world.deploy(NEW, stages=("20%", "50%"), approve=True)
    assert world.state(number) == "waiting" and all(one.wanted == OLD for one in world.fleet.values())
    world.rollouts.command(number, "approve")
    assert told(world) == 2
    world.rollouts.command(number, "pause", "anna")
    assert world.shown(number)["reason"] == "paused by anna"
    world.work(times=3)
    world.step()
    assert told(world) == 2
    with pytest.raises(Conflict, match="does not wait for approval: it is paused"):
        world.rollouts.command(number, "approve")
    world.rollouts.command(number, "resume")
    assert world.state(number) == "waiting" and "approval of stage 2" in world.shown(number)["waits_for"]
    world.rollouts.command(number, "approve")
    assert told(world) == 5
    world.rollouts.command(number, "abort")
    assert told(world) == 2  # those on their way go back at once
    world.settle()
    assert world.state(number) == "aborted" and sum(runs == NEW for runs in world.running().values()) == 2
    for verb in ("pause", "resume", "approve", "abort"):
        with pytest.raises(Conflict, match="it is aborted"):
            world.rollouts.command(number, verb)  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        world.rollouts.command(number + 1, "pause")


def test_a_constant_rate_is_kept(world: RolloutHarness) -> None:
    """Sixty a minute: one a second, however often the loop looks, and none is saved up in a pause."""
    world.enrol(*fleet(30))
    number = world.deploy(NEW, rate="60/min")
    assert told(world) == 1
    for seconds in range(1, 6):
        world.step(0.5)
        world.step(0.5)
        assert told(world) == 1 + seconds
    world.rollouts.command(number, "pause")
    world.step(3_600.0)
    world.rollouts.command(number, "resume")
    assert told(world) <= 9
    world.settle(seconds=30.0)
    assert world.state(number) == "finished"


def test_an_exponential_rate_grows(world: RolloutHarness) -> None:
    """Two in the first ten minutes, four in the next, then eight."""
    world.enrol(*fleet(30))
    world.deploy(NEW, rate="exponential:base=2,factor=2,every=10m")
    counts = []
    for _ in range(5):
        counts.append(told(world))
        world.step(599.0)
        assert told(world) == counts[-1]
        world.step(1.0)
    assert counts == [2, 6, 14, 30, 30]


def test_hours_are_kept(world: RolloutHarness) -> None:
    """Outside them nobody is told; those that were go on."""
    world.now = 1_800_000_000.0  # 08:00 UTC
    world.enrol(*fleet(2), runs="")
    number = world.deploy(NEW, between="01:00-05:00+01:00")
    assert all(not one.wanted for one in world.fleet.values())
    assert "the hours 01:00-05:00 +01:00, in 16h" in world.shown(number)["waits_for"]
    world.step(15 * 3_600.0 + 3_599)
    assert all(not one.wanted for one in world.fleet.values())
    world.step(1.0)
    assert all(one.wanted == NEW for one in world.fleet.values())


def test_who_follows_takes_in_who_comes_late_and_others_do_not(world: RolloutHarness) -> None:
    """A rollout keeps the devices that it resolved; with `--follow` those that come to be meant join its last stage,
    until a newer rollout takes over."""
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


def test_a_device_that_falls_silent_while_it_goes_back_holds_up_no_end(world: RolloutHarness) -> None:
    """It is awaited for a while and then only told of: whenever it comes it obeys. (Once it stayed `told`, and the
    rollout `aborting`, for a day.)"""
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
    """Before it is told, and after."""
    world.enrol(*fleet(6))
    number = world.deploy(NEW, stages=("50%",))
    members = world.members(number)
    first = next(name for name, one in members.items() if one["state"] == "assigned")
    queued = next(name for name, one in members.items() if one["state"] == "queued")
    for name in (first, queued):
        world.devices.revoke(name)
        del world.fleet[name]
    world.settle()
    assert world.state(number) == "finished"
    assert {world.members(number)[name]["state"] for name in (first, queued)} == {"skipped"}


def test_canaries_are_chosen_by_hash_and_preference(world: RolloutHarness) -> None:
    """The same for everybody who computes it; devices of the lab first, where the operator prefers them."""
    world.enrol(*fleet(50))
    world.enrol("lab-1", "lab-2", "lab-3", kind="lab")
    first = [name for name, one in world.members(world.deploy(NEW, stages=("3",))).items() if one["stage"] == 1]
    second = [name for name, one in world.members(world.deploy(NEW, stages=("3",))).items() if one["stage"] == 1]
    assert first != second
    number = world.deploy(NEW, stages=("3",), prefer="kind=lab")
    stages = {name: one["stage"] for name, one in world.members(number).items()}
    assert sorted(name for name, stage in stages.items() if stage == 1) == ["lab-1", "lab-2", "lab-3"]


def test_a_device_that_cannot_be_told_fails_and_holds_up_nobody(
    world: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its statement cannot be made; the others' are."""
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


def test_a_rollout_is_bounded(world: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many devices are refused before anything is made, and so are too many rollouts at once."""
    world.enrol("a")
    monkeypatch.setattr(engine, "MOST_ACTIVE", 1)
    world.deploy(NEW)
    with pytest.raises(Conflict, match="1 rollouts are active"):
        world.deploy(NEWER)
    with pytest.raises(UsageError, match="at most 20000"):
        world.rollouts.checked_terms(ALL_AT_ONCE, 20_001)


def test_everything_that_happens_is_an_event(world: RolloutHarness) -> None:
    """Who made it, each stage, what operators said, how it ended."""
    world.enrol(*fleet(4))
    number = world.deploy(BAD, stages=("1",))
    world.rollouts.command(number, "pause", "anna")
    world.rollouts.command(number, "resume", "anna")
    world.settle()
    with world.database.read() as session:
        events = [(one.who, one.what) for one in session.query(Event).order_by(Event.id) if one.subject == str(number)]
    assert events == [
        ("operator", "deployment.made"), ("controller", "rollout.began"), ("controller", "rollout.stage"),
        ("anna", "rollout.pause"), ("anna", "rollout.resume"), ("controller", "rollout.failing"),
        ("controller", "rollout.failed"),
    ]  # fmt: skip


def test_rollouts_and_their_devices_are_counted_by_state(world: RolloutHarness) -> None:
    """Of rollouts that go on, where each device stands; every state is told, also one that nothing is in."""
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


def test_devices_that_fetch_at_once_are_bounded_and_silent_ones_hold_up_nobody(
    world: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand were told within a minute, and each waited for what all others had asked for: 260 a minute came
    through. The next are told as those before have done; who was told a minute ago counts no longer."""
    monkeypatch.setattr(decide, "MOST_FETCHING", 10)
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


def test_devices_that_are_not_here_take_nobodys_place(world: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that is switched off is told within some looks what it shall run when it comes back."""
    monkeypatch.setattr(decide, "MOST_FETCHING", 5)
    world.enrol(*fleet(20))
    world.devices.ingest([(name, messages.Death(1)) for name in fleet(20)])
    world.deploy(NEW)
    for _ in range(3):
        world.step()
    assert {device.wanted for device in world.fleet.values()} == {NEW}


def test_a_look_reads_the_devices_that_something_became_of(
    world: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all that are awaited: of thousands most have nothing new to say."""
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
    world.devices.ingest([("cam-000", said) for said in [world.fleet["cam-000"].report()] if said])
    world.step(seconds=0.5)
    assert read and max(read) == 1


@pytest.mark.parametrize("what", ["times out", "revoked", "superseded"])
def test_a_look_finds_what_devices_do_not_say(world: RolloutHarness, what: str) -> None:
    """Though only the news are looked at: time, an operator and another rollout move devices that are silent."""
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


def test_a_clock_that_is_set_back_costs_no_report(world: RolloutHarness) -> None:
    """What was looked at until then lies in the future: everything is looked at anew."""
    world.enrol(*fleet(4))
    number = world.deploy(NEW)
    world.work()
    world.step()
    world.now -= 86_400.0
    world.settle(most=10)
    assert world.state(number) == "finished"
