"""`edgectl bundle`: release bundles for devices without a network, on a USB stick or in a file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from edgesplit.controller_client.settings import cache_folder
from edgesplit.quantities import format_size
from edgesplit.release.bundle_format import BundleIndex
from edgesplit_cli.options.kit import kit_options
from edgesplit_cli.options.types import ANY_PATH, DURATION
from edgesplit_cli.output import counted, json_option, print_result
from edgesplit_cli.progress import BYTES, progress_bar
from edgesplit_cli.settings import connect
from edgesplit_provisioning.bundle.build import BundleRequest, check_target, make_bundle
from edgesplit_provisioning.bundle.writer import open_sink
from edgesplit_provisioning.kit import Target, build_kit


@click.command()
@click.option(
    "--to", type=ANY_PATH, required=True, metavar="DIR|FILE.tar", help="Folder of a USB stick, or a tar file."
)
@click.option(
    "--for", "devices", multiple=True, default=("all",), show_default=True, metavar="DEVICE|group=NAME|all",
    help="Devices that it is for; repeatable.",
)  # fmt: skip
@click.option(
    "--release", "models", multiple=True, metavar="MODEL",
    help="Only the release of this model; repeatable. [default: all releases assigned to them]",
)  # fmt: skip
@click.option(
    "--valid", type=DURATION, default="1d", show_default=True,
    help="How long it must stay installable at least, as in 3d; the error names what limits it.",
)  # fmt: skip
@click.option("--kit", "with_kit", is_flag=True, help="The agent's installer too (see `edgectl kit`).")
@kit_options("With --kit: ")
@json_option
@click.pass_obj
def bundle(
    data: Path, /, to: Path, devices: tuple[str, ...], models: tuple[str, ...], valid: int, with_kit: bool, python: str,
    machine: str, extras: tuple[str, ...], wheelhouse: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a release bundle to a USB stick, for devices without a network: signatures, statements and chunks.

    On the device `edgesplit-agent bundle apply` installs it, by the same rules as over the network: what has expired,
    is older than the device's state, or is for another device is refused. A repeated run keeps files that are already
    there.
    """
    check_target(to)
    with progress_bar("bundle", *BYTES, quiet=as_json) as update:
        kit_files: Mapping[str, Path] = {}
        kit_for = ""
        if with_kit:
            target = Target(python=python, machine=machine)
            kit_files = build_kit(target, extras=extras, cache=cache_folder(), wheelhouse=wheelhouse,
                            progress=lambda text: update(description=text)).files  # fmt: skip
            kit_for = str(target)
        update(description="bundle")
        request = BundleRequest(devices=devices, models=models, valid_s=int(valid), kit=kit_files, kit_for=kit_for)
        with open_sink(to) as bundle_sink:
            index = make_bundle(
                connect(data), request, bundle_sink, lambda done, of: update(completed=done, total=of)
            )  # fmt: skip
    print_result({"to": str(to), **msgspec.to_builtins(index)}, as_json, *_result_lines(to, index))


def _result_lines(to: Path, index: BundleIndex) -> list[str]:
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(index.valid_until))
    total = sum(release.bytes for release in index.releases)
    devices = counted(len(index.devices), "device")
    text_lines = [f"{to}: {counted(len(index.releases), 'release')} ({format_size(total)}) for {devices}"]
    text_lines += [
        f"  {release.model}  {release.release[:12]}  {format_size(release.bytes)}" for release in index.releases
    ]
    text_lines.append(f"it installs until {until}; then its {index.limited_by} ends")
    text_lines.append(f"on each device: edgesplit-agent bundle apply {to.name} --data DIR")
    if index.kit:
        text_lines.append(f"the agent itself, for {index.kit}: sh edgesplit/install.sh, as root")
    return text_lines
