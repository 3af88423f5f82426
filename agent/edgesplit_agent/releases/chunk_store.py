"""What is here of releases on their way: each chunk goes straight to its places in the files that it belongs to.

    chunks/{release}/slices/{slice}/{file}    files that grow, with holes; a whole release is one rename away
    chunks/aa/{sha256}                        golden inputs, each a file of its own

So a release is on disk once, also while it is put together. Nothing is returned or counted as here whose digest does
not match: what was half written when the power went, or a bit that flipped on the card, costs that one chunk again. A
file that another release has whole is linked, not copied; one with several links is never written to.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from edgesplit.atomic_files import make_folders, sync_file, sync_folder, write_durably
from edgesplit.errors import MalformedMessage
from edgesplit.identifiers import SHA256
from edgesplit.release.manifest import Manifest, SliceFile, decode_manifest
from edgesplit.release_store import remove_release, remove_remains
from edgesplit_agent.releases.disk_quota import PAPERS_BYTES, Disk, NoRoom, Stored, default_quota, drop_next

log = logging.getLogger(__name__)

AT_ONCE = 64
"""Chunks taken over from other releases between two waits for the disk."""
_READ_BYTES = 1 << 20


class _Place(NamedTuple):
    file: Path
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the chunks of a release belong on this device."""

    release: str
    files: tuple[tuple[str, SliceFile], ...]
    """With the name of the slice that each is of."""
    loose: Mapping[str, int]
    """Size by digest of chunks that are in no slice."""

    @classmethod
    def of(cls, release: str, manifest: Manifest, slices: Collection[str]) -> Layout:
        """Of these slices of a release, and its golden inputs."""
        files = tuple((one.name, file) for one in manifest.every_slice if one.name in slices for file in one.files)
        return cls(release, files, manifest.golden_chunks())

    @property
    def sizes(self) -> dict[str, int]:
        """Size by digest of all chunks, each once, in order."""
        return {**{chunk.sha256: chunk.bytes for _, file in self.files for chunk in file.chunks}, **self.loose}

    def bytes_of(self, chunks: Collection[str]) -> int:
        """What these chunks take on disk: as often as they occur."""
        inside = sum(chunk.bytes for _, file in self.files for chunk in file.chunks if chunk.sha256 in chunks)
        return inside + sum(size for sha256, size in self.loose.items() if sha256 in chunks)


class ChunkStore:
    """The folder `chunks`, with `releases` beside it (on the same file system) to take from."""

    def __init__(self, folder: Path, releases: Path, quota_bytes: int | None = None) -> None:
        """`quota_bytes` bounds both folders together; None: half of the disk."""
        self._folder = folder
        self._releases = releases
        self._quota_bytes = quota_bytes

    def assembly(self, layout: Layout) -> Assembly:
        """What is here of that release, and where more of it goes."""
        return Assembly(self, layout)

    def path(self, sha256: str) -> Path:
        """Where the loose chunk of that digest lies once it came."""
        return self._folder / sha256[:2] / sha256

    def home(self, release: str) -> Path:
        """Where the files of that release grow."""
        return self._folder / release

    def get(self, sha256: str) -> bytes | None:
        """The loose chunk, or None; a spoilt one is thrown away."""
        try:
            data = self.path(sha256).read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        log.warning("chunk %s is spoilt on disk and will be fetched again", sha256[:12])
        self.path(sha256).unlink(missing_ok=True)
        return None

    def make_room(self, layout: Layout, missing: Collection[str], protected: Collection[str], beside: int = 0) -> None:
        """Room for the missing chunks and `beside` bytes more, quota and disk considered: drops what is not protected,
        the oldest first. NoRoom where that is not enough; then nothing has been written."""
        make_folders(self._folder)
        need = layout.bytes_of(missing) + PAPERS_BYTES + beside
        while drop := drop_next(layout.release, need, self._disk(), self._stored(), protected):
            log.info("dropped release %s to make room for %s", drop[:12], layout.release[:12])
            self._remove(drop)

    def forget(self, keep: Collection[str], loose: Collection[str] = ()) -> None:
        """Drop every release and every beginning of one that is not in `keep`, and every loose chunk not in `loose`."""
        for one in {stored.release for stored in self._stored()} - set(keep):
            log.info("removed release %s", one[:12])
            self._remove(one)
        for path in self._folder.glob("[0-9a-f][0-9a-f]/*"):
            if path.name not in loose:
                path.unlink(missing_ok=True)
        for folder in (self._releases, self._folder):
            remove_remains(folder)

    def _remove(self, release: str) -> None:
        for folder in (self._releases, self._folder):
            remove_release(folder, release)

    def _stored(self) -> list[Stored]:
        found: dict[str, float] = {}
        for folder in (self._folder, self._releases):
            for path in folder.iterdir() if folder.is_dir() else ():
                if SHA256.fullmatch(path.name) and path.is_dir():
                    found[path.name] = min(found.get(path.name, float("inf")), path.stat().st_mtime)
        return [Stored(release, since) for release, since in found.items()]

    def _disk(self) -> Disk:
        usage = shutil.disk_usage(self._folder)
        quota = default_quota(usage.total) if self._quota_bytes is None else self._quota_bytes
        return Disk(free=usage.free, held=bytes_held((self._folder, self._releases)), quota=quota)

    def known(self) -> Iterator[tuple[Path, SliceFile]]:
        """The files of releases on disk, by the manifests found there. Nothing is hashed yet."""
        for path in self._releases.glob("*/manifest.json"):
            try:
                manifest = decode_manifest(path.read_bytes())
            except (OSError, MalformedMessage):
                continue
            for one in manifest.every_slice:
                for file in one.files:
                    yield path.parent / "slices" / one.name / file.name, file


class Assembly:
    """One release that comes together. `put_all` is not to be called by two threads at once."""

    def __init__(self, store: ChunkStore, layout: Layout) -> None:
        self.layout = layout
        self.folder = store.home(layout.release)
        """Once nothing is missing: the release's slices, whole."""
        self._store = store
        self._places: dict[str, list[_Place]] = {}
        for name, file in layout.files:
            path, offset = self.folder / "slices" / name / file.name, 0
            for chunk in file.chunks:
                self._places.setdefault(chunk.sha256, []).append(_Place(path, offset))
                offset += chunk.bytes

    def missing(self) -> dict[str, int]:
        """The chunks (size by digest) that are not here, in order, by the bytes of what is. Writes nothing."""
        absent = {sha256 for sha256 in self.layout.loose if self._store.get(sha256) is None}
        for name, file in self.layout.files:
            absent.update(_wrong_chunks(self.folder / "slices" / name / file.name, file))
        return {sha256: size for sha256, size in self.layout.sizes.items() if sha256 in absent}

    def link(self) -> None:
        """Take the files that other releases have whole: that needs neither room nor time."""
        there = {(file.sha256, file.bytes): path for path, file in self._store.known()}
        linked = False
        for name, file in self.layout.files:
            source, target = there.get((file.sha256, file.bytes)), self.folder / "slices" / name / file.name
            if source is None or not any(_wrong_chunks(target, file)) or _digest(source) != file.sha256:
                continue
            link = target.with_name(f".{target.name}.part")
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                os.link(source, link)
                os.replace(link, target)
                sync_folder(target.parent)
                linked = True
            except OSError as error:  # FAT knows no links, and then the chunks are copied
                link.unlink(missing_ok=True)
                log.debug("cannot link %s: %s", source, error)
        if linked:
            _sync_upwards(self.folder / "slices")

    def copy(self, missing: Mapping[str, int]) -> dict[str, int]:
        """Take those of the missing chunks that lie inside files of other releases; what is still missing then."""
        absent = dict(missing)
        self._copy_from(self._store.known(), absent)
        return absent

    def put_all(self, chunks: Sequence[tuple[str, bytes]]) -> None:
        """Keep these chunks, durably once this returns. The disk is waited for once per file, not once per chunk.

        MalformedMessage where one is not what its name says, or is not of this release; what can be kept is. NoRoom on
        a full disk: then some of these chunks are here and the others not.
        """
        wrong = [sha256 for sha256, data in chunks if hashlib.sha256(data).hexdigest() != sha256]
        strange = [one for one, _ in chunks if one not in self._places and one not in self.layout.loose]
        spoken = {*wrong, *strange}
        try:
            self._write([one for one in chunks if one[0] not in spoken])
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoRoom(
                    f"the disk is full: {error.strerror}; free some, what has come of the release is kept"
                ) from error
            raise
        if spoken:
            raise MalformedMessage(f"{len(spoken)} chunks, as {min(spoken)[:12]}, are not what their names say")

    def _write(self, chunks: Sequence[tuple[str, bytes]]) -> None:
        by_file: dict[Path, list[tuple[int, bytes]]] = {}
        for sha256, data in chunks:
            for place in self._places.get(sha256, ()):
                by_file.setdefault(place.file, []).append((place.offset, data))
            if sha256 in self.layout.loose:
                write_durably(self._store.path(sha256), data)
        for path, pieces in by_file.items():
            _write_into(path, pieces)

    def _copy_from(self, files: Iterable[tuple[Path, SliceFile]], absent: dict[str, int]) -> None:
        """Take chunks that lie inside files of other releases; what was taken is absent no longer."""
        found: list[tuple[str, bytes]] = []
        for path, file in files:
            offset = 0
            for chunk in file.chunks:
                if chunk.sha256 in absent:
                    data = _read(path, offset, chunk.bytes)
                    if hashlib.sha256(data).hexdigest() == chunk.sha256:
                        found.append((chunk.sha256, data))
                        del absent[chunk.sha256]
                offset += chunk.bytes
                if len(found) >= AT_ONCE:
                    self.put_all(found)
                    found = []
        if found:
            self.put_all(found)


def bytes_held(folders: Iterable[Path]) -> int:
    """What all files under these folders take on disk; one that has several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for top in folders:
        for folder, _, names in os.walk(top):
            for name in names:
                try:
                    found = os.lstat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue
                seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def _write_into(path: Path, pieces: Sequence[tuple[int, bytes]]) -> None:
    """Put bytes where they belong in a file that may not be there yet, and wait for the disk."""
    fresh = not path.exists()
    if fresh:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif path.stat().st_nlink > 1:  # another release runs from these very bytes
        own = path.with_name(f".{path.name}.part")
        try:
            shutil.copyfile(path, own)
            os.replace(own, path)
        except OSError:
            own.unlink(missing_ok=True)
            raise
    with path.open("wb" if fresh else "r+b", buffering=0) as file:
        for offset, data in pieces:
            file.seek(offset)
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        sync_file(file.fileno(), path)
    if fresh:
        sync_folder(path.parent)
        _sync_upwards(path.parent.parent)


def _sync_upwards(slices: Path) -> None:
    """From a release's `slices` to the agent's folder: each may be new, and its name is in the one above it."""
    for folder in (slices, *slices.parents[:3]):
        sync_folder(folder)


def _wrong_chunks(path: Path, file: SliceFile) -> Iterator[str]:
    """The digests of those chunks of `file` that are not at their places in `path`: at one of them, if there are
    several."""
    try:
        opened = path.open("rb")
    except FileNotFoundError:
        yield from (chunk.sha256 for chunk in file.chunks)
        return
    with opened:
        for chunk in file.chunks:
            data = opened.read(chunk.bytes)
            if len(data) != chunk.bytes or hashlib.sha256(data).hexdigest() != chunk.sha256:
                yield chunk.sha256


def _digest(path: Path) -> str:
    whole = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                whole.update(piece)
    except OSError:
        return ""
    return whole.hexdigest()


def _read(path: Path, offset: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError:
        return b""
