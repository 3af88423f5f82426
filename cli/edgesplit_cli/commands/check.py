"""`edgectl check`: cut a model at every boundary, run both halves, compare with the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from edgesplit.errors import UsageError
from edgesplit.plan import Plan, Row
from edgesplit_cli.local.model import open_model, read_samples
from edgesplit_cli.output import console, headed, json_option, print_json, size, table

if TYPE_CHECKING:
    from edgesplit_partitioner.split_check.check import Cut, Report

MOST_SAMPLES = 4
NOT_FINE = 1
"""Exit code where a cut is off or refused."""


@click.command()
@click.argument("what", metavar="MODEL|FILE")
@click.option("--input", "input_text", default=None, help="For a FILE: what arrives, as `edgectl model push` takes it.")
@click.option("--bind", "bindings", multiple=True, metavar="DIM=N", help="For a FILE: fix a dynamic dimension.")
@click.option(
    "--samples",
    type=click.Path(exists=True, path_type=Path),
    default=None,
    help=f"Real input, the first {MOST_SAMPLES} of it: a file or folder of JPEG, WAV or NPZ. [default: seeded noise]",
)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="Check the cuts of this plan's table too (`edgectl plan --json`).",
)
@click.option("--seed", default=0, show_default=True, help="Of the noise.")
@click.option(
    "--jobs", type=click.IntRange(1), default=None, help="Cuts tried at once. [default: one per core, up to 4]"
)
@json_option
@click.pass_context
def check(
    context: click.Context,
    what: str,
    input_text: str | None,
    bindings: tuple[str, ...],
    samples: Path | None,
    plan_file: Path | None,
    seed: int,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Will MODEL split safely? Cut it at every boundary, run both halves, and compare with the whole.

    Exit code 0 where every cut answers like the whole, 1 where one does not, 3 where the model itself is refused.
    """
    from edgesplit_partitioner.split_check.check import check_model

    model = open_model(context.obj, what, input_text, bindings)
    rows = rows_of(plan_file) if plan_file else ()
    given = read_samples(samples, model.loaded.spec, MOST_SAMPLES)
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=as_json or not console().is_terminal, transient=True) as bar:
        task = bar.add_task(escape(f"checking {model.name}"), total=None)
        report = check_model(
            model.loaded.prepared,
            model.loaded.graph,
            model.loaded.spec,
            samples=given,
            rows=rows,
            seed=seed,
            jobs=jobs,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        fine = {"model": model.name, "fine": report.fine, "fast_fine": report.fast_fine}
        print_json(fine | msgspec.to_builtins(report))
    else:
        print_report(model.name, report)
    context.exit(0 if report.fine else NOT_FINE)


def rows_of(file: Path) -> tuple[Row, ...]:
    """The rows of the table in a plan's JSON."""
    try:
        read = json.loads(file.read_bytes())
        if not isinstance(read, dict) or "table" not in read:
            raise UsageError(f"{file} is no plan as `edgectl plan --json` prints it: it has no table")
        return msgspec.convert(read["table"], Plan).rows
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is no plan as `edgectl plan --json` prints it: {error}") from error


def print_report(name: str, report: Report) -> None:
    """The verdicts, boundary by boundary, then where no cut goes and why."""
    out = console()
    what = f"  {report.format}, {report.layers} layers of {report.operators} operators, fed with {report.inputs}"
    out.print(headed(name, what))
    out.print(table(("cut after", ">sends", ">tensors", "answers", "fast mode", ""), map(_row, report.cuts)))
    if report.inside:
        rows = [(one.layer, str(one.boundaries), one.why) for one in report.inside]
        out.print(table(("no cut inside", ">boundaries", "because"), rows))
    out.print(summary(report))


def _row(cut: Cut) -> tuple[str, ...]:
    name = cut.after or "nothing (all remote)"
    return (
        f"{cut.name}: {name}" if cut.name else name,
        size(cut.up_bytes),
        str(len(cut.sends)),
        _answers(cut.verdict, cut.error),
        _answers(cut.fast, cut.fast_error) if cut.fast else "-",
        cut.why or ("a length depends on the data" if cut.open_lengths else ""),
    )


def _answers(verdict: str, error: float | None) -> str:
    if verdict in ("exact", "refused"):
        return verdict
    figure = "not comparable" if error is None else f"{error:.1e}"
    return f"{verdict} ({figure})"


def summary(report: Report) -> str:
    """One or two sentences: may this model be cut?"""
    counts: dict[str, int] = {}
    for cut in report.cuts:
        counts[cut.verdict] = counts.get(cut.verdict, 0) + 1
    inside = sum(one.boundaries for one in report.inside)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines = [f"{len(report.cuts)} cuts: {told}; {inside} boundaries inside layers are not cut"]
    if not report.steady:
        lines.append("the whole itself answers differently when asked twice (random operators): no cut can be exact")
    fast = [cut for cut in report.cuts if cut.fast == "off"]
    if fast:
        lines.append(
            f"fast mode is beyond its tolerance ({report.tolerance:.0e}) at {len(fast)} cuts: run exact, the default"
        )
    return "\n".join(lines)
