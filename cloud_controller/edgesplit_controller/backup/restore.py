"""Restores a backup: everything is written and verified in a staging folder beside the data folder, which then takes
its name. The previous folder is kept under another name, and an incomplete or refused backup changes nothing.

The maker of the file must be known (`origin`), and the operators that come back are shown before anything is replaced:
they decide who may use the controller. The owner's token never comes from a backup.

What was published to devices after the backup is not known here. `rows` marks the devices as restored, so that the
director publishes nothing to a device whose newer statement is unknown until an operator decides; the next start
restores the offload server's releases.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, Final

import msgspec

from edgesplit.atomic_files import make_folders, sync_folder, write_durably
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit_controller.backup.create import CONTENTS, KEYS, ROWS, Contents, Member, is_secret
from edgesplit_controller.backup.envelope import BackupKey, Header, SealedReader
from edgesplit_controller.backup.location import BackupFile, BackupLocation
from edgesplit_controller.backup.origin import Origin, judge_origin, signer_of
from edgesplit_controller.backup.rows import RestoredOperator, import_rows, preview_operators
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.blob_location import copy_blobs
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.folder_lock import exclusive

RESTORED: Final = "restored.json"
"""File that tells the next start that the folder was restored, and from when."""
_NAME: Final = re.compile(
    r"database\.jsonl|backup\.json|(?:ports|addresses)\.json"
    r"|(?:keys|tuf)(?:/[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}){1,4}|blobs/[0-9a-f]{2}/[0-9a-f]{64}"
)
_TOKEN: Final = "operator.token"
"""File that backups of 0.2 contain and that is not restored."""
_LIST_BYTES: Final = 256 * 2**20
_BLOCK: Final = 1 << 20


class RestoreResult(msgspec.Struct, frozen=True):
    """Result of a restore."""

    created: float
    devices: int
    files: int
    replaced: str
    """Where the previous data folder is now; empty if there was none."""
    origin: Origin
    operators: tuple[RestoredOperator, ...]


Confirm = Callable[[Sequence[RestoredOperator], Origin], None]
"""Called with the operators that come back, before anything is replaced; it raises to refuse them."""


def restore(
    file: Path | BackupLocation, data: Path, decryption: BackupKey, *, database_url: str, now: float,
    replace: bool = False, store: Blobs | None = None, signed_by: bytes = b"", unverified: bool = False,
    confirm: Confirm = lambda operators, origin: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> RestoreResult:  # fmt: skip
    """Restore the backup in `file` into the folder `data`, and its rows into the database at `database_url` (empty:
    SQLite in the folder). Blobs go to `store`, by default into the folder.

    `signed_by` is the public key that must have signed it, `unverified` lets a file of an unknown maker pass, and
    `confirm` may refuse the operators in it. UsageError if the folder or the database is not empty and `replace` is
    false, or if a controller runs on the folder; TrustError if the file is not to be believed.
    """
    data, location = data.absolute(), BackupFile(file) if isinstance(file, Path) else file
    staging = data.with_name(f".{data.name}.restoring")
    with location.reading() as raw, exclusive(data):
        opened = SealedReader(raw, decryption)
        header = opened.header
        existing = _existing_names(data)
        if existing - ({"keys", "tuf"} if not header.keys else set()) and not replace:
            raise UsageError(
                f"{data} is not empty: restore into another folder, or --force (the present folder is kept beside it)"
            )
        if not header.keys and not (data / "keys" / "ca.key").is_file():
            raise UsageError(
                f"this backup has no keys: put those of that controller into {data}/keys and {data}/tuf/keys"
            )
        origin = judge_origin(header, signed_by=signed_by, of_folder=signer_of(data), unverified=unverified)
        shutil.rmtree(staging, ignore_errors=True)
        make_folders(staging.parent)
        staging.mkdir(mode=0o700)
        try:
            size = location.size() or 0
            contents, written = _unpack(opened, staging, lambda: progress(opened.position, size))
            _verify(contents, written)
            (staging / _TOKEN).unlink(missing_ok=True)
            with (staging / ROWS).open("rb") as lines:
                operators = tuple(preview_operators(lines, now))
            confirm(operators, origin)
            if not header.keys:
                _copy_keys(data, staging)
            if store is not None:
                _move_blobs(staging, store)
            devices = _restore_rows(staging, database_url, now, replace=replace)
            marker = {"at": now, "created": header.created, "blobs": contents.blobs}
            write_durably(staging / RESTORED, msgspec.json.encode(marker))
            replaced = _swap(data, staging, now)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    progress(size, size)
    return RestoreResult(header.created, devices, len({*written} - {_TOKEN}), replaced, origin, operators)


def _existing_names(data: Path) -> set[str]:
    if data.exists() and not data.is_dir():
        raise UsageError(f"{data} is no folder")
    return {path.name for path in data.iterdir()} if data.is_dir() else set()


def _unpack(opened: SealedReader, staging: Path, on_progress: Callable[[], None]) -> tuple[Contents, dict[str, Member]]:
    """Write every file into the staging folder; returns the backup's own list of files, and the files that were
    written."""
    written: dict[str, Member] = {}
    contents: Contents | None = None
    try:
        with tarfile.open(fileobj=BufferedReader(opened, _BLOCK), mode="r|") as tar:
            for member in tar:
                name = member.name
                if (
                    contents is not None
                    or name in written
                    or not member.isreg()
                    or not _may_contain(opened.header, name)
                ):
                    raise MalformedMessage(f"the backup has an unexpected file: {name[:80]!r}")
                source = tar.extractfile(member)
                assert source is not None
                if name == CONTENTS:
                    contents = msgspec.json.decode(source.read(_LIST_BYTES), type=Contents)
                else:
                    written[name] = _write(staging / name, source, on_progress)
    except (tarfile.TarError, msgspec.MsgspecError, EOFError) as error:
        raise MalformedMessage(f"the backup is damaged: {error}") from error
    while opened.read(_BLOCK):  # to the authenticated last piece: a file that is cut off is refused
        pass
    if contents is None:
        raise MalformedMessage("the backup is cut off")
    return contents, written


def _may_contain(header: Header, name: str) -> bool:
    """Whether a backup with this header may bring a file of this name. One without keys brings no secret: it would
    take a place in the folder that the real keys leave empty."""
    if name == _TOKEN:
        return header.keys and not header.signer
    return _NAME.fullmatch(name) is not None and (header.keys or not is_secret(name))


def _write(path: Path, source: IO[bytes], on_progress: Callable[[], None]) -> Member:
    make_folders(path.parent)
    digest, size = hashlib.sha256(), 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while block := source.read(_BLOCK):
            digest.update(block)
            size += len(block)
            file.write(block)
            on_progress()
        file.flush()
        os.fsync(file.fileno())
    return Member(size, digest.hexdigest())


def _verify(contents: Contents, written: dict[str, Member]) -> None:
    if contents.files != written:
        wrong = sorted(name for name in {*contents.files, *written} if contents.files.get(name) != written.get(name))
        raise MalformedMessage(f"the backup is damaged: {', '.join(wrong[:3])} is not what it was")
    for name, member in written.items():
        if name.startswith("blobs/") and not name.endswith(f"/{member.sha256[:2]}/{member.sha256}"):
            raise MalformedMessage(f"the backup is damaged: {name} is another blob")


def _move_blobs(staging: Path, store: Blobs) -> None:
    """Move the blobs of a verified backup into a store elsewhere. Nothing there is replaced: a name has one content."""
    copy_blobs(BlobStore(staging / "blobs"), store)
    shutil.rmtree(staging / "blobs")


def _copy_keys(data: Path, staging: Path) -> None:
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
    """Give the staging folder the data folder's name; returns where the previous folder is now, empty if it held
    nothing."""
    for folder in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
        sync_folder(folder)
    replaced = ""
    if data.is_dir():
        if any(data.iterdir()):
            previous = data.with_name(f"{data.name}.before-{int(now)}")
            data.rename(previous)
            replaced = str(previous)
        else:
            data.rmdir()
    staging.rename(data)
    sync_folder(data.parent)
    return replaced
