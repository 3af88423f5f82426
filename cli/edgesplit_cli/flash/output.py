"""Output of `edgectl flash`: the list of disks, the plan of a dry run, progress bars, and a line for each finished
card."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from edgesplit.quantities import format_size
from edgesplit_cli.output import console, print_json, table
from edgesplit_provisioning.image.boot_files import BootFiles
from edgesplit_provisioning.image.card import Image
from edgesplit_provisioning.image.target_checks import candidates
from edgesplit_provisioning.kit import Kit

REDRAW_S = 0.1
"""Seconds between two redraws of a progress bar."""


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """What a flash would write."""

    image: Image
    kit: Kit
    files: BootFiles
    devices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-serialisable values."""
        return {
            "image": self.image.name,
            "bytes": self.image.size,
            "format": self.image.detected.format.value,
            "system": self.image.detected.system.name,
            "python": self.kit.manifest.python,
            "machine": self.kit.manifest.machine,
            "boot_partition": self.image.detected.mount,
            "devices": list(self.devices),
            "files": {name: _length(content) for name, content in self.files.files.items()},
            "cmdline": {"before": _text(self.image.cmdline), "after": _text(self.files.cmdline)},
        }


def show_plan(plan: FlashPlan, as_json: bool) -> None:
    """Print the plan of a dry run."""
    if as_json:
        print_json(plan.to_dict())
        return
    detected, kit, out = plan.image.detected, plan.kit.manifest, console()
    system = f"{detected.system.name or 'unknown system'}, Python {kit.python}, {kit.machine}"
    out.print(f"{plan.image.name}: {system}; first boot by {detected.format.value}; {format_size(plan.image.size)}")
    rows = [(name, format_size(_length(content))) for name, content in plan.files.files.items()]
    out.print(table(("file on the boot partition", ">size"), rows))
    out.print(f"cmdline.txt: {_text(plan.files.cmdline)}", soft_wrap=True)
    out.print("nothing was written")


def show_finished_card(card: dict[str, Any]) -> None:
    """Print one line for a finished card."""
    checked = f"image as {card['digest']} says" if card["digest"] else "image checked by nobody"
    details = f": {card['target']} is written and read back, {checked}, first boot by {card['format']}."
    console().print(Text.assemble((card["device"], "bold"), details), soft_wrap=True)


def _length(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _text(line: bytes) -> str:
    return line.decode("ascii").strip()


def show_disks(as_json: bool) -> None:
    """Print every disk, with the reason why it would be refused."""
    disks = candidates()
    if as_json:
        print_json(
            [
                {"path": disk.path, "model": disk.model, "serial": disk.serial, "bytes": disk.size, "refused": reason}
                for disk, reason in disks
            ]
        )
        return
    rows = [
        (disk.path, format_size(disk.size), disk.model, disk.serial or "-", reason or "could be written")
        for disk, reason in disks
    ]
    console().print(table(("disk", ">size", "model", "serial", ""), rows))


@contextmanager
def progress_bars(as_json: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A context with one progress bar per stage of work; without a terminal, or with JSON output, nothing is drawn."""
    is_shown = console().is_terminal and not as_json
    columns = (
        TextColumn("{task.description:14}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(), disable=not is_shown, transient=True) as bar:

        def begin(name: str) -> Callable[[int, int], None]:
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(name, total=None)
            drawn = 0.0

            def on_progress(done: int, of: int) -> None:
                nonlocal drawn
                if done >= of or time.monotonic() - drawn > REDRAW_S:
                    drawn = time.monotonic()
                    bar.update(task, completed=done, total=of)

            return on_progress

        yield begin
