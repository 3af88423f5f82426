"""Signing keys stored on the controller: each role's signers, by securesystemslib URI.

Promises: a key generated here is Ed25519, in a 0600 file, on disk before anything it signs. `keys.json` lists each
role's signers: `file2:NAME.pem` is a file beside it; any other URI that securesystemslib supports (PKCS#11, a cloud
KMS) works as well. A role whose keys are all stored elsewhere has no entry. A retired key is removed from the table
first, then from the disk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from securesystemslib.signer import CryptoSigner, Key, Signer

from edgesplit.atomic_files import sync_folder, write_durably
from edgesplit.errors import UsageError
from edgesplit.trust.identity import load_or_make_key
from edgesplit_controller.tuf.signers import FILE, make_key_file, open_signer

ROLES: Final = ("root", "targets", "snapshot", "timestamp", "director", "planner")


class SignerEntry(msgspec.Struct, frozen=True):
    """One signer of a role."""

    uri: str
    keyid: str
    public: dict[str, Any]
    """The public key in the form of TUF metadata."""


class KeyFolder:
    """The signers stored in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._table = folder / "keys.json"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def is_empty(self) -> bool:
        """Whether no key was ever generated here."""
        return not self._load()

    def has_key(self, role: str) -> bool:
        """Whether any key of that role is stored here."""
        return bool(self._load().get(role))

    def signers(self, role: str) -> list[Signer]:
        """The signers of that role; a first key is generated for a role that has none. For roles that are always stored
        here."""
        entries = self._load().get(role) or [self._make(role)]
        return [self._open(entry) for entry in entries]

    def signers_among(self, role: str, keyids: Collection[str]) -> list[Signer]:
        """Signers for those of these keys that are stored here; none is generated."""
        return [self._open(entry) for entry in self._load().get(role, []) if entry.keyid in keyids]

    def held_among(self, role: str, keyids: Collection[str]) -> set[str]:
        """Ids of those of these keys that are stored here."""
        return {entry.keyid for entry in self._load().get(role, [])} & set(keyids)

    def stage(self, role: str) -> Key:
        """Generate an additional key for that role, on disk. It signs nothing until the metadata names it."""
        # Written under a temporary name first, because the final name contains the key id.
        part = self.folder / f".{role}.staged.pem"
        part.unlink(missing_ok=True)
        key = make_key_file(part)
        file = f"{role}-{key.keyid[:8]}.pem"
        part.rename(self.folder / file)
        sync_folder(self.folder)
        self._add(role, SignerEntry(f"{FILE}:{file}", key.keyid, key.to_dict()))
        return key

    def retire(self, role: str, keep: Collection[str]) -> None:
        """Remove every signer of that role except `keep`, and destroy the key files of those stored here."""
        entries = self._load().get(role, [])
        kept = [entry for entry in entries if entry.keyid in keep]
        if kept != entries:
            table = {name: known for name, known in self._load().items() if name != role}
            self._write({**table, role: kept} if kept else table)
        # The table is written before files are deleted: a crash in between leaves an unused file, which the next call
        # deletes, and never an entry without its file.
        kept_uris = {entry.uri for entry in kept}
        files = [*self.folder.glob(f"{role}.pem"), *self.folder.glob(f"{role}-*.pem")]
        retired = [file for file in files if f"{FILE}:{file.name}" not in kept_uris]
        for file in retired:
            file.unlink(missing_ok=True)
        if retired:
            sync_folder(self.folder)

    def _make(self, role: str) -> SignerEntry:
        file = f"{role}.pem"
        key = CryptoSigner(load_or_make_key(self.folder / file)).public_key
        entry = SignerEntry(f"{FILE}:{file}", key.keyid, key.to_dict())
        self._add(role, entry)
        return entry

    def _add(self, role: str, entry: SignerEntry) -> None:
        table = self._load()
        self._write({**table, role: [*table.get(role, []), entry]})

    def _write(self, table: Mapping[str, list[SignerEntry]]) -> None:
        write_durably(self._table, msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n", mode=0o600)

    def _load(self) -> Mapping[str, list[SignerEntry]]:
        try:
            return msgspec.json.decode(self._table.read_bytes(), type=dict[str, list[SignerEntry]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{self._table} cannot be read: {error}; restore it from a backup") from error

    def _open(self, entry: SignerEntry) -> Signer:
        return open_signer(entry.uri, Key.from_dict(entry.keyid, dict(entry.public)), folder=self.folder)
