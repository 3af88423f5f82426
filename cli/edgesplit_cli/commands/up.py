"""`edgectl up`: runs a controller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from edgesplit.errors import UsageError
from edgesplit.observability.log_format import FORMATS, Format
from edgesplit_cli.options.types import ANY_PATH, DURATION, METRICS, PORT, format_address
from edgesplit_controller.settings import BrokerKind, Settings

if TYPE_CHECKING:
    from edgesplit.runtime.options import Optimise


@click.command()
@click.option("--api-port", type=PORT, help="Port of the HTTPS API; 0 chooses one. [default: 8443]")
@click.option("--mqtt-port", type=PORT, help="Port of the broker; 0 chooses one. [default: 8883]")
@click.option("--offload-port", type=PORT, help="Port of the offload server. [default: 8500]")
@click.option("--bind", help="Address to listen on. [default: 127.0.0.1]")
@click.option(
    "--host", "hosts", multiple=True,
    help="Name or address that devices use to reach this machine; may be given several times.",
)  # fmt: skip
@click.option("--no-offload", is_flag=True, help="Do not run the offload server here (see `edgectl offload serve`).")
@click.option(
    "--database", envvar="EDGESPLIT_DATABASE", default="",
    help="postgresql://USER:PASSWORD@HOST/NAME (or $EDGESPLIT_DATABASE). [default: SQLite in the data folder]",
)  # fmt: skip
@click.option("--broker", default="", help="mqtts://HOST:8883 of your own broker. [default: mosquitto as a child]")
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
    "--log-format", type=click.Choice(FORMATS), default="text", show_default=True, help="Format of log lines."
)
@click.pass_obj
def up(
    data: Path, api_port: int | None, mqtt_port: int | None, offload_port: int | None, bind: str | None,
    hosts: tuple[str, ...], no_offload: bool, database: str, broker: str, advertised_broker: str, on_revocation: str,
    print_broker_config: BrokerKind | None, out: Path | None, installed_at: Path | None, processes: int, join: bool,
    offload_url: str, api_url: str, metrics: tuple[str, int] | None, offload_metrics: tuple[str, int] | None,
    offload_mode: Optimise, telemetry_s: float, log_format: Format,
) -> None:  # fmt: skip
    """Run a controller here: API, broker, database and offload server, all state in one folder. Ctrl-C stops it."""
    from edgesplit_controller.app.main import run, write_external_broker

    ports: dict[str, Any] = {"api_port": api_port, "mqtt_port": mqtt_port, "offload_port": offload_port, "bind": bind}
    options = {name: value for name, value in ports.items() if value is not None}
    options |= {"metrics": metrics, "offload_metrics": format_address(offload_metrics), "log_format": log_format}
    options |= {
        "database": database,
        "broker": broker,
        "advertised_broker": advertised_broker,
        "on_revocation": on_revocation,
    }
    options |= {"processes": processes, "join": join, "api_url": api_url, "offload_url": offload_url}
    options |= {"telemetry_s": telemetry_s}
    settings = Settings(data=data, hosts=hosts, offload=not no_offload, offload_mode=offload_mode, **options)
    if print_broker_config is None:
        run(settings, ready=_print_addresses)
        return
    if out is None:
        raise UsageError("missing option --out DIR: the folder for the broker's files")
    for file in write_external_broker(settings, print_broker_config, out, installed_at):
        click.echo(file)


def _print_addresses(addresses: dict[str, Any]) -> None:
    click.echo(f"controller: ready at {addresses['api_url']}")
    click.echo(f"broker:     mqtts://{addresses.get('mqtt_host', '127.0.0.1')}:{addresses['mqtt_port']}")
    if addresses.get("offload_url"):
        click.echo(f"offload:    {addresses['offload_url']}")
    for notice in addresses.get("notices", ()):
        click.echo(f"keys:       {notice}")
    click.echo("Ctrl-C stops it; everything is kept for the next start.")
