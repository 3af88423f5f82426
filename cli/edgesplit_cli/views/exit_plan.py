"""A model's early exit as text: what stays and is promised, and its price beside the row without it."""

from __future__ import annotations

from typing import Any

import msgspec

from edgesplit.cascade import Cascade, format_score
from edgesplit_cli.output import console, ms, table

COLUMNS = ("", ">mean ms", ">p95 ms", ">mJ", ">bytes up", ">server runs")


def print_exit(planned: dict[str, Any]) -> None:
    """Print an early exit as the plan's JSON contains it (`planner.early_exit.PlannedExit`)."""
    cascade, part = msgspec.convert(planned["cascade"], Cascade), planned["part"]
    where = f"its {cascade.score} is below {format_score(cascade.threshold)}"
    _print(f"early exit: {cascade.exit_output} answers unless {where}: {planned['text']}")
    _print(
        f"it runs {part['layers']} of {part['of_layers']} layers, {ms(part['seconds'])} ms on the device;"
        f" {planned['escalation']}"
    )
    rows = [
        (f"exit, then {planned['row']}", *_figures(planned["figures"])),
        (f"{planned['alone_row']} without it", *_figures(planned["alone"])),
    ]
    console().print(table(COLUMNS, rows))
    _print(planned["gain_text"])


def _print(text: str) -> None:
    console().print(text, soft_wrap=True, markup=False)


def _figures(figures: dict[str, Any]) -> tuple[str, ...]:
    joules = "-" if figures["joules"] is None else f"{figures['joules'] * 1e3:.3g}"
    return (
        ms(figures["seconds"]), ms(figures["p95_s"]), joules, f"{figures['up_bytes']:,.0f}",
        f"{figures['server_runs']:.3g}",
    )  # fmt: skip
