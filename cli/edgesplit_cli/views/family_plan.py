"""A family's plan as text: its frontier, what was chosen and why, and the rows of its table."""

from __future__ import annotations

from typing import Any

from edgesplit_cli.output import console, ms, table

COLUMNS = ("variant", ">accuracy", "row", ">predicted ms", ">no cut is below ms")


def print_family_plan(plan: dict[str, Any]) -> None:
    """Print a plan as `FamilyResult.to_builtins` returns it."""
    best, proof = plan["best"], plan["certificate"]
    deadline = f" within {plan['deadline_s'] * 1e3:g} ms" if plan["deadline_s"] else ""
    floor = f" of at least {plan['least_accuracy']:.1%} accuracy" if plan["least_accuracy"] else ""
    console().print(f"{plan['model']}: objective {plan['objective']}{deadline}{floor}")
    rows = [
        (
            point["variant"], f"{point['accuracy']:.1%}", point["row"], ms(point["seconds"]), ms(point["lower_bound"]),
        )
        for point in plan["frontier"]
    ]  # fmt: skip
    console().print(table(COLUMNS, rows))
    why = ""
    if proof["more_accurate_s"] is not None:
        why = f"; no cut of a more accurate variant takes less than {ms(proof['more_accurate_s'])} ms"
    console().print(f"chosen: {best['row']}, {best['accuracy']:.1%}, {ms(best['seconds'])} ms{why}")
    names = ", ".join(row["name"] for row in plan["table"]["rows"])
    console().print(f"rows of the release, one chosen per request: {names}", soft_wrap=True, markup=False)
    for variant, reason in plan["left_out"].items():
        console().print(f"left out: {variant}: {reason}", soft_wrap=True, markup=False)
