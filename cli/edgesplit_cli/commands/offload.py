"""`edgectl offload`: the offload server as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from edgesplit_offload.main import main as serve_main


@click.group()
def offload() -> None:
    """Finish inferences for devices."""


@offload.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=None,
    help="Port to listen on. [default: the controller's offload port]",
)
@click.option("--bind", default=None, help="Address to listen on. [default: the controller's]")
@click.pass_obj
def serve(data: Path, port: int | None, bind: str | None) -> None:
    """Run the offload server of this data folder here, beside an `edgectl up --no-offload`."""
    from edgesplit_controller.up import offload_arguments

    sys.exit(serve_main(offload_arguments(data, port=port, bind=bind)))
