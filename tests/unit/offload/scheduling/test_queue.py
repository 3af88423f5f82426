"""Who waits, who runs together and who is refused: decisions as tables, then the threads around them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import pytest

from edgesplit.errors import Busy, DeadlineExceeded, FairShareExceeded, InferenceFailed, LinkError
from edgesplit_offload.scheduling import scheduler as turns_module
from edgesplit_offload.scheduling.arrivals import ArrivalStats, ExpectedReturns
from edgesplit_offload.scheduling.queue import Job, RunQueue
from edgesplit_offload.scheduling.run_times import BatchBenefit, RunTimes
from edgesplit_offload.scheduling.scheduler import Scheduler

PATIENCE_S = 20.0


def pace(*, most: int = 1, enough: int = 1, seconds: dict[int, float] | None = None) -> RunTimes:
    """One of a model that was measured."""
    made = RunTimes()
    made.enable_batching(BatchBenefit(seconds or {}, most, enough))
    return made


def job(of: RunTimes | None = None, client: str | None = None, deadline: float | None = None, given: Any = 1) -> Job:
    return Job(given, lambda many: [2 * one for one in many], of or RunTimes(), client, deadline)


def begun(waiting: RunQueue, now: float) -> list[list[Job]]:
    """All runs that begin now."""
    return [run.jobs for run in iter(lambda: waiting.start_next(now), None)]


def admitted(waiting: RunQueue, *jobs: Job, now: float = 0.0) -> list[list[Job]]:
    """The runs that begin when these come one after the other."""
    runs = []
    for one in jobs:
        waiting.admit(one, now)
        runs += begun(waiting, now)
    return runs


def end_one(waiting: RunQueue, now: float = 1.0) -> list[list[Job]]:
    """The runs that begin when the oldest has ended."""
    waiting.on_run_end(min(waiting.running, key=lambda run: run.started_at), now)
    return begun(waiting, now)


# Together


def test_requests_for_one_model_gather_while_it_runs_and_then_run_together() -> None:
    """The first is not held up; those that come meanwhile share the next run; other models are not among them."""
    waiting, shared, other = RunQueue(1, 10), pace(most=8, enough=8), RunTimes()
    ours, theirs = [job(shared) for _ in range(4)], job(other)
    assert admitted(waiting, ours[0], ours[1], theirs, ours[2], ours[3]) == [[ours[0]]]
    assert end_one(waiting) == [[ours[1], ours[2], ours[3]]]
    assert end_one(waiting) == [[theirs]]


def test_another_run_begins_beside_the_first_for_as_many() -> None:
    """Few are not held up while there is room: a second run begins for as many as are in the first."""
    waiting, shared = RunQueue(4, 10), pace(most=8, enough=8)
    first = [job(shared) for _ in range(4)]
    assert admitted(waiting, *first) == [[first[0]], [first[1]]]
    waiting.on_run_end(min(waiting.running, key=lambda run: run.started_at), 1.0)
    assert begun(waiting, 1.0) == [[first[2], first[3]]]


def test_a_third_run_begins_only_for_enough() -> None:
    """There is room for it all along, and it is used once so many wait that it has most of the gain."""
    waiting, shared = RunQueue(4, 10), pace(most=8, enough=3)
    ours = [job(shared) for _ in range(5)]
    assert admitted(waiting, *ours) == [[ours[0]], [ours[1]], ours[2:]]


def test_what_shares_runs_has_the_places_that_other_processes_leave_to_it() -> None:
    """Others' requests for the model come here: it runs beside what has this process's own places."""
    waiting, shared, other = RunQueue(1, 10, max_batched_runs=2), pace(most=8, enough=8), RunTimes()
    ours, theirs = [job(shared) for _ in range(2)], [job(other) for _ in range(2)]
    assert admitted(waiting, *theirs, *ours) == [[theirs[0]], [ours[0]]]
    waiting.on_run_end(next(run for run in waiting.running if run.jobs == [theirs[0]]), 1.0)
    assert begun(waiting, 1.0) == [[theirs[1]]]


def test_those_that_may_share_a_run_take_less_of_the_queue() -> None:
    """Sixteen that will run together are one more to wait for, not sixteen."""
    waiting, shared, alone = RunQueue(1, 2), pace(most=16, enough=16), RunTimes()
    admitted(waiting, *[job(shared) for _ in range(17)], job(alone))
    with pytest.raises(Busy):
        waiting.admit(job(alone), 0.0)


def test_models_without_gain_run_one_by_one() -> None:
    """Each in a run of its own, as many at once as may."""
    waiting, alone = RunQueue(2, 10), RunTimes()
    ours = [job(alone) for _ in range(3)]
    assert admitted(waiting, *ours) == [[ours[0]], [ours[1]]]
    assert end_one(waiting) == [[ours[2]]]


def test_a_run_holds_only_as_many_as_its_deadlines_allow() -> None:
    """Eight together take 80 ms: who has 50 ms left runs with fewer, and the first that came is always among them."""
    shared = pace(most=8, enough=2, seconds={1: 0.01, 8: 0.08})
    waiting = RunQueue(1, 20)
    first, hurried, rest = job(shared), job(shared, deadline=1.05), [job(shared) for _ in range(7)]
    (begun,) = admitted(waiting, first, *rest[:3], hurried, *rest[3:])
    assert begun == [first]
    (members,) = end_one(waiting, now=1.0)
    assert members[0] is rest[0]
    assert hurried in members
    assert len(members) == 5


def test_who_is_in_a_hurry_does_not_gather() -> None:
    """A run of the model is on for long, and this one's time is up before that one's end and its own: it begins."""
    shared = pace(most=8, enough=4, seconds={1: 0.1, 8: 0.2})
    waiting = RunQueue(3, 10)
    first, second, patient, hurried = job(shared), job(shared), job(shared, deadline=9.0), job(shared, deadline=0.15)
    assert admitted(waiting, first, second, patient) == [[first], [second]]
    (members,) = admitted(waiting, hurried)
    assert set(members) == {patient, hurried} or members == [patient]


# Those that are about to ask again

LOOP_S = 0.002


class Crowd:
    """Connections that ask again `LOOP_S` after each answer, as programs in a loop do."""

    def __init__(self, count: int) -> None:
        self.waiting = RunQueue(1, 100)
        self.shared = pace(most=32, enough=8, seconds={1: 0.002, 8: 0.0022, 32: 0.003})
        self.habits = [ArrivalStats(number) for number in range(1, count + 1)]
        self.now = 0.0

    def ask(self, *numbers: int, deadline: float | None = None) -> list[list[Job]]:
        """These ask now; the runs that begin."""
        for number in numbers:
            one = job(self.shared, deadline=deadline)
            one.arrival_stats = self.habits[number]
            self.waiting.admit(one, self.now)
        return begun(self.waiting, self.now)

    def pass_(self, seconds: float) -> list[list[Job]]:
        """The runs that begin because so much time has passed."""
        self.now += seconds
        return begun(self.waiting, self.now)

    def end(self) -> list[list[Job]]:
        """The one run that is on ends."""
        (run,) = self.waiting.running
        self.waiting.on_run_end(run, self.now)
        return begun(self.waiting, self.now)

    def learn(self, again_s: float = LOOP_S) -> None:
        """All ask, are answered, and ask again so much later, a few times."""
        for _ in range(4):
            for number in range(len(self.habits)):
                self.ask(number)
            while self.waiting.running:
                self.now += 0.003
                self.end()
            self.now += again_s


def sizes(runs: list[list[Job]]) -> list[int]:
    return [len(one) for one in runs]


def test_a_run_begins_when_all_who_are_about_to_ask_have_done_so() -> None:
    """The first that are back wait for the others, who always ask again at once: one run in place of two."""
    crowd = Crowd(16)
    crowd.learn()
    assert sizes(crowd.ask(*range(8))) == []
    assert crowd.waiting.recheck_at > crowd.now
    crowd.pass_(0.0005)
    assert sizes(crowd.ask(*range(8, 16))) == [16]
    assert crowd.waiting.recheck_at == math.inf


def test_nobody_waits_long_for_who_does_not_come_back() -> None:
    """They are expected for half as long again as it takes them usually; then the others run."""
    crowd = Crowd(16)
    crowd.learn()
    assert sizes(crowd.ask(*range(8))) == []
    by = crowd.waiting.recheck_at
    assert by - crowd.now < 2 * LOOP_S
    assert sizes(crowd.pass_(by - crowd.now)) == [8]


def test_who_asks_now_and_then_is_not_waited_for() -> None:
    """A camera with a picture each second is not about to ask, whoever waits."""
    crowd = Crowd(16)
    crowd.learn(again_s=1.0)
    assert sizes(crowd.ask(*range(8))) == [8]


def test_one_long_pause_is_soon_forgotten() -> None:
    """Who rested for a minute and then asks again at once is waited for again after a few times."""
    habit, returning = ArrivalStats(1), ExpectedReturns()
    returning.on_answered(habit, 0.0)
    returning.on_request(habit, 60.0)
    now = 60.0
    for _ in range(10):
        returning.on_answered(habit, now)
        returning.on_request(habit, now := now + LOOP_S)
    returning.on_answered(habit, now)
    assert returning.forecast(now).clients == 1
    assert habit.return_s < 2 * LOOP_S


def test_who_is_in_a_hurry_does_not_wait_for_others() -> None:
    """Its time would be up before those that are expected are back and all of them have run."""
    crowd = Crowd(16)
    crowd.learn()
    assert sizes(crowd.ask(*range(8), deadline=crowd.now + 0.003)) == [8]


def test_nobody_waits_where_one_run_for_all_saves_nothing() -> None:
    """A model whose runs take twice as long for twice as many gains nothing by it."""
    crowd = Crowd(16)
    crowd.shared.replace_times({1: 0.002, 8: 0.016, 16: 0.032, 32: 0.064})
    crowd.learn()
    assert sizes(crowd.ask(*range(8))) == [8]


def test_a_thread_that_waits_for_its_run_begins_it_when_the_others_do_not_come() -> None:
    """Nobody else may be there to do so: a gateway's thread takes its turn by itself."""
    turns, gate, shared = Scheduler(1, 10), Gate(), pace(most=8, enough=8, seconds={1: 0.04, 8: 0.05})
    gate.leave.set()
    gone = ArrivalStats(1, return_s=0.02)
    shared.returns.on_answered(gone, monotonic())
    assert turns.submit_and_wait(Job(1, gate.run, shared)) == 2


def test_large_runs_are_tried_again_after_a_measurement_that_said_they_take_long() -> None:
    """It was taken while the machine was busy: with each run of fewer it is believed less."""
    known = pace(most=32, enough=8, seconds={1: 0.002, 16: 0.004, 32: 0.04})
    for _ in range(200):
        known.record(16, 0.004)
    assert known.expected_s(32) == pytest.approx(0.04)
    assert known.optimistic_s(32) == pytest.approx(0.004)
    known.record(32, 0.04)
    assert known.optimistic_s(32) == pytest.approx(0.04)


class Interrupted(dict[int, float]):
    """Seconds by size; whoever goes through them is interrupted."""

    def __init__(self, seconds: dict[int, float], by: Callable[[], object]) -> None:
        super().__init__(seconds)
        self._by = by

    def __iter__(self) -> Iterator[int]:
        sizes = list(super().__iter__())
        self._by()
        return iter(sizes)


def test_what_is_measured_amid_a_run_does_not_spoil_its_end() -> None:
    """Another engine's seconds take the place of all that were known, at any moment: sizes that it was not measured for
    were looked for among them, and a run that had gone well was never told to those who waited for it."""
    known = pace(most=8, enough=2)
    known._seconds = Interrupted({1: 0.002, 3: 0.003, 8: 0.004}, lambda: known.replace_times({1: 0.001, 8: 0.002}))
    known.record(3, 0.003)
    assert known.expected_s(8) == 0.002
    known._seconds = Interrupted({1: 0.002, 3: 0.003, 8: 0.004}, lambda: known.replace_times({1: 0.001}))
    assert 0.003 < known.expected_s(5) < 0.004


def test_one_hiccup_says_little_of_the_next_run() -> None:
    """A run that took a hundred times as long counts as one that took twice as long."""
    known = pace(most=8, enough=2, seconds={1: 0.002, 8: 0.004})
    known.record(8, 0.4)
    assert known.expected_s(8) < 0.006


# Refused


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    """Busy, with the time that what waits will take."""
    waiting, known = RunQueue(1, 2), pace(seconds={1: 2.0})
    admitted(waiting, job(known), job(known), job(known))
    with pytest.raises(Busy) as refusal:
        waiting.admit(job(known), 0.0)
    assert not isinstance(refusal.value, FairShareExceeded)
    assert refusal.value.retry_after_s == pytest.approx(6.0)


def test_one_that_cannot_be_done_in_time_is_refused_at_once() -> None:
    """Given what waits; where nothing waits it is tried, whatever was measured before."""
    waiting, known = RunQueue(1, 10), pace(seconds={1: 1.0})
    assert len(admitted(waiting, job(known, deadline=0.1))) == 1
    admitted(waiting, job(known), job(known))
    with pytest.raises(Busy, match="it would wait about"):
        waiting.admit(job(known, deadline=3.5), 0.0)
    waiting.admit(job(known, deadline=4.5), 0.0)


def test_one_client_may_not_crowd_out_others() -> None:
    """Beyond its share of the places, while another waits: FairShareExceeded. Alone it may have them all."""
    waiting = RunQueue(1, 5)
    admitted(waiting, *[job(client="greedy") for _ in range(5)])
    assert len(waiting.queue) == 4
    waiting.admit(job(client="modest"), 0.0)
    with pytest.raises(FairShareExceeded, match="its share of 3"):
        waiting.admit(job(client="greedy"), 0.0)


def test_where_all_places_are_taken_the_greediest_gives_way() -> None:
    """Its newest request, for a client that has fewer; never for one that has as many."""
    waiting = RunQueue(1, 3)
    greedy = [job(client="greedy") for _ in range(4)]
    admitted(waiting, *greedy)
    modest = job(client="modest")
    assert waiting.admit(modest, 0.0) is greedy[3]
    assert isinstance(greedy[3].error, FairShareExceeded)
    assert waiting.queue == [greedy[1], greedy[2], modest]
    assert waiting.admit(job(client="third"), 0.0) is greedy[2]
    with pytest.raises(Busy) as refusal:
        waiting.admit(job(client="modest"), 0.0)
    assert not isinstance(refusal.value, FairShareExceeded) or "share" in str(refusal.value)


def test_clients_without_a_name_share_one_queue() -> None:
    """Without certificates nobody can be told from another."""
    waiting = RunQueue(1, 1)
    admitted(waiting, job(), job())
    with pytest.raises(Busy):
        waiting.admit(job(), 0.0)


# What is expected


def test_what_a_run_takes_is_learnt_and_read_between_sizes() -> None:
    """Between known sizes in proportion, beyond them never less; alone is the shortest of late."""
    known = RunTimes()
    assert (known.expected_s(), known.single_s) == (0.0, 0.0)
    known.record(1, 0.010)
    known.record(1, 0.020)
    assert known.single_s == pytest.approx(0.010, rel=0.01)
    known.enable_batching(BatchBenefit({1: 0.01, 9: 0.05}, 9, 2))
    assert known.expected_s(5) == pytest.approx(0.03)
    assert known.expected_s(18) == pytest.approx(0.1)
    assert known.total_s(19) == pytest.approx(0.05 + 0.05 + 0.01)


# Threads


class Gate:
    """A run that waits for leave."""

    def __init__(self) -> None:
        self.leave = threading.Event()
        self.begun = threading.Semaphore(0)
        self.sizes: list[int] = []

    def run(self, many: Sequence[int]) -> list[int]:
        self.sizes.append(len(many))
        self.begun.release()
        assert self.leave.wait(PATIENCE_S)
        if -1 in many:
            raise InferenceFailed("one of them is spoilt")
        return [2 * one for one in many]


class Asker(threading.Thread):
    """One that takes its turn."""

    def __init__(self, turns: Scheduler, one: Job) -> None:
        super().__init__(daemon=True)
        self.job = one
        self.got: Any = None
        self._turns = turns
        self.start()

    def run(self) -> None:
        try:
            self.got = self._turns.submit_and_wait(self.job)
        except Exception as error:
            self.got = error


def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_S / 0.002)):
        if condition():
            return
        threading.Event().wait(0.002)
    raise AssertionError("it did not arrive in time")


def test_each_of_those_that_run_together_gets_its_own() -> None:
    """Three wait while one runs; the next run has all three, by one thread, and each its result."""
    turns, gate, shared = Scheduler(1, 10), Gate(), pace(most=8, enough=8)
    first = Asker(turns, Job(1, gate.run, shared))
    assert gate.begun.acquire(timeout=PATIENCE_S)
    rest = [Asker(turns, Job(n, gate.run, shared)) for n in (2, 3, 4)]
    until(lambda: turns.waiting == 3)
    gate.leave.set()
    for one in (first, *rest):
        one.join(PATIENCE_S)
    assert [one.got for one in (first, *rest)] == [2, 4, 6, 8]
    assert gate.sizes == [1, 3]
    assert [one.job.batch_size for one in rest] == [3, 3, 3]
    assert sum(one.job.counts_run for one in rest) == 1
    assert (turns.waiting, turns.running, turns.longest_run_s()) == (0, 0, 0.0)


def test_one_that_fails_among_several_fails_alone() -> None:
    """The others of its run are answered."""
    turns, gate, shared = Scheduler(1, 10), Gate(), pace(most=8, enough=8)
    first = Asker(turns, Job(1, gate.run, shared))
    assert gate.begun.acquire(timeout=PATIENCE_S)
    rest = [Asker(turns, Job(n, gate.run, shared)) for n in (2, -1, 4)]
    until(lambda: turns.waiting == 3)
    gate.leave.set()
    for one in (first, *rest):
        one.join(PATIENCE_S)
    assert [first.got, rest[0].got, rest[2].got] == [2, 4, 8]
    assert isinstance(rest[1].got, InferenceFailed)


def test_nobody_runs_for_one_that_has_gone_or_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave the queue, and are not in the run that they would have shared."""
    monkeypatch.setattr(turns_module, "LOOK_UP_S", 0.01)
    turns, gate, shared = Scheduler(1, 10), Gate(), pace(most=8, enough=8)
    first = Asker(turns, Job(1, gate.run, shared))
    assert gate.begun.acquire(timeout=PATIENCE_S)
    gone, late = Job(2, gate.run, shared, is_client_gone=lambda: True), Job(3, gate.run, shared, deadline=0.0)
    leaving = [Asker(turns, one) for one in (gone, late)]
    for one in leaving:
        one.join(PATIENCE_S)
    staying = Asker(turns, Job(4, gate.run, shared))
    until(lambda: turns.waiting == 1)
    gate.leave.set()
    for one in (first, staying):
        one.join(PATIENCE_S)
    assert [type(one.got) for one in leaving] == [LinkError, DeadlineExceeded]
    assert (first.got, staying.got, gate.sizes) == (2, 8, [1, 1])


def test_a_place_is_given_back_whatever_happens_in_it() -> None:
    """Also when what runs raises something that nobody foresaw."""
    turns = Scheduler(1, 0)

    def broken(_: Sequence[int]) -> list[int]:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            turns.submit_and_wait(Job(1, broken, RunTimes()))
    assert turns.submit_and_wait(job()) == 2


def test_load_tells_what_others_make_of_a_request() -> None:
    """1 for one alone; more for one that waited."""
    turns, gate, shared = Scheduler(1, 10), Gate(), RunTimes()
    gate.leave.set()
    for _ in range(3):
        turns.submit_and_wait(Job(1, gate.run, shared))
    calm = turns.load
    gate.leave.clear()
    first = Asker(turns, Job(1, gate.run, shared))
    for _ in range(4):
        assert gate.begun.acquire(timeout=PATIENCE_S)
    second = Asker(turns, Job(1, gate.run, shared))
    until(lambda: turns.waiting == 1)
    gate.leave.set()
    for one in (first, second):
        one.join(PATIENCE_S)
    assert calm >= 1
    assert turns.load > calm
