"""`edgectl offload`: runs the offload server as a process of its own, and writes its credentials."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from edgesplit.atomic_files import write_durably
from edgesplit.errors import UsageError
from edgesplit.observability.log_format import FORMATS, LEVELS
from edgesplit_cli.options.types import ANY_PATH, METRICS, NEW_FOLDER, PORT, POSITIVE, format_address
from edgesplit_cli.output import json_option, print_result
from edgesplit_offload.main import main as serve_main


@click.group()
def offload() -> None:
    """Run offload servers, which finish inferences for devices."""


@offload.command()
@click.option(
    "--port", type=PORT, help="Port to listen on. [default: the controller's offload port; 8500 with --releases]"
)
@click.option("--bind", help="Address to listen on. [default: the controller's, or 127.0.0.1]")
@click.option(
    "--releases",
    type=NEW_FOLDER,
    help="Folder of releases, where there is no controller's data folder: with --root, and --cert, --key and --ca.",
)
@click.option("--root", type=ANY_PATH, help="TUF root that the releases must lead back to.")
@click.option("--cert", type=ANY_PATH, help="This server's certificate (PEM).")
@click.option("--key", type=ANY_PATH, help="Its private key (PEM).")
@click.option("--ca", type=ANY_PATH, help="Authority that clients' certificates must come from (PEM).")
@click.option("--revoked", type=ANY_PATH, help="The authority's revocation list (PEM).")
@click.option("--processes", type=POSITIVE, help="Serving processes behind the port. [default: by the cores]")
@click.option("--threads", type=POSITIVE, default=1, show_default=True, help="Threads of one run.")
@click.option(
    "--mode", type=click.Choice(["exact", "fast"]), default="exact", show_default=True,
    help="exact: the whole model's bits on one machine. fast: onnxruntime may fuse further, and last digits differ.",
)  # fmt: skip
@click.option(
    "--concurrent-runs", type=POSITIVE, help="Runs at once in each process. [default: all together the cores]"
)
@click.option("--memory", metavar="SIZE", help="Memory for all loaded models, as in 2GB. [default: no limit]")
@click.option(
    "--batching", type=click.Choice(["auto", "off"]), default="auto", show_default=True,
    help="auto: requests share runs where that is measured to gain and gives the same bits.",
)  # fmt: skip
@click.option(
    "--connections", type=POSITIVE, default=256, show_default=True, help="Concurrent connections in each process."
)
@click.option(
    "--not-ready-for", type=click.FloatRange(0), default=0.0,
    help="Seconds to go on serving after SIGTERM, reported as not ready.",
)  # fmt: skip
@click.option(
    "--drain", type=click.FloatRange(0), default=5.0, show_default=True, help="Seconds for running requests at the end."
)
@click.option("--metrics", type=METRICS, help="Answer Prometheus at /metrics there, in plain HTTP.")
@click.option("--log", type=click.Choice(LEVELS), default="info", show_default=True, help="Level of log lines.")
@click.option(
    "--log-format", type=click.Choice(FORMATS), default="text", show_default=True, help="Format of log lines."
)
@click.pass_obj
def serve(data: Path, /, port: int | None, bind: str | None, releases: Path | None, **options: Any) -> None:
    """Run an offload server here: for this data folder, beside an `edgectl up --no-offload`, or, with --releases, for
    any folder of releases on a machine without a controller.

    SIGTERM lets running requests finish. /v2/health/ready reports whether it is ready or about to end.
    """
    if options["metrics"] is not None:
        options["metrics"] = format_address(options["metrics"])
    arguments = [
        argument for name, value in options.items() if value is not None for argument in _to_option(name, value)
    ]
    if releases is not None:
        arguments += _to_option("releases", releases)
        arguments += _to_option("port", port) if port is not None else []
        arguments += _to_option("host", bind) if bind is not None else []
        sys.exit(serve_main(arguments))
    if misplaced := [name for name in ("root", "cert", "key", "ca", "revoked") if options[name] is not None]:
        raise click.UsageError(f"--{misplaced[0]} goes with --releases: a controller's data folder has its own")
    from edgesplit_controller.app.offload_process import offload_arguments

    sys.exit(serve_main([*offload_arguments(data, port=port, bind=bind), *arguments]))


@offload.command()
@click.option(
    "--host", "hosts", multiple=True, required=True, help="Name or address by which devices reach it; repeatable."
)
@click.option("--out", type=NEW_FOLDER, required=True, help="Folder to write.")
@json_option
@click.pass_obj
def credentials(data: Path, /, hosts: tuple[str, ...], out: Path, as_json: bool) -> None:
    """Write the files that `serve --releases` needs on another machine: offload.pem, offload.key (a secret) and ca.pem.

    Good for a year, for any number of servers under these names; no controller needs to run. Besides, such a server
    needs the folder `offload` of the controller's data: root.json, revoked.pem and releases, shared or copied.
    """
    from edgesplit_controller.pki.authority import Authority
    from edgesplit_controller.settings import check_host

    for host in hosts:
        check_host(host)
    if not (data / "keys" / "ca.pem").is_file():
        raise UsageError(f"{data} is not a controller's data folder yet: `edgectl --data {data} up` creates it")
    authority = Authority(data / "keys")
    issued = authority.issue_server("offload-elsewhere", hosts)
    files = {
        "ca.pem": authority.ca_pem.encode(),
        "offload.pem": issued.certificate_file.read_bytes(),
        "offload.key": issued.key_file.read_bytes(),
    }
    for name, content in files.items():
        write_durably(out / name, content, mode=0o600 if name.endswith(".key") else 0o644)
    written = [str(out / name) for name in sorted(files)]
    print_result({"files": written, "hosts": list(hosts)}, as_json, *written)


def _to_option(name: str, value: object) -> list[str]:
    return [f"--{name.replace('_', '-')}", str(value)]
