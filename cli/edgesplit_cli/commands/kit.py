"""`edgectl kit`: makes and checks folders that install the agent on a device without a network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click
from rich.progress import SpinnerColumn, TimeElapsedColumn

from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit.quantities import format_size
from edgesplit_cli.options.kit import kit_options
from edgesplit_cli.options.types import FOLDER, NEW_FILE, NEW_FOLDER
from edgesplit_cli.output import json_option, print_result
from edgesplit_cli.progress import progress_bar
from edgesplit_provisioning.kit import Kit, Target, build_kit, read_kit


@click.group()
def kit() -> None:
    """Make and check folders that install the agent on a device, offline."""


@kit.command()
@kit_options()
@click.option(
    "--interpreter",
    type=NEW_FILE,
    help="A Python to include, where the device has another: an install_only archive of python-build-standalone.",
)
@click.option("--whole", is_flag=True, help="Keep wheels whole, with tests and headers. [default: only what runs]")
@click.option("--to", "folder", type=NEW_FOLDER, required=True, help="Folder to write.")
@json_option
def build(
    folder: Path, as_json: bool, python: str, machine: str, extras: tuple[str, ...], whole: bool, **sources: Any
) -> None:
    """Make a kit. Copy it to a device with a claim as claim.json, and run `sh install.sh` there."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "kit.json").exists():
        raise UsageError(f"{folder} holds something else: name a new folder")
    target = Target(python, machine)
    with progress_bar(f"a kit for {target}", SpinnerColumn(), TimeElapsedColumn(), quiet=as_json) as update:
        built = build_kit(
            target, extras=extras, cache=cache_folder(), slim=not whole,
            progress=lambda text: update(description=text), **sources,
        )  # fmt: skip
        update(description=f"copying to {folder}")
        write_kit(built, folder)
    _print_kit(built, folder, as_json)


@kit.command()
@click.argument("folder", type=FOLDER)
@json_option
def check(folder: Path, as_json: bool) -> None:
    """Say what the kit in FOLDER is for, and whether every file in it is unchanged."""
    _print_kit(read_kit(folder), folder, as_json)


def write_kit(kit: Kit, folder: Path) -> None:
    """Copy the kit to that folder, its manifest last, so that an interrupted copy is not a valid kit."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kit.json").unlink(missing_ok=True)
    for name in sorted(kit.files, key=lambda name: name == "kit.json"):
        shutil.copyfile(kit.files[name], folder / name)
    kit.check(folder)


def _print_kit(kit: Kit, folder: Path, as_json: bool) -> None:
    manifest = kit.manifest
    names = ("version", "python", "machine", "glibc", "extras", "needs_bytes", "wheels")
    described = {name: getattr(manifest, name) for name in names}
    print_result(
        {"folder": str(folder), **described, "bytes": kit.bytes, "files": sorted(kit.files)},
        as_json,
        f"kit of edgesplit {manifest.version} for Python {manifest.python} on {manifest.machine} "
        f"(glibc {manifest.glibc} or newer): {format_size(kit.bytes)} in {folder}",
        f"  {len(manifest.wheels)} wheels; installing takes {format_size(manifest.needs_bytes)} at its peak",
        "  on the device, with its claim as claim.json beside it: sudo sh install.sh",
    )
