"""Files into a root file system that is not ours to run: no link in it is followed, so nothing is written outside of
it.

What is written is written down first, with what was there before, beside the root file system: `take_back` undoes it,
also where writing was cut off. A file that somebody has changed since is left as it is.
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

RECORD = "edgesplit-overlay.json"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RECORD_BYTES = 4 << 20
_BEFORE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Put:
    """A file to be there; or with `target` a link."""

    path: str
    """Below the root, without a leading slash."""
    content: bytes | Path = b""
    mode: int = 0o644
    target: str = ""


class Was(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one path, and what it was."""

    path: str
    sha256: str
    """Of the new content; of a link's target."""
    before: str | None = None
    """The old content in base64; None: there was nothing."""
    mode: int = 0o644


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`edgesplit-overlay.json`."""

    format: str = "edgesplit.overlay/1"
    files: tuple[Was, ...]
    folders: tuple[str, ...]
    """Made for them, deepest first."""


def put_all(tree: Path, puts: Sequence[Put]) -> None:
    """Have these files in the tree's root file system, in place of those of an earlier call."""
    take_back(tree)
    with _top(tree) as top:
        folders = dict.fromkeys(
            folder for put in puts for folder in _parents(put.path) if not _exists(top, folder)
        )  # fmt: skip
        record = Record(
            files=tuple(_was(top, put) for put in puts), folders=tuple(sorted(folders, key=len, reverse=True))
        )
        _write_record(tree, record)
        for folder in sorted(folders, key=len):
            _make_folder(top, folder)
        for put in puts:
            _put(top, put)
    os.sync()


def take_back(tree: Path) -> list[str]:
    """Undo the last `put_all`, whole or not; the paths that were changed since, and are left."""
    record = _read_record(tree)
    if record is None:
        return []
    left: list[str] = []
    with _top(tree) as top:
        for was in record.files:
            _drop_part(top, was.path)
            now = _digest(top, was.path)
            if now == was.sha256:
                _restore(top, was)
            elif now is not None and (was.before is None or now != _sha256(b64decode(was.before))):
                left.append(was.path)
        for folder in record.folders:
            _remove_folder(top, folder)
    os.sync()
    (tree / RECORD).unlink()
    return left


@contextmanager
def _top(tree: Path) -> Iterator[int]:
    try:
        top = os.open(tree / "rootfs", _FOLDER)
    except OSError as error:
        raise UsageError(f"cannot open {tree / 'rootfs'}: {error.strerror}") from error
    try:
        yield top
    except PermissionError as error:
        raise UsageError(f"{tree / 'rootfs'} is root's: run this with sudo, as NVIDIA's own tools") from error
    except OSError as error:
        raise UsageError(f"cannot write into {tree / 'rootfs'}: {error.strerror} ({error.filename})") from error
    finally:
        os.close(top)


@contextmanager
def _inside(top: int, folder: str) -> Iterator[int]:
    """That folder, reached by no link."""
    at = os.dup(top)
    try:
        for part in folder.split("/") if folder else ():
            try:
                deeper = os.open(part, _FOLDER, dir_fd=at)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise UsageError(
                        f"rootfs/{folder} is, or lies behind, a link: this is no tree of NVIDIA's"
                    ) from error
                raise
            os.close(at)
            at = deeper
        yield at
    finally:
        os.close(at)


def _split(path: str) -> tuple[str, str]:
    parts = path.split("/")
    if not all(part not in ("", ".", "..") for part in parts):
        raise MalformedMessage(f"not a path below a root: {path[:80]!r}")
    return "/".join(parts[:-1]), parts[-1]


def _parents(path: str) -> list[str]:
    parts = _split(path)[0].split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _exists(top: int, folder: str) -> bool:
    try:
        with _inside(top, folder):
            return True
    except FileNotFoundError:
        return False


def _make_folder(top: int, folder: str) -> None:
    parent, name = _split(folder)
    with _inside(top, parent) as at:
        os.mkdir(name, 0o755, dir_fd=at)


def _remove_folder(top: int, folder: str) -> None:
    parent, name = _split(folder)
    try:
        with _inside(top, parent) as at:
            os.rmdir(name, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise


def _was(top: int, put: Put) -> Was:
    folder, name = _split(put.path)
    new = _sha256(put.target.encode()) if put.target else _content_digest(put.content)
    if not _exists(top, folder):
        return Was(path=put.path, sha256=new)
    with _inside(top, folder) as at:
        try:
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            return Was(path=put.path, sha256=new)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _BEFORE_BYTES:
            raise UsageError(f"rootfs/{put.path} is no file that could be put back: take it away first")
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at)
        with os.fdopen(descriptor, "rb") as file:
            before = file.read()
    return Was(path=put.path, sha256=new, before=b64encode(before).decode(), mode=stat.S_IMODE(found.st_mode))


def _put(top: int, put: Put) -> None:
    folder, name = _split(put.path)
    with _inside(top, folder) as at:
        if put.target:
            os.symlink(put.target, name, dir_fd=at)
            return
        _write(at, name, put.content, put.mode)


def _write(at: int, name: str, content: bytes | Path, mode: int) -> None:
    """Anew, by one rename: old or new wherever it is cut off, and whatever the name led to is not written to."""
    _unlink(at, _part(name))
    descriptor = os.open(_part(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=at)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        if isinstance(content, bytes):
            file.write(content)
        else:
            with content.open("rb") as source:
                shutil.copyfileobj(source, file)
    os.replace(_part(name), name, src_dir_fd=at, dst_dir_fd=at)


def _part(name: str) -> str:
    return f".{name}.edgesplit-part"


def _unlink(at: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def _restore(top: int, was: Was) -> None:
    folder, name = _split(was.path)
    with _inside(top, folder) as at:
        if was.before is None:
            os.unlink(name, dir_fd=at)
        else:
            _write(at, name, b64decode(was.before), was.mode)


def _drop_part(top: int, path: str) -> None:
    folder, name = _split(path)
    with contextlib.suppress(FileNotFoundError), _inside(top, folder) as at:
        os.unlink(_part(name), dir_fd=at)


def _digest(top: int, path: str) -> str | None:
    """Of what is there now; None where nothing is."""
    folder, name = _split(path)
    try:
        with _inside(top, folder) as at:
            if stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                return _sha256(os.readlink(name, dir_fd=at).encode())
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at)
            with os.fdopen(descriptor, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _content_digest(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        return _sha256(content)
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _write_record(tree: Path, record: Record) -> None:
    try:
        write_durably(tree / RECORD, msgspec.json.format(msgspec.json.encode(record)), mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot write {tree / RECORD}: {error.strerror}; run this with sudo") from error


def _read_record(tree: Path) -> Record | None:
    try:
        with (tree / RECORD).open("rb") as file:
            return msgspec.json.decode(file.read(_RECORD_BYTES), type=Record)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {tree / RECORD}: {error.strerror}; run this with sudo") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{tree / RECORD} is spoilt: unpack the root file system anew, and delete it") from error
