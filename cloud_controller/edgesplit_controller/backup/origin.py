"""Who made a backup: the controller's own signing key for backups, and the decision whether a file may be restored.

Every backup is signed with `keys/backup.key`. A backup decides who is admin, also one without private keys, so it is
restored only if a passphrase opened it, if the signature is that of a key which the operator named or which lies in the
data folder, or if the operator says explicitly that the file is restored unverified. The file itself says nothing that
is believed.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from edgesplit.crypto.private_key import load_or_make_private_key, load_private_key
from edgesplit.errors import TrustError, UsageError
from edgesplit_controller.backup.envelope import Header

SIGNING_KEY: Final = "keys/backup.key"
"""File in the data folder with the key that signs backups."""
Origin = Literal["signature", "passphrase", "unverified"]
"""By what the maker of a backup is known."""
_HINT: Final = "restore it from a backup, or delete it: the next backup makes another key"


def load_or_make_signing_key(data: Path) -> Ed25519PrivateKey:
    """The key that signs backups of the controller in `data`, created there if there is none."""
    return load_or_make_private_key(data / SIGNING_KEY, Ed25519PrivateKey, _HINT)  # type: ignore[type-abstract]


def signer_of(data: Path) -> bytes:
    """Raw public key with which backups of the controller in `data` are signed; empty if the folder has none."""
    if not (data / SIGNING_KEY).is_file():
        return b""
    key = load_private_key(data / SIGNING_KEY, Ed25519PrivateKey, _HINT)  # type: ignore[type-abstract]
    return key.public_key().public_bytes_raw()


def signer_text(signer: bytes) -> str:
    """A signer's public key as text."""
    return base64.urlsafe_b64encode(signer).decode()


def parse_signer(text: str) -> bytes:
    """A signer's public key from its text; UsageError for anything else."""
    try:
        raw = base64.urlsafe_b64decode(text.strip().encode())
        Ed25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise UsageError("--signed-by takes the public key that `edgectl backup` printed") from error
    return raw


def judge_origin(header: Header, *, signed_by: bytes, of_folder: bytes, unverified: bool) -> Origin:
    """By what the maker of this backup is known; TrustError if it is not known, or is another than the named one.

    `signed_by` is the signer that the operator named, `of_folder` that of the data folder; both may be empty.
    `unverified` lets files of unknown makers pass. The caller has checked that the file is signed by `header.signer`.
    """
    if signed_by:
        if header.signer != signed_by:
            signer = f"by {signer_text(header.signer)}" if header.signer else "by no controller"
            raise TrustError(f"this backup is signed {signer}, not by {signer_text(signed_by)}: do not use it")
        return "signature"
    if header.signer and header.signer == of_folder:
        return "signature"
    if header.opened_with == "passphrase":
        return "passphrase"
    if unverified:
        return "unverified"
    if not header.signer:
        raise TrustError(
            "this backup cannot be verified: it is not signed. edgesplit 0.2 made such files, and an attacker can make"
            " one that names its own admins. If you know that your controller wrote this very file, restore it with"
            " --unverified"
        )
    if of_folder:
        raise TrustError(
            "this backup was signed by another controller than that of the data folder. If that is meant, give the"
            " public key that `edgectl backup` printed there: --signed-by PUBLIC-KEY"
        )
    raise TrustError(
        f"this backup cannot be verified: {SIGNING_KEY} of its controller is not in the data folder. Copy it there, or"
        " give the public key that `edgectl backup` printed: --signed-by PUBLIC-KEY. Without either, --unverified"
        " restores whatever the file holds, its admins included"
    )
