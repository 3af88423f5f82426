"""Chunks on this device, by SHA-256: those that came and wait, and those inside releases already here.

Nothing is returned or counted as here whose digest does not match: a bit that flipped on the card costs that one chunk
again, not the release.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from edgesplit.durable import make_folders, write_durably
from edgesplit.errors import EdgeError, MalformedMessage
from edgesplit.release import Manifest, SliceFile, decode_manifest

log = logging.getLogger(__name__)

WRITERS = 8
"""Chunks written at a time: what waits for the disk together, the disk does together."""
RESERVE_BYTES = 16 * 2**20
"""Never filled: logs, metadata and the next session number need room too."""


class _Place(NamedTuple):
    file: Path
    offset: int
    bytes: int


class ChunkStore:
    """The folder `chunks`, with `releases` beside it to read from."""

    def __init__(self, folder: Path, releases: Path) -> None:
        self._folder = folder
        self._releases = releases
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="chunks")

    def path(self, sha256: str) -> Path:
        """Where the chunk of that digest lies once it came."""
        return self._folder / sha256[:2] / sha256

    def put(self, sha256: str, data: bytes) -> None:
        """Keep a chunk durably; MalformedMessage if it is not what its name says."""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise MalformedMessage(f"a chunk of {len(data)} bytes is not {sha256[:12]}")
        write_durably(self.path(sha256), data)

    def put_all(self, chunks: Sequence[tuple[str, bytes]]) -> None:
        """Keep several at once, each as `put` does: the disk is waited for once, not once per chunk.

        What can be kept is, also where an error rises for another.
        """
        if len(chunks) == 1:
            self.put(*chunks[0])
            return
        writes = [self._writers.submit(self.put, *one) for one in chunks]
        wait(writes)
        for write in writes:
            write.result()

    def get(self, sha256: str) -> bytes | None:
        """The chunk that came, or None; a spoilt one is thrown away."""
        try:
            data = self.path(sha256).read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        log.warning("chunk %s is spoilt on disk and will be fetched again", sha256[:12])
        self.path(sha256).unlink(missing_ok=True)
        return None

    def missing(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Of the wanted chunks (size by digest) those to be fetched. Chunks of releases on disk are taken over."""
        absent = {sha256: size for sha256, size in wanted.items() if self.get(sha256) is None}
        if not absent:
            return {}
        places = self._places(set(absent))
        for sha256, place in places.items():
            data = _read(place)
            if hashlib.sha256(data).hexdigest() == sha256:
                self.put(sha256, data)
                del absent[sha256]
        return absent

    def check_room(self, wanted: Mapping[str, int], whole_bytes: int) -> None:
        """EdgeError unless the disk holds the wanted chunks and the release made of them."""
        make_folders(self._folder)
        need = sum(wanted.values()) + whole_bytes + RESERVE_BYTES
        free = shutil.disk_usage(self._folder).free
        if free < need:
            raise EdgeError(
                f"no room: the release needs {need / 1e6:.0f} MB with reserve, {free / 1e6:.0f} MB are free"
            )

    def forget(self, keep: Iterable[str]) -> int:
        """Drop every chunk not in `keep`, and half-written files; returns how many."""
        kept = set(keep)
        stale = [path for path in self._folder.glob("*/*") if path.name not in kept]
        for path in stale:
            path.unlink(missing_ok=True)
        return len(stale)

    def _places(self, wanted: set[str]) -> dict[str, _Place]:
        """Where wanted chunks lie inside releases on disk, by the manifests found there. Bytes are hashed later."""
        places: dict[str, _Place] = {}
        for path in self._releases.glob("*/manifest.json"):
            try:
                manifest = decode_manifest(path.read_bytes())
            except (OSError, MalformedMessage):
                continue
            for name, file in _files(manifest):
                places.update(_inside(path.parent / "slices" / name / file.name, file, wanted))
        return places


def _files(manifest: Manifest) -> Iterable[tuple[str, SliceFile]]:
    return ((one.name, file) for one in manifest.every_slice for file in one.files)


def _inside(path: Path, file: SliceFile, wanted: set[str]) -> dict[str, _Place]:
    places, offset = {}, 0
    for chunk in file.chunks:
        if chunk.sha256 in wanted:
            places[chunk.sha256] = _Place(path, offset, chunk.bytes)
        offset += chunk.bytes
    return places


def _read(place: _Place) -> bytes:
    try:
        with place.file.open("rb") as file:
            file.seek(place.offset)
            return file.read(place.bytes)
    except OSError:
        return b""
