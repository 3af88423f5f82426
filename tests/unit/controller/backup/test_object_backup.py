"""Backups and restores with S3-compatible storage: the file there, the blobs there, or both (moto's mock of S3; no real
store)."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.errors import EdgeError, LinkError, MediumFailed, TrustError, UsageError
from edgesplit_controller.backup.create import make_backup
from edgesplit_controller.backup.envelope import BackupKey
from edgesplit_controller.backup.location import BackupLocation, parse_location
from edgesplit_controller.backup.restore import restore
from edgesplit_controller.storage import object_store
from edgesplit_controller.storage.blob_cache import BlobCache
from edgesplit_controller.storage.blob_location import copy_blobs
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.object_store import ATTEMPTS
from edgesplit_controller.storage.s3_blobs import S3BlobStore
from support.s3_server import Bucket, change_bytes, cut_answer, cut_request, refuse
from unit.controller.backup.test_backup import FilledDataFolder, tree

SECRET = BackupKey("correct horse")
N = 2


def back_up(place: FilledDataFolder, location: BackupLocation, store: S3BlobStore | None = None) -> None:
    make_backup(place.data, place.url, location, SECRET, keys=True, blobs=True, now=10.0, store=store, scrypt_n=N)


def at(bucket: Bucket, name: str) -> BackupLocation:
    return parse_location(f"s3://{bucket.name}/backups/{name}")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts, and retries that do not wait."""
    monkeypatch.setattr(object_store, "PART_BYTES", 65_536)
    monkeypatch.setattr(object_store.RETRY.__class__, "pause_s", lambda *_: 0.0)


def test_a_backup_in_an_object_store_is_restored_from_there(
    tmp_path: Path, s3_mock_bucket: Bucket, quick: None
) -> None:
    """Streamed in parts, through broken connections both ways; sealed, and in the bucket only when it is whole."""
    place, location = FilledDataFolder(tmp_path), at(s3_mock_bucket, "a.backup")
    large = BlobStore(place.data / "blobs").put(bytes(300_000))
    s3_mock_bucket.server.break_next("PUT", "partNumber=2", cut_request)
    s3_mock_bucket.server.break_next("GET", "a.backup", cut_answer)
    back_up(place, location)
    assert s3_mock_bucket.names() == ["backups/a.backup"]
    assert b"PRIVATE KEY" not in s3_mock_bucket.store("").read("backups/a.backup")
    with pytest.raises(UsageError, match=r"s3://.*/backups/a\.backup exists already: --force"):
        back_up(place, location)
    s3_mock_bucket.server.break_next("GET", "a.backup", cut_answer, times=2)
    back = tmp_path / "back"
    with pytest.raises(TrustError, match="wrong passphrase"):
        restore(location, back, BackupKey("wrong"), database_url="", now=50.0)
    assert not back.exists()
    restored = restore(location, back, SECRET, database_url="", now=50.0)
    assert restored.devices == 1 and BlobStore(back / "blobs").get(large) == bytes(300_000)
    keys = {name: data for name, data in tree(place.data).items() if name.startswith("keys/")}
    assert keys and keys.items() <= tree(back).items()


def test_a_backup_that_fails_leaves_nothing_in_the_store(tmp_path: Path, s3_mock_bucket: Bucket, quick: None) -> None:
    """Neither an object nor parts of one; one that the store returns otherwise is reported."""
    place, location = FilledDataFolder(tmp_path), at(s3_mock_bucket, "a.backup")
    BlobStore(place.data / "blobs").put(bytes(300_000))
    s3_mock_bucket.server.break_next("PUT", "partNumber=2", refuse("503 Slow Down", "SlowDown"), times=ATTEMPTS)
    with pytest.raises(LinkError, match="try again later"):
        back_up(place, location)
    BlobStore(place.data / "blobs").path(place.blob).write_bytes(b"rotten")
    with pytest.raises(UsageError, match=place.blob[:12]):
        back_up(place, location)
    assert not s3_mock_bucket.names()
    assert not s3_mock_bucket.store("").call("list_multipart_uploads").get("Uploads")
    BlobStore(place.data / "blobs").path(place.blob).unlink()
    s3_mock_bucket.server.break_next("GET", "a.backup", change_bytes)
    with pytest.raises(MediumFailed, match="not what was written"):
        back_up(place, location)


def test_blobs_of_an_object_store_are_in_the_backup_and_come_back_there(
    tmp_path: Path, s3_mock_bucket: Bucket, quick: None
) -> None:
    """From a bucket through a file into another folder of it, with nothing left in the data folder; a refused file
    brings nothing into the bucket."""
    place = FilledDataFolder(tmp_path)
    first = S3BlobStore(s3_mock_bucket.store("first"), BlobCache(tmp_path / "cache", 0))
    second = S3BlobStore(s3_mock_bucket.store("second"), BlobCache(tmp_path / "cache", 0))
    copy_blobs(BlobStore(place.data / "blobs"), first)
    BlobStore(place.data / "blobs").path(place.blob).unlink()
    make_backup(place.data, place.url, place.file, SECRET, keys=True, blobs=True, now=1.0, store=first, scrypt_n=N)
    back = tmp_path / "back"
    with pytest.raises(EdgeError, match="refused"):
        restore(place.file, back, SECRET, database_url="", now=5.0, store=second, confirm=_refuse)
    assert not list(second.list_blobs())
    restore(place.file, back, SECRET, database_url="", now=5.0, store=second)
    assert second.get(place.blob) == b"weights" * 1_000 and not (back / "blobs").exists()


def _refuse(*_: object) -> None:
    raise UsageError("refused")


def test_a_backup_location_is_a_path_or_an_object(tmp_path: Path, s3_mock_bucket: Bucket) -> None:
    """A bucket alone names no object; a missing one is named."""
    assert str(parse_location("a/b.backup")) == "a/b.backup"
    with pytest.raises(UsageError, match="names no object"):
        parse_location("s3://bucket")
    with pytest.raises(UsageError, match=r"there is no s3://.*/backups/missing"):
        at(s3_mock_bucket, "missing").reading()
    with pytest.raises(UsageError, match="cannot be read"):
        parse_location(str(tmp_path / "missing")).reading()
