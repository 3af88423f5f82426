"""A plan with this device's own seconds: after tuning, and after the first minute of work."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest

from edgesplit.plan import Conditions, Plan, Row, choose_row
from edgesplit.runtime.options import EngineOptions
from edgesplit_agent.releases.measured_plan import FIRST_WORK_S, MIN_RUNS, FirstWork, with_measured_seconds
from edgesplit_agent.releases.tuning import TuningLimits, TuningResults
from support.agent_engine import CLASS, CUT, INPUT, LINK, LOCAL, REMOTE, active, world

PLANNED = {"a": 0.01, "b": 0.01}


def a_plan(*rows: Row) -> Plan:
    return Plan(model="tiny@1", device_class="pi4", rows=rows or (LOCAL, CUT, REMOTE), link=LINK, slice_s=PLANNED)


def test_rows_take_the_seconds_of_their_slices() -> None:
    """And their joules in proportion; the row without a device part stays."""
    plan = a_plan(Row(name="local", device=("a", "b"), device_s=0.02, device_joules=1.0), CUT, REMOTE)
    measured = with_measured_seconds(plan, {"a": 0.001, "b": 0.004})

    assert measured.slice_s == {"a": 0.001, "b": 0.004} and measured.basis == "measured"
    local, cut, remote = measured.rows
    assert (local.device_s, local.device_joules) == pytest.approx((0.005, 0.25))
    assert cut.device_s == pytest.approx(0.001) and remote == REMOTE


def test_a_slice_that_was_not_measured_is_scaled_like_the_others() -> None:
    """Half the planned time for what ran: half for the rest; and without any measurement nothing changes."""
    assert with_measured_seconds(a_plan(), {"a": 0.005}).slice_s == pytest.approx({"a": 0.005, "b": 0.005})
    assert with_measured_seconds(a_plan(), {"other": 1.0}) == a_plan()


def test_another_row_wins_by_measured_seconds() -> None:
    """The device was planned at 20 ms and takes 2: a link of 10 ms is not worth it any more."""
    plan = a_plan(LOCAL, Row(name="remote", remote=("a", "b"), up_bytes=1, remote_s=0.001))
    now = Conditions(link=LINK)
    rows = [choose_row(each, now) for each in (plan, with_measured_seconds(plan, {"a": 0.0001, "b": 0.0001}))]

    assert [row.name for row in rows if row] == ["remote", "local"]


def test_the_first_minute_of_work_is_adopted_once() -> None:
    """By medians, of slices that ran often enough; what comes later is a slow-down, not a plan."""
    work = FirstWork()
    for run in range(MIN_RUNS):
        assert work.add({"a": 0.001 * (run + 1)}, 100.0 + run) == {}
    assert work.add({"a": 0.003, "b": 0.5}, 100.0 + FIRST_WORK_S) == {"a": 0.003}
    assert work.add({"a": 9.0}, 500.0) == {} and not work.runs


def test_too_few_runs_in_a_minute_are_waited_for() -> None:
    """A model that is asked once a minute is adopted after its fifth run."""
    work = FirstWork()
    found = [work.add({"a": 0.001}, FIRST_WORK_S * minute) for minute in range(MIN_RUNS)]

    assert found == [{}] * (MIN_RUNS - 1) + [{"a": 0.001}]


def test_a_device_kept_its_plans_wrong_seconds_for_ever() -> None:
    """After the first minute its own are in the table, and its slow-down starts anew from them."""
    with world(LOCAL) as (engine, _, release):
        release._first_work.began = monotonic() - FIRST_WORK_S
        engine.own_target.on_compute(0.2, 0.02)
        before = engine.conditions.device_slowdown
        for _ in range(MIN_RUNS):
            engine.infer("tiny", {"x": INPUT}, deadline_s=10)
        engine.accounting.deliver()
        local = release.plan.local

        assert before > 3.0 > engine.conditions.device_slowdown > 0.3
        assert release.plan.basis == "measured" and local is not None and 0.0 < local.device_s < LOCAL.device_s
        assert release.manifest.plans[CLASS].slice_s == PLANNED


def test_an_emulated_device_keeps_its_profiles_seconds() -> None:
    """They are what it emulates."""
    release = active(LOCAL, emulated=True)
    release.price_by({"a": 1.0, "b": 1.0})
    assert release.plan.slice_s == PLANNED


def test_tuned_seconds_are_stored_unless_the_machine_was_busy(tmp_path: Path) -> None:
    """For the next start; a busy measurement only chose the options."""
    results, limits = TuningResults(tmp_path / "tuning.json", "here"), TuningLimits(2)
    results.store("f" * 64, EngineOptions(), {"1 thread, exact": 0.1}, 0.1, {"a": 0.1})
    assert results.slice_s("f" * 64, limits) == {"a": 0.1}
    results.store("f" * 64, EngineOptions(), {"1 thread, exact": 0.1}, 3.0, {"a": 0.1})
    assert results.slice_s("f" * 64, limits) == {}
