"""TUF key rotation: a next root, and where needed next targets metadata (the list of releases), that collect signatures
and are then published.

Promises: what must be signed is stored in `pending.json` with its signatures, and nothing is published before all
signatures are there. From then on a crash at any write is harmless: the next start, or the next call, completes the
change. Until the new root is published, everything else is signed by old and new keys, so that a device sees the old
state or the new one, never neither. Keys that have no role any more are destroyed last.

Exception: a new release key that must sign the targets metadata without the old one (which is lost). Between two writes
a device that refreshes fails verification, and retries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from securesystemslib.signer import Key, Signature
from tuf.api.metadata import Metadata, Root, Targets
from tuf.api.serialization.json import JSONSerializer

from edgesplit.atomic_files import sync_folder, write_durably
from edgesplit.errors import NotFound, TrustError, UsageError
from edgesplit.trust.verification import parse_metadata
from edgesplit_controller.errors import Conflict
from edgesplit_controller.tuf.key_change import (
    DELEGATED,
    TOP_LEVEL,
    WARN_BEFORE,
    KeyChange,
    Missing,
    PublicKey,
    describe_root_change,
    is_fulfilled,
    key_warnings,
    missing_root_signatures,
    missing_targets_signatures,
    next_root,
    short_id,
)
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.repository_signer import delegated_keys
from edgesplit_controller.tuf.signers import check_signature


class ExternalSignature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A signature that was made elsewhere."""

    keyid: str
    sig: str
    """Lower-case hex."""


class Pending(msgspec.Struct, frozen=True):
    """A key change that waits for signatures. Stored in `pending.json`."""

    change: KeyChange
    online: dict[str, PublicKey]
    """The controller's newly generated keys, by role."""
    began: float
    """Unix seconds."""
    root: str = ""
    """The next root as JSON, with its signatures; empty if the root stays."""
    targets: str = ""
    """The next targets metadata as JSON, with its signatures; empty if it stays."""
    base: int = 0
    """Version of the targets metadata that `targets` follows."""


def delegates_of(pending: Pending) -> dict[str, Key]:
    """The new keys of roles that the targets metadata delegates."""
    return {role: key.to_key() for role, key in pending.online.items() if role in DELEGATED}


class Rotation:
    """Key changes of one repository, one at a time. The constructor completes an unfinished change if possible."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._store, self._signer, self._keys = repository.store, repository.signer, repository.keys
        self._file = repository.store.folder / "pending.json"
        with self._store.exclusive():
            self._complete_if_possible()

    def change(self, change: KeyChange) -> bool:
        """Begin a change, or continue it; True once it is published. Conflict while another is pending."""
        with self._store.exclusive():
            root = self._store.root()
            pending = self._load()
            if pending is None:
                if is_fulfilled(root, change):
                    return True
                self._save(self._begin(root, change))
            elif pending.change != change:
                raise Conflict(
                    "another change of the keys waits for signatures: `edgectl keys sign --sign-with URI` finishes it, "
                    "`edgectl keys drop` gives it up"
                )
            return self._complete_if_possible()

    def add_signatures(self, root: Sequence[ExternalSignature], targets: Sequence[ExternalSignature]) -> bool:
        """Add signatures to the pending change; True once it is published. TrustError for a signature by another key,
        or of other content."""
        with self._store.exclusive():
            pending = self._require_pending()
            present = self._store.root()
            signed_root = self._root_of(pending)
            following = signed_root.signed if signed_root else present
            if root:
                if signed_root is None:
                    raise UsageError("this change needs no new root, so there is none to sign")
                _add_signatures(signed_root, root, [present, following], "root")
            signed_targets = self._targets_of(pending)
            if targets:
                if signed_targets is None:
                    raise UsageError("this change needs no new list of releases, so there is none to sign")
                _add_signatures(signed_targets, targets, [present, following], "targets")
            self._save(_with_metadata(pending, signed_root, signed_targets))
            return self._complete_if_possible()

    def drop(self) -> None:
        """Abandon the pending change; the keys generated for it are destroyed."""
        with self._store.exclusive():
            pending = self._require_pending()
            self._retire(pending, self._store.root())
            self._remove()

    def pending_change(self) -> Pending | None:
        """The pending change, as it must be signed now; None if there is none."""
        with self._store.exclusive():
            self._complete_if_possible()
            return self._load()

    def missing(self, pending: Pending) -> list[Missing]:
        """Signatures that it still needs."""
        present = self._store.root()
        root, targets = self._root_of(pending), self._targets_of(pending)
        lacking = missing_root_signatures(present, root) if root else []
        return [*lacking, *(missing_targets_signatures(root.signed if root else present, targets) if targets else [])]

    def renew_held_root(self) -> bool:
        """Extend the expiry of the root in time, if its keys are stored here; return whether it was done."""
        remaining_s = self._store.root().expires.timestamp() - self._signer.now()
        if remaining_s > WARN_BEFORE["root"].total_seconds() or self._load() is not None:
            return False
        root = self._store.root().roles["root"]
        held = self._keys.held_among("root", root.keyids)
        return len(held) >= root.threshold and self.change(KeyChange())

    def view(self) -> dict[str, Any]:
        """Every role's keys and where they are stored, versions and expiries, the pending change, and warnings, as
        JSON."""
        pending = self.pending_change()
        with self._store.exclusive():
            published = self._store.published()
        root, expiries = published.root, published.expiries()
        delegated = {role: (delegated_keys(published.targets, role), 1) for role in DELEGATED}
        groups = {role: (root.roles[role].keyids, root.roles[role].threshold) for role in TOP_LEVEL}
        everyone = {**groups, **delegated}
        roles = [
            {
                "role": role,
                "keys": [
                    {
                        "keyid": id_,
                        "on_controller": bool(self._keys.held_among(role, [id_])),
                        "public": root.keys[id_].to_dict() if id_ in root.keys else None,
                    }
                    for id_ in keyids
                ],
                "threshold": threshold,
                "version": expiries[role][0] if role in expiries else None,
                "expires": int(expiries[role][1].timestamp()) if role in expiries else None,
            }
            for role, (keyids, threshold) in everyone.items()
        ]
        here = [
            role
            for role, (keyids_of_role, threshold_of_role) in everyone.items()
            if len(self._keys.held_among(role, keyids_of_role)) >= threshold_of_role
        ]
        expiry_of = {role: expires for role, (_, expires) in expiries.items()}
        due = key_warnings(
            expiry_of, here, self._signer.now(), waiting=pending is not None, root_keys=root.roles["root"].threshold
        )
        return {"roles": roles, "pending": self._pending_view(pending) if pending else None, "notices": due}

    def to_sign(self) -> dict[str, Any]:
        """What an operator's machine needs to check and sign the pending change. NotFound if there is none."""
        pending = self.pending_change()
        if pending is None:
            raise NotFound("no change of the keys waits for signatures")
        root, targets = self._repository.published_metadata()
        return {
            "change": msgspec.to_builtins(pending.change), "root": root.decode(), "targets": targets.decode(),
            "next_root": pending.root, "next_targets": pending.targets,
            "delegates": {role: msgspec.to_builtins(key) for role, key in pending.online.items() if role in DELEGATED},
            **self._pending_view(pending),
        }  # fmt: skip

    def _pending_view(self, pending: Pending) -> dict[str, Any]:
        """Begin, effects and missing signatures of a pending change, as JSON."""
        root = self._root_of(pending)
        lines = describe_root_change(self._store.root(), root.signed) if root else []
        lines += [f"{role}: new key {short_id(key.keyid)}" for role, key in delegates_of(pending).items()]
        missing = [msgspec.to_builtins(signatures) for signatures in self.missing(pending)]
        return {"began": pending.began, "changes": lines, "missing": missing}

    # Under the lock

    def _begin(self, root: Root, change: KeyChange) -> Pending:
        """Generate the new keys and the metadata to sign."""
        placeholders = {role: _placeholder(role) for role in change.anew}
        # Validate with placeholder keys first, so that an invalid change generates no key.
        next_root(root, change, placeholders, self._signer.expiry("root"))
        for role in change.anew:
            self._keys.retire(role, self._keyids_in_use(role, root))  # keys left by a change that a crash interrupted
        online = {role: self._keys.stage(role) for role in change.anew}
        following = next_root(root, change, online, self._signer.expiry("root")) if change.needs_root else None
        pending = Pending(
            change,
            {role: PublicKey.from_key(key) for role, key in online.items()},
            self._signer.now(),
            root=_json(Metadata(following)) if following else "",
        )
        return self._with_targets(pending) if change.needs_targets else pending

    def _with_targets(self, pending: Pending) -> Pending:
        """The pending change with targets metadata based on the published one; signatures on an older base are void."""
        published = self._store.published()
        following = self._signer.next_targets(
            published, delegates=delegates_of(pending), is_rekeyed=_changes_release_key(pending.change)
        )
        return msgspec.structs.replace(pending, targets=_json(Metadata(following)), base=published.targets.version)

    def _complete_if_possible(self) -> bool:
        """Update the pending change, sign it with the keys stored here, and publish it if no signature is missing;
        return whether none is pending any more."""
        pending = self._load()
        if pending is None:
            return True
        root, targets = self._root_of(pending), self._targets_of(pending)
        current = self._store.targets()
        # If a release was published since, the pending targets metadata would drop it: base it on the published one.
        # Both may have the same version, so the content decides whether the published one is the pending one itself.
        if targets is not None and current.version != pending.base and current != targets.signed:
            pending = self._with_targets(pending)
            targets = self._targets_of(pending)
        if root is not None and root.signed.version <= self._store.root_version:
            self._publish(pending, root, targets)  # published already, but a crash interrupted what follows
            return True
        # TUF 5.3.4: the next root needs a threshold of signatures from the present root's keys and from its own.
        present = self._store.root()
        following = root.signed if root else present
        if root is not None:
            self._sign(root, "root", [present, following])
        if targets is not None:
            self._sign(targets, "targets", [present, following])
        signed = _with_metadata(pending, root, targets)
        if signed != self._load():
            self._save(signed)
        if self.missing(signed):
            return False
        self._publish(signed, root, targets)
        return True

    def _sign(self, metadata: Metadata[Any], role: str, roots: Sequence[Root]) -> None:
        for signer in self._keys.signers_among(role, {id_ for root in roots for id_ in root.roles[role].keyids}):
            if signer.public_key.keyid not in metadata.signatures:
                metadata.sign(signer, append=True)

    def _publish(self, pending: Pending, root: Metadata[Root] | None, targets: Metadata[Targets] | None) -> None:
        """Publish what is signed, then the root, then destroy keys without a role. May be repeated after a crash at any
        point."""
        # Order of the writes, each of which may be the last before a crash:
        # 1. targets, snapshot and timestamp, signed by old and new keys: valid under the present and the next root;
        # 2. the next root: from here on devices trust the new keys, and everything they need is there already;
        # 3. keys without a role are destroyed: they were needed until the next root was published;
        # 4. `pending.json` is removed, which ends the repetition of these steps.
        following = root.signed if root else self._store.root()
        if root is None or following.version > self._store.root_version:
            if pending.change.needs_targets or set(pending.change.anew) & {"snapshot", "timestamp"}:
                published = self._store.published()
                raw_targets = pending.targets.encode() if targets else published.raw_targets
                self._store.publish(self._signer.publish_signed(published, raw_targets, following))
            if root is not None:
                self._store.write_root(pending.root.encode(), following.version)
        self._retire(pending, following)
        self._remove()

    def _retire(self, pending: Pending, root: Root) -> None:
        """Keep only keys that `root` (for delegated roles: the targets metadata) names."""
        roles = {*pending.change.anew}
        roles |= {"root"} if pending.change.root_keys else set()
        roles |= {"targets"} if pending.change.release_key else set()
        for role in roles:
            self._keys.retire(role, self._keyids_in_use(role, root))

    def _keyids_in_use(self, role: str, root: Root) -> list[str]:
        return self._repository.delegated_keys(role) if role in DELEGATED else list(root.roles[role].keyids)

    def _root_of(self, pending: Pending) -> Metadata[Root] | None:
        return parse_metadata(pending.root.encode(), Root, "the pending root") if pending.root else None

    def _targets_of(self, pending: Pending) -> Metadata[Targets] | None:
        raw = pending.targets.encode()
        return parse_metadata(raw, Targets, "the pending list of releases") if raw else None

    def _require_pending(self) -> Pending:
        self._complete_if_possible()
        pending = self._load()
        if pending is None:
            raise NotFound("no change of the keys waits for signatures")
        return pending

    def _load(self) -> Pending | None:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Pending)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{self._file} cannot be read: {error}; restore it from a backup") from error

    def _save(self, pending: Pending) -> None:
        write_durably(self._file, msgspec.json.encode(pending), mode=0o600)

    def _remove(self) -> None:
        self._file.unlink(missing_ok=True)
        sync_folder(self._file.parent)


def _add_signatures(
    metadata: Metadata[Any], given: Sequence[ExternalSignature], roots: Sequence[Root], role: str
) -> None:
    keys: Mapping[str, Key] = {id_: root.keys[id_] for root in roots for id_ in root.roles[role].keyids}
    for given_signature in given:
        if given_signature.keyid not in keys:
            raise TrustError(
                f"key {short_id(given_signature.keyid)} is no {role} key, neither now nor after this change: "
                "`edgectl keys show` tells which are"
            )
        signature = Signature(given_signature.keyid, given_signature.sig)
        check_signature(keys[given_signature.keyid], signature, metadata.signed_bytes)
        metadata.signatures[given_signature.keyid] = signature


def _with_metadata(pending: Pending, root: Metadata[Root] | None, targets: Metadata[Targets] | None) -> Pending:
    return msgspec.structs.replace(pending, root=_json(root) if root else "", targets=_json(targets) if targets else "")


def _json(metadata: Metadata[Any]) -> str:
    return metadata.to_bytes(JSONSerializer(compact=True)).decode()


def _changes_release_key(change: KeyChange) -> bool:
    return change.release_key is not None or "targets" in change.anew


def _placeholder(role: str) -> Key:
    """A stand-in for a key that is not generated yet, to validate a requested change."""
    return Key.from_dict(f"new {role}", {"keytype": "ed25519", "scheme": "ed25519", "keyval": {"public": "0" * 64}})
