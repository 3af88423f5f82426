"""A progress bar for uploads to the controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from edgesplit_cli.output import console

MIN_SHOWN_BYTES = 8 << 20
"""Uploads below this size end before a bar could be read, so none is drawn."""


@contextmanager
def upload_bar(title: str, total: int, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields the progress callback for `ControllerClient.upload`. Nothing is drawn without a terminal or for a small
    upload."""
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = quiet or not console().is_terminal or total < MIN_SHOWN_BYTES
    with Progress(*columns, disable=hidden, transient=True) as bar:
        task = bar.add_task(escape(title), total=total)
        yield lambda done, of: bar.update(task, completed=done)
