"""Thresholds of cascades: in simulated worlds at the limit, promises hold although the best of many is taken."""

from __future__ import annotations

import numpy as np
import pytest

from edgesplit_partitioner.bounds.binomial import lower_share
from edgesplit_partitioner.planner.cascade_calibration import (
    CLASS_SCORES,
    CalibratedCascade,
    Candidate,
    CascadeRequest,
    FamilyAnswers,
    VariantAnswers,
    calibrate,
)

FRAMES = 400
DRAWS = 600
REQUEST = CascadeRequest(changed=0.05, scores=("margin", "probability", "entropy"))


def draw_world(variants: int, random: np.random.Generator) -> FamilyAnswers:
    """Variants of which each differs from the last one on a frame in twenty, whatever its scores say, so that at every
    threshold below the greatest all but nothing is allowed: the worst that a score can be. The scores are independent
    of each other, so that every pair and score errs by itself."""
    last = np.zeros(FRAMES, np.int64)
    given = {}
    for number in range(variants):
        labels = last if number == variants - 1 else (random.random(FRAMES) < 2 * REQUEST.changed).astype(np.int64)
        scores: dict[str, tuple[float | None, ...]] = {
            kind: tuple(random.random(FRAMES).tolist()) for kind in CLASS_SCORES
        }
        given[f"v{number}"] = VariantAnswers(labels=tuple(map(int, labels)), scores=scores)
    return FamilyAnswers(answer="class:scores", truth=tuple(map(int, last)), variants=given)


def true_share(one: CalibratedCascade) -> float:
    """Of all frames, those that are answered surely and differ: scores are uniform and say nothing."""
    return 0.0 if one.choice.threshold is None else 2 * REQUEST.changed * (1.0 - one.choice.threshold)


def broken(variants: int, tested: int | None, seed: int) -> int:
    """Draws in which the candidate that keeps the most frames here breaks its promise."""
    random = np.random.default_rng(seed)
    last = f"v{variants - 1}"
    candidates = [Candidate(f"v{n}", last, score) for n in range(variants - 1) for score in REQUEST.scores]
    count = 0
    for _ in range(DRAWS):
        found = calibrate(draw_world(variants, random), candidates, REQUEST, tested or len(candidates))
        chosen = max(found, key=lambda one: one.choice.stay_share)
        count += true_share(chosen) > REQUEST.changed
    return count


@pytest.mark.parametrize(("variants", "seed"), [(2, 71), (5, 72)])
def test_the_best_of_many_keeps_its_promise(variants: int, seed: int) -> None:
    """One and four pairs with three scores each; taken is what keeps the most frames here, which is what luck favours.
    The 99 % lower bound of the broken share is at most a tenth."""
    count = broken(variants, None, seed)
    print(f"seed {seed}, {variants} variants: {count} of {DRAWS} promises broken")
    assert lower_share(count, DRAWS, 0.01) <= 0.1


def test_without_the_division_promises_would_break() -> None:
    """The same world, the certainty not divided: taking the luckiest of twelve breaks more than a tenth."""
    count = broken(5, 1, seed=72)
    print(f"seed 72: {count} of {DRAWS} promises broken")
    assert lower_share(count, DRAWS, 0.01) > 0.1


def test_an_answer_that_is_none_differs_and_is_never_sure() -> None:
    """Label -1 and no score: such a frame is escalated, and where it counted as sure it would be a changed answer."""
    ours = VariantAnswers(labels=(-1,) * 10 + (3,) * 190, scores={"margin": (None,) * 10 + (0.5,) * 190})
    theirs = VariantAnswers(labels=(3,) * 200, scores={"margin": (1.0,) * 200})
    answers = FamilyAnswers(answer="class", truth=(3,) * 200, variants={"a": ours, "b": theirs})
    found = calibrate(answers, [Candidate("a", "b", "margin")], CascadeRequest(changed=0.02), 1)[0]
    assert (found.choice.stay, found.choice.changed, found.right) == (190, 0, 200)
