"""Signers by securesystemslib URI: a key file, a token, a KMS; on the controller and on an operator's machine alike.

Promises: whatever a library says of a key that cannot be used becomes one line that says what to do. A `file2:` key may
be protected by a passphrase, which securesystemslib by itself does not open. Nothing here knows what is signed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from edgesplit.errors import EdgeError, TrustError, UsageError
from edgesplit.trust.identity import private_pem

FILE: Final = CryptoSigner.SCHEME
EXTRAS: Final = {
    AWSSigner.SCHEME: "awskms",
    AzureSigner.SCHEME: "azurekms",
    GCPSigner.SCHEME: "gcpkms",
    HSMSigner.SCHEME: "hsm",
    VaultSigner.SCHEME: "vault",
}
"""What a scheme needs installed: an extra of securesystemslib."""

REFUSED: Final = {"gnupg": "devices have no GnuPG", "tkey": "devices do not know ML-DSA keys"}
"""Schemes whose signatures not every device can verify."""

Secret = Callable[[str], str]
"""Asks for a secret by its name, such as a PIN or the passphrase of a file."""


class NotThisKey(UsageError):
    """The signer holds no such key."""


def no_secret(name: str) -> str:
    """For where nobody can be asked."""
    raise UsageError(f"{name} is needed, and there is nobody here to ask for it")


def signer_uri(text: str) -> str:
    """`text` as a URI: a bare path is a key file. UsageError for a scheme that securesystemslib does not know."""
    scheme, colon, _ = text.partition(":")
    if scheme in REFUSED:
        raise UsageError(f"{text[:120]}: {REFUSED[scheme]}; use a file, a PKCS#11 token or a KMS")
    if colon and scheme in SIGNER_FOR_URI_SCHEME:
        return text
    if Path(text).is_file():
        return f"{FILE}:{text}"
    if colon and "/" not in scheme:
        known = ", ".join(sorted(SIGNER_FOR_URI_SCHEME.keys() - REFUSED.keys()))
        raise UsageError(f"{text[:120]}: no signer of the scheme {scheme!r}; there is: {known}")
    raise UsageError(f"{text[:120]}: no such key file; a signer is a file or a URI, as in {FILE}:release.pem")


def open_signer(uri: str, key: Key, secret: Secret = no_secret, folder: Path | None = None) -> Signer:
    """The signer at `uri`, whose public part is `key`. A file's path counts from `folder`."""
    try:
        if _scheme(uri) == FILE:
            if not isinstance(key, SSlibKey):
                raise UsageError(f"{uri}: a key file has no key of the type {key.keytype}")
            return CryptoSigner(_private_key(_file(uri, folder), secret), key)
        return Signer.from_priv_key_uri(uri, key, secret)
    except EdgeError:
        raise
    except Exception as error:  # each kind of signer fails in its own way
        raise _explained(uri, error) from error


def public_key(uri: str, secret: Secret = no_secret) -> Key:
    """The public part of the key at `uri`, from the file, the token or the KMS itself."""
    try:
        if _scheme(uri) == FILE:
            return CryptoSigner(_private_key(_file(uri, None), secret)).public_key
        import_key = _IMPORTS.get(_scheme(uri))
        if import_key is None:
            raise UsageError(f"{uri}: the public key cannot be read from a signer of this kind; use another")
        key: Key = import_key(uri.partition(":")[2], secret)[1]
        return key
    except EdgeError:
        raise
    except Exception as error:  # each kind of signer fails in its own way
        raise _explained(uri, error) from error


def sign(uri: str, payload: bytes, keys: Mapping[str, Key], secret: Secret = no_secret) -> Signature | None:
    """The signature of the key at `uri` over `payload`, if it is one of `keys`; None if it is not.

    A file tells which key it holds. A token or a KMS signs with what it has: of `keys`, the one that verifies is it.
    NotThisKey where it took none of them for its own, such as a token of another type of keys.
    """
    other: NotThisKey | None = None
    for key in _candidates(uri, keys, secret):
        try:
            signature = open_signer(uri, key, secret).sign(payload)
        except NotThisKey as error:
            other = error
            continue
        except EdgeError:
            raise
        except Exception as error:  # a PIN that is wrong, say: not tried again, for tokens count
            raise _explained(uri, error) from error
        if _verifies(key, signature, payload):
            return signature
    if other is not None:
        raise other
    return None


def _candidates(uri: str, keys: Mapping[str, Key], secret: Secret) -> list[Key]:
    if _scheme(uri) != FILE:
        return list(keys.values())
    held = _private_key(_file(uri, None), secret)
    return [key for key in keys.values() if isinstance(key, SSlibKey) and _fits(held, key)]


def _fits(private: Any, key: SSlibKey) -> bool:
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
    """TrustError unless `key` signed `payload`."""
    if not _verifies(key, signature, payload):
        raise TrustError(f"the signature of key {key.keyid[:8]} does not fit what is to be signed now: do it again")


def make_key_file(path: Path, passphrase: str = "") -> Key:
    """A new Ed25519 key in `path` (0600, durably), encrypted where there is a passphrase; its public part."""
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


def _private_key(path: Path, secret: Secret) -> Any:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the key {path}: {error.strerror}") from error
    protected = b"ENCRYPTED" in raw[:200]
    try:
        return load_pem_private_key(raw, secret(f"passphrase of {path}").encode() if protected else None)
    except (ValueError, TypeError) as error:
        why = "the passphrase is another" if protected else "it is no private key in PEM"
        raise UsageError(f"cannot open the key {path}: {why}") from error


def _scheme(uri: str) -> str:
    return uri.partition(":")[0]


def _file(uri: str, folder: Path | None) -> Path:
    path = Path(uri.partition(":")[2])
    return folder.resolve() / path if folder is not None else path


def _explained(uri: str, error: Exception) -> UsageError:
    extra = EXTRAS.get(_scheme(uri))
    if isinstance(error, UnsupportedLibraryError) and extra:
        return UsageError(
            f"signing key {uri}: this kind of signer is not installed: `pip install 'securesystemslib[{extra}]'`"
        )
    # What securesystemslib says of a key of a type that the token cannot have.
    kind = NotThisKey if isinstance(error, ValueError) else UsageError
    return kind(f"signing key {uri}: {error or type(error).__name__}")


def _from_hsm(rest: str, secret: Secret) -> tuple[str, Key]:
    number, _, query = rest.partition("?")
    return HSMSigner.import_(int(number) if number else None, dict(parse_qsl(query)).get("label"), secret)


def _from_azure(rest: str, _secret: Secret) -> tuple[str, Key]:
    host, _, path = rest.removeprefix("//").partition("/")
    parts = path.split("/")
    if len(parts) < 2 or parts[0] != "keys":
        raise UsageError(f"azurekms:{rest}: write it as azurekms://VAULT.vault.azure.net/keys/NAME/VERSION")
    return AzureSigner.import_(host.partition(".")[0], parts[1])


_IMPORTS: Final[Mapping[str, Callable[[str, Secret], tuple[str, Key]]]] = {
    AWSSigner.SCHEME: lambda rest, _: AWSSigner.import_(rest),
    AzureSigner.SCHEME: _from_azure,
    GCPSigner.SCHEME: lambda rest, _: GCPSigner.import_(rest),
    HSMSigner.SCHEME: _from_hsm,
    VaultSigner.SCHEME: lambda rest, _: VaultSigner.import_(rest.partition("/")[0]),
}
"""How the public part is read, by scheme, given what stands behind the colon."""
