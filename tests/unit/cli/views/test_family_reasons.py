"""Reasons of a family's plan as sentences: the chosen variant, each other one, and the proof."""

from __future__ import annotations

import random
from typing import Any

import pytest

from edgesplit.plan import Link
from edgesplit_cli.views.family_reasons import family_sentences
from edgesplit_partitioner.costs.model import Costs, LayerCost, TensorCost
from edgesplit_partitioner.planner.family import Variant, plan_family
from support.families import random_family, random_link

LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01)


def a_variant(name: str, accuracy: float, device_s: float) -> Variant:
    """One layer that the server runs ten times faster than the device, and half a second of bytes between them."""
    seconds = {"device": device_s, "cloud": device_s / 10}
    layer = LayerCost(name="all", reads=("x",), writes={"y": TensorCost(bytes=100)}, seconds=seconds)
    costs = Costs(
        model=name, tiers=("device", "cloud"), layers=(layer,), inputs={"x": TensorCost(bytes=500_000)}, outputs=("y",)
    )
    return Variant(name, costs, accuracy)


VARIANTS = (a_variant("tiny", 0.5, 0.01), a_variant("small", 0.7, 0.1), a_variant("large", 0.9, 8.0))


def reasons(**options: Any) -> str:
    return "\n".join(family_sentences(plan_family("birds", VARIANTS, {"device-cloud": LINK}, **options).to_builtins()))


def test_a_more_accurate_variant_is_left_by_the_deadline_and_its_proof() -> None:
    """Named with its time, and with the bound that no cut of it is below."""
    text = reasons(limits={"deadline_s": 0.5})
    assert "Why small:local? It is the most accurate variant whose best cut answers within 500 ms" in text
    assert "Why not large? 90.0% right, +20.0 points; its best cut, remote, takes 1310.1 ms" in text
    assert "beyond the deadline" in text and "Why not tiny? 50.0% right, -20.0 points" in text
    assert "No cut of a more accurate variant takes less than 1310.1 ms" in text


def test_a_variant_below_the_floor_is_named_with_its_reason() -> None:
    """And without a deadline nothing is more accurate than the choice."""
    text = reasons(least_accuracy=0.6)
    assert "Why not tiny? Its accuracy of 50.0% is below the floor." in text
    assert "answers, whatever it takes" in text and "No variant is more accurate." in text


def test_another_objective_compares_by_it() -> None:
    """The fastest above the floor; the more accurate one is slower."""
    text = reasons(objective="latency", least_accuracy=0.6)
    assert "Why small:local? It is of all variants of at least 60.0% accuracy the least latency" in text
    assert "its latency is greater" in text


@pytest.mark.parametrize("seed", range(20))
def test_every_variant_of_a_random_family_is_spoken_of_once(seed: int) -> None:
    """Chosen, compared or left out."""
    rng = random.Random(seed)
    variants = [tried.variant for tried in random_family(rng) if tried.cuts]
    if not variants:
        return
    lines = list(family_sentences(plan_family("birds", variants, {"device-cloud": random_link(rng)}).to_builtins()))
    for variant in variants:
        spoken = [line for line in lines if line.startswith((f"Why {variant.name}:", f"Why not {variant.name}?"))]
        assert len(spoken) == 1, (seed, variant.name, lines)
