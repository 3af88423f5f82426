"""`edgectl release`: lists and removes releases."""

from __future__ import annotations

import time
from pathlib import Path

import click

from edgesplit.quantities import format_duration
from edgesplit_cli.output import json_option, print_result, table
from edgesplit_cli.settings import connect, segment


@click.group()
def release() -> None:
    """List the releases of models, remove one."""


@release.command("list")
@json_option
@click.pass_obj
def list_releases(data: Path, as_json: bool) -> None:
    """List every release of a model, newest last."""
    releases = connect(data).get("/v1/releases")
    rows = [
        (entry["release"][:16], entry["model"], entry.get("partition", ""), _age(entry["created"]))
        for entry in releases
    ]
    print_result(releases, as_json, table(("release", "model", "partition", ">age"), rows, newest_last=True))


@release.command()
@click.argument("digest", metavar="RELEASE")
@json_option
@click.pass_obj
def remove(data: Path, digest: str, as_json: bool) -> None:
    """Remove RELEASE, by its digest or at least the first 8 characters of it.

    It is refused while a device runs it, or a rollout in progress may need it. Its files are deleted by `edgectl gc`.
    """
    removed = connect(data).delete(f"/v1/releases/{segment(digest)}")
    names = ", ".join(name[:16] for name in removed["releases"])
    print_result(removed, as_json, f"removed release {names}; `edgectl gc` deletes its files")


def _age(created: float) -> str:
    return format_duration(max(1.0, time.time() - created))
