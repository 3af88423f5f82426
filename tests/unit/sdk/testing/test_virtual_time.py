"""The hub: tasks in turn, on a clock that jumps."""

from __future__ import annotations

import pytest

from edgesplit.testing.virtual_time import Hub, TaskKilled


def test_time_jumps_to_the_next_event() -> None:
    """A virtual day takes no longer than what happens in it, and ends when it was to end."""
    hub, seen = Hub(start=1_000.0), []
    hub.call_later(3_600, lambda: seen.append(hub.time()))

    hub.run(86_400)

    assert seen == [4_600.0]
    assert hub.monotonic() == 86_400


def test_simultaneous_timers_run_in_order_of_creation() -> None:
    """No run depends on anything but its input."""
    hub, seen = Hub(), []
    for number in range(50):
        hub.call_at(1.0, lambda number=number: seen.append(number))  # type: ignore[misc]

    hub.run(2)

    assert seen == list(range(50))


def test_tasks_wait_for_each_other() -> None:
    """A condition wakes the waiting task, and time runs on meanwhile."""
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


def test_wait_with_timeout_returns_false() -> None:
    """When nothing arrives within the timeout."""
    hub, outcome = Hub(), []
    hub.spawn(lambda: outcome.append((hub.condition().wait(2.5), hub.monotonic())))

    hub.run(60)

    assert outcome == [(False, 2.5)]


def test_wait_until_a_moment_ends_despite_rounding() -> None:
    """A task that computes how long to wait until a moment gets there."""
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


def test_close_ends_every_task() -> None:
    """Where it waits."""
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


def test_task_killed_in_a_timer_leaves_other_timers_running() -> None:
    """A simulated power cut may happen in a timer callback: the others go on."""
    hub, seen = Hub(), []

    def end() -> None:
        raise TaskKilled

    hub.call_later(1, end)
    hub.call_later(2, lambda: seen.append("on"))
    hub.run(3)

    assert seen == ["on"]


def test_killed_task_does_nothing_more() -> None:
    """Neither the rest of its work nor its error handling."""
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


def test_late_wake_up_batches_events() -> None:
    """With a wake-up delay, everything that arrives within the delay is found together."""
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


def test_wait_outside_a_task_is_refused() -> None:
    """It would stop the simulation."""
    hub = Hub()
    with pytest.raises(RuntimeError, match="only a task"):
        hub.condition().wait(1)


def test_cancelled_timers_are_removed() -> None:
    """A year of timers that were all cancelled leaves none behind."""
    hub = Hub()
    for _ in range(10_000):
        hub.call_later(1e9, lambda: None).cancel()

    assert len(hub._timers) < 2_500


def test_busy_tasks_do_not_starve_the_network() -> None:
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
