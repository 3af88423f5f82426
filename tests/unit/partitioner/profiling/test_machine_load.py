"""Load of the machine beside a measurement: what is read, when it counts as busy, and which round is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesplit_partitioner.profiling.machine_load import (
    Counters,
    MachineLoad,
    is_quiet,
    load_between,
    measure_in_rounds,
    read_counters,
)


def counters(
    at: float, used: float | None = 0.0, stolen: float = 0.0, waited: float = 0.0, own: float = 0.0
) -> Counters:
    return Counters(at, used, stolen, waited, own)


@pytest.mark.parametrize(
    ("after", "busy"),
    [
        (counters(10.0, used=10.0, own=9.8), False),
        (counters(10.0, used=16.0, own=9.8), True),
        (counters(10.0, used=10.0, own=9.8, stolen=1.0), True),
        (counters(10.0, used=10.0, own=9.8, waited=4.0), True),
        (counters(10.0, used=None, own=9.8), False),
    ],
)
def test_other_work_stolen_time_and_waiting_make_a_machine_busy(after: Counters, busy: bool) -> None:
    """On two cores, beside a measurement that keeps one of them at work for ten seconds."""
    assert load_between(counters(0.0), after, [1.0, 1.01, 1.02], cores=2).is_busy is busy


def test_rounds_that_differ_make_a_machine_busy() -> None:
    """The quickest round is used, and the median of all is 1.5 times that: something else ran."""
    seconds: Iterator[float] = iter([1.5, 1.0, 1.6])
    result, load = measure_in_rounds(lambda: next(seconds), float, counters=lambda: counters(0.0))

    assert result == 1.0 and load.spread == 1.5 and load.rounds == 3 and load.is_busy
    assert "median 1.50 times the least of 3 rounds" in str(load)


def test_counters_come_from_proc(tmp_path: Path) -> None:
    """Time in use without idling, stolen time, and waiting; a system without them has none."""
    (tmp_path / "stat").write_text("cpu  100 10 50 900 40 5 5 30 0 0\ncpu0 1 1 1 1\n")
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull\n")
    found = read_counters(tmp_path)

    assert found.used is not None and found.stolen is not None
    assert found.used / found.stolen == pytest.approx(170 / 30) and found.waited == 2.5
    missing = read_counters(tmp_path / "nowhere")
    assert (missing.used, missing.stolen, missing.waited) == (None, None, None)
    assert not load_between(missing, missing, [1.0]).is_busy


def test_a_machine_is_quiet_while_nothing_is_measured() -> None:
    """Judged over the time that passes in `wait`."""
    now = [counters(0.0)]

    def work(seconds: float) -> None:
        now[0] = counters(seconds, used=1.9 * seconds)

    assert is_quiet(2.0, lambda seconds: None, lambda: now[0])
    assert not is_quiet(2.0, work, lambda: now[0])
    assert MachineLoad().is_busy is False
