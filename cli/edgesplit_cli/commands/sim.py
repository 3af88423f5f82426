"""`edgectl sim`: many simulated devices, in virtual time or at a real controller."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click

from edgesplit.errors import UsageError
from edgesplit.quantities import ABOVE_ZERO, parse_percentage
from edgesplit_cli.options.types import DURATION, NEW_FOLDER, POSITIVE, SIZE, ParsedType
from edgesplit_cli.output import json_option, print_result
from edgesplit_cli.settings import connect

RAM_DISK = Path("/dev/shm")
"""A RAM disk, used for the devices' disks where it has room."""
BYTES_PER_DEVICE = 400_000


def parse_profile_shares(text: str) -> dict[str, float]:
    """Share by device profile; profiles without a share divide the rest."""
    shares: dict[str, float] = {}
    unspecified = []
    for part in text.split(","):
        name, equals, share = part.strip().partition("=")
        if not name or name in shares or name in unspecified:
            raise UsageError(f"not a list of profiles: {text[:60]!r} (as in raspberrypi4=70%,jetson-nano)")
        if equals:
            shares[name] = parse_percentage(share, least=ABOVE_ZERO)
        else:
            unspecified.append(name)
    rest = 1.0 - sum(shares.values())
    if rest < -1e-9 or (unspecified and rest <= 1e-9):
        raise UsageError(f"the shares of {text[:60]!r} add up to more than 100%")
    shares.update(dict.fromkeys(unspecified, rest / len(unspecified) if unspecified else 0.0))
    return shares


PROFILES = ParsedType("profiles", parse_profile_shares)


@click.command()
@click.option("--devices", type=click.IntRange(1, 50_000), default=10, show_default=True, help="Number of devices.")
@click.option(
    "--profile", "profiles", type=PROFILES, default="raspberrypi4", show_default=True,
    help="Device profiles, with shares: raspberrypi4=70%,jetson-nano.",
)  # fmt: skip
@click.option("--link", default="wifi", show_default=True, help="Link to the offload server: wifi, lte, 8mbit/40ms.")
@click.option(
    "--faults", metavar="FILE", help="Faults file (docs/simulation.md), or `usual` for a bad month. [default: none]"
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of everything random.")
@click.option(
    "--for", "lasts_s", type=DURATION, default="10m", show_default=True,
    help="Duration of the run, as in 90s, 10m, 2h or 30d.",
)  # fmt: skip
@click.option("--virtual", is_flag=True, help="In virtual time, with a controller and a broker in this process.")
@click.option(
    "--request-every", type=DURATION, default="2m", show_default=True,
    help="Mean interval between two requests on a device; 0s: no requests.",
)  # fmt: skip
@click.option(
    "--telemetry-every", type=DURATION, help="Interval of telemetry. [default: 10m in virtual time, 10s in real time]"
)
@click.option(
    "--health", "health_s", type=DURATION,
    help="Trial period of a release. [default: 10m in virtual time, 10s in real time]",
)  # fmt: skip
@click.option("--first", type=POSITIVE, default=1, help="Number of the first device, where several of these run.")
@click.option("--prefix", default="sim", show_default=True, help="Prefix of the devices' names, at a real controller.")
@click.option("--group", default="simulated", show_default=True, help="Group of the devices, at a real controller.")
@click.option(
    "--folder",
    type=NEW_FOLDER,
    help="Keep the devices' disks here: the next run finds them enrolled. [default: a new folder in memory]",
)
@click.option(
    "--keep-telemetry", "keeps_bytes", type=SIZE, default=0,
    help="Telemetry that each device keeps on its disk without a link, as in 64KiB; 0: none, for fleets of thousands.",
)  # fmt: skip
@json_option
@click.pass_obj
def sim(
    data: Path, devices: int, profiles: Mapping[str, float], link: str, faults: str | None, seed: int, lasts_s: float,
    virtual: bool, request_every: float, telemetry_every: float | None, health_s: float | None, first: int, prefix: str,
    group: str, folder: Path | None, keeps_bytes: float, as_json: bool,
) -> None:  # fmt: skip
    """Simulated devices: the agent's own decisions, with a simulated runtime. Everything they report is marked as
    simulated.

    At the controller that runs here they are thousands of real MQTT sessions with certificates of their own. With
    --virtual nothing else is needed: days pass in seconds, and the same seed gives the same run. Ends with a report on
    the invariants that must always hold; exits with 1 where one was violated.
    """
    from edgesplit.links import parse_link
    from edgesplit_simulation.faults.schedule import USUAL_FAULTS, parse_faults, read_faults

    parse_link(link)
    chosen = () if faults is None else parse_faults(USUAL_FAULTS) if faults == "usual" else read_faults(Path(faults))
    with _devices_folder(folder, devices) as disks, _without_logs():
        on_progress = _progress_printer(as_json)
        if virtual:
            from edgesplit_simulation.run import run_virtual

            summary = run_virtual(
                disks, devices, seed=seed, classes=profiles, link=parse_link(link), faults=chosen, duration_s=lasts_s,
                request_every_s=request_every, telemetry_every_s=telemetry_every or 600.0,
                health_s=health_s or 600.0, telemetry_backlog_bytes=int(keeps_bytes), on_progress=on_progress,
            )  # fmt: skip
        else:
            from edgesplit_simulation.run import run_real

            summary = run_real(
                disks, connect(data), devices, first=first, prefix=prefix, group=group, seed=seed, classes=profiles,
                link=link, faults=chosen, duration_s=lasts_s, request_every_s=request_every,
                telemetry_every_s=telemetry_every or 10.0, health_s=health_s or 10.0,
                telemetry_backlog_bytes=int(keeps_bytes), on_progress=on_progress,
            )  # fmt: skip
    print_result(summary.to_dict(), as_json, summary.report_text())
    if summary.broken:
        raise click.exceptions.Exit(1)


def _progress_printer(as_json: bool) -> Callable[[str], None]:
    """The progress callback: on a terminal one line that is overwritten, elsewhere a line per call."""
    if as_json:
        return lambda line: None
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        return lambda line: click.echo(f"\r{line[:width]:<{width}}", err=True, nl=False)
    return lambda line: click.echo(line, err=True)


@contextmanager
def _devices_folder(folder: Path | None, devices: int) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    fits_in_memory = (
        os.access(RAM_DISK, os.W_OK) and shutil.disk_usage(RAM_DISK).free > devices * BYTES_PER_DEVICE + 2**27
    )
    with tempfile.TemporaryDirectory(prefix="edgesplit-sim-", dir=RAM_DISK if fits_in_memory else None) as created:
        yield Path(created)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Suppress logging: the log lines of thousands of agents are not for one terminal."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(previous)
