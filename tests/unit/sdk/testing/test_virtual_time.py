"""The hub: tasks in turn, on a clock that jumps."""

from __future__ import annotations

import pytest

from edgesplit.testing.virtual_time import Hub, TaskKilled


def test_time_jumps_to_what_is_next() -> None:
    """A virtual day takes no longer than what happens in it, and ends when it was to end."""
    hub, seen = Hub(start=1_000.0), []
    hub.call_later(3_600, lambda: seen.append(hub.time()))

    hub.run(86_400)

    assert seen == [4_600.0]
    assert hub.monotonic() == 86_400


def test_what_falls_on_one_moment_happens_in_the_order_asked_for() -> None:
    """No run depends on anything but its input."""
    hub, seen = Hub(), []
    for number in range(50):
        hub.call_at(1.0, lambda number=number: seen.append(number))  # type: ignore[misc]

    hub.run(2)

    assert seen == list(range(50))


def test_tasks_wait_for_each_other() -> None:
    """A condition wakes who waits, and time runs on meanwhile."""
    hub, seen = Hub(), []
    changed, there = hub.condition(), []

    def reader() -> None:
        with changed:
            changed.wait_for(lambda: there)
        seen.append(("read", hub.monotonic()))

    def writer() -> None:
        hub.sleep(5)
        with changed:
            there.append(1)
            changed.notify_all()
        seen.append(("wrote", hub.monotonic()))

    hub.spawn(reader)
    hub.spawn(writer)
    hub.run(60)

    assert seen == [("wrote", 5.0), ("read", 5.0)]


def test_a_wait_may_be_too_short() -> None:
    """Who waits no longer than so many seconds hears that nothing came."""
    hub, outcome = Hub(), []
    hub.spawn(lambda: outcome.append((hub.condition().wait(2.5), hub.monotonic())))

    hub.run(60)

    assert outcome == [(False, 2.5)]


def test_a_wait_that_rounding_would_make_endless_ends() -> None:
    """Who waits until a moment, and computes how long that is, gets there."""
    hub, rounds = Hub(), []
    hub.run(2_592_000.1)
    moment = hub.monotonic() + 60.0

    def work() -> None:
        while hub.monotonic() <= moment:
            hub.sleep(moment - hub.monotonic())
            rounds.append(1)

    task = hub.spawn(work)
    hub.run(61, lambda: len(rounds) > 100)
    assert task.ended and len(rounds) < 100


def test_what_is_closed_leaves_nothing_behind() -> None:
    """Every task ends where it waits."""
    hub, seen = Hub(), []

    def work() -> None:
        try:
            hub.sleep(1e9)
        finally:
            seen.append("let go")

    for _ in range(5):
        hub.spawn(work)
    hub.run(1)
    hub.close()
    assert len(seen) == 5 and not hub.tasks


def test_who_ends_in_a_timer_ends_alone() -> None:
    """Power may fail while something is done that nobody waits for: the others go on."""
    hub, seen = Hub(), []

    def end() -> None:
        raise TaskKilled

    hub.call_later(1, end)
    hub.call_later(2, lambda: seen.append("on"))
    hub.run(3)

    assert seen == ["on"]


def test_a_killed_task_does_nothing_more() -> None:
    """Neither the rest of its work nor what it would do for a failure."""
    hub, seen = Hub(), []

    def work() -> None:
        try:
            hub.sleep(10)
            seen.append("slept")
        except Exception:
            seen.append("failed")

    task = hub.spawn(work)
    hub.run(1)
    task.kill()
    hub.run(60)

    assert not seen
    assert task.ended


def test_who_wakes_late_finds_more() -> None:
    """On a late pace everything that comes within the delay is found together."""
    hub, batches = Hub(), []
    pace = hub.with_wakeup_delay(0.2)
    changed, there = pace.condition(), []

    def take() -> None:
        while len(batches) < 2:
            with changed:
                changed.wait_for(lambda: there)
            batches.append(list(there))
            there.clear()

    def put(number: int) -> None:
        there.append(number)
        changed.notify()

    pace.start(take, "takes")
    for number in range(4):
        hub.call_at(1.0 + 0.05 * number, lambda number=number: put(number))  # type: ignore[misc]
    hub.call_at(9.0, lambda: put(9))
    hub.run(60)

    assert batches == [[0, 1, 2, 3], [9]]


def test_only_tasks_wait() -> None:
    """What waits outside of a task would stop everything: it is told so."""
    hub = Hub()
    with pytest.raises(RuntimeError, match="only a task"):
        hub.condition().wait(1)


def test_cancelled_timers_are_forgotten() -> None:
    """A year of timers that were all cancelled leaves nothing behind."""
    hub = Hub()
    for _ in range(10_000):
        hub.call_later(1e9, lambda: None).cancel()

    assert len(hub._timers) < 2_500


def test_those_who_keep_each_other_busy_do_not_keep_the_network_waiting() -> None:
    """A crowded fleet read nothing for so long that the broker took its devices for dead."""
    looks = 0

    def look(_seconds: float) -> None:
        nonlocal looks
        looks += 1

    hub = Hub(idle=look)

    def again() -> None:
        hub.call_later(0.0, again)

    again()
    assert hub.run(60.0, until=lambda: looks >= 3)
    hub.close()
