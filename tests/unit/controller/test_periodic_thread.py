"""The thread of a periodic job: it continues after a failure, and ends when it is stopped."""

from __future__ import annotations

import threading

from edgesplit_controller.periodic_thread import PeriodicThread

PATIENCE_S = 30.0


def test_a_failed_run_is_repeated_and_the_returned_pause_is_kept() -> None:
    """An exception does not end the thread: after it the job runs again; a returned pause replaces the usual one."""
    runs, has_run_thrice = [0], threading.Event()

    def job() -> float:
        runs[0] += 1
        if runs[0] == 1:
            raise OSError("the database is away")
        if runs[0] == 3:
            has_run_thrice.set()
            return 3_600.0
        return 0.0

    thread = PeriodicThread("job", job, 0.001)
    thread.start()
    assert has_run_thrice.wait(PATIENCE_S)
    thread.stop()
    assert runs == [3]


def test_stop_waits_for_the_run_in_progress() -> None:
    """What a run writes is complete when `stop` returns, because the database is closed next."""
    entered, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        entered.set()
        may_end.wait(PATIENCE_S)
        has_ended.set()

    thread = PeriodicThread("job", job, 3_600.0, first_s=0.0)
    thread.start()
    assert entered.wait(PATIENCE_S)
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    may_end.set()
    stopper.join(PATIENCE_S)
    assert has_ended.is_set()


def test_a_shared_stop_event_ends_the_thread_before_its_first_run() -> None:
    """A process that is stopping starts no job any more."""
    stopping, runs = threading.Event(), [0]
    stopping.set()

    def job() -> None:
        runs[0] += 1

    thread = PeriodicThread("job", job, 0.0, stopping=stopping)
    thread.start()
    thread.stop()
    assert runs == [0]
