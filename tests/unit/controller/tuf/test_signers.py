"""Signers by URI: files with and without a passphrase, other securesystemslib signers, clear refusals."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, CryptoSigner, Key, SecretsHandler, Signature, Signer

from edgesplit.errors import TrustError, UsageError
from edgesplit_controller.tuf.key_folder import KeyFolder
from edgesplit_controller.tuf.signers import (
    EXTRAS,
    WrongKey,
    check_signature,
    make_key_file,
    open_signer,
    public_key,
    sign,
    signer_uri,
)

PAYLOAD = b"what is signed"


class SlotSigner(Signer):
    """A token with one key: like a PKCS#11 token or a KMS it signs with what it has, whatever key it was opened for."""

    held = CryptoSigner.generate_ed25519()

    def __init__(self, key: Key) -> None:
        self._key = key

    @property
    def public_key(self) -> Key:
        return self._key

    @classmethod
    def from_priv_key_uri(
        cls, priv_key_uri: str, public_key: Key, secrets_handler: SecretsHandler | None = None
    ) -> SlotSigner:
        assert secrets_handler is not None and urlparse(priv_key_uri).path == "2"
        if public_key.keytype != "ed25519":
            raise ValueError(f"unsupported scheme {public_key.scheme}")
        if secrets_handler("pin") != "1":
            raise RuntimeError("PIN incorrect")
        return cls(public_key)

    def sign(self, payload: bytes) -> Signature:
        return Signature(self._key.keyid, self.held.sign(payload).signature)


@pytest.fixture
def slot() -> Iterator[str]:
    """The URI of a key in a token of a kind of its own."""
    SIGNER_FOR_URI_SCHEME["slot"] = SlotSigner
    yield "slot:2"
    del SIGNER_FOR_URI_SCHEME["slot"]


def test_a_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    """Mode 0600, written durably; a second one of the same name is refused, and the first stays."""
    path = tmp_path / "root-1.pem"
    key = make_key_file(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="never overwritten"):
        make_key_file(path)
    assert public_key(f"file2:{path}") == key


def test_an_encrypted_key_file_opens_with_its_passphrase_only(tmp_path: Path) -> None:
    """The prompt names the file; a wrong passphrase is refused; without one the key cannot be read."""
    path = tmp_path / "release.pem"
    key = make_key_file(path, "correct horse")
    asked: list[str] = []

    def right(name: str) -> str:
        asked.append(name)
        return "correct horse"

    signature = sign(f"file2:{path}", PAYLOAD, {key.keyid: key}, right)

    assert signature is not None and asked and all(str(path) in name for name in asked)
    check_signature(key, signature, PAYLOAD)
    with pytest.raises(UsageError, match="wrong passphrase"):
        public_key(f"file2:{path}", lambda name: "battery staple")
    with pytest.raises(UsageError, match="no terminal"):
        public_key(f"file2:{path}")


@pytest.mark.parametrize("kind", ["ecdsa", "rsa"])
def test_ecdsa_and_rsa_keys_sign_too(tmp_path: Path, kind: str) -> None:
    """A token or a KMS often has no Ed25519."""
    private = (
        ec.generate_private_key(ec.SECP256R1()) if kind == "ecdsa" else rsa.generate_private_key(65537, key_size=2048)
    )
    path = tmp_path / "key.pem"
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    key = public_key(f"file2:{path}")
    signature = sign(f"file2:{path}", PAYLOAD, {key.keyid: key})

    assert key.keytype == kind and signature is not None
    check_signature(key, signature, PAYLOAD)


def test_a_hardware_token_signs_for_the_key_it_holds(slot: str) -> None:
    """Any scheme that securesystemslib is extended with works; of the allowed keys, the one that verifies is used."""
    strangers = [CryptoSigner.generate_ed25519().public_key for _ in range(3)]
    held = SlotSigner.held.public_key
    pins: list[str] = []

    def pin(name: str) -> str:
        pins.append(name)
        return "1"

    signature = sign(slot, PAYLOAD, {key.keyid: key for key in (*strangers, held)}, pin)

    assert signature is not None and signature.keyid == held.keyid and "pin" in pins
    assert sign(slot, PAYLOAD, {key.keyid: key for key in strangers}, pin) is None
    other = CryptoSigner.generate_ecdsa().public_key
    assert sign(slot, PAYLOAD, {key.keyid: key for key in (other, held)}, pin) is not None
    with pytest.raises(WrongKey, match="unsupported scheme"):
        sign(slot, PAYLOAD, {other.keyid: other}, pin)
    with pytest.raises(UsageError, match="cannot be read"):
        public_key(slot, pin)


def test_a_wrong_pin_is_not_retried(slot: str) -> None:
    """A token counts wrong PINs and locks after a few: no second key is tried after one."""
    keys = [SlotSigner.held.public_key, CryptoSigner.generate_ed25519().public_key]
    asked: list[str] = []

    def wrong(name: str) -> str:
        asked.append(name)
        return "0"

    with pytest.raises(UsageError, match="PIN incorrect") as refused:
        sign(slot, PAYLOAD, {key.keyid: key for key in keys}, wrong)
    assert asked == ["pin"] and not isinstance(refused.value, WrongKey)


@pytest.mark.parametrize("uri", ["hsm:2", "awskms:alias/x", "gcpkms:projects/x", "hv:key/1", "azurekms://v.x/keys/n/1"])
def test_a_missing_signer_library_is_named_with_its_extra(uri: str) -> None:
    """The error names the extra to install; where it is installed, the library's own error is shown."""
    key = CryptoSigner.generate_ecdsa().public_key
    scheme = uri.partition(":")[0]
    with pytest.raises(UsageError) as refused:
        open_signer(uri, key, lambda name: "1").sign(PAYLOAD)
    assert f"securesystemslib[{EXTRAS[scheme]}]" in str(refused.value) or _installed(scheme)
    with pytest.raises(UsageError, match=scheme):
        public_key(uri, lambda name: "1")


def _installed(scheme: str) -> bool:
    import importlib.util

    module = {"hsm": "pkcs11", "awskms": "boto3", "gcpkms": "google.cloud", "hv": "hvac", "azurekms": "azure"}[scheme]
    return importlib.util.find_spec(module.partition(".")[0]) is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("vault9:x", "no signer of the scheme 'vault9'"),
        ("gnupg:", "no GnuPG"),
        ("tkey:?digest=x", "ML-DSA"),
        ("missing.pem", "no such key file"),
        ("", "no such key file"),
        ("/no/where:else", "no such key file"),
    ],
)
def test_an_invalid_signer_is_refused(text: str, why: str) -> None:
    """The error lists the supported schemes."""
    with pytest.raises(UsageError, match=why):
        signer_uri(text)


def test_a_bare_path_is_a_key_file(tmp_path: Path) -> None:
    """`--sign-with release.pem` means `file2:release.pem`; a file that holds no key is named."""
    path = tmp_path / "release.pem"
    make_key_file(path)
    assert signer_uri(str(path)) == f"file2:{path}"
    path.write_bytes(b"not a key")
    with pytest.raises(UsageError, match="no private key in PEM"):
        public_key(signer_uri(str(path)))
    with pytest.raises(UsageError, match="cannot read"):
        public_key(f"file2:{tmp_path / 'gone.pem'}")


def test_a_signature_over_other_bytes_does_not_verify(tmp_path: Path) -> None:
    """Checked for every signature that comes from a remote signer."""
    key = make_key_file(tmp_path / "a.pem")
    signature = sign(f"file2:{tmp_path / 'a.pem'}", PAYLOAD, {key.keyid: key})
    assert signature is not None
    with pytest.raises(TrustError, match="does not match"):
        check_signature(key, signature, PAYLOAD + b"!")


def test_a_retired_key_is_destroyed_after_a_crash_between_table_and_file(tmp_path: Path) -> None:
    """Power is lost after the table was written: retiring again destroys the file; other files stay."""
    folder = KeyFolder(tmp_path / "keys")
    old = folder.signers("root")[0].public_key
    folder.signers("timestamp")
    new = folder.stage("root")
    kept = (tmp_path / "keys" / "root.pem").read_bytes()
    folder.retire("root", [new.keyid])
    (tmp_path / "keys" / "root.pem").write_bytes(kept)

    folder.retire("root", [new.keyid])

    assert {file.name for file in (tmp_path / "keys").glob("*.pem")} == {f"root-{new.keyid[:8]}.pem", "timestamp.pem"}
    assert folder.held_among("root", [old.keyid, new.keyid]) == {new.keyid}
    assert all(stat.S_IMODE(os.stat(file).st_mode) == 0o600 for file in (tmp_path / "keys").iterdir())
