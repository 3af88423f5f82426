"""Changes of the keys: a next root, and where needed a next list of releases, that collect signatures and then count.

Promises: what is to be signed waits in `pending.json`, with the signatures it has, and nothing is published before all
are there. From then on a crash at any write changes nothing: the next start, or the next call, finishes it. Until the
new root is published, everything else is signed by old and new keys, so that a device sees the old state or the new,
never neither. Keys that have no role any more are destroyed last.

A new release key that must sign the list of releases without the old one (which is lost) is the exception: for the
moment between two writes a device that asks believes nothing and asks again.
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
from edgesplit_controller.errors import Conflict
from edgesplit_controller.tuf.key_change import (
    DELEGATED,
    TOLD_BEFORE,
    TOP_LEVEL,
    KeyChange,
    Missing,
    PublicKey,
    fulfils,
    next_root,
    next_targets,
    notices,
    parse,
    root_missing,
    short,
    targets_missing,
    told,
)
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.signers import check_signature


class GivenSignature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A signature that was made elsewhere."""

    keyid: str
    sig: str
    """Lower-case hex."""


class Pending(msgspec.Struct, frozen=True):
    """A change that waits for signatures."""

    change: KeyChange
    online: dict[str, PublicKey]
    """The controller's new keys, by role."""
    began: float
    """Unix seconds."""
    root: str = ""
    """The next root as JSON, with its signatures; empty where the root stays."""
    targets: str = ""
    """The next list of releases, the same way; empty where it stays."""
    base: int = 0
    """The version of the list of releases that `targets` follows."""


def delegates_of(pending: Pending) -> dict[str, Key]:
    """The new keys of the roles that the list of releases delegates."""
    return {role: key.key() for role, key in pending.online.items() if role in DELEGATED}


class Rotation:
    """Changes of one repository's keys. One at a time; an unfinished one is finished here if it can be."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._file = repository.folder / "pending.json"
        with repository.exclusive():
            self._settle()

    def change(self, change: KeyChange) -> bool:
        """Begin that change, or go on with it; True once it counts. Conflict while another waits."""
        with self._repository.exclusive():
            root = self._repository.trusted_root()
            pending = self._load()
            if pending is None:
                if fulfils(root, change):
                    return True
                self._store(self._begin(root, change))
            elif pending.change != change:
                raise Conflict(
                    "another change of the keys waits for signatures: `edgectl keys sign --sign-with URI` finishes it, "
                    "`edgectl keys drop` gives it up"
                )
            return self._settle()

    def add_signatures(self, root: Sequence[GivenSignature], targets: Sequence[GivenSignature]) -> bool:
        """Add signatures to the change that waits; True once it counts. TrustError for one that does not fit."""
        with self._repository.exclusive():
            pending = self._required()
            present = self._repository.trusted_root()
            signed_root = self._root_of(pending)
            following = signed_root.signed if signed_root else present
            if root:
                if signed_root is None:
                    raise UsageError("this change needs no new root, so there is none to sign")
                _add(signed_root, root, [present, following], "root")
            signed_targets = self._targets_of(pending)
            if targets:
                if signed_targets is None:
                    raise UsageError("this change needs no new list of releases, so there is none to sign")
                _add(signed_targets, targets, [present, following], "targets")
            self._store(_with(pending, signed_root, signed_targets))
            return self._settle()

    def drop(self) -> None:
        """Give up the change that waits; the keys made for it are destroyed."""
        with self._repository.exclusive():
            pending = self._required()
            self._retire(pending, self._repository.trusted_root())
            self._remove()

    def waiting(self) -> Pending | None:
        """The change that waits for signatures, as it must be signed now; None if there is none."""
        with self._repository.exclusive():
            self._settle()
            return self._load()

    def missing(self, pending: Pending) -> list[Missing]:
        """The signatures that it still needs."""
        present = self._repository.trusted_root()
        root, targets = self._root_of(pending), self._targets_of(pending)
        lacking = root_missing(present, root) if root else []
        return [*lacking, *(targets_missing(root.signed if root else present, targets) if targets else [])]

    def renew_held_root(self) -> bool:
        """Give the root a later end in time, where its keys lie here; True if it did."""
        left = self._repository.trusted_root().expires.timestamp() - self._repository.now()
        if left > TOLD_BEFORE["root"].total_seconds() or self._load() is not None:
            return False
        root = self._repository.trusted_root().roles["root"]
        held = self._repository.keys.holds("root", root.keyids)
        return len(held) >= root.threshold and self.change(KeyChange())

    def shown(self) -> dict[str, Any]:
        """Every role's keys and where they lie, versions and ends, what waits and what is due."""
        pending = self.waiting()
        repository = self._repository
        with repository.exclusive():
            root, expiries = repository.trusted_root(), repository.expiries()
            delegated = {role: (repository.delegated_keys(role), 1) for role in DELEGATED}
        groups = {role: (root.roles[role].keyids, root.roles[role].threshold) for role in TOP_LEVEL}
        everyone = {**groups, **delegated}
        roles = [
            {
                "role": role,
                "keys": [
                    {
                        "keyid": id_,
                        "here": bool(repository.keys.holds(role, [id_])),
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
        here = [role for role, (ids, least) in everyone.items() if len(repository.keys.holds(role, ids)) >= least]
        ends = {role: expires for role, (_, expires) in expiries.items()}
        due = notices(ends, here, repository.now(), waiting=pending is not None, root_keys=root.roles["root"].threshold)
        return {"roles": roles, "pending": self._told(pending) if pending else None, "notices": due}

    def to_sign(self) -> dict[str, Any]:
        """What an operator's machine needs to check and sign the change that waits."""
        pending = self.waiting()
        if pending is None:
            raise NotFound("no change of the keys waits for signatures")
        root, targets = self._repository.published()
        return {
            "change": msgspec.to_builtins(pending.change),
            "root": root.decode(),
            "targets": targets.decode(),
            "next_root": pending.root,
            "next_targets": pending.targets,
            "delegates": {role: msgspec.to_builtins(key) for role, key in pending.online.items() if role in DELEGATED},
            **self._told(pending),
        }

    def _told(self, pending: Pending) -> dict[str, Any]:
        root = self._root_of(pending)
        lines = told(self._repository.trusted_root(), root.signed) if root else []
        lines += [f"{role}: new key {short(key.keyid)}" for role, key in delegates_of(pending).items()]
        missing = [msgspec.to_builtins(one) for one in self.missing(pending)]
        return {"began": pending.began, "changes": lines, "missing": missing}

    # Under the lock

    def _begin(self, root: Root, change: KeyChange) -> Pending:
        repository = self._repository
        stand_in = {role: _placeholder(role) for role in change.anew}
        next_root(root, change, stand_in, repository.expiry("root"))  # a wish that cannot be makes no key
        for role in change.anew:
            repository.keys.retire(role, self._named(role, root))  # left by a change that was cut short
        online = {role: repository.keys.stage(role) for role in change.anew}
        following = next_root(root, change, online, repository.expiry("root")) if change.needs_root else None
        pending = Pending(
            change,
            {role: PublicKey.of(key) for role, key in online.items()},
            repository.now(),
            root=_json(Metadata(following)) if following else "",
        )
        return self._with_targets(pending) if change.needs_targets else pending

    def _with_targets(self, pending: Pending) -> Pending:
        """With the list of releases as it is now to be signed; signatures of an older one are void."""
        repository = self._repository
        current = repository.current_targets()
        following = next_targets(
            current,
            [],
            repository.next_targets_version(anew=_new_release_key(pending.change)),
            repository.expiry("targets"),
            delegates_of(pending),
        )
        return msgspec.structs.replace(pending, targets=_json(Metadata(following)), base=current.version)

    def _settle(self) -> bool:
        """Bring the pending change up to date, sign what we can, and finish it if nothing lacks; is none left?"""
        pending = self._load()
        if pending is None:
            return True
        root, targets = self._root_of(pending), self._targets_of(pending)
        current = self._repository.current_targets()
        # Two lists may have one version: what was published meanwhile is told from ours by what is in it.
        if targets is not None and current.version != pending.base and current != targets.signed:
            pending = self._with_targets(pending)
            targets = self._targets_of(pending)
        if root is not None and root.signed.version <= self._repository.newest_root():
            self._finish(pending, root, targets)  # it counts already, and was cut short
            return True
        present = self._repository.trusted_root()
        following = root.signed if root else present
        if root is not None:
            self._sign(root, "root", [present, following])
        if targets is not None:
            self._sign(targets, "targets", [present, following])
        signed = _with(pending, root, targets)
        if signed != self._load():
            self._store(signed)
        if self.missing(signed):
            return False
        self._finish(signed, root, targets)
        return True

    def _sign(self, metadata: Metadata[Any], role: str, roots: Sequence[Root]) -> None:
        for signer in self._repository.keys.held(role, {id_ for root in roots for id_ in root.roles[role].keyids}):
            if signer.public_key.keyid not in metadata.signatures:
                metadata.sign(signer, append=True)

    def _finish(self, pending: Pending, root: Metadata[Root] | None, targets: Metadata[Targets] | None) -> None:
        """Publish what is signed, then the root, then destroy what has no role any more. May be cut short anywhere."""
        repository = self._repository
        following = root.signed if root else repository.trusted_root()
        if root is None or following.version > repository.newest_root():
            if pending.change.needs_targets or set(pending.change.anew) & {"snapshot", "timestamp"}:
                repository.publish_for(following, pending.targets.encode() if targets else None)
            if root is not None:
                repository.write_root(pending.root.encode(), following.version)
        self._retire(pending, following)
        self._remove()

    def _retire(self, pending: Pending, root: Root) -> None:
        """Only keys that `root` names (for delegated roles: the list of releases) stay here."""
        roles = {*pending.change.anew}
        roles |= {"root"} if pending.change.root_keys else set()
        roles |= {"targets"} if pending.change.release_key else set()
        for role in roles:
            self._repository.keys.retire(role, self._named(role, root))

    def _named(self, role: str, root: Root) -> list[str]:
        return self._repository.delegated_keys(role) if role in DELEGATED else list(root.roles[role].keyids)

    def _root_of(self, pending: Pending) -> Metadata[Root] | None:
        return parse(pending.root.encode(), Root, "the pending root") if pending.root else None

    def _targets_of(self, pending: Pending) -> Metadata[Targets] | None:
        return parse(pending.targets.encode(), Targets, "the pending list of releases") if pending.targets else None

    def _required(self) -> Pending:
        self._settle()
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

    def _store(self, pending: Pending) -> None:
        write_durably(self._file, msgspec.json.encode(pending), mode=0o600)

    def _remove(self) -> None:
        self._file.unlink(missing_ok=True)
        sync_folder(self._file.parent)


def _add(metadata: Metadata[Any], given: Sequence[GivenSignature], roots: Sequence[Root], role: str) -> None:
    keys: Mapping[str, Key] = {id_: root.keys[id_] for root in roots for id_ in root.roles[role].keyids}
    for one in given:
        if one.keyid not in keys:
            raise TrustError(
                f"key {short(one.keyid)} is no {role} key, neither now nor after this change: "
                "`edgectl keys show` tells which are"
            )
        signature = Signature(one.keyid, one.sig)
        check_signature(keys[one.keyid], signature, metadata.signed_bytes)
        metadata.signatures[one.keyid] = signature


def _with(pending: Pending, root: Metadata[Root] | None, targets: Metadata[Targets] | None) -> Pending:
    return msgspec.structs.replace(pending, root=_json(root) if root else "", targets=_json(targets) if targets else "")


def _json(metadata: Metadata[Any]) -> str:
    return metadata.to_bytes(JSONSerializer(compact=True)).decode()


def _new_release_key(change: KeyChange) -> bool:
    return change.release_key is not None or "targets" in change.anew


def _placeholder(role: str) -> Key:
    """Stands for a key that is not made yet, while a wish is checked."""
    return Key.from_dict(f"new {role}", {"keytype": "ed25519", "scheme": "ed25519", "keyval": {"public": "0" * 64}})
