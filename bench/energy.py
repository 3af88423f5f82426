"""Joules per inference under each battery policy and under power budgets, beside an oracle that knows the trace.

    bench/energy.py [TRACE.up …] [--requests N] [--svg FILE] [--json FILE]

Everything is emulated, in virtual time, as in `bench/adapt.py`: the agent's own decisions; joules by the plan's
figures: the device profile's watts and a phone's Wi-Fi radio (Huang et al., MobiSys 2012). No board was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import uplink
from adapt import harmonic_mean, mean_s, p95_s, scene_of
from emulated import Device, devices, plan_on, traces
from policy_replay import Adaptive, Always, Oracle, Policy, Scenario, replay
from record import Target, finish, make_parser

from edgesplit.bandwidth_trace import UplinkTrace
from edgesplit.plan import Plan
from edgesplit_agent.power.mode import HEDGE_RATIO, Mode, PowerMode

MODES: tuple[Mode, ...] = ("performance", "balanced", "saver")
BUDGET_PARTS = (0.25, 0.5, 0.75)
"""Power budgets, as ratios between the device's idle power and its power when it serves all requests alone."""
MAX_OVER_BUDGET = 1.02
"""Largest ratio of average power to budget at which the budget counts as kept."""
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "energy.svg"


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one policy on one device and trace."""

    device: str
    trace: str
    policy: str
    joules: float
    """Joules per inference, including idling while it waits."""
    watts: float
    """Average power, including idling between requests."""
    mean_s: float
    p95_s: float
    lost: int
    over_oracle: float
    """Joules relative to those of the oracle that uses the fewest joules in time."""
    budget_watts: float | None = None
    least_watts: float | None = None
    """Power of the row that uses least at the trace's harmonic mean; no budget below it can be kept."""


def mode_policies() -> dict[str, Policy]:
    """The policy of each power mode with the hedging that it allows, all-local, and both oracles."""
    modes: dict[str, Policy] = {mode: Adaptive(PowerMode(mode), hedge_ratio=HEDGE_RATIO[mode]) for mode in MODES}
    return {"all-local": Always("local"), **modes, "oracle of seconds": Oracle(), "oracle of joules": Oracle("joules")}


def cells_of(device: Device, trace: UplinkTrace, requests: int) -> list[Cell]:
    """Results of all policies, then of the power budgets."""
    table = plan_on(device, trace)
    scene = scene_of(table, trace, requests)
    cells = [_cell(device, scene, name, policy) for name, policy in mode_policies().items()]
    idle, alone = _watts_between(table, scene)
    for part in BUDGET_PARTS:
        budget = idle + part * (alone - idle)
        budget_cell = _cell(device, scene, f"budget {part:.0%}", Adaptive(PowerMode(watts=budget), hedge_ratio=0.0))
        least = min(_cell(device, scene, row.name, Always(row.name)).watts for row in table.rows)
        cells.append(replace(budget_cell, budget_watts=budget, least_watts=least))
    oracle = next(cell.joules for cell in cells if cell.policy == "oracle of joules")
    return [replace(cell, over_oracle=cell.joules / oracle) for cell in cells]


def _watts_between(table: Plan, scene: Scenario) -> tuple[float, float]:
    local, power = table.local, table.power
    assert local is not None and power is not None
    return power.idle_watts, power.idle_watts + (power.busy_watts - power.idle_watts) * local.device_s / scene.period_s


def _cell(device: Device, scene: Scenario, name: str, policy: Policy) -> Cell:
    outcomes = replay(scene, policy)
    power = scene.plan.power
    assert power is not None
    joules = sum(outcome.joules for outcome in outcomes) / len(outcomes)
    beyond = sum(outcome.joules - power.idle_watts * outcome.seconds for outcome in outcomes) / len(outcomes)
    return Cell(
        device.name, scene.trace.name, name, joules, power.idle_watts + beyond / scene.period_s,
        mean_s(outcomes), p95_s(outcomes), sum(not outcome.in_time for outcome in outcomes), 0.0,
    )  # fmt: skip


def targets_of(cells: Sequence[Cell]) -> list[Target]:
    """The targets; the issue itself states none."""
    saver = [cell for cell in cells if cell.policy == "saver"]
    local = {(cell.device, cell.trace): cell.joules for cell in cells if cell.policy == "all-local"}
    budgets = [cell for cell in cells if cell.budget_watts is not None and cell.least_watts is not None]
    can = [cell for cell in budgets if (cell.least_watts or 0.0) <= (cell.budget_watts or 0.0)]
    over = max((cell.watts / (cell.budget_watts or 1.0) for cell in can), default=None)
    return [
        Target("saver: worst joules over all-local's (emulated)",
               max(cell.joules / local[cell.device, cell.trace] for cell in saver), MAX_OVER_BUDGET),
        Target("worst average power over a budget that some row keeps (emulated)", over, MAX_OVER_BUDGET),
        Target("requests lost (emulated)", float(sum(cell.lost for cell in cells)), 0.0),
    ]  # fmt: skip


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draw joules against mean latency, with a panel per device and trace and a mark per policy."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    names, panels = list(dict.fromkeys(c.trace for c in cells)), list(dict.fromkeys(c.device for c in cells))
    marks = {
        "all-local": ("s", "#999999"), "performance": ("o", "#c44e52"), "balanced": ("o", "#dd8452"),
        "saver": ("o", "#55a868"), "oracle of seconds": ("x", "#c44e52"), "oracle of joules": ("x", "#55a868"),
    }  # fmt: skip
    with plt.rc_context({"font.size": 7, "svg.hashsalt": "edgesplit", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(
            len(panels), len(names), figsize=(1.75 * len(names) + 0.6, 1.5 * len(panels) + 0.9), squeeze=False
        )
        for down, panel in enumerate(panels):
            for across, trace in enumerate(names):
                axis = axes[down, across]
                mine = [cell for cell in cells if (cell.device, cell.trace) == (panel, trace)]
                kept = [cell for cell in mine if cell.budget_watts is not None]
                axis.plot([c.mean_s * 1e3 for c in kept], [c.joules for c in kept], ".", color="#4c72b0", markersize=4,
                          label="power budgets")  # fmt: skip
                for cell in mine:
                    if cell.policy in marks:
                        mark, colour = marks[cell.policy]
                        axis.plot(cell.mean_s * 1e3, cell.joules, mark, color=colour, markersize=5, label=cell.policy)
                axis.set_xlim(0, 1.12e3 * max(cell.mean_s for cell in mine))
                axis.set_ylim(0, 1.12 * max(cell.joules for cell in mine))
                if down == 0:
                    axis.set_title(trace, fontsize=7)
                if across == 0:
                    axis.set_ylabel(f"{panel}\nJ per inference", fontsize=6)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), ncol=7, loc="upper center", frameon=False, fontsize=6.5)
        figure.text(
            0.01, 0.006, "Emulated; joules by the device profiles' watts. Across: mean latency, ms.", fontsize=7
        )
        figure.tight_layout(rect=(0, 0.02, 1, 0.95))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Run the replays, draw the figure, write the results."""
    parser = make_parser(__doc__)
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE", help="files in mahimahi's format")
    parser.add_argument("--requests", type=int, default=600, help="of each cell")
    parser.add_argument("--svg", type=Path, default=PICTURE, help="where the picture goes")
    given = parser.parse_args()
    every = traces(given.traces)
    cells = [cell for device in devices() for trace in every for cell in cells_of(device, trace, given.requests)]
    print("emulated, in virtual time; joules by the plan's figures")
    for cell in cells:
        budget = f" of {cell.budget_watts:.2f} W (least {cell.least_watts:.2f})" if cell.budget_watts else ""
        print(
            f"  {cell.device:24} {cell.trace:12} {cell.policy:18}"
            f" {cell.joules:5.2f} J {cell.over_oracle:5.2f} of oracle"
            f"  {cell.watts:5.2f} W{budget}  mean {cell.mean_s * 1e3:5.0f} ms p95 {cell.p95_s * 1e3:5.0f}"
        )
    draw(cells, given.svg)
    shares = {trace.name: {"mean": uplink.mean_bytes_per_s(trace), "harmonic": harmonic_mean(trace)} for trace in every}
    over = {name: _mean_over_oracle(cells, name) for name in dict.fromkeys(cell.policy for cell in cells)}
    print("  joules over the oracle's, mean: " + ", ".join(f"{name} {part:.2f}" for name, part in over.items()))
    results = {"cells": [asdict(cell) for cell in cells], "over_oracle": over, "traces_bytes_per_s": shares}
    finish(results, targets_of(cells), given.json)


def _mean_over_oracle(cells: Sequence[Cell], policy: str) -> float:
    mine = [cell.over_oracle for cell in cells if cell.policy == policy]
    return sum(mine) / len(mine)


if __name__ == "__main__":
    main()
