"""The sequential test as a statistic: false alarms at the limit, alarms beyond it, weights, a state that survives."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from audit_streams import first_alarms, share_by_frame

from edgesplit.answers.sequential import SequentialTest, bets, delta_after, growth

SEED = 15
STREAMS = 10_000
MOST_ALARMS = 1_070
"""Of 10,000 streams at delta 10 %: a true probability of 10 % exceeds it once in a hundred tests."""


def observe_all(test: SequentialTest, flags: list[bool], weight: float = 1.0) -> SequentialTest:
    for differs in flags:
        test = test.observe(differs, weight)
    return test


@pytest.mark.parametrize("allowed", [0.01, 0.05])
def test_at_the_limit_alarms_are_as_rare_as_promised(allowed: float) -> None:
    """Exactly the allowed share differs, for 3,000 audited frames, in 10,000 streams."""
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    at = first_alarms(allowed, 0.1, STREAMS, 3_000, share_by_frame([(0, allowed)], random))
    assert 0 < (at > 0).sum() <= MOST_ALARMS


def test_at_twice_the_limit_it_alarms() -> None:
    """4 % where 2 % are allowed: every stream, half of them within 500 audited frames."""
    print(f"seed {SEED}")
    at = first_alarms(0.02, 0.1, 1_000, 6_000, share_by_frame([(0, 0.04)], np.random.default_rng(SEED)))
    assert (at > 0).all() and np.median(at) <= 500


def test_a_stream_that_was_good_for_long_is_caught_as_it_turns() -> None:
    """After 5,000 frames at half the limit, ten times the limit: the delay does not grow with the good frames."""
    print(f"seed {SEED}")
    turned = share_by_frame([(0, 0.01), (5_000, 0.2)], np.random.default_rng(SEED))
    at = first_alarms(0.02, 0.1, 300, 5_300, turned)
    delay = at[at > 5_000] - 5_000
    assert len(delay) >= 270 and np.median(delay) <= 120


def test_streams_and_single_test_agree() -> None:
    """The arrays of the benchmark compute what a device computes."""
    random = np.random.default_rng(SEED)
    flags = random.random((5, 400)) < 0.06
    at = first_alarms(0.02, 0.1, 5, 400, lambda frame, streams: flags[streams, frame])
    for stream in range(5):
        test, alarmed_at = SequentialTest(0.02, 0.1), 0
        for frame, differs in enumerate(flags[stream].tolist()):
            test = test.observe(differs)
            if test.alarms and not alarmed_at:
                alarmed_at = frame + 1
        assert alarmed_at == at[stream]


@pytest.mark.parametrize("allowed", [0.003, 0.02, 0.3, 0.9])
@pytest.mark.parametrize("weight", [1.0, 0.2])
def test_no_bet_gains_while_the_limit_is_kept(allowed: float, weight: float) -> None:
    """Whatever the audit probability: expected growth is 1 at the limit, and no capital falls below 0."""
    for bet in bets(allowed):
        gains, loses = growth(bet, allowed, True, weight), growth(bet, allowed, False, weight)
        assert gains > 1.0 > loses > 0.0
        assert allowed * gains + (1 - allowed) * loses == pytest.approx(1.0)


def test_the_whole_capital_is_a_martingale_at_the_limit() -> None:
    """By all 2^10 outcomes of ten frames: what enters, what is staked and what waits has the expectation 1."""
    expected = 0.0
    for flags in itertools.product([False, True], repeat=10):
        test = observe_all(SequentialTest(0.3, 1e-9), list(flags))
        assert test.alarms == 0
        expected += math.prod(0.3 if differs else 0.7 for differs in flags) * test.wealth
    assert expected == pytest.approx(1.0)


def test_frames_of_unequal_audit_probability_are_weighted() -> None:
    """Hard frames are audited four times as often, and differ more often: unweighted audits would call the kept limit
    broken, weighted ones do not."""
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    alarms = {True: 0, False: 0}
    for _ in range(100):
        hard = random.random(6_000) < 0.1
        differs = random.random(6_000) < np.where(hard, 0.2, 0.0)  # 2 % of all frames, as is allowed
        probability = np.where(hard, 0.4, 0.1)
        audited = random.random(6_000) < probability
        frames = list(zip(differs[audited].tolist(), (0.1 / probability[audited]).tolist(), strict=True))
        for weighted in (True, False):
            test = SequentialTest(0.02, 0.1)
            for differing, weight in frames:
                test = test.observe(differing, weight if weighted else 1.0)
            alarms[weighted] += test.alarms > 0
    assert alarms[True] <= 21 and alarms[False] >= 90


def test_testing_restarts_with_less_after_each_alarm() -> None:
    """After the k-th alarm with delta 6/(pi² k²), whose sum is delta."""
    test = SequentialTest(0.01, 0.1)
    spent = []
    for _ in range(200):
        before = test
        test = test.observe(True)
        if test.alarms > before.alarms:
            spent.append(test.alarm_delta)
            assert test == SequentialTest(0.01, 0.1, alarms=test.alarms) and test.wealth == 1.0
    assert len(spent) > 20 and spent[0] == pytest.approx(0.1 * 6 / math.pi**2)
    assert sum(delta_after(alarms, 0.1) for alarms in range(1, 100_000)) == pytest.approx(0.1, rel=1e-4)


def test_the_state_survives_a_restart_of_the_agent() -> None:
    """Written and read at any moment, it goes on as if nothing had happened."""
    random = np.random.default_rng(SEED)
    test = SequentialTest(0.02, 0.1)
    for differs in (random.random(300) < 0.05).tolist():
        test = test.observe(differs)
        again = msgspec.json.decode(msgspec.json.encode(test), type=SequentialTest)
        assert again == test and again.observe(True) == test.observe(True)
    assert test.observed + test.alarms > 0


@pytest.mark.parametrize(
    "text",
    [
        '{"allowed":0,"delta":0.1}',
        '{"allowed":0.02,"delta":1}',
        '{"allowed":0.02,"delta":0.1,"observed":1,"changed":2}',
        '{"allowed":0.02,"delta":0.1,"alarms":-1}',
        '{"allowed":0.02,"delta":0.1,"observed":1,"capital":[0.5]}',
        '{"allowed":0.5,"delta":0.1,"observed":1,"capital":[-1.0]}',
    ],
)
def test_a_state_that_no_test_has_is_refused(text: str) -> None:
    """A spoiled file must not silence the test."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=SequentialTest)


@pytest.mark.parametrize("weight", [0.0, -1.0, 1.5, math.nan])
def test_a_weight_is_a_part_of_the_least_probability(weight: float) -> None:
    """Above 1 the capital could fall below 0."""
    with pytest.raises(ValueError, match="weight"):
        SequentialTest(0.02, 0.1).observe(True, weight)
