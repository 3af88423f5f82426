"""Rules of TUF key changes: the root and the list of releases (targets metadata) that may follow the present ones, and
the checks an operator makes before signing either.

Pure functions over metadata, so that the controller, which proposes metadata, and the operator's machine, which signs
it, decide by the same code: both compute what must follow and compare. Nothing here accesses a disk, a clock or a
private key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Final

import msgspec
from securesystemslib.signer import Key
from tuf.api.metadata import Delegations, Metadata, Root, TargetFile, Targets

from edgesplit.errors import TrustError, UsageError
from edgesplit.release.manifest import release_digest
from edgesplit.trust.verification import DIRECTOR, PLANNER, target_path

LIFE: Final = {
    "root": timedelta(days=3650), "targets": timedelta(days=365), PLANNER: timedelta(days=90),
    "snapshot": timedelta(days=90), "timestamp": timedelta(days=7),
}  # fmt: skip
"""Validity of new metadata, by role."""
TOP_LEVEL: Final = ("root", "targets", "snapshot", "timestamp")
DELEGATED: Final = (DIRECTOR, PLANNER)
"""Roles whose keys are named by the targets metadata, not by the root."""
CHANGEABLE: Final = (*TOP_LEVEL, *DELEGATED)
KEY_TYPES: Final = ("ed25519", "ecdsa", "rsa")
MOST_ROOT_KEYS: Final = 16
"""Root keys at most."""
MOST_ROOT_CHARACTERS: Final = 100_000
"""Size limit of a root without signatures; devices accept five times as much."""
WARN_BEFORE: Final = {"root": timedelta(days=365), "targets": timedelta(days=90)}
"""How long before its expiry an operator is warned of metadata that the controller cannot renew by itself."""
_CLOCK_TOLERANCE: Final = timedelta(days=1)
"""Tolerated difference between the clocks of two machines."""


class PublicKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A public key as it is sent over the API."""

    keyid: str
    public: dict[str, Any]
    """The key in the form of TUF metadata."""

    @classmethod
    def from_key(cls, key: Key) -> PublicKey:
        """The public key in the form in which it is sent."""
        return cls(key.keyid, key.to_dict())

    def to_key(self) -> Key:
        """The key as a securesystemslib object; UsageError if it is malformed, or of a type that devices do not
        support."""
        try:
            key: Key = Key.from_dict(self.keyid, dict(self.public))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.keyid[:16]!r} is not a public key: {error}") from error
        if key.keytype not in KEY_TYPES:
            raise UsageError(f"key {short_id(self.keyid)} is of the type {key.keytype}; devices know {KEY_TYPES}")
        return key


class KeyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A requested change of the keys. An empty one only extends the expiry of the root."""

    root_keys: tuple[PublicKey, ...] = ()
    """All keys of the next root; empty: the present ones."""
    threshold: int = 0
    """Number of them that must sign; 0: unchanged."""
    release_key: PublicKey | None = None
    """A release key that is not stored on the controller."""
    anew: tuple[str, ...] = ()
    """Roles that get a new key, generated on the controller."""

    @property
    def needs_root(self) -> bool:
        """Whether a new root is needed. Director and planner keys are named by the targets metadata, so a change of
        these alone needs none."""
        rest = set(self.anew) - set(DELEGATED)
        return bool(rest or not self.anew or self.root_keys or self.threshold or self.release_key)

    @property
    def needs_targets(self) -> bool:
        """Whether the targets metadata must be signed again."""
        return self.release_key is not None or bool({"targets", *DELEGATED} & set(self.anew))


@dataclass(frozen=True, slots=True)
class Missing:
    """Signatures that are still needed."""

    whose: str
    """What must be signed by whose keys: "the root", "the present root", "the next root" or "the release key"."""
    count: int
    keyids: tuple[str, ...]
    """Keys of which any `count` must sign."""


def check_change(change: KeyChange, root: Root) -> None:
    """Raise UsageError for a change that no root can implement."""
    unknown = [role for role in change.anew if role not in CHANGEABLE]
    if unknown or len(set(change.anew)) != len(change.anew):
        raise UsageError(f"roles are {', '.join(CHANGEABLE)}, each once; not {', '.join(unknown) or 'twice the same'}")
    if change.root_keys and "root" in change.anew:
        raise UsageError("the root gets either the keys named or a new one of the controller's own, not both")
    if change.release_key is not None and "targets" in change.anew:
        raise UsageError("the release key is either one named or a new one of the controller's own, not both")
    count = len(change.root_keys) or (1 if "root" in change.anew else len(root.roles["root"].keyids))
    if len({key.keyid for key in change.root_keys}) != len(change.root_keys) or count > MOST_ROOT_KEYS:
        raise UsageError(f"the root keys repeat one, or are more than {MOST_ROOT_KEYS}")
    threshold = change.threshold or root.roles["root"].threshold
    if not 1 <= threshold <= count:
        raise UsageError(f"a threshold of {threshold} with {count} root keys: choose 1 to {count} with --threshold")


def next_root(root: Root, change: KeyChange, online: Mapping[str, Key], expires: datetime) -> Root:
    """The root that follows `root` with this change; `online` holds the controller's new keys by role. UsageError if
    the change is invalid."""
    check_change(change, root)
    keys = {role: [root.keys[keyid] for keyid in root.roles[role].keyids] for role in TOP_LEVEL}
    if change.root_keys:
        keys["root"] = [public_key.to_key() for public_key in change.root_keys]
    if change.release_key is not None:
        keys["targets"] = [change.release_key.to_key()]
    for role in change.anew:
        if role in TOP_LEVEL:
            keys[role] = [online[role]]
    all_keyids = [key.keyid for group in keys.values() for key in group]
    if len(set(all_keyids)) != len(all_keyids):
        raise UsageError("one key would have two roles; each role needs a key of its own")
    # TUF 5.3.5: root versions are consecutive, because devices fetch every root from theirs to the newest.
    following = Root(version=root.version + 1, expires=expires, consistent_snapshot=True)
    for role, group in keys.items():
        for key in group:
            following.add_key(key, role)
    following.roles["root"].threshold = change.threshold or root.roles["root"].threshold
    if len(str(following.to_dict())) > MOST_ROOT_CHARACTERS:
        raise UsageError(
            f"keys of more than {MOST_ROOT_CHARACTERS} characters together: devices would not take this root"
        )
    return following


def is_fulfilled(root: Root, change: KeyChange) -> bool:
    """Whether `root` has the requested keys already. False for newly generated keys, and for a later expiry."""
    if change.anew or change == KeyChange():
        return False
    wanted = {key.keyid for key in change.root_keys} or set(root.roles["root"].keyids)
    release = {change.release_key.keyid} if change.release_key else set(root.roles["targets"].keyids)
    return (
        wanted == set(root.roles["root"].keyids)
        and (change.threshold or root.roles["root"].threshold) == root.roles["root"].threshold
        and release == set(root.roles["targets"].keyids)
    )


def next_targets(
    targets: Targets, manifests: Iterable[bytes], version: int, expires: datetime,
    delegates: Mapping[str, Key] | None = None,
) -> Targets:  # fmt: skip
    """The targets metadata that follows `targets`: with these manifests added, and with these keys for its delegated
    roles."""
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
    # A key shared with another delegated role stays in the key table.
    for keyid in list(changed.roles[role].keyids):
        changed.roles[role].keyids.remove(keyid)
        if not any(keyid in other.keyids for other in changed.roles.values()):
            del changed.keys[keyid]
    changed.roles[role].keyids.append(key.keyid)
    changed.keys[key.keyid] = key
    return changed


def check_root_step(root: Root, following: Root, change: KeyChange, now: float) -> None:
    """Raise TrustError unless `following` is exactly `root` with this change. Called before it is signed."""
    online = {
        role: following.keys[following.roles[role].keyids[0]]
        for role in change.anew
        if role in TOP_LEVEL and following.roles[role].keyids and following.roles[role].keyids[0] in following.keys
    }
    # The operator cannot know the controller's new keys beforehand, so these are taken from the proposal; everything
    # else is recomputed and compared. A "new" key that exists already would let a stolen key live on.
    if any(key.keyid in root.keys for key in online.values()):
        raise TrustError("the next root calls a key new that the present one has: nothing is signed")
    try:
        expected = next_root(root, change, online, following.expires)
    except KeyError as error:
        raise TrustError(f"the next root has no key for {error}: nothing is signed") from error
    if following.to_dict() != expected.to_dict():
        raise TrustError("the next root is not the present one with the change that was asked for: nothing is signed")
    _check_expiry(following.expires, "root", now)


def check_targets_step(
    targets: Targets, following: Targets, manifests: Sequence[bytes], now: float, *,
    delegates: Mapping[str, Key] | None = None, replaced: bool = False,
) -> None:  # fmt: skip
    """Raise TrustError unless `following` is exactly `targets` with these releases added. Called before it is signed.

    `replaced`: the release key changed too, so that versions may begin anew (a thief of the old key may have counted
    ahead).
    """
    expected = next_targets(targets, manifests, following.version, following.expires, delegates)
    if following.to_dict() != expected.to_dict():
        raise TrustError("the list of releases is not the published one with this change alone: nothing is signed")
    if following.version <= targets.version and not replaced:
        raise TrustError(f"version {following.version} does not follow {targets.version}, which is published")
    # A version far ahead of the clock would block later ones (fast-forward attack).
    if following.version > max(targets.version + 1, int(now + _CLOCK_TOLERANCE.total_seconds())):
        raise TrustError(f"version {following.version} is far ahead of the clock: nothing is signed")
    _check_expiry(following.expires, "targets", now)


def _check_expiry(expires: datetime, role: str, now: float) -> None:
    remaining = expires - datetime.fromtimestamp(now, timezone.utc)
    if not timedelta(0) < remaining <= LIFE[role] + _CLOCK_TOLERANCE:
        raise TrustError(f"it would expire on {expires:%Y-%m-%d}; is the clock of one of the two machines wrong?")


def missing_root_signatures(root: Root, proposal: Metadata[Root]) -> list[Missing]:
    """Signatures that the proposed root still needs, from the present root's keys and from its own (TUF 5.3.4: a root
    is verified by both). Listed once where both need the same."""
    result = proposal.signed.get_root_verification_result(root, proposal.signed_bytes, proposal.signatures)
    first, second = ((part.missing, tuple(sorted(part.unsigned))) for part in (result.first, result.second))
    if first == second:
        return [Missing("the root", *first)] if first[0] else []
    by_root = (("the present root", first), ("the next root", second))
    return [Missing(whose, *part) for whose, part in by_root if part[0]]


def missing_targets_signatures(root: Root, proposal: Metadata[Targets]) -> list[Missing]:
    """Signatures that the proposed targets metadata still needs under `root`."""
    result = root.get_verification_result("targets", proposal.signed_bytes, proposal.signatures)
    return [] if result.verified else [Missing("the release key", result.missing, tuple(sorted(result.unsigned)))]


def describe_root_change(root: Root, following: Root) -> list[str]:
    """What the next root changes, one line each, for the operator who signs it."""
    lines = []
    for role in TOP_LEVEL:
        before, after = root.roles[role], following.roles[role]
        change = [
            *(f"new key {short_id(keyid)}" for keyid in after.keyids if keyid not in before.keyids),
            *(f"key {short_id(keyid)} removed" for keyid in before.keyids if keyid not in after.keyids),
        ]
        if before.threshold != after.threshold:
            change.append(f"{after.threshold} of {len(after.keyids)} must sign (was {before.threshold})")
        if change:
            lines.append(f"{role}: {', '.join(change)}")
    return lines or [f"the same keys, until {following.expires:%Y-%m-%d}"]


def short_id(keyid: str) -> str:
    """The part of a key id that people compare."""
    return keyid[:8]


def key_warnings(
    expires: Mapping[str, datetime], held_roles: Collection[str], now: float, *, waiting: bool, root_keys: int
) -> list[str]:
    """Warnings about keys for the operator: what is at risk, what is missing, and what is about to expire.

    `held_roles`: roles, including delegated ones, whose keys are stored on the controller.
    """
    lines = []
    if missing := [role for role in ("snapshot", "timestamp", *DELEGATED) if role not in held_roles]:
        lines.append(
            f"no key for {', '.join(missing)} lies on this controller, so devices will stop trusting it: "
            f"`edgectl keys rotate {' '.join(missing)} --sign-with URI`"
        )
    if "root" in held_roles:
        lines.append(
            "the root key is stored on this controller: anyone who controls this machine controls the fleet. "
            "`edgectl keys init --folder DIR` moves it away"
        )
    for role, before in WARN_BEFORE.items():
        remaining = expires[role] - datetime.fromtimestamp(now, timezone.utc)
        if role in held_roles or remaining > before:
            continue
        verb = "expired" if remaining <= timedelta(0) else "expires"
        several = " --sign-with URI" * max(0, root_keys - 1) if role == "root" else ""
        what = "nothing can be installed after that" if role == "targets" else "no device follows after that"
        lines.append(
            f"the {role} metadata {verb} on {expires[role]:%Y-%m-%d}, and {what}: "
            f"`edgectl keys renew {role} --sign-with URI{several}`"
        )
    if waiting:
        lines.append("a change of keys waits for signatures: `edgectl keys sign --sign-with URI`")
    return lines
