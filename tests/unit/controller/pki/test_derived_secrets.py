"""Derived secrets have a key of their own; installations from before keep what they derived."""

from __future__ import annotations

import shutil
from multiprocessing import get_context
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from edgesplit.crypto.private_key import private_pem
from edgesplit.errors import UsageError
from edgesplit_controller.backup.create import make_backup
from edgesplit_controller.backup.envelope import BackupKey
from edgesplit_controller.backup.restore import restore
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.pki.derived_secrets import DERIVATION_KEY, DerivedSecrets
from edgesplit_controller.pki.keys import AUTHORITY_KEY, load_or_make_authority_key, private_bytes
from edgesplit_controller.storage.database import Database

PURPOSE = "shared subscriptions"


def derived_by_0_2(keys: Path) -> str:
    """As `Authority.derive_secret` of version 0.2 did, from the authority's own key."""
    scalar = private_bytes(load_or_make_authority_key(keys / AUTHORITY_KEY))
    return HKDF(SHA256(), 16, None, f"edgesplit {PURPOSE}".encode()).derive(scalar).hex()


def derived(keys: Path) -> str:
    """As a controller process does."""
    return DerivedSecrets(keys).derive(PURPOSE)


def test_the_authoritys_signing_key_was_also_the_source_of_derived_secrets(tmp_path: Path) -> None:
    """In a new installation nothing is derived from it."""
    derived = DerivedSecrets(tmp_path)
    Authority(tmp_path)
    assert derived.derive(PURPOSE) == DerivedSecrets(tmp_path).derive(PURPOSE) != derived_by_0_2(tmp_path)
    assert (tmp_path / DERIVATION_KEY).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["p256", "ed25519"])
def test_an_installation_from_before_keeps_its_derived_secrets(tmp_path: Path, kind: str) -> None:
    """With either kind of key: every process computes the same file, at once and after a start that was killed, and
    the file is not the authority's key."""
    if kind == "ed25519":
        (tmp_path / AUTHORITY_KEY).write_bytes(private_pem(Ed25519PrivateKey.generate()))
    Authority(tmp_path)
    before = derived_by_0_2(tmp_path)
    with get_context("spawn").Pool(4) as processes:  # a fork of a process with threads may wait for ever
        found = processes.map(derived, [tmp_path] * 8)
    assert set(found) == {before}
    stored = (tmp_path / DERIVATION_KEY).read_bytes()
    assert stored != private_bytes(load_or_make_authority_key(tmp_path / AUTHORITY_KEY))
    (tmp_path / DERIVATION_KEY).unlink()  # killed before the file was complete
    assert DerivedSecrets(tmp_path).derive(PURPOSE) == before and (tmp_path / DERIVATION_KEY).read_bytes() == stored


def test_a_corrupt_derivation_key_is_refused(tmp_path: Path) -> None:
    """With what to do, instead of a secret that other processes do not have."""
    (tmp_path / DERIVATION_KEY).write_bytes(b"short")
    with pytest.raises(UsageError, match="restore it from a backup"):
        DerivedSecrets(tmp_path)


def test_backups_bring_derived_secrets_back(tmp_path: Path) -> None:
    """One of today has the key; one of 0.2 has none, and the authority's key in it gives the same secrets."""
    data, key = tmp_path / "data", BackupKey(passphrase="p" * 16)
    keys = data / "keys"
    derived = DerivedSecrets(keys).derive(PURPOSE)
    Authority(keys)
    database = Database(f"sqlite:///{data / 'controller.db'}")
    database.close()
    url = f"sqlite:///{data / 'controller.db'}"
    make_backup(data, url, tmp_path / "new", key, keys=True, blobs=False, now=1.0, scrypt_n=2**10)
    restore(tmp_path / "new", tmp_path / "again", key, database_url="", now=2.0)
    assert DerivedSecrets(tmp_path / "again" / "keys").derive(PURPOSE) == derived

    (keys / DERIVATION_KEY).unlink()
    before = derived_by_0_2(keys)
    make_backup(data, url, tmp_path / "old", key, keys=True, blobs=False, now=3.0, scrypt_n=2**10)
    shutil.rmtree(tmp_path / "again")
    restore(tmp_path / "old", tmp_path / "again", key, database_url="", now=4.0)
    assert DerivedSecrets(tmp_path / "again" / "keys").derive(PURPOSE) == before
