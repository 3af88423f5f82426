"""Rules by which TUF metadata, releases and statements are verified: pure functions over bytes, without files, network
or clock.

A valid release is signed by the targets role; or it is signed by the planner, a role delegated by targets, as another
cut of such a release, and `edgesplit.release.recut` confirms that it is one. Each function returns a typed result, or
raises TrustError (or MalformedMessage for bytes that no correct peer would send). Rollback protection, which needs a
memory, is in `trust.metadata_set`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from securesystemslib.signer import Signature
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, Root, Snapshot, TargetFile, Targets, Timestamp

from edgesplit.decoding import decode_msgpack
from edgesplit.errors import TrustError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import decode
from edgesplit.mqtt.remote_inference import InferenceJob
from edgesplit.release.fingerprint import Fingerprint, decode_fingerprint
from edgesplit.release.manifest import Manifest, Signed, Statement, decode_manifest, release_digest
from edgesplit.release.recut import check_recut

DIRECTOR = "director"
"""Delegated role whose key signs statements and remote inferences. It has no metadata file and cannot sign releases."""
PLANNER = "planner"
"""Delegated role that may sign recuts of a release, and nothing else. Its targets are `recuts/…`."""
TARGETS_FILE, PLANNER_FILE = "targets.json", "planner.json"
BASE_FILE, FINGERPRINT_FILE = "base.json", "fingerprint.json"
"""Files in the proof of a recut: the manifest of its base release, and the fingerprint that this names."""
MAX_SIGNATURES = 16
"""Maximum number of signatures of a statement."""

Proof = Mapping[str, bytes]
"""Metadata files that prove a manifest without a network: `N.root.json` up to the newest root, and `targets.json`; for
a recut also `planner.json`, `base.json`, and `fingerprint.json` where its base has a fingerprint."""

_Role = TypeVar("_Role", Root, Timestamp, Snapshot, Targets)
_Directed = TypeVar("_Directed", Statement, InferenceJob)


def target_path(release: str) -> str:
    """TUF target path of a release."""
    return f"releases/{release}.json"


def recut_path(release: str) -> str:
    """Target path of a recut in the planner's metadata."""
    return f"recuts/{release}.json"


def fingerprint_path(sha256: str) -> str:
    """Path of a fingerprint beside the targets. It is not a TUF target: the base's manifest contains its digest."""
    return f"fingerprints/{sha256}.json"


def root_file(version: int) -> str:
    """File name of this version of the root metadata."""
    return f"{version}.root.json"


@dataclass(frozen=True, slots=True)
class VerifiedRelease:
    """A verified manifest; for a recut also its base's manifest and fingerprint."""

    manifest: Manifest
    base: Manifest | None = None
    fingerprint: Fingerprint | None = None


def verify_manifest(raw_manifest: bytes, proof: Proof, bootstrap_root: bytes) -> Manifest:
    """Verify and decode a manifest; see `verify_release`."""
    return verify_release(raw_manifest, proof, bootstrap_root).manifest


def verify_release(raw_manifest: bytes, proof: Proof, bootstrap_root: bytes) -> VerifiedRelease:
    """Verify a manifest offline: either the targets role, reached from the trusted root, lists exactly these bytes, or
    the planner lists them and they are a recut of a release that the targets role lists. TrustError or MalformedMessage
    otherwise.

    Expiry is not checked: keeping an installed release is always allowed.
    """
    chain = verify_chain(proof, bootstrap_root)
    release = release_digest(raw_manifest)
    if not chain.is_recut(release):
        check_listed(raw_manifest, release, chain.targets)
        manifest = decode_manifest(raw_manifest)
        if manifest.recut_of:
            raise TrustError(f"release {release[:12]} is a recut, which only the planner's key may sign")
        return VerifiedRelease(manifest)
    assert chain.planner is not None
    check_target(raw_manifest, release, chain.planner.targets[recut_path(release)])
    return _verify_recut(decode_manifest(raw_manifest), proof, chain.targets)


def _verify_recut(recut: Manifest, proof: Proof, targets: Targets) -> VerifiedRelease:
    """Verify a recut against its base, which the release key must have signed and whose limits it must keep."""
    require_base(recut)
    raw_base = proof.get(BASE_FILE)
    if raw_base is None:
        raise TrustError("the proof has no manifest of the release that this is a recut of")
    check_listed(raw_base, recut.recut_of, targets)
    base, fingerprint = decode_manifest(raw_base), None
    if base.fingerprint is not None:
        if FINGERPRINT_FILE not in proof:
            raise TrustError("the proof has no fingerprint of the model that this is a recut of")
        fingerprint = decode_fingerprint(proof[FINGERPRINT_FILE], base.fingerprint)
    check_recut(recut, base, fingerprint)
    return VerifiedRelease(recut, base, fingerprint)


def verify_statement_offline(raw: bytes, device: str, proof: Proof, bootstrap_root: bytes) -> Statement:
    """Verify a stored statement: signed by the director, for `device`. Neither expiry nor counter is checked: it was
    accepted before and is only kept."""
    return verify_statement(raw, device, verify_chain(proof, bootstrap_root).targets)


def require_base(recut: Manifest) -> None:
    """TrustError unless this manifest, which the planner lists, names the release that it is a recut of."""
    if not recut.recut_of:
        raise TrustError("the planner signed a release that is no recut: that needs the release key")


@dataclass(frozen=True, slots=True)
class TrustChain:
    """The newest root and targets that the bootstrap root leads to, and the planner's targets where there are any."""

    root: Root
    targets: Targets
    planner: Targets | None = None

    def is_recut(self, release: str) -> bool:
        """True if the planner lists this release. A release that the targets role lists is never a recut."""
        listed = self.planner is not None and recut_path(release) in self.planner.targets
        return listed and target_path(release) not in self.targets.targets

    def listed_manifest(self, release: str) -> tuple[str, TargetFile]:
        """Path and digests of a release's manifest, as the targets role or the planner lists it; TrustError if neither
        does, or if the manifest would be too large."""
        path, targets = target_path(release), self.targets
        if self.planner is not None and self.is_recut(release):
            path, targets = recut_path(release), self.planner
        target = targets.targets.get(path)
        if target is None:
            raise TrustError(f"release {release[:12]} is not one that the release key signed")
        if target.length > LIMITS.manifest_bytes:
            raise TrustError(
                f"manifest of release {release[:12]}: {target.length} bytes, at most {LIMITS.manifest_bytes}"
            )
        return path, target


def verify_chain(proof: Proof, bootstrap_root: bytes) -> TrustChain:
    """Verify the roots in `proof` from the bootstrap root on, then the targets role, then the planner where it is in
    the proof. TrustError where a step fails."""
    root = parse_verified(bootstrap_root, Root, None, "the bootstrap root")
    while (raw := proof.get(root_file(root.version + 1))) is not None:
        root = next_root(raw, root)
    if TARGETS_FILE not in proof:
        raise TrustError("the proof has no targets.json")
    targets = parse_verified(proof[TARGETS_FILE], Targets, root, TARGETS_FILE)
    planner = None
    if PLANNER_FILE in proof:
        planner = parse_verified(proof[PLANNER_FILE], Targets, targets, PLANNER_FILE, PLANNER)
    return TrustChain(root, targets, planner)


def next_root(raw: bytes, root: Root) -> Root:
    """Verify the successor of `root`, signed by the keys of both."""
    newer = parse_verified(raw, Root, root, root_file(root.version + 1))
    if newer.version != root.version + 1:
        raise TrustError(f"root {root.version + 1} says it is version {newer.version}")
    return newer


def parse_verified(
    raw: bytes, kind: type[_Role], delegator: Root | Targets | None, what: str, role: str | None = None
) -> _Role:
    """Parse metadata of type `kind` and verify its signatures by the keys of `delegator` for the role (for a root also
    by its own keys)."""
    if len(raw) > LIMITS.metadata_bytes:
        raise TrustError(f"{what}: {len(raw)} bytes, at most {LIMITS.metadata_bytes}")
    metadata = parse_metadata(raw, kind, what)
    signed = metadata.signed
    _refuse_duplicate_keys(signed, what)
    try:
        for judge in (delegator, signed if isinstance(signed, Root) else None):
            if judge is not None:
                judge.verify_delegate(role or kind.type, metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError, TypeError, KeyError) as error:
        raise TrustError(f"{what}: {error}") from error
    return signed


def parse_metadata(raw: bytes, kind: type[_Role], what: str) -> Metadata[_Role]:
    """Parse metadata of type `kind`, which is called `what` in errors; TrustError for anything else. Signatures are not
    verified."""
    try:
        metadata: Metadata[Any] = Metadata.from_bytes(raw)
    except (RepositoryError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise TrustError(f"{what} is no metadata: {error}") from error
    if not isinstance(metadata.signed, kind):
        raise TrustError(f"{what} is {metadata.signed.type} metadata, not {kind.type}")
    return metadata


def _refuse_duplicate_keys(signed: Root | Timestamp | Snapshot | Targets, what: str) -> None:
    """TrustError if a key is listed under two ids: it would count twice, and one holder could reach a threshold of two
    (TUF 4.2)."""
    delegated = signed.delegations.keys if isinstance(signed, Targets) and signed.delegations else {}
    keys_by_id = signed.keys if isinstance(signed, Root) else delegated
    distinct_keys = {msgspec.json.encode(key.keyval, order="deterministic") for key in keys_by_id.values()}
    if len(distinct_keys) != len(keys_by_id):
        raise TrustError(f"{what}: one key under two names")


def check_listed(raw_manifest: bytes, release: str, targets: Targets) -> None:
    """TrustError unless these bytes are what `targets` lists as that release."""
    target = targets.targets.get(target_path(release))
    if target is None:
        raise TrustError(f"release {release[:12]} is not one that the release key signed")
    check_target(raw_manifest, release, target)


def check_target(raw_manifest: bytes, release: str, target: TargetFile) -> None:
    """TrustError unless these bytes have the length and the digests of `target`, and the digest `release`."""
    try:
        target.verify_length_and_hashes(raw_manifest)
    except RepositoryError as error:
        raise TrustError(f"manifest of release {release[:12]}: {error}") from error
    if release_digest(raw_manifest) != release:
        raise TrustError(f"manifest of release {release[:12]}: its SHA-256 is another")


def verify_statement(raw: bytes, device: str, targets: Targets) -> Statement:
    """Verify and decode a statement: signed by the director that `targets` names, for `device`. Neither expiry nor
    counter is checked."""
    return _verify_directed(raw, Statement, "statement", device, targets)


def verify_inference_job(raw: bytes, device: str, targets: Targets) -> InferenceJob:
    """Verify and decode a remote inference: signed by the director that `targets` names, for `device`. Whether it has
    expired or was run before is not checked."""
    return _verify_directed(raw, InferenceJob, "inference job", device, targets)


def _verify_directed(raw: bytes, kind: type[_Directed], what: str, device: str, targets: Targets) -> _Directed:
    """Verify and decode what the director signed for one device. No payload decodes as two kinds: each has fields that
    the other lacks, and refuses unknown ones."""
    signed = decode(raw, Signed)
    _check_signatures(signed, targets, what)
    content = decode_msgpack(signed.payload, kind, what)
    if content.device != device:
        raise TrustError(f"{what} for device {content.device[:63]!r}, and this is {device!r}")
    return content


def _check_signatures(signed: Signed, targets: Targets, what: str) -> None:
    """TrustError unless enough of the director's keys signed exactly these bytes, which errors call `what`."""
    director = targets.delegations.roles.get(DIRECTOR) if targets.delegations and targets.delegations.roles else None
    if director is None:
        raise TrustError("the targets metadata names no director")
    by_key = {signature.keyid: Signature(signature.keyid, signature.sig) for signature in signed.signatures}
    if len(by_key) != len(signed.signatures) or len(by_key) > MAX_SIGNATURES:
        raise TrustError(f"{what}: its signatures repeat a key, or are too many")
    if not by_key:
        raise TrustError(f"{what}: it is not signed")
    if not by_key.keys() & set(director.keyids):
        raise TrustError(f"{what}: signed by a key that is not the director's")
    if any(signature.sig != signature.sig.lower() for signature in signed.signatures):
        raise TrustError(f"{what}: bad signature: not in lower-case hex")  # one signature, one spelling
    try:
        targets.verify_delegate(DIRECTOR, signed.payload, by_key)
    except (RepositoryError, ValueError) as error:
        raise TrustError(f"{what}: bad signature: {error}") from error
