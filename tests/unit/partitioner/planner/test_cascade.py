"""Cascades at planning: prices against sums over every request, and which pair is chosen or refused."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Conditions, Link, Power, Row, energy_j, latency_s, stages_s
from edgesplit_partitioner.formulation.tiers import VaryingLink, parse_links
from edgesplit_partitioner.planner.cascade import PlannedLinks, cascade_figures
from edgesplit_partitioner.planner.cascade_calibration import (
    CLASS_SCORES,
    CascadeRequest,
    FamilyAnswers,
    VariantAnswers,
)
from edgesplit_partitioner.planner.family import FamilyResult, Variant, plan_family
from unit.partitioner.planner.test_family import LARGE, LINKS, MIDDLE, SMALL, chain

COUNT = 400
POWER = Power(idle_watts=2.0, busy_watts=5.0, radio_watts=1.0, up_joules_per_byte=1e-7, wake_joules=0.01)
REQUEST = CascadeRequest(changed=0.02)


def answers(*names: str, seed: int = 1, count: int = COUNT) -> FamilyAnswers:
    """Each variant is right where a frame is no harder than it can see, and as sure as the frame is easy."""
    rng = random.Random(seed)
    difficulty = [rng.random() for _ in range(count)]
    truth = tuple(rng.randrange(5) for _ in range(count))
    reach = {"small": 0.6, "middle": 0.75, "large": 0.9}

    def given(name: str) -> VariantAnswers:
        labels = tuple(
            label if hard < reach[name] else (label + 1 + len(name)) % 5
            for hard, label in zip(difficulty, truth, strict=True)
        )
        sure: tuple[float | None, ...] = tuple(1.0 - hard for hard in difficulty)
        kinds: tuple[str, ...] = CLASS_SCORES
        return VariantAnswers(labels=labels, scores=dict.fromkeys(kinds, sure))

    return FamilyAnswers(answer="class:scores", truth=truth, variants={name: given(name) for name in names})


def planned(*variants: Variant, request: CascadeRequest = REQUEST, count: int = COUNT, **options: Any) -> FamilyResult:
    given = answers(*(variant.name for variant in variants), count=count)
    return plan_family("birds@1", variants, LINKS, cascade=request, answers=given, **options)


def brute_force(first: Row, second: Row, link: VaryingLink, escalated: int, audits: int, of: int) -> dict[str, float]:
    """Sums over every request, each at every moment of the link: `escalated` of `of`, of the others `audits`."""
    rates = link.up_bytes_per_s
    assert isinstance(rates, tuple) and isinstance(link.down_bytes_per_s, float)
    late, joules, runs, up_bytes, stages = list[float](), 0.0, 0, 0, [0.0] * 4
    for request in range(of):
        for rate in rates:
            now = Conditions(link=Link(up_bytes_per_s=rate, down_bytes_per_s=link.down_bytes_per_s, rtt_s=link.rtt_s))
            both = request < escalated
            late.append(latency_s(first, now) + (latency_s(second, now) if both else 0.0))
            asks = both or request < escalated + audits
            joules += energy_j(first, now, POWER) + (energy_j(second, now, POWER) if asks else 0.0)
            runs += asks and not second.is_local
            up_bytes += second.up_bytes if asks else 0
            for place, seconds in enumerate(stages_s(first, now)):
                stages[place] += seconds
            for place, seconds in enumerate(stages_s(second, now) if asks else ()):
                stages[place] += seconds
    total = len(late)
    ordered = sorted(late)
    return {
        "seconds": sum(late) / total, "p95_s": ordered[-(-95 * total // 100) - 1], "joules": joules / total,
        "server_runs": runs / total, "up_bytes": up_bytes / total, "slowest_stage_s": max(stages) / total,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_prices_are_sums_over_every_request(seed: int) -> None:
    """Random rows and shares on a link that varies: the mean, the p95, joules, bytes, runs and the slowest stage."""
    rng = random.Random(seed)
    first = Row(name="small:local", device=("a",), device_s=rng.uniform(0.01, 0.1), device_joules=rng.random())
    remote = rng.random() < 0.8
    second = Row(
        name="large:cut-1", device=("b",), remote=("c",) if remote else (), device_s=rng.uniform(0, 0.3),
        device_joules=rng.random(), up_bytes=rng.randrange(1, 90_000) if remote else 0,
        down_bytes=500 if remote else 0, remote_s=rng.uniform(0, 0.2) if remote else 0.0,
    )  # fmt: skip
    link = VaryingLink(
        up_bytes_per_s=tuple(10 ** rng.uniform(5, 7) for _ in range(10)), down_bytes_per_s=1e6, rtt_s=0.02
    )
    chain_ = parse_links(SMALL.costs, {"device-cloud": link})
    links = PlannedLinks(chain_.mean, chain_.links)
    of = 200
    escalated = rng.choice([0, 4, 9, 10, 11, 30, 120, 200])
    audits = rng.randrange(of - escalated + 1)
    share = audits / (of - escalated) if escalated < of else 0.0
    figures = cascade_figures(first, second, escalated / of, share, links, POWER)
    expected = brute_force(first, second, link, escalated, audits, of)
    actual = msgspec.structs.asdict(figures)
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=1e-9), (seed, name)


def test_the_cascade_is_offered_beside_the_familys_choice() -> None:
    """Whatever its second one is, the table contains the first one's local row and the second one's rows; the sentences
    say what stays, what is promised and what it gains."""
    result = planned(SMALL, LARGE, objective="energy")
    cascade = result.cascade
    assert cascade is not None and (cascade.cascade.first, cascade.cascade.second) == ("small", "large")
    assert cascade.cascade.answer == "class:scores" and cascade.cascade.changed.at_most == 0.02
    assert cascade.first_row == "small:local" and cascade.tested == 1
    assert cascade.text.endswith("stay here; at most 2 % of answers differ (90 % sure, 400 samples)")
    assert result.table.cascade == cascade.cascade
    names = [row.name for row in result.table.rows]
    assert "small:local" in names and cascade.second_row in names
    assert "gain on the planned link" in cascade.gain_text and " J " in cascade.gain_text
    assert result.to_builtins()["cascade"]["way"]["figures"]["server_runs"] < 1.0
    assert plan_family("birds@1", [SMALL, LARGE], LINKS).table.cascade is None


def test_the_share_that_stays_is_that_of_the_samples() -> None:
    """The small one is right on 60 % of the frames and wrong on the next, which the large one gets: so 60 % stay, and
    as many more as may differ; the large one's last tenth is wrong for both."""
    cascade = planned(SMALL, LARGE).cascade
    assert cascade is not None
    assert 0.5 < 1.0 - cascade.cascade.escalated < 0.7
    assert 0.95 > cascade.way.accuracy > cascade.least_accuracy > 0.8
    assert cascade.cascade.changed.differing <= 0.02 * COUNT


def test_several_pairs_and_scores_divide_the_certainty() -> None:
    """Three variants are three pairs, and two scores make them six; a named pair with one score is one."""
    several = CascadeRequest(changed=0.05, scores=("margin", "entropy"))
    cascade = planned(SMALL, MIDDLE, LARGE, request=several).cascade
    assert cascade is not None and cascade.tested == 6 and len(cascade.tried) == 6
    assert cascade.cascade.second == "large"  # with objective accuracy the most accurate one is asked
    named = msgspec.structs.replace(several, scores=("margin",), variants=("small", "middle"))
    alone = planned(SMALL, MIDDLE, LARGE, request=named).cascade
    assert alone is not None and alone.tested == 1 and alone.cascade.second == "middle"
    fewer = {(one.first, one.second): one.stays for one in cascade.tried if one.score == "margin"}
    assert fewer["small", "middle"] <= alone.tried[0].stays


def test_too_few_samples_say_how_many_it_takes() -> None:
    """114 for 2 %; for three pairs more, and the error says that one alone would take 114."""
    with pytest.raises(InfeasibleLimits, match=r"60 samples are too few.*it takes at least 114"):
        _ = planned(SMALL, LARGE, count=60).cascade
    with pytest.raises(InfeasibleLimits, match=r"for which it takes 114 \(3 are tried\)"):
        _ = planned(SMALL, MIDDLE, LARGE, count=120).cascade


def test_where_nothing_stays_it_is_said() -> None:
    """A small one whose surest answers are wrong, on so few samples that none may differ."""
    given = answers("small", "large", count=120)
    lying = VariantAnswers(
        labels=tuple((label + 1) % 5 for label in given.truth), scores=given.variants["small"].scores
    )
    wrong = msgspec.structs.replace(given, variants={**given.variants, "small": lying})
    result = plan_family("birds@1", [SMALL, LARGE], LINKS, cascade=REQUEST, answers=wrong)
    with pytest.raises(InfeasibleLimits, match="no frame stays here"):
        _ = result.cascade


def test_everything_may_stay() -> None:
    """Variants that never differ: no frame seen is escalated, and the p95 is the first one's."""
    given = answers("small", "large")
    same = msgspec.structs.replace(given, variants=dict.fromkeys(given.variants, given.variants["large"]))
    cascade = plan_family("birds@1", [SMALL, LARGE], LINKS, cascade=REQUEST, answers=same).cascade
    assert cascade is not None and cascade.cascade.escalated == 0.0
    assert cascade.way.figures.p95_s == cascade.sure_s == pytest.approx(0.03)
    assert cascade.way.figures.server_runs == pytest.approx(0.01)  # the audits


def test_the_floor_is_that_of_the_cascade() -> None:
    """The small one is below the floor and still answers first; its other rows are not in the table."""
    result = planned(SMALL, LARGE, least_accuracy=0.8)
    assert result.cascade is not None and result.cascade.way.accuracy >= 0.8
    assert [row.name for row in result.table.rows if row.variant == "small"] == ["small:local"]
    assert set(result.plans) == {"large"}
    with pytest.raises(InfeasibleLimits, match=r"below the floor of 90\.0%"):
        strict = CascadeRequest(changed=0.2)
        _ = planned(SMALL, LARGE, request=strict, least_accuracy=0.9).cascade


def test_a_deadline_holds_for_the_escalated_requests() -> None:
    """30 ms here and 94 ms for the large one after it; 100 ms are too few for both."""
    assert planned(SMALL, LARGE, limits={"deadline_s": 0.2}).cascade is not None
    with pytest.raises(InfeasibleLimits, match="takes up to 124 ms, the deadline is 100 ms"):
        _ = planned(SMALL, LARGE, limits={"deadline_s": 0.1}).cascade


def test_a_frame_that_may_not_leave_is_escalated_by_a_cut() -> None:
    """With keep_raw_input the boundary is sent; where the large one can run on the server alone the limit is named."""
    cascade = planned(SMALL, LARGE, limits={"keep_raw_input": True}).cascade
    assert cascade is not None and "sends h" in cascade.escalation
    far = Variant("large", chain(0.9, 0.03, on_device=False), 0.9)
    with pytest.raises(InfeasibleLimits, match=r"large cannot be the second of a cascade .*keep_raw_input"):
        request = CascadeRequest(changed=0.02, variants=("small", "large"))
        _ = planned(SMALL, far, request=request, limits={"keep_raw_input": True}).cascade


def test_what_cannot_be_asked_is_refused() -> None:
    """Each with what to do."""
    for request, words in (
        (CascadeRequest(changed=0.0), "allowed share of 0"),
        (CascadeRequest(changed=0.02, certainty=1.0), "samples cannot give a certainty of 100 %"),
        (CascadeRequest(changed=0.02, audit_share=2.0), "audit share of 2"),
        (CascadeRequest(changed=0.02, scores=("boxes",)), "no score boxes.*margin"),
        (CascadeRequest(changed=0.02, scores=("margin", "margin")), "named twice"),
        (CascadeRequest(changed=0.02, variants=("large", "small")), "small .* is not more accurate than large"),
        (CascadeRequest(changed=0.02, variants=("small", "huge")), "no variant huge, only small, large"),
    ):
        with pytest.raises(UsageError, match=words):
            _ = planned(SMALL, LARGE, request=request).cascade
    slower = Variant("small", chain(2.0, 0.1), 0.6)
    with pytest.raises(UsageError, match="nothing to ask second"):
        _ = planned(slower, LARGE).cascade
    nowhere = Variant("small", chain(0.03, 0.002, on_device=False), 0.6)
    with pytest.raises(InfeasibleLimits, match="small has no row on the device alone"):
        request = CascadeRequest(changed=0.02, variants=("small", "large"))
        _ = planned(nowhere, LARGE, request=request).cascade
    with pytest.raises(UsageError, match="answers to its samples"):
        _ = plan_family("birds@1", [SMALL, LARGE], LINKS, cascade=REQUEST).cascade


def test_a_first_one_below_the_floor_counts_in_memory() -> None:
    """1 and 12 MB: 12.5 hold the large one alone, so that the small one cannot be first."""
    limits = {"memory_bytes": 12.5e6}
    with pytest.raises(UsageError, match="does not fit into the device's memory beside the others"):
        _ = planned(SMALL, LARGE, least_accuracy=0.8, limits=limits).cascade
    assert planned(SMALL, LARGE, least_accuracy=0.8, limits={"memory_bytes": 14e6}).cascade is not None
