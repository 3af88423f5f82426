"""Progress bars. Nothing is drawn without a terminal or with JSON output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TransferSpeedColumn

from edgesplit_cli.output import console

BYTES = (BarColumn(), DownloadColumn())
"""Columns of a bar that counts bytes."""
MIN_SHOWN_BYTES = 8 << 20
"""Uploads below this size end before a bar could be read, so none is drawn."""


def make_bars(*columns: ProgressColumn | str, quiet: bool) -> Progress:
    """Progress bars with these columns, that disappear at the end."""
    out = console(quiet=quiet)
    return Progress(*columns, console=out, transient=True, disable=quiet or not out.is_terminal)


@contextmanager
def progress_bar(title: str, *columns: ProgressColumn, quiet: bool) -> Iterator[Callable[..., Any]]:
    """One bar; yields a function that updates its `description`, `completed` or `total`."""
    with make_bars(TextColumn("{task.description}", markup=False), *columns, quiet=quiet) as bars:
        yield partial(bars.update, bars.add_task(title, total=None))


@contextmanager
def upload_bar(title: str, total: int, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields the progress callback for `ControllerClient.upload`. Nothing is drawn for a small upload."""
    with progress_bar(title, *BYTES, TransferSpeedColumn(), quiet=quiet or total < MIN_SHOWN_BYTES) as update:
        yield lambda done, of: update(completed=done, total=of)
