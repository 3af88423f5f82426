"""Progress of long work: bars and spinners on a terminal, a line every few seconds elsewhere. Nothing with JSON output.

Lines go to standard error: standard output has the result.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import unquote

import click
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import EdgeError, NotFound
from edgesplit.terminal_text import printable
from edgesplit_cli.output import console

BYTES = (BarColumn(), DownloadColumn())
"""Columns of a bar that counts bytes."""
MIN_SHOWN_BYTES = 8 << 20
"""Uploads below this size end before a bar could be read, so none is drawn."""
FIRST_LINE_S = 1.0
"""What takes less is over before a line could be read."""
LINE_EVERY_S = 5.0
"""Seconds between two lines where there is no terminal."""
POLL_S = 1.0
"""Seconds between two questions to the controller what it does."""
Report = Callable[[str], None]
"""Says what is being done now."""


def make_bars(*columns: ProgressColumn | str, quiet: bool) -> Progress:
    """Progress bars with these columns, that disappear at the end."""
    out = console(quiet=quiet)
    return Progress(*columns, console=out, transient=True, disable=quiet or not out.is_terminal)


class ProgressLines:
    """Progress as lines of text: one after `FIRST_LINE_S`, then one every `LINE_EVERY_S`."""

    def __init__(self, title: str, *, write: Report | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._write = write or partial(click.echo, err=True)
        self._clock = clock
        self._began = clock()
        self._due = self._began + FIRST_LINE_S
        self._step = ""
        self._lock = threading.Lock()

    def update(self, step: str) -> None:
        """What is being done from now on."""
        self._step = step
        self.write_if_due()

    def write_if_due(self) -> None:
        """Write a line if the last one is long enough ago."""
        with self._lock:
            now = self._clock()
            if now < self._due:
                return
            self._due = now + LINE_EVERY_S
        step = f": {self._step}" if self._step else ""
        self._write(f"{self._title}{step} ({now - self._began:.0f} s)")

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which lines are written also while nothing changes."""
        ended = threading.Event()

        def write_lines() -> None:
            while not ended.wait(POLL_S):
                self.write_if_due()

        thread = threading.Thread(target=write_lines, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with self._lock:
                self._due = math.inf  # a report that comes too late writes nothing


@contextmanager
def progress_text(title: str, *, quiet: bool) -> Iterator[Report]:
    """Shows a title and what is being done, which the yielded function changes."""
    out = console(quiet=quiet)
    if quiet:
        yield lambda step: None
    elif out.is_terminal:
        text = TextColumn("{task.description}", markup=False)
        with make_bars(SpinnerColumn(), text, TimeElapsedColumn(), quiet=False) as bars:
            task = bars.add_task(title, total=None)
            yield lambda step: bars.update(task, description=f"{title}: {step}" if step else title)
    else:
        lines = ProgressLines(title)
        with lines.running():
            yield lines.update


@contextmanager
def controller_progress(api: ControllerClient, path: str, title: str, *, quiet: bool) -> Iterator[None]:
    """Shows what the controller does for a call of `path` that is made in this context."""
    ended = threading.Event()

    def follow(report: Report) -> None:
        while not ended.wait(POLL_S):
            try:
                jobs = [job for job in api.get("/v1/jobs") if job["path"] == unquote(path)]
            except NotFound:  # a controller of an earlier version
                return
            except EdgeError:
                continue
            if jobs:  # of several controller processes the one that answers may not be the one that works
                report(_job_text(jobs[0]))

    with progress_text(title, quiet=quiet) as report:
        thread = threading.Thread(target=follow, args=(report,), name="jobs", daemon=True)
        if not quiet:
            thread.start()
        try:
            yield
        finally:
            ended.set()


def _job_text(job: Mapping[str, Any]) -> str:
    """What the controller does for a call."""
    return str(printable(job["step"])) if job["state"] == "running" else "waiting for an earlier call of yours"


@contextmanager
def progress_bar(title: str, *columns: ProgressColumn, quiet: bool) -> Iterator[Callable[..., Any]]:
    """One bar; yields a function that updates its `description`, `completed` or `total`."""
    if not quiet and not console().is_terminal:
        with _lines_of_bar(title) as update:
            yield update
        return
    with make_bars(TextColumn("{task.description}", markup=False), *columns, quiet=quiet) as bars:
        yield partial(bars.update, bars.add_task(title, total=None))


@contextmanager
def _lines_of_bar(title: str) -> Iterator[Callable[..., Any]]:
    """A bar as lines with the percentage, and the description where it changes."""
    state: dict[str, Any] = {"completed": 0, "total": None, "description": ""}
    with progress_text(title, quiet=False) as report:

        def update(**changes: Any) -> None:
            state.update(changes)
            share = f"{state['completed'] / state['total']:.0%}" if state["total"] else ""
            report(" ".join(part for part in (str(state["description"]), share) if part))

        yield update


@contextmanager
def upload_bar(title: str, total: int, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields the progress callback for `ControllerClient.upload`. Nothing is drawn for a small upload."""
    with progress_bar(title, *BYTES, TransferSpeedColumn(), quiet=quiet or total < MIN_SHOWN_BYTES) as update:
        yield lambda done, of: update(completed=done, total=of)
