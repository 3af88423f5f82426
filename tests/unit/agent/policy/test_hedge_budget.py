"""When a hedge may start and what it may cost, as tables; the last good answers; threads that never block their
caller."""

from __future__ import annotations

import threading
from math import inf

import msgspec
import numpy as np
import pytest

from edgesplit.oip.options import Hedge
from edgesplit.oip.report import Report
from edgesplit.plan import Conditions, Power
from edgesplit_agent.policy.hedge_budget import (
    BUCKET_REQUESTS,
    HedgeBudget,
    HedgeSchedule,
    HedgeTokenBucket,
    hedge_schedule,
    processor_cost,
    radio_joules,
)
from edgesplit_agent.serving.request import Answer
from edgesplit_agent.serving.stale_cache import StaleAnswerCache
from edgesplit_agent.serving.thread_pool import BoundedThreads
from support.agent_engine import CUT, LINK, LOCAL, eventually, manifest

PLAN = manifest(LOCAL, CUT).plans["pi4"]


@pytest.mark.parametrize(
    ("mode", "left_s", "tail", "predicted_s", "expected"),
    [
        ("auto", 2.0, 0.5, 0.01, (0.25, 1.37)),  # it may after a quarter of a second, it must before 1.37 s
        ("always", 2.0, 0.5, 0.01, (0.0, 1.37)),
        ("never", 2.0, 0.5, 0.01, (inf, 1.37)),  # an answer goes before energy, whatever the mode
        ("auto", 0.5, 0.5, 0.01, (0.0, 0.0)),  # no time to wait at all
        ("never", 0.5, 0.5, 0.01, (inf, 0.0)),
    ],
)
def test_hedge_start_times(
    mode: Hedge, left_s: float, tail: float, predicted_s: float, expected: tuple[float, float]
) -> None:
    """When the tail may run beside the cloud, and when it must."""
    assert hedge_schedule(mode, left_s, tail, predicted_s, margin_s=0.03) == HedgeSchedule(
        *map(pytest.approx, expected)
    )


def test_early_hedges_stay_within_a_tenth_of_local_cost() -> None:
    """At any request rate: a tail of half the model may run beside every fifth request."""
    budget, hedged = HedgeTokenBucket(0.1), 0
    for _ in range(10_000):
        budget = budget.credited(1.0)
        if budget.allows(0.5):
            budget, hedged = budget.debited(0.5), hedged + 1
    saved_up = 0.1 * BUCKET_REQUESTS
    assert hedged * 0.5 == pytest.approx(0.1 * 10_000 + saved_up, abs=0.5)


def test_budget_credit_and_debt_are_bounded_by_the_window() -> None:
    """An idle night allows no burst; an hour of hedges forced by deadlines is not paid back for a day."""
    budget = HedgeTokenBucket(0.1)
    for _ in range(10 * BUCKET_REQUESTS):
        budget = budget.credited(1.0)
    assert budget.tokens == budget.capacity == pytest.approx(0.1 * BUCKET_REQUESTS)
    for _ in range(10 * BUCKET_REQUESTS):
        budget = budget.debited(1.0)
    assert budget.tokens == -budget.capacity and not budget.allows(0.0)


def test_zero_budget_allows_no_early_hedge() -> None:
    """`--hedge-budget 0`: only deadlines cause hedges."""
    assert not HedgeTokenBucket(0.0).credited(1.0).allows(0.0)
    assert not HedgeBudget(lambda: 0.0).allows("never asked", 0.1)


def test_budget_starts_full_and_follows_the_power_mode() -> None:
    """The first request may race; when the battery runs low, the next one has less at once."""
    parts = iter([1.0, 1.0, 1.0, 0.0])
    ledger = HedgeBudget(lambda: next(parts))
    assert ledger.allows("never asked", 0.1)
    ledger.credit("m", 1.0)
    assert ledger.allows("m", 1.0) and not ledger.allows("m", 1.0)


def test_budget_is_in_joules_if_the_plan_has_power_figures() -> None:
    """The whole model's joules per second of run time, else the busy watts, else the seconds themselves."""
    measured = msgspec.structs.replace(LOCAL, device_joules=0.1)  # in 0.02 s
    assert processor_cost(2.0, PLAN) == 2.0
    assert processor_cost(2.0, msgspec.structs.replace(PLAN, power=Power(busy_watts=4.0))) == 8.0
    assert processor_cost(2.0, msgspec.structs.replace(PLAN, rows=(measured, CUT))) == pytest.approx(10.0)


def test_cost_of_a_wasted_upload() -> None:
    """Waking the radio, its power during the transfer, and each byte; without figures no cost is claimed."""
    power = Power(radio_watts=1.0, up_joules_per_byte=0.001, wake_joules=2.0)
    now = Conditions(link=LINK)
    assert radio_joules(CUT, now, PLAN) is None
    moving_s = CUT.up_bytes / LINK.up_bytes_per_s
    assert radio_joules(CUT, now, msgspec.structs.replace(PLAN, power=power)) == pytest.approx(2.3 + moving_s)


def answer(size: int = 4) -> Answer:
    return Answer({"y": np.zeros(size, np.uint8)}, Report(release="a", row="local", latency_s=0.5))


def test_stale_answer_is_marked_with_its_age() -> None:
    """With its own report otherwise; nothing older than the application accepts."""
    kept = StaleAnswerCache()
    kept.put(("m", "cam"), answer(), at=10.0)
    given = kept.get(("m", "cam"), 12.5, max_age_s=3.0)
    assert given is not None
    assert (given.report.stale, given.report.age_s, given.report.latency_s) == (True, 2.5, 0.5)
    assert kept.get(("m", "cam"), 13.5, max_age_s=3.0) is None
    assert kept.get(("m", "other"), 12.5, max_age_s=3.0) is None
    assert kept.given == 1


def test_answer_to_an_older_frame_does_not_replace_a_newer_one() -> None:
    """The answer to the later request is the last good one, whichever arrived first."""
    kept, newer, older = StaleAnswerCache(), answer(), answer()
    kept.put(("m", ""), newer, at=11.0)
    kept.put(("m", ""), older, at=10.0)
    given = kept.get(("m", ""), 11.5, max_age_s=5.0)
    assert given is not None and given.outputs is newer.outputs


def test_stale_answers_are_bounded() -> None:
    """In number and in bytes, an answer larger than the whole bound included; another release of the model clears
    them."""
    kept = StaleAnswerCache(streams=3, held_bytes=100)
    for number in range(10):
        kept.put(("m", str(number)), answer(20), at=float(number))
    assert kept.held_bytes == 3 * 20
    kept.put(("m", "large"), answer(90), at=20.0)
    assert kept.held_bytes == 90 and kept.get(("m", "large"), 20.0, max_age_s=1.0) is not None
    kept.put(("m", "larger"), answer(101), at=21.0)
    assert kept.held_bytes == 0
    kept.put(("m", ""), answer(), at=30.0)
    kept.put(("n", ""), answer(), at=30.0)
    kept.forget("m")
    assert kept.get(("m", ""), 30.0, max_age_s=1.0) is None
    assert kept.get(("n", ""), 30.0, max_age_s=1.0) is not None


def test_hanging_work_blocks_no_other_work() -> None:
    """Each piece of work starts at once or is refused; a thread that is done takes the next."""
    crew, hang, done = BoundedThreads(2, "test"), threading.Event(), threading.Event()
    assert crew.start(lambda: hang.wait(20) and None)
    assert crew.start(done.set) and done.wait(20)
    eventually("its thread waits for more", lambda: crew.busy == 1)
    again = threading.Event()
    assert crew.start(again.set) and again.wait(20)
    assert crew.threads == 2
    eventually("its thread waits for more", lambda: crew.busy == 1)
    assert crew.start(lambda: hang.wait(20) and None)
    assert not crew.start(done.set), "two hang, and there are two"
    hang.set()
    crew.stop()
    eventually("all threads have ended", lambda: crew.threads == 0)


def test_work_that_raises_does_not_end_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged, and the thread takes the next work."""
    crew, done = BoundedThreads(1, "test"), threading.Event()

    def fails() -> None:
        raise SystemExit("a thread's end")

    for _ in range(3):
        assert crew.start(fails)
        eventually("its thread waits for more", lambda: crew.busy == 0)
    assert crew.start(done.set) and done.wait(20)
    assert caplog.text.count("work failed") == 3
    crew.stop()


def test_refusal_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no thread left: refused, and not counted as one that runs."""
    crew = BoundedThreads(1, "test")

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert not crew.start(lambda: None)
    assert crew.threads == 0
    done = threading.Event()
    assert crew.start(done.set) and done.wait(20)
    crew.stop()
