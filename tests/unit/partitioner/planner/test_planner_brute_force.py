"""The planner against trying every cut, on random graphs: zero mismatches.

`EDGESPLIT_INSTANCES` says how many for the optimum (600 here, 10,000 in `make soak`), `EDGESPLIT_SEED` from which seed,
printed each run; a failure's text starts with the seed that made it, and from that seed on it is the first one tried.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence

import pytest

from edgesplit.errors import InfeasibleLimits
from edgesplit.plan import Conditions, Link, latency_s
from edgesplit_partitioner import Costs, PlanResult, plan
from support.brute_force import Tried, allowed_by_tiers, every_cut, fastest, random_costs

BATCHES = 12
PER_BATCH = max(50, int(os.environ.get("EDGESPLIT_INSTANCES", "500")) // BATCHES)
EXACT = 1e-9


def instances(batch: int, tiers: Sequence[float] = (0.0,)) -> Iterator[tuple[str, random.Random, Costs]]:
    """Seeded graphs of 1 to 12 layers, half of them with round numbers, where equals are common."""
    start = int(os.environ["EDGESPLIT_SEED"]) + batch * PER_BATCH
    for seed in range(start, start + PER_BATCH):
        rng = random.Random(seed)
        layers = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]) if seed % 10 == 0 else rng.randrange(1, 9)
        yield (
            f"seed {seed}, batch {batch}",
            rng,
            random_costs(rng, layers, round_numbers=seed % 2 == 0, tiers=rng.choice(tiers)),
        )


def some_link(rng: random.Random) -> Link:
    rate = [1e5, 1e6, 10 ** rng.uniform(3, 7)]
    return Link(up_bytes_per_s=rng.choice(rate), down_bytes_per_s=rng.choice(rate), rtt_s=rng.choice([0.0, 0.01, 0.05]))


def check_optimum(label: str, costs: Costs, link: Link, found: PlanResult, cuts: list[Tried]) -> None:
    """Best value, honest bound, and the right one among equals."""
    at = (link.up_bytes_per_s, link.down_bytes_per_s, link.rtt_s)
    best = fastest(cuts, *at)
    assert found.seconds == pytest.approx(best, rel=EXACT, abs=1e-15), label
    assert found.seconds == latency_s(found.row, Conditions(link=link)), label
    assert sum(found.split.values()) == pytest.approx(found.seconds, rel=EXACT), label
    assert found.certificate.lower_bound <= best * (1 + EXACT), label
    assert found.certificate.gap <= EXACT, label
    equal = [cut for cut in cuts if cut.seconds(*at) <= best * (1 + 1e-11) + 1e-16]
    rank = min(cut.rank(len(costs.layers)) for cut in equal)
    assert (found.bytes, len(found.cut["cloud"])) == rank, label


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_optimum_matches_brute_force_over_cuts(batch: int) -> None:
    """Same seconds, and of equals the same bytes and as much on the device; with layers bound to a tier too."""
    for label, rng, costs in instances(batch, (0.0, 0.1)):
        link = some_link(rng)
        cuts = [cut for cut in every_cut(costs) if allowed_by_tiers(costs, cut)]
        if not cuts:
            with pytest.raises(InfeasibleLimits):
                plan(costs, {"device-cloud": link})
            continue
        check_optimum(label, costs, link, plan(costs, {"device-cloud": link}), cuts)


@pytest.mark.parametrize("batch", range(2))
def test_the_table_is_best_at_every_bandwidth_and_round_trip(batch: int) -> None:
    """Choosing from the rows is as good as trying every cut, at 60 bandwidths and three round trips."""
    for label, rng, costs in instances(batch, (0.0, 0.15)):
        link = some_link(rng)
        cuts = [cut for cut in every_cut(costs) if allowed_by_tiers(costs, cut)]
        if not cuts:
            continue
        found = plan(costs, {"device-cloud": link})
        tried = {cut.on_device for cut in cuts}
        assert all(frozenset(row.layers) in tried for row in found.table.rows), label
        assert (found.table.local is not None) == (frozenset(layer.name for layer in costs.layers) in tried), label
        assert len({(row.layers, row.compress) for row in found.table.rows}) == len(found.table.rows), label
        for step in range(60):
            for rtt_s in (0.0, 0.02, 0.3):
                now = Link(up_bytes_per_s=10 ** (1 + step / 7.5), down_bytes_per_s=link.down_bytes_per_s, rtt_s=rtt_s)
                chosen = min(latency_s(row, Conditions(link=now)) for row in found.table.rows)
                best = fastest(cuts, now.up_bytes_per_s, now.down_bytes_per_s, rtt_s)
                assert chosen == pytest.approx(best, rel=1e-7, abs=1e-15), (label, now)


@pytest.mark.parametrize("batch", range(2))
def test_a_row_is_best_within_its_range(batch: int) -> None:
    """Inside a row's bandwidth range nothing in the table is faster; the ranges cover every bandwidth."""
    for label, rng, costs in instances(batch):
        link = some_link(rng)
        found = plan(costs, {"device-cloud": link})
        ranges = sorted(value for value in found.ranges.values() if value is not None)
        assert ranges[0][0] == 0.0 and ranges[-1][1] == float("inf"), label
        assert all(low[1] == pytest.approx(high[0]) for low, high in itertools.pairwise(ranges)), label
        for name, bounds in found.ranges.items():
            if bounds is None:
                continue
            inside = (max(bounds[0], 1e-3) * min(bounds[1], 1e12)) ** 0.5
            now = Conditions(link=Link(up_bytes_per_s=inside, down_bytes_per_s=link.down_bytes_per_s, rtt_s=link.rtt_s))
            best = min(latency_s(row, now) for row in found.table.rows)
            assert latency_s(found.table.row(name), now) == pytest.approx(best, rel=EXACT, abs=1e-15), label


@pytest.mark.parametrize("batch", range(2))
def test_limited_optimum_matches_brute_force_over_allowed_cuts(batch: int) -> None:
    """With the raw input or the first layers kept, the optimum is that of the cuts that keep them."""
    for label, rng, costs in instances(batch):
        link, first, raw = some_link(rng), rng.randrange(0, 4), rng.random() < 0.5
        kept = {layer.name for layer in costs.layers[:first]}
        kept |= {layer.name for layer in costs.layers if raw and not costs.raw.isdisjoint(layer.reads)}
        cuts = [cut for cut in every_cut(costs, ("raw",)) if kept <= cut.on_device]
        limits = {"keep_first": first, "keep_raw_input": raw}
        found = plan(costs, {"device-cloud": link}, limits=limits, codecs=("raw",))
        check_optimum(label, costs, link, found, cuts)
        if raw:
            assert not any(costs.raw.intersection(row.sends) for row in found.table.rows), label


@pytest.mark.parametrize("batch", range(2))
def test_a_forced_cut_keeps_the_layer_and_its_ancestors_local(batch: int) -> None:
    """Exactly these run on the device, and the table has that row and all-local alone."""
    for label, rng, costs in instances(batch):
        link, last = some_link(rng), rng.choice(costs.layers).name
        needed = min((cut.on_device for cut in every_cut(costs) if last in cut.on_device), key=len)
        found = plan(costs, {"device-cloud": link}, limits={"force": last})
        cuts = [cut for cut in every_cut(costs) if cut.on_device == needed]
        check_optimum(label, costs, link, found, cuts)
        everything = len(needed) == len(costs.layers)
        assert [row.is_local for row in found.table.rows] == ([True] if everything else [False, True]), label
        assert found.table.forced_row == found.row.name == found.table.rows[0].name, label
