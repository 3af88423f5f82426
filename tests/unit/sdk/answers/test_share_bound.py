"""The exact binomial test in plain Python against the bound that scipy computes."""

from __future__ import annotations

import random

import pytest

from edgesplit.answers.share_bound import draws_needed, share_is_kept
from edgesplit_partitioner.bounds.binomial import keeps, most_errors, trials_needed


@pytest.mark.parametrize("allowed", [0.001, 0.01, 0.02, 0.05, 0.4])
@pytest.mark.parametrize("delta", [0.1, 0.05, 0.01])
def test_device_and_controller_agree(allowed: float, delta: float) -> None:
    """The same answer as the Clopper-Pearson bound, at the last number of errors that passes and the first that does
    not."""
    assert draws_needed(allowed, delta) == trials_needed(allowed, delta)
    for draws in (1, 50, 229, 230, 460, 5_000):
        most = most_errors(draws, allowed, delta)
        assert most < 0 or share_is_kept(most, draws, allowed, delta)
        assert most == draws or not share_is_kept(most + 1, draws, allowed, delta)
        for errors in {0, draws // 100, draws // 10, draws}:
            assert share_is_kept(errors, draws, allowed, delta) == keeps(errors, draws, allowed, delta)


def test_known_numbers() -> None:
    """230 frames for 1 %, 90 % sure; 229 are too few."""
    assert draws_needed(0.01, 0.1) == 230
    assert share_is_kept(0, 230, 0.01, 0.1) and not share_is_kept(0, 229, 0.01, 0.1)


def test_a_share_above_the_limit_rarely_passes() -> None:
    """A world just above the limit: it passes in at most 10 % of draws, up to what chance explains (seed 5)."""
    rng, passed, worlds = random.Random(5), 0, 2_000
    for _ in range(worlds):
        errors = sum(rng.random() < 0.0501 for _ in range(100))
        passed += share_is_kept(errors, 100, 0.05, 0.1)
    assert passed / worlds < 0.1 + 3 * (0.1 * 0.9 / worlds) ** 0.5


@pytest.mark.parametrize("wrong", [(-1, 10, 0.1, 0.1), (11, 10, 0.1, 0.1), (0, 10, 0.0, 0.1), (0, 10, 0.1, 1.0)])
def test_impossible_counts_are_refused(wrong: tuple[int, int, float, float]) -> None:
    """Rather than given an answer."""
    with pytest.raises(ValueError, match="errors in"):
        share_is_kept(*wrong)
