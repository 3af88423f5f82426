"""Choice among the variants of a family: floor, deadline, and who finishes alone."""

from __future__ import annotations

import math

import msgspec
import pytest

from edgesplit.plan import Conditions, Link, Plan, Row, choose_row
from edgesplit.variant_choice import above_floor, best_accuracy, finish_s, for_deadline, is_family, local_finish

LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.02)
SMALL = Row(name="small:local", device=("small.s01",), device_s=0.03, variant="small", accuracy=0.6)
MIDDLE = Row(name="middle:local", device=("middle.s01",), device_s=0.2, variant="middle", accuracy=0.7)
LARGE = Row(name="large:remote", remote=("large.s01",), remote_s=0.01, up_bytes=50_000, variant="large", accuracy=0.9)
CUT = Row(
    name="middle:cut-1", device=("middle.s01",), remote=("middle.s02",), device_s=0.05, remote_s=0.01,
    up_bytes=10_000, variant="middle", accuracy=0.7,
)  # fmt: skip
FAMILY = Plan(model="birds@1", device_class="pi", rows=(LARGE, CUT, MIDDLE, SMALL), link=LINK, objective="accuracy")
ONE_MODEL = Plan(
    model="m@1", device_class="pi", link=LINK,
    rows=(Row(name="remote", remote=("s",), up_bytes=50_000), Row(name="local", device=("s",), device_s=0.3)),
)  # fmt: skip


def on_link(rate: float = 1e6, *, usable: bool = True) -> Conditions:
    return Conditions(link=msgspec.structs.replace(LINK, up_bytes_per_s=rate), remote_usable=usable)


def names(plan: Plan) -> list[str]:
    return [row.name for row in plan.rows]


@pytest.mark.parametrize(
    ("rate", "usable", "deadline_s", "row"),
    [
        (1e6, True, 0.1, "large:remote"),
        (5e5, True, 0.1, "middle:cut-1"),  # the large one would take 130 ms, the middle one's cut 100
        (5e5, True, math.inf, "large:remote"),
        (1e4, True, 0.1, "small:local"),
        (1e6, False, 0.1, "small:local"),
        (1e6, False, 0.5, "middle:local"),  # without a link the best local variant that is in time
        (1e6, False, 0.01, "small:local"),  # none is in time: the fastest comes nearest
    ],
)
def test_the_most_accurate_variant_in_time_answers(rate: float, usable: bool, deadline_s: float, row: str) -> None:
    """Whatever the link: a strong variant beyond it, a weak one here, and the cut of a third are rows like another."""
    now = on_link(rate, usable=usable)
    chosen = choose_row(for_deadline(FAMILY, now, deadline_s), now)
    assert chosen is not None and chosen.name == row


def test_other_objectives_take_the_least_cost_in_time() -> None:
    """With objective latency a less accurate row is taken where it is faster; the deadline only removes rows."""
    now, fastest = on_link(), msgspec.structs.replace(FAMILY, objective="latency")
    assert names(for_deadline(fastest, now, 0.1)) == ["large:remote", "middle:cut-1", "small:local"]
    chosen = choose_row(for_deadline(fastest, now, 0.1), now)
    assert chosen is SMALL


def test_the_plans_own_deadline_counts_too() -> None:
    """A request may ask for less time than the plan allows, not for more."""
    planned = msgspec.structs.replace(FAMILY, deadline_s=0.05)
    assert names(for_deadline(planned, on_link(), 10.0)) == ["small:local"]
    assert names(for_deadline(planned, on_link(), 10.0, ratio=2.0)) == ["large:remote"]


def test_a_held_row_is_in_time_a_little_longer() -> None:
    """Near the deadline two variants do not alternate with every measurement."""
    now = on_link(7e5)  # the large one takes 101 ms
    assert names(for_deadline(FAMILY, now, 0.1)) == ["middle:cut-1"]
    assert names(for_deadline(FAMILY, now, 0.1, held="large:remote", held_ratio=1.1)) == ["large:remote"]


def test_rows_below_the_floor_are_gone() -> None:
    """The request's floor or the plan's, whichever is higher."""
    assert names(above_floor(FAMILY, 0.65)) == ["large:remote", "middle:cut-1", "middle:local"]
    promised = msgspec.structs.replace(FAMILY, least_accuracy=0.8)
    assert names(above_floor(promised, 0.65)) == ["large:remote"]
    assert names(above_floor(FAMILY, 0.95)) == []


@pytest.mark.parametrize(
    ("row", "left_s", "floor", "finished_by"),
    [
        (LARGE, 0.3, 0.0, MIDDLE),
        (LARGE, 0.1, 0.0, SMALL),
        (LARGE, 0.01, 0.0, SMALL),
        (LARGE, 0.1, 0.65, MIDDLE),  # late, but what was promised
        (LARGE, 0.1, 0.8, None),
        (CUT, 0.16, 0.0, MIDDLE),  # only the rest of it is left to run
    ],
)
def test_who_finishes_alone(row: Row, left_s: float, floor: float, finished_by: Row | None) -> None:
    """The most accurate local row in time and above the floor; the row's own variant has its first part done."""
    assert local_finish(FAMILY, row, on_link(), left_s, floor) is finished_by


def test_another_variant_begins_from_the_input() -> None:
    """What one variant computed is of no use to another."""
    assert finish_s(CUT, MIDDLE) == pytest.approx(0.15)
    assert finish_s(CUT, SMALL) == 0.03


def test_a_plan_of_one_model_stays_as_it_is() -> None:
    """Floors and deadlines are a family's; the fallback of one model is its local row."""
    assert not is_family(ONE_MODEL) and best_accuracy(ONE_MODEL) is None
    assert above_floor(ONE_MODEL, 0.9) is ONE_MODEL
    assert for_deadline(ONE_MODEL, on_link(), 0.001) is ONE_MODEL
    assert local_finish(ONE_MODEL, ONE_MODEL.rows[0], on_link(), 0.0) is ONE_MODEL.rows[1]


def test_a_plan_of_one_model_keeps_its_bytes() -> None:
    """What families added is not written where it is not used: releases that exist keep their digests."""
    written = msgspec.json.encode(ONE_MODEL)
    assert not any(name in written for name in (b"variant", b"accuracy", b"deadline"))
