"""Row selection among the variants of a family: expected accuracy, floor, deadline and who finishes."""

from __future__ import annotations

import random

import msgspec
import pytest

from edgesplit.plan import Conditions, Link, Plan, Power, Row, latency_s
from edgesplit_agent.policy.link_estimator import LinkEstimate
from edgesplit_agent.policy.row_reason import explain
from edgesplit_agent.policy.row_selection import (
    Decision,
    HeldRow,
    RowChoice,
    SelectionContext,
    select_row,
)
from edgesplit_agent.policy.variant_selection import variants_allowed
from edgesplit_agent.power.mode import PERFORMANCE, PowerMode

LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.02)
SMALL = Row(name="small:local", device=("small.s01",), device_s=0.03, device_joules=0.1, variant="small", accuracy=0.6)
MIDDLE = Row(
    name="middle:local", device=("middle.s01",), device_s=0.2, device_joules=0.8, variant="middle", accuracy=0.7
)
LARGE = Row(name="large:remote", remote=("large.s01",), remote_s=0.01, up_bytes=50_000, variant="large", accuracy=0.9)
FAMILY = Plan(
    model="birds@1", device_class="pi", rows=(LARGE, MIDDLE, SMALL), link=LINK, objective="accuracy",
    power=Power(idle_watts=1.0, busy_watts=4.0),
)  # fmt: skip


def link_at(rate: float, spread: float = 0.05, fades: float = 0.0) -> LinkEstimate:
    """A link that was measured often."""
    return LinkEstimate(0.02, 1 / rate, 1e-6, spread=spread, fades=fades, heard_at=0.0, transfers=20)


def choose(
    rate: float = 1e6, plan: Plan = FAMILY, mode: PowerMode = PERFORMANCE, held: str = "", **more: object
) -> RowChoice:
    spread = more.pop("spread", 0.05)
    context = SelectionContext(link_at(rate, spread), 0.0, **more)  # type: ignore[arg-type]
    chosen = select_row(plan, context, mode, HeldRow(held, -100.0) if held else None)
    assert chosen is not None
    return chosen


@pytest.mark.parametrize(
    ("rate", "deadline_s", "row", "finish"),
    [
        (1e6, 0.5, "large:remote", "middle:local"),
        (1e6, 0.2, "large:remote", "small:local"),  # 80 ms away, and then the middle one would be late
        (2e5, 0.5, "large:remote", "small:local"),
        (2e5, 0.25, "middle:local", None),  # the large one would take 280 ms
        (2e5, 0.1, "small:local", None),
    ],
)
def test_the_most_accurate_in_time(rate: float, deadline_s: float, row: str, finish: str | None) -> None:
    """And behind a row that offloads the most accurate local one that is then still in time."""
    chosen = choose(rate, deadline_s=deadline_s)
    assert chosen.row.name == row
    assert (chosen.finish.name if chosen.finish else None) == finish


def test_an_uncertain_link_is_weighed_by_its_probability() -> None:
    """At a rate at which the large one is in time in half of the cases its expected accuracy is (0.9 + 0.6) / 2; above
    the middle one's 0.7 it is tried, and below another local one's 0.8 not."""
    even = {"spread": 1.0, "deadline_s": 0.5}
    assert choose(1.1e5, **even).row is LARGE
    better = msgspec.structs.replace(MIDDLE, accuracy=0.8)
    stronger = msgspec.structs.replace(FAMILY, rows=(LARGE, better, SMALL))
    assert choose(1.1e5, stronger, **even).row is better


def test_expected_accuracy_is_that_of_simulated_links() -> None:
    """The choice agrees with the mean over a thousand simulated transfers of each link and deadline."""
    seed = 6
    rng = random.Random(seed)
    for _ in range(40):
        rate, spread, deadline_s = 10 ** rng.uniform(4.5, 6.5), rng.uniform(0.1, 1.0), rng.uniform(0.25, 0.6)
        chosen = choose(rate, spread=spread, deadline_s=deadline_s)
        transfers = [50_000 / rate * rng.lognormvariate(0, spread) for _ in range(1_000)]
        finish = 0.6 if chosen.finish is None else chosen.finish.accuracy or 0.0
        large = sum(0.9 if 0.03 + s <= deadline_s - 0.015 else finish for s in transfers) / len(transfers)
        local = 0.7 if 0.95 * deadline_s >= 0.2 else 0.6
        taken = large if chosen.row is LARGE else local
        assert taken >= max(large, local) - 0.05, (f"seed {seed}", rate, spread, deadline_s)


def test_the_floor_is_never_broken() -> None:
    """Neither by the row nor by the one that finishes; with nothing above it there is no choice, whatever the mode."""
    rng = random.Random(7)
    for _ in range(300):
        floor = rng.choice([0.0, 0.5, 0.65, 0.8])
        context = SelectionContext(
            link_at(10 ** rng.uniform(3, 7), rng.uniform(0.05, 1.0), rng.choice([0.0, 0.3])), 0.0,
            remote_usable=rng.random() < 0.8, may_hedge=rng.random() < 0.5, may_race=rng.random() < 0.5,
            deadline_s=rng.uniform(0.02, 1.0), least_accuracy=floor, per_s=2.0,
        )  # fmt: skip
        mode = rng.choice([PERFORMANCE, PowerMode("saver"), PowerMode("balanced"), PowerMode(watts=1.5)])
        objective = rng.choice(["accuracy", "latency"])
        plan = msgspec.structs.replace(FAMILY, objective=objective, least_accuracy=rng.choice([0.0, 0.65]))
        least = max(floor, plan.least_accuracy)
        chosen = select_row(plan, context, mode, rng.choice([None, HeldRow("small:local", -9.0)]))
        if chosen is None:
            assert least > 0.7 and not context.remote_usable
            continue
        for row in (chosen.row, chosen.finish):
            assert row is None or (row.accuracy or 0.0) >= least


def test_without_a_link_the_best_local_variant_answers() -> None:
    """The middle one where it is in time, and never the large one."""
    assert choose(remote_usable=False, deadline_s=0.5).row is MIDDLE
    assert choose(remote_usable=False, deadline_s=0.1).row is SMALL


def test_two_variants_do_not_alternate_near_the_deadline() -> None:
    """The row in use stays while its expected accuracy is nearly the best; a clearly better one replaces it."""
    nearly = msgspec.structs.replace(LARGE, name="nearly:remote", variant="nearly", accuracy=0.893)
    plan = msgspec.structs.replace(FAMILY, rows=(LARGE, nearly, SMALL))
    assert choose(plan=plan, deadline_s=0.5).row is LARGE
    assert choose(plan=plan, deadline_s=0.5, held="nearly:remote").row is nearly
    assert choose(plan=plan, deadline_s=0.5, held="small:local").row is LARGE


def test_rows_of_a_plan_without_variants_are_all_allowed() -> None:
    """Nothing changes for a model that is no family."""
    rows = tuple(msgspec.structs.replace(row, variant="", accuracy=None) for row in FAMILY.rows)
    plan = msgspec.structs.replace(FAMILY, rows=rows, objective="latency")
    assert variants_allowed(plan, Conditions(link=LINK), 0.001, 0.99, lambda row, seconds: 0.0) is plan


def test_the_reason_names_the_variant_and_the_objective() -> None:
    """For the operator who asks why the small one answered."""
    context = SelectionContext(link_at(1e4), 0.0, deadline_s=0.1)
    chosen = select_row(FAMILY, context)
    assert chosen is not None
    text = explain(Decision(FAMILY, chosen, context, PERFORMANCE, {}), 0.0)
    assert text.startswith("small on this device: the plan's objective is accuracy; the uplink is")
    assert latency_s(SMALL, Conditions(link=LINK)) == 0.03 and "30 ms" in text
