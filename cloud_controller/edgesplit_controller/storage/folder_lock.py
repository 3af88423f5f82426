"""The lock by which a running controller holds its data folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgesplit.errors import UsageError


@contextmanager
def exclusive(data: Path) -> Iterator[None]:
    """Hold the data folder's lock, if it has one; UsageError if a controller runs on it."""
    if not (data / "lock").is_file():
        yield
        return
    with (data / "lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"a controller runs on {data}: stop it first") from error
        yield
