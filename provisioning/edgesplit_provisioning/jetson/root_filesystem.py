"""Writes files into a root file system that belongs to another system, without following links in it, so that nothing
outside is written.

Before anything is written, a record of the previous content is saved beside the root file system: `restore_files`
undoes the change, also after an interrupted write. A file that was modified since is left as it is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgesplit.atomic_files import write_durably
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.file_hash import file_sha256

RECORD = "edgesplit-overlay.json"
"""Name of the record in the board support package."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_RECORD_BYTES = 4 << 20
_MAX_PREVIOUS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """A file to write; with `target`, a link to create."""

    path: str
    """Path below the root, without a leading slash."""
    content: bytes | Path = b""
    mode: int = 0o644
    target: str = ""


class PreviousFile(msgspec.Struct, frozen=True, kw_only=True):
    """The new and the previous content of one path."""

    path: str
    sha256: str
    """SHA-256 of the new content, or of a link's target."""
    before: str | None = None
    """Previous content in base64; None where there was no file."""
    mode: int = 0o644


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The record in `edgesplit-overlay.json`."""

    format: str = "edgesplit.overlay/1"
    files: tuple[PreviousFile, ...]
    folders: tuple[str, ...]
    """Folders that were created, deepest first."""


def install_files(tree: Path, puts: Sequence[FileToWrite]) -> None:
    """Write these files into the root file system, replacing those of an earlier call."""
    restore_files(tree)
    with _open_root(tree) as top:
        missing = {folder for put in puts for folder in _parents(put.path) if not _exists(top, folder)}
        folders = tuple(sorted(missing, key=len, reverse=True))
        record = Record(files=tuple(_previous_file(top, put) for put in puts), folders=folders)
        # The record is synced before the first change, so that an interrupted run can be undone completely.
        _write_record(tree, record)
        for folder in reversed(folders):
            _make_folder(top, folder)
        for put in puts:
            _put(top, put)
    os.sync()


def restore_files(tree: Path) -> list[str]:
    """Undo the last `install_files`, complete or not; returns the paths that were modified since and are left."""
    record = _read_record(tree)
    if record is None:
        return []
    kept: list[str] = []
    with _open_root(tree) as top:
        for entry in record.files:
            _remove_part(top, entry.path)
            now = _digest(top, entry.path)
            # Undo only what is still as it was installed. A path with its previous content was not reached yet;
            # anything else was modified since and is kept.
            if now == entry.sha256:
                _restore(top, entry)
            elif now is not None and (entry.before is None or now != _content_digest(b64decode(entry.before))):
                kept.append(entry.path)
        for folder in record.folders:
            _remove_folder(top, folder)
    os.sync()
    (tree / RECORD).unlink()
    return kept


@contextmanager
def _open_root(tree: Path) -> Iterator[int]:
    try:
        top = os.open(tree / "rootfs", _FOLDER_FLAGS)
    except OSError as error:
        raise UsageError(f"cannot open {tree / 'rootfs'}: {error.strerror}") from error
    try:
        yield top
    except PermissionError as error:
        raise UsageError(f"{tree / 'rootfs'} belongs to root: run this with sudo, as NVIDIA's own tools") from error
    except OSError as error:
        raise UsageError(f"cannot write into {tree / 'rootfs'}: {error.strerror} ({error.filename})") from error
    finally:
        os.close(top)


@contextmanager
def _open_folder(top: int, folder: str) -> Iterator[int]:
    """Open a folder component by component; a link on the way raises UsageError."""
    descriptor = os.dup(top)
    try:
        # One component at a time with O_NOFOLLOW: a link anywhere in the path would lead out of the root file system.
        for part in folder.split("/") if folder else ():
            try:
                deeper = os.open(part, _FOLDER_FLAGS, dir_fd=descriptor)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise UsageError(
                        f"rootfs/{folder} is, or lies behind, a symbolic link: this is not NVIDIA's Linux_for_Tegra"
                    ) from error
                raise
            os.close(descriptor)
            descriptor = deeper
        yield descriptor
    finally:
        os.close(descriptor)


def _split(path: str) -> tuple[str, str]:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise MalformedMessage(f"not a path below a root: {path[:80]!r}")
    return "/".join(parts[:-1]), parts[-1]


def _parents(path: str) -> list[str]:
    parts = _split(path)[0].split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _exists(top: int, folder: str) -> bool:
    try:
        with _open_folder(top, folder):
            return True
    except FileNotFoundError:
        return False


def _make_folder(top: int, folder: str) -> None:
    parent, name = _split(folder)
    with _open_folder(top, parent) as at:
        os.mkdir(name, 0o755, dir_fd=at)


def _remove_folder(top: int, folder: str) -> None:
    parent, name = _split(folder)
    try:
        with _open_folder(top, parent) as at:
            os.rmdir(name, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise


def _previous_file(top: int, put: FileToWrite) -> PreviousFile:
    folder, name = _split(put.path)
    new = _content_digest(put.target.encode() or put.content)
    if not _exists(top, folder):
        return PreviousFile(path=put.path, sha256=new)
    with _open_folder(top, folder) as at:
        try:
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            return PreviousFile(path=put.path, sha256=new)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_PREVIOUS_BYTES:
            raise UsageError(f"rootfs/{put.path} cannot be saved and restored: remove it first")
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at)
        with os.fdopen(descriptor, "rb") as file:
            before = file.read()
    return PreviousFile(path=put.path, sha256=new, before=b64encode(before).decode(), mode=stat.S_IMODE(status.st_mode))


def _put(top: int, put: FileToWrite) -> None:
    folder, name = _split(put.path)
    with _open_folder(top, folder) as at:
        if put.target:
            os.symlink(put.target, name, dir_fd=at)
            return
        _write(at, name, put.content, put.mode)


def _write(at: int, name: str, content: bytes | Path, mode: int) -> None:
    """Write to a temporary file and rename it: after an interruption either the old or the new file is there, and a
    link is replaced, not followed."""
    _unlink(at, _part_name(name))
    descriptor = os.open(_part_name(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=at)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        if isinstance(content, bytes):
            file.write(content)
        else:
            with content.open("rb") as source:
                shutil.copyfileobj(source, file)
    os.replace(_part_name(name), name, src_dir_fd=at, dst_dir_fd=at)


def _part_name(name: str) -> str:
    return f".{name}.edgesplit-part"


def _unlink(at: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def _restore(top: int, previous: PreviousFile) -> None:
    folder, name = _split(previous.path)
    with _open_folder(top, folder) as at:
        if previous.before is None:
            os.unlink(name, dir_fd=at)
        else:
            _write(at, name, b64decode(previous.before), previous.mode)


def _remove_part(top: int, path: str) -> None:
    folder, name = _split(path)
    with contextlib.suppress(FileNotFoundError), _open_folder(top, folder) as at:
        os.unlink(_part_name(name), dir_fd=at)


def _digest(top: int, path: str) -> str | None:
    """SHA-256 of the current content or link target; None where the path does not exist."""
    folder, name = _split(path)
    try:
        with _open_folder(top, folder) as at:
            if stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                return _content_digest(os.readlink(name, dir_fd=at).encode())
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at)
            with os.fdopen(descriptor, "rb") as file:
                return file_sha256(Path(f"/proc/self/fd/{file.fileno()}"))
    except FileNotFoundError:
        return None


def _content_digest(content: bytes | Path) -> str:
    return file_sha256(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


def _write_record(tree: Path, record: Record) -> None:
    try:
        write_durably(tree / RECORD, msgspec.json.format(msgspec.json.encode(record)), mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot write {tree / RECORD}: {error.strerror}; run this with sudo") from error


def _read_record(tree: Path) -> Record | None:
    try:
        with (tree / RECORD).open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=Record)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {tree / RECORD}: {error.strerror}; run this with sudo") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{tree / RECORD} is corrupt: unpack the root file system anew, and delete it") from error
