"""`edgectl demo`: the whole story with real processes on real frames."""

from __future__ import annotations

from pathlib import Path

import click

from edgesplit_cli.output import can_write
from edgesplit_cli.quantities import Number


@click.command()
@click.option("--keep", is_flag=True, help="Leave everything running at the end, until Ctrl-C.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write the summary here."
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("demo.svg"),
    show_default=True,
    help="Draw it here.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Keep the state here. [default: a new one]",
)
@click.option("--pace", type=Number(0.2, 10), default=1.0, show_default=True, help="Stretches the story's time.")
def demo(keep: bool, json_file: Path | None, picture: Path, folder: Path | None, pace: float) -> None:
    """Three emulated devices, one model split three ways, and a bad day for each of them."""
    from edgesplit_cli.demo.run import run_demo

    can_write(picture)
    if json_file is not None and json_file.parent.exists():
        can_write(json_file)

    run_demo(keep=keep, json_file=json_file, picture=picture, folder=folder, pace=pace)
