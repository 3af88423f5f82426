"""Writes a backup while the controller runs: first a consistent snapshot of the database, then the files that its rows
refer to.

A release is in the repository before it is in the database, and nothing is collected meanwhile; so whatever the
snapshot's rows refer to exists when the files are read. Where the file is written to is a matter of `location`.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import msgspec

import edgesplit
from edgesplit.errors import UsageError
from edgesplit_controller.backup.envelope import SCRYPT_N, BackupKey, SealedWriter
from edgesplit_controller.backup.location import BackupFile, BackupLocation
from edgesplit_controller.backup.origin import load_or_make_signing_key
from edgesplit_controller.backup.rows import export_rows
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.blobs import BlobLost, BlobStore
from edgesplit_controller.storage.collection_lock import collection_lock
from edgesplit_controller.storage.database import Database
from edgesplit_controller.tuf.metadata_store import MetadataStore

ROWS: Final = "database.jsonl"
"""Archive member with the database rows."""
CONTENTS: Final = "backup.json"
"""Archive member with the list of all members, which is the last one."""
KEYS: Final = ("keys", "tuf/keys")
"""Folders with private keys."""
SECRETS: Final = (*KEYS, "tuf/pending.json", "operator.token")
"""Files and folders that an unencrypted backup must not contain."""
INCLUDED: Final = ("tuf", "keys", "ports.json", "addresses.json")
"""Files and folders of the data folder that a backup contains, besides rows and blobs. The owner's token is not among
them: the first start after a restore makes a new one."""
MEMORY_BYTES: Final = 32 * 2**20
"""Bytes of rows that are held in memory; more are spooled to an unnamed temporary file."""


class Member(msgspec.Struct, frozen=True):
    """One file in a backup: size and SHA-256."""

    bytes: int
    sha256: str


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The files in a backup, and whether it includes blobs."""

    files: dict[str, Member]
    blobs: bool


Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total."""


def make_backup(
    data: Path, database_url: str, file: Path | BackupLocation, encryption: BackupKey, *, keys: bool, blobs: bool,
    now: float, store: Blobs | None = None, progress: Progress = lambda done, of: None, replace: bool = False,
    scrypt_n: int = SCRYPT_N,
) -> Contents:  # fmt: skip
    """Write a backup of the controller in `data` to `file` and return its contents.

    It is signed with `keys/backup.key`. With `keys` it must be encrypted. With `blobs` it has those in `store`, by
    default those in the data folder. UsageError if `data` is not a data folder, if `file` exists and `replace` is
    false, or if the disk fails.
    """
    location = BackupFile(file) if isinstance(file, Path) else file
    if not (data / "keys" / "ca.pem").is_file():
        raise UsageError(f"{data} is no controller's data folder: give it with `edgectl --data DIR backup ...`")
    if keys and not (encryption.passphrase or encryption.recipient):
        raise UsageError("a backup with keys must be encrypted: with a passphrase, or for a key, --to PUBLIC-KEY")
    if not replace and location.size() is not None:
        raise UsageError(f"{location} exists already: --force replaces it")
    included = (store or BlobStore(data / "blobs")) if blobs else None
    with location.writing() as raw, _nothing_collected(database_url), SealedWriter(
        raw, encryption, load_or_make_signing_key(data), created=now, version=edgesplit.__version__, keys=keys,
        scrypt_n=scrypt_n,
    ) as sealed:  # fmt: skip
        return _write(data, database_url, sealed, keys=keys, blobs=included, progress=progress)


@contextmanager
def _nothing_collected(database_url: str) -> Iterator[None]:
    """Exclude garbage collection while the block runs; Busy while it runs."""
    database = Database(database_url, migrated=False)
    try:
        with collection_lock(database) as lock:
            lock.keep_renewed()
            yield
    finally:
        database.close()


def _write(
    data: Path, database_url: str, sealed: SealedWriter, *, keys: bool, blobs: Blobs | None, progress: Progress
) -> Contents:
    files: dict[str, Member] = {}
    done = 0
    with (
        tempfile.SpooledTemporaryFile(MEMORY_BYTES) as rows,
        tarfile.open(fileobj=sealed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for line in export_rows(database_url):
            rows.write(line)
        size = rows.tell()
        rows.seek(0)
        with MetadataStore(data / "tuf").exclusive():
            small_files = [(name, (data / name).read_bytes()) for name in _small_files(data, keys)]
        stored = list(blobs.list_blobs()) if blobs is not None else []
        total = size + sum(len(content) for _, content in small_files) + sum(blob.bytes for blob in stored)

        def add(name: str, content: IO[bytes] | mmap.mmap, size: int) -> None:
            nonlocal done
            files[name] = _add(tar, name, content, size)
            done += size
            progress(done, total)

        add(ROWS, rows, size)
        for name, content in small_files:
            add(name, io.BytesIO(content), len(content))
        for blob in stored:
            assert blobs is not None
            try:
                raw_blob = blobs.mapped(blob.sha256)
            except BlobLost as error:
                raise UsageError(f"{error}: a backup of it would be too") from error
            source = io.BytesIO(raw_blob) if isinstance(raw_blob, bytes) else raw_blob
            add(f"blobs/{blob.sha256[:2]}/{blob.sha256}", source, len(raw_blob))
        contents = Contents(files=files, blobs=blobs is not None)
        raw = msgspec.json.encode(contents)
        _add(tar, CONTENTS, io.BytesIO(raw), len(raw))
    return contents


def _small_files(data: Path, keys: bool) -> Iterator[str]:
    """Names of the files that are read under the repository's lock: repository and keys."""
    for top in INCLUDED:
        paths = sorted((data / top).rglob("*")) if (data / top).is_dir() else [data / top]
        for path in paths:
            name = path.relative_to(data).as_posix()
            hidden = any(part.startswith(".") for part in path.relative_to(data).parts)
            if path.is_file() and not hidden and (keys or not is_secret(name)):
                yield name


def is_secret(name: str) -> bool:
    """Whether this file may be in an encrypted backup only."""
    return any(name == secret or name.startswith(f"{secret}/") for secret in SECRETS)


class _HashingReader(io.RawIOBase):
    """Computes the SHA-256 of a file while it is read."""

    def __init__(self, content: IO[bytes] | mmap.mmap) -> None:
        self._content = content
        self.sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._content.read(size)
        self.sha256.update(data)
        return data


def _add(tar: tarfile.TarFile, name: str, content: IO[bytes] | mmap.mmap, size: int) -> Member:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    hashing = _HashingReader(content)
    tar.addfile(info, hashing)
    return Member(size, hashing.sha256.hexdigest())
