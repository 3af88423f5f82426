"""`edgectl kit`: folders that install the agent on a device without any network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit_cli.commands.options.kit import kit_options
from edgesplit_cli.output import console, json_option, print_json, size
from edgesplit_provisioning.kit import Kit, Target, build_kit, read_kit


@click.group()
def kit() -> None:
    """Make and check folders that install the agent on a device, offline."""


@kit.command()
@kit_options()
@click.option(
    "--interpreter",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="A Python to bring along, where the device has another: an install_only archive of python-build-standalone.",
)
@click.option("--whole", is_flag=True, help="Wheels as they are, with tests, headers and all. [default: what runs]")
@click.option(
    "--to", "folder", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write."
)
@json_option
def build(
    folder: Path, as_json: bool, python: str, machine: str, extras: tuple[str, ...], whole: bool, **sources: Any
) -> None:
    """Make a kit. Copied to a device with a claim as claim.json, `sh install.sh` there does the rest."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "kit.json").exists():
        raise UsageError(f"{folder} holds something else: name a new folder")
    target = Target(python, machine)
    columns = (SpinnerColumn(), "{task.description}", TimeElapsedColumn())
    with Progress(*columns, console=console(), disable=as_json or not console().is_terminal, transient=True) as bar:
        task = bar.add_task(f"a kit for {target}", total=None)

        def told(text: str) -> None:
            bar.update(task, description=escape(text))

        made = build_kit(target, extras=extras, cache=cache_folder(), slim=not whole, progress=told, **sources)
        bar.update(task, description=f"copying to {folder}")
        write(made, folder)
    _show(made, folder, as_json)


@kit.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
def check(folder: Path, as_json: bool) -> None:
    """Say what the kit in FOLDER is for, and whether every file in it is as it was made."""
    _show(read_kit(folder), folder, as_json)


def write(made: Kit, folder: Path) -> None:
    """The kit in that folder, its description last, so that what was cut off is no kit."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kit.json").unlink(missing_ok=True)
    for name in sorted(made.files, key=lambda name: name == "kit.json"):
        shutil.copyfile(made.files[name], folder / name)
    made.check(folder)


def _show(made: Kit, folder: Path, as_json: bool) -> None:
    described = made.described
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "version": described.version,
                "python": described.python,
                "machine": described.machine,
                "glibc": described.glibc,
                "extras": list(described.extras),
                "bytes": made.bytes,
                "needs_bytes": described.needs_bytes,
                "files": sorted(made.files),
                "wheels": list(described.wheels),
            }
        )
        return
    console().print(
        f"kit of edgesplit {described.version} for Python {described.python} on {described.machine} "
        f"(glibc {described.glibc} or newer): {size(made.bytes)} in {folder}"
    )
    console().print(f"  {len(described.wheels)} wheels; installing takes {size(described.needs_bytes)} at its peak")
    console().print("  on the device, with its claim as claim.json beside it: sudo sh install.sh", soft_wrap=True)
