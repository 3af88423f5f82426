"""Stores the chunks of releases that are being fetched: each chunk is written directly to its offsets in the files that
contain it.

    chunks/{release}/slices/{slice}/{file}    sparse files that are being filled; a complete release is one rename away
    chunks/aa/{sha256}                        golden inputs, each a file of its own

A release therefore takes its space on disk only once, also while it is assembled. No data is returned or counted as
present unless its digest matches: what was half written in a power cut, or a flipped bit on the card, costs fetching
that one chunk again. A file that another release has completely is hard-linked, not copied; a file with several links
is never written to.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NamedTuple

from edgesplit.atomic_files import make_folders, sync_file, sync_folder, write_durably
from edgesplit.errors import MalformedMessage
from edgesplit.file_hash import file_sha256
from edgesplit.identifiers import SHA256
from edgesplit.release.manifest import Manifest, SliceFile, decode_manifest
from edgesplit.release_store import remove_leftovers, remove_release
from edgesplit_agent.releases.disk_quota import (
    MANIFEST_ALLOWANCE_BYTES,
    DiskUsage,
    NoRoom,
    StoredReleaseAge,
    default_quota,
    eviction_candidate,
)

log = logging.getLogger(__name__)

BATCH_CHUNKS = 64
"""Chunks copied from other releases between two waits for the disk."""


class _ChunkLocation(NamedTuple):
    file: Path
    offset: int


@dataclass(frozen=True, slots=True)
class ReleaseLayout:
    """The files and offsets of a release's chunks on this device."""

    release: str
    """Digest of the release."""
    files: tuple[tuple[str, SliceFile], ...]
    """The release's files, each with the name of its slice."""
    loose: Mapping[str, int]
    """Size by digest of the chunks that are in no slice (golden inputs)."""

    @classmethod
    def from_manifest(cls, release: str, manifest: Manifest, slices: Collection[str]) -> ReleaseLayout:
        """Layout of these slices of a release, and its golden inputs."""
        files = tuple((item.name, file) for item in manifest.all_slices if item.name in slices for file in item.files)
        return cls(release, files, manifest.golden_chunk_sizes())

    @property
    def sizes(self) -> dict[str, int]:
        """Size by digest of all chunks, each once, in order."""
        return {**{chunk.sha256: chunk.bytes for _, file in self.files for chunk in file.chunks}, **self.loose}

    def bytes_of(self, chunks: Collection[str]) -> int:
        """Bytes that these chunks take on disk, each as often as it occurs."""
        inside = sum(chunk.bytes for _, file in self.files for chunk in file.chunks if chunk.sha256 in chunks)
        return inside + sum(size for sha256, size in self.loose.items() if sha256 in chunks)


class ChunkStore:
    """The folder `chunks`, beside the folder `releases` on the same file system, from whose releases chunks are
    reused."""

    def __init__(self, folder: Path, releases: Path, quota_bytes: int | None = None) -> None:
        """`quota_bytes` bounds both folders together; None: half of the disk."""
        self._folder = folder
        self._releases = releases
        self._quota_bytes = quota_bytes

    def assembly(self, layout: ReleaseLayout) -> ReleaseAssembly:
        """The assembly of that release: what is here, and where more of it is written."""
        return ReleaseAssembly(self, layout)

    def path(self, sha256: str) -> Path:
        """Path of the loose chunk with that digest, whether it is here or not."""
        return self._folder / sha256[:2] / sha256

    def assembly_folder(self, release: str) -> Path:
        """Folder in which that release is assembled."""
        return self._folder / release

    def get(self, sha256: str) -> bytes | None:
        """Content of the loose chunk; None where it is missing or damaged. A damaged one is deleted."""
        try:
            data = self.path(sha256).read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        log.warning("chunk %s is corrupt on disk and will be fetched again", sha256[:12])
        self.path(sha256).unlink(missing_ok=True)
        return None

    def make_room(
        self, layout: ReleaseLayout, missing: Collection[str], protected: Collection[str], further_bytes: int = 0
    ) -> None:
        """Make room for the missing chunks and `further_bytes` more, within quota and disk: releases that are not in
        `protected` are evicted, the oldest first. NoRoom where that is not enough; nothing has been written then, but
        releases may have been evicted."""
        make_folders(self._folder)
        need = layout.bytes_of(missing) + MANIFEST_ALLOWANCE_BYTES + further_bytes
        while evicted := eviction_candidate(layout.release, need, self._disk(), self._stored(), protected):
            log.info("dropped release %s to make room for %s", evicted[:12], layout.release[:12])
            self._remove(evicted)

    def remove_others(self, keep: Collection[str], loose: Collection[str] = ()) -> None:
        """Remove every release and assembly that is not in `keep`, and every loose chunk that is not in `loose`."""
        for release in {stored.release for stored in self._stored()} - set(keep):
            log.info("removed release %s", release[:12])
            self._remove(release)
        for path in self._folder.glob("[0-9a-f][0-9a-f]/*"):
            if path.name not in loose:
                path.unlink(missing_ok=True)
        for folder in (self._releases, self._folder):
            remove_leftovers(folder)

    def _remove(self, release: str) -> None:
        for folder in (self._releases, self._folder):
            remove_release(folder, release)

    def _stored(self) -> list[StoredReleaseAge]:
        """The releases on disk, complete or in assembly, each with the time since which it is here."""
        since_by_release: dict[str, float] = {}
        for folder in (self._folder, self._releases):
            for path in folder.iterdir() if folder.is_dir() else ():
                if SHA256.fullmatch(path.name) and path.is_dir():
                    since, known = path.stat().st_mtime, since_by_release.get(path.name, inf)
                    since_by_release[path.name] = min(known, since)
        return [StoredReleaseAge(release, since) for release, since in since_by_release.items()]

    def _disk(self) -> DiskUsage:
        usage = shutil.disk_usage(self._folder)
        quota = default_quota(usage.total) if self._quota_bytes is None else self._quota_bytes
        return DiskUsage(free=usage.free, used=bytes_on_disk((self._folder, self._releases)), quota=quota)

    def stored_files(self) -> Iterator[tuple[Path, SliceFile]]:
        """The files of complete releases on disk, according to their manifests; their content is not verified here."""
        for path in self._releases.glob("*/manifest.json"):
            try:
                manifest = decode_manifest(path.read_bytes())
            except (OSError, MalformedMessage):
                continue
            for item in manifest.all_slices:
                for file in item.files:
                    yield path.parent / "slices" / item.name / file.name, file


class ReleaseAssembly:
    """A release that is being assembled. `put_all` must not be called by two threads at once."""

    def __init__(self, store: ChunkStore, layout: ReleaseLayout) -> None:
        self.layout = layout
        self.folder = store.assembly_folder(layout.release)
        """Once nothing is missing: the release's slices, whole."""
        self._store = store
        self._locations: dict[str, list[_ChunkLocation]] = {}
        for name, file in layout.files:
            path, offset = self.folder / "slices" / name / file.name, 0
            for chunk in file.chunks:
                self._locations.setdefault(chunk.sha256, []).append(_ChunkLocation(path, offset))
                offset += chunk.bytes

    def missing(self) -> dict[str, int]:
        """Size by digest of the chunks that are missing or damaged on disk, in order. Hashes what is there; writes
        nothing."""
        absent = {sha256 for sha256 in self.layout.loose if self._store.get(sha256) is None}
        for name, file in self.layout.files:
            absent.update(_wrong_chunks(self.folder / "slices" / name / file.name, file))
        return {sha256: size for sha256, size in self.layout.sizes.items() if sha256 in absent}

    def link_shared_files(self) -> None:
        """Hard-link the files that other releases have completely, which takes neither space nor copying."""
        available = {(file.sha256, file.bytes): path for path, file in self._store.stored_files()}
        linked = False
        for name, file in self.layout.files:
            source, target = available.get((file.sha256, file.bytes)), self.folder / "slices" / name / file.name
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
            except OSError as error:  # FAT has no hard links: the chunks are copied instead
                link.unlink(missing_ok=True)
                log.debug("cannot link %s: %s", source, error)
        if linked:
            _sync_upwards(self.folder / "slices")

    def copy_shared_chunks(self, missing: Mapping[str, int]) -> dict[str, int]:
        """Copy those of the missing chunks that lie inside files of other releases; those that are still missing
        then."""
        absent = dict(missing)
        self._copy_from(self._store.stored_files(), absent)
        return absent

    def put_all(self, chunks: Sequence[tuple[str, bytes]]) -> None:
        """Store these chunks durably; the disk is waited for once per file, not once per chunk.

        MalformedMessage where a chunk does not match its digest or is not of this release; the other chunks are stored.
        NoRoom on a full disk; some of the chunks may be stored then.
        """
        wrong = [sha256 for sha256, data in chunks if hashlib.sha256(data).hexdigest() != sha256]
        foreign = [chunk for chunk, _ in chunks if chunk not in self._locations and chunk not in self.layout.loose]
        rejected = {*wrong, *foreign}
        try:
            self._write([chunk for chunk in chunks if chunk[0] not in rejected])
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoRoom(
                    f"the disk is full: {error.strerror}; free some space, the chunks received so far are kept"
                ) from error
            raise
        if rejected:
            raise MalformedMessage(f"{len(rejected)} chunks, as {min(rejected)[:12]}, do not match their digests")

    def _write(self, chunks: Sequence[tuple[str, bytes]]) -> None:
        by_file: dict[Path, list[tuple[int, bytes]]] = {}
        for sha256, data in chunks:
            for location in self._locations.get(sha256, ()):
                by_file.setdefault(location.file, []).append((location.offset, data))
            if sha256 in self.layout.loose:
                write_durably(self._store.path(sha256), data)
        for path, pieces in by_file.items():
            _write_into(path, pieces)

    def _copy_from(self, files: Iterable[tuple[Path, SliceFile]], absent: dict[str, int]) -> None:
        """Copy chunks of `absent` from these files, and remove from `absent` what was copied."""
        batch: list[tuple[str, bytes]] = []
        for path, file in files:
            offset = 0
            for chunk in file.chunks:
                if chunk.sha256 in absent:
                    data = _read(path, offset, chunk.bytes)
                    if hashlib.sha256(data).hexdigest() == chunk.sha256:
                        batch.append((chunk.sha256, data))
                        del absent[chunk.sha256]
                offset += chunk.bytes
                if len(batch) >= BATCH_CHUNKS:
                    self.put_all(batch)
                    batch = []
        if batch:
            self.put_all(batch)


def bytes_on_disk(folders: Iterable[Path]) -> int:
    """Bytes that all files under these folders take on disk; a file with several hard links counts once."""
    bytes_by_inode: dict[tuple[int, int], int] = {}
    for top in folders:
        for folder, _, names in os.walk(top):
            for name in names:
                try:
                    status = os.lstat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue
                bytes_by_inode[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(bytes_by_inode.values())


def _write_into(path: Path, pieces: Sequence[tuple[int, bytes]]) -> None:
    """Write bytes at their offsets into a file, which is created where it is missing, and sync it to disk."""
    fresh = not path.exists()
    if fresh:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif path.stat().st_nlink > 1:  # hard-linked: writing in place would change another release, so copy first
        copy = path.with_name(f".{path.name}.part")
        try:
            shutil.copyfile(path, copy)
            os.replace(copy, path)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
    with path.open("wb" if fresh else "r+b", buffering=0) as file:
        for offset, data in pieces:
            file.seek(offset)
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[file.write(remaining) :]
        sync_file(file.fileno(), path)
    if fresh:
        sync_folder(path.parent)
        _sync_upwards(path.parent.parent)


def _sync_upwards(slices: Path) -> None:
    """Sync a release's `slices` folder and its parents up to the data folder: each may be new, and its name is stored
    in the folder above."""
    for folder in (slices, *slices.parents[:3]):
        sync_folder(folder)


def _wrong_chunks(path: Path, file: SliceFile) -> Iterator[str]:
    """Digests of the chunks of `file` that are missing or damaged in `path`; a chunk that occurs several times is
    yielded if any occurrence is wrong."""
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
    try:
        return file_sha256(path)
    except OSError:
        return ""


def _read(path: Path, offset: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError:
        return b""
