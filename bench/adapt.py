"""Policies on recorded uplinks: static cuts, switching and hedging beside an oracle that knows the trace.

    bench/adapt.py [TRACE.up …] [--requests N] [--seconds S] [--svg FILE] [--json FILE]

Traces are files in mahimahi's format (its own `*.up` recordings, or any); without one, the synthetic ones in
`bench/traces`. Everything is emulated: the wide sweep in virtual time (`policy_replay`: the
agent's own decisions, the plan's seconds), some cells again with the real engine over real sockets on a shaped link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uplink
from emulated import MODEL, RTT_S, Device, devices, emulated_device, plan_on, traces
from policy_replay import Adaptive, Always, Oracle, Outcome, Policy, Scenario, replay, switches
from record import Target, finish, make_parser, percentile

from edgesplit import plan as plans
from edgesplit.bandwidth_trace import PACKET_BYTES, UplinkTrace
from edgesplit.errors import EdgeError
from edgesplit.plan import Conditions, Plan

NEAR_ORACLE, MAX_OVER_STATIC = 1.10, 1.05
REFERENCE_POLICY = "hedged"
"""The policy that the targets are compared with: the agent's default, without a limit on hedging energy."""
REAL_TRACES, REAL_DEVICE = ("lte-driving", "flapping"), 1
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "adapt.svg"


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one policy on one device and trace."""

    device: str
    trace: str
    policy: str
    row: str
    """The row that a static policy uses; empty for other policies."""
    mean_s: float
    p95_s: float
    over_oracle: float
    """Mean latency relative to the oracle's."""
    over_local: float
    """95th percentile of latency relative to all-local's."""
    joules: float
    sent: float
    hedged: float
    switches: int
    lost: int
    choose_us: float
    """Microseconds per request that the replay itself takes, planning excluded."""


def policies(table: Plan, trace: UplinkTrace) -> dict[str, Policy]:
    """All policies by name; a static one holds the row that is best at a mean of the trace."""
    every: dict[str, Policy] = {"all-local": Always("local")}
    if any(row.name == "remote" for row in table.rows):
        every["all-remote"] = Always("remote")
    return every | {
        "static, arithmetic": Always(best_at(table, uplink.mean_bytes_per_s(trace))),
        "static, harmonic": Always(best_at(table, harmonic_mean(trace))),
        "switching": Adaptive(hedge_ratio=0.0),
        "hedged, 10 %": Adaptive(hedge_ratio=0.1),
        "hedged": Adaptive(hedge_ratio=1.0),
        "oracle": Oracle(),
    }


def harmonic_mean(trace: UplinkTrace) -> float:
    """Harmonic mean of the trace's rate in bytes per second, over the seconds with at least one packet."""
    rates = [max(rate, float(PACKET_BYTES)) for rate in trace.rates_per_bin(1.0)]
    return len(rates) / sum(1 / rate for rate in rates)


def best_at(table: Plan, bytes_per_s: float) -> str:
    """The row with the least latency at this constant rate."""
    link = plans.Link(up_bytes_per_s=bytes_per_s, down_bytes_per_s=table.link.down_bytes_per_s, rtt_s=RTT_S)
    row = plans.best_row(table.rows, Conditions(link=link))
    assert row is not None
    return row.name


def scene_of(table: Plan, trace: UplinkTrace, requests: int) -> Scenario:
    """The scenario: requests at two thirds of the rate of local inference, and at most three a second."""
    local = table.local
    assert local is not None
    return Scenario(table, trace, requests, period_s=max(0.33, 1.5 * local.device_s))


def sweep(device: Device, trace: UplinkTrace, requests: int) -> list[Cell]:
    """Results of every policy in virtual time."""
    table = plan_on(device, trace)
    scene = scene_of(table, trace, requests)
    outcomes: dict[str, list[Outcome]] = {}
    took: dict[str, float] = {}
    every = policies(table, trace)
    for name, policy in every.items():
        start = time.perf_counter()
        outcomes[name] = replay(scene, policy)
        took[name] = (time.perf_counter() - start) / requests * 1e6
    oracle_s, local_s = mean_s(outcomes["oracle"]), p95_s(outcomes["all-local"])
    return [
        Cell(
            device.name, trace.name, name, getattr(every[name], "row", ""),
            mean_s(results), p95_s(results), mean_s(results) / oracle_s, p95_s(results) / local_s,
            sum(outcome.joules for outcome in results) / len(results), _part(outcome.sent for outcome in results),
            _part(outcome.hedged for outcome in results), switches(results),
            sum(not outcome.in_time for outcome in results), took[name],
        )
        for name, results in outcomes.items()
    ]  # fmt: skip


def _part(flags: Any) -> float:
    values = list(flags)
    return float(sum(values) / len(values))


def mean_s(outcomes: Sequence[Outcome]) -> float:
    """Mean latency of all requests, in seconds."""
    return sum(outcome.seconds for outcome in outcomes) / len(outcomes)


def p95_s(outcomes: Sequence[Outcome]) -> float:
    """95th percentile of the latency of all requests, in seconds."""
    return percentile([outcome.seconds for outcome in outcomes], 0.95)


# The same with the real engine


def run_real(device: Device, trace: UplinkTrace, seconds: float) -> list[dict[str, Any]]:
    """Static rows, switching and hedging run at once with the real engine, each on an emulated device of its own,
    beside the replay of the same scenario."""
    table = plan_on(device, trace)
    scene = scene_of(table, trace, 1)
    requests = max(20, int(seconds / scene.period_s))
    scene = Scenario(table, trace, requests, scene.period_s)
    held = best_at(table, uplink.mean_bytes_per_s(trace))
    ways: dict[str, tuple[Policy, float, str]] = {
        "static, arithmetic": (Always(held), 0.0, held),
        "switching": (Adaptive(hedge_ratio=0.0), 0.0, ""),
        "hedged": (Adaptive(hedge_ratio=1.0), 1.0, ""),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    lost = dict.fromkeys(ways, 0)
    threads = [
        threading.Thread(target=_drive, args=(scene, part, forced, took[name], lost, name))
        for name, (_, part, forced) in ways.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    oracle_s = mean_s(replay(scene, Oracle()))
    local = table.local
    assert local is not None
    return [
        {
            "device": device.name, "trace": trace.name, "policy": name, "requests": requests, "lost": lost[name],
            "mean_s": sum(took[name]) / len(took[name]), "p95_s": percentile(took[name], 0.95),
            "rehearsed_mean_s": mean_s(replay(scene, policy)), "rehearsed_p95_s": p95_s(replay(scene, policy)),
            "oracle_mean_s": oracle_s, "all_local_s": local.device_s,
        }
        for name, (policy, _, _) in ways.items()
    ]  # fmt: skip


def _drive(scene: Scenario, hedge_part: float, forced: str, took: list[float], lost: dict[str, int], name: str) -> None:
    """Send requests to one device, one per period, each on a thread of its own; fills `took` with latencies."""
    with emulated_device(scene.plan, scene.trace, hedge_part, forced) as device:
        began = time.perf_counter()
        waiting = []

        def ask() -> None:
            start = time.perf_counter()
            try:
                device.engine.infer(MODEL, device.inputs, deadline_s=scene.deadline_s)
                took.append(time.perf_counter() - start)
            except EdgeError:
                lost[name] += 1

        for number in range(scene.requests):
            time.sleep(max(0.0, began + number * scene.period_s - time.perf_counter()))
            waiting.append(threading.Thread(target=ask))
            waiting[-1].start()
        for thread in waiting:
            thread.join()


# What is shown


def targets_of(cells: Sequence[Cell], real: Sequence[Mapping[str, Any]]) -> list[Target]:
    """The targets, each measured at the worst cell."""
    mine = [cell for cell in cells if cell.policy == REFERENCE_POLICY]
    raced = [run for run in real if run["policy"] == REFERENCE_POLICY]
    over_oracle = max((run["mean_s"] / run["oracle_mean_s"] for run in raced), default=None)
    over_local = max((run["p95_s"] / run["all_local_s"] for run in raced), default=None)
    lost = sum(cell.lost for cell in mine) + sum(run["lost"] for run in raced)
    return [
        Target("hedged: worst mean over the oracle's (emulated)", max(c.over_oracle for c in mine), NEAR_ORACLE),
        Target("hedged: worst p95 over all-local's (emulated)", max(c.over_local for c in mine), MAX_OVER_STATIC),
        Target("hedged, real engine: worst mean over the oracle's (emulated)", over_oracle, NEAR_ORACLE),
        Target("hedged, real engine: worst p95 over all-local's (emulated)", over_local, MAX_OVER_STATIC),
        Target("hedged: requests lost (emulated)", float(lost), 0.0),
        Target("switching: worst mean over the best static row's (emulated)", _over_static(cells), NEAR_ORACLE),
    ]


def _over_static(cells: Sequence[Cell]) -> float:
    """How much worse than the best static row switching without hedging is, at the worst cell."""
    best: dict[tuple[str, str], float] = {}
    for cell in cells:
        if cell.row:
            key = cell.device, cell.trace
            best[key] = min(best.get(key, cell.mean_s), cell.mean_s)
    return max(cell.mean_s / best[cell.device, cell.trace] for cell in cells if cell.policy == "switching")


def show(cells: Sequence[Cell], real: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per cell."""
    print("emulated, in virtual time; ms")
    for cell in cells:
        print(
            f"  {cell.device:24} {cell.trace:12} {cell.policy:19}"
            f" mean {cell.mean_s * 1e3:6.0f} p95 {cell.p95_s * 1e3:6.0f}"
            f"  {cell.over_oracle:5.2f} of oracle  {cell.over_local:5.2f} of all-local's p95  {cell.joules:5.2f} J"
            f"  sent {cell.sent:4.0%} hedged {cell.hedged:4.0%} lost {cell.lost}"
        )
    for run in real:
        print(
            f"  real engine, emulated device and link: {run['device']} {run['trace']} {run['policy']}: "
            f"mean {run['mean_s'] * 1e3:.0f} (rehearsed {run['rehearsed_mean_s'] * 1e3:.0f}, "
            f"oracle {run['oracle_mean_s'] * 1e3:.0f}) p95 {run['p95_s'] * 1e3:.0f} lost {run['lost']}"
        )


def draw(cells: Sequence[Cell], file: Path) -> None:
    """Draw mean and 95th percentile of each policy relative to all-local, with a panel per device."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    shown = [name for name in dict.fromkeys(cell.policy for cell in cells) if name != "all-local"]
    names = list(dict.fromkeys(cell.trace for cell in cells))
    panels = list(dict.fromkeys(cell.device for cell in cells))
    colours = dict(
        zip(shown, ("#999999", "#c44e52", "#dd8452", "#8172b3", "#64b5cd", "#4c72b0", "#000000"), strict=False)
    )
    with plt.rc_context({"font.size": 8, "svg.hashsalt": "edgesplit", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(len(panels), 1, figsize=(8.4, 2.1 * len(panels) + 0.6), sharex=True, squeeze=False)
        for axis, panel in zip(axes[:, 0], panels, strict=True):
            local = {cell.trace: cell.mean_s for cell in cells if cell.device == panel and cell.policy == "all-local"}
            for place, name in enumerate(shown):
                mine = {cell.trace: cell for cell in cells if cell.device == panel and cell.policy == name}
                left = [names.index(trace) + (place - len(shown) / 2 + 0.5) * 0.11 for trace in mine]
                means = [cell.mean_s / local[trace] for trace, cell in mine.items()]
                p95s = [cell.p95_s / local[trace] for trace, cell in mine.items()]
                axis.bar(left, means, 0.095, color=colours[name], label=name)
                axis.plot(left, p95s, "_", color=colours[name], markersize=7, markeredgewidth=1.6)
            axis.axhline(1.0, color="#555555", linewidth=0.8, linestyle=":")
            axis.set_yscale("log", base=2)
            axis.set_ylim(0.25, 20)
            axis.set_yticks([0.25, 0.5, 1, 2, 4, 8, 16], ["¼", "½", "1", "2", "4", "8", "16"])
            axis.set_ylabel("of all-local")
            axis.set_title(panel, loc="left", fontsize=8)
            axis.set_xticks(range(len(names)), names)
        axes[0, 0].legend(ncol=7, fontsize=6.5, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.12))
        figure.text(0.01, 0.005, "Emulated. Bars: mean latency; dashes: p95.", fontsize=7)
        figure.tight_layout(rect=(0, 0.02, 1, 1))
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Run the sweep and the real engine, draw the figure, write the results."""
    parser = make_parser(__doc__)
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE", help="files in mahimahi's format")
    parser.add_argument("--requests", type=int, default=600, help="of each cell in virtual time")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each cell with the real engine; 0: none")
    parser.add_argument("--svg", type=Path, default=PICTURE, help="where the picture goes")
    given = parser.parse_args()
    every = traces(given.traces)
    cells = [cell for device in devices() for trace in every for cell in sweep(device, trace, given.requests)]
    real = []
    for trace in every if given.seconds > 0 else []:
        if trace.name in REAL_TRACES or given.traces:
            real += run_real(devices()[REAL_DEVICE], trace, given.seconds)
    show(cells, real)
    draw(cells, given.svg)
    finish({"cells": [asdict(cell) for cell in cells], "real": real}, targets_of(cells, real), given.json)


if __name__ == "__main__":
    main()
