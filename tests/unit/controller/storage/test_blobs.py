"""The blob store: what it lists and deletes, by the time at which a blob was stored last."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from edgesplit_controller.storage.blobs import BlobLost, BlobStore

LONG_AGO = 1_000.0


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_blobs_are_listed_with_size_and_time(store: BlobStore) -> None:
    """Uploads that are not complete are no blobs."""
    before = time.time() - 1.0
    digests = store.put_all([b"one", b"three"])
    store.incoming_file().write_bytes(b"half of it")
    assert {(blob.sha256, blob.bytes) for blob in store.list_blobs()} == set(zip(digests, (3, 5), strict=True))
    assert all(before < blob.stored < time.time() + 1.0 for blob in store.list_blobs())


def test_a_blob_that_is_stored_again_counts_as_new(store: BlobStore) -> None:
    """From memory or from a file: a collector that found it old does not delete it."""
    digest = store.put(b"weights")
    for store_again in (lambda: store.put(b"weights"), lambda: store.put_file(_part(store, b"weights"))):
        os.utime(store.path(digest), (LONG_AGO, LONG_AGO))
        assert store_again() == digest
        assert not store.delete_stored_before(digest, time.time() - 60.0)
    assert store.touch(digest) and store.get(digest) == b"weights"


def test_an_old_blob_is_deleted_once(store: BlobStore) -> None:
    """A second deletion, and a touch afterwards, tell that there is none."""
    digest = store.put(b"weights")
    assert store.delete_stored_before(digest, time.time() + 60.0)
    assert not store.delete_stored_before(digest, time.time() + 60.0) and not store.touch(digest)
    with pytest.raises(BlobLost):
        store.get(digest)


def test_storing_and_collecting_at_once_loses_no_blob(store: BlobStore) -> None:
    """Each round, the blob is old, one thread stores it again and another deletes what is old: afterwards it is there,
    kept or written anew."""
    digest = store.put(b"weights")
    for _ in range(200):
        os.utime(store.path(digest), (LONG_AGO, LONG_AGO))
        collector = threading.Thread(target=store.delete_stored_before, args=(digest, LONG_AGO + 1.0))
        collector.start()
        store.put(b"weights")
        collector.join()
        assert store.get(digest) == b"weights"


def _part(store: BlobStore, data: bytes) -> Path:
    part = store.incoming_file()
    part.write_bytes(data)
    return part
