"""The options by which `edgectl plan` and `edgectl deploy` ask for a cascade of two variants of a family, or for an
early exit of a model."""

from __future__ import annotations

from typing import Any

import click

from edgesplit.errors import UsageError
from edgesplit_cli.options.types import FRACTION, ParsedType, option_group


def parse_pair(text: str) -> tuple[str, str]:
    """Two names, separated by a comma."""
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise UsageError(f"not a pair of variants: {text[:80]!r} (FIRST,SECOND, as in student,digits)")
    return names[0], names[1]


cascade_options = option_group(
    click.option(
        "--cascade", is_flag=True,
        help="Of a family: a fast variant answers on the device where it is sure, and a more accurate one is asked"
        " otherwise. Of a model with --exit: its first layers. Needs --changed.",
    ),
    click.option(
        "--exit", "exit_output", metavar="OUTPUT",
        help="With --cascade, of one model with two outputs: this one answers where it is sure, and the rest of the"
        " layers runs otherwise, so that nothing is computed twice.",
    ),
    click.option(
        "--changed", type=FRACTION, metavar="SHARE",
        help="With --cascade: answers that may differ from those of the more accurate variant, as in 2%: bounded on the"
        " family's or the model's samples, of which it takes 114 for 2% and 230 for 1%.",
    ),
    click.option(
        "--score", "scores", multiple=True, metavar="KIND",
        help="With --cascade: what tells how sure an answer is: of a class its margin, probability or entropy; of boxes"
        " the least distance of one to the threshold (boxes); or an output of the fast variant, one number that is"
        " larger where it is surer (output:NAME). Repeatable: the best is taken, and more samples are needed. [default:"
        " margin, of detectors boxes]",
    ),
    click.option(
        "--cascade-variants", "pair", type=ParsedType("pair", parse_pair), metavar="FIRST,SECOND",
        help="With --cascade: the fast and the accurate variant. [default: the best pair; more samples are needed]",
    ),
    click.option(
        "--certainty", type=FRACTION, metavar="SHARE",
        help="With --cascade: how sure the promise is. [default: 90%]",
    ),
    click.option(
        "--audit-share", type=FRACTION, metavar="SHARE",
        help="With --cascade: frames drawn at work, on which both variants are compared. [default: 1%]",
    ),
)  # fmt: skip
NAMES = ("cascade", "exit_output", "changed", "scores", "pair", "certainty", "audit_share")


def cascade_body(
    *, cascade: bool, exit_output: str | None, changed: float | None, scores: tuple[str, ...],
    pair: tuple[str, str] | None, certainty: float | None, audit_share: float | None,
) -> dict[str, Any] | None:  # fmt: skip
    """The cascade as the API and the planner take it; None where none is asked for. Usage error where an option needs
    another."""
    given = {
        "--exit": exit_output, "--changed": changed, "--score": scores or None, "--cascade-variants": pair,
        "--certainty": certainty, "--audit-share": audit_share,
    }  # fmt: skip
    if not cascade:
        without = next((option for option, value in given.items() if value is not None), None)
        if without is not None:
            hint = " (--allow-changed is for codecs)" if without == "--changed" else ""
            raise click.UsageError(f"{without} is for cascades: give --cascade too{hint}")
        return None
    if changed is None:
        raise click.UsageError("--cascade needs --changed SHARE: how many answers may differ, as in --changed 2%")
    if exit_output and pair:
        raise click.UsageError("--exit is of one model, and --cascade-variants are of a family: give one of them")
    optional = {
        "exit_output": exit_output,
        "variants": pair,
        "certainty": certainty,
        "audit_share": audit_share,
        "scores": scores or None,
    }
    return {"changed": changed, **{name: value for name, value in optional.items() if value is not None}}
