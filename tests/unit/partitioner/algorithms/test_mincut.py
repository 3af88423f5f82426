"""The minimum cut beneath the planner: bounds, ties and numbers beyond integer capacities; and the lower envelope."""

from __future__ import annotations

import random

import numpy as np
import pytest

from edgesplit.limits import LIMITS
from edgesplit_partitioner import load_costs, plan
from edgesplit_partitioner.algorithms.lower_envelope import Line, explore, lower_envelope, thinned
from edgesplit_partitioner.algorithms.mincut import Capacities, FlowNetwork


def two_nodes() -> FlowNetwork:
    return FlowNetwork(2, np.array([0, 1]), np.array([1, 0]))


def charges(source: list[float], sink: list[float], arcs: list[float]) -> Capacities:
    return Capacities(np.array(source), np.array(sink), np.array(arcs))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9, 1e15])
def test_the_cut_is_independent_of_scale(scale: float) -> None:
    """Nanoseconds and years give the same cut with a bound at its value: nothing overflows, nothing rounds to 0."""
    cut = two_nodes().minimum(
        charges([9 * scale, 3 * scale], [scale, 7 * scale], [2 * scale, np.inf]), np.array([1, 1], bool)
    )
    assert cut.source_side.tolist() == [True, False]
    assert cut.lower_bound == pytest.approx(6 * scale, rel=1e-14)


def test_small_capacities_decide_beside_large_ones() -> None:
    """A difference far below one part in 2^31 of the total still decides."""
    base = 1e6
    for tiny, side in ((1e-4, True), (-1e-4, False)):
        found = two_nodes().minimum(charges([base + tiny, base], [base, base], [0.0, 0.0]), np.array([1, 1], bool))
        assert bool(found.source_side[0]) is side


@pytest.mark.parametrize("exact", [True, False])
def test_a_forbidden_arc_was_cut_where_the_known_cut_was_minimal(exact: bool) -> None:
    """With a power of two as its charge, that cut was scaled to the very capacity that stood for infinity."""
    only = np.array([1, 1], bool)
    found = two_nodes().minimum(charges([np.inf, 0.0], [0.5, 0.0], [0.0, np.inf]), only, exact=exact)
    assert found.source_side[0] and found.lower_bound == 0.5


def test_equal_cuts_are_decided_by_the_tie_charge() -> None:
    """Without a tie charge the wider source side is taken."""
    equal = charges([1.0, 1.0], [1.0, 1.0], [5.0, np.inf])
    known = np.array([1, 1], bool)
    assert two_nodes().minimum(equal, known).source_side.tolist() == [True, True]
    against = charges([0.0, 0.0], [0.1, 0.1], [0.0, 0.0])
    assert two_nodes().minimum(equal, known, against).source_side.tolist() == [False, False]


def test_a_deep_graph_is_solved_with_a_tight_gap() -> None:
    """Two thousand layers with skips: the gap is the rounding error of adding doubles."""
    rng = random.Random(7)
    layers = [
        {
            "name": f"l{i}",
            "reads": sorted({f"t{i}", f"t{rng.randrange(max(0, i - 4), i + 1)}"}),
            "writes": {f"t{i + 1}": {"bytes": rng.randrange(1, 10**6)}},
            "seconds": {"device": rng.random(), "cloud": rng.random() / 9},
        }
        for i in range(2000)
    ]
    costs = load_costs(
        {
            "model": "deep",
            "tiers": ["device", "cloud"],
            "inputs": {"t0": {"bytes": 10**8}},
            "outputs": ["t2000"],
            "layers": layers,
        }
    )
    found = plan(costs, {"device-cloud": {"up_bytes_per_s": 2e5, "down_bytes_per_s": 1e6, "rtt_s": 0.01}})
    assert 0 < len(found.cut["device"]) < 2000
    assert found.certificate.gap < 1e-12


def test_a_large_input_leaves_no_rounding_in_a_chain() -> None:
    """Nanoseconds after a million seconds: running sums once hid a thousandth of the answer, and of its bound."""
    link = {"up_bytes_per_s": 1.0, "down_bytes_per_s": 1.0, "rtt_s": 0.0}
    layer = {"name": "a", "reads": ["i"], "writes": {"t": {"bytes": 7}}, "seconds": {"device": 1.3e-9, "cloud": 0.0}}
    last = {"name": "b", "reads": ["t"], "writes": {"o": {"bytes": 1}}, "seconds": {"device": 0.0, "cloud": 0.0}}
    costs = load_costs(
        {
            "model": "chain",
            "tiers": ["device", "cloud"],
            "inputs": {"i": {"bytes": 1_234_567}},
            "outputs": ["o"],
            "layers": [layer, last],
        }
    )
    found = plan(costs, {"device-cloud": link})
    assert found.seconds == found.certificate.lower_bound == 1.3e-9


def lines(*pairs: tuple[float, float]) -> list[Line[int]]:
    return [Line(a, b, number) for number, (a, b) in enumerate(pairs)]


def test_the_lower_envelope_is_minimal_everywhere() -> None:
    """Random lines, equal and parallel ones among them, at many x."""
    rng = random.Random(3)
    for _ in range(300):
        some = lines(*((rng.randrange(9) / 4, rng.randrange(9)) for _ in range(rng.randrange(1, 9))))
        stretches = lower_envelope(some)
        assert stretches[0].start == 0.0 and stretches[-1].end == float("inf")
        for step in range(80):
            x = step / 20
            lowest = min(line.at(x) for line in some)
            here = [stretch.line.at(x) for stretch in stretches if stretch.start <= x <= stretch.end]
            assert here and all(height == pytest.approx(lowest, abs=1e-12) for height in here)


def test_of_equal_lines_the_first_is_kept() -> None:
    """A plan's own row stays in its table."""
    assert [stretch.line.item for stretch in lower_envelope(lines((1, 2), (1, 2), (9, 0)))] == [0, 2]


def test_exploring_k_lines_takes_2k_minus_1_evaluations() -> None:
    """Five lines take nine evaluations: the two ends, given already, and seven between."""
    some = lines((0, 16), (1, 8), (2.5, 4), (5, 2), (9, 0))
    asked = []

    def lowest(x: float, *near: Line[int]) -> Line[int]:
        asked.append(x)
        return min(some, key=lambda line: (line.at(x), line.b))

    assert [line.item for line in explore(lowest, some[0], some[4])] == [0, 1, 2, 3, 4]
    assert len(asked) == 7


def test_a_line_of_equal_slope_replaces_an_inexact_one() -> None:
    """Far out `lowest` may be off by more than the lines at x = 0 are apart; what it then misses is found nearer by."""
    steep, good, poor, flat = lines((1.0, 100.0), (1.000001, 99.0), (1.00001, 99.0), (900.0, 1.0))

    def lowest(x: float, *_: Line[int]) -> Line[int]:
        return poor if x > 1 else min((steep, good, flat), key=lambda line: line.at(x))

    assert good in explore(lowest, steep, flat)


def test_thinning_drops_the_least_costly_line() -> None:
    """The line that dips a little is dropped before the one that dips much; the ends stay."""
    some = lines((0, 16), (7.9, 7.9), (2, 2), (3, 0))
    assert [line.item for line in thinned(some, 3)] == [0, 2, 3]
    assert [line.item for line in thinned(some, 1)] == [0, 3]


def test_a_table_is_thinned_to_the_release_limit() -> None:
    """A chain with hundreds of good cuts keeps the most valuable ones, the best one and all-local among them."""
    layers = [
        {
            "name": f"l{i}",
            "reads": [f"t{i}"],
            "writes": {f"t{i + 1}": {"bytes": int(1e6 * 0.97 ** (i + 1))}},
            "seconds": {"device": 0.01 * 1.02**i, "cloud": 0.0},
        }
        for i in range(200)
    ]
    costs = load_costs(
        {
            "model": "wide",
            "tiers": ["device", "cloud"],
            "inputs": {"t0": {"bytes": 10**6}},
            "outputs": ["t200"],
            "layers": layers,
        }
    )
    found = plan(costs, {"device-cloud": {"up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6, "rtt_s": 0.0}})
    assert LIMITS.rows - 3 <= len(found.table.rows) <= LIMITS.rows
    assert found.row in found.table.rows and found.table.local is not None
