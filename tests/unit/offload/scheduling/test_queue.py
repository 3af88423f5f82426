"""Who waits, who runs together and who is refused: decisions as tables, then the threads around them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import pytest

from edgesplit.errors import Busy, DeadlineExceeded, FairShareExceeded, InferenceFailed, LinkError
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


def test_requests_are_batched_while_their_model_runs() -> None:
    """The first is not held up; those that come meanwhile share the next run; other models are not among them."""
    waiting, shared, other = RunQueue(1, 10), pace(most=8, enough=8), RunTimes()
    ours, theirs = [job(shared) for _ in range(4)], job(other)
    assert admitted(waiting, ours[0], ours[1], theirs, ours[2], ours[3]) == [[ours[0]]]
    assert end_one(waiting) == [[ours[1], ours[2], ours[3]]]
    assert end_one(waiting) == [[theirs]]


def test_a_second_run_begins_for_as_many_requests_as_the_first_has() -> None:
    """Few are not held up while there is room: a second run begins for as many as are in the first."""
    waiting, shared = RunQueue(4, 10), pace(most=8, enough=8)
    first = [job(shared) for _ in range(4)]
    assert admitted(waiting, *first) == [[first[0]], [first[1]]]
    waiting.on_run_end(min(waiting.running, key=lambda run: run.started_at), 1.0)
    assert begun(waiting, 1.0) == [[first[2], first[3]]]


def test_a_third_run_begins_only_for_a_batch_with_most_of_the_gain() -> None:
    """There is room for it all along, and it is used once so many wait that it has most of the gain."""
    waiting, shared = RunQueue(4, 10), pace(most=8, enough=3)
    ours = [job(shared) for _ in range(5)]
    assert admitted(waiting, *ours) == [[ours[0]], [ours[1]], ours[2:]]


def test_batched_runs_use_the_slots_of_other_processes_too() -> None:
    """Requests of other processes are batched here: those runs take slots beside this process's own."""
    waiting, shared, other = RunQueue(1, 10, max_batched_runs=2), pace(most=8, enough=8), RunTimes()
    ours, theirs = [job(shared) for _ in range(2)], [job(other) for _ in range(2)]
    assert admitted(waiting, *theirs, *ours) == [[theirs[0]], [ours[0]]]
    waiting.on_run_end(next(run for run in waiting.running if run.jobs == [theirs[0]]), 1.0)
    assert begun(waiting, 1.0) == [[theirs[1]]]


def test_a_batch_counts_as_one_in_the_queue() -> None:
    """Sixteen requests that will run together are one more to wait for, not sixteen."""
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


def test_a_batch_is_only_as_large_as_its_deadlines_allow() -> None:
    """Eight together take 80 ms: a request with 50 ms left runs in a smaller batch; the oldest one is always in it."""
    shared = pace(most=8, enough=2, seconds={1: 0.01, 8: 0.08})
    waiting = RunQueue(1, 20)
    first, hurried, rest = job(shared), job(shared, deadline=1.05), [job(shared) for _ in range(7)]
    (begun,) = admitted(waiting, first, *rest[:3], hurried, *rest[3:])
    assert begun == [first]
    (members,) = end_one(waiting, now=1.0)
    assert members[0] is rest[0]
    assert hurried in members
    assert len(members) == 5


def test_an_urgent_request_does_not_wait_for_the_active_run() -> None:
    """The active run of its model would end too late for its deadline: it begins beside it."""
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


def test_a_batch_waits_for_all_returning_clients() -> None:
    """Clients that always ask again at once are waited for: one run in place of two."""
    crowd = Crowd(16)
    crowd.learn()
    assert sizes(crowd.ask(*range(8))) == []
    assert crowd.waiting.recheck_at > crowd.now
    crowd.pass_(0.0005)
    assert sizes(crowd.ask(*range(8, 16))) == [16]
    assert crowd.waiting.recheck_at == math.inf


def test_a_batch_does_not_wait_long_for_a_client_that_stays_away() -> None:
    """Clients are expected for half as long again as they usually take; then the batch runs."""
    crowd = Crowd(16)
    crowd.learn()
    assert sizes(crowd.ask(*range(8))) == []
    by = crowd.waiting.recheck_at
    assert by - crowd.now < 2 * LOOP_S
    assert sizes(crowd.pass_(by - crowd.now)) == [8]


def test_a_batch_does_not_wait_for_an_occasional_client() -> None:
    """A camera with a picture each second is not about to ask."""
    crowd = Crowd(16)
    crowd.learn(again_s=1.0)
    assert sizes(crowd.ask(*range(8))) == [8]


def test_a_returning_client_is_expected_again_soon_after_one_long_pause() -> None:
    """After a pause of a minute and a few quick requests it is waited for again."""
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


def test_an_urgent_request_does_not_wait_for_returning_clients() -> None:
    """Its deadline would pass before the expected clients are back and the batch has run."""
    crowd = Crowd(16)
    crowd.learn()
    assert sizes(crowd.ask(*range(8), deadline=crowd.now + 0.003)) == [8]


def test_a_batch_waits_for_no_client_where_batching_gains_nothing() -> None:
    """A model whose runs take twice as long for twice as many requests gains nothing."""
    crowd = Crowd(16)
    crowd.shared.replace_times({1: 0.002, 8: 0.016, 16: 0.032, 32: 0.064})
    crowd.learn()
    assert sizes(crowd.ask(*range(8))) == [8]


def test_a_waiting_thread_starts_its_own_run_when_expected_clients_do_not_come() -> None:
    """No other thread may be there to do so, for example in a gateway."""
    turns, gate, shared = Scheduler(1, 10), Gate(), pace(most=8, enough=8, seconds={1: 0.04, 8: 0.05})
    gate.leave.set()
    gone = ArrivalStats(1, return_s=0.02)
    shared.returns.on_answered(gone, monotonic())
    assert turns.submit_and_wait(Job(1, gate.run, shared)) == 2


def test_large_batches_are_tried_again_after_a_pessimistic_measurement() -> None:
    """It was taken while the machine was busy: each smaller run lowers its weight."""
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


def test_a_measurement_during_a_run_lost_the_runs_result() -> None:
    """Another engine's seconds take the place of all that were known, at any moment: sizes that it was not measured for
    were looked for among them, and a run that had gone well was never told to those who waited for it."""
    known = pace(most=8, enough=2)
    known._seconds = Interrupted({1: 0.002, 3: 0.003, 8: 0.004}, lambda: known.replace_times({1: 0.001, 8: 0.002}))
    known.record(3, 0.003)
    assert known.expected_s(8) == 0.002
    known._seconds = Interrupted({1: 0.002, 3: 0.003, 8: 0.004}, lambda: known.replace_times({1: 0.001}))
    assert 0.003 < known.expected_s(5) < 0.004


def test_one_slow_run_changes_the_estimate_little() -> None:
    """A run that took a hundred times as long counts as one that took twice as long."""
    known = pace(most=8, enough=2, seconds={1: 0.002, 8: 0.004})
    known.record(8, 0.4)
    assert known.expected_s(8) < 0.006


# Refused


def test_a_full_queue_refuses_with_a_retry_time() -> None:
    """Busy, with the time that the waiting requests will take."""
    waiting, known = RunQueue(1, 2), pace(seconds={1: 2.0})
    admitted(waiting, job(known), job(known), job(known))
    with pytest.raises(Busy) as refusal:
        waiting.admit(job(known), 0.0)
    assert not isinstance(refusal.value, FairShareExceeded)
    assert refusal.value.retry_after_s == pytest.approx(6.0)


def test_a_request_that_cannot_meet_its_deadline_is_refused_at_once() -> None:
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


def test_a_full_queue_displaces_the_newest_request_of_the_client_with_most() -> None:
    """For a client that has fewer; never for one that has as many."""
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


def test_clients_without_a_certificate_count_as_one_client() -> None:
    """Without certificates clients cannot be told apart."""
    waiting = RunQueue(1, 1)
    admitted(waiting, job(), job())
    with pytest.raises(Busy):
        waiting.admit(job(), 0.0)


# What is expected


def test_run_times_are_learnt_and_interpolated_between_batch_sizes() -> None:
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


def test_each_request_of_a_batch_gets_its_own_result() -> None:
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


def test_a_failing_request_of_a_batch_fails_alone() -> None:
    """The others of its batch are answered."""
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


def test_late_and_abandoned_requests_leave_the_queue() -> None:
    """They are not in the batch that they would have shared."""
    turns, gate, shared = Scheduler(1, 10, look_up_s=0.01), Gate(), pace(most=8, enough=8)
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


def test_a_slot_is_released_whatever_a_run_raises() -> None:
    """Also an exception that is not ours."""
    turns = Scheduler(1, 0)

    def broken(_: Sequence[int]) -> list[int]:
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            turns.submit_and_wait(Job(1, broken, RunTimes()))
    assert turns.submit_and_wait(job()) == 2


def test_load_is_the_slowdown_by_other_requests() -> None:
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
