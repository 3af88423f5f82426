"""The cells of `gain`, as a table, a summary and the measures of the SC2 benchmark."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from record import Target

LINK_NAMES = ("wifi", "lte", "3g")
LEAST_GAIN = 0.98
"""Threshold of the target on the smallest gain."""
MEAN_GAIN = 1.3
"""Target on the geometric mean at the largest allowance, over the cells with a variant and enough samples."""
GAINS = 1.01
"""A cell gains where its gain exceeds this."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one model on one device profile and link at one allowance. Seconds, except `planned_s`, are those of
    the half that judges."""

    model: str
    given: str
    profile: str
    link: str
    allowed: float
    """Share of the answers that may change; 0: lossless."""
    way: str
    """`unchanged`, or the kind of way with its name."""
    row: str
    after: str
    codecs: dict[str, str]
    up_bytes: float
    """Bytes sent for a request in the mean, as planned."""
    device_mflop: float
    """Work on the device for a request in the mean."""
    accuracy: float | None
    """Share of labelled frames that it answers right; None without labels."""
    stays: float
    """Share of the frames that a cascade's first model answers; 1 without a cascade."""
    planned_s: float
    seconds: float
    all_local_s: float
    all_remote_s: float
    gain: float
    has_choice: bool
    """Whether a variant, a cascade or a lossy codec keeps the allowance."""
    reasons: tuple[str, ...]
    """Why there are no more ways; empty where nothing may change."""


def format_cells(cells: Sequence[Cell]) -> str:
    """A line for each model and profile: gains by link, lossless and at each allowance, and the way."""
    allowances = sorted({cell.allowed for cell in cells})
    head = " | ".join(
        f"{f'{name}: ' + ', '.join(f'{allowed:.0%}' for allowed in allowances):>31}" for name in LINK_NAMES
    )
    text = [f"{'model (given)':44} {'profile':16} {head}"]
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        lines.setdefault((f"{cell.model} ({cell.given})", cell.profile), []).append(cell)
    for (model, profile), row in lines.items():
        groups = [row[start : start + len(allowances)] for start in range(0, len(row), len(allowances))]
        shown = " | ".join(" ".join(f"{format_cell(cell):>7}" for cell in group) for group in groups)
        text.append(f"{model:44} {profile:16} {shown}")
    text.append(
        "times the better pure mode of the unchanged model; L all-local, R all-remote, C a cut between; h an fp16"
        " variant, d int8-dynamic, q int8, K a cascade, c a lossy codec"
    )
    return "\n".join(text)


WAYS = {"variant fp16": "h", "variant int8-dynamic": "d", "variant int8": "q", "codec": "c", "unchanged": ""}


def format_cell(cell: Cell) -> str:
    """The gain with the way."""
    where = "L" if cell.row == "local" else "R" if not cell.after else "C"
    return f"{cell.gain:.2f}{where}{WAYS.get(cell.way, 'K')}"


def summary_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """By allowance: geometric means, cells that gain, by which way, and why others do not."""
    summaries = []
    for allowed in sorted({cell.allowed for cell in cells}):
        here = [cell for cell in cells if cell.allowed == allowed]
        chosen = [cell for cell in here if cell.has_choice]
        gaining = [cell for cell in here if cell.gain > GAINS]
        summaries.append({
            "allowed": allowed, "cells": len(here), "gaining": len(gaining),
            "geometric_mean": geometric_mean(here), "with_a_choice": len(chosen),
            "geometric_mean_with_a_choice": geometric_mean(chosen), "ways": Counter(cell.way for cell in gaining),
            "without_gain": Counter(why_not(cell) for cell in here if cell.gain <= GAINS),
        })  # fmt: skip
    return summaries


def geometric_mean(cells: Sequence[Cell]) -> float | None:
    """Of the gains; None without cells."""
    return statistics.geometric_mean(cell.gain for cell in cells) if cells else None


def why_not(cell: Cell) -> str:
    """Why a cell gains nothing, in words."""
    if cell.has_choice or not cell.reasons:
        fixed = "its pure mode is the best" if not cell.allowed else "no way that keeps the allowance is faster"
        return f"{fixed}: all {'local' if cell.row == 'local' else 'remote'}"
    return "; ".join(cell.reasons)


def print_summary(summaries: Sequence[Mapping[str, Any]]) -> None:
    """The summary as text."""
    for summary in summaries:
        mean, chosen = (
            "-" if value is None else f"{value:.3f}"
            for value in (summary["geometric_mean"], summary["geometric_mean_with_a_choice"])
        )
        print(
            f"{summary['allowed']:.0%} changed: {summary['gaining']} of {summary['cells']} cells gain more than 1 %;"
            f" geometric mean {mean}; {chosen} over {summary['with_a_choice']} cells with a choice; by"
            f" {', '.join(f'{way} {count}' for way, count in summary['ways'].most_common()) or 'nothing'}"
        )
        for reason, count in summary["without_gain"].most_common():
            print(f"    {count:4} without gain: {reason}")


def three_measures(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The measures of the SC2 benchmark, by model and allowance: bytes up and work on the device, each the mean over
    the cells and relative to the lossless plan's, and accuracy where labels are known."""
    rows = []
    for model, given in dict.fromkeys((cell.model, cell.given) for cell in cells):
        for allowed in sorted({cell.allowed for cell in cells}):
            here = [cell for cell in cells if (cell.model, cell.given, cell.allowed) == (model, given, allowed)]
            known = [cell.accuracy for cell in here if cell.accuracy is not None]
            rows.append({
                "model": model, "given": given, "allowed": allowed,
                "up_bytes": statistics.fmean(cell.up_bytes for cell in here),
                "device_mflop": statistics.fmean(cell.device_mflop for cell in here),
                "accuracy": statistics.fmean(known) if known else None,
            })  # fmt: skip
    return rows


def print_measures(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each model."""
    for row in rows:
        accuracy = "-" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
        print(
            f"{row['model'] + ' (' + row['given'] + ')':44} {row['allowed']:4.0%}: {row['up_bytes']:10.0f} bytes up,"
            f" {row['device_mflop']:8.1f} MFLOP on the device, accuracy {accuracy}"
        )


def targets_of(cells: Sequence[Cell], missing: tuple[str, ...]) -> list[Target]:
    """The thresholds over all cells; `missing` is what was not measured."""
    least = min((cell.gain for cell in cells), default=None)
    most_allowed = max((cell.allowed for cell in cells), default=0.0)
    mean = geometric_mean([cell for cell in cells if cell.allowed == most_allowed and cell.has_choice])
    return [
        Target("gain.least_of_all_cells", least, LEAST_GAIN, at_least=True, left_out=missing),
        Target(
            f"gain.geometric_mean_at_{most_allowed:.0%}_over_cells_with_a_choice", mean, MEAN_GAIN, at_least=True,
            left_out=missing,
        ),
    ]  # fmt: skip
