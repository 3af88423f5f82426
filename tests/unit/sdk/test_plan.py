"""Row selection on the device from the plan's table, request by request."""

from __future__ import annotations

import msgspec
import pytest

from edgesplit.plan import Conditions, Hysteresis, Link, Plan, Power, Row, best_row, choose_row, latency_s

GOOD = Link(up_bytes_per_s=1000.0, down_bytes_per_s=1000.0, rtt_s=0.1)
REMOTE = Row(name="remote", remote=("s1", "s2"), up_bytes=1000, down_bytes=100, remote_s=0.1)
CUT = Row(name="cut-1", device=("s1",), remote=("s2",), device_s=0.5, up_bytes=100, down_bytes=100, remote_s=0.05)
LOCAL = Row(name="local", device=("s1", "s2"), device_s=2.0)
TABLE = Plan(model="m@1", device_class="generic-x86", rows=(REMOTE, CUT, LOCAL), link=GOOD)


def now(up: float = 1000.0, rtt: float = 0.1, **more: float | bool) -> Conditions:
    conditions = Conditions(link=Link(up_bytes_per_s=up, down_bytes_per_s=1000.0, rtt_s=rtt))
    return msgspec.structs.replace(conditions, **more)


def chosen(conditions: Conditions, current: str | None = None, plan: Plan = TABLE, **hysteresis: float) -> str | None:
    row = choose_row(plan, conditions, current, Hysteresis(**hysteresis) if hysteresis else None)
    return row and row.name


def test_latency_is_the_sum_of_device_link_and_server() -> None:
    """Device and encoding by its slow-down, decoding and remote by the server's load, the link by its rates."""
    row = msgspec.structs.replace(CUT, encode_s=0.01, decode_s=0.02)
    conditions = now(up=50.0, device_slowdown=2.0, server_load=3.0)
    assert latency_s(row, conditions) == pytest.approx((0.5 + 0.01) * 2 + (0.1 + 2.0 + 0.1) + (0.02 + 0.05) * 3)
    assert latency_s(LOCAL, conditions) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("conditions", "name"),
    [
        (now(up=1e6), "remote"),
        (now(), "cut-1"),
        (now(up=10.0), "local"),
        (now(rtt=5.0), "local"),
        (now(up=1e6, server_load=100.0), "local"),
        (now(up=2500.0), "remote"),
        (now(up=2500.0, server_load=10.0), "cut-1"),
        (now(up=900.0, device_slowdown=9.0), "remote"),
    ],
)
def test_fastest_row_under_current_conditions_is_selected(conditions: Conditions, name: str) -> None:
    """Bandwidth, round trip, server load and own slow-down each move the choice."""
    assert chosen(conditions) == name


def test_unavailable_cloud_leaves_only_the_local_row() -> None:
    """Even for a device that was offloading and whatever hysteresis says; without a local row nothing is left."""
    assert chosen(now(up=1e6, remote_usable=False), "remote") == "local"
    bare = msgspec.structs.replace(TABLE, rows=(REMOTE, CUT), fallback="none")
    assert chosen(now(remote_usable=False), plan=bare) is None
    assert chosen(now(remote_usable=False), "cut-1", plan=bare) is None


def test_hysteresis_keeps_the_current_row() -> None:
    """Until another row is below nine tenths of it."""
    close = now(up=2000.0)
    cut_s, remote_s = latency_s(CUT, close), latency_s(REMOTE, close)
    assert 0.9 * cut_s < remote_s < cut_s
    assert chosen(close) == "remote"
    assert chosen(close, "cut-1") == "cut-1"
    assert chosen(close, "cut-1", ratio=1.0, gain_s=0.0) == "remote"
    assert chosen(now(up=1e6), "cut-1") == "remote"


def test_gain_below_the_minimum_keeps_the_current_row() -> None:
    """Twice as fast, but by less than the minimum gain."""
    tiny = tuple(msgspec.structs.replace(row, device_s=seconds) for row, seconds in ((CUT, 0.0), (LOCAL, 0.001)))
    free = msgspec.structs.replace(tiny[0], up_bytes=0, down_bytes=0, remote_s=0.0)
    plan = msgspec.structs.replace(TABLE, rows=(free, tiny[1]))
    assert chosen(now(rtt=0.0), plan=plan) == "cut-1"
    assert chosen(now(rtt=0.0), "local", plan=plan) == "local"
    assert chosen(now(rtt=0.0), "local", plan=plan, gain_s=0.0) == "cut-1"


def test_selection_does_not_flap_between_equal_rows() -> None:
    """Noise of a few percent around the switching point changes nothing after the first choice."""
    current = chosen(now(up=1800.0))
    for up in (1750.0, 1850.0, 1790.0, 1810.0) * 3:
        assert chosen(now(up=up), current) == current


def test_unknown_current_row_is_ignored() -> None:
    """A row of an older table counts as none."""
    assert chosen(now(), "cut-9") == "cut-1"


def test_ties_go_to_the_row_with_fewer_bytes() -> None:
    """Of two equally fast rows the one that sends less is selected."""
    rows = [msgspec.structs.replace(REMOTE, up_bytes=up, remote_s=1.0 - up / 1024) for up in (512, 128, 256)]
    row = best_row(rows, now(up=1024.0))
    assert row is not None and row.up_bytes == 128


def test_dead_link_is_left_despite_hysteresis() -> None:
    """A bandwidth of next to nothing makes every remote row endless."""
    assert chosen(now(up=1e-300), "remote") == "local"


def test_forced_row_is_kept_while_usable() -> None:
    """The operator chose it: no faster row is selected, but without the cloud the device answers alone."""
    forced = msgspec.structs.replace(TABLE, forced_row="cut-1")
    assert chosen(now(up=1e6), "remote", plan=forced) == "cut-1"
    assert chosen(now(up=1.0), "local", plan=forced) == "cut-1"
    assert chosen(now(remote_usable=False), "cut-1", plan=forced) == "local"


@pytest.mark.parametrize("what", ["up_bytes_per_s", "down_bytes_per_s", "rtt_s", "server_load", "device_slowdown"])
@pytest.mark.parametrize("value", [float("nan"), -1.0, float("-inf")])
def test_invalid_condition_counts_as_planned(what: str, value: float) -> None:
    """NaN compared as better than all: the first row was selected, whatever its cost."""
    seen = now()
    if what in Link.__struct_fields__:
        seen = msgspec.structs.replace(seen, link=msgspec.structs.replace(seen.link, **{what: value}))
    else:
        seen = now(**{what: value})
    assert chosen(seen) == chosen(now()) == "cut-1"
    assert chosen(seen, current="remote") == "cut-1"


@pytest.mark.parametrize("weights", [{}, {"energy": 1.0}, {"throughput": 1.0}])
def test_dead_link_selects_the_local_row(weights: dict[str, float]) -> None:
    """A rate of 0, an endless round trip or load: no division by zero, and nothing is sent."""
    power = Power(busy_watts=1.0, idle_watts=1.0, radio_watts=1.0)
    plan = msgspec.structs.replace(TABLE, weights=weights, power=power)
    dead = Conditions(link=msgspec.structs.replace(GOOD, down_bytes_per_s=0.0))
    for seen in (now(up=0.0), dead, now(rtt=float("inf")), now(server_load=float("inf"))):
        assert chosen(seen, plan=plan) == "local"
        assert chosen(seen, current="remote", plan=plan) == "local"
