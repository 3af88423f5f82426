"""The estimate of completion time over an uncertain link, compared with Monte Carlo draws."""

from __future__ import annotations

import math
import random

import pytest

from edgesplit.plan import Link
from edgesplit_agent.policy.completion_time import CompletionTime
from edgesplit_agent.policy.hedge_timing import MAX_SLOWDOWN_VS_LOCAL, early_hedge_s
from edgesplit_agent.policy.link_estimator import MAX_SPREAD, LinkEstimate

LTE = Link(up_bytes_per_s=731_250, down_bytes_per_s=1_720_000, rtt_s=0.06)


@pytest.mark.parametrize(
    "odds",
    [CompletionTime(0.05, 0.04, 0.3, 0.0), CompletionTime(0.02, 0.2, 0.8, 0.1), CompletionTime(0.0, 0.1, 1.5, 0.3)],
)
@pytest.mark.parametrize("local_s", [0.06, 0.15, 0.6])
def test_probability_and_saving_match_monte_carlo(odds: CompletionTime, local_s: float) -> None:
    """The closed forms against 40,000 answers drawn from the same distribution."""
    rng = random.Random(1)
    answers = [
        math.inf
        if rng.random() < odds.fade_probability
        else odds.fixed_s + odds.transfer_s * math.exp(odds.spread * rng.gauss(0, 1))
        for _ in range(40_000)
    ]
    assert odds.probability_by(local_s) == pytest.approx(
        sum(answer_s <= local_s for answer_s in answers) / len(answers), abs=0.01
    )
    saved_s = sum(max(0.0, local_s - answer_s) for answer_s in answers) / len(answers)
    assert odds.expected_saving_s(local_s) == pytest.approx(saved_s, abs=0.01 * local_s)


def test_impossible_rows_save_nothing() -> None:
    """A round trip longer than the device takes; a link that is known to be down; nothing to send."""
    assert (
        CompletionTime(0.2, 0.1, 0.3, 0.0).expected_saving_s(0.1)
        == 0.0
        == CompletionTime(0.2, 0.1, 0.3, 0.0).probability_by(0.1)
    )
    assert CompletionTime(0.0, 0.1, 0.3, 1.0).expected_saving_s(0.5) == 0.0
    assert CompletionTime(0.1, 0.0, 0.3, 0.0).expected_saving_s(0.5) == pytest.approx(0.4)


def test_hedge_is_early_only_on_an_unsteady_link() -> None:
    """A steady link is waited for; a hedge is for links whose answers may be late."""
    assert early_hedge_s(CompletionTime(0.05, 0.04, 0.1, 0.0), local_s=0.3, sent_s=0.0, tail_s=0.3) is None
    assert early_hedge_s(CompletionTime(0.05, 0.04, 0.1, 0.1), local_s=0.3, sent_s=0.0, tail_s=0.3) == 0.0
    quick = early_hedge_s(CompletionTime(0.001, 0.002, 0.1, 0.1), local_s=0.3, sent_s=0.0, tail_s=0.3)
    assert quick == pytest.approx(
        (MAX_SLOWDOWN_VS_LOCAL - 1) * 0.3
    )  # an answer is likely before: the tail may wait for it


def test_deviation_grows_with_surprises_and_decays_slowly() -> None:
    """A link that behaves as expected becomes certain; one that fades now and then stays uncertain for a long time."""
    steady = wild = LinkEstimate.from_link(LTE)
    for place in range(60):
        steady = steady.after_transfer(40_000, 200, 0.06 + 40_000 / LTE.up_bytes_per_s, place)
        slow = 10 if place % 10 == 0 else 1
        wild = wild.after_transfer(40_000, 200, 0.06 + slow * 40_000 / LTE.up_bytes_per_s, place)
    assert steady.spread < 0.05 and steady.fades == 0.0
    assert wild.spread > 4 * steady.spread and 0.03 < wild.fades < 0.3
    assert (
        steady.completion_time(40_000, 0.06, 60.0).probability_by(0.3)
        > 0.99
        > wild.completion_time(40_000, 0.06, 60.0).probability_by(0.3)
    )


def test_deviation_grows_without_measurements() -> None:
    """A link without recent measurements may have become better: worth a try."""
    meter = LinkEstimate.from_link(LTE).after_transfer(40_000, 200, 1.5, 100.0)
    fresh, old = meter.completion_time(40_000, 0.06, 100.0), meter.completion_time(40_000, 0.06, 110.0)
    assert old.spread > fresh.spread and old.expected_saving_s(0.15) > fresh.expected_saving_s(0.15)
    assert meter.completion_time(40_000, 0.06, 1e9).spread <= MAX_SPREAD


def test_small_transfers_do_not_change_the_rate_estimate() -> None:
    """A hundred bytes tell nothing of the rate, however long they took."""
    meter = LinkEstimate.from_link(LTE)
    for _ in range(20):
        meter = meter.after_transfer(100, 100, 0.065, 5.0)
    assert meter.fades == pytest.approx(0.0, abs=0.01) and meter.heard_at == -math.inf
