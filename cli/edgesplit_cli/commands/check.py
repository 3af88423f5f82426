"""`edgectl check`: cuts a model at every boundary, runs both parts, and compares the answers with the whole model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

from edgesplit.errors import UsageError
from edgesplit.plan import Plan, Row
from edgesplit.quantities import format_size
from edgesplit_cli.local.model import open_model, read_samples
from edgesplit_cli.options.completion import complete_models_or_files
from edgesplit_cli.options.types import EXISTING_PATH, FILE, POSITIVE
from edgesplit_cli.output import bold_head, console, json_option, print_json, table
from edgesplit_cli.progress import progress_bar

if TYPE_CHECKING:
    from edgesplit_partitioner.split_check.check import Cut, Report

MAX_SAMPLES = 4
EXIT_NOT_FINE = 1
"""Exit code where a cut gives another answer or is refused."""


@click.command()
@click.argument("what", metavar="MODEL|FILE", shell_complete=complete_models_or_files)
@click.option("--input", "input_text", help="For a FILE: its input spec, as for `edgectl model push`.")
@click.option("--bind", "bindings", multiple=True, metavar="DIM=N", help="For a FILE: fix a dynamic dimension.")
@click.option(
    "--samples",
    type=EXISTING_PATH,
    help=f"Real input, the first {MAX_SAMPLES} of it: a file or folder of JPEG, WAV or NPZ. [default: seeded noise]",
)
@click.option("--plan", "plan_file", type=FILE, help="Check the cuts of this plan's table too (`edgectl plan --json`).")
@click.option("--seed", default=0, show_default=True, help="Seed of the noise.")
@click.option("--jobs", type=POSITIVE, help="Cuts tried at once. [default: one per core, up to 4]")
@json_option
@click.pass_context
def check(
    context: click.Context, what: str, input_text: str | None, bindings: tuple[str, ...], samples: Path | None,
    plan_file: Path | None, seed: int, jobs: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Check that MODEL splits safely: cut it at every boundary, run both halves, and compare with the whole.

    Exit code 0 where every cut gives the whole model's answer, 1 where one does not, 3 where the model itself is
    refused.
    """
    from edgesplit_partitioner.split_check.check import check_model

    model = open_model(context.obj, what, input_text, bindings)
    rows = read_rows(plan_file) if plan_file else ()
    inputs = read_samples(
        samples, model.loaded.spec, MAX_SAMPLES, inputs=[spec.name for spec in model.loaded.prepared.inputs]
    )
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(f"checking {model.name}", *columns, quiet=as_json) as update:
        report = check_model(
            model.loaded.prepared, model.loaded.graph, model.loaded.spec, samples=inputs, rows=rows, seed=seed,
            jobs=jobs, progress=lambda done, total: update(completed=done, total=total),
        )  # fmt: skip
    if as_json:
        verdict = {"model": model.name, "is_safe": report.is_safe, "is_safe_fast": report.is_safe_fast}
        print_json(verdict | msgspec.to_builtins(report))
    else:
        print_report(model.name, report)
    context.exit(0 if report.is_safe else EXIT_NOT_FINE)


def read_rows(file: Path) -> tuple[Row, ...]:
    """The rows of the switching table in a plan's JSON; UsageError for any other file."""
    try:
        document = json.loads(file.read_bytes())
        if not isinstance(document, dict) or "table" not in document:
            raise UsageError(f"{file} is not a plan of `edgectl plan --json`: it has no table")
        return msgspec.convert(document["table"], Plan).rows
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file} is not a plan of `edgectl plan --json`: {error}") from error


def print_report(name: str, report: Report) -> None:
    """Print the verdict of each boundary, then the places where no cut is possible and why."""
    out = console()
    details = f"  {report.format}, {report.layers} layers of {report.operators} operators, fed with {report.inputs}"
    out.print(bold_head(name, details))
    out.print(table(("cut after", ">sends", ">tensors", "answers", "fast mode", ""), map(_row, report.cuts)))
    if report.inside:
        rows = [(layer.layer, str(layer.boundaries), layer.reason) for layer in report.inside]
        out.print(table(("no cut inside", ">boundaries", "because"), rows))
    out.print(summary(report))


def _row(cut: Cut) -> tuple[str, ...]:
    name = cut.split_after or "nothing (all remote)"
    return (
        f"{cut.name}: {name}" if cut.name else name,
        format_size(cut.up_bytes),
        str(len(cut.sends)),
        _answers(cut.verdict, cut.error),
        _answers(cut.fast, cut.fast_error) if cut.fast else "-",
        cut.reason or ("a length depends on the data" if cut.open_lengths else ""),
    )


def _answers(verdict: str, error: float | None) -> str:
    if verdict in ("exact", "refused"):
        return verdict
    figure = "not comparable" if error is None else f"{error:.1e}"
    return f"{verdict} ({figure})"


def summary(report: Report) -> str:
    """One or two sentences on whether the model may be cut."""
    counts: dict[str, int] = {}
    for cut in report.cuts:
        counts[cut.verdict] = counts.get(cut.verdict, 0) + 1
    inside = sum(layer.boundaries for layer in report.inside)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines = [f"{len(report.cuts)} cuts: {verdicts}; {inside} boundaries inside layers are not cut"]
    if not report.steady:
        lines.append(
            "the whole model itself gives different results in two runs (random operators): no cut can be exact"
        )
    fast = [cut for cut in report.cuts if cut.fast == "off"]
    if fast:
        lines.append(
            f"fast mode is beyond its tolerance ({report.tolerance:.0e}) at {len(fast)} cuts: run exact, the default"
        )
    return "\n".join(lines)
