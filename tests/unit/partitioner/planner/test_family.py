"""Families at planning: what is left out, refused and certified."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Conditions, Link, Row, energy_j, latency_s, slowest_stage_s
from edgesplit_partitioner import Costs, load_costs
from edgesplit_partitioner.planner.family import Variant, plan_family
from edgesplit_partitioner.planner.family_rows import undominated

LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.02)
LINKS = {"device-cloud": LINK}


def chain(device_s: float, cloud_s: float, *, weight_bytes: int = 1_000_000, on_device: bool = True) -> Costs:
    """Two layers behind a frame of 40 kB; the boundary between them is larger than the frame."""

    def layer(name: str, reads: str, writes: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": name, "reads": [reads], "writes": writes, "weight_bytes": weight_bytes // 2,
            "seconds": {"device": device_s / 2, "cloud": cloud_s / 2}, "joules": {"device": device_s},
            **({} if on_device else {"tiers": ["cloud"]}),
        }  # fmt: skip

    return load_costs(
        {
            "model": "m", "tiers": ["device", "cloud"], "inputs": {"frame": {"bytes": 40_000}}, "outputs": ["answer"],
            "layers": [layer("a", "frame", {"h": {"bytes": 90_000}}), layer("b", "h", {"answer": {"bytes": 4_000}})],
        }
    )  # fmt: skip


SMALL = Variant("small", chain(0.03, 0.002), 0.6)
MIDDLE = Variant("middle", chain(0.2, 0.01, weight_bytes=4_000_000), 0.75)
LARGE = Variant("large", chain(0.9, 0.03, weight_bytes=12_000_000), 0.9)


def test_a_strong_variant_beyond_the_link_is_a_row_like_another() -> None:
    """Each row names its variant and accuracy; names are prefixed, so that no two variants share one."""
    table = plan_family("birds@1", [SMALL, MIDDLE, LARGE], LINKS).table
    rows = {row.name: row for row in table.rows}
    assert {"large:remote", "large:local", "middle:local", "small:local"} <= rows.keys()
    assert (rows["large:remote"].variant, rows["large:remote"].accuracy) == ("large", 0.9)
    assert rows["small:local"].layers == ("small:a", "small:b")
    assert rows["large:remote"].remote == ("large:a", "large:b")
    assert (table.model, table.objective) == ("birds@1", "accuracy")
    assert table.local == rows["large:local"]  # the most accurate that runs here alone


def test_rows_that_can_never_be_chosen_are_left_out() -> None:
    """The small one's all-remote row sends as much as the large one's for a worse answer, and saves the server's time,
    so it stays; a slower variant of less accuracy has no row."""
    slow = Variant("slow", chain(0.95, 0.04), 0.5)
    table = plan_family("birds@1", [SMALL, LARGE, slow], LINKS).table
    assert {row.variant for row in table.rows} == {"small", "large"}


def test_an_objective_in_deadline_is_certified() -> None:
    """At 100 ms the large one in the cloud is the most accurate in time; at 60 ms the small one is, and the bounds of
    the more accurate ones are beyond the deadline."""
    at_100 = plan_family("birds@1", [SMALL, MIDDLE, LARGE], LINKS, limits={"deadline_s": 0.1})
    assert at_100.best.row == "large:remote" and at_100.certificate.more_accurate_s is None
    at_60 = plan_family("birds@1", [SMALL, MIDDLE, LARGE], LINKS, limits={"deadline_s": 0.06})
    assert at_60.best.variant == "small" and at_60.table.deadline_s == 0.06
    assert at_60.certificate.more_accurate_s is not None and at_60.certificate.more_accurate_s > 0.06
    with pytest.raises(InfeasibleLimits, match="small, takes 30 ms"):
        assert plan_family("birds@1", [SMALL, LARGE], LINKS, limits={"deadline_s": 0.02}).best


def test_the_frontier_is_that_of_accuracy_against_cost() -> None:
    """The most accurate first; a variant that another beats in both is not on it."""
    frontier = plan_family("birds@1", [SMALL, MIDDLE, LARGE], LINKS).frontier
    assert [point.variant for point in frontier] == ["large", "middle", "small"]
    slow = Variant("slow", chain(0.95, 0.04), 0.5)
    assert all(point.variant != "slow" for point in plan_family("birds@1", [slow, SMALL], LINKS).frontier)


def test_a_floor_removes_variants_and_above_the_best_it_is_refused() -> None:
    """The error names the best."""
    found = plan_family("birds@1", [SMALL, MIDDLE, LARGE], LINKS, least_accuracy=0.7)
    assert {row.variant for row in found.table.rows} == {"middle", "large"}
    assert found.table.least_accuracy == 0.7 and "below the floor" in found.left_out["small"]
    with pytest.raises(InfeasibleLimits, match=r"95\.0%; the best, large, has 90\.0%"):
        plan_family("birds@1", [SMALL, LARGE], LINKS, least_accuracy=0.95)


def test_a_variant_that_the_device_cannot_run_answers_from_beyond() -> None:
    """It has no local row; another variant's is the fallback."""
    cloud_only = Variant("cloud-only", chain(0.9, 0.03, on_device=False), 0.95)
    table = plan_family("birds@1", [SMALL, cloud_only], LINKS).table
    assert [row.name for row in table.rows if row.is_local] == ["small:local"]
    assert table.fallback == "warm", table.fallback
    assert any(row.variant == "cloud-only" for row in table.rows)


def test_memory_too_small_for_all_names_whom_to_leave_out() -> None:
    """As few as possible, of these the least accurate: of 5 + 1 MB in 5.5 MB the small one."""
    tight = {"memory_bytes": 4.6e6}
    with pytest.raises(InfeasibleLimits, match=r"at most 4\.6 MB are allowed: leave out small"):
        plan_family("birds@1", [SMALL, MIDDLE], LINKS, limits=tight)
    roomy = plan_family("birds@1", [SMALL, MIDDLE], LINKS, limits={"memory_bytes": 6e6})
    assert {row.variant for row in roomy.table.rows} == {"small", "middle"}


def test_a_variant_larger_than_the_memory_keeps_its_rows_beyond_the_link() -> None:
    """Its weights are not on the device, where the small one finishes for it."""
    found = plan_family("birds@1", [SMALL, LARGE], LINKS, limits={"memory_bytes": 4e6})
    large = [row for row in found.table.rows if row.variant == "large"]
    assert large and not any(row.is_local for row in large)


@pytest.mark.parametrize("objective", ["energy", "throughput", "latency_p95", {"latency": 1.0, "energy": 0.5}])
def test_every_objective_takes_the_least_of_all_variants(objective: Any) -> None:
    """Above the floor; the table has that row."""
    found = plan_family("birds@1", [SMALL, MIDDLE, LARGE], LINKS, objective=objective, least_accuracy=0.7)
    assert found.best.value == min(result.value for result in found.plans.values())
    assert found.certificate.lower_bound <= found.best.value and found.certificate.gap < 1e-9
    assert any(row.name == found.best.row for row in found.table.rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": {"force": "cloud"}}, "cannot be forced"),
        ({"limits": {"max_loss": 0.01}}, "leave max_loss out"),
        ({"limits": {"keep_first": 1}}, "keep_raw_input"),
        ({"least_accuracy": 70}, "between 0 and 1"),
        ({"objective": "beauty"}, "not supported"),
    ],
)
def test_what_a_family_cannot_be_asked_for(options: dict[str, Any], message: str) -> None:
    """Each says what to do instead."""
    with pytest.raises(UsageError, match=message):
        plan_family("birds@1", [SMALL, LARGE], LINKS, **options)


def test_variants_have_different_names_and_an_accuracy() -> None:
    """Names are parts of row and slice names."""
    with pytest.raises(UsageError, match="different names"):
        plan_family("birds@1", [SMALL, SMALL], LINKS)
    with pytest.raises(UsageError, match="not a variant's name"):
        Variant("birds:1", SMALL.costs, 0.5)
    with pytest.raises(UsageError, match="between 0 and 1"):
        Variant("small", SMALL.costs, 60.0)


def test_dominated_rows_are_never_the_best_whatever_the_conditions() -> None:
    """Latency, energy and the slowest stage grow with each figure that is compared."""
    rows = plan_family("birds@1", [SMALL, MIDDLE, LARGE], LINKS).table.rows
    worse = msgspec.structs.replace(rows[0], name="worse", remote_s=rows[0].remote_s + 0.01, accuracy=0.1)
    assert undominated([*rows, worse]) == rows
    for rate in (1e3, 1e5, 1e7):
        now = Conditions(link=msgspec.structs.replace(LINK, up_bytes_per_s=rate), server_load=3.0)
        for cost in (latency_s, slowest_stage_s, _joules):
            assert cost(worse, now) >= min(cost(row, now) for row in rows if (row.accuracy or 0) >= 0.1)


def _joules(row: Row, now: Conditions) -> float:
    from edgesplit.plan import Power

    return energy_j(row, now, Power(idle_watts=1.0, busy_watts=4.0, radio_watts=1.0, wake_joules=0.1))


def test_a_result_is_plain_json() -> None:
    """With every variant's own plan beside the family's table."""
    plain = plan_family("birds@1", [SMALL, LARGE], LINKS, limits={"deadline_s": 0.1}).to_builtins()
    assert msgspec.json.encode(plain)
    assert plain["best"]["variant"] == "large" and plain["variants"]["small"]["model"] == "m"
