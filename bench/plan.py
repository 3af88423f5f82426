"""How long planning takes: from loaded costs to a finished plan, graph building included.

Chains, chains with skips, and graphs with several inputs, shared tensors and branches, several seeds of each, on three
links; every tensor measured compressed too, so that each plan weighs both ways of sending. Each plan and table is made
anew `REPEATS` times and the least counts, since others use the machine too. `choose`, and what the agent decides by it
(races, budgets, stance), are timed over the tables found.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from record import Target, finish, make_parser, percentile

from edgesplit.links import LINKS
from edgesplit.plan import Conditions, Link, Power, choose_row
from edgesplit_agent.policy.link_estimator import LinkEstimate
from edgesplit_agent.policy.row_selection import HeldRow, SelectionContext, select_row
from edgesplit_agent.power.mode import PowerMode
from edgesplit_partitioner import Costs, PlanResult, load_costs, plan

SHAPES = ("chain", "skips", "branches")
TARGETS_MS = {100: 5.0, 1_000: 50.0, 10_000: 500.0}
TABLE_MS, THREE_TIERS_MS, CHOOSE_US = 200.0, 100.0, 50.0
SEEDS = {100: 12, 1_000: 8, 10_000: 3}
REPEATS = 3
LAN = Link(up_bytes_per_s=1.25e8, down_bytes_per_s=1.25e8, rtt_s=0.002, name="lan")


def layer_graph(shape: str, layers: int, seed: int) -> Costs:
    """Costs of a random model of that shape on three tiers."""
    rng = random.Random(f"{shape} {layers} {seed}")
    inputs = {f"in{i}": _tensor(rng) for i in range(1 if shape != "branches" else 3)}
    known, rows = list(inputs), []
    for i in range(layers):
        writes = {f"t{i}": _tensor(rng)}
        device_s = rng.lognormvariate(-6, 1)
        seconds = {"device": device_s, "edge": device_s / rng.uniform(2, 6), "cloud": device_s / rng.uniform(5, 30)}
        rows.append({"name": f"l{i}", "reads": _reads(shape, rng, known), "writes": writes, "seconds": seconds})
        known = [*known[-7:], *writes]
    outputs = [f"t{layers - 1}"]
    return load_costs(
        {
            "model": f"{shape}-{layers}-{seed}",
            "tiers": ["device", "edge", "cloud"],
            "inputs": inputs,
            "outputs": outputs,
            "layers": rows,
        }
    )


def _reads(shape: str, rng: random.Random, known: list[str]) -> list[str]:
    """Inputs of a new layer: the latest tensor; with skips also some before it; with branches any of the latest
    eight."""
    if shape == "chain":
        return known[-1:]
    if shape == "skips":
        return sorted({known[-1], *rng.sample(known, min(len(known), rng.choice([0, 0, 1, 2])))})
    return rng.sample(known, min(len(known), rng.choice([1, 1, 2, 3])))


def _tensor(rng: random.Random) -> dict[str, Any]:
    size = rng.randrange(1_000, 1_000_000)
    spent = {
        "encode_s": {"device": size / 1e8, "edge": size / 1e9},
        "decode_s": {"edge": size / 1e9, "cloud": size / 1e9},
    }
    return {"bytes": size, "codecs": {"raw+zstd": {"bytes": int(size * rng.uniform(0.2, 1.0)), **spent}}}


def timed_ms(call: Callable[[], PlanResult]) -> tuple[float, PlanResult]:
    """Milliseconds of a call, the least of several, and the plan that it returned; garbage is collected before each."""
    took = []
    for _ in range(REPEATS):
        gc.collect()
        start = time.perf_counter()
        result = call()
        took.append((time.perf_counter() - start) * 1e3)
    return min(took), result


def table_ms_of(costs: Costs, link: Link) -> float:
    """Milliseconds that the switching table takes after the plan, the least of several."""
    took = []
    for _ in range(REPEATS):
        result = plan(costs, {"device-cloud": link})
        start = time.perf_counter()
        assert result.table.rows
        took.append((time.perf_counter() - start) * 1e3)
    return min(took)


def cases(layers: int) -> Iterator[tuple[str, Costs, Link]]:
    """Costs of every model of a size, with every link."""
    for shape in SHAPES:
        for seed in range(SEEDS[layers]):
            costs = layer_graph(shape, layers, seed)
            for link in LINKS.values():
                yield shape, costs, link


def measure() -> tuple[dict[str, Any], list[Target]]:
    """All figures, in milliseconds unless their name has another unit."""
    plan(layer_graph("branches", 50, 0), {"device-cloud": LINKS["lte"]})  # imports and caches
    results: dict[str, Any] = {}
    targets = []
    tables: list[PlanResult] = []
    table_ms: list[float] = []
    for layers, most in TARGETS_MS.items():
        took: dict[str, list[float]] = {}
        for shape, costs, link in cases(layers):
            ms, result = timed_ms(partial(plan, costs, {"device-cloud": link}))
            took.setdefault(shape, []).append(ms)
            if layers == 1_000:
                table_ms.append(table_ms_of(costs, link))
                tables.append(result)
        results[f"plan_{layers}"] = {shape: _summary(ms) for shape, ms in took.items()}
        every = [ms for some in took.values() for ms in some]
        targets.append(Target(f"plan p95 ms at {layers} layers", percentile(every, 0.95), most))
    results["table_1000"] = _summary(table_ms) | {"rows": sorted(len(made.table.rows) for made in tables)}
    results["regret_1000"] = _summary([result.regret for result in tables])
    targets.append(Target("switching table p95 ms at 1000 layers", percentile(table_ms, 0.95), TABLE_MS))
    three_ms = [
        timed_ms(partial(plan, costs, {"device-edge": link, "edge-cloud": LAN}))[0] for _, costs, link in cases(1_000)
    ]
    results["three_tiers_1000"] = _summary(three_ms)
    targets.append(Target("three tiers p95 ms at 1000 layers", percentile(three_ms, 0.95), THREE_TIERS_MS))
    choose_us = [_choose_us(made) for made in tables]
    results["choose_us"] = _summary(choose_us)
    targets.append(Target("choose p95 us", percentile(choose_us, 0.95), CHOOSE_US))
    for name, stance in (("racing", PowerMode()), ("saver", PowerMode("saver")), ("budget", PowerMode(watts=5.0))):
        decide_us = [_decide_us(made, stance) for made in tables]
        results[f"decide_{name}_us"] = _summary(decide_us)
        targets.append(Target(f"one decision, {name}: median us", percentile(decide_us, 0.5), CHOOSE_US))
    return results, targets


def _choose_us(result: PlanResult) -> float:
    """Microseconds of one row selection from a plan's table, the mean of many at changing bandwidths."""
    table = result.table
    conditions_by_rate = [
        Conditions(link=Link(up_bytes_per_s=10 ** (3 + i / 25), down_bytes_per_s=1e6, rtt_s=0.02)) for i in range(100)
    ]
    start = time.perf_counter()
    for conditions in conditions_by_rate:
        choose_row(table, conditions, table.rows[0].name)
    return (time.perf_counter() - start) / len(conditions_by_rate) * 1e6


def _decide_us(result: PlanResult, stance: PowerMode) -> float:
    """Microseconds of one of the agent's decisions by a plan's table, the mean of many at changing bandwidths."""
    table = msgspec.structs.replace(result.table, power=Power(idle_watts=2.0, busy_watts=5.0, radio_watts=0.1))
    contexts = [
        SelectionContext(
            LinkEstimate(0.02, 1 / 10 ** (3 + i / 25), 1e-6, spread=0.5, fades=0.05, transfers=50), 0.0, per_s=1.0
        )
        for i in range(100)
    ]
    held = HeldRow(table.rows[0].name, 0.0, stance.mode)
    start = time.perf_counter()
    for context in contexts:
        select_row(table, context, stance, held)
    return (time.perf_counter() - start) / len(contexts) * 1e6


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "median": percentile(values, 0.5),
        "p95": percentile(values, 0.95),
        "greatest": max(values),
        "count": len(values),
    }


def main() -> None:
    """Measure, print, write."""
    given = make_parser(__doc__).parse_args()
    results, targets = measure()
    finish(results, targets, given.json)


if __name__ == "__main__":
    main()
