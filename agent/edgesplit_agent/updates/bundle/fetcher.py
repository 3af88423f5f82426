"""Fetches metadata, manifests and chunks from a release bundle, with the calls by which the uplink fetches them from
the broker.

Only a chunk's digest is checked here: as with data from the network, the caller decides what to trust.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

from edgesplit.errors import LinkError, MalformedMessage, UsageError
from edgesplit.limits import LIMITS
from edgesplit.release.bundle_format import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    BundleIndex,
    chunk_path,
    decode_index,
    statement_path,
)
from edgesplit_agent.control.fetcher import StoreChunks
from edgesplit_agent.updates.bundle.reader import BundleReader

log = logging.getLogger(__name__)

BATCH_CHUNKS = 64
"""Chunks passed to `keep` at once, which waits for the disk each time: 8 MiB."""


class BundleFetcher:
    """One release bundle while it is being applied."""

    def __init__(self, reader: BundleReader, on_progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """`on_progress` is called with the bytes copied so far and their total."""
        self._reader = reader
        self._on_progress = on_progress

    def index(self) -> BundleIndex:
        """The bundle's description of itself, which is not signed. LinkError where the medium was removed."""
        try:
            return decode_index(self._reader.read(INDEX_FILE, MAX_INDEX_BYTES))
        except FileNotFoundError as error:
            raise LinkError("the bundle's medium is missing: connect it again to continue") from error

    def statement(self, device: str) -> bytes:
        """The director's statement for that device, not verified yet; UsageError where the bundle has none."""
        try:
            return self._reader.read(statement_path(device), LIMITS.message_bytes)
        except FileNotFoundError as error:
            raise UsageError(
                f"the bundle has nothing for {device}: make one with `edgectl bundle --for {device}`"
            ) from error

    def fetch(self, path: str, max_bytes: int) -> bytes:
        """A metadata file, as `edgesplit.trust.store.Fetch` requires."""
        return self._reader.read(path, max_bytes)

    def fetch_chunks(
        self,
        release: str,
        wanted: Mapping[str, int],
        all_chunks: Sequence[str],
        keep: StoreChunks,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Pass the `wanted` chunks (size by digest) to `keep` in batches, until `stop()`. LinkError where the bundle
        lacks one, MalformedMessage where one is damaged; the chunks before it are kept. `all_chunks` is unused: it is
        there to match the uplink's `ChunkFetcher.fetch`."""
        total, done = sum(wanted.values()), 0
        batch: list[tuple[str, bytes]] = []
        for sha256, size in wanted.items():
            if stop():
                break
            try:
                batch.append((sha256, self._read_chunk(sha256, size)))
            except BaseException:
                keep(batch)
                raise
            done += size
            if len(batch) >= BATCH_CHUNKS:
                keep(batch)
                batch = []
                self._on_progress(done, total)
        keep(batch)
        self._on_progress(done, total)

    def _read_chunk(self, sha256: str, size: int) -> bytes:
        """One chunk, whose size and digest are right; LinkError where the bundle lacks it, MalformedMessage where it is
        damaged."""
        try:
            data = self._reader.read(chunk_path(sha256), size)
        except FileNotFoundError as error:
            raise LinkError(f"chunk {sha256[:12]} is not in the bundle") from error
        if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
            raise MalformedMessage(f"chunk {sha256[:12]} in the bundle is corrupt: make the bundle again")
        return data

    def close(self) -> None:
        """Close the medium."""
        self._reader.close()
