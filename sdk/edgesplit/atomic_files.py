"""Files that survive a power cut: written whole, fsynced, renamed into place, folder fsynced."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Sync = Callable[[int, Path], None]
"""Returns once what was written to that file or folder (its descriptor, its path) survives a power cut. OSError."""

_making = threading.Lock()


def _by_the_kernel(descriptor: int, path: Path) -> None:
    os.fsync(descriptor)


_sync: Sync = _by_the_kernel


def sync_file(descriptor: int, path: Path) -> None:
    """Make what was written to that file survive a power cut."""
    _sync(descriptor, path)


@contextmanager
def syncing_by(sync: Sync) -> Iterator[None]:
    """In this process, meanwhile, files are made durable by that: a simulation's disks, where nothing is waited for."""
    global _sync
    before, _sync = _sync, sync
    try:
        yield
    finally:
        _sync = before


def write_durably(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `data` so that afterwards it holds the old bytes or the new, never a part of them."""
    make_folders(path.parent)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            sync_file(file.fileno(), path)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folders(folder: Path) -> None:
    """Make `folder` and the parents that it lacks, so that they survive a power cut: what is written into a folder
    whose own name was never synced is lost with it."""
    with _making:  # nobody may take a folder for settled that another thread has not synced yet
        _make_folders(folder)


def _make_folders(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def remove(path: Path) -> None:
    """A folder with all in it, or a file; a link is removed, and not what it names. What is not there is removed. The
    parent is not synced."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sweep_parts(folder: Path) -> None:
    """Remove what `write_durably` left in `folder` when it was cut off. Nobody else may be writing there."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames and unlinks inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(descriptor, folder)
    finally:
        os.close(descriptor)
