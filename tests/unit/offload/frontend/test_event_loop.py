"""The thread that leads: what it looks after, whom it gives the lead to, and that nothing it calls can end it."""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from edgesplit_offload.frontend.event_loop import EventLoop

PATIENCE_S = 20.0
Start = Callable[..., EventLoop]


@pytest.fixture
def starting() -> Iterator[Start]:
    """Starts loops, and stops them."""
    with ExitStack() as stack:

        def start(**options: object) -> EventLoop:
            how = {"on_turn_end": lambda: None, "on_timer": lambda now: math.inf, **options}
            loop = EventLoop(**how)  # type: ignore[arg-type]
            loop.start()
            stack.callback(loop.stop, PATIENCE_S)
            return loop

        yield start


def called(loop: EventLoop) -> int:
    """The thread that leads, found out by having it do something."""
    done, by = threading.Event(), list[int]()

    def note() -> None:
        by.append(threading.get_ident())
        assert loop.is_leader
        done.set()

    loop.call_soon(note)
    assert done.wait(PATIENCE_S)
    return by[0]


def test_posted_calls_run_on_the_leader_thread(starting: Start) -> None:
    """From any thread, in order, always by the same one while nothing takes long."""
    loop = starting()
    seen: list[int] = []
    for number in range(100):
        loop.call_soon(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert called(loop) == called(loop)
    assert seen == list(range(100))
    assert not loop.is_leader


def test_a_leader_in_a_long_run_is_replaced(starting: Start) -> None:
    """Posted calls are made although it never comes back; when it does, it is not the leader any more."""
    loop, begun, leave, after = starting(), threading.Event(), threading.Event(), threading.Event()
    still: list[bool] = []

    def hang(_: None) -> None:
        begun.set()
        assert leave.wait(PATIENCE_S)

    def go() -> None:
        loop.run_watched(hang, None)
        still.append(loop.is_leader)
        after.set()

    first = called(loop)
    loop.call_soon(go)
    assert begun.wait(PATIENCE_S)
    second = called(loop)
    assert second != first
    leave.set()
    assert after.wait(PATIENCE_S)
    assert still == [False]
    assert called(loop) == second


def test_a_replaced_leader_that_came_back_ended_the_watch_over_its_successor(starting: Start) -> None:
    """The first leader comes back while the second is in a run of its own: that run is still watched, and a third
    leader does what is posted meanwhile."""
    loop, begun, leave, back = starting(), threading.Event(), threading.Event(), threading.Event()
    second_begun, second_leave = threading.Event(), threading.Event()

    def first_run(_: None) -> None:
        begun.set()
        assert leave.wait(PATIENCE_S)

    def go() -> None:
        loop.run_watched(first_run, None)
        back.set()

    def second_run(_: None) -> None:
        leave.set()
        assert back.wait(PATIENCE_S)
        second_begun.set()
        assert second_leave.wait(PATIENCE_S)

    loop.call_soon(go)
    assert begun.wait(PATIENCE_S)
    second = called(loop)
    loop.call_soon(lambda: loop.run_watched(second_run, None))
    assert second_begun.wait(PATIENCE_S)
    try:
        assert called(loop) != second
    finally:
        second_leave.set()


def test_a_leader_that_returns_from_a_short_run_stays_leader(starting: Start) -> None:
    """It also gets the result of the run."""
    loop, done, got = starting(), threading.Event(), list[object]()

    def go() -> None:
        got.append(loop.run_watched(lambda given: 2 * given, 21))
        done.set()

    loop.call_soon(go)
    assert done.wait(PATIENCE_S)
    assert got == [42]


def test_leadership_is_handed_over_before_a_long_run(starting: Start) -> None:
    """The next thread leads at once."""
    loop, begun, leave = starting(), threading.Event(), threading.Event()

    def go() -> None:
        assert loop.transfer_leadership()
        assert not loop.is_leader
        begun.set()
        assert leave.wait(PATIENCE_S)

    first = called(loop)
    loop.call_soon(go)
    assert begun.wait(PATIENCE_S)
    assert called(loop) != first
    leave.set()


def test_long_runs_are_executed_concurrently(starting: Start) -> None:
    """As many threads as there is work, and the loop goes on meanwhile."""
    loop, together = starting(), threading.Barrier(21)
    for _ in range(20):
        loop.run_in_thread(lambda: together.wait(PATIENCE_S))
    called(loop)
    together.wait(PATIENCE_S)


def test_exceptions_in_callbacks_are_logged_and_the_loop_goes_on(
    starting: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the callback was posted, run watched, or called for a socket."""
    loop = starting()
    ours, theirs = socket.socketpair()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with ours, theirs, caplog.at_level(logging.ERROR):
        loop.call_soon(lambda: loop.watch(ours.fileno(), fail))
        loop.call_soon(fail)
        loop.run_in_thread(fail)
        theirs.send(b"x")
        called(loop)
        called(loop)
        done = threading.Event()
        loop.call_soon(lambda: (loop.unwatch(ours.fileno()), done.set()))
        assert done.wait(PATIENCE_S)
    assert caplog.text.count("ZeroDivisionError") >= 2


def test_events_of_an_unwatched_socket_are_dropped(starting: Start) -> None:
    """Two sockets are ready in one turn, and the callback of one unwatches both: their descriptors may be reused by
    now."""
    told: list[int] = []
    loop = starting(ends_turn=lambda left: True)
    pairs = [socket.socketpair() for _ in range(2)]
    for _, theirs in pairs:
        theirs.send(b"x")

    def ready(descriptor: int, _: int) -> None:
        told.append(descriptor)
        for ours, _ in pairs:
            loop.unwatch(ours.fileno())

    def watch() -> None:
        for ours, _ in pairs:
            loop.watch(ours.fileno(), partial(ready, ours.fileno()))

    loop.call_soon(watch)
    for _ in range(5):
        called(loop)
    assert len(told) == 1
    for pair in pairs:
        for one in pair:
            one.close()


def test_the_timer_callback_runs_when_it_asked_to(starting: Start) -> None:
    """Once that moment has passed, and again when the callback says so."""
    looks = threading.Semaphore(0)

    def look(now: float) -> float:
        looks.release()
        return now + 0.001

    loop = starting(on_timer=look)
    loop.call_soon(lambda: loop.wake_by(0.0))
    for _ in range(3):
        assert looks.acquire(timeout=PATIENCE_S)
