"""Signers by securesystemslib URI: a key file, a PKCS#11 token, or a cloud KMS; used by the controller and on
operators' machines.

Promises: any error of a library about an unusable key is translated into one line that says what to do. A `file2:` key
may be protected by a passphrase, which securesystemslib itself does not support. What is signed does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from securesystemslib.exceptions import UnsupportedLibraryError
from securesystemslib.signer import (
    SIGNER_FOR_URI_SCHEME,
    AWSSigner,
    AzureSigner,
    CryptoSigner,
    GCPSigner,
    HSMSigner,
    Key,
    Signature,
    Signer,
    SSlibKey,
    VaultSigner,
)

from edgesplit.atomic_files import write_durably
from edgesplit.crypto.private_key import private_pem
from edgesplit.errors import EdgeError, TrustError, UsageError

FILE: Final = CryptoSigner.SCHEME
"""URI scheme of a key file."""
EXTRAS: Final = {
    AWSSigner.SCHEME: "awskms", AzureSigner.SCHEME: "azurekms", GCPSigner.SCHEME: "gcpkms", HSMSigner.SCHEME: "hsm",
    VaultSigner.SCHEME: "vault",
}  # fmt: skip
"""The extra of securesystemslib that a scheme needs, by scheme."""

REFUSED: Final = {"gnupg": "devices have no GnuPG", "tkey": "devices do not know ML-DSA keys"}
"""Schemes whose signatures not every device can verify, with the reason."""

AskSecret = Callable[[str], str]
"""Prompts for a secret by its name, such as a PIN or the passphrase of a file."""


class WrongKey(UsageError):
    """The signer does not hold that key."""


def no_secret(name: str) -> str:
    """`AskSecret` for processes without a terminal; raises UsageError."""
    raise UsageError(f"{name} is needed, and there is no terminal to ask for it")


def signer_uri(text: str) -> str:
    """`text` as a signer URI; a bare path is a key file. UsageError for a scheme that is not supported."""
    scheme, colon, _ = text.partition(":")
    if scheme in REFUSED:
        raise UsageError(f"{text[:120]}: {REFUSED[scheme]}; use a file, a PKCS#11 token or a KMS")
    if colon and scheme in SIGNER_FOR_URI_SCHEME:
        return text
    if Path(text).is_file():
        return f"{FILE}:{text}"
    if colon and "/" not in scheme:
        schemes = ", ".join(sorted(SIGNER_FOR_URI_SCHEME.keys() - REFUSED.keys()))
        raise UsageError(f"{text[:120]}: no signer of the scheme {scheme!r}; there is: {schemes}")
    raise UsageError(f"{text[:120]}: no such key file; a signer is a file or a URI, as in {FILE}:release.pem")


def open_signer(uri: str, key: Key, secret: AskSecret = no_secret, folder: Path | None = None) -> Signer:
    """The signer at `uri`, whose public part is `key`. A relative file path is resolved against `folder`. UsageError if
    it cannot be used."""
    with _translated(uri):
        if _scheme(uri) == FILE:
            if not isinstance(key, SSlibKey):
                raise UsageError(f"{uri}: a key file has no key of the type {key.keytype}")
            return CryptoSigner(_private_key(_file(uri, folder), secret), key)
        return Signer.from_priv_key_uri(uri, key, secret)


def public_key(uri: str, secret: AskSecret = no_secret) -> Key:
    """The public part of the key at `uri`, read from the file, token or KMS. UsageError if it cannot be read."""
    with _translated(uri):
        if _scheme(uri) == FILE:
            return CryptoSigner(_private_key(_file(uri, None), secret)).public_key
        import_key = _IMPORTS.get(_scheme(uri))
        if import_key is None:
            raise UsageError(f"{uri}: the public key cannot be read from a signer of this kind; use another")
        return import_key(uri.partition(":")[2], secret)[1]


def sign(uri: str, payload: bytes, keys: Mapping[str, Key], secret: AskSecret = no_secret) -> Signature | None:
    """The signature of the key at `uri` over `payload`, if it is one of `keys`; None if it is not.

    A file reveals which key it holds. A token or a KMS signs with the key it has, and the one of `keys` that verifies
    the signature is taken. NotThisKey if it accepted none of `keys`, such as a token with another type of key.
    """
    refusal: WrongKey | None = None
    for key in _candidates(uri, keys, secret):
        try:
            with _translated(uri):  # a wrong PIN is not retried: tokens lock after a few attempts
                signature = open_signer(uri, key, secret).sign(payload)
        except WrongKey as error:
            refusal = error
            continue
        if _verifies(key, signature, payload):
            return signature
    if refusal is not None:
        raise refusal
    return None


def _candidates(uri: str, keys: Mapping[str, Key], secret: AskSecret) -> list[Key]:
    if _scheme(uri) != FILE:
        return list(keys.values())
    held = _private_key(_file(uri, None), secret)
    return [key for key in keys.values() if isinstance(key, SSlibKey) and _is_pair(held, key)]


def _is_pair(private: Any, key: SSlibKey) -> bool:
    try:
        CryptoSigner(private, key)
    except Exception:  # another key, or another type of key
        return False
    return True


def _verifies(key: Key, signature: Signature, payload: bytes) -> bool:
    try:
        key.verify_signature(signature, payload)
    except Exception:  # a signature by another key, or of another type
        return False
    return True


def check_signature(key: Key, signature: Signature, payload: bytes) -> None:
    """Raise TrustError unless `key` signed `payload`."""
    if not _verifies(key, signature, payload):
        raise TrustError(f"the signature of key {key.keyid[:8]} does not match what is to be signed now: try again")


def make_key_file(path: Path, passphrase: str = "") -> Key:
    """Generate an Ed25519 key in `path` (0600, durably), encrypted if there is a passphrase; return its public part.
    UsageError if the file exists."""
    if path.exists():
        raise UsageError(f"{path} exists already, and a key is never overwritten")
    private = Ed25519PrivateKey.generate()
    pem = private_pem(private)
    if passphrase:
        pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(passphrase.encode()))
    try:
        write_durably(path, pem, mode=0o600)
    except OSError as error:
        raise UsageError(f"cannot write the key {path}: {error.strerror}") from error
    return CryptoSigner(private).public_key


def _private_key(path: Path, secret: AskSecret) -> Any:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the key {path}: {error.strerror}") from error
    protected = b"ENCRYPTED" in raw[:200]
    try:
        return load_pem_private_key(raw, secret(f"passphrase of {path}").encode() if protected else None)
    except (ValueError, TypeError) as error:
        why = "wrong passphrase" if protected else "it is no private key in PEM"
        raise UsageError(f"cannot open the key {path}: {why}") from error


def _scheme(uri: str) -> str:
    return uri.partition(":")[0]


def _file(uri: str, folder: Path | None) -> Path:
    path = Path(uri.partition(":")[2])
    return folder.resolve() / path if folder is not None else path


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Raise the errors of a signer as UsageError, those for a key that it cannot hold as WrongKey."""
    try:
        yield
    except EdgeError:
        raise
    except Exception as error:  # each kind of signer fails in its own way
        extra = EXTRAS.get(_scheme(uri))
        if isinstance(error, UnsupportedLibraryError) and extra:
            install = f"this kind of signer is not installed: `pip install 'securesystemslib[{extra}]'`"
            raise UsageError(f"signing key {uri}: {install}") from error
        # securesystemslib raises ValueError for a key of a type that the token cannot hold.
        kind = WrongKey if isinstance(error, ValueError) else UsageError
        raise kind(f"signing key {uri}: {error or type(error).__name__}") from error


def _from_hsm(rest: str, secret: AskSecret) -> tuple[str, Key]:
    number, _, query = rest.partition("?")
    return HSMSigner.import_(int(number) if number else None, dict(parse_qsl(query)).get("label"), secret)


def _from_azure(rest: str, _secret: AskSecret) -> tuple[str, Key]:
    host, _, path = rest.removeprefix("//").partition("/")
    parts = path.split("/")
    if len(parts) < 2 or parts[0] != "keys":
        raise UsageError(f"azurekms:{rest}: write it as azurekms://VAULT.vault.azure.net/keys/NAME/VERSION")
    return AzureSigner.import_(host.partition(".")[0], parts[1])


_IMPORTS: Final[Mapping[str, Callable[[str, AskSecret], tuple[str, Key]]]] = {
    AWSSigner.SCHEME: lambda rest, _: AWSSigner.import_(rest),
    AzureSigner.SCHEME: _from_azure,
    GCPSigner.SCHEME: lambda rest, _: GCPSigner.import_(rest),
    HSMSigner.SCHEME: _from_hsm,
    VaultSigner.SCHEME: lambda rest, _: VaultSigner.import_(rest.partition("/")[0]),
}
"""How the public part is read, by scheme: functions of the part of the URI after the colon."""
