"""Thresholds that keep a promise: in worlds at the limit, with too few frames, with ties, and in words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from promise_worlds import AtOnce, Rising, count_broken
from scipy import stats

from edgesplit.errors import UsageError
from edgesplit_partitioner.bounds.threshold import choose_threshold

SEED = 15
DRAWS = 2_000


@pytest.mark.parametrize("allowed", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("at_once", [True, False])
def test_in_worlds_at_the_limit_the_promise_is_broken_as_rarely_as_it_says(allowed: float, at_once: bool) -> None:
    """Frames are never seen twice; the true loss rises through the allowance, or lies just above it from the first
    threshold on. 2,000 calibrations with 300 frames each."""
    print(f"seed {SEED}")
    world = AtOnce(allowed) if at_once else Rising()
    random = np.random.default_rng(SEED)
    promise = count_broken(world, allowed, 0.1, draws=DRAWS, frames=300, random=random)
    assert 0 < promise.broken <= stats.binom.ppf(0.9999, DRAWS, 0.1)


def test_a_lax_allowance_lets_more_stay_and_a_hopeless_model_nothing() -> None:
    """The counts are those of the frames that reach the threshold."""
    random = np.random.default_rng(SEED)
    sureness = random.random(500)
    differs = random.random(500) < 0.3 * (1.0 - sureness)
    strict, lax = (choose_threshold(sureness.tolist(), differs.tolist(), allowed, 0.1) for allowed in (0.01, 0.05))
    assert 0 < strict.stay < lax.stay and strict.threshold > lax.threshold
    for choice in (strict, lax):
        stays = sureness >= choice.threshold
        assert choice.stay == stays.sum() and choice.changed == (stays & differs).sum()
        assert choice.bound <= choice.allowed and choice.stay_share == choice.stay / 500
    hopeless = choose_threshold([0.5] * 500, [True] * 500, 0.05, 0.1)
    assert hopeless.threshold is None and hopeless.stay == 0 and hopeless.bound == 0.0
    assert hopeless.to_text().startswith("no frame stays here: even the surest answers do not show")


def test_too_few_frames_say_how_many_it_takes() -> None:
    """Even without a single difference."""
    few = choose_threshold([1.0] * 100, [False] * 100, 0.01, 0.1)
    assert few.too_few and few.threshold is None and few.needed == 230
    expected = "100 samples are too few for at most 1 % of answers differ (90 % sure): it takes at least 230"
    assert few.to_text() == expected
    enough = choose_threshold([1.0] * 230, [False] * 230, 0.01, 0.1)
    assert not enough.too_few and enough.stay == 230
    assert choose_threshold([], [], 0.01, 0.1).too_few


def test_frames_of_equal_score_stay_or_go_together() -> None:
    """A threshold cannot tell them apart: 300 frames bear 11 changed ones at 5 %."""
    scores = [2.0] * 100 + [1.0] * 200
    differs = [False] * 100 + [True] * 13 + [False] * 187
    choice = choose_threshold(scores, differs, 0.05, 0.1)
    assert (choice.threshold, choice.stay, choice.changed) == (2.0, 100, 0)
    lenient = choose_threshold(scores, [False] * 295 + [True] * 5, 0.05, 0.1)
    assert (lenient.threshold, lenient.stay, lenient.changed) == (1.0, 300, 5)


def test_answers_that_are_never_sure_go() -> None:
    """A score of -inf reaches no threshold; one that is not a number is an error of the caller."""
    choice = choose_threshold([-math.inf] * 150 + [1.0] * 150, [False] * 300, 0.02, 0.1)
    assert choice.threshold == 1.0 and choice.stay == 150
    assert choose_threshold([-math.inf] * 300, [False] * 300, 0.02, 0.1).threshold is None
    with pytest.raises(UsageError, match="not a number"):
        choose_threshold([math.nan], [False], 0.02, 0.1)
    with pytest.raises(UsageError, match="one of each"):
        choose_threshold([1.0], [], 0.02, 0.1)


def test_a_choice_is_told_in_a_sentence() -> None:
    """With the share, the promise, how sure it is, and on how many samples."""
    scores = [float(place) for place in range(300)]
    text = choose_threshold(scores, [place < 213 for place in range(300)], 0.02, 0.1).to_text()
    assert text == "29.7 % of frames stay here; at most 2 % of answers differ (90 % sure, 300 samples)"
