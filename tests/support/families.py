"""Random families: several random models of one task, whose accuracies often are equal."""

from __future__ import annotations

import random
from dataclasses import dataclass

from edgesplit.plan import Link
from edgesplit_partitioner.planner.family import Variant
from support.brute_force import Tried, allowed_by_tiers, every_cut, random_costs

RATES = (1e5, 1e6)


@dataclass(frozen=True)
class TriedVariant:
    """A variant with every cut that its layers' tiers allow."""

    variant: Variant
    cuts: list[Tried]


def random_family(rng: random.Random, most_layers: int = 6) -> list[TriedVariant]:
    """2 to 4 variants; in some, layers run on one side only."""
    family = []
    for number in range(rng.choice([2, 2, 3, 4])):
        costs = random_costs(
            rng, rng.randrange(1, most_layers), round_numbers=rng.random() < 0.5, tiers=rng.choice([0, 0, 0.1])
        )
        accuracy = rng.choice([0.5, 0.6, 0.6, 0.8, round(rng.random(), 2)])
        cuts = [cut for cut in every_cut(costs) if allowed_by_tiers(costs, cut)]
        family.append(TriedVariant(Variant(f"v{number}", costs, accuracy), cuts))
    return family


def random_link(rng: random.Random) -> Link:
    """A slow or a fast link, with or without a round trip."""
    rates = (*RATES, 10 ** rng.uniform(3, 7))
    return Link(
        up_bytes_per_s=rng.choice(rates), down_bytes_per_s=rng.choice(rates), rtt_s=rng.choice([0.0, 0.01, 0.05])
    )


def fastest_by_accuracy(family: list[TriedVariant], link: Link) -> dict[float, float]:
    """By accuracy of a variant, the least seconds of any cut of the variants at least as accurate."""
    at = (link.up_bytes_per_s, link.down_bytes_per_s, link.rtt_s)
    least = [(tried.variant.accuracy, min(cut.seconds(*at) for cut in tried.cuts)) for tried in family if tried.cuts]
    return {floor: min(seconds for accuracy, seconds in least if accuracy >= floor) for floor, _ in least}
