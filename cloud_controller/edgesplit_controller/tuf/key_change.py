"""What may follow what: the next root, the next list of releases, and what an operator checks before signing either.

Pure functions over metadata, so that the controller, which makes a proposal, and the operator's machine, which signs
it, decide by the same code: both build what must follow and compare. Nothing here reads a disk, a clock or a key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Final, TypeVar

import msgspec
from securesystemslib.signer import Key
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Delegations, Metadata, Root, Snapshot, TargetFile, Targets, Timestamp

from edgesplit.errors import TrustError, UsageError
from edgesplit.release.manifest import release_digest
from edgesplit.trust.store import DIRECTOR, PLANNER, target_path

LIFE: Final = {
    "root": timedelta(days=3650),
    "targets": timedelta(days=365),
    PLANNER: timedelta(days=90),
    "snapshot": timedelta(days=90),
    "timestamp": timedelta(days=7),
}
TOP_LEVEL: Final = ("root", "targets", "snapshot", "timestamp")
DELEGATED: Final = (DIRECTOR, PLANNER)
"""Whose keys the list of releases names."""
CHANGEABLE: Final = (*TOP_LEVEL, *DELEGATED)
KEY_TYPES: Final = ("ed25519", "ecdsa", "rsa")
ROOT_KEYS: Final = 16
"""No fleet needs more people than this to agree."""
ROOT_CHARACTERS: Final = 100_000
"""Of a root without signatures; devices take five times as much."""
TOLD_BEFORE: Final = {"root": timedelta(days=365), "targets": timedelta(days=90)}
"""How long before its end metadata that the controller cannot renew by itself is told to the operator."""
_SLACK: Final = timedelta(days=1)
"""Clocks of two machines may differ by this."""
_Role = TypeVar("_Role", Root, Timestamp, Snapshot, Targets)


class PublicKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key without its private part."""

    keyid: str
    public: dict[str, Any]
    """As in TUF metadata."""

    @classmethod
    def of(cls, key: Key) -> PublicKey:
        """That key, as it is sent."""
        return cls(key.keyid, key.to_dict())

    def key(self) -> Key:
        """As TUF knows it; UsageError for what is no key."""
        try:
            key: Key = Key.from_dict(self.keyid, dict(self.public))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.keyid[:16]!r} is not a public key: {error}") from error
        if key.keytype not in KEY_TYPES:
            raise UsageError(f"key {short(self.keyid)} is of the type {key.keytype}; devices know {KEY_TYPES}")
        return key


class KeyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What shall become of the keys. One without any wish only gives the root a later end."""

    root_keys: tuple[PublicKey, ...] = ()
    """All keys of the next root; empty: those of the present one."""
    threshold: int = 0
    """How many of them must sign; 0: as many as now."""
    release_key: PublicKey | None = None
    """A release key that lies elsewhere."""
    anew: tuple[str, ...] = ()
    """Roles that get a new key of the controller's own."""

    @property
    def needs_root(self) -> bool:
        """Must there be a new root? Director and planner are named by the list of releases."""
        rest = set(self.anew) - set(DELEGATED)
        return bool(rest or not self.anew or self.root_keys or self.threshold or self.release_key)

    @property
    def needs_targets(self) -> bool:
        """Must the list of releases be signed anew?"""
        return self.release_key is not None or bool({"targets", *DELEGATED} & set(self.anew))


@dataclass(frozen=True, slots=True)
class Missing:
    """Signatures that are still needed."""

    whose: str
    """In words: "the root", "the present root", "the next root", "the release key"."""
    count: int
    keyids: tuple[str, ...]
    """Any `count` of these."""


def check_change(change: KeyChange, root: Root) -> None:
    """UsageError for a wish that no root can follow."""
    unknown = [role for role in change.anew if role not in CHANGEABLE]
    if unknown or len(set(change.anew)) != len(change.anew):
        raise UsageError(f"roles are {', '.join(CHANGEABLE)}, each once; not {', '.join(unknown) or 'twice the same'}")
    if change.root_keys and "root" in change.anew:
        raise UsageError("the root gets either the keys named or a new one of the controller's own, not both")
    if change.release_key is not None and "targets" in change.anew:
        raise UsageError("the release key is either one named or a new one of the controller's own, not both")
    count = len(change.root_keys) or (1 if "root" in change.anew else len(root.roles["root"].keyids))
    if len({one.keyid for one in change.root_keys}) != len(change.root_keys) or count > ROOT_KEYS:
        raise UsageError(f"the root keys repeat one, or are more than {ROOT_KEYS}")
    threshold = change.threshold or root.roles["root"].threshold
    if not 1 <= threshold <= count:
        raise UsageError(f"a threshold of {threshold} with {count} root keys: choose 1 to {count} with --threshold")


def next_root(root: Root, change: KeyChange, online: Mapping[str, Key], expires: datetime) -> Root:
    """The root that follows `root` by this wish; `online` are the controller's new keys by role."""
    check_change(change, root)
    keys = {role: [root.keys[keyid] for keyid in root.roles[role].keyids] for role in TOP_LEVEL}
    if change.root_keys:
        keys["root"] = [one.key() for one in change.root_keys]
    if change.release_key is not None:
        keys["targets"] = [change.release_key.key()]
    for role in change.anew:
        if role in TOP_LEVEL:
            keys[role] = [online[role]]
    every = [key.keyid for group in keys.values() for key in group]
    if len(set(every)) != len(every):
        raise UsageError("one key would have two roles; each role needs a key of its own")
    following = Root(version=root.version + 1, expires=expires, consistent_snapshot=True)
    for role, group in keys.items():
        for key in group:
            following.add_key(key, role)
    following.roles["root"].threshold = change.threshold or root.roles["root"].threshold
    if len(str(following.to_dict())) > ROOT_CHARACTERS:
        raise UsageError(f"keys of more than {ROOT_CHARACTERS} characters together: devices would not take this root")
    return following


def fulfils(root: Root, change: KeyChange) -> bool:
    """Is it so already? Never for new keys of the controller's own, or for a later end."""
    if change.anew or change == KeyChange():
        return False
    wanted = {one.keyid for one in change.root_keys} or set(root.roles["root"].keyids)
    release = {change.release_key.keyid} if change.release_key else set(root.roles["targets"].keyids)
    return (
        wanted == set(root.roles["root"].keyids)
        and (change.threshold or root.roles["root"].threshold) == root.roles["root"].threshold
        and release == set(root.roles["targets"].keyids)
    )


def next_targets(
    targets: Targets,
    manifests: Iterable[bytes],
    version: int,
    expires: datetime,
    delegates: Mapping[str, Key] | None = None,
) -> Targets:
    """The list of releases that follows `targets`: with these manifests too, and with these keys for the roles that
    it delegates."""
    following = Targets(version, None, expires, dict(targets.targets), targets.delegations)
    for raw in manifests:
        path = target_path(release_digest(raw))
        following.targets[path] = TargetFile.from_data(path, raw, ["sha256"])
    for role, key in (delegates or {}).items():
        following.delegations = _with_delegate(following.delegations, role, key)
    return following


def _with_delegate(delegations: Delegations | None, role: str, key: Key) -> Delegations:
    if delegations is None or role not in (delegations.roles or {}):
        raise UsageError(f"the list of releases names no {role}; restore the repository from a backup")
    changed = Delegations.from_dict(delegations.to_dict())
    assert changed.roles is not None
    for keyid in list(changed.roles[role].keyids):
        changed.roles[role].keyids.remove(keyid)
        if not any(keyid in other.keyids for other in changed.roles.values()):
            del changed.keys[keyid]
    changed.roles[role].keyids.append(key.keyid)
    changed.keys[key.keyid] = key
    return changed


def check_root_step(root: Root, following: Root, change: KeyChange, now: float) -> None:
    """TrustError unless `following` is exactly what this wish makes of `root`: asked before it is signed."""
    online = {
        role: following.keys[following.roles[role].keyids[0]]
        for role in change.anew
        if role in TOP_LEVEL and following.roles[role].keyids and following.roles[role].keyids[0] in following.keys
    }
    if any(key.keyid in root.keys for key in online.values()):
        raise TrustError("the next root calls a key new that the present one has: nothing is signed")
    try:
        wanted = next_root(root, change, online, following.expires)
    except KeyError as error:
        raise TrustError(f"the next root has no key for {error}: nothing is signed") from error
    if following.to_dict() != wanted.to_dict():
        raise TrustError("the next root is not the present one with the change that was asked for: nothing is signed")
    _check_end(following.expires, "root", now)


def check_targets_step(
    targets: Targets,
    following: Targets,
    manifests: Sequence[bytes],
    now: float,
    *,
    delegates: Mapping[str, Key] | None = None,
    replaced: bool = False,
) -> None:
    """TrustError unless `following` is exactly `targets` with these releases more: asked before it is signed.

    `replaced`: its key is another, so that versions may begin anew (a thief of the old one may have counted ahead).
    """
    wanted = next_targets(targets, manifests, following.version, following.expires, delegates)
    if following.to_dict() != wanted.to_dict():
        raise TrustError("the list of releases is not the published one with this change alone: nothing is signed")
    if following.version <= targets.version and not replaced:
        raise TrustError(f"version {following.version} does not follow {targets.version}, which is published")
    if following.version > max(targets.version + 1, int(now + _SLACK.total_seconds())):
        raise TrustError(f"version {following.version} is far ahead of the clock: nothing is signed")
    _check_end(following.expires, "targets", now)


def _check_end(expires: datetime, role: str, now: float) -> None:
    left = expires - datetime.fromtimestamp(now, timezone.utc)
    if not timedelta(0) < left <= LIFE[role] + _SLACK:
        raise TrustError(f"it would expire on {expires:%Y-%m-%d}; is the clock of one of the two machines wrong?")


def root_missing(root: Root, proposal: Metadata[Root]) -> list[Missing]:
    """Which signatures the proposed root still needs, from the present root's keys and from its own.

    Told once where both need the same.
    """
    result = proposal.signed.get_root_verification_result(root, proposal.signed_bytes, proposal.signatures)
    first, second = ((half.missing, tuple(sorted(half.unsigned))) for half in (result.first, result.second))
    if first == second:
        return [Missing("the root", *first)] if first[0] else []
    halves = (("the present root", first), ("the next root", second))
    return [Missing(whose, *half) for whose, half in halves if half[0]]


def targets_missing(root: Root, proposal: Metadata[Targets]) -> list[Missing]:
    """Which signatures the proposed list of releases still needs under `root`."""
    result = root.get_verification_result("targets", proposal.signed_bytes, proposal.signatures)
    return [] if result.verified else [Missing("the release key", result.missing, tuple(sorted(result.unsigned)))]


def parse(raw: bytes, kind: type[_Role], what: str) -> Metadata[_Role]:
    """Metadata of that kind; TrustError for anything else. No signature is looked at."""
    try:
        metadata: Metadata[Any] = Metadata.from_bytes(raw)
    except (RepositoryError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise TrustError(f"{what} is no metadata: {error}") from error
    if not isinstance(metadata.signed, kind):
        raise TrustError(f"{what} is {metadata.signed.type} metadata, not {kind.type}")
    return metadata


def told(root: Root, following: Root) -> list[str]:
    """What the next root changes, a line each, for whoever is asked to sign it."""
    lines = []
    for role in TOP_LEVEL:
        before, after = root.roles[role], following.roles[role]
        change = [
            *(f"new key {short(keyid)}" for keyid in after.keyids if keyid not in before.keyids),
            *(f"key {short(keyid)} removed" for keyid in before.keyids if keyid not in after.keyids),
        ]
        if before.threshold != after.threshold:
            change.append(f"{after.threshold} of {len(after.keyids)} must sign (was {before.threshold})")
        if change:
            lines.append(f"{role}: {', '.join(change)}")
    return lines or [f"the same keys, until {following.expires:%Y-%m-%d}"]


def short(keyid: str) -> str:
    """As much of a key id as people compare."""
    return keyid[:8]


def notices(
    expires: Mapping[str, datetime], here: Collection[str], now: float, *, waiting: bool, root_keys: int
) -> list[str]:
    """What an operator must know of the keys: what is at risk, what lacks, and what nears its end.

    `here`: the roles, delegated ones among them, whose keys lie on the controller.
    """
    lines = []
    if lost := [role for role in ("snapshot", "timestamp", *DELEGATED) if role not in here]:
        lines.append(
            f"no key for {', '.join(lost)} lies on this controller, so devices will stop believing it: "
            f"`edgectl keys rotate {' '.join(lost)} --sign-with URI`"
        )
    if "root" in here:
        lines.append(
            "the root key lies on this controller: whoever owns this machine owns the fleet. "
            "`edgectl keys init --folder DIR` moves it away"
        )
    for role, before in TOLD_BEFORE.items():
        left = expires[role] - datetime.fromtimestamp(now, timezone.utc)
        if role in here or left > before:
            continue
        verb = "expired" if left <= timedelta(0) else "expires"
        several = " --sign-with URI" * max(0, root_keys - 1) if role == "root" else ""
        what = "nothing can be installed after that" if role == "targets" else "no device follows after that"
        lines.append(
            f"the {role} metadata {verb} on {expires[role]:%Y-%m-%d}, and {what}: "
            f"`edgectl keys renew {role} --sign-with URI{several}`"
        )
    if waiting:
        lines.append("a change of keys waits for signatures: `edgectl keys sign --sign-with URI`")
    return lines
