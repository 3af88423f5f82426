"""A bundle in the uplink's place: metadata, manifests and chunks by the same calls, from a medium instead of a broker.

Nothing is judged here but a chunk's digest: who fetches decides what is believed, as with what the network brings.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

from edgesplit.errors import LinkError, MalformedMessage, UsageError
from edgesplit.limits import LIMITS
from edgesplit.release.bundle_format import INDEX, INDEX_BYTES, Index, chunk_path, decode_index, statement_path
from edgesplit_agent.control.fetcher import Keep
from edgesplit_agent.updates.bundle.reader import Source

log = logging.getLogger(__name__)

AT_ONCE = 64
"""Chunks between two waits for the disk: 8 MiB."""


class Carrier:
    """One bundle, for as long as something is taken from it."""

    def __init__(self, source: Source, told: Callable[[int, int], None] = lambda done, of: None) -> None:
        """`told` hears of bytes copied, and of how many."""
        self._source = source
        self._told = told

    def index(self) -> Index:
        """What it says of itself."""
        try:
            return decode_index(self._source.read(INDEX, INDEX_BYTES))
        except FileNotFoundError as error:
            raise LinkError("the bundle is gone: bring it back, and it goes on") from error

    def statement(self, device: str) -> bytes:
        """The director's word for that device, not looked at yet; UsageError where the bundle has none."""
        try:
            return self._source.read(statement_path(device), LIMITS.message_bytes)
        except FileNotFoundError as error:
            raise UsageError(
                f"the bundle has nothing for {device}: make one with `edgectl bundle --for {device}`"
            ) from error

    def fetch(self, path: str, max_bytes: int) -> bytes:
        """As `edgesplit.trust.store.Fetch` says."""
        return self._source.read(path, max_bytes)

    def chunks(
        self,
        release: str,
        wanted: Mapping[str, int],
        listed: Sequence[str],
        keep: Keep,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """As `ChunkFetcher.fetch`; LinkError where a chunk is not in the bundle. What came before is kept."""
        total, done = sum(wanted.values()), 0
        batch: list[tuple[str, bytes]] = []
        for sha256, size in wanted.items():
            if stop():
                break
            try:
                batch.append((sha256, self._chunk(sha256, size)))
            except BaseException:
                keep(batch)
                raise
            done += size
            if len(batch) >= AT_ONCE:
                keep(batch)
                batch = []
                self._told(done, total)
        keep(batch)
        self._told(done, total)

    def _chunk(self, sha256: str, size: int) -> bytes:
        try:
            data = self._source.read(chunk_path(sha256), size)
        except FileNotFoundError as error:
            raise LinkError(f"chunk {sha256[:12]} is not in the bundle") from error
        if len(data) != size or hashlib.sha256(data).hexdigest() != sha256:
            raise MalformedMessage(f"chunk {sha256[:12]} in the bundle is spoilt: make the bundle again")
        return data

    def close(self) -> None:
        """Let the medium go."""
        self._source.close()
