"""`edgectl up`: runs a controller."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import click

from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.credentials import is_known_host
from edgesplit.errors import EdgeError, UsageError
from edgesplit.observability.log_format import FORMATS
from edgesplit.process.start_up import imports_not_collected
from edgesplit_cli.commands.dashboard import login_address
from edgesplit_cli.kept_options import KEPT_META, KeepsOptions, Value, keep_given, shown
from edgesplit_cli.options.types import ANY_PATH, DURATION, METRICS, PORT, S3_URL, SIZE, format_address
from edgesplit_controller.settings import PORT_FIELDS, RETENTION_FIELDS, BrokerKind, Settings


@click.command(cls=KeepsOptions)
@click.option("--api-port", type=PORT, help="Port of the HTTPS API; 0 chooses one. [default: 8443]")
@click.option("--mqtt-port", type=PORT, help="Port of the broker; 0 chooses one. [default: 8883]")
@click.option("--offload-port", type=PORT, help="Port of the offload server. [default: 8500]")
@click.option("--bind", help="Address to listen on. [default: 127.0.0.1, or every address with --host]")
@click.option(
    "--host", "hosts", multiple=True,
    help="Name or address that devices use to reach this machine; may be given several times.",
)  # fmt: skip
@click.option("--no-offload", is_flag=True, help="Do not run the offload server here (see `edgectl offload serve`).")
@click.option(
    "--database", envvar="EDGESPLIT_DATABASE", default="",
    help="postgresql://USER:PASSWORD@HOST/NAME (or $EDGESPLIT_DATABASE). [default: SQLite in the data folder]",
)  # fmt: skip
@click.option(
    "--blobs", type=S3_URL, envvar="EDGESPLIT_BLOBS", default="",
    help="s3://BUCKET/PREFIX for models and chunks (or $EDGESPLIT_BLOBS). [default: in the data folder]",
)  # fmt: skip
@click.option(
    "--blob-cache", "blob_cache_bytes", type=SIZE, default="10GB", show_default=True,
    help="Largest local cache of what is in --blobs.",
)  # fmt: skip
@click.option("--broker", default="", help="mqtts://HOST:8883 of your own broker. [default: mosquitto as a child]")
@click.option(
    "--broker-memory", "broker_memory_bytes", type=SIZE, default=0,
    help="Memory that mosquitto may allocate, as in 768MiB. [default: half of this machine's]",
)  # fmt: skip
@click.option("--advertised-broker", default="", help="HOST:PORT by which devices reach the broker of --broker.")
@click.option(
    "--on-revocation",
    default="",
    help="Shell command that installs the revocation list in $EDGESPLIT_CRL at your own broker.",
)
@click.option(
    "--print-broker-config",
    type=click.Choice(get_args(BrokerKind)),
    help="Write what your own broker at --broker needs into --out, and exit.",
)
@click.option("--out", type=ANY_PATH, help="Folder for --print-broker-config.")
@click.option("--installed-at", type=ANY_PATH, help="Folder of these files on the broker's machine.")
@click.option(
    "--processes", type=click.IntRange(1, 16), default=1, show_default=True, help="Processes that serve the API."
)
@click.option(
    "--join", is_flag=True, help="Join a running controller as a further process; database and data folder are shared."
)
@click.option(
    "--offload-url", default="", help="https://HOST:PORT of offload servers elsewhere, as devices reach them."
)
@click.option("--api-url", default="", help="URL of the API for devices, such as a load balancer's.")
@click.option("--metrics", type=METRICS, help="Address of the controller's Prometheus metrics.")
@click.option("--offload-metrics", type=METRICS, help="Address of the offload server's Prometheus metrics.")
@click.option(
    "--offload-mode", type=click.Choice(["exact", "fast"]), default="exact", show_default=True,
    help="exact: results are bit-identical to the whole model's. fast: more operators are fused; last digits may"
    " differ.",
)  # fmt: skip
@click.option(
    "--telemetry-every", "telemetry_s", type=DURATION, default="2s", show_default=True,
    help="Interval of each device's telemetry: for a thousand devices 10s, for ten thousand 60s.",
)  # fmt: skip
@click.option(
    "--keep-releases", type=click.IntRange(0), default=3, show_default=True,
    help="Newest releases of each model that garbage collection keeps though nothing uses them.",
)  # fmt: skip
@click.option(
    "--keep-versions", type=click.IntRange(0), default=0, show_default="all",
    help="Newest versions of each model that it keeps though nothing uses them; 0: all.",
)  # fmt: skip
@click.option(
    "--keep-history", "keep_history_s", type=DURATION, default="90d", show_default=True,
    help="How long it keeps rollouts and proposals after their end.",
)  # fmt: skip
@click.option(
    "--keep-unused", "keep_unused_s", type=DURATION, default="1d", show_default=True,
    help="How long it keeps files that nothing refers to, and unused new releases: as long as a release may take to be"
    " signed on another machine.",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(FORMATS), default="text", show_default=True, help="Format of log lines."
)
@click.option("--force", is_flag=True, help="Start also where enrolled devices would not find the controller any more.")
@click.pass_context
def up(context: click.Context, /, **options: Any) -> None:
    """Run a controller here: API, broker, database and offload server, all state in one folder. Ctrl-C stops it.

    The options are kept for the next start (`edgectl config` shows and changes them).
    """
    with imports_not_collected():
        from edgesplit_controller.app.main import run, write_external_broker

    data: Path = context.obj
    settings = to_settings(data, options)
    kind: BrokerKind | None = options["print_broker_config"]
    if kind is None:
        run(settings, ready=partial(_on_ready, data, context.meta[KEPT_META]))
        return
    out: Path | None = options["out"]
    if out is None:
        raise UsageError("missing option --out DIR: the folder for the broker's files")
    for file in write_external_broker(settings, kind, out, options["installed_at"]):
        click.echo(file)


def to_settings(data: Path, options: Mapping[str, Any]) -> Settings:
    """The controller's settings by the options of `edgectl up`; UsageError if they do not fit together."""
    chosen = {name: options[name] for name in (*PORT_FIELDS, "bind") if options[name] is not None}
    same = (
        "metrics", "log_format", "database", "broker", "advertised_broker", "on_revocation", "processes", "join",
        "api_url", "offload_url", "telemetry_s", "broker_memory_bytes", "blobs", "blob_cache_bytes", "force",
        *RETENTION_FIELDS,
    )  # fmt: skip
    chosen |= {name: options[name] for name in same}
    return Settings(
        data=data, hosts=options["hosts"], offload=not options["no_offload"], offload_mode=options["offload_mode"],
        offload_metrics=format_address(options["offload_metrics"]), **chosen,
    )  # fmt: skip


def _on_ready(data: Path, given: Mapping[str, Value], addresses: dict[str, Any]) -> None:
    """Keep the options, now that a start with them has succeeded, and print what is reached where."""
    kept = keep_given(data, given)
    click.echo(f"controller: ready at {addresses['api_url']}")
    click.echo(f"broker:     mqtts://{addresses.get('mqtt_host', '127.0.0.1')}:{addresses['mqtt_port']}")
    if addresses.get("offload_url"):
        click.echo(f"offload:    {addresses['offload_url']}")
    click.echo(f"dashboard:  {_dashboard_line(data, addresses['api_url'])}")
    if kept:
        texts = ", ".join(f"{name} {shown(value)}" for name, value in sorted(kept.items()))
        click.echo(f"settings:   {texts} (kept for every start; `edgectl config` changes them)")
    if unknown := [host for host in _hosts(addresses) if not is_known_host(host)]:
        click.echo(
            f"warning:    this machine finds no address for {', '.join(unknown)}: devices must, or they reach nothing"
            " (`edgectl config` shows where it comes from)"
        )
    for notice in addresses.get("notices", ()):
        click.echo(f"keys:       {notice}")
    click.echo("Ctrl-C stops it; everything is kept for the next start.")


def _hosts(addresses: Mapping[str, Any]) -> list[str]:
    """The names by which devices reach the controller, each once."""
    urls = [addresses["api_url"], addresses.get("offload_url") or "", f"mqtts://{addresses.get('mqtt_host', '')}"]
    return list(dict.fromkeys(host for url in urls if (host := urlsplit(url).hostname)))


def _dashboard_line(data: Path, url: str) -> str:
    """The dashboard's address, on a terminal with a one-time code; elsewhere the output may be a log that others read,
    so only the command that makes one."""
    from edgesplit_controller.dashboard.assets import is_built

    if not is_built():
        return f"{url}/ says how to build it: this installation has none"
    if not sys.stdout.isatty():
        return f"{url}/ (`edgectl dashboard` prints an address that signs in once)"
    try:
        address = login_address(ControllerClient.connect(data))[0]
        return f"{address} (signs in once, within two minutes; `edgectl dashboard` makes another)"
    except EdgeError as error:
        return f"{url}/ (no one-time address: {error})"
