"""The link between gateway and cloud: what the gateway's answers report of it changes the choice, and expires."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.plan import (
    Conditions,
    Hop,
    Link,
    Plan,
    Power,
    Row,
    choose_row,
    energy_j,
    further_link,
    further_links_s,
    latency_s,
    slowest_stage_s,
)
from edgesplit_agent.policy.link_estimator import FURTHER_HOP_TTL_S, LinkEstimate

LINK = Link(up_bytes_per_s=10e6, down_bytes_per_s=10e6, rtt_s=0.002)
HOP = Hop(tier="cloud", up_bytes=100_000, down_bytes=4_000, up_s=0.02, down_s=0.001, seconds=0.005)
FAR = Row(name="cut-1", device=("a",), remote=("b", "c"), device_s=0.01, up_bytes=1_000, remote_s=0.01,
          further_links_s=0.041, hops=(HOP,))  # fmt: skip
"""20 ms up the second link, 1 ms down, a round trip of 20 ms."""
NEAR = Row(name="cut-2", device=("a",), remote=("b", "c"), device_s=0.01, up_bytes=1_000, remote_s=0.1)
LOCAL = Row(name="local", device=("a", "b", "c"), device_s=0.5)
PLAN = Plan(model="m", device_class="pi", rows=(FAR, NEAR, LOCAL), link=LINK, tiers=("device", "edge", "cloud"))


def meter(*waits_s: float, answered: bool = True, at: float = 100.0) -> LinkEstimate:
    """After a gateway told that it waited so long for each of some requests."""
    made = LinkEstimate.from_link(LINK)
    for seconds in waits_s:
        made = made.after_further_hop(FAR, seconds, at, answered=answered)
    return made


def chosen(by: LinkEstimate) -> str:
    row = choose_row(PLAN, by.conditions(remote_usable=True, now=0.0))
    assert row is not None
    return row.name


def test_second_link_is_as_planned_until_reported() -> None:
    """Round trip and rates are those that the plan assumed."""
    planned = further_link(FAR)
    assert planned is not None and further_link(NEAR) is None
    assert planned.rtt_s == pytest.approx(0.02) and planned.up_bytes_per_s == pytest.approx(5e6)
    assert LinkEstimate.from_link(LINK).conditions(remote_usable=True, now=0.0).further is None
    known = Conditions(link=LINK, further=planned)
    assert further_links_s(FAR, known) == pytest.approx(FAR.further_links_s) and latency_s(FAR, known) == pytest.approx(
        latency_s(FAR, Conditions(link=LINK))
    )


def test_slow_second_link_moves_the_cut_to_the_gateway() -> None:
    """With the first answers that report it, the gateway finishes alone by another row."""
    assert chosen(LinkEstimate.from_link(LINK)) == chosen(meter(0.041)) == "cut-1"
    assert chosen(meter(0.4, 0.4)) == "cut-2"


def test_fast_second_link_is_used_more() -> None:
    """Where the plan assumed it slow."""
    slow = Row(
        name="cut-1",
        device=("a",),
        remote=("b", "c"),
        device_s=0.01,
        up_bytes=1_000,
        remote_s=0.01,
        further_links_s=0.221,
        hops=(Hop(tier="cloud", up_bytes=100_000, down_bytes=4_000, up_s=0.2, down_s=0.001),),
    )
    plan = Plan(model="m", device_class="pi", rows=(slow, NEAR, LOCAL), link=LINK)
    made = LinkEstimate.from_link(LINK)
    for _ in range(5):
        made = made.after_further_hop(slow, 0.03, 100.0, answered=True)
    before, after = (
        choose_row(plan, estimate.conditions(remote_usable=True, now=0.0))
        for estimate in (LinkEstimate.from_link(LINK), made)
    )
    assert before is not None and after is not None and (before.name, after.name) == ("cut-2", "cut-1")


def test_second_link_estimate_expires() -> None:
    """Rows that do not use the second link measure nothing: after a while the one that does is tried as planned."""
    slow = meter(0.4, 0.4)
    assert chosen(slow.without_expired_hop(100.0 + FURTHER_HOP_TTL_S - 1.0)) == "cut-2"
    assert chosen(slow.without_expired_hop(100.0 + FURTHER_HOP_TTL_S)) == "cut-1"


def test_unanswered_second_link_is_at_least_that_slow() -> None:
    """The gateway finished alone after waiting; the next requests avoid the second link for a while."""
    assert chosen(meter(2.0, answered=False)) == "cut-2"
    assert chosen(meter(0.0, answered=False)) == "cut-1"  # refused at once: nothing was learnt of the link


def test_row_without_the_second_link_reports_nothing_of_it() -> None:
    """Whatever a gateway claims."""
    made = LinkEstimate.from_link(LINK)
    assert made.after_further_hop(NEAR, 1.0, 100.0, answered=True) == made


@given(st.lists(st.tuples(st.floats(0.0, 1e4), st.booleans()), max_size=30))
def test_gateway_claims_never_give_impossible_figures(told: list[tuple[float, bool]]) -> None:
    """Seconds stay finite and not negative, and a row is always selected."""
    made = LinkEstimate.from_link(LINK)
    for seconds, answered in told:
        made = made.after_further_hop(FAR, seconds, 100.0, answered=answered)
    now = made.conditions(remote_usable=True, now=0.0)
    for figure in (latency_s(FAR, now), slowest_stage_s(FAR, now), energy_j(FAR, now, Power(idle_watts=1.0))):
        assert 0.0 <= figure < 1e9
    assert choose_row(PLAN, now) is not None
