"""Families: random ones against trying every (variant, cut, codec), and the ladder of five models on traces of a link.

The ladder is five image classifiers of one task (../shared/models). Which photographs each gets right is measured; the
seconds are predicted, for a board and for the cloud, and the agent's own row selection is replayed on each trace in
virtual time (`policy_replay`): the family with objective accuracy, beside each variant as a model of its own, at a
deadline. Then once more with a floor.
"""

from __future__ import annotations

import os
import random
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from ladder_costs import RUNGS, Rung, median_frame_bytes, rung, variant_of
from record import Target, finish, make_parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from policy_replay import Adaptive, Outcome, Scenario, replay

from edgesplit.bandwidth_trace import read_uplink_trace
from edgesplit.plan import Conditions, Link, Plan, choose_row, latency_s
from edgesplit.variant_choice import above_floor, for_deadline
from edgesplit_partitioner import plan
from edgesplit_partitioner.planner.family import plan_family
from support.families import fastest_by_accuracy, random_family, random_link

BOARDS = ("raspberrypi3b+", "raspberrypi4")
DEADLINES_S = (0.06, 0.1, 0.15)
FLOOR = 0.6
RTT_S = 0.03
DOWN_BYTES_PER_S = 2.5e6
PERIOD_S = 0.5
REQUESTS = 1_000
TRACES = Path(__file__).parent / "traces"


# ---- random families ----------------------------------------------------------------------------------------------


def mismatches_of(seed: int) -> int:
    """Number of choices of a random family that brute force makes better, over floors, links and deadlines."""
    rng = random.Random(seed)
    family, link = random_family(rng), random_link(rng)
    if not any(tried.cuts for tried in family):
        return 0
    table = plan_family("random@1", [tried.variant for tried in family], {"device-cloud": link}).table
    wrong = 0
    for rate in (1e2, 1e4, 3e4, 1e5, 1e6, 1e8):
        at = Link(up_bytes_per_s=rate, down_bytes_per_s=link.down_bytes_per_s, rtt_s=rng.choice([0.0, 0.02]))
        now, best = Conditions(link=at), fastest_by_accuracy(family, at)
        for floor, seconds in best.items():
            wrong += not _is_as_good(above_floor(table, floor), now, seconds, floor)
        deadline_s = rng.choice([*best.values()]) * rng.uniform(0.5, 2.0) + 1e-4
        in_time = [accuracy for accuracy, seconds in best.items() if seconds <= deadline_s]
        if in_time:
            wrong += not _is_as_good(for_deadline(table, now, deadline_s), now, best[max(in_time)], max(in_time))
    return wrong


def _is_as_good(allowed: Plan, now: Conditions, seconds: float, accuracy: float) -> bool:
    """Whether the row chosen of these is as fast as brute force's, and as accurate as asked for."""
    row = choose_row(allowed, now)
    return row is not None and (row.accuracy or 0.0) >= accuracy and latency_s(row, now) <= seconds * (1 + 1e-7) + 1e-12


def random_families(count: int, first_seed: int, processes: int) -> tuple[int, float]:
    """Families with a mismatch, and processor seconds of all processes."""
    with ProcessPoolExecutor(processes) as pool:
        wrong = list(pool.map(mismatches_of, range(first_seed, first_seed + count), chunksize=20))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(map(bool, wrong)), used.ru_utime + used.ru_stime


# ---- the ladder ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What one way of answering comes to on one board, trace and deadline."""

    board: str
    trace: str
    deadline_s: float
    way: str
    """`family`, `family, floor` or a variant's name."""
    accuracy: float
    """Share of the requests whose answer is right."""
    late: int
    """Requests without an answer by the deadline."""
    answered_below_floor: int
    switches: int
    """Changes of the variant from one answer to the next."""
    by_variant: dict[str, int]


def cell(scene: Scenario, way: str, board: str, rungs: Mapping[str, Rung], floor: float) -> Cell:
    """Replay a table's requests and judge each answer by its variant's on that photograph."""
    outcomes = replay(scene, Adaptive(hedge_ratio=1.0))
    names = [_variant_of_answer(scene.plan, outcome, way) for outcome in outcomes]
    right = sum(
        bool(name) and rungs[name].is_right[number % len(rungs[name].is_right)] for number, name in enumerate(names)
    )
    answered = [name for name in names if name]
    return Cell(
        board, scene.trace.name, scene.deadline_s, way, right / len(outcomes),
        sum(not outcome.in_time for outcome in outcomes), sum(rungs[name].accuracy < floor for name in answered),
        sum(one != other for one, other in pairwise(answered)),
        {name: answered.count(name) for name in rungs if name in answered},
    )  # fmt: skip


def _variant_of_answer(table: Plan, outcome: Outcome, way: str) -> str:
    """Variant that gave an answer; empty where there is none."""
    return (table.row(outcome.answered_by).variant or way) if outcome.answered_by else ""


def ladder_cells(rungs: Mapping[str, Rung], frame_bytes: int, requests: int) -> Iterator[Cell]:
    """Every board, trace and deadline: the family, the family with a floor, and each variant alone."""
    for board in BOARDS:
        variants = [variant_of(rung, board, frame_bytes) for rung in rungs.values()]
        link = Link(up_bytes_per_s=1e6, down_bytes_per_s=DOWN_BYTES_PER_S, rtt_s=RTT_S)
        links = {"device-cloud": link}
        tables = {"family": plan_family("ladder@1", variants, links).table}
        tables["family, floor"] = plan_family("ladder@1", variants, links, least_accuracy=FLOOR).table
        tables |= {variant.name: plan(variant.costs, links).table for variant in variants}
        for path in sorted(TRACES.glob("*.up")):
            trace = read_uplink_trace(path)
            for deadline_s in DEADLINES_S:
                for way, table in tables.items():
                    scene = Scenario(table, trace, requests, PERIOD_S, deadline_s=deadline_s)
                    yield cell(scene, way, board, rungs, FLOOR if way == "family, floor" else 0.0)


def compare(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """By board and deadline, over all traces: the family's mean accuracy beside that of the best single variant that
    misses no more deadlines, and by trace how far ahead of the best such variant there."""
    lines = []
    for board in BOARDS:
        for deadline_s in DEADLINES_S:
            here = [cell for cell in cells if (cell.board, cell.deadline_s) == (board, deadline_s)]
            family = [cell for cell in here if cell.way == "family"]
            late = sum(cell.late for cell in family)
            alone = {name: [cell for cell in here if cell.way == name] for name in RUNGS}
            means = {
                name: fmean(cell.accuracy for cell in own)
                for name, own in alone.items() if sum(cell.late for cell in own) <= late
            }  # fmt: skip
            best = max(means, key=lambda name: means[name], default="")
            lines.append({
                "board": board, "deadline_s": deadline_s, "accuracy": fmean(cell.accuracy for cell in family),
                "late": late, "switches": sum(cell.switches for cell in family), "best_single": best,
                "its_accuracy": means.get(best), "ahead_by_trace": {cell.trace: _ahead(cell, here) for cell in family},
            })  # fmt: skip
    return lines


def _ahead(family: Cell, here: Sequence[Cell]) -> float | None:
    """How much more accurate than the best single variant that misses no more deadlines on the same trace."""
    rivals = [
        cell.accuracy for cell in here
        if cell.trace == family.trace and cell.way in RUNGS and cell.late <= family.late
    ]  # fmt: skip
    return family.accuracy - max(rivals) if rivals else None


def _print_comparison(lines: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        single = f"{line['best_single']} {line['its_accuracy']:.1%}" if line["best_single"] else "none misses so few"
        ahead = ", ".join(
            f"{trace} {'-' if by is None else f'{by * 100:+.1f}'}" for trace, by in line["ahead_by_trace"].items()
        )
        print(
            f"{line['board']:15} {line['deadline_s'] * 1e3:4.0f} ms: family {line['accuracy']:.1%},"
            f" {line['late']} late, {line['switches']} switches; single: {single}; ahead by trace, points: {ahead}"
        )


def main() -> int:
    """Try, replay, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--families", type=int, default=10_000, help="random families to try [10000]")
    parser.add_argument("--seed", type=int, default=0, help="of the first random family [0]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="for the random families [cores]")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"per replay [{REQUESTS}]")
    options = parser.parse_args()
    tried = options.families
    wrong, processor_s = random_families(tried, options.seed, options.processes)
    print(
        f"{tried} random families from seed {options.seed}: {wrong} with a mismatch; {processor_s:.0f} s of processor"
        " time",
        flush=True,
    )
    fewer = (f"10,000 families (asked for {tried})",) if tried < 10_000 else ()
    targets = [Target("family.random_families_with_a_mismatch", wrong, 0.0, left_out=fewer)]
    results: dict[str, Any] = {"families": tried, "seed": options.seed, "mismatches": wrong, "processor_s": processor_s}
    missing = [model.path for model in RUNGS.values() if not model.path.is_file()]
    left_out = tuple(f"{path.name} (not in {path.parent})" for path in missing)
    cells: list[Cell] = []
    ahead: list[float] = []
    if not missing:
        rungs = {name: rung(name) for name in RUNGS}
        for one in rungs.values():
            print(f"{one.name:12} {one.accuracy:6.1%} of {len(one.is_right)} photographs", flush=True)
        frame_bytes = median_frame_bytes()
        cells = list(ladder_cells(rungs, frame_bytes, options.requests))
        lines = compare(cells)
        _print_comparison(lines)
        ahead = [line["accuracy"] - line["its_accuracy"] for line in lines if line["best_single"]]
        results |= {
            "frame_bytes": frame_bytes, "accuracies": {name: one.accuracy for name, one in rungs.items()},
            "compared": lines, "cells": [asdict(one) for one in cells],
        }  # fmt: skip
    below = sum(one.answered_below_floor for one in cells) if cells else None
    targets += [
        Target(
            "family.ahead_of_single_variants.least", min(ahead, default=None), 0.0, at_least=True, left_out=left_out
        ),
        Target(
            "family.ahead_of_single_variants.most", max(ahead, default=None), 0.01, at_least=True, left_out=left_out
        ),
        Target("family.answers_below_the_floor", below, 0.0, left_out=left_out),
    ]
    finish(results, targets, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
