"""The signing keys of the repository: each role's signers, by securesystemslib URI.

Promises: a key made here is Ed25519, in a 0600 file, on disk before anything it signs. `keys.json` names each role's
signers: `file2:NAME.pem` is a file beside it; any other URI that securesystemslib knows (PKCS#11, a cloud KMS) works
as well, so that moving a role's key out of this machine changes this file and the root, and no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from securesystemslib.signer import CryptoSigner, Key, Signer

from edgesplit.durable import write_durably
from edgesplit.errors import UsageError
from edgesplit.identity import load_or_make_key

ROLES: Final = ("root", "targets", "snapshot", "timestamp", "director", "planner")


class SignerEntry(msgspec.Struct, frozen=True):
    """One signer of a role."""

    uri: str
    keyid: str
    public: dict[str, Any]
    """The public key, as in TUF metadata."""


class KeyFolder:
    """The signers kept in `folder`. A role without one gets a key file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table = folder / "keys.json"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def signers(self, role: str) -> list[Signer]:
        """The signers of that role; made on first use."""
        entries = self._load().get(role) or [self._make(role)]
        return [self._open(entry) for entry in entries]

    def _make(self, role: str) -> SignerEntry:
        file = f"{role}.pem"
        key = CryptoSigner(load_or_make_key(self._folder / file)).public_key
        entry = SignerEntry(f"file2:{file}", key.keyid, key.to_dict())
        table = {**self._load(), role: [entry]}
        write_durably(self._table, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n", mode=0o600)
        return entry

    def _load(self) -> Mapping[str, list[SignerEntry]]:
        try:
            return msgspec.json.decode(self._table.read_bytes(), type=dict[str, list[SignerEntry]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{self._table} cannot be read: {error}; restore it from a backup") from error

    def _open(self, entry: SignerEntry) -> Signer:
        scheme, _, path = entry.uri.partition(":")
        uri = f"{scheme}:{self._folder.resolve() / path}" if scheme == CryptoSigner.SCHEME else entry.uri
        try:
            return Signer.from_priv_key_uri(uri, Key.from_dict(entry.keyid, dict(entry.public)))
        except Exception as error:  # each kind of signer fails in its own way
            raise UsageError(f"signing key {entry.uri}: {error}") from error
