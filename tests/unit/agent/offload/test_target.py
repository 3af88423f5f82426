"""What the engine makes of one offload server: a slow link, a dead cloud and one that hangs lose races alike, and are
told apart. No thread and no socket: the server is scripted, the clock stands still until a test moves it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from edgesplit.offload_client.pool import PROBE_BYTES, CancellableCall, OffloadAnswer, OffloadFailure, OffloadRequest
from edgesplit.plan import Link
from edgesplit_agent.offload.target import UNANSWERED_S, OffloadTarget

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
class World:
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
        if self.cloud._seconds_until_probe() <= 0.0:
            self.cloud._probe(self.server)  # type: ignore[arg-type]

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
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    clock, server = Clock(), Scripted()
    monkeypatch.setattr("edgesplit_agent.offload.target.monotonic", clock)
    monkeypatch.setattr("edgesplit_agent.offload.target.random", random.Random(7))
    cloud = OffloadTarget(server)  # type: ignore[arg-type]
    cloud.assume_link(LINK)
    return World(cloud, server, clock)


def test_a_link_that_is_slow_for_seconds_keeps_the_breaker_closed(world: World) -> None:
    """A link that flaps lost every race for two seconds, and each ping was answered: that opened the breaker, which
    stayed open when the link was back."""
    for _ in range(10):
        world.answered()
        for _ in range(5):
            world.loses_a_race()
            assert (world.cloud.breaker.state, world.cloud.breaker.failures) == ("closed", 0)
            assert world.may_be_asked
    assert world.server.pings > 0


def test_a_race_lost_on_trial_is_no_failure_while_the_cloud_lives(world: World) -> None:
    """A breaker on trial opens at the first failure: on a slow link each race did, with a longer pause each time."""
    world.answered()
    world.clock.now += 1.0
    world.cloud.on_overdue(0.9)
    assert world.cloud.breaker.state == "open"
    world.clock.now += 1.0
    world.watch()
    assert world.cloud.breaker.state == "trial"
    for _ in range(5):
        world.loses_a_race()
    assert world.cloud.breaker.state == "trial" and world.may_be_asked


def test_a_dead_cloud_is_found_out_by_the_first_ping(world: World) -> None:
    """Races that are lost ask whether anybody is there; silence opens the breaker at once."""
    world.answered()
    world.server.pings_s = None
    lost = 0
    while world.cloud.breaker.state != "open":
        world.loses_a_race()
        lost += 1
    assert lost <= 3 and world.server.pings == 1 and not world.may_be_asked


def test_a_cloud_that_answers_pings_and_no_request_is_left_alone_in_the_end(world: World) -> None:
    """Else every request would be sent to it for ever, for nothing; one is tried after each pause."""
    world.answered()
    began, sent = world.clock.now, 0
    while world.clock.now < began + 4 * UNANSWERED_S:
        if world.may_be_asked:
            sent += world.clock.now > began + 2 * UNANSWERED_S
            world.loses_a_race()
        else:
            world.clock.now += EVERY_S
            world.watch()
    assert 0 < sent <= 2 * UNANSWERED_S / EVERY_S / 2
    world.answered()
    world.answered()
    assert world.may_be_asked


def test_a_ping_behind_our_own_bytes_makes_no_round_trip_long(world: World) -> None:
    """One sent because a request hung waits behind what that request sent; after small requests it tells the truth."""
    world.answered()
    world.server.pings_s = 0.4
    before_s = world.cloud.conditions.link.rtt_s
    for _ in range(5):
        world.clock.now += 1.0
        world.cloud.on_slow(LOCAL_S, BYTES)
        world.watch()
    assert world.server.pings == 5 and world.cloud.conditions.link.rtt_s == before_s
    world.answered(up_bytes=100)
    world.clock.now += 1.0
    world.cloud.on_slow(LOCAL_S)
    world.watch()
    assert world.cloud.conditions.link.rtt_s > before_s
