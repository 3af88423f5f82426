"""Families against trying every (variant, cut, codec), on random families: zero mismatches.

`EDGESPLIT_INSTANCES` says how many (100 here; `bench/family.py` tries 10,000), `EDGESPLIT_SEED` from which seed; a
failure's text starts with it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from edgesplit.errors import InfeasibleLimits
from edgesplit.limits import LIMITS
from edgesplit.plan import Conditions, Link, choose_row, latency_s
from edgesplit.variant_choice import above_floor, for_deadline
from edgesplit_partitioner.planner.family import FamilyResult, plan_family
from support.families import TriedVariant, fastest_by_accuracy, random_family, random_link

BATCHES = 4
PER_BATCH = max(25, int(os.environ.get("EDGESPLIT_INSTANCES", "100")) // BATCHES)
EXACT = 1e-9


def planned_families(
    batch: int, **options: object
) -> Iterator[tuple[str, random.Random, list[TriedVariant], Link, FamilyResult]]:
    """Seeded random families with their plans; those of which no cut is allowed are left out."""
    start = int(os.environ["EDGESPLIT_SEED"]) + batch * PER_BATCH
    for seed in range(start, start + PER_BATCH):
        rng = random.Random(seed)
        family, link = random_family(rng), random_link(rng)
        if not any(tried.cuts for tried in family):
            continue
        found = plan_family("birds@1", [tried.variant for tried in family], {"device-cloud": link}, **options)  # type: ignore[arg-type]
        yield f"seed {seed}, batch {batch}", rng, family, link, found


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_frontier_matches_brute_force(batch: int) -> None:
    """For each accuracy, the least seconds of any cut of any variant at least as accurate, with an honest bound."""
    for label, _, family, link, found in planned_families(batch):
        best = fastest_by_accuracy(family, link)
        assert found.frontier[0].accuracy == max(best), label
        for floor, seconds in best.items():
            point = min((point for point in found.frontier if point.accuracy >= floor), key=lambda point: point.value)
            assert point.seconds == pytest.approx(seconds, rel=EXACT, abs=1e-15), (label, floor)
            assert point.lower_bound <= seconds * (1 + EXACT), (label, floor)
            assert latency_s(found.table.row(point.row), Conditions(link=link)) == pytest.approx(point.seconds), label


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_table_has_the_best_for_every_floor_and_link(batch: int) -> None:
    """Choosing from the rows above a floor is as good as trying everything, at 12 bandwidths and two round trips."""
    for label, _, family, link, found in planned_families(batch):
        table = found.table
        assert len(table.rows) <= LIMITS.rows, label
        assert len({row.name for row in table.rows}) == len(table.rows), label
        for step in range(12):
            for rtt_s in (0.0, 0.05):
                at = Link(up_bytes_per_s=10 ** (1 + step / 1.5), down_bytes_per_s=link.down_bytes_per_s, rtt_s=rtt_s)
                now = Conditions(link=at)
                for floor, seconds in fastest_by_accuracy(family, at).items():
                    chosen = choose_row(above_floor(table, floor), now)
                    assert chosen is not None and (chosen.accuracy or 0.0) >= floor, (label, at, floor)
                    assert latency_s(chosen, now) == pytest.approx(seconds, rel=1e-7, abs=1e-15), (label, at, floor)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_most_accurate_in_time_matches_brute_force(batch: int) -> None:
    """At any link and deadline, objective accuracy takes the accuracy that brute force finds, and its fastest cut."""
    for label, rng, family, link, found in planned_families(batch):
        for _ in range(20):
            at = Link(
                up_bytes_per_s=10 ** rng.uniform(2, 8), down_bytes_per_s=link.down_bytes_per_s,
                rtt_s=rng.choice([0.0, 0.02]),
            )  # fmt: skip
            best, now = fastest_by_accuracy(family, at), Conditions(link=at)
            # A deadline between the seconds of two accuracies, so that rounding decides nothing.
            deadline_s = rng.choice([*best.values()]) * rng.uniform(0.5, 2.0) + 1e-4
            in_time = [accuracy for accuracy, seconds in best.items() if seconds <= deadline_s]
            wanted = max(in_time) if in_time else None
            chosen = choose_row(for_deadline(found.table, now, deadline_s), now)
            assert chosen is not None, label
            expected_s = best[wanted] if wanted is not None else min(best.values())
            assert latency_s(chosen, now) == pytest.approx(expected_s, rel=1e-7, abs=1e-15), (label, at, deadline_s)
            if wanted is not None:
                assert chosen.accuracy == wanted, (label, at, deadline_s)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_certificate_proves_the_choice_under_a_deadline(batch: int) -> None:
    """The best is the most accurate that brute force finds in time; every more accurate variant's bound is beyond the
    deadline; with none in time it is refused."""
    for label, rng, family, link, _found in planned_families(batch):
        best = fastest_by_accuracy(family, link)
        deadline_s = rng.choice([*best.values()]) * rng.uniform(0.5, 2.0) + 1e-4
        variants = [tried.variant for tried in family]
        limited = plan_family("birds@1", variants, {"device-cloud": link}, limits={"deadline_s": deadline_s})
        in_time = [accuracy for accuracy, seconds in best.items() if seconds <= deadline_s]
        if not in_time:
            with pytest.raises(InfeasibleLimits, match="the fastest"):
                assert limited.best
            continue
        chosen, proof = limited.best, limited.certificate
        assert chosen.accuracy == max(in_time), label
        assert chosen.seconds == pytest.approx(best[max(in_time)], rel=EXACT, abs=1e-15), label
        assert proof.lower_bound <= chosen.value and proof.gap <= EXACT, label
        assert proof.more_accurate_s is None or proof.more_accurate_s > deadline_s, label
