"""How results are printed: tables for people, JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgesplit.errors import UsageError

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def console(*, quiet: bool = False) -> Console:
    """Standard output; wide enough for tables where there is no terminal. Quiet: nothing is printed.

    No markup: what models and layers are called is printed as it is, brackets too. Styles come as `Text`.
    """
    out = Console(highlight=False, markup=False, quiet=quiet)
    return out if out.is_terminal else Console(highlight=False, markup=False, quiet=quiet, width=max(out.width, 140))


def can_write(file: Path) -> None:
    """UsageError where nothing can be written there: better before long work than after it."""
    if not file.parent.is_dir():
        raise UsageError(f"cannot write {file}: there is no folder {file.parent}")
    new = not file.exists()
    try:
        file.open("ab").close()
        if new:
            file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error


def headed(head: str, rest: str) -> Text:
    """A line that begins in bold."""
    return Text.assemble((head, "bold"), rest)


def print_json(value: Any) -> None:
    """JSON on standard output, keys as they come."""
    click.echo(json.dumps(value, indent=2))


def plain(said: Any) -> Any:
    """What a device said of itself, with nothing left in it that a terminal would obey."""
    if isinstance(said, str):
        return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in said)
    if isinstance(said, dict):
        return {plain(key): plain(value) for key, value in said.items()}
    return [plain(one) for one in said] if isinstance(said, list) else said


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str | None = None) -> Table:
    """A table; a column whose heading begins with `>` is aligned to the right, and its figures are never broken."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right and "\n" in column
        )
    for row in rows:
        made.add_row(*row)
    return made


def ms(seconds: float | None) -> str:
    """Seconds as milliseconds, for people."""
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def fine_ms(seconds: float | None) -> str:
    """The same where single layers are timed: most of them take less than 0.1 ms."""
    return "-" if seconds is None else f"{seconds * 1000:.3f}"


def share(part: float | None) -> str:
    """A part of one as per cent, for people: small ones with as many digits as say something."""
    return "-" if part is None else f"{part:.2%}" if part >= 1e-3 or not part else f"{part:.1e}".replace("e-0", "e-")


def size(count: float | None) -> str:
    """Bytes, for people."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def rate(bytes_per_s: float | None) -> str:
    """Bytes per second as Mbit/s, for people."""
    if bytes_per_s is None:
        return "-"
    if bytes_per_s == float("inf"):
        return "∞"
    mbit_s = bytes_per_s * 8 / 1e6
    return f"{mbit_s:.3g} Mbit/s" if mbit_s < 999.5 else f"{mbit_s / 1000:.3g} Gbit/s"
