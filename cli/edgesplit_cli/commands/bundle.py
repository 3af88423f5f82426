"""`edgectl bundle`: releases for devices without a network, on a USB stick or in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from edgesplit.controller_client.settings import cache_folder
from edgesplit.release.bundle_format import Index
from edgesplit_cli.commands.options.kit import kit_options
from edgesplit_cli.output import console, json_option, print_json, size
from edgesplit_cli.quantities import LIFE
from edgesplit_cli.settings import connect
from edgesplit_provisioning.bundle.build import Wish, check_target, make_bundle
from edgesplit_provisioning.bundle.writer import sink
from edgesplit_provisioning.kit import Target, build_kit


@click.command()
@click.option(
    "--to", type=click.Path(path_type=Path), required=True, metavar="DIR|FILE.tar", help="A stick's folder, or a file."
)
@click.option(
    "--for",
    "devices",
    multiple=True,
    default=("all",),
    show_default=True,
    metavar="DEVICE|group=NAME|all",
    help="Devices that it is for; repeatable.",
)
@click.option(
    "--release",
    "models",
    multiple=True,
    metavar="MODEL",
    help="Only the release of this model; repeatable. [default: all that they shall run]",
)
@click.option(
    "--valid",
    type=LIFE,
    default="1d",
    show_default=True,
    help="It must install for so long at least, as 3d; the error says what limits it.",
)
@click.option("--kit", "with_kit", is_flag=True, help="The agent's installer too (see `edgectl kit`).")
@kit_options("With --kit: ")
@json_option
@click.pass_obj
def bundle(
    data: Path,
    /,
    to: Path,
    devices: tuple[str, ...],
    models: tuple[str, ...],
    valid: int,
    with_kit: bool,
    python: str,
    machine: str,
    extras: tuple[str, ...],
    wheelhouse: Path | None,
    as_json: bool,
) -> None:
    """Write what devices shall run to a USB stick: signatures, statements and chunks, for where there is no network.

    On the device `edgesplit-agent bundle apply` takes it, by the rules of the network: what has expired, is older than
    what the device knows, or is for another device installs nothing. Made again, it keeps what is there already.
    """
    check_target(to)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    out = console(quiet=as_json)
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("bundle", total=None)
        kit, kit_for = None, ""
        if with_kit:
            target = Target(python=python, machine=machine)
            kit = build_kit(target, extras=extras, cache=cache_folder(), wheelhouse=wheelhouse,
                            progress=lambda text: bar.update(task, description=text))  # fmt: skip
            kit_for = str(target)
        bar.update(task, description="bundle")
        wish = Wish(devices=devices, models=models, valid_s=int(valid), kit=kit, kit_for=kit_for)
        with sink(to) as opened:
            index = make_bundle(
                connect(data), wish, opened, lambda done, of: bar.update(task, completed=done, total=of)
            )  # fmt: skip
    if as_json:
        print_json({"to": str(to), **shown(index)})
        return
    for line in lines(to, index):
        click.echo(line)


def shown(index: Index) -> dict[str, Any]:
    """As JSON."""
    told: dict[str, Any] = msgspec.to_builtins(index)
    return told


def lines(to: Path, index: Index) -> list[str]:
    """For people."""
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(index.valid_until))
    total = sum(one.bytes for one in index.releases)
    found = [f"{to}: {len(index.releases)} releases ({size(total)}) for {len(index.devices)} devices"]
    found += [f"  {one.model}  {one.release[:12]}  {size(one.bytes)}" for one in index.releases]
    found.append(f"it installs until {until}; then its {index.limited_by} ends")
    found.append(f"on each device: edgesplit-agent bundle apply {to.name} --data DIR")
    if index.kit:
        found.append(f"the agent itself, for {index.kit}: sh edgesplit/install.sh, as root")
    return found
