"""Output of `edgectl flash`: the list of disks, the plan of a dry run, and progress bars."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import TextColumn, TimeRemainingColumn, TransferSpeedColumn

from edgesplit.quantities import format_size
from edgesplit_cli.output import print_result, table
from edgesplit_cli.progress import BYTES, make_bars
from edgesplit_provisioning.image.session import FlashPlan
from edgesplit_provisioning.image.target_checks import candidates

REDRAW_S = 0.1
"""Seconds between two redraws of a progress bar."""


def show_plan(plan: FlashPlan, as_json: bool) -> None:
    """Print the plan of a dry run."""
    detected, kit = plan.image.detected, plan.kit.manifest
    system = f"{detected.system.name or 'unknown system'}, Python {kit.python}, {kit.machine}"
    head = f"{plan.image.name}: {system}; first boot by {detected.format.value}; {format_size(plan.image.size)}"
    files = table(
        ("file on the boot partition", ">size"), [(name, format_size(count)) for name, count in plan.sizes.items()]
    )
    line = f"cmdline.txt: {plan.files.cmdline_text}"
    print_result(plan.to_dict(), as_json, head, files, line, "nothing was written")


def show_disks(as_json: bool) -> None:
    """Print every disk, with the reason why it would be refused."""
    disks = candidates()
    result = [
        {"path": disk.path, "model": disk.model, "serial": disk.serial, "bytes": disk.size, "refused": reason}
        for disk, reason in disks
    ]
    rows = [
        (disk.path, format_size(disk.size), disk.model, disk.serial or "-", reason or "could be written")
        for disk, reason in disks
    ]
    print_result(result, as_json, table(("disk", ">size", "model", "serial", ""), rows))


@contextmanager
def progress_bars(as_json: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A context with one progress bar per stage of work; without a terminal, or with JSON output, nothing is drawn."""
    columns = (TextColumn("{task.description:14}"), *BYTES, TransferSpeedColumn(), TimeRemainingColumn())
    with make_bars(*columns, quiet=as_json) as bar:

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
