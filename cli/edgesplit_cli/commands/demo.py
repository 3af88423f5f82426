"""`edgectl demo`: the whole demonstration with real processes on real frames."""

from __future__ import annotations

from pathlib import Path

import click

from edgesplit_cli.options.types import NEW_FILE, NEW_FOLDER, Number
from edgesplit_cli.output import check_writable


@click.command()
@click.option("--keep", is_flag=True, help="Leave everything running at the end, until Ctrl-C.")
@click.option("--json", "json_file", type=NEW_FILE, help="Write the summary here.")
@click.option("--picture", type=NEW_FILE, default=Path("demo.svg"), show_default=True, help="File of the picture.")
@click.option("--folder", type=NEW_FOLDER, help="Keep the state here. [default: a new one]")
@click.option("--pace", type=Number(0.2, 10), default=1.0, show_default=True, help="Factor on the demo's duration.")
def demo(keep: bool, json_file: Path | None, picture: Path, folder: Path | None, pace: float) -> None:
    """Three emulated devices, one task done three ways, and a series of failures for each of them."""
    from edgesplit_cli.demo.run import run_demo

    check_writable(picture)
    if json_file is not None and json_file.parent.exists():
        check_writable(json_file)

    run_demo(keep=keep, json_file=json_file, picture=picture, folder=folder, time_scale=pace)
