"""Who made a backup: files that nobody vouches for are refused, whatever their header says, and no operator comes back
unseen."""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select

from edgesplit.errors import EdgeError, MalformedMessage, TrustError, UsageError
from edgesplit_controller.access.bootstrap import owner_token
from edgesplit_controller.backup.create import CONTENTS, ROWS, Contents, Member, make_backup
from edgesplit_controller.backup.envelope import (
    MAGIC,
    SIGNATURE_BYTES,
    UNSIGNED_MAGIC,
    BackupKey,
    Header,
    SealedReader,
    SealedWriter,
    make_recipient,
    parse_recipient,
)
from edgesplit_controller.backup.origin import (
    SIGNING_KEY,
    judge_origin,
    load_or_make_signing_key,
    parse_signer,
    signer_of,
    signer_text,
)
from edgesplit_controller.backup.restore import RestoreResult, restore
from edgesplit_controller.backup.rows import RestoredOperator
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.operators import BrowserSessionRow, LoginCodeRow, OperatorRow
from edgesplit_controller.tuf.repository import Repository

N = 2
NO_KEY = BackupKey()
SECRET = BackupKey("correct horse")
NOW = 1_000.0
STRANGER = Ed25519PrivateKey.generate()


class BackupHarness:
    """A controller's data folder with an admin `ada` and a viewer `vic`, on which no controller runs."""

    def __init__(self, folder: Path) -> None:
        self.data, self.file, self.back = folder / "data", folder / "a.backup", folder / "back"
        Authority(self.data / "keys")
        Repository(self.data / "tuf")
        owner_token(self.data / "operator.token")
        self.url = f"sqlite:///{self.data / 'controller.db'}"
        database = Database(self.url)
        with database.write() as session:
            for name, role, groups in (("ada", "admin", []), ("vic", "viewer", ["doors"]), ("old", "admin", [])):
                session.add(OperatorRow(
                    name=name, role=role, groups=groups, created=1.0, expires=NOW + 1, last_seen=None,
                    revoked=5.0 if name == "old" else None,
                ))  # fmt: skip
            session.flush()
            session.add(BrowserSessionRow(
                sha256="s" * 64, operator="vic", created=1.0, last_seen=NOW, expires=NOW * 2, ended=None, address="",
            ))  # fmt: skip
            session.add(LoginCodeRow(sha256="c" * 64, operator="vic", expires=NOW * 2, used=None))
        database.close()

    def backup(self, key: BackupKey = SECRET, *, keys: bool = True) -> None:
        make_backup(self.data, self.url, self.file, key, keys=keys, blobs=True, now=10.0, replace=True, scrypt_n=N)

    def give_keys(self, *, signing_key: bool = True) -> None:
        """Put the controller's keys where a backup without keys is restored."""
        for folder in ("keys", "tuf/keys"):
            target = self.back / folder
            for path in (self.data / folder).rglob("*.*"):
                (target / path.relative_to(self.data / folder)).parent.mkdir(parents=True, exist_ok=True)
                (target / path.relative_to(self.data / folder)).write_bytes(path.read_bytes())
        if not signing_key:
            (self.back / SIGNING_KEY).unlink(missing_ok=True)

    def restore(self, key: BackupKey = NO_KEY, **options: Any) -> RestoreResult:
        return restore(self.file, self.back, key, **{"database_url": "", "now": NOW, **options})

    def members(self) -> dict[str, bytes]:
        """The files in a backup without keys, as anybody can read them."""
        with self.file.open("rb") as raw, SealedReader(raw, NO_KEY) as reader:
            plain = io.BytesIO(reader.read() or b"")
        found = {}
        with tarfile.open(fileobj=plain) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                found[member.name] = content.read()
        return {name: raw for name, raw in found.items() if name != CONTENTS}

    def forge(
        self, members: Mapping[str, bytes], key: BackupKey = NO_KEY, *, keys: bool = False, signed: bool = True,
        signing_key: Ed25519PrivateKey = STRANGER,
    ) -> None:  # fmt: skip
        """Write a whole backup with these files, as anybody can who knows the format."""
        listed = {name: Member(len(raw), hashlib.sha256(raw).hexdigest()) for name, raw in members.items()}
        whole = {**members, CONTENTS: msgspec.json.encode(Contents(files=listed, blobs=True))}
        tar_file = io.BytesIO()
        with tarfile.open(fileobj=tar_file, mode="w") as tar:
            for name, raw in whole.items():
                info = tarfile.TarInfo(name)
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))
        with self.file.open("wb") as file:
            if signed:
                with SealedWriter(file, key, signing_key, created=1.0, version="1", keys=keys, scrypt_n=N) as writer:
                    writer.write(tar_file.getvalue())
            else:
                file.write(unsigned(tar_file.getvalue(), keys=keys))

    def operators(self) -> list[tuple[str, str]]:
        """Names and roles of the operators that were restored."""
        database = Database(f"sqlite:///{self.back / 'controller.db'}")
        with database.read() as session:
            rows = session.execute(select(OperatorRow.name, OperatorRow.role).order_by(OperatorRow.name)).all()
        database.close()
        return [(name, role) for name, role in rows]


def unsigned(content: bytes, *, keys: bool) -> bytes:
    """A backup of format 1 without encryption, as 0.2 wrote it `--without-keys`."""
    head = msgspec.json.encode(Header(created=1.0, version="0.2.0", opened_with="nothing", keys=keys))
    header_hash, nonce = hashlib.sha256(head).digest(), bytes(11) + b"\1"
    piece = content + hashlib.sha256(header_hash + nonce + content).digest()
    return UNSIGNED_MAGIC + struct.pack(">I", len(head)) + head + struct.pack(">IB", len(piece), 1) + piece


def promoted(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same files, but the viewer is an admin."""
    rows = members[ROWS]
    assert rows.count(b'"viewer"') == 1
    return {**members, ROWS: rows.replace(b'"viewer"', b'"admin"')}


@pytest.fixture
def world(tmp_path: Path) -> BackupHarness:
    """A controller."""
    return BackupHarness(tmp_path)


def test_a_file_with_keys_that_is_not_encrypted_is_refused(world: BackupHarness) -> None:
    """Whatever the operator gives or permits: `edgectl backup` makes no such file."""
    world.backup(BackupKey(), keys=False)
    stolen = promoted(world.members()) | {"keys/ca.key": b"theirs"}
    for signed in (True, False):
        world.forge(stolen, keys=True, signed=signed)
        for key in (BackupKey(), SECRET):
            with pytest.raises(TrustError, match="private keys and is not encrypted"):
                world.restore(key, unverified=True)
    assert not world.back.exists()


def test_a_file_that_needs_no_secret_is_refused_where_one_was_given(world: BackupHarness, tmp_path: Path) -> None:
    """An operator who gave a passphrase or a key means an encrypted file: the header does not overrule that."""
    make_recipient(tmp_path / "mine.pem")
    world.backup(BackupKey(), keys=False)
    world.give_keys()
    for key in (SECRET, BackupKey(key_file=tmp_path / "mine.pem")):
        with pytest.raises(TrustError, match=r"not encrypted.*replaced"):
            world.restore(key, unverified=True)
    world.backup(SECRET)
    with pytest.raises(TrustError, match="opened with a passphrase"):
        world.restore(BackupKey("correct horse", key_file=tmp_path / "mine.pem"))


def test_a_viewer_made_admin_in_a_backup_without_keys_is_refused(world: BackupHarness) -> None:
    """The file was changed and all its hashes made anew, beside the real keys: signed by nobody, by another key, or
    with the real signature kept."""
    world.backup(BackupKey(), keys=False)
    real, members = world.file.read_bytes(), world.members()
    world.give_keys()
    for options in ({"signed": False}, {"signing_key": STRANGER}):
        world.forge(promoted(members), **options)  # type: ignore[arg-type]
        with pytest.raises(TrustError, match=r"not signed|another controller"):
            world.restore()
    assert b'"viewer"' in real
    world.forge(promoted(members), signing_key=load_or_make_signing_key(world.data))
    forged = world.file.read_bytes()
    world.file.write_bytes(forged[:-SIGNATURE_BYTES] + real[-SIGNATURE_BYTES:])
    with pytest.raises(TrustError, match="signature is wrong"):
        world.restore()
    assert not (world.back / "controller.db").exists()
    world.file.write_bytes(real)
    assert world.restore().origin == "signature"
    assert ("vic", "viewer") in world.operators()


def test_a_signature_cannot_be_cut_off(world: BackupHarness) -> None:
    """A signed file that is made into one of the old format names its signer still, and is refused; so is one of the
    new format without a signer."""
    world.backup(BackupKey(), keys=False)
    world.give_keys()
    raw = world.file.read_bytes()
    for changed in (
        UNSIGNED_MAGIC + raw[len(MAGIC) : -SIGNATURE_BYTES], UNSIGNED_MAGIC + raw[len(MAGIC) :],
        raw[:-SIGNATURE_BYTES], raw[:-1], raw + b"x",
    ):  # fmt: skip
        world.file.write_bytes(changed)
        with pytest.raises(MalformedMessage):
            world.restore(unverified=True)
    world.file.write_bytes(MAGIC + unsigned(b"", keys=False)[len(UNSIGNED_MAGIC) :])
    with pytest.raises(MalformedMessage):
        world.restore(unverified=True)


def test_a_file_without_keys_brings_no_secret(world: BackupHarness) -> None:
    """A key that the real folder lacks, such as that of the operators' authority, would be believed afterwards."""
    world.backup(BackupKey(), keys=False)
    members = world.members()
    world.give_keys()
    for name in ("keys/operators/ca.key", "tuf/keys/root.pem", "tuf/pending.json", "operator.token"):
        world.forge(members | {name: b"theirs"}, signing_key=load_or_make_signing_key(world.data))
        with pytest.raises(MalformedMessage, match="unexpected file"):
            world.restore()


def test_a_backup_for_a_recipient_made_by_a_stranger_is_refused(world: BackupHarness, tmp_path: Path) -> None:
    """Whoever knows the recipient's public key can make one. The sender must be known: by the public key that
    `edgectl backup` printed, or by the folder's own."""
    recipient = BackupKey(recipient=parse_recipient(make_recipient(tmp_path / "mine.pem")))
    mine = BackupKey(key_file=tmp_path / "mine.pem")
    world.backup(recipient)
    signer = signer_of(world.data)
    with pytest.raises(TrustError, match=r"--signed-by PUBLIC-KEY.*--unverified"):
        world.restore(mine)
    assert not world.back.exists()
    assert world.restore(mine, signed_by=signer).origin == "signature"
    assert world.restore(mine, replace=True).origin == "signature"  # the folder's own key
    world.forge({ROWS: b"{}"}, recipient, keys=True)
    for options, reason in (({"signed_by": signer}, "do not use it"), ({}, "another controller")):
        with pytest.raises(TrustError, match=reason):
            world.restore(mine, replace=True, **options)


def test_a_backup_of_an_older_version_is_restored_with_an_explicit_option_only(world: BackupHarness) -> None:
    """Without keys it carries no signature: it is refused with a text that says what to do, and restored with
    --unverified."""
    world.backup(BackupKey(), keys=False)
    world.forge(world.members(), signed=False)
    world.give_keys(signing_key=False)
    with pytest.raises(TrustError, match=r"0\.2 made such files.*--unverified"):
        world.restore()
    assert world.restore(unverified=True).origin == "unverified"
    assert ("vic", "viewer") in world.operators()


def test_a_sealed_backup_of_an_older_version_needs_its_passphrase_only(world: BackupHarness) -> None:
    """Its passphrase proves who made it. The owner's token, which such files contain, does not come back."""
    world.backup(BackupKey(), keys=False)
    members = world.members() | {"operator.token": b"op_theirs", "keys/ca.key": b"k"}
    world.forge(members, SECRET, keys=True)
    with pytest.raises(MalformedMessage, match=r"unexpected file: 'operator\.token'"):
        world.restore(SECRET)
    unsign(world, members)
    assert world.restore(SECRET).origin == "passphrase"
    assert not (world.back / "operator.token").exists() and (world.back / "keys/ca.key").is_file()


def unsign(world: BackupHarness, members: Mapping[str, bytes]) -> None:
    """Write the backup as 0.2 did: sealed with the passphrase, no signature."""
    from edgesplit_controller.backup import envelope

    class UnsignedHeader(envelope.Header, frozen=True, kw_only=True, omit_defaults=True):
        def __post_init__(self) -> None:
            msgspec.structs.force_setattr(self, "signer", b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelope, "Header", UnsignedHeader)
        patch.setattr(envelope, "MAGIC", UNSIGNED_MAGIC)
        world.forge(members, SECRET, keys=True)
    world.file.write_bytes(world.file.read_bytes()[:-SIGNATURE_BYTES])


def test_the_operators_are_shown_before_anything_is_replaced(world: BackupHarness) -> None:
    """Name, role and groups of each, and whether it is active. Who refuses them finds everything as it was."""
    world.backup()
    shown: list[Sequence[RestoredOperator]] = []

    def refuse(operators: Sequence[RestoredOperator], origin: str) -> None:
        assert origin == "passphrase"
        shown.append(operators)
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        world.restore(SECRET, confirm=refuse)
    assert not world.back.exists()
    assert shown == [(
        RestoredOperator("ada", "admin", (), True), RestoredOperator("old", "admin", (), False),
        RestoredOperator("vic", "viewer", ("doors",), True),
    )]  # fmt: skip
    assert world.restore(SECRET).operators == shown[0]
    assert world.operators() == [("ada", "admin"), ("old", "admin"), ("vic", "viewer")]


def test_operators_that_are_listed_twice_are_shown_as_they_come_back(world: BackupHarness) -> None:
    """The last list in the file counts, for what is shown as for what is restored."""
    world.backup(BackupKey(), keys=False)
    members = world.members()
    lines = members[ROWS].splitlines(keepends=True)
    [at] = [number for number, line in enumerate(lines) if line.startswith(b'{"table":"operators"')]
    again = [line.replace(b'"viewer"', b'"admin"') for line in lines[at : at + 4]]
    tables = ("operator_tokens", "operator_certificates", "login_codes", "browser_sessions")
    rest = [line for line in lines if not any(b'"%s"' % name.encode() in line for name in tables)]
    world.forge(members | {ROWS: b"".join(rest[: at + 4] + again)}, signed=False)
    world.give_keys()
    shown = {operator.name: operator.role for operator in world.restore(unverified=True).operators}
    assert shown == dict(world.operators()) == {"ada": "admin", "old": "admin", "vic": "admin"}


def test_sessions_and_login_codes_of_a_backup_are_over(world: BackupHarness) -> None:
    """One that was ended since the backup would live again."""
    world.backup()
    world.restore(SECRET)
    database = Database(f"sqlite:///{world.back / 'controller.db'}")
    with database.read() as session:
        assert session.scalars(select(BrowserSessionRow.ended)).all() == [NOW]
        assert session.scalars(select(LoginCodeRow.sha256)).all() == []
    database.close()


@pytest.mark.parametrize("table", ["alembic_version", "leases", "sqlite_master", "sqlite_sequence"])
def test_rows_of_tables_that_are_not_the_controllers_are_refused(world: BackupHarness, table: str) -> None:
    """A file may fill the controller's own tables only."""
    world.backup(BackupKey(), keys=False)
    members = world.members()
    line = msgspec.json.encode({"table": table, "columns": ["a"], "kinds": ["plain"]}) + b"\n"
    world.forge(members | {ROWS: members[ROWS] + line}, signed=False)
    world.give_keys()
    with pytest.raises(MalformedMessage, match="unknown table"):
        world.restore(unverified=True)


def header(opened_with: str, signer: bytes) -> Header:
    """A backup's header."""
    return Header(created=1.0, version="1", opened_with=opened_with, keys=False, signer=signer)  # type: ignore[arg-type]


@pytest.mark.parametrize("opened_with", ["nothing", "passphrase", "key"])
@pytest.mark.parametrize("signer", [b"", b"A", b"B"])
@pytest.mark.parametrize("signed_by", [b"", b"A"])
@pytest.mark.parametrize("of_folder", [b"", b"A"])
@pytest.mark.parametrize("unverified", [False, True])
def test_origin_is_known_by_signature_or_passphrase_or_said_to_be_unknown(
    opened_with: str, signer: bytes, signed_by: bytes, of_folder: bytes, unverified: bool
) -> None:
    """Over every combination: a named signer decides alone, no file is believed for what it says itself."""
    try:
        origin: str | None = judge_origin(
            header(opened_with, signer), signed_by=signed_by, of_folder=of_folder, unverified=unverified
        )
    except EdgeError:
        origin = None
    if signed_by:
        assert origin == ("signature" if signer == b"A" else None)
    elif signer and signer == of_folder:
        assert origin == "signature"
    elif opened_with == "passphrase":
        assert origin == "passphrase"
    else:
        assert origin == ("unverified" if unverified else None)


def test_a_signers_key_is_text_that_reads_back(world: BackupHarness) -> None:
    """And anything else is refused; a folder without a key has no signer."""
    assert signer_of(world.data) == b""
    load_or_make_signing_key(world.data)
    signer = signer_of(world.data)
    assert parse_signer(signer_text(signer)) == signer and len(signer) == 32
    assert (world.data / SIGNING_KEY).stat().st_mode & 0o777 == 0o600
    for wrong in ("", "AAAA", "not base64!"):
        with pytest.raises(UsageError, match="--signed-by"):
            parse_signer(wrong)
