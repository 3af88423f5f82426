"""A family's plan as text: its frontier, what was chosen and why, its cascade, and the rows of its table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from edgesplit.cascade import Cascade, format_score, score_text
from edgesplit_cli.output import bold_head, console, ms, table

COLUMNS = ("variant", ">{}", "row", ">predicted ms", ">no cut is below ms")
WAYS = ("", ">{}", ">mean ms", ">p95 ms", ">mJ", ">bytes up", ">server runs")
TRIED = ("first, second", "score", ">stay", ">differ", ">{}", ">mean ms", "")
"""Titles, with what was measured: accuracy or agreement."""


def print_family_reasons(sentences: Iterable[str]) -> None:
    """Print the reasons of a plan (`family_sentences`), the questions in bold."""
    for sentence in sentences:
        why, question, rest = sentence.partition("? ")
        console().print(bold_head(why + question, rest) if question else sentence, soft_wrap=True)


def print_family_plan(plan: dict[str, Any], *, explained: bool = False) -> None:
    """Print a plan as `FamilyResult.to_builtins` returns it; `explained`: with every cascade that was tried."""
    best, proof, measured = plan["best"], plan["certificate"], _measured(plan)
    deadline = f" within {plan['deadline_s'] * 1e3:g} ms" if plan["deadline_s"] else ""
    floor = f" of at least {plan['least_accuracy']:.1%} accuracy" if plan["least_accuracy"] else ""
    console().print(f"{plan['model']}: objective {plan['objective']}{deadline}{floor}")
    rows = [
        (
            point["variant"], f"{point['accuracy']:.1%}", point["row"], ms(point["seconds"]), ms(point["lower_bound"]),
        )
        for point in plan["frontier"]
    ]  # fmt: skip
    console().print(table(_titles(COLUMNS, measured), rows))
    if plan["reference"]:
        _print(f"the samples have no labels: agreement is with {plan['reference']}, and accuracy is not known")
    why = ""
    if proof["more_accurate_s"] is not None:
        why = f"; no cut of a variant with more {measured} takes less than {ms(proof['more_accurate_s'])} ms"
    console().print(f"chosen: {best['row']}, {best['accuracy']:.1%}, {ms(best['seconds'])} ms{why}")
    if plan["cascade"]:
        print_cascade(plan["cascade"], measured, explained=explained)
    names = ", ".join(row["name"] for row in plan["table"]["rows"])
    console().print(f"rows of the release, one chosen per request: {names}", soft_wrap=True, markup=False)
    for variant, reason in plan["left_out"].items():
        console().print(f"left out: {variant}: {reason}", soft_wrap=True, markup=False)


def _measured(plan: dict[str, Any]) -> str:
    """What is known of the variants' answers, in a word."""
    return "agreement" if plan["reference"] else "accuracy"


def _titles(columns: Iterable[str], measured: str) -> tuple[str, ...]:
    return tuple(column.format(measured) for column in columns)


def print_cascade(planned: dict[str, Any], measured: str = "accuracy", *, explained: bool = False) -> None:
    """Print a cascade with its price beside the row that the family chooses without it (`PlannedCascade`). `measured`:
    what is known of the answers, accuracy or agreement; `explained`: with every one that was tried."""
    cascade = msgspec.convert(planned["cascade"], Cascade)
    where = f"{planned['way']['name']} where the {score_text(cascade)} is below {format_score(cascade.threshold)}"
    _print(f"cascade: {where}: {planned['text']}")
    console().print(table(_titles(WAYS, measured), [_way(planned["way"]), _way(planned["alone"])]))
    _print(f"{planned['escalation']}; {measured} at least {planned['least_accuracy']:.1%}")
    _print(planned["gain_text"])
    if not explained:
        return
    _print(
        f"{len(planned['tried'])} tried, certainty divided among {planned['tested']}; {100 * cascade.audit_share:.3g} %"
        " of the frames are drawn for audit, which costs what escalation does, but for time"
    )
    rows = [
        (
            f"{one['first']}, {one['second']}", one["score"], f"{one['stays']:.1%}", str(one["changed"]),
            f"{one['accuracy']:.1%}", ms(one["seconds"]), one["refused"],
        )
        for one in planned["tried"]
    ]  # fmt: skip
    console().print(table(_titles(TRIED, measured), rows))


def _print(text: str) -> None:
    console().print(text, soft_wrap=True, markup=False)


def _way(way: dict[str, Any]) -> tuple[str, ...]:
    """A way to answer as a row of the table."""
    figures = way["figures"]
    joules = "-" if figures["joules"] is None else f"{figures['joules'] * 1e3:.3g}"
    return (
        way["name"], f"{way['accuracy']:.1%}", ms(figures["seconds"]), ms(figures["p95_s"]), joules,
        f"{figures['up_bytes']:,.0f}", f"{figures['server_runs']:.3g}",
    )  # fmt: skip
