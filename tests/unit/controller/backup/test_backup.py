"""Backups: complete or refused, encrypted where they contain keys, and from either database into either."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from edgesplit.errors import EdgeError, MalformedMessage, TrustError, UsageError
from edgesplit_controller.backup import envelope
from edgesplit_controller.backup.create import is_secret, make_backup
from edgesplit_controller.backup.envelope import (
    MAGIC,
    SIGNATURE_BYTES,
    BackupKey,
    SealedReader,
    SealedWriter,
    make_recipient,
    parse_recipient,
)
from edgesplit_controller.backup.restore import RestoreResult, restore
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Deployment, Device, Model, ReleaseRow, TelemetryRow
from edgesplit_controller.tuf.repository import Repository
from support.postgres import Postgres

SECRET = BackupKey("correct horse")
N = 2


SIGNING_KEY = Ed25519PrivateKey.generate()


def sealed(content: bytes, opener: BackupKey = SECRET) -> bytes:
    file = io.BytesIO()
    with SealedWriter(file, opener, SIGNING_KEY, created=1.0, version="1", keys=True, scrypt_n=N) as writer:
        writer.write(content)
    return file.getvalue()


def opened(raw: bytes, opener: BackupKey = SECRET) -> bytes:
    with SealedReader(io.BytesIO(raw), opener) as reader:
        return reader.read() or b""


class FilledDataFolder:
    """A controller's data folder that no controller runs on, with something of everything in it."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.data = folder / "data"
        self.file = folder / "a.backup"
        Authority(self.data / "keys")
        self.blob = BlobStore(self.data / "blobs").put(b"weights" * 1_000)
        self.url = url or f"sqlite:///{self.data / 'controller.db'}"
        self.repository = Repository(self.data / "tuf")
        (self.data / "operator.token").write_text("v3ry-secret-word\n")
        (self.data / "broker").mkdir()
        (self.data / "broker" / "mosquitto.db").write_bytes(b"not ours to keep")
        database = Database(self.url)
        with database.write() as session:
            session.add(Model(
                id=7, name="m", version=1, sha256=self.blob, optimised_sha256=self.blob, bytes=20_000_000_000,
                input_text="", bindings={"n": 1}, shown={"layers": ["é", None]}, created=1.5,
            ))  # fmt: skip
            session.flush()
            session.add(ReleaseRow(digest="d" * 64, model_id=7, created=2.0, options={}))
            session.flush()
            session.add(
                Deployment(id=3, release="d" * 64, model="m@1", targets=["all"], devices=[], options={}, created=1)
            )
            session.add(Device(
                name="cam", device_class="x", group="", labels={"a": "b"}, link="", certificate_serial="1",
                public_key_sha256="", encryption_key=b"\0\xff", enrolled=1.0, revoked=None, counter=2**40,
                statement=b"\1\2", last_seen=None, alive=True, birth={"a": 1}, reported=None, telemetry=None,
            ))  # fmt: skip
            session.add_all(
                TelemetryRow(device="cam", at=float(at), stored=float(at), session=1, sequence=at, content={"n": at})
                for at in range(1_200)
            )
            record_event(session, 1.0, "operator", "did", "it", detail="x")
        database.close()

    def backup(self, opener: BackupKey = SECRET, **options: Any) -> None:
        options = {"keys": True, "blobs": True, "now": 10.0, "scrypt_n": N, **options}
        make_backup(self.data, self.url, self.file, opener, **options)

    def restore(self, data: Path, opener: BackupKey = SECRET, **options: Any) -> RestoreResult:
        return restore(self.file, data, opener, **{"database_url": "", "now": 50.0, **options})


def rows_of(url: str) -> dict[str, list[tuple[Any, ...]]]:
    database = Database(url)
    with database.read() as session:
        models = Model, ReleaseRow, Deployment, Device, TelemetryRow
        found = {
            model.__tablename__: [tuple(row) for row in session.execute(select(*model.__table__.columns))]
            for model in models
        }
    database.close()
    return found


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "controller.db" not in path.name and not path.name.startswith(".")
    }


@pytest.mark.parametrize("into", ["sqlite", "postgresql"])
def test_a_backup_restores_database_keys_metadata_and_blobs(
    tmp_path: Path, database_url: str, into: str, request: Any
) -> None:
    """From either database into either: every row, key, metadata file and blob."""
    other = database_url if database_url.startswith("postgresql") else ""
    place = FilledDataFolder(tmp_path, other)
    target = ""
    if into == "postgresql":
        postgres: Postgres = request.getfixturevalue("postgres")
        target = postgres.database()
    place.backup()
    back = place.restore(tmp_path / "back", database_url=target)
    assert (back.devices, back.created, back.replaced) == (1, 10.0, "")

    before, after = rows_of(place.url), rows_of(target or f"sqlite:///{tmp_path / 'back' / 'controller.db'}")
    [was], [comes_back] = before.pop("devices"), after.pop("devices")
    names = [column.name for column in Device.__table__.columns]
    differ = {name: now for name, then, now in zip(names, was, comes_back, strict=True) if then != now}
    assert differ.pop("restored") == 50.0 and set(differ) <= {"changed"}
    assert after == before

    kept = {
        name: raw
        for name, raw in tree(place.data).items()
        if not name.startswith("broker/") and name != "operator.token"  # the next start makes a new one
    }
    assert tree(tmp_path / "back") == kept | {"restored.json": tree(tmp_path / "back")["restored.json"]}
    assert ((tmp_path / "back").stat().st_mode & 0o777) == 0o700

    database = Database(target or f"sqlite:///{tmp_path / 'back' / 'controller.db'}")
    with database.write() as session:  # ids go on where they were
        session.add(Model(
            name="n", version=1, sha256="", optimised_sha256="", bytes=0, input_text="", bindings={}, shown={},
            created=0.0,
        ))  # fmt: skip
        session.flush()
        assert session.scalars(select(Model.id).order_by(Model.id)).all() == [7, 8]
    database.close()


def test_a_backup_without_keys_contains_no_secret(tmp_path: Path) -> None:
    """It needs no passphrase, and is restored into a folder that has the keys."""
    place = FilledDataFolder(tmp_path)
    place.backup(BackupKey(), keys=False)
    whole = place.file.read_bytes()
    for secret in ("keys/ca.key", "operator.token", "tuf/keys/root.pem"):
        content = (place.data / secret).read_bytes()
        assert content.splitlines()[-2 if content.startswith(b"-----") else 0] not in whole and is_secret(secret)
    with pytest.raises(UsageError, match="has no keys"):
        place.restore(tmp_path / "back", BackupKey())
    for folder in ("keys", "tuf/keys"):
        (tmp_path / "back" / folder).parent.mkdir(parents=True, exist_ok=True)
        (place.data / folder).rename(tmp_path / "back" / folder)
    place.restore(tmp_path / "back", BackupKey())
    assert Repository(tmp_path / "back" / "tuf").root_bytes == place.repository.root_bytes
    Authority(tmp_path / "back" / "keys")


def test_a_backup_with_keys_is_encrypted(tmp_path: Path) -> None:
    """Without a passphrase or a recipient it is refused; with a wrong one it does not open."""
    place = FilledDataFolder(tmp_path)
    with pytest.raises(UsageError, match="must be encrypted"):
        place.backup(BackupKey())
    assert not place.file.exists()
    place.backup()
    assert b"PRIVATE" not in place.file.read_bytes() and b"digits" not in place.file.read_bytes()
    with pytest.raises(TrustError, match="passphrase"):
        place.restore(tmp_path / "back", BackupKey("wrong horse"))
    with pytest.raises(UsageError, match="opened with a passphrase"):
        place.restore(tmp_path / "back", BackupKey())
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".back*"))


def test_a_backup_for_a_recipient_opens_with_that_key_only(tmp_path: Path) -> None:
    """The machine that makes such backups cannot open them."""
    public = parse_recipient(make_recipient(tmp_path / "mine.pem"))
    make_recipient(tmp_path / "other.pem")
    raw = sealed(b"everything", BackupKey(recipient=public))
    assert opened(raw, BackupKey(key_file=tmp_path / "mine.pem")) == b"everything"
    with pytest.raises(TrustError, match="another key"):
        opened(raw, BackupKey(key_file=tmp_path / "other.pem"))
    with pytest.raises(UsageError, match="--key"):
        opened(raw, BackupKey("a passphrase"))
    with pytest.raises(UsageError, match="never overwritten"):
        make_recipient(tmp_path / "mine.pem")
    for wrong in ("", "AAAA", "not base64!"):
        with pytest.raises(UsageError, match="--new-recipient"):
            parse_recipient(wrong)


def test_restore_overwrites_nothing_without_force(tmp_path: Path, postgres: Postgres) -> None:
    """Neither a file, nor a folder with content, nor a database; with force the folder is renamed and kept."""
    place = FilledDataFolder(tmp_path)
    place.backup()
    with pytest.raises(UsageError, match="exists already"):
        place.backup()
    place.backup(replace=True)
    with pytest.raises(UsageError, match="not empty"):
        place.restore(place.data)
    back = place.restore(place.data, replace=True)
    assert (Path(back.replaced) / "broker" / "mosquitto.db").is_file() and not (place.data / "broker").exists()
    url = postgres.database()
    place.restore(tmp_path / "one", database_url=url)
    with pytest.raises(UsageError, match=r"not empty \(.*--force"):
        place.restore(tmp_path / "two", database_url=url)
    assert not (tmp_path / "two").exists()
    place.restore(tmp_path / "two", database_url=url, replace=True)
    assert len(rows_of(url)["telemetry"]) == 1_200


def test_backup_fails_on_a_damaged_blob(tmp_path: Path) -> None:
    """The blob is named, and no backup file remains."""
    place = FilledDataFolder(tmp_path)
    BlobStore(place.data / "blobs").path(place.blob).write_bytes(b"rotten")
    with pytest.raises(UsageError, match=place.blob[:12]):
        place.backup()
    assert list(tmp_path.iterdir()) == [place.data]


def test_restore_of_a_corrupt_backup_changes_nothing(tmp_path: Path) -> None:
    """Truncated anywhere or with any byte changed, it is refused and the data is unchanged; an unencrypted one as far
    as its hashes reach."""
    for opener, keys in ((SECRET, True), (BackupKey(), False)):
        place = FilledDataFolder(tmp_path / str(keys))
        place.backup(opener, keys=keys)
        good = place.file.read_bytes()
        back = tmp_path / f"back {keys}"
        if not keys:
            (place.data / "keys").rename((back / "keys").parent.mkdir() or back / "keys")
        before = tree(back) if back.exists() else {}
        for at in range(0, len(good), len(good) // 23):
            for spoiled in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
                place.file.write_bytes(spoiled)
                try:
                    place.restore(back, opener)
                except EdgeError:
                    assert (tree(back) if back.exists() else {}) == before
                else:
                    raise AssertionError(f"byte {at} of {place.file.name} ({keys=}) was changed and nobody saw it")


def test_restore_refuses_paths_outside_the_folder(tmp_path: Path) -> None:
    """A forged unencrypted backup cannot write to arbitrary paths."""

    for name, kind in (
        ("../evil", b"0"),
        ("/etc/evil", b"0"),
        ("keys/../../x", b"0"),
        ("keys/link", b"2"),
        ("x", b"0"),
        ("operator.token", b"0"),
    ):
        tar_file = io.BytesIO()
        with tarfile.open(fileobj=tar_file, mode="w") as tar:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "/etc/passwd", 0
            tar.addfile(info)
        file = tmp_path / "evil.backup"
        with (
            file.open("wb") as raw,
            SealedWriter(raw, SECRET, SIGNING_KEY, created=1.0, version="1", keys=True, scrypt_n=N) as writer,
        ):
            writer.write(tar_file.getvalue())
        with pytest.raises(MalformedMessage, match="unexpected file"):
            restore(file, tmp_path / "back", SECRET, database_url="", now=1.0)


@given(st.binary(max_size=3 * 64), st.data())
def test_encrypted_chunks_cannot_be_reordered_dropped_or_truncated(content: bytes, data: st.DataObject) -> None:
    """An encrypted file whose chunks were manipulated does not open."""
    before = envelope.PIECE_BYTES
    envelope.PIECE_BYTES = 64  # type: ignore[misc]
    try:
        raw = sealed(content)
        assert opened(raw) == content
        (size,) = struct.unpack(">I", raw[len(MAGIC) : len(MAGIC) + 4])
        head, rest = raw[: len(MAGIC) + 4 + size], raw[len(MAGIC) + 4 + size : -SIGNATURE_BYTES]
        pieces = []
        while rest:
            length = struct.unpack(">I", rest[:4])[0] + 5
            pieces.append(rest[:length])
            rest = rest[length:]
        chosen = data.draw(st.lists(st.sampled_from(pieces), max_size=5))
        try:
            assert opened(head + b"".join(chosen) + raw[-SIGNATURE_BYTES:]) == content
        except (TrustError, MalformedMessage):
            assert chosen != pieces
    finally:
        envelope.PIECE_BYTES = before  # type: ignore[misc]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_as_backup(raw: bytes) -> None:
    """Any bytes, with and without the magic first line."""
    for garbage in (raw, MAGIC + raw, MAGIC + struct.pack(">I", len(raw)) + raw):
        with pytest.raises(MalformedMessage):
            opened(garbage)
