"""`edgectl audit`: shows, verifies and exports the audit log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from edgesplit.audit_chain import verify_chain
from edgesplit.errors import TrustError, UsageError
from edgesplit.terminal_text import printable
from edgesplit_cli.options.types import FILE, NEW_FILE
from edgesplit_cli.output import check_writable, json_option, print_json, print_result, table
from edgesplit_cli.settings import connect

COLUMNS = ("line", "time", "operator", "address", "call", "subject", "outcome")


@click.group()
def audit() -> None:
    """The audit log: requests, operators and outcomes. The log is append-only, and each line contains
    a hash of the lines before it."""


@audit.command()
@click.option("--newest", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Number of lines.")
@json_option
@click.pass_obj
def show(data: Path, newest: int, as_json: bool) -> None:
    """Show the newest lines."""
    lines = connect(data).get("/v1/audit", newest=newest)
    print_result(lines, as_json, table(COLUMNS, [_row(line) for line in printable(lines)], newest_last=True))


@audit.command()
@click.argument("file", type=FILE, required=False)
@click.option("--expect", default="", metavar="HASH", help="The hash of a line that was noted elsewhere before.")
@json_option
@click.pass_obj
def verify(data: Path, file: Path | None, expect: str, as_json: bool) -> None:
    """Verify that no line was changed: of the controller's log, or of an export in FILE.

    Note the hash that is printed in a place where the controller's owner cannot write, and give it with --expect next
    time: then a log that was rewritten from the start is noticed too.
    """
    result = (
        verify_chain(_lines(file), expect) if file else connect(data).get("/v1/audit/verify", expect=expect or None)
    )
    if as_json:
        print_json(result)
    if result["problem"]:
        raise TrustError(f"the audit log is not what was written: {result['problem']}")
    if not as_json:
        click.echo(f"{result['lines']} lines are as they were written; the last one's hash is {result['hash']}")


@audit.command()
@click.option("--out", type=NEW_FILE, required=True, help="The file: one JSON object a line.")
@click.pass_obj
def export(data: Path, out: Path) -> None:
    """Write the whole log to a file, for `edgectl audit verify FILE` and for other programs."""
    check_writable(out)
    count = 0
    with out.open("wb") as file:
        for line in connect(data).get_lines("/v1/audit/export"):
            file.write(line)
            count += 1
    click.echo(f"{count} lines in {out}")


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as opened:
        for number, raw in enumerate(opened, 1):
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{file}, line {number}: no JSON; `edgectl audit export` writes such files") from error
            yield line if isinstance(line, dict) else {}


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(line["at"]))
    status = line["detail"].get("status", "")
    who = line["operator"] or line["detail"].get("certificate", "?")
    return (
        str(line["number"]),
        at,
        who,
        line["address"],
        line["what"],
        line["subject"],
        f"{line['outcome']} {status}".strip(),
    )
