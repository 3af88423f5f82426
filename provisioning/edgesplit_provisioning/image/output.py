"""What `edgectl flash` shows: disks, what would be written, bars while it is, and what was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from edgesplit_cli.output import console, print_json, size, table
from edgesplit_provisioning.image.boot_files import BootFiles
from edgesplit_provisioning.image.card import Image
from edgesplit_provisioning.image.target_checks import candidates
from edgesplit_provisioning.kit import Kit

REDRAW_S = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What a flash would write."""

    image: Image
    kit: Kit
    files: BootFiles
    devices: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "image": self.image.name,
            "bytes": self.image.size,
            "format": self.image.found.format.value,
            "system": self.image.found.system.name,
            "python": self.kit.described.python,
            "machine": self.kit.described.machine,
            "boot_partition": self.image.found.mount,
            "devices": list(self.devices),
            "files": {name: _length(content) for name, content in self.files.files.items()},
            "cmdline": {"before": _text(self.image.cmdline), "after": _text(self.files.cmdline)},
        }


def show_plan(plan: Plan, as_json: bool) -> None:
    """Nothing was written."""
    if as_json:
        print_json(plan.plain())
        return
    found, kit, out = plan.image.found, plan.kit.described, console()
    system = f"{found.system.name or 'unknown system'}, Python {kit.python}, {kit.machine}"
    out.print(f"{plan.image.name}: {system}; first boot by {found.format.value}; {size(plan.image.size)}")
    rows = [(name, size(_length(content))) for name, content in plan.files.files.items()]
    out.print(table(("file on the boot partition", ">size"), rows))
    out.print(f"cmdline.txt: {_text(plan.files.cmdline)}", soft_wrap=True)
    out.print("nothing was written")


def show_done(one: dict[str, Any]) -> None:
    """A card's line, once it is finished."""
    checked = f"image as {one['digest']} says" if one["digest"] else "image checked by nobody"
    told = f": {one['target']} is written and read back, {checked}, first boot by {one['format']}."
    console().print(Text.assemble((one["device"], "bold"), told), soft_wrap=True)


def _length(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _text(line: bytes) -> str:
    return line.decode("ascii").strip()


def show_disks(as_json: bool) -> None:
    """Every disk, with why it would be refused."""
    found = candidates()
    if as_json:
        print_json(
            [
                {"path": one.path, "model": one.model, "serial": one.serial, "bytes": one.size, "refused": why}
                for one, why in found
            ]
        )
        return
    rows = [(one.path, size(one.size), one.model, one.serial or "-", why or "could be written") for one, why in found]
    console().print(table(("disk", ">size", "model", "serial", ""), rows))


@contextmanager
def bars(as_json: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A bar for each piece of work, where there is a terminal."""
    shown = console().is_terminal and not as_json
    columns = (
        TextColumn("{task.description:14}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(), disable=not shown, transient=True) as bar:

        def begin(name: str) -> Callable[[int, int], None]:
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(name, total=None)
            drawn = 0.0

            def told(done: int, of: int) -> None:
                nonlocal drawn
                if done >= of or time.monotonic() - drawn > REDRAW_S:
                    drawn = time.monotonic()
                    bar.update(task, completed=done, total=of)

            return told

        yield begin
