"""The agent's pure decisions, as tables: wait for the cloud, circuit breaker, link estimates, idempotent requests."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from edgesplit.errors import DeadlineExceeded, InferenceFailed, LinkError
from edgesplit.offload_client.circuit_breaker import PAUSE, CircuitBreaker
from edgesplit.plan import Link, Plan, Row
from edgesplit_agent.policy.hedge_timing import offload_timeout_s, slices_duration_s
from edgesplit_agent.policy.link_estimator import LinkEstimate, is_probe_due
from edgesplit_agent.policy.row_selection import RowSelector, SelectionContext
from edgesplit_agent.serving.idempotency import IdempotencyCache, request_key

LTE = Link(up_bytes_per_s=731_250, down_bytes_per_s=1_720_000, rtt_s=0.06)


@pytest.mark.parametrize(
    ("left_s", "tail", "predicted_s", "expected"),
    [
        (2.0, 0.5, 0.01, 0.25),  # a quick cloud is given a quarter of a second
        (2.0, 0.7, 0.2, 0.6),  # a slower one three times what it should take
        (2.0, 0.5, 0.2, 0.5),  # but no longer than finishing alone takes: that is the most it can cost
        (2.0, 0.1, 0.3, 0.45),  # unless it is expected to take longer than that anyway
        (1.0, 0.5, 0.2, 0.37),  # but never past the moment when the tail must start
        (0.5, 0.5, 0.2, 0.0),  # too late for that already: both at once
        (2.0, None, 0.1, 1.97),  # nothing to finish with: wait to the last
        (-1.0, None, 0.1, 0.0),
    ],
)
def test_wait_for_the_cloud(left_s: float, tail: float | None, predicted_s: float, expected: float) -> None:
    """The cloud is waited for as long as its estimate and the deadline justify, and no longer."""
    assert offload_timeout_s(left_s, tail, predicted_s, margin_s=0.03) == pytest.approx(expected)


def test_tail_time_prefers_measurement_to_prediction() -> None:
    """A slice that ran here counts with its measured time; another with its predicted time, multiplied by the device's
    slow-down."""
    assert slices_duration_s(["a", "b", "c"], {"a": 0.5}, {"a": 9.0, "b": 0.1}, slowdown=2.0) == pytest.approx(0.7)


def test_breaker_opens_after_three_failures_in_a_row() -> None:
    """Two failures do not open it, the third does; a success in between resets the count."""
    breaker = CircuitBreaker().after_failure(0.0, 0.5).after_failure(0.0, 0.5)
    assert breaker.is_allowing
    assert breaker.after_success(0.0).after_failure(0.0, 0.5).is_allowing
    assert not breaker.after_failure(0.0, 0.5).is_allowing


def test_breaker_opens_at_once_on_connection_refused() -> None:
    """A refused connection is not transient."""
    assert not CircuitBreaker().after_failure(0.0, 0.5, refused=True).is_allowing


def test_breaker_backs_off_to_a_bound_with_jitter() -> None:
    """Half-open probes back off to two seconds at most, each device at its own moment."""
    pauses, breaker, now = [], CircuitBreaker(), 0.0
    for _ in range(8):
        breaker = breaker.after_failure(now, 1.0, probe=True, refused=True)
        pauses.append(breaker.probe_at - now)
        now = breaker.probe_at
    assert pauses[0] == pytest.approx(0.25) and pauses[-1] == pytest.approx(PAUSE.longest_s)
    assert all(later >= sooner for sooner, later in pairwise(pauses))
    jittered = {CircuitBreaker().after_failure(0.0, jitter, refused=True).probe_at for jitter in (0.0, 0.3, 0.9)}
    assert len(jittered) == 3


def test_one_failure_after_a_probe_reopens_the_breaker() -> None:
    """A server that answers health checks but no requests does not get three more of them."""
    trial = CircuitBreaker().after_failure(0.0, 1.0, refused=True).after_probe(1.0)
    assert trial.is_allowing
    again = trial.after_failure(2.0, 1.0)
    assert not again.is_allowing
    assert again.probe_at - 2.0 > 0.25


def test_half_open_breaker_doubles_its_admission() -> None:
    """One request may be in flight, then two, four, eight: each success doubles the number, and then the breaker
    closes."""
    breaker, rooms = CircuitBreaker().after_failure(0.0, 1.0, refused=True).after_probe(1.0), []
    while breaker.state == "trial":
        rooms.append(breaker.room)
        assert breaker.has_room(breaker.room - 1) and not breaker.has_room(breaker.room)
        breaker = breaker.after_success(2.0)
    assert rooms == [1, 2, 4, 8]
    assert breaker == CircuitBreaker() and breaker.has_room(1000)


def test_failures_of_requests_from_before_opening_are_ignored() -> None:
    """Requests that hung when the breaker opened fail one after the other: neither does the pause grow, nor does the
    half-open state end."""
    opened = CircuitBreaker().after_failure(5.0, 1.0, refused=True)
    assert opened.after_failure(5.1, 1.0, refused=True, sent_at=4.0) == opened
    trial = opened.after_probe(6.0)
    assert trial.after_failure(6.1, 1.0, sent_at=4.9) == trial
    assert trial.after_failure(6.1, 1.0, sent_at=6.05).state == "open"
    assert opened.after_success(5.2).state == "trial", "an answer that comes late is a sign of life"


def answered(meter: LinkEstimate, link: Link, up: int, times: int) -> LinkEstimate:
    for _ in range(times):
        meter = meter.after_transfer(up, 200, link.rtt_s + up / link.up_bytes_per_s + 200 / link.down_bytes_per_s)
    return meter


@pytest.mark.parametrize("up_bytes", [3_000, 16_384, 200_000])
def test_rate_drop_is_learnt_within_a_few_requests(up_bytes: int) -> None:
    """After three requests at a tenth of the rate, the estimate is nearer to the new rate than to the old."""
    slow = Link(up_bytes_per_s=LTE.up_bytes_per_s / 10, down_bytes_per_s=LTE.down_bytes_per_s, rtt_s=LTE.rtt_s)
    meter = answered(answered(LinkEstimate.from_link(LTE), LTE, up_bytes, 5), slow, up_bytes, 3)
    assert meter.link.up_bytes_per_s < LTE.up_bytes_per_s / 5


def test_rate_recovery_is_learnt_within_two_probes() -> None:
    """The idle probe (16 KiB every two seconds) brings the estimate back within a few seconds."""
    slow = Link(up_bytes_per_s=LTE.up_bytes_per_s / 10, down_bytes_per_s=LTE.down_bytes_per_s, rtt_s=LTE.rtt_s)
    meter = answered(answered(LinkEstimate.from_link(LTE), slow, 16_384, 6), LTE, 16_384, 2)
    assert meter.link.up_bytes_per_s > LTE.up_bytes_per_s / 2


def test_jitter_of_small_transfers_does_not_change_the_rate() -> None:
    """Five milliseconds more on a hundred bytes tell nothing of the rate."""
    meter = LinkEstimate.from_link(LTE).after_transfer(100, 100, LTE.rtt_s + 0.005)
    assert meter.link.up_bytes_per_s == pytest.approx(LTE.up_bytes_per_s, rel=0.05)


def test_abandoned_transfer_can_only_lower_the_rate() -> None:
    """No answer within a second: the link is at least that slow; no answer within a millisecond: nothing is learnt."""
    meter = LinkEstimate.from_link(LTE)
    assert meter.after_timeout(20_000, 1.0).link.up_bytes_per_s < LTE.up_bytes_per_s / 3
    assert meter.after_timeout(20_000, 0.061) == meter
    assert meter.after_timeout(0, 5.0) == meter


def test_estimate_learns_load_slowdown_and_round_trip() -> None:
    """Each converges to what is measured, and none leaves its bounds."""
    meter = LinkEstimate.from_link(LTE)
    for _ in range(20):
        meter = meter.after_load_report(3.0, 0.0).after_compute(0.2, 0.1, 0.0).after_round_trip(0.09)
    assert meter.server_load == pytest.approx(3.0, rel=0.01)
    assert meter.device_slowdown == pytest.approx(2.0, rel=0.01)
    assert meter.rtt_s == pytest.approx(0.09, rel=0.01)
    assert meter.after_load_report(0.0, 0.0).server_load >= 1.0
    assert meter.after_compute(1.0, 0.0, 0.0) == meter


def test_idle_probe_only_without_recent_traffic() -> None:
    """Requests measure the link themselves."""
    assert is_probe_due(10.0, 7.9, 2.0)
    assert not is_probe_due(10.0, 8.5, 2.0)


def test_retry_joins_the_request_in_flight() -> None:
    """Two calls with one id: the work is done once, and both get its result."""
    once: IdempotencyCache[str] = IdempotencyCache()
    entered, release = threading.Event(), threading.Event()
    runs, results = [], []

    def work() -> str:
        runs.append(1)
        entered.set()
        release.wait(10)
        return f"answer {len(runs)}"

    def call() -> None:
        results.append(once.answer(("m", "1"), 10.0, work))

    first = threading.Thread(target=call)
    first.start()
    entered.wait(10)
    second = threading.Thread(target=call)
    second.start()
    release.set()
    first.join(10)
    second.join(10)
    assert results == ["answer 1", "answer 1"] and len(runs) == 1
    assert once.answer(("m", "1"), 1.0, work) == "answer 1"


def test_link_failure_is_retried_and_model_failure_is_not() -> None:
    """After a link failure the id may run again; a model's failure is its final answer."""
    once: IdempotencyCache[str] = IdempotencyCache()

    def fails(error: Exception) -> str:
        raise error

    with pytest.raises(LinkError):
        once.answer(("m", "1"), 1.0, lambda: fails(LinkError("gone")))
    assert once.answer(("m", "1"), 1.0, lambda: "now") == "now"
    with pytest.raises(InferenceFailed):
        once.answer(("m", "2"), 1.0, lambda: fails(InferenceFailed("shape")))
    with pytest.raises(InferenceFailed):
        once.answer(("m", "2"), 1.0, lambda: "other")


def test_retry_does_not_wait_beyond_its_own_deadline() -> None:
    """The first call still runs: the retry gets a typed error in time."""
    once: IdempotencyCache[str] = IdempotencyCache()
    entered, release = threading.Event(), threading.Event()

    def work() -> str:
        entered.set()
        release.wait(10)
        return "late"

    thread = threading.Thread(target=lambda: once.answer(("m", "1"), 10.0, work))
    thread.start()
    entered.wait(10)
    with pytest.raises(DeadlineExceeded):
        once.answer(("m", "1"), 0.01, work)
    release.set()
    thread.join(10)


def test_slow_answer_is_not_evicted_first() -> None:
    """Its retry comes after it finished: a slow answer was evicted at once, and its retry ran the model again."""
    once: IdempotencyCache[str] = IdempotencyCache(entries=2)

    def slow() -> str:
        for number in range(3):
            once.answer(("m", f"quick {number}"), 1.0, lambda: "quick")
        return "slow"

    assert once.answer(("m", "slow"), 1.0, slow) == "slow"
    once.answer(("m", "one more"), 1.0, lambda: "quick")
    assert once.answer(("m", "slow"), 1.0, lambda: "answered twice") == "slow"


def test_failed_request_is_cached_without_its_tensors() -> None:
    """Its retry gets the same error; its frame is not kept in memory as long as the error is."""
    once: IdempotencyCache[int] = IdempotencyCache()
    frame = np.zeros(3)
    held = weakref.ref(frame)

    def fails(carried: object) -> int:
        raise InferenceFailed(f"gone: {carried}")

    for _ in range(2):
        with pytest.raises(InferenceFailed, match="gone"):
            once.answer(("id",), 1.0, partial(fails, frame))
    assert once.joined == 1
    del frame
    gc.collect()
    assert held() is None


def test_idempotency_cache_is_bounded() -> None:
    """Neither many small nor few large answers are kept for ever."""
    many: IdempotencyCache[int] = IdempotencyCache(entries=4)
    large: IdempotencyCache[int] = IdempotencyCache(held_bytes=100, size_of=lambda _: 60)
    for number in range(20):
        many.answer(("m", number), 1.0, lambda: 1)
        large.answer(("m", number), 1.0, lambda: 1)
    for number in reversed(range(20)):
        many.answer(("m", number), 1.0, lambda: 1)
        large.answer(("m", number), 1.0, lambda: 1)
    assert (many.joined, large.joined) == (4, 1)


def test_same_id_with_other_tensors_is_another_request() -> None:
    """A client that uses the id 1 for all its requests gets each its own answer."""
    one, two = {"x": np.zeros(3, np.float32)}, {"x": np.ones(3, np.float32)}
    assert request_key("m", "1", one) == request_key("m", "1", {"x": np.zeros(3, np.float32)})
    assert request_key("m", "1", one) != request_key("m", "1", two)
    assert request_key("m", "1", one) != request_key("m", "1", {"x": np.zeros((3, 1), np.float32)})


BUSY_PLAN = Plan(
    model="m@1",
    device_class="pi",
    rows=(
        Row(name="remote", remote=("a",), up_bytes=100_000, remote_s=0.1),
        Row(name="local", device=("a",), device_s=0.127),
    ),
    link=Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.05),
)
"""The cloud takes 250 ms, the device 127 ms, or 330 ms where it is 2.6 times slower."""


@dataclass
class VirtualDevice:
    """A device in virtual time, which answers by the selected row and learns from its own runs."""

    slowdown: float
    now: float = 1000.0
    estimate: LinkEstimate = field(default_factory=lambda: LinkEstimate.from_link(BUSY_PLAN.link))
    selector: RowSelector = field(default_factory=RowSelector)

    def run(self) -> None:
        """Run the model's layers here, as another application's request would."""
        self.estimate = self.estimate.after_compute(0.127 * self.slowdown, 0.127, self.now)

    def request(self, *, after_s: float) -> str:
        """The row that answers a request."""
        self.now += after_s
        choice = self.selector.select("m", BUSY_PLAN, SelectionContext(self.estimate, self.now))
        assert choice is not None
        if choice.row.is_local:
            self.run()
        return choice.row.name

    def be_busy(self, seconds: int) -> None:
        """Run twice a second for so long."""
        for _ in range(2 * seconds):
            self.now += 0.5
            self.run()


def test_busy_minute_is_not_remembered_for_ever() -> None:
    """Seven requests in a row went to the cloud at 330 to 399 ms where the device takes 127, for a slowdown of a busy
    minute that had passed."""
    device = VirtualDevice(slowdown=2.6)
    device.be_busy(60)
    assert device.request(after_s=0.1) == "remote"
    device.slowdown = 1.0
    assert [device.request(after_s=60.0), *(device.request(after_s=1.0) for _ in range(6))] == ["local"] * 7


def test_requests_that_avoid_the_device_test_it_again_within_seconds() -> None:
    """A request each second keeps the row of the cloud in use; it brings no measurement of the device."""
    device = VirtualDevice(slowdown=2.6)
    device.be_busy(60)
    device.slowdown = 1.0
    rows = [device.request(after_s=1.0) for _ in range(40)]
    assert rows[0] == "remote" and set(rows[15:]) == {"local"}


def test_device_that_is_always_slower_than_planned_is_rarely_tested() -> None:
    """Where the plan is wrong for good, the usual slowdown learns it, and sparse requests do not all test it again."""
    device = VirtualDevice(slowdown=2.6)
    device.be_busy(1800)
    rows = [device.request(after_s=30.0) for _ in range(300)]
    assert rows.count("local") <= 45
    assert device.estimate.slowdown_believed(device.now + 86_400.0) == pytest.approx(1.0, abs=0.01)


def test_device_that_is_faster_than_planned_stays_so() -> None:
    """A fast device is not forgotten: believed as slow as planned it would be asked no more, and never be measured."""
    meter = LinkEstimate.from_link(LTE)
    for second in range(20):
        meter = meter.after_compute(0.05, 0.1, float(second))
    assert meter.slowdown_believed(1e6) == pytest.approx(0.5, rel=0.01)


def test_busy_minute_of_the_server_is_not_remembered_for_ever() -> None:
    """A server that is avoided for its load reports none: the belief fades to that of an idle one."""
    meter = LinkEstimate.from_link(LTE)
    for _ in range(10):
        meter = meter.after_load_report(9.0, 0.0)
    assert meter.load_believed(0.0) == pytest.approx(9.0, rel=0.01)
    assert meter.load_believed(10.0) == pytest.approx(5.0, rel=0.01)
    assert meter.load_believed(400.0) == pytest.approx(1.0, abs=0.01)
