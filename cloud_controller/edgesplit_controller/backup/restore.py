"""Reads a backup into an empty place: everything is written and compared beside the data folder, which then takes its
name. What was there before is kept under another name, and nothing is changed by a backup that is not whole.

What devices were told since the backup is not known here: `rows` marks them, so that nobody is told anything before an
operator says so (`director`), and `up` puts the offload server's releases back.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Final

import msgspec

from edgesplit.atomic_files import make_folders, sync_folder, write_durably
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit_controller.backup.create import KEYS, LIST, ROWS, Contents, Member
from edgesplit_controller.backup.envelope import Opened, Opener
from edgesplit_controller.backup.rows import import_rows

RESTORED: Final = "restored.json"
"""Tells the next start where this folder comes from."""
_NAME: Final = re.compile(
    r"database\.jsonl|backup\.json|operator\.token|ports\.json"
    r"|(?:keys|tuf)(?:/[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}){1,4}|blobs/[0-9a-f]{2}/[0-9a-f]{64}"
)
_LIST_BYTES: Final = 256 * 2**20
_BLOCK: Final = 1 << 20


class Restored(msgspec.Struct, frozen=True):
    """What was restored."""

    created: float
    devices: int
    files: int
    replaced: str
    """Where what was there before lies now; empty where nothing was."""


def restore(
    file: Path,
    data: Path,
    opener: Opener,
    *,
    database_url: str,
    now: float,
    replace: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Restored:
    """Restore the backup in `file` into `data`; the database at `database_url`, or SQLite in the folder if that is
    empty. UsageError where something is there already, unless that is to be replaced."""
    data = data.absolute()
    staging = data.with_name(f".{data.name}.restoring")
    with _opened(file, opener) as opened, _nobody_runs(data):
        header = opened.header
        there = _there(data)
        if there - ({"keys", "tuf"} if not header.keys else set()) and not replace:
            raise UsageError(f"{data} is not empty: restore into another folder, or --force (what is there is kept)")
        if not header.keys and not (data / "keys" / "ca.key").is_file():
            raise UsageError(
                f"this backup has no keys: put those of that controller into {data}/keys and {data}/tuf/keys"
            )
        shutil.rmtree(staging, ignore_errors=True)
        make_folders(staging.parent)
        staging.mkdir(mode=0o700)
        try:
            size = file.stat().st_size
            contents, found = _unpack(opened, staging, lambda: progress(opened.position, size))
            _compare(contents, found)
            if not header.keys:
                _take_keys(data, staging)
            devices = _restore_rows(staging, database_url, now, replace=replace)
            mark = {"at": now, "created": header.created, "blobs": contents.blobs}
            write_durably(staging / RESTORED, msgspec.json.encode(mark))
            replaced = _swap(data, staging, now)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    progress(size, size)
    return Restored(header.created, devices, len(found), replaced)


@contextmanager
def _opened(file: Path, opener: Opener) -> Iterator[Opened]:
    try:
        raw = file.open("rb")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    with raw:
        yield Opened(raw, opener)


@contextmanager
def _nobody_runs(data: Path) -> Iterator[None]:
    """No controller may run on a folder that is replaced."""
    if not (data / "lock").is_file():
        yield
        return
    with (data / "lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"a controller runs on {data}: stop it first") from error
        yield


def _there(data: Path) -> set[str]:
    if data.exists() and not data.is_dir():
        raise UsageError(f"{data} is no folder")
    return {path.name for path in data.iterdir()} if data.is_dir() else set()


def _unpack(opened: Opened, staging: Path, moved: Callable[[], None]) -> tuple[Contents, dict[str, Member]]:
    """Write every file; what the backup says of them, and what they are."""
    found: dict[str, Member] = {}
    contents: Contents | None = None
    try:
        with tarfile.open(fileobj=BufferedReader(opened, _BLOCK), mode="r|") as tar:
            for member in tar:
                name = member.name
                if contents is not None or name in found or not member.isreg() or not _NAME.fullmatch(name):
                    raise MalformedMessage(f"the backup has a file that is none of ours: {name[:80]!r}")
                source = tar.extractfile(member)
                assert source is not None
                if name == LIST:
                    contents = msgspec.json.decode(source.read(_LIST_BYTES), type=Contents)
                else:
                    found[name] = _write(staging / name, source, moved)
    except (tarfile.TarError, msgspec.MsgspecError, EOFError) as error:
        raise MalformedMessage(f"the backup is damaged: {error}") from error
    while opened.read(_BLOCK):  # to its sealed end
        pass
    if contents is None:
        raise MalformedMessage("the backup is cut off")
    return contents, found


def _write(path: Path, source: IO[bytes], moved: Callable[[], None]) -> Member:
    make_folders(path.parent)
    digest, size = hashlib.sha256(), 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while block := source.read(_BLOCK):
            digest.update(block)
            size += len(block)
            file.write(block)
            moved()
        file.flush()
        os.fsync(file.fileno())
    return Member(size, digest.hexdigest())


def _compare(contents: Contents, found: dict[str, Member]) -> None:
    if contents.files != found:
        wrong = sorted(name for name in {*contents.files, *found} if contents.files.get(name) != found.get(name))
        raise MalformedMessage(f"the backup is damaged: {', '.join(wrong[:3])} is not what it was")
    for name, member in found.items():
        if name.startswith("blobs/") and not name.endswith(f"/{member.sha256[:2]}/{member.sha256}"):
            raise MalformedMessage(f"the backup is damaged: {name} is another blob")


def _take_keys(data: Path, staging: Path) -> None:
    for folder in KEYS:
        if (data / folder).is_dir():
            shutil.copytree(data / folder, staging / folder, dirs_exist_ok=True)


def _restore_rows(staging: Path, database_url: str, now: float, *, replace: bool) -> int:
    rows = staging / ROWS
    url = database_url or f"sqlite:///{staging / 'controller.db'}"
    with rows.open("rb") as lines:
        devices = import_rows(url, lines, now, replace=replace)
    rows.unlink()
    return devices


def _swap(data: Path, staging: Path, now: float) -> str:
    """The staged folder takes the data folder's name; where that lies now, if it held anything."""
    for folder in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
        sync_folder(folder)
    replaced = ""
    if data.is_dir():
        if any(data.iterdir()):
            aside = data.with_name(f"{data.name}.before-{int(now)}")
            data.rename(aside)
            replaced = str(aside)
        else:
            data.rmdir()
    staging.rename(data)
    sync_folder(data.parent)
    return replaced
