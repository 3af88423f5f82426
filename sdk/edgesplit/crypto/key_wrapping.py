"""Content keys wrapped for one device: encrypted to its X25519 public key, so that one stream of ciphertext can still
be multicast to a whole group.

HPKE (RFC 9180) in base mode: X25519, HKDF-SHA256, ChaCha20-Poly1305. Device and release are bound to the ciphertext, so
that keys wrapped for one cannot be opened for another. Base mode does not authenticate the sender: the statement that
carries the keys is signed, and each key must match the commitment in the signed manifest, whichever way it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from edgesplit.crypto.private_key import load_or_make_private_key, load_private_key
from edgesplit.crypto.slice_encryption import KEY_BYTES, Keys, is_key_of
from edgesplit.decoding import decode_msgpack
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.release.manifest import EncryptionInfo

PUBLIC_BYTES = 32
RECOVERY_HINT = (
    "encrypted models cannot be opened here without it: make a claim with `edgectl device claim NAME --replace`, move"
    " the folder `identity` away, and start the agent with that claim"
)
"""Instructions that end the error messages about a lost or damaged encryption key."""
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


class _KeyRing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The encrypted payload: content keys by key id."""

    keys: dict[str, bytes]


def wrap(keys: Keys, public_key: bytes, device: str, release: str) -> bytes:
    """Encrypt these content keys for one device and release. MalformedMessage where its public key is invalid,
    UsageError where the result is too large."""
    ring = msgspec.msgpack.encode(_KeyRing(dict(keys)), order="deterministic")
    try:
        wrapped = _SUITE.encrypt(ring, X25519PublicKey.from_public_bytes(public_key), _binding(device, release))
    except ValueError as error:
        raise MalformedMessage(f"the encryption key of {device} is no X25519 key") from error
    if len(wrapped) > LIMITS.wrapped_bytes:
        raise UsageError(
            f"release {release[:12]}: {len(keys)} content keys for {device} are {len(wrapped)} bytes, at most"
            f" {LIMITS.wrapped_bytes}; fewer cuts (--partition) need fewer keys"
        )
    return wrapped


def unwrap(wrapped: bytes, key: X25519PrivateKey, device: str, release: str) -> dict[str, bytes]:
    """Decrypt the content keys in `wrapped`. TrustError unless they were wrapped for this device, this key and this
    release."""
    if not wrapped:
        raise TrustError(f"release {release[:12]} is encrypted, and no content keys came with the statement")
    if len(wrapped) > LIMITS.wrapped_bytes:
        raise TrustError(
            f"release {release[:12]}: wrapped keys of {len(wrapped)} bytes, at most {LIMITS.wrapped_bytes}"
        )
    try:
        ring = _SUITE.decrypt(wrapped, key, _binding(device, release))
    except (InvalidTag, ValueError) as error:
        raise TrustError(
            f"release {release[:12]}: its content keys were not wrapped for this device, or were corrupted in transit"
        ) from error
    return decode_keys(ring)


def decode_keys(raw: bytes) -> dict[str, bytes]:
    """Decode the decrypted payload. TrustError where it is malformed or a key has the wrong length."""
    keys = decode_msgpack(raw, _KeyRing, "content keys", error=TrustError).keys
    if any(len(key) != KEY_BYTES for key in keys.values()):
        raise TrustError(f"content keys: one does not have {KEY_BYTES} bytes")
    return keys


def select_keys(keys: Keys, needed: Mapping[str, EncryptionInfo]) -> dict[str, bytes]:
    """Select the keys in `needed`, each checked against its commitment. TrustError where a key is missing or does not
    match."""
    missing = [key_id for key_id in needed if key_id not in keys]
    if missing:
        raise TrustError(f"{len(missing)} of {len(needed)} content keys needed here were not given to this machine")
    wrong = [key_id for key_id, sealed in needed.items() if not is_key_of(sealed, keys[key_id])]
    if wrong:
        raise TrustError(f"{len(wrong)} of {len(needed)} content keys are not those that the release was signed with")
    return {key_id: keys[key_id] for key_id in needed}


def _binding(device: str, release: str) -> bytes:
    return f"edgesplit content keys 1\n{device}\n{release}".encode()


# The device's own encryption key


def load_or_make_encryption_key(path: Path) -> X25519PrivateKey:
    """Load the device's X25519 key from `path`, or generate it there (mode 0600, durably) if the file does not exist.
    For enrolment only."""
    return load_or_make_private_key(path, X25519PrivateKey, RECOVERY_HINT)  # type: ignore[type-abstract]


def load_encryption_key(path: Path) -> X25519PrivateKey:
    """Load the device's X25519 key. UsageError with instructions where it is lost or damaged."""
    return load_private_key(path, X25519PrivateKey, RECOVERY_HINT)  # type: ignore[type-abstract]


def public_bytes(key: X25519PrivateKey) -> bytes:
    """The public key as sent to the controller (32 bytes)."""
    return key.public_key().public_bytes_raw()


def sign_encryption_key(key: X25519PrivateKey, identity: Ed25519PrivateKey, csr_pem: str) -> tuple[bytes, bytes]:
    """Returns the public key, and the identity key's signature that binds it to this certificate request."""
    public = public_bytes(key)
    return public, identity.sign(_signed_text(public, csr_pem))


def verify_encryption_key(public_key: bytes, signature: bytes, identity: object, csr_pem: str, device: str) -> None:
    """Verify that the holder of the identity key owns this X25519 key, and that the key can be wrapped to.

    TrustError where the signature is not by the identity key, MalformedMessage where the key is not an X25519 key.
    """
    if len(public_key) != PUBLIC_BYTES or not isinstance(identity, Ed25519PublicKey):
        raise MalformedMessage("the encryption key is no X25519 key, or the request's own key is not Ed25519")
    try:
        identity.verify(signature, _signed_text(public_key, csr_pem))
    except InvalidSignature as error:
        raise TrustError("the encryption key is not signed by the key of the certificate request") from error
    wrap({}, public_key, device, "")


def _signed_text(public: bytes, csr_pem: str) -> bytes:
    """The message that the identity key signs. Its prefix is unique among everything this key signs (domain
    separation)."""
    return b"edgesplit encryption key 1\n" + public + csr_pem.encode()


warm_up_structs(__name__)
