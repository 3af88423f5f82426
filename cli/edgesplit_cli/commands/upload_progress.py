"""A bar for what is sent to the controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from edgesplit_cli.output import console

AT_ONCE_BYTES = 8 << 20
"""Less than this is there before a bar could be read."""


@contextmanager
def upload_bar(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Progress of `ControllerClient.upload`; nothing is drawn where no terminal is, or little is sent."""
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = quiet or not console().is_terminal or total < AT_ONCE_BYTES
    with Progress(*columns, disable=hidden, transient=True) as bar:
        task = bar.add_task(escape(what), total=total)
        yield lambda done, of: bar.update(task, completed=done)
