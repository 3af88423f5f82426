"""`edgectl offload`: the offload server as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from edgesplit.seen.logs import FORMATS
from edgesplit_cli.addresses import METRICS
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
@click.option("--metrics", type=METRICS, default=None, help="Answer Prometheus at /metrics there, in plain HTTP.")
@click.option("--log-format", type=click.Choice(FORMATS), default="text", show_default=True, help="Of log lines.")
@click.pass_obj
def serve(data: Path, port: int | None, bind: str | None, metrics: tuple[str, int] | None, log_format: str) -> None:
    """Run the offload server of this data folder here, beside an `edgectl up --no-offload`."""
    from edgesplit_controller.up import offload_arguments

    more = ["--log-format", log_format, *(["--metrics", METRICS.text(metrics)] if metrics else [])]
    sys.exit(serve_main(offload_arguments(data, port=port, bind=bind) + more))
