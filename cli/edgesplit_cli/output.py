"""Formats results: tables for people, JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from edgesplit.errors import UsageError
from edgesplit.terminal_text import shorten

MAX_CELL_CHARS = 300
"""Characters of a cell; a longer text ends with "…"."""
MAX_ROWS = 1_000
"""Rows of a table. More are counted below it: laying out a table takes a millisecond per row."""
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def console(*, quiet: bool = False) -> Console:
    """A console on standard output, at least 140 columns wide where it is not a terminal. Quiet: nothing is printed.

    Markup is off: names of models and layers are printed unchanged, brackets too. Styles are given as `Text`.
    """
    out = Console(highlight=False, markup=False, quiet=quiet)
    return out if out.is_terminal else Console(highlight=False, markup=False, quiet=quiet, width=max(out.width, 140))


def check_writable(file: Path) -> None:
    """UsageError where the file cannot be written; called before long work."""
    if not file.parent.is_dir():
        raise UsageError(f"cannot write {file}: there is no folder {file.parent}")
    new = not file.exists()
    try:
        file.open("ab").close()
        if new:
            file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error


def bold_head(head: str, rest: str) -> Text:
    """A line that begins in bold."""
    return Text.assemble((head, "bold"), rest)


def print_result(value: Any, as_json: bool, *parts: RenderableType) -> None:
    """Print a result: as JSON, or these lines and tables for people."""
    if as_json:
        print_json(value)
        return
    for part in parts:
        if isinstance(part, str):
            click.echo(part)
        else:
            console().print(part)


def print_json(value: Any) -> None:
    """Print JSON on standard output, keys in their order."""
    click.echo(json.dumps(value, indent=2))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str | None = None, *, newest_last: bool = False
) -> Table:
    """A table; a column whose heading begins with `>` is aligned to the right, and its figures are not wrapped. Cells
    and rows are bounded (`MAX_CELL_CHARS`, `MAX_ROWS`), whatever a device, a model file or a fleet puts into them. With
    `newest_last` the first rows are left out, otherwise the last ones."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_right_aligned = column.startswith(">")
        result.add_column(
            column.lstrip(">"), justify="right" if is_right_aligned else "left", overflow="fold",
            no_wrap=is_right_aligned and "\n" in column,
        )  # fmt: skip
    all_rows = list(rows)
    for row in all_rows[-MAX_ROWS:] if newest_last else all_rows[:MAX_ROWS]:
        result.add_row(*map(_cut, row))
    if (left_out := len(all_rows) - MAX_ROWS) > 0:
        which = "older" if newest_last else "more"
        text = f"… and {left_out:,} {which} rows; --json prints all of them"
        result.caption, result.caption_justify = Text(text, no_wrap=True, overflow="ignore"), "left"
    return result


def _cut(cell: str | Text) -> str | Text:
    """The cell within `MAX_CELL_CHARS`."""
    if len(cell) <= MAX_CELL_CHARS:
        return cell
    if isinstance(cell, Text):
        cut = cell.copy()
        cut.truncate(MAX_CELL_CHARS, overflow="ellipsis")
        return cut
    return shorten(cell, MAX_CELL_CHARS)


def ms(seconds: float | None) -> str:
    """Seconds as milliseconds with one decimal."""
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def fine_ms(seconds: float | None) -> str:
    """Seconds as milliseconds with three decimals, for single layers, most of which take less than 0.1 ms."""
    return "-" if seconds is None else f"{seconds * 1000:.3f}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, as in `1 device` and `2 devices`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def percent_text(fraction: float | None) -> str:
    """A fraction as a percentage; small ones in scientific notation."""
    if fraction is None:
        return "-"
    return f"{fraction:.2%}" if fraction >= 1e-3 or not fraction else f"{fraction:.1e}".replace("e-0", "e-")


def rate(bytes_per_s: float | None) -> str:
    """Bytes per second as Mbit/s or Gbit/s."""
    if bytes_per_s is None:
        return "-"
    if bytes_per_s == float("inf"):
        return "∞"
    mbit_s = bytes_per_s * 8 / 1e6
    return f"{mbit_s:.3g} Mbit/s" if mbit_s < 999.5 else f"{mbit_s / 1000:.3g} Gbit/s"
