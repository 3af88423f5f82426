"""Stores of blobs: one contract for the folder and for S3 (moto's mock of it; no real store)."""

from __future__ import annotations

import hashlib
import mmap
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgesplit_controller.storage import object_store
from edgesplit_controller.storage.blob_cache import BlobCache
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.blob_location import copy_blobs
from edgesplit_controller.storage.blobs import BlobLost, BlobStore
from edgesplit_controller.storage.object_store import ObjectStore
from edgesplit_controller.storage.s3_blobs import S3BlobStore
from support.s3_server import Bucket, change_bytes

Damage = Callable[[str, bytes], None]


def s3_blobs(bucket: Bucket, folder: Path, cache_bytes: int = 10**8) -> S3BlobStore:
    return S3BlobStore(bucket.store(), BlobCache(folder, cache_bytes))


def name_of(digest: str) -> str:
    return f"{digest[:2]}/{digest}"


class StoreHarness:
    """A store, and the place behind it in which a blob can be damaged."""

    def __init__(self, blobs: Blobs, objects: ObjectStore | None) -> None:
        self.blobs = blobs
        self._objects = objects

    def damage(self, digest: str, data: bytes | None) -> None:
        if self._objects is None:
            assert isinstance(self.blobs, BlobStore)
            path = self.blobs.path(digest)
            path.unlink() if data is None else path.write_bytes(data)
        elif data is None:
            self._objects.delete(name_of(digest))
        else:
            self._objects.write(name_of(digest), data)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so small that few bytes need several."""
    monkeypatch.setattr(object_store, "PART_BYTES", 65_536)


@pytest.fixture(params=["folder", "s3-mock", "s3-mock-without-cache"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> StoreHarness:
    if request.param == "folder":
        return StoreHarness(BlobStore(tmp_path), None)
    bucket: Bucket = request.getfixturevalue("s3_mock_bucket")
    blobs = s3_blobs(bucket, tmp_path / "cache", 0 if "without" in request.param else 10**8)
    return StoreHarness(blobs, bucket.store())


def test_blobs_come_back_as_they_were_stored(harness: StoreHarness) -> None:
    """Small, empty and larger than one request takes; one by one, many at once and from a file."""
    blobs = harness.blobs
    large = bytes(range(256)) * 1_000
    contents = [b"", b"weights", large, *(f"chunk {number}".encode() for number in range(40)), b"weights"]
    digests = blobs.put_all(contents)
    assert digests == [hashlib.sha256(content).hexdigest() for content in contents]
    assert [blobs.get(digest) for digest in digests] == contents
    assert blobs.put(b"weights") == digests[1]
    part = blobs.incoming_file()
    part.write_bytes(large[:-1])
    of_file = blobs.put_file(part)
    assert not part.exists() and blobs.get(of_file) == large[:-1]
    for digest, content in ((digests[2], large), (digests[0], b"")):
        mapped = blobs.mapped(digest)
        assert bytes(mapped) == content and isinstance(mapped, mmap.mmap) == bool(content)


def test_listed_blobs_have_size_and_time_and_are_deleted_by_it(harness: StoreHarness) -> None:
    """A blob that is stored again counts as stored then; one that was stored since a time is not deleted for it."""
    blobs, began = harness.blobs, time.time()
    digests = blobs.put_all([b"one", b"twofold"])
    listed = {blob.sha256: blob for blob in blobs.list_blobs()}
    assert {digest: listed[digest].bytes for digest in listed} == {digests[0]: 3, digests[1]: 7}
    assert all(began - 2 <= blob.stored <= time.time() + 2 for blob in listed.values())
    assert blobs.touch(digests[0]) and not blobs.touch("0" * 64)
    assert not blobs.delete_stored_before(digests[0], began - 100) and blobs.get(digests[0]) == b"one"
    assert blobs.delete_stored_before(digests[0], time.time() + 100)
    assert not blobs.delete_stored_before(digests[0], time.time() + 100), "it is gone"
    assert [blob.sha256 for blob in blobs.list_blobs()] == [digests[1]]
    with pytest.raises(BlobLost):
        blobs.get(digests[0])


def test_a_damaged_or_missing_blob_raises_until_it_is_stored_again(harness: StoreHarness, tmp_path: Path) -> None:
    """Other bytes under a blob's name are never returned, whichever way they are read."""
    blobs = harness.blobs
    digest = hashlib.sha256(b"weights").hexdigest()
    for damage, words in ((b"weightz", "damaged"), (b"weight", "damaged"), (None, "missing|cannot be read")):
        blobs.put(b"weights")
        harness.damage(digest, damage)
        if isinstance(blobs, S3BlobStore):
            blobs._cache.discard(digest)
        for read in (blobs.get, blobs.mapped):
            with pytest.raises(BlobLost, match=words):
                read(digest)
        if damage == b"weightz":
            harness.damage(digest, None)  # of the same size: only a reader sees that it is damaged
    blobs.put(b"weights")
    assert blobs.get(digest) == b"weights"


def test_wrong_bytes_from_the_store_are_refused(s3_mock_bucket: Bucket, tmp_path: Path) -> None:
    """A store that lies is not believed, and nothing of it stays in the cache."""
    digest = s3_blobs(s3_mock_bucket, tmp_path / "first").put(b"weights" * 1000)
    blobs = s3_blobs(s3_mock_bucket, tmp_path / "second")
    for read in (blobs.get, blobs.mapped):
        s3_mock_bucket.server.break_next("GET", digest, change_bytes)
        with pytest.raises(BlobLost, match="damaged in s3://"):
            read(digest)
        assert not [path for path in (tmp_path / "second").rglob("*") if path.is_file() and path.name != ".lock"]
        assert blobs.get(digest) == b"weights" * 1000
        blobs._cache.discard(digest)


def test_a_damaged_copy_in_the_cache_is_fetched_again(s3_mock_bucket: Bucket, tmp_path: Path) -> None:
    """A sound copy saves the request; a damaged one is replaced, and so is a folder that was deleted."""
    blobs = s3_blobs(s3_mock_bucket, tmp_path)
    digest = blobs.put(b"weights")
    s3_mock_bucket.server.requests.clear()
    assert blobs.get(digest) == b"weights" and not s3_mock_bucket.server.requests
    (tmp_path / name_of(digest)).write_bytes(b"weightz")
    assert blobs.get(digest) == b"weights" and len(s3_mock_bucket.server.requests) == 1
    assert (tmp_path / name_of(digest)).read_bytes() == b"weights"
    for read in (blobs.get, blobs.mapped):
        shutil.rmtree(tmp_path)
        assert bytes(read(digest)) == b"weights" and (tmp_path / name_of(digest)).is_file()


def test_the_cache_stays_within_its_bound(s3_mock_bucket: Bucket, tmp_path: Path) -> None:
    """What was not read for longest goes first; what does not fit is not kept, and readers have it all the same."""
    blobs = s3_blobs(s3_mock_bucket, tmp_path, cache_bytes=16_000)
    digests = blobs.put_all(number.to_bytes(2, "big") * 500 for number in range(40))
    cached = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert 0 < sum(path.stat().st_size for path in cached) <= 16_000 + 1_000
    assert [blobs.get(digest)[1] for digest in digests] == list(range(40))
    large = blobs.put(b"l" * 20_000)
    assert not (tmp_path / name_of(large)).exists() and len(blobs.mapped(large)) == 20_000


@pytest.mark.parametrize("back", [False, True], ids=["into-s3-mock", "out-of-s3-mock"])
def test_a_copy_continues_where_it_was_interrupted(s3_mock_bucket: Bucket, tmp_path: Path, back: bool) -> None:
    """Only what is missing is copied, and a damaged source is named instead of copied."""
    folder, remote = BlobStore(tmp_path / "blobs"), s3_blobs(s3_mock_bucket, tmp_path / "cache", 0)
    source, target = (remote, folder) if back else (folder, remote)
    digests = source.put_all(f"blob {number}".encode() for number in range(30))
    target.put_all([b"blob 3", b"blob 4"])
    seen: list[tuple[int, int]] = []
    copied = copy_blobs(source, target, lambda done, of: seen.append((done, of)))
    assert (copied.copied, copied.blobs) == (28, 30) and seen[-1][0] == seen[-1][1] == copied.copied_bytes
    assert [target.get(digest) for digest in digests] == [f"blob {number}".encode() for number in range(30)]
    assert copy_blobs(source, target).copied == 0

    rotten = source.put(b"soon rotten")
    StoreHarness(source, s3_mock_bucket.store() if back else None).damage(rotten, b"rotten sound")
    with pytest.raises(BlobLost, match=rotten[:12]):
        copy_blobs(source, target)
    assert rotten not in {blob.sha256 for blob in target.list_blobs()}
