"""Row selection under power budgets, battery policies, races and hysteresis, as tables."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from edgesplit.plan import Link, Plan, Power, Row, energy_j, latency_s, marginal_energy_j
from edgesplit_agent.policy.link_estimator import LinkEstimate
from edgesplit_agent.policy.row_selection import DWELL_S, HeldRow, RowSelector, SelectionContext, select_row
from edgesplit_agent.power.budget import EnergyBudget
from edgesplit_agent.power.mode import PERFORMANCE, PowerMode

GOOD = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.05)
LOCAL = Row(name="local", device=("a", "b"), device_s=0.3, device_joules=1.5)
CUT = Row(name="cut-1", device=("a",), remote=("b",), device_s=0.1, device_joules=0.5, up_bytes=20_000)
REMOTE = Row(name="remote", remote=("a", "b"), up_bytes=60_000)
POWER = Power(idle_watts=2.0, busy_watts=5.0, radio_watts=1.0, wake_joules=0.02)
PLAN = Plan(model="m@1", device_class="pi", rows=(REMOTE, CUT, LOCAL), link=GOOD, power=POWER)
SURE = LinkEstimate.from_link(GOOD)
for _ in range(40):
    SURE = SURE.after_transfer(60_000, 100, 0.05 + 0.06 + 0.0001, 0.0)


def at(rate: float = 1e6, now: float = 0.0, **more: object) -> SelectionContext:
    """A link that is as sure as one gets, at this rate."""
    meter = (
        SURE if rate == 1e6 else LinkEstimate(0.05, 1 / rate, 1e-6, spread=0.05, fades=0.0, heard_at=now, transfers=20)
    )
    return SelectionContext(meter, now, **more)  # type: ignore[arg-type]


def named(choice: object) -> str:
    return choice.row.name if choice is not None else ""  # type: ignore[attr-defined]


def test_steady_link_takes_the_fastest_row_without_a_hedge() -> None:
    """On mains the time decides, and no work is done twice where the cloud is reliably in time."""
    choice = select_row(PLAN, at())
    assert choice is not None and (choice.row.name, choice.early_s) == ("remote", None)
    assert named(select_row(PLAN, at(rate=1e4))) == "local"


def test_uncertain_link_is_raced() -> None:
    """The cloud is probably too slow, but may not be: the device starts at once, and the cloud may still win."""
    meter = LinkEstimate(0.05, 1 / 5e4, 1e-6, spread=1.0, fades=0.0, heard_at=0.0, transfers=20)
    choice = select_row(PLAN, SelectionContext(meter, 0.0))
    assert choice is not None and not choice.row.is_local
    assert choice.early_s == 0.0 and choice.local_was_chosen  # its own work is no extra cost: sending is
    assert named(select_row(PLAN, SelectionContext(meter, 0.0, may_hedge=False))) == choice.row.name
    for stance, may in ((PERFORMANCE, False), (PowerMode("saver"), True), (PowerMode(watts=9.0), True)):
        assert named(select_row(PLAN, SelectionContext(meter, 0.0, may_race=may), stance)) == "local"


def test_without_a_hedge_the_fallback_risk_counts() -> None:
    """A row that is slightly faster but often fails is not selected when no hedge may start beside it."""
    meter = msgspec.structs.replace(SURE, fades=0.4)
    assert named(select_row(PLAN, SelectionContext(meter, 0.0, may_hedge=False, may_race=False))) == "local"
    assert named(select_row(PLAN, SelectionContext(meter, 0.0))) == "remote"


@pytest.mark.parametrize(
    ("stance", "rate", "deadline_s", "name"),
    [
        (PowerMode("performance"), 1e6, 2.0, "remote"),
        (PowerMode("saver"), 1e6, 2.0, "remote"),  # waiting is cheaper than computing
        (PowerMode("saver"), 5e4, 2.0, "local"),  # 1.25 s of radio and idling are not
        (PowerMode("saver"), 1e5, 2.0, "cut-1"),  # 1.22 J in 0.35 s, against 1.5 J in 0.3 s
        (PowerMode("saver"), 1e5, 0.4, "local"),  # which is too late for the deadline
        (PowerMode("saver"), 2e5, 0.1, "cut-1"),  # nothing is in time: the fastest
        (PowerMode("balanced"), 1e5, 2.0, "cut-1"),
        (PowerMode("performance"), 1e5, 2.0, "local"),
        (PowerMode("performance"), 2e5, 2.0, "cut-1"),
    ],
)
def test_policies_weigh_seconds_and_joules(stance: PowerMode, rate: float, deadline_s: float, name: str) -> None:
    """Each row's seconds and joules by hand: performance, balanced and saver each select their own row."""
    assert named(select_row(PLAN, at(rate, may_hedge=False, may_race=False, deadline_s=deadline_s), stance)) == name


def test_balanced_weighs_relative_seconds_and_joules_equally() -> None:
    """The row with the least sum of its shares of the local row's seconds and joules."""
    for rate in (3e4, 1e5, 3e5, 1e6):
        seen = at(rate, may_hedge=False, may_race=False)
        now = seen.conditions()

        def parts(row: Row, now: object = now) -> float:
            return latency_s(row, now) / 0.3 + energy_j(row, now, POWER) / 1.5  # type: ignore[arg-type]

        assert named(select_row(PLAN, seen, PowerMode("balanced"))) == min(PLAN.rows, key=parts).name


@pytest.mark.parametrize(
    ("watts", "per_s", "name", "why"),
    [
        (9.0, 1.0, "cut-1", ""),
        (2.4, 1.0, "remote", "within the power budget"),
        (2.4, 0.1, "cut-1", ""),  # asked seldom, everything can be paid for
        (2.01, 1.0, "remote", "over the power budget: the row that draws least"),
    ],
)
def test_power_budget_excludes_rows(watts: float, per_s: float, name: str, why: str) -> None:
    """Idle power plus joules per inference times the request rate stays below it; if no row does, the one that draws
    least."""
    choice = select_row(PLAN, at(2e5, per_s=per_s), PowerMode(watts=watts))
    assert choice is not None and (choice.row.name, choice.why) == (name, why)
    spends = 2.0 + per_s * marginal_energy_j(choice.row, at(2e5).conditions(), POWER)
    assert spends <= watts or why.startswith("over")


def test_measured_power_above_the_plan_tightens_the_budget() -> None:
    """A device that draws a third more than its profile says has that much less to spend."""
    seen = at(2e5, per_s=1.0)
    assert named(select_row(PLAN, seen, PowerMode(watts=3.0))) == "cut-1"
    assert named(select_row(PLAN, seen, PowerMode(watts=3.0, measured_over_predicted=1.33))) == "remote"


def test_models_share_one_power_budget() -> None:
    """What one model draws is not available to the next."""
    seen = at(2e5, per_s=1.0)
    assert named(select_row(PLAN, seen, PowerMode(watts=3.0))) == "cut-1"
    assert named(select_row(PLAN, at(2e5, per_s=1.0, others_watts=0.65), PowerMode(watts=3.0))) == "remote"


def test_plan_without_power_figures_ignores_budget_and_policy() -> None:
    """Requests are answered by the fastest row."""
    bare = msgspec.structs.replace(PLAN, power=None)
    for stance in (PowerMode(watts=0.1), PowerMode("saver"), PowerMode("balanced")):
        assert named(select_row(bare, at(may_hedge=False, may_race=False, per_s=5.0), stance)) == "remote"


def test_unreachable_cloud_leaves_local_rows() -> None:
    """In every power mode; and none where the plan has no local row."""
    for stance in (PERFORMANCE, PowerMode("balanced"), PowerMode("saver"), PowerMode(watts=0.1)):
        assert named(select_row(PLAN, at(remote_usable=False, per_s=1.0), stance, HeldRow("remote", 0.0))) == "local"
    lost = msgspec.structs.replace(PLAN, rows=(REMOTE,), fallback="none")
    assert select_row(lost, at(remote_usable=False)) is None


def test_forced_row_overrides_the_power_mode() -> None:
    """The operator's choice of the cut takes precedence over the battery's."""
    forced = msgspec.structs.replace(PLAN, forced_row="cut-1")
    assert named(select_row(forced, at(per_s=9.0), PowerMode("saver", watts=0.1))) == "cut-1"


def test_dwell_time_limits_changes_of_row() -> None:
    """A change to the local row is immediate, a change away from it waits for the dwell time, so a flapping link causes
    few switches. Another power mode ends the dwell."""
    still = HeldRow("local", 10.0, "balanced")

    def taken(seen: SelectionContext, held: HeldRow) -> str:
        return named(select_row(PLAN, replace(seen, may_hedge=False, may_race=False), PowerMode("balanced"), held))

    assert taken(at(now=10.0 + DWELL_S / 2), still) == "local"
    assert taken(at(now=10.0 + DWELL_S), still) == "remote"
    assert taken(at(1e3, now=10.1), replace(still, row="remote")) == "local"
    assert taken(at(now=10.1), HeldRow("local", 10.0, "saver")) == "remote"


def test_capped_clock_changes_the_row_at_the_next_request() -> None:
    """Predicted, not learnt: the device is three times slower from one request to the next."""
    assert named(select_row(PLAN, at(1e5, may_hedge=False, may_race=False))) == "local"
    assert named(select_row(PLAN, at(1e5, may_hedge=False, may_race=False, slowdown=3.0))) in ("cut-1", "remote")


@settings(max_examples=60, deadline=None)
@given(some.lists(some.floats(2.0, 7.5), min_size=20, max_size=120), some.sampled_from(["balanced", "saver"]))
def test_row_changes_are_bounded(decades: list[float], mode: str) -> None:
    """However the link changes, offloading rows are taken up at most once per dwell time."""
    chooser = RowSelector(lambda: PowerMode(mode))  # type: ignore[arg-type]
    rows, ups = [], []
    for place, decade in enumerate(decades):
        choice = chooser.select("m", PLAN, at(10**decade, now=place * 0.2, may_hedge=False, may_race=False))
        assert choice is not None
        if rows and choice.row.name != rows[-1] and not choice.row.is_local:
            ups.append(place * 0.2)
        rows.append(choice.row.name)
    assert all(later - sooner >= DWELL_S - 1e-6 for sooner, later in pairwise(ups))


def test_budget_credit_pays_dearer_rows_and_debt_excludes_them() -> None:
    """With credit, a dearer row is paid for a while; with debt, even a row within its share is excluded."""
    seen, tight = at(2e5, per_s=1.0), PowerMode(watts=2.4)
    assert named(select_row(PLAN, seen, tight)) == "remote"
    assert named(select_row(PLAN, replace(seen, saved_j=1.0), tight)) == "cut-1"
    assert named(select_row(PLAN, replace(at(2e5, per_s=1.0), saved_j=-1.0), PowerMode(watts=2.5))) == "remote"


def test_average_power_stays_within_the_budget() -> None:
    """One request a second: rows alternate, and the average does not exceed what idling leaves of 2.36 W."""
    chooser, spent = RowSelector(lambda: PowerMode(watts=2.36)), 0.0
    taken = set()
    for place in range(300):
        choice = chooser.select("m", PLAN, at(2e5, now=float(place)))
        assert choice is not None
        joules = marginal_energy_j(choice.row, at(2e5).conditions(), POWER)
        chooser.record_joules(joules)
        spent += joules
        taken.add(choice.row.name)
    assert taken == {"cut-1", "remote"} and spent / 300 <= 0.36 * 1.02


def test_budget_credit_is_bounded_and_follows_the_budget() -> None:
    """Ten seconds' worth at the most, as credit or debt; nothing is credited before the first request."""
    bank = EnergyBudget().credited(100.0, 2.0)
    assert bank.saved_j == 0.0
    assert bank.credited(101.0, 2.0).saved_j == pytest.approx(2.0)
    assert bank.credited(1e6, 2.0).saved_j == pytest.approx(20.0)
    assert bank.debited(1e6).saved_j == pytest.approx(-20.0)
    assert bank.credited(1e6, -1.0).saved_j == 0.0  # a budget below idling saves nothing and owes nothing


def test_new_release_resets_the_held_row() -> None:
    """Nothing of the previous release's choice is kept."""
    chooser = RowSelector(lambda: PowerMode("saver"))
    assert named(chooser.select("m", PLAN, at(may_hedge=False, may_race=False))) == chooser.row_of("m") == "remote"
    chooser.forget("m")
    assert chooser.row_of("m") == "" and chooser.decision("m") is None
