"""Policies on recorded uplinks in virtual time: the agent's decisions beside an oracle that knows the trace."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import uplink
from hypothesis import given, settings
from hypothesis import strategies as some
from policy_replay import Adaptive, Always, Oracle, Outcome, Policy, Scenario, replay, switches

from edgesplit.bandwidth_trace import PACKET_BYTES, UplinkTrace, make_uplink_trace, read_uplink_trace
from edgesplit.plan import Link, Plan, Power, Row
from edgesplit_agent.policy.row_selection import DWELL_S
from edgesplit_agent.power.mode import PowerMode
from support import REPOSITORY

TRACES = sorted((REPOSITORY / "bench" / "traces").glob("*.up"))
LOCAL = Row(name="local", device=("a", "b"), device_s=0.3, device_joules=1.5)
CUT = Row(name="cut-1", device=("a",), remote=("b",), device_s=0.1, device_joules=0.5, up_bytes=8_000, remote_s=0.004)
REMOTE = Row(name="remote", remote=("a", "b"), up_bytes=20_000, remote_s=0.005)
POWER = Power(idle_watts=2.0, busy_watts=5.0, radio_watts=0.13, up_joules_per_byte=2.3e-6, wake_joules=0.04)


def scene(trace: UplinkTrace, requests: int = 200) -> Scenario:
    link = Link(up_bytes_per_s=uplink.mean_bytes_per_s(trace), down_bytes_per_s=2e6, rtt_s=0.05)
    plan = Plan(model="m@1", device_class="pi", rows=(REMOTE, CUT, LOCAL), link=link, power=POWER)
    return Scenario(plan, trace, requests, period_s=0.5)


def mean_s(told: Sequence[Outcome]) -> float:
    return statistics.fmean(one.seconds for one in told)


def p95_s(told: Sequence[Outcome]) -> float:
    return sorted(one.seconds for one in told)[int(0.95 * len(told))]


def steady(rate: float, seconds: int = 10) -> UplinkTrace:
    """Packets evenly at a rate in bytes per second."""
    gap_ms = PACKET_BYTES / rate * 1e3
    return make_uplink_trace([round(place * gap_ms) for place in range(1, int(seconds * 1e3 / gap_ms))])


def phases(rates: Sequence[float], phase_s: float) -> UplinkTrace:
    """Rates in turns."""
    moments: list[int] = []
    for place, rate in enumerate(rates):
        gap_ms, begins_ms = PACKET_BYTES / rate * 1e3, place * phase_s * 1e3
        moments += [int(begins_ms + gap_ms * packet) for packet in range(1, int(phase_s * 1e3 / gap_ms) + 1)]
    return make_uplink_trace(moments)


def test_on_a_steady_link_the_world_agrees_with_the_plan() -> None:
    """Each row takes what the plan predicts, to a packet's time, and the agent takes the best and hedges nothing."""
    here = scene(steady(5e5))
    for row, seconds in (("remote", 0.095), ("cut-1", 0.17), ("local", 0.3)):
        assert mean_s(replay(here, Always(row))) == pytest.approx(seconds, abs=0.005)
    told = replay(here, Adaptive())
    assert {one.row for one in told} == {"remote"} and not any(one.hedged for one in told)


def test_the_same_rehearsal_ends_the_same() -> None:
    """No clock, no chance."""
    here = scene(read_uplink_trace(TRACES[0]), 80)
    assert replay(here, Adaptive()) == replay(here, Adaptive())


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_racing_stays_near_the_oracle_and_never_far_beyond_all_local(path: Path) -> None:
    """Mean within 10 % of an oracle that knows the trace, p95 at most 5 % over all-local's, nothing lost."""
    here = scene(read_uplink_trace(path))
    told, oracle, local = (replay(here, policy) for policy in (Adaptive(), Oracle(), Always("local")))
    assert mean_s(told) <= 1.10 * mean_s(oracle)
    assert p95_s(told) <= 1.05 * p95_s(local)
    assert all(one.in_time for one in told)


def best_static_s(here: Scenario) -> float:
    return min(mean_s(replay(here, Always(row.name))) for row in here.plan.rows)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
@pytest.mark.parametrize("policy", [Adaptive(hedge_ratio=0.0), Adaptive()], ids=["switching", "racing"])
def test_adapting_is_never_far_worse_than_the_best_row_held_for_ever(path: Path, policy: Policy) -> None:
    """Also without a budget for hedging: at most 10 % above the row that turns out best."""
    here = scene(read_uplink_trace(path))
    told = replay(here, policy)
    assert mean_s(told) <= 1.10 * best_static_s(here)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(some.sampled_from([2.0, 2.5, 3.0, 4.0, 5.0]), some.floats(3.5, 4.5), some.floats(5.5, 6.3))
def test_a_link_that_flaps_turns_little_over(phase_s: float, low: float, high: float) -> None:
    """Good and bad in turns of two seconds and more, no hedging: rows that leave the device are taken up once in a
    dwell at most, and the mean stays within 10 % of the best row's."""
    here = scene(phases([10**high, 10**low] * 6, phase_s))
    told = replay(here, Adaptive(hedge_ratio=0.0))
    ups = [
        place * here.period_s
        for place, (before, after) in enumerate(pairwise(told), 1)
        if before.row != after.row and after.row != "local"
    ]
    assert all(later - sooner >= DWELL_S for sooner, later in pairwise(ups))
    assert switches(told) <= 2 * here.requests * here.period_s / DWELL_S + 2
    assert mean_s(told) <= 1.10 * best_static_s(here)


def test_a_link_that_fades_before_it_is_known_costs_one_patience() -> None:
    """Of the plan's link eight transfers were to be believed: each request until then waited in vain for itself."""
    told = replay(scene(phases([1.25e6, 1.25e4], 2.0), 12), Adaptive())
    assert [place for place, one in enumerate(told) if one.seconds > 0.4] == [4]
    assert told[5].seconds == pytest.approx(0.35, abs=0.02)  # the processor had to finish the one before


def test_a_link_that_is_gone_loses_nothing() -> None:
    """Ten seconds without a packet: answered by the device, in time, by every policy but the oracle's help."""
    trace = make_uplink_trace(
        [*steady(5e5, 4).delivery_times_ms, *(14_000 + one for one in steady(5e5, 4).delivery_times_ms)]
    )
    for policy in (Adaptive(), Adaptive(hedge_ratio=0.0), Adaptive(PowerMode("saver")), Always("remote")):
        assert all(one.in_time for one in replay(scene(trace, 60), policy))


def test_saver_is_never_dearer_than_answering_alone() -> None:
    """On any trace; and where the link holds still it takes the fewest joules of all policies."""
    for path in TRACES:
        here = scene(read_uplink_trace(path), 150)
        spent = {
            mode: statistics.fmean(one.joules for one in replay(here, Adaptive(PowerMode(mode))))  # type: ignore[arg-type]
            for mode in ("performance", "balanced", "saver")
        }
        assert spent["saver"] <= 1.02 * (LOCAL.device_joules or 0.0)
        if path.stem in ("lte-parked", "wifi-walk"):
            assert spent["saver"] <= 1.02 * min(spent.values())


@pytest.mark.parametrize("watts", [2.9, 3.5, 4.1])
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_power_budget_is_kept_where_any_row_keeps_it(path: Path, watts: float) -> None:
    """Average power over the trace, idling included, against the row that draws least; nothing is lost for it."""
    here = scene(read_uplink_trace(path))

    def drawn(policy: Policy) -> float:
        told = replay(here, policy)
        assert all(one.in_time for one in told)
        beyond = statistics.fmean(one.joules - POWER.idle_watts * one.seconds for one in told)
        return POWER.idle_watts + beyond / here.period_s

    least = min(drawn(Always(row.name)) for row in here.plan.rows)
    assert drawn(Adaptive(PowerMode(watts=watts), hedge_ratio=0.0)) <= 1.03 * max(watts, least)
