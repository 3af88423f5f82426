"""What the engine makes of one offload server: a slow link, a dead cloud and one that hangs lose races alike, and are
told apart. No thread and no socket: the server is scripted, the clock stands still until a test moves it."""

from __future__ import annotations

import random
import threading
from dataclasses import FrozenInstanceError, dataclass

import pytest

from edgesplit.offload_client.pool import PROBE_BYTES, CancellableCall, OffloadAnswer, OffloadFailure, OffloadRequest
from edgesplit.plan import Link
from edgesplit_agent.offload.target import UNANSWERED_S, OffloadTarget, Reservation

LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=2e6, rtt_s=0.05)
BYTES = 20_000
EVERY_S, LOCAL_S = 0.44, 0.3
"""A request comes so often, and takes the device so long."""
ANSWERED = OffloadAnswer({}, 0.09, 0.02, 1.0, BYTES, 200)


@dataclass
class Clock:
    """Of the cloud's own estimates."""

    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """An offload server, as far as a cloud asks one. `pings_s` None: nobody is there."""

    is_warm = True

    def __init__(self) -> None:
        self.pings_s: float | None = 0.05
        self.pings = 0

    def infer(self, asked: OffloadRequest, call: CancellableCall, timeout_s: float) -> OffloadAnswer:
        return ANSWERED

    def ping(self, timeout_s: float) -> float | OffloadFailure:
        self.pings += 1
        return OffloadFailure("timeout", "silence", timeout_s) if self.pings_s is None else self.pings_s

    def probe(self, timeout_s: float) -> OffloadAnswer | OffloadFailure:
        if self.pings_s is None:
            return OffloadFailure("timeout", "silence", timeout_s)
        return OffloadAnswer({}, 0.1, 0.0, 1.0, PROBE_BYTES, 0)


@dataclass
class TargetHarness:
    """A device that sends each request and answers it itself, too."""

    cloud: OffloadTarget
    server: Scripted
    clock: Clock

    def answered(self, up_bytes: int = BYTES) -> None:
        """A request that the cloud answers."""
        self.cloud.ask(OffloadRequest("m", "1", {}, (), [bytes(up_bytes)], 0), CancellableCall(), 2.0)

    def loses_a_race(self) -> None:
        """The device is quicker; then the watcher does what is due, until the next request comes."""
        self.clock.now += LOCAL_S
        self.cloud.on_lost_race(BYTES, LOCAL_S)
        self.watch()
        self.clock.now += EVERY_S - LOCAL_S
        self.watch()

    def watch(self) -> None:
        """What the watching thread would do now."""
        if self.cloud.seconds_until_probe() <= 0.0:
            self.cloud.probe()

    @property
    def may_be_asked(self) -> bool:
        """Whether the next request may go there."""
        is_available = self.cloud.snapshot().is_available
        reservation = self.cloud.reserve()
        assert (reservation is not None) == is_available
        if reservation is not None:
            self.cloud.release(reservation)
        return is_available


@pytest.fixture
def harness() -> TargetHarness:
    clock, server = Clock(), Scripted()
    cloud = OffloadTarget(server, clock=clock, jitter=random.Random(7).random)  # type: ignore[arg-type]
    cloud.assume_link(LINK)
    return TargetHarness(cloud, server, clock)


def test_slow_link_does_not_open_the_breaker(harness: TargetHarness) -> None:
    """A flapping link lost every race for two seconds while each ping was answered: that opened the breaker, which
    stayed open after the link had recovered."""
    for _ in range(10):
        harness.answered()
        for _ in range(5):
            harness.loses_a_race()
            assert (harness.cloud.breaker.state, harness.cloud.breaker.failures) == ("closed", 0)
            assert harness.may_be_asked
    assert harness.server.pings > 0


def test_lost_race_in_half_open_state_is_no_failure_while_pings_answer(harness: TargetHarness) -> None:
    """A half-open breaker opens at the first failure: on a slow link each lost race did that, with a longer pause each
    time."""
    harness.answered()
    harness.clock.now += 1.0
    harness.cloud.on_overdue(0.9)
    assert harness.cloud.breaker.state == "open"
    harness.clock.now += 1.0
    harness.watch()
    assert harness.cloud.breaker.state == "trial"
    for _ in range(5):
        harness.loses_a_race()
    assert harness.cloud.breaker.state == "trial" and harness.may_be_asked


def test_unanswered_ping_opens_the_breaker(harness: TargetHarness) -> None:
    """A lost race sends a ping; no answer opens the breaker at once."""
    harness.answered()
    harness.server.pings_s = None
    lost = 0
    while harness.cloud.breaker.state != "open":
        harness.loses_a_race()
        lost += 1
    assert lost <= 3 and harness.server.pings == 1 and not harness.may_be_asked


def test_cloud_that_answers_only_pings_opens_the_breaker_eventually(harness: TargetHarness) -> None:
    """Otherwise every request would be sent to it in vain; one is tried after each pause."""
    harness.answered()
    began, sent = harness.clock.now, 0
    while harness.clock.now < began + 4 * UNANSWERED_S:
        if harness.may_be_asked:
            sent += harness.clock.now > began + 2 * UNANSWERED_S
            harness.loses_a_race()
        else:
            harness.clock.now += EVERY_S
            harness.watch()
    assert 0 < sent <= 2 * UNANSWERED_S / EVERY_S / 2
    harness.answered()
    harness.answered()
    assert harness.may_be_asked


def test_ping_behind_own_upload_does_not_raise_the_round_trip(harness: TargetHarness) -> None:
    """A ping sent because a request hung waits behind that request's bytes; after small requests its time is a valid
    round trip."""
    harness.answered()
    harness.server.pings_s = 0.4
    before_s = harness.cloud.conditions.link.rtt_s
    for _ in range(5):
        harness.clock.now += 1.0
        harness.cloud.on_slow(LOCAL_S, BYTES)
        harness.watch()
    assert harness.server.pings == 5 and harness.cloud.conditions.link.rtt_s == before_s
    harness.answered(up_bytes=100)
    harness.clock.now += 1.0
    harness.cloud.on_slow(LOCAL_S)
    harness.watch()
    assert harness.cloud.conditions.link.rtt_s > before_s


# Snapshot and reservation


def on_trial(harness: TargetHarness, successes: int = 0) -> None:
    """Open the breaker, let its probe succeed, and have so many requests answered on trial."""
    harness.answered()
    harness.clock.now += 1.0
    harness.cloud.on_overdue(0.9)
    harness.clock.now += 1.0
    harness.watch()
    for _ in range(successes):
        harness.answered()
    assert harness.cloud.breaker.state == "trial"


def test_snapshot_is_immutable(harness: TargetHarness) -> None:
    """Whatever the target learns afterwards: a selection sees one consistent state."""
    before = harness.cloud.snapshot()
    harness.answered()
    harness.clock.now += 1.0
    harness.cloud.on_overdue(0.9)
    assert before.is_available and before.breaker.state == "closed" and before.conditions.remote_usable
    after = harness.cloud.snapshot()
    assert not after.is_available and after.estimate != before.estimate and after.taken_at > before.taken_at
    with pytest.raises(FrozenInstanceError):
        before.in_flight = 1  # type: ignore[misc]


def test_reservation_fails_if_the_breaker_opened_after_the_snapshot(harness: TargetHarness) -> None:
    """The snapshot showed capacity; the reservation checks again."""
    harness.answered()
    harness.clock.now += 1.0
    assert harness.cloud.snapshot().is_available
    harness.cloud.on_overdue(0.9)
    assert harness.cloud.reserve() is None and harness.cloud.in_flight == 0


def test_target_without_a_server_has_no_capacity() -> None:
    """Only the device's speed is learnt there."""
    cloud = OffloadTarget(None)
    assert not cloud.snapshot().is_available and not cloud.conditions.remote_usable and cloud.reserve() is None


@pytest.mark.parametrize(("successes", "room"), [(0, 1), (1, 2), (2, 4)])
def test_reservations_from_equal_snapshots_do_not_exceed_capacity(
    harness: TargetHarness, successes: int, room: int
) -> None:
    """Sixteen threads take their snapshots first, each of which shows capacity; only as many reservations succeed as
    there are places."""
    on_trial(harness, successes)
    seen = threading.Barrier(16)
    for _ in range(20):
        granted: list[Reservation] = []

        def ask(granted: list[Reservation] = granted) -> None:
            assert harness.cloud.snapshot().is_available
            seen.wait(20)
            reservation = harness.cloud.reserve()
            if reservation is not None:
                granted.append(reservation)

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(granted) == room == harness.cloud.in_flight
        for reservation in granted:
            harness.cloud.release(reservation)
    assert harness.cloud.in_flight == 0


def test_concurrent_reservations_never_exceed_capacity(harness: TargetHarness) -> None:
    """Eight threads reserve and release without pause: at no moment are more places held than the half-open breaker
    admits."""
    on_trial(harness, 1)
    counting, holders, most, begin = threading.Lock(), 0, 0, threading.Barrier(8)

    def come_and_go() -> None:
        nonlocal holders, most
        begin.wait(20)
        for _ in range(400):
            reservation = harness.cloud.reserve()
            if reservation is None:
                continue
            with counting:
                holders += 1
                most = max(most, holders)
            with counting:
                holders -= 1
            harness.cloud.release(reservation)

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert 0 < most <= 2 and harness.cloud.in_flight == 0
