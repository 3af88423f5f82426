"""The gate passes a variant on what its samples show, says so in a sentence, and seldom passes a bad one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edgesplit.errors import UsageError
from edgesplit_partitioner.bounds.binomial import lower_share
from edgesplit_partitioner.compression.gate import GateTerms, check_terms, judge, samples_needed, weigh

SEED = 20261123
DRAWS = 2000
DRAWS_OF_PAIRS = 400
"""A judgement of paired samples takes 70 ms."""


def test_agreement_is_judged_by_its_bound_and_told_in_a_sentence() -> None:
    """Two changed answers of 300 are bounded at 1.8 %, which an agreement of 98 % allows and one of 99 % does not."""
    evidence = weigh([True] * 2 + [False] * 298)
    assert judge(GateTerms(least_agreement=0.98), evidence).sentence == (
        "at most 1.76 % of answers differ (90 % sure, 300 samples)"
    )
    missed = judge(GateTerms(least_agreement=0.99), evidence)
    assert not missed.passed
    assert missed.sentence.endswith("; allowed: 1 % of answers changed")


def test_too_few_samples_are_told_how_many_it_takes() -> None:
    """Even without one changed answer 100 samples show nothing about 1 %: it takes 230."""
    verdict = judge(GateTerms(least_agreement=0.99), weigh([False] * 100))
    assert not verdict.passed
    assert verdict.samples_needed == 230
    assert verdict.sentence == "100 samples are too few to show 1 % of answers changed: it takes 230"


def test_accuracy_counts_what_is_won_too() -> None:
    """With labels a variant that loses as many answers as it wins keeps its accuracy, though many answers change."""
    base_right = [True] * 10 + [False] * 10 + [True] * 980
    variant_right = [False] * 10 + [True] * 10 + [True] * 980
    evidence = weigh([True] * 20 + [False] * 980, base_right, variant_right)
    assert (evidence.right_to_wrong, evidence.wrong_to_right) == (10, 10)
    assert judge(GateTerms(allowed_accuracy_loss=0.02), evidence).passed
    assert not judge(GateTerms(least_agreement=0.98), evidence).passed


def test_without_labels_agreement_stands_for_accuracy_and_the_sentence_says_so() -> None:
    """An accuracy cannot fall by more than the share of answers that change."""
    verdict = judge(GateTerms(allowed_accuracy_loss=0.05), weigh([True] + [False] * 199))
    assert verdict.passed
    assert verdict.sentence.endswith("; without labels only agreement is measured")


@pytest.mark.parametrize("terms", [GateTerms(), GateTerms(least_agreement=1.0), GateTerms(allowed_accuracy_loss=-0.1)])
def test_terms_that_nothing_can_show_are_refused(terms: GateTerms) -> None:
    """No terms at all, and terms that leave no room, are errors of the caller."""
    with pytest.raises(UsageError):
        check_terms(terms)


@pytest.mark.parametrize("true_share", [0.0201, 0.03])
def test_a_variant_that_changes_too_much_passes_seldom(true_share: float) -> None:
    """Of worlds in which more answers change than allowed, at most delta pass."""
    rng = np.random.default_rng(SEED)
    terms = GateTerms(least_agreement=0.98)
    passed = sum(judge(terms, weigh((rng.random(300) < true_share).tolist())).passed for _ in range(DRAWS))
    print(f"seed {SEED}: {passed} of {DRAWS} passed")
    assert lower_share(passed, DRAWS, 0.01) <= terms.delta


def test_a_variant_that_loses_too_much_accuracy_passes_seldom() -> None:
    """Of worlds in which accuracy falls by a little more than allowed, at most delta pass; the loss is net of what is
    won."""
    rng = np.random.default_rng(SEED)
    terms = GateTerms(allowed_accuracy_loss=0.03)
    lost_and_won = Counter(
        (lost, won) for lost, won, _ in rng.multinomial(400, [0.06, 0.0299, 0.9101], DRAWS_OF_PAIRS).tolist()
    )  # 3.01 points net
    passed = 0
    for (lost, won), times in lost_and_won.items():
        changed = [True] * (lost + won) + [False] * (400 - lost - won)
        base_right = [True] * lost + [False] * won + [True] * (400 - lost - won)
        variant_right = [False] * lost + [True] * (400 - lost)
        passed += times * judge(terms, weigh(changed, base_right, variant_right)).passed
    print(f"seed {SEED}: {passed} of {DRAWS_OF_PAIRS} passed")
    assert lower_share(passed, DRAWS_OF_PAIRS, 0.01) <= terms.delta


def test_what_is_needed_is_what_passes() -> None:
    """As many samples as are asked for pass where no answer changes; one fewer is too few."""
    for terms in (GateTerms(least_agreement=0.99), GateTerms(allowed_accuracy_loss=0.02)):
        needed = samples_needed(terms, labelled=True)
        right = [True] * needed
        assert judge(terms, weigh([False] * needed, right, right)).passed
        assert judge(terms, weigh([False] * (needed - 1), right[1:], right[1:])).samples_needed == needed
