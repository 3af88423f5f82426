"""`edgectl gc`: deletes what nothing uses any more, under the retention rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.text import Text

from edgesplit.quantities import format_duration, format_size
from edgesplit_cli.options.types import DURATION
from edgesplit_cli.output import console, counted, json_option, print_result, table
from edgesplit_cli.settings import connect


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted, and why the rest stays.")
@click.option(
    "--keep-unused", "keep_unused_s", type=DURATION,
    help="For this time: how long files that nothing refers to are kept; 0s if no release waits to be signed elsewhere."
    " [default: as the controller was told]",
)  # fmt: skip
@json_option
@click.pass_obj
def gc(data: Path, dry_run: bool, keep_unused_s: float | None, as_json: bool) -> None:
    """Delete releases, blobs, copies on the offload server and history that nothing uses.

    What runs, is deployed, or may be rolled back to always stays. The controller does this every hour by itself; the
    rules are options of `edgectl up` (--keep-releases, --keep-versions, --keep-history, --keep-unused).
    """
    with console(quiet=as_json).status(Text("collecting garbage")):
        result = connect(data).post("/v1/collections", {"dry_run": dry_run, "keep_unused_s": keep_unused_s})
    parts = [] if as_json else _views(result)
    print_result(result, as_json, *parts)


def _views(result: dict[str, Any]) -> list[Any]:
    """The result as tables and lines."""
    parts: list[Any] = []
    going = [*result["models"], *result["releases"]]
    verb = "would go" if result["dry_run"] else "gone"
    if going:
        parts.append(table(("", ">size", "why"), map(_row, going), title=verb))
    if result["kept"] and result["dry_run"]:
        parts.append(table(("release", ">size", "why it stays"), map(_row, result["kept"]), title="stays"))
    parts.append(
        f"{verb}: {counted(result['blobs'], 'blob')} of {format_size(result['blob_bytes'])},"
        f" {counted(result['exported'], 'release')} of {format_size(result['exported_bytes'])} on the offload server,"
        f" {counted(result['unlisted'], 'release')} in the signed lists, {counted(result['rollouts'], 'rollout')},"
        f" {counted(result['proposals'], 'proposal')}"
    )
    if result["database_bytes"]:
        parts.append(f"the database is {format_size(result['database_bytes'])} smaller")
    if result["waiting"]:
        parts.append(
            f"unused, and kept until {format_duration(result['rules']['unused_s'])} after they were stored:"
            f" {counted(result['waiting'], 'blob')} of {format_size(result['waiting_bytes'])}"
        )
    return parts


def _row(fate: dict[str, Any]) -> tuple[str, str, str]:
    is_release = fate["name"] != fate["model"]
    name = f"{fate['model']}  {fate['name'][:16]}" if is_release else fate["name"]
    return name, format_size(fate["bytes"]), fate["reason"]
