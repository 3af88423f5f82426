"""Data of the dashboard's pages: the fleet as rows, plans as curves, the built files."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.plan import Conditions, Link, Plan, Power, Row, cost
from edgesplit_controller.dashboard.assets import PAGE, load_assets
from edgesplit_controller.fleet.conditions import MAX_TEXT_CHARS, failure_causes
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.fleet.table import fleet_row, fleet_rows
from edgesplit_controller.planning.curves import bandwidths, curves, gain
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import ClaimRow
from support.sample_fleet import device_row, make_fleet

LTE = Link(up_bytes_per_s=731_250.0, down_bytes_per_s=1_720_000.0, rtt_s=0.06)
LOCAL = Row(name="local", device=("s1", "s2"), device_s=0.4, device_joules=1.2, split_after="end")
CUT = Row(
    name="cut-1", device=("s1",), remote=("s2",), split_after="conv1", sends=("t",), device_s=0.1, up_bytes=30_000,
    remote_s=0.01, device_joules=0.3,
)  # fmt: skip
REMOTE = Row(name="remote", remote=("s1", "s2"), sends=("image",), up_bytes=150_000, remote_s=0.012)
PLAN = Plan(model="digits@1", device_class="raspberrypi4", rows=(REMOTE, CUT, LOCAL), link=LTE)


def test_latency_curve_matches_the_agents_cost() -> None:
    """Each point is `plan.cost` at that bandwidth, and the best row at each is the agent's choice."""
    drawn = curves(PLAN)
    for place, rate in enumerate(drawn["up_bytes_per_s"]):
        here = Conditions(link=Link(up_bytes_per_s=rate, down_bytes_per_s=LTE.down_bytes_per_s, rtt_s=LTE.rtt_s))
        for row, shown in zip(PLAN.rows, drawn["rows"], strict=True):
            assert shown["line"][place] == pytest.approx(cost(row, here, {}))
        values = {row["name"]: row["line"][place] for row in drawn["rows"]}
        assert values[drawn["best"][place]] == min(values.values())
    assert set(drawn["best"]) == {"local", "cut-1", "remote"}
    assert drawn["unit"] == "s"


def test_latency_curves_cover_the_devices_bandwidth() -> None:
    """The device's round trip is used, and its bandwidth lies inside the plot unless it is absurd."""
    now = Link(up_bytes_per_s=10_000.0, down_bytes_per_s=1e6, rtt_s=0.3)
    drawn = curves(PLAN, now)
    assert drawn["rtt_s"] == 0.3
    assert drawn["up_bytes_per_s"][0] < 10_000 < drawn["up_bytes_per_s"][-1]
    assert bandwidths(731_250.0, 1.0) == bandwidths(731_250.0)


def test_parts_of_a_row_add_up_to_its_latency() -> None:
    """Device, link and remote seconds add up to the latency."""
    for row in curves(PLAN)["rows"]:
        assert row["device_s"] + row["link_s"] + row["remote_s"] == pytest.approx(row["total_s"])


def test_gain_is_relative_to_all_local_and_all_remote() -> None:
    """Over all-local and all-remote at the planned link; unknown where a mode is not in the table."""
    told = gain(PLAN)
    assert told["best"] == "cut-1"
    assert told["over_local"] == pytest.approx(0.4 / (0.1 + 0.06 + 30_000 / 731_250 + 0.01))
    assert gain(Plan(model="m@1", device_class="c", rows=(CUT, LOCAL), link=LTE))["over_remote"] is None


def test_an_energy_plan_is_drawn_in_joules() -> None:
    """A plan that minimises energy alone is drawn in its unit."""
    power = Power(idle_watts=1.0)
    weighed = {"weights": {"energy": 1.0}, "power": power, "objective": "energy"}
    plan = Plan(model="m@1", device_class="c", rows=PLAN.rows, link=LTE, **weighed)
    drawn = curves(plan)
    assert drawn["unit"] == "J"
    assert drawn["rows"][2]["line"][0] == pytest.approx(1.2)


def test_failure_causes_are_grouped_without_details() -> None:
    """Digests, numbers and quoted names are left out of the group's key and kept in the detail."""
    one, other = (
        {"models": [{"model": "m@1", "state": "failed", "detail": f"chunk {digest} of {name!r} failed {times} times"}]}
        for digest, name, times in (("3f9c0d1e2b4a59687", "cam", 5), ("99999d1e2b4a59687", "dog", 7))
    )
    assert (
        failure_causes(one, {})[0]["cause"]
        == failure_causes(other, {})[0]["cause"]
        == "failed: chunk … of … failed N times"
    )
    assert "3f9c" in failure_causes(one, {})[0]["detail"]
    assert len(failure_causes({"statement_problem": "word " * 100}, {})[0]["cause"]) <= MAX_TEXT_CHARS + len(
        "refused: "
    )


def test_every_device_problem_yields_a_cause() -> None:
    """Safe mode, a statement that cannot be obeyed, a telemetry window's problem and under-voltage; a healthy device
    has none."""
    reported = {"safe_mode": "3 starts in a row", "statement_problem": "expired", "models": []}
    told = {"models": [{"problem": "worker lost"}], "power": {"under_voltage": True}}
    words = [cause["cause"].split(":")[0] for cause in failure_causes(reported, told)]
    assert words == ["safe mode", "refused", "degraded", "under-voltage"]
    assert failure_causes({"models": [{"model": "m", "state": "running"}]}, {"models": []}) == []


def test_a_device_row_shows_desired_models_that_are_not_reported(tmp_path: Path) -> None:
    """A model that the device never reported is shown as desired; a device that never reported has no figures."""
    bare = device_row("a")
    row = fleet_row(bare, "online", {"digits": "f" * 64})
    assert row["models"] == [
        {"model": "digits", "release": "", "desired_release": "f" * 64, "state": "assigned", "row": "", "detail": ""}
    ]
    assert row["p95_s"] is None and row["simulated"]


def test_an_idle_device_has_no_latency(tmp_path: Path) -> None:
    """Windows without requests have no p95: 0 ms was shown, as of a very fast device."""
    idle = device_row("a", model="digits@1", release="f" * 64)
    assert idle.telemetry is not None
    for window in idle.telemetry["models"]:
        window.update(requests=0, latency_p95_s=0.0)
    assert fleet_row(idle, "online", {})["p95_s"] is None


def test_scoped_operators_see_rows_of_their_groups_only(tmp_path: Path) -> None:
    """Devices and open claims of other groups are in no row."""
    database = Database(f"sqlite:///{tmp_path / 'controller.db'}")
    devices = Devices(database, stale_after_s=60, now=lambda: 1_800_000_000.0)
    make_fleet(database, 40, model="m@1", release="f" * 64)
    with database.write() as session:
        for group in ("doors", "roof"):
            session.add(
                ClaimRow(
                    token_sha256=group, device=f"new-{group}", device_class="coral", group=group, labels={}, link="",
                    expires=1_800_000_060.0, used=None, public_key_sha256=None,
                )
            )  # fmt: skip
    rows = fleet_rows(database, devices.scoped_to(frozenset({"doors"})))
    assert {row["group"] for row in rows} == {"doors"} and "new-doors" in {row["name"] for row in rows}
    every = fleet_rows(database, devices)
    assert len(every) == 42
    named = fleet_rows(database, devices, names=["new-roof", every[0]["name"], "nobody"])
    assert {row["name"] for row in named} == {"new-roof", every[0]["name"]}
    database.close()


def test_missing_dashboard_build_is_explained(tmp_path: Path) -> None:
    """The page explains how to build the dashboard; nothing else is served."""
    found = load_assets(tmp_path / "nowhere")
    assert list(found) == [PAGE] and b"make dashboard" in found[PAGE].body


def test_hashed_assets_are_cached_and_the_page_is_revalidated(tmp_path: Path) -> None:
    """Scripts with a hash in their name are immutable for caches, the page is revalidated; text is served
    compressed."""
    (tmp_path / "assets").mkdir()
    (tmp_path / PAGE).write_text("<!doctype html>" + " " * 2_000)
    (tmp_path / "assets" / "index-abc.js").write_text("let one = 1;")
    found = load_assets(tmp_path)
    script = found["assets/index-abc.js"]
    assert script.is_immutable and script.media_type.startswith("text/javascript")
    assert not found[PAGE].is_immutable and len(found[PAGE].gzipped) < 200
