"""A file layer that sees every change under one folder, and what a disk holds when power fails in the middle of them.

`Recorder` stands between Python and the file system: each write, rename, unlink, mkdir, link, truncation and fsync
under its folder is carried out and written down, whoever asks for it; a test may have any of them fail instead.
`after_cut` is pure: from that log it makes a state that a disk may be in after a power cut, where only what was fsynced
is sure. What was not may be there, be lost, be torn or have become zeros, in any order, and a folder's entries count as
a file's bytes do: a new name is sure when its folder was fsynced. That is less than any file system in use promises.
"""

from __future__ import annotations

import builtins
import io
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["file", "folder", "link"]
How = Literal["lost", "kept", "any"]


@dataclass(frozen=True)
class Created:
    """A new file, folder or symbolic link."""

    folder: int
    name: str
    node: int
    kind: Kind
    target: str = ""


@dataclass(frozen=True)
class Linked:
    """Another name of a file."""

    folder: int
    name: str
    node: int


@dataclass(frozen=True)
class Renamed:
    folder: int
    name: str
    to_folder: int
    to_name: str
    node: int


@dataclass(frozen=True)
class Removed:
    folder: int
    name: str


@dataclass(frozen=True)
class Wrote:
    node: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Resized:
    node: int
    size: int


@dataclass(frozen=True)
class Synced:
    """fsync of a file or folder: what was done to it before is sure."""

    node: int


@dataclass(frozen=True)
class Promised:
    """No operation on disk: marks what had been promised to a peer by this moment."""

    what: Any


Operation = Created | Linked | Renamed | Removed | Wrote | Resized | Synced | Promised
Tree = dict[str, "bytes | Kind | tuple[str]"]
"""By relative path: a file's bytes, `folder`, or a link's target in a tuple."""


@dataclass
class Disk:
    """Nodes by number; 0 is the folder itself."""

    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    links: dict[int, str] = field(default_factory=dict)

    def copy(self) -> Disk:
        return Disk(dict(self.files), {node: dict(entries) for node, entries in self.folders.items()}, dict(self.links))

    def tree(self, node: int = 0, at: str = "") -> Tree:
        """What can be reached from the top."""
        found: Tree = {}
        for name, child in self.folders[node].items():
            path = f"{at}{name}"
            if child in self.folders:
                found[path] = "folder"
                found.update(self.tree(child, path + "/"))
            else:
                found[path] = (self.links[child],) if child in self.links else self.files.get(child, b"")
        return found

    def apply(self, op: Operation) -> None:
        """As a disk that never loses anything. What an operation needs and is lost already is not made up for."""
        if isinstance(op, Created):
            self.folders.setdefault(op.folder, {})[op.name] = op.node
            if op.kind == "folder":
                self.folders.setdefault(op.node, {})
            elif op.kind == "link":
                self.links[op.node] = op.target
        elif isinstance(op, Linked):
            self.folders.setdefault(op.folder, {})[op.name] = op.node
        elif isinstance(op, Renamed):
            self.folders.setdefault(op.folder, {}).pop(op.name, None)
            self.folders.setdefault(op.to_folder, {})[op.to_name] = op.node
        elif isinstance(op, Removed):
            self.folders.setdefault(op.folder, {}).pop(op.name, None)
        elif isinstance(op, Wrote):
            old = self.files.get(op.node, b"").ljust(op.offset, b"\0")
            self.files[op.node] = old[: op.offset] + op.data + old[op.offset + len(op.data) :]
        elif isinstance(op, Resized):
            self.files[op.node] = self.files.get(op.node, b"")[: op.size].ljust(op.size, b"\0")


def touched(op: Operation) -> tuple[int, ...]:
    """The nodes that must be fsynced for this to be sure."""
    if isinstance(op, Renamed):
        return tuple({op.folder, op.to_folder})
    if isinstance(op, Created | Linked | Removed):
        return (op.folder,)
    return (op.node,) if isinstance(op, Wrote | Resized) else ()


def after_cut(start: Disk, log: Sequence[Operation], cut: int, how: How, rng: random.Random) -> Disk:
    """A disk after the first `cut` operations and a power cut. What was not fsynced is all lost, all kept, or each of
    it whatever `rng` says."""
    sure: set[int] = set()
    """Nodes that are fsynced later on."""
    keep: list[Operation] = []
    likely = rng.choice((0.1, 0.5, 0.9))
    for op in reversed(log[:cut]):
        if isinstance(op, Synced):
            sure.add(op.node)
        elif all(node in sure for node in touched(op)) or how == "kept":
            keep.append(op)
        elif how == "any" and (kept := _perhaps(op, likely, rng)) is not None:
            keep.append(kept)
    disk = start.copy()
    for op in reversed(keep):
        disk.apply(op)
    for op in log[:cut]:  # a node that was made is a node, though its name may be lost
        if isinstance(op, Created) and op.kind == "folder":
            disk.folders.setdefault(op.node, {})
        elif isinstance(op, Created) and op.kind == "link":
            disk.links.setdefault(op.node, op.target)
    return disk


def _perhaps(op: Operation, likely: float, rng: random.Random) -> Operation | None:
    if rng.random() >= likely:
        return None
    if not isinstance(op, Wrote) or rng.random() < 0.5:
        return op
    if rng.random() < 0.5:
        return Wrote(op.node, op.offset, op.data[: rng.randrange(len(op.data) + 1)])
    return Wrote(op.node, op.offset, bytes(len(op.data)))  # the length had reached the disk, and the bytes had not


def write_tree(tree: Tree, folder: Path) -> None:
    """Put a tree on the real disk, into an empty folder."""
    for name, what in tree.items():
        path = folder / name
        if what == "folder":
            path.mkdir()
        elif isinstance(what, tuple):
            os.symlink(what[0], path)
        else:
            assert isinstance(what, bytes)
            path.write_bytes(what)


def read_tree(folder: Path) -> Tree:
    """What is on the real disk."""
    found: Tree = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = (os.readlink(path),)
        else:
            found[name] = "folder" if path.is_dir() else path.read_bytes()
    return found


Fault = Callable[[int, Operation], OSError | None]
"""The error that the operation of that number shall fail with, if any."""


class Recorder:
    """Writes down what is done to the disk under `root`; `with recorder.watching():`."""

    def __init__(self, root: Path, fault: Fault | None = None) -> None:
        self.root = Path(os.path.realpath(root))
        self.log: list[Operation] = []
        self.fault = fault
        self.count = 0
        """Of changes asked for, failed ones too."""
        self._lock = threading.RLock()
        self._nodes: dict[int, int] = {os.stat(self.root).st_ino: 0}
        self.start = Disk()
        self._scan(self.root, 0)

    def _scan(self, folder: Path, node: int) -> None:
        for path in sorted(folder.iterdir()):
            child = self._number(os.lstat(path).st_ino)
            self.start.folders[node][path.name] = child
            if path.is_symlink():
                self.start.links[child] = os.readlink(path)
            elif path.is_dir():
                self.start.folders[child] = {}
                self._scan(path, child)
            else:
                self.start.files[child] = path.read_bytes()

    def _number(self, inode: int) -> int:
        """A number for a new node; the real inode's may be one that a removed file had."""
        self._nodes[inode] = number = max(self._nodes.values()) + 1
        return number

    def tell(self, what: Any) -> None:
        """Mark this moment."""
        with self._lock:
            self.log.append(Promised(what))

    @property
    def changes(self) -> int:
        """How many operations on the disk there were."""
        return sum(not isinstance(op, Promised) for op in self.log)

    # The stand-ins

    @contextmanager
    def watching(self) -> Iterator[Recorder]:
        """Everything done by this process meanwhile is seen."""
        names = ("open", "write", "fsync", "fdatasync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir")
        names += ("symlink", "link", "truncate", "ftruncate", "sync")
        unknown = ("sendfile", "copy_file_range", "pwrite", "pwritev", "writev", "posix_fallocate", "mknod", "splice")
        self._real = {name: getattr(os, name) for name in (*names, *unknown)}
        self._open = io.open
        mine: dict[str, Any] = {name: getattr(self, f"_{name}_") for name in names}
        mine.update({name: self._refusing(name) for name in unknown})
        mine["fdatasync"], mine["replace"], mine["remove"] = mine["fsync"], mine["rename"], mine["unlink"]
        for name, stand_in in mine.items():
            setattr(os, name, stand_in)
        io.open = builtins.open = self._file  # type: ignore[assignment]
        try:
            yield self
        finally:
            for name, real in self._real.items():
                setattr(os, name, real)
            io.open = builtins.open = self._open

    def _refusing(self, name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kinds: Any) -> Any:
            raise AssertionError(f"the recorder does not know os.{name}: teach it")

        return refuse

    def _at(self, path: Any, dir_fd: int | None = None) -> tuple[int, str, str] | None:
        """Folder, name and real path of what `path` names, links on the way followed; None outside of the root."""
        text = os.fspath(path)
        text = text.decode() if isinstance(text, bytes) else text
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        above, name = os.path.split(os.path.abspath(text))
        above = os.path.realpath(above)
        if above != str(self.root) and not above.startswith(f"{self.root}/"):
            return None
        try:
            return self._nodes[os.stat(above).st_ino], name, os.path.join(above, name)
        except FileNotFoundError:
            return None  # the operation itself will say so

    def _of(self, descriptor: int) -> int | None:
        """The node that a descriptor belongs to."""
        path = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
        if path != str(self.root) and not path.startswith(f"{self.root}/"):
            return None
        return self._nodes[os.fstat(descriptor).st_ino]

    def _do(self, op: Operation, real: Callable[[], Any]) -> Any:
        """Carry it out, or fail it as told; only what was done is written down."""
        number, self.count = self.count, self.count + 1
        error = self.fault(number, op) if self.fault else None
        if error is not None:
            raise error
        done = real()
        self.log.append(op)
        return done

    def _open_(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        real = self._real["open"]
        with self._lock:
            place = None if isinstance(path, int) else self._at(path, dir_fd)
            if place is None or not flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                return int(real(path, flags, mode, dir_fd=dir_fd))
            folder, name, at = place
            if not os.path.lexists(at):
                if not flags & os.O_CREAT:
                    return int(real(path, flags, mode, dir_fd=dir_fd))
                node = max(self._nodes.values()) + 1
                fd = int(self._do(Created(folder, name, node, "file"), lambda: real(path, flags, mode, dir_fd=dir_fd)))
                self._nodes[os.fstat(fd).st_ino] = node
                return fd
            if flags & os.O_EXCL or not flags & os.O_TRUNC:
                return int(real(path, flags, mode, dir_fd=dir_fd))
            node = self._nodes[os.stat(at).st_ino]
            return int(self._do(Resized(node, 0), lambda: real(path, flags, mode, dir_fd=dir_fd)))

    def _file(self, file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
              newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
        with self._lock:
            ours = set(mode) & set("wax+") and (
                self._of(file) is not None if isinstance(file, int) else opener or self._at(file) is not None
            )
            if not ours:
                return self._open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            plain = mode.replace("b", "").replace("t", "")
            descriptor = file
            if not isinstance(file, int):
                descriptor = (opener or self._create)(file, _flags(plain))
            raw = _Raw(self, descriptor, "r+" if "+" in plain else "w", closefd)
            if "a" in plain:
                raw.seek(0, os.SEEK_END)
        if "b" in mode and buffering == 0:
            return raw
        whole: Any = io.BufferedRandom(raw) if "+" in plain else io.BufferedWriter(raw)
        return whole if "b" in mode else io.TextIOWrapper(whole, encoding, errors, newline)

    def _create(self, path: Any, flags: int) -> int:
        return self._open_(path, flags, 0o666)

    def wrote(self, descriptor: int, data: bytes, real: Callable[[], int]) -> int:
        """A write through a descriptor, at its position."""
        with self._lock:
            node = self._of(descriptor)
            if node is None:
                return real()
            offset = os.lseek(descriptor, 0, os.SEEK_CUR)
            return int(self._do(Wrote(node, offset, bytes(data)), real))

    def _write_(self, descriptor: int, data: Any) -> int:
        return self.wrote(descriptor, bytes(data), lambda: int(self._real["write"](descriptor, data)))

    def _fsync_(self, descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        with self._lock:
            node = self._of(number)
            # What is synced here is synced in the log: waiting for this machine's disk would show nothing.
            self._real["fsync"](number) if node is None else self._do(Synced(node), lambda: None)

    def _sync_(self) -> None:
        """Everything that was done so far is sure."""
        with self._lock:
            self._real["sync"]()
            self.log += [Synced(node) for node in sorted(set(self._nodes.values()))]

    def _rename_(self, old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        with self._lock:
            source, target = self._at(old, src_dir_fd), self._at(new, dst_dir_fd)
            real = lambda: self._real["rename"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)  # noqa: E731
            if source is None or target is None or not os.path.lexists(source[2]):
                real()
                return
            node = self._nodes[os.lstat(source[2]).st_ino]
            self._do(Renamed(source[0], source[1], target[0], target[1], node), real)

    def _remove(self, kind: str, path: Any, dir_fd: int | None) -> None:
        with self._lock:
            place = self._at(path, dir_fd)
            real = lambda: self._real[kind](path, dir_fd=dir_fd)  # noqa: E731
            if place is None or not os.path.lexists(place[2]):
                real()
            else:
                self._do(Removed(place[0], place[1]), real)

    def _unlink_(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    def _rmdir_(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    def _make(self, path: Any, dir_fd: int | None, kind: Kind, target: str, real: Callable[[], None]) -> None:
        with self._lock:
            place = self._at(path, dir_fd)
            if place is None or os.path.lexists(place[2]):
                real()
                return
            node = max(self._nodes.values()) + 1
            self._do(Created(place[0], place[1], node, kind, target), real)
            self._nodes[os.lstat(place[2]).st_ino] = node

    def _mkdir_(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._make(path, dir_fd, "folder", "", lambda: self._real["mkdir"](path, mode, dir_fd=dir_fd))

    def _symlink_(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        self._make(dst, dir_fd, "link", os.fspath(src), lambda: self._real["symlink"](src, dst, dir_fd=dir_fd))

    def _link_(self, src: Any, dst: Any, **more: Any) -> None:
        with self._lock:
            place = self._at(dst)
            if place is None:
                self._real["link"](src, dst, **more)
                return
            node = self._nodes[os.lstat(src).st_ino]
            self._do(Linked(place[0], place[1], node), lambda: self._real["link"](src, dst, **more))

    def _truncate_(self, path: Any, length: int) -> None:
        if isinstance(path, int):
            self._ftruncate_(path, length)
            return
        with self._lock:
            place = self._at(path)
            if place is None or not stat.S_ISREG(os.stat(place[2]).st_mode):
                self._real["truncate"](path, length)
                return
            node = self._nodes[os.stat(place[2]).st_ino]
            self._do(Resized(node, length), lambda: self._real["truncate"](path, length))

    def _ftruncate_(self, descriptor: int, length: int) -> None:
        with self._lock:
            node = self._of(descriptor)
            real = lambda: self._real["ftruncate"](descriptor, length)  # noqa: E731
            real() if node is None else self._do(Resized(node, length), real)

    _fdatasync_, _replace_, _remove_ = _fsync_, _rename_, _unlink_


class _Raw(io.FileIO):
    """A file whose writes are seen, each as it leaves the buffer."""

    def __init__(self, recorder: Recorder, descriptor: int, mode: str, closefd: bool) -> None:
        super().__init__(descriptor, mode, closefd)
        self._recorder = recorder

    def write(self, data: Any) -> int:
        raw = bytes(data)
        return self._recorder.wrote(self.fileno(), raw, lambda: int(super(_Raw, self).write(raw) or 0))

    def truncate(self, size: int | None = None) -> int:
        length = self.tell() if size is None else size
        os.ftruncate(self.fileno(), length)
        return length


def _flags(mode: str) -> int:
    """What `open` makes of its mode."""
    how = os.O_RDWR if "+" in mode else os.O_WRONLY
    more = {"w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT | os.O_EXCL, "a": os.O_CREAT | os.O_APPEND, "r": 0}
    return how | more[mode.replace("+", "")] | os.O_CLOEXEC


def faults_at(numbers: Mapping[int, int] | Callable[[int], int | None]) -> Fault:
    """A fault that fails operations by number with an errno."""
    look = numbers if callable(numbers) else numbers.get

    def fault(number: int, op: Operation) -> OSError | None:
        code = look(number)
        return None if code is None else OSError(code, os.strerror(code))

    return fault
