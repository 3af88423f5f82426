"""Where an installation's blobs are: in its data folder, or in an object store by URL; and how they get from one to the
other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from edgesplit_controller.storage.blob_cache import BlobCache
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.object_store import ObjectStore, ObjectUrl
from edgesplit_controller.storage.s3_blobs import S3BlobStore

CACHE: Final = "cache/blobs"
"""Folder in the data folder with copies of blobs from an object store; it may be deleted at any time."""


class CopyResult(msgspec.Struct, frozen=True):
    """Result of a copy: what was copied, and what the target has now of the source's blobs."""

    copied: int
    copied_bytes: int
    blobs: int
    bytes: int


def open_blobs(url: str, data: Path, cache_bytes: int) -> Blobs:
    """The blobs at `url`, an s3:// URL, with a cache in the data folder; empty: those in the data folder. An EdgeError
    with the remedy if the store does not work."""
    if not url:
        return BlobStore(data / "blobs")
    objects = ObjectStore(ObjectUrl.parse(url))
    objects.check()
    return S3BlobStore(objects, BlobCache(data / CACHE, cache_bytes))


@contextmanager
def blobs_for_command(url: str, data: Path, scratch: Path) -> Iterator[Blobs]:
    """The blobs at `url`, or those in the data folder, for one command: nothing is cached, and large blobs pass through
    a temporary folder in `scratch`, or the system's if there is no such folder."""
    if not url:
        yield BlobStore(data / "blobs")
        return
    objects = ObjectStore(ObjectUrl.parse(url))
    with tempfile.TemporaryDirectory(prefix=".blobs-", dir=scratch if scratch.is_dir() else None) as folder:
        yield S3BlobStore(objects, BlobCache(Path(folder), 0))


def copy_blobs(
    source: Blobs, target: Blobs, progress: Callable[[int, int], None] = lambda done, of: None
) -> CopyResult:
    """Copy what the target lacks, verified as it is read. An interrupted copy continues with what is left."""
    present = {blob.sha256: blob.bytes for blob in target.list_blobs()}
    blobs = list(source.list_blobs())
    missing = [blob for blob in blobs if present.get(blob.sha256) != blob.bytes]
    total = sum(blob.bytes for blob in missing)

    def contents() -> Iterator[memoryview]:
        done = 0
        for blob in missing:
            yield memoryview(source.mapped(blob.sha256))
            done += blob.bytes
            progress(done, total)

    target.put_all(contents())
    return CopyResult(len(missing), total, len(blobs), sum(blob.bytes for blob in blobs))
