"""Atomic, durable file writes: a file is written whole, fsynced, renamed into place, and its folder is fsynced, so that
it survives a power cut."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FsyncFunction = Callable[[int, Path], None]
"""Function that makes the data written to a file or folder (descriptor, path) durable: on return it survives a power
cut. Raises OSError."""

_make_folders_lock = threading.Lock()


def _kernel_fsync(descriptor: int, path: Path) -> None:
    os.fsync(descriptor)


_fsync: FsyncFunction = _kernel_fsync


def sync_file(descriptor: int, path: Path) -> None:
    """Make the data written to this file durable (fsync, or the replacement installed by `override_sync`)."""
    _fsync(descriptor, path)


@contextmanager
def override_sync(sync: FsyncFunction) -> Iterator[None]:
    """Replace fsync by `sync` in this process while the context is open: a simulation's disks do not wait for real
    ones."""
    global _fsync
    previous, _fsync = _fsync, sync
    try:
        yield
    finally:
        _fsync = previous


def write_durably(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace the file `path` atomically: afterwards it holds either the old bytes or all of `data`, never a part of
    it."""
    make_folders(path.parent)
    # In the same folder, because a rename is atomic only within one file system.
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
    sync_folder(path.parent)  # the rename itself is durable only now


def make_folders(folder: Path) -> None:
    """Create `folder` and its missing parents durably. A file in a folder whose own directory entry was never fsynced
    would be lost with the folder in a power cut."""
    # Serialised: a thread that finds a folder existing must be able to rely on its being fsynced, which it is not while
    # another thread is between `mkdir` and `sync_folder`.
    with _make_folders_lock:
        _make_folders(folder)


def _make_folders(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def remove(path: Path) -> None:
    """Remove a file, a symbolic link (not its target) or a folder with its contents. A missing path is no error. The
    parent folder is not fsynced."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Remove the temporary files that interrupted `write_durably` calls left in `folder`. No other thread or process
    may write there meanwhile."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames and unlinks inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(descriptor, folder)
    finally:
        os.close(descriptor)
