"""Blobs in an S3-compatible object store, with a bounded local cache of verified copies.

Several controller processes share one bucket without a common disk. Blobs have the names that they have in a folder, so
that either can be copied into the other by any tool. Every blob is verified against its name when it is read, from the
store and from the cache.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from edgesplit.errors import EdgeError, NotFound
from edgesplit.file_hash import file_sha256
from edgesplit.identifiers import sha256_hex
from edgesplit_controller.storage.blob_cache import BlobCache
from edgesplit_controller.storage.blobs import BlobLost, StoredBlob, map_file
from edgesplit_controller.storage.object_store import CONNECTIONS, COPIED_BYTES, ObjectStore

log = logging.getLogger(__name__)

UPLOAD_ABANDONED_S = 7 * 86_400.0
"""Seconds after whose beginning an upload that was not completed is deleted from the store."""
_BLOCK: Final = 1 << 20
_OBJECT_NAME: Final = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")


class S3BlobStore:
    """The blobs of one installation. Safe from any thread and process."""

    def __init__(self, objects: ObjectStore, cache: BlobCache) -> None:
        self._objects = objects
        self._cache = cache

    def put(self, data: bytes) -> str:
        """Store `data`; return its SHA-256."""
        return self.put_all([data])[0]

    def put_all(self, many: Iterable[bytes | memoryview]) -> list[str]:
        """Store each of `many`, several at a time; return their SHA-256, in order."""
        digests: list[str] = []
        running: deque[Future[None]] = deque()
        with ThreadPoolExecutor(CONNECTIONS, "blob upload") as pool:
            for data in many:
                digests.append(hashlib.sha256(data).hexdigest())
                running.append(pool.submit(self._store, digests[-1], data))
                if len(running) > CONNECTIONS:  # what is in flight stays in memory
                    running.popleft().result()
            for upload in running:
                upload.result()
        return digests

    def put_file(self, part: Path) -> str:
        """Move a file created with `incoming_file` into the store; return its SHA-256."""
        digest = file_sha256(part)
        try:
            self._upload(digest, memoryview(map_file(part)))
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self._cache.adopt(digest, part)
        return digest

    def incoming_file(self) -> Path:
        """A new local path to write to before `put_file`."""
        return self._cache.incoming_file()

    def clear_incoming(self, older_than_s: float = 0.0) -> None:
        """Delete incomplete local files that were not written to for so long, and abandoned uploads in the store."""
        self._cache.clear_incoming(older_than_s)
        try:
            self._objects.abort_uploads(UPLOAD_ABANDONED_S)
        except EdgeError as error:
            log.warning("abandoned uploads stay in the store: %s", error)

    def get(self, sha256: str) -> bytes:
        """The blob's bytes, verified; BlobLost if it is missing or damaged."""
        if (copy := self._cache.mapped(sha256)) is not None:
            return bytes(copy)
        try:
            data = self._objects.read(_name(sha256))
        except NotFound as error:
            raise self._lost(sha256, "missing") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise self._lost(sha256, "damaged")
        self._cache.add(sha256, data)
        return data

    def mapped(self, sha256: str) -> bytes | mmap.mmap:
        """The blob's bytes, verified and memory-mapped from a local copy; BlobLost if it is missing or damaged."""
        if (copy := self._cache.mapped(sha256)) is not None:
            return copy
        part = self._cache.incoming_file()
        try:
            self._download(sha256, part)
            data = map_file(part)  # before others can delete the copy
            self._cache.adopt(sha256, part)
        finally:
            part.unlink(missing_ok=True)
        return data

    def touch(self, sha256: str) -> bool:
        """Whether the blob is there; it counts as stored now, unless it has more than `COPIED_BYTES`."""
        entry = self._objects.find(_name(sha256))
        return entry is not None and (entry.bytes > COPIED_BYTES or self._objects.renew(entry.name))

    def list_blobs(self) -> Iterator[StoredBlob]:
        """Every blob, in no order."""
        for entry in self._objects.objects():
            if _OBJECT_NAME.fullmatch(entry.name):  # other objects are not ours
                yield StoredBlob(entry.name[3:], entry.bytes, entry.written_at)

    def delete_stored_before(self, sha256: str, before: float) -> bool:
        """Delete the blob, unless it was stored at or after the Unix time `before`; whether it was deleted.

        An object store has no lock: a blob that is stored again between these two requests is deleted all the same.
        Caches of other machines may have a copy until they are full.
        """
        entry = self._objects.find(_name(sha256))
        if entry is None or entry.written_at >= before:
            return False
        self._objects.delete(_name(sha256))
        self._cache.discard(sha256)
        return True

    def check(self) -> str:
        """The store's name for people; an EdgeError with the remedy if it does not work now."""
        self._objects.check()
        return str(self._objects)

    def _store(self, digest: str, data: bytes | memoryview) -> None:
        self._upload(digest, data)
        self._cache.add(digest, data)

    def _upload(self, digest: str, data: bytes | memoryview) -> None:
        name = _name(digest)
        entry = self._objects.find(name)
        is_whole = entry is not None and entry.bytes == len(data) <= COPIED_BYTES
        if not (is_whole and self._objects.renew(name)):
            self._objects.write(name, data)

    def _download(self, sha256: str, part: Path) -> None:
        digest = hashlib.sha256()
        try:
            with self._objects.reader(_name(sha256)) as source, part.open("wb") as file:
                while block := source.read(_BLOCK):
                    digest.update(block)
                    file.write(block)
        except NotFound as error:
            raise self._lost(sha256, "missing") from error
        except OSError as error:
            raise EdgeError(f"a copy of blob {sha256[:12]} cannot be written: {error.strerror}") from error
        if digest.hexdigest() != sha256:
            raise self._lost(sha256, "damaged")

    def _lost(self, sha256: str, how: str) -> BlobLost:
        return BlobLost(f"blob {sha256[:12]} is {how} in {self._objects}")


def _name(sha256: str) -> str:
    """Name of a blob's object."""
    return f"{sha256_hex(sha256)[:2]}/{sha256}"
