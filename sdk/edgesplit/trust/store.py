"""Trust store of a device: verified TUF metadata for releases, and the director's signed statement of the desired
state.

A valid release is signed by the targets role; or it is signed by the planner, a role delegated by targets, as another
cut of such a release, and `edgesplit.release.recut` confirms that it is one.

Nothing is installed unless root, timestamp, snapshot, targets, manifest and statement verify, none is older than the
newest ever seen, and none has expired; an installed release may be kept after expiry. `LinkError` means retry,
`TrustError` means reject. The store survives a power cut at any moment: python-tuf's cache is only a cache (it never
fsyncs), and our own record and proof are written durably beside it. Fetching is left to a callable; chunks are verified
elsewhere by the digests in the manifest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from securesystemslib.signer import Signature
from tuf.api.exceptions import (
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    RepositoryError,
)
from tuf.api.metadata import Metadata, Root, Snapshot, TargetFile, Targets, Timestamp
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from edgesplit import identifiers
from edgesplit.atomic_files import make_folders, remove, write_durably
from edgesplit.errors import EdgeError, Expired, LinkError, MalformedMessage, TrustError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import decode
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.release.fingerprint import Fingerprint, decode_fingerprint
from edgesplit.release.manifest import FingerprintFile, Manifest, Signed, Statement, decode_manifest, release_digest
from edgesplit.release.recut import check_recut

DIRECTOR = "director"
"""Delegated role whose key signs statements. It has no metadata file and cannot sign releases."""
PLANNER = "planner"
"""Delegated role that may sign recuts of a release, and nothing else. Its targets are `recuts/…`."""
TARGETS_FILE, PLANNER_FILE = "targets.json", "planner.json"
BASE_FILE, FINGERPRINT_FILE = "base.json", "anatomy.json"
"""Files in the proof of a recut: the manifest of its base release, and the fingerprint that this names."""
MAX_SIGNATURES = 16
"""Maximum number of signatures of a statement."""

Fetch = Callable[[str, int], bytes]
"""`fetch(path, max_bytes)` of "metadata/…" or "targets/…"; FileNotFoundError if it does not exist, LinkError if the
transfer fails."""
Proof = Mapping[str, bytes]
"""Metadata files that prove a manifest without a network: `N.root.json` up to the newest root, and `targets.json`; for
a recut also `planner.json`, `base.json`, and `anatomy.json` where its base has a fingerprint."""

_Role = TypeVar("_Role", Root, Timestamp, Snapshot, Targets)
_log = logging.getLogger("edgesplit.trust.store")


def target_path(release: str) -> str:
    """TUF target path of a release."""
    return f"releases/{release}.json"


def recut_path(release: str) -> str:
    """Target path of a recut in the planner's metadata."""
    return f"recuts/{release}.json"


def fingerprint_path(sha256: str) -> str:
    """Path of a fingerprint beside the targets. It is not a TUF target: the base's manifest contains its digest."""
    return f"anatomies/{sha256}.json"


def root_file(version: int) -> str:
    """File name of this version of the root metadata."""
    return f"{version}.root.json"


# Offline verification: pure functions over bytes


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
            raise TrustError(f"release {release[:12]} calls itself a recut, which is the planner's to sign")
        return VerifiedRelease(manifest)
    assert chain.planner is not None
    _check_target(raw_manifest, release, chain.planner.targets[recut_path(release)])
    return _verify_recut(decode_manifest(raw_manifest), proof, chain.targets)


def _verify_recut(recut: Manifest, proof: Proof, targets: Targets) -> VerifiedRelease:
    """Verify a recut against its base, which the release key must have signed and whose limits it must keep."""
    _require_base(recut)
    raw_base = proof.get(BASE_FILE)
    if raw_base is None:
        raise TrustError("the proof has no manifest of the release that this is a recut of")
    check_listed(raw_base, recut.recut_of, targets)
    base, anatomy = decode_manifest(raw_base), None
    if base.fingerprint is not None:
        if FINGERPRINT_FILE not in proof:
            raise TrustError("the proof has no anatomy of the model that this is a recut of")
        anatomy = decode_fingerprint(proof[FINGERPRINT_FILE], base.fingerprint)
    check_recut(recut, base, anatomy)
    return VerifiedRelease(recut, base, anatomy)


def verify_statement_offline(raw: bytes, device: str, proof: Proof, bootstrap_root: bytes) -> Statement:
    """Verify a stored statement: signed by the director, for `device`. Neither expiry nor counter is checked: it was
    accepted before and is only kept."""
    return _verify_statement(raw, device, verify_chain(proof, bootstrap_root).targets)


def _require_base(recut: Manifest) -> None:
    if not recut.recut_of:
        raise TrustError("the planner signed what names no release that it is a recut of: that needs the release key")


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


def verify_chain(proof: Proof, bootstrap_root: bytes) -> TrustChain:
    """Verify the roots in `proof` from the bootstrap root on, then the targets role, then the planner where it is in
    the proof. TrustError where a step fails."""
    root = _parse(bootstrap_root, Root, None, "the bootstrap root")
    while (raw := proof.get(root_file(root.version + 1))) is not None:
        root = _next_root(raw, root)
    if TARGETS_FILE not in proof:
        raise TrustError("the proof has no targets.json")
    targets = _parse(proof[TARGETS_FILE], Targets, root, TARGETS_FILE)
    planner = _parse(proof[PLANNER_FILE], Targets, targets, PLANNER_FILE, PLANNER) if PLANNER_FILE in proof else None
    return TrustChain(root, targets, planner)


def _next_root(raw: bytes, root: Root) -> Root:
    """Verify the successor of `root`, signed by the keys of both."""
    newer = _parse(raw, Root, root, root_file(root.version + 1))
    if newer.version != root.version + 1:
        raise TrustError(f"root {root.version + 1} says it is version {newer.version}")
    return newer


def _parse(
    raw: bytes, kind: type[_Role], delegator: Root | Targets | None, what: str, role: str | None = None
) -> _Role:
    """Parse metadata of type `kind` and verify its signatures by the keys of `delegator` for the role (for a root also
    by its own keys)."""
    if len(raw) > LIMITS.metadata_bytes:
        raise TrustError(f"{what}: {len(raw)} bytes, at most {LIMITS.metadata_bytes}")
    try:
        metadata: Metadata[Any] = Metadata.from_bytes(raw)
        signed = metadata.signed
        if not isinstance(signed, kind):
            raise TrustError(f"{what}: not {kind.type} metadata")
        _refuse_duplicate_keys(signed, what)
        for judge in (delegator, signed if isinstance(signed, Root) else None):
            if judge is not None:
                judge.verify_delegate(role or kind.type, metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError, TypeError, KeyError) as error:
        raise TrustError(f"{what}: {error}") from error
    return signed


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
    _check_target(raw_manifest, release, target)


def _check_target(raw_manifest: bytes, release: str, target: TargetFile) -> None:
    try:
        target.verify_length_and_hashes(raw_manifest)
    except RepositoryError as error:
        raise TrustError(f"manifest of release {release[:12]}: {error}") from error
    if release_digest(raw_manifest) != release:
        raise TrustError(f"manifest of release {release[:12]}: its SHA-256 is another")


def _verify_statement(raw: bytes, device: str, targets: Targets) -> Statement:
    signed = decode(raw, Signed)
    _check_signatures(signed, targets)
    try:
        statement = msgspec.msgpack.decode(signed.payload, type=Statement)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"statement: {error}") from error
    if statement.device != device:
        raise TrustError(f"statement for device {statement.device[:63]!r}, and this is {device!r}")
    return statement


def _check_signatures(signed: Signed, targets: Targets) -> None:
    """TrustError unless enough of the director's keys signed exactly these bytes."""
    director = targets.delegations.roles.get(DIRECTOR) if targets.delegations and targets.delegations.roles else None
    if director is None:
        raise TrustError("the targets metadata names no director")
    by_key = {signature.keyid: Signature(signature.keyid, signature.sig) for signature in signed.signatures}
    if len(by_key) != len(signed.signatures) or len(by_key) > MAX_SIGNATURES:
        raise TrustError("statement: its signatures repeat a key, or are too many")
    if not by_key:
        raise TrustError("statement: it is not signed")
    if not by_key.keys() & set(director.keyids):
        raise TrustError("statement: signed by a key that is not the director's")
    if any(signature.sig != signature.sig.lower() for signature in signed.signatures):
        raise TrustError("statement: bad signature: not in lower-case hex")  # one signature, one spelling
    try:
        targets.verify_delegate(DIRECTOR, signed.payload, by_key)
    except (RepositoryError, ValueError) as error:
        raise TrustError(f"statement: bad signature: {error}") from error


# Online verification: a store with rollback protection


class VersionMark(msgspec.Struct, frozen=True):
    """Highest version seen of some metadata, and the keys that were trusted to sign it then.

    A different set of keys starts a new count: so an operator can recover after an attacker with a stolen key has
    signed the highest possible version (TUF 5.3.11).
    """

    version: int
    keys: tuple[str, ...]

    def is_rollback(self, version: int, keys: Collection[str]) -> bool:
        """True if this version is lower than the one seen, signed by the same keys (rollback)."""
        return set(keys) == set(self.keys) and version < self.version


class RollbackRecord(msgspec.Struct, frozen=True):
    """Persistent rollback protection, independent of TUF's cache."""

    roles: dict[str, VersionMark] = {}
    statements: dict[str, VersionMark] = {}
    """By device."""


@dataclass(frozen=True, slots=True)
class _RefreshResult:
    """Verified result of one refresh."""

    root: Root
    timestamp: Timestamp
    snapshot: Snapshot
    targets: Targets
    planner: Targets | None
    """None where there is no planner metadata, or none that verifies: then only recuts cannot be installed."""
    proof: dict[str, bytes]

    @property
    def expires(self) -> float:
        """Earliest expiry of its parts, in Unix seconds. The planner's own expiry only concerns recuts and is checked
        there."""
        return min(role.expires.timestamp() for role in (self.root, self.timestamp, self.snapshot, self.targets))

    def marks(self) -> dict[str, VersionMark]:
        """Version and signing keys of each role."""
        chain = TrustChain(self.root, self.targets, self.planner)
        return {**_marks(chain), **_marks_of(self.root, self.timestamp, self.snapshot)}


def _marks(chain: TrustChain) -> dict[str, VersionMark]:
    marks = _marks_of(chain.root, chain.root, chain.targets)
    if chain.planner is None:
        return marks
    keys = chain.targets.get_delegated_role(PLANNER).keyids
    return {**marks, PLANNER: VersionMark(chain.planner.version, tuple(sorted(keys)))}


def _marks_of(root: Root, *roles: Root | Timestamp | Snapshot | Targets) -> dict[str, VersionMark]:
    keys = {role.type: tuple(sorted(root.get_delegated_role(role.type).keyids)) for role in roles}
    return {role.type: VersionMark(role.version, keys[role.type]) for role in roles}


class TrustStore:
    """The trusted metadata of one device, stored in `folder`. Thread-safe; one store per folder.

    `bootstrap_root` came with the claim or with the system image; it is the permanent trust anchor.
    """

    def __init__(self, folder: Path, bootstrap_root: bytes, *, now: Callable[[], float] = time.time) -> None:
        _parse(bootstrap_root, Root, None, "the bootstrap root")
        self._cache = folder / "cache"
        self._record_file = folder / "counters.json"
        self._proof_file = folder / "proof.json"
        self._bootstrap = bootstrap_root
        self._now = now
        self._refresh_lock = threading.Lock()
        """Held during network access; `_lock` never is, so that a statement can be verified at the same time."""
        self._lock = threading.RLock()
        self._record = self._load_record()
        self._proof: dict[str, bytes] | None = None
        self._chain: TrustChain | None = None
        self._expires_at: float | None = None

    def refresh(self, fetch: Fetch) -> None:
        """Update the metadata. On TrustError or LinkError the previous trusted state remains."""
        with self._refresh_lock:
            view = self._refresh_tuf(fetch)
            self._accept(view)

    def _accept(self, view: _RefreshResult) -> None:
        """Adopt a refreshed view, if no part of it is older than what was seen. It is on disk when this returns."""
        with self._lock:
            # Order matters for a power cut: the rollback record is durable before the proof, and both before they are
            # used, so that nothing older can be accepted after a restart.
            view = self._without_older_planner(view)
            self._refuse_rollback(view.marks())
            self._write_record(RollbackRecord({**self._record.roles, **view.marks()}, self._record.statements))
            if view.proof != self._proof:
                write_durably(self._proof_file, _encode_proof(view.proof))
            self._proof, self._chain = view.proof, TrustChain(view.root, view.targets, view.planner)
            self._expires_at = view.expires

    def manifest(self, release: str, fetch: Fetch) -> bytes:
        """Fetch and verify a release's manifest for installation; the metadata must be fresh. Returns its bytes."""
        return self.manifest_with_proof(release, fetch)[0]

    def manifest_with_proof(self, release: str, fetch: Fetch) -> tuple[bytes, dict[str, bytes]]:
        """Fetch and verify a release's manifest for installation; the metadata must be fresh. Returns its bytes, and
        the proof with which `verify_release` can verify it later without a network.

        For a recut its base is fetched too, and both are compared before anything is returned.
        """
        identifiers.sha256_hex(release)
        with self._lock:
            self._require_fresh()
            chain = self._trusted_chain()
            proof = self.proof()
            if chain.is_recut(release):
                proof[PLANNER_FILE] = self._planner_file(chain)
        raw = _fetch_manifest(release, chain, fetch)
        if PLANNER_FILE in proof:
            recut = decode_manifest(raw)
            _require_base(recut)
            proof[BASE_FILE] = _fetch_manifest(recut.recut_of, TrustChain(chain.root, chain.targets), fetch)
            base = decode_manifest(proof[BASE_FILE])
            if base.fingerprint is not None:
                proof[FINGERPRINT_FILE] = _fetch_fingerprint(base.fingerprint, fetch)
        verify_release(raw, proof, self._bootstrap)
        return raw, proof

    def _planner_file(self, chain: TrustChain) -> bytes:
        """The planner's metadata file; TrustError where it has expired."""
        assert chain.planner is not None and self._proof is not None
        if chain.planner.expires.timestamp() <= self._now():
            raise TrustError("the planner's metadata has expired: what runs is kept, no recut is installed")
        return self._proof[PLANNER_FILE]

    def verify_statement(self, raw: bytes, device: str, *, for_install: bool) -> Statement:
        """Verify a statement of the director: it must be for `device` and not older than the newest accepted one.

        With `for_install`, statement and metadata must not have expired; without, an expired one may be kept. The
        counter is on disk when this returns.
        """
        with self._lock:
            targets = self._trusted_chain().targets
            statement = _verify_statement(raw, device, targets)
            mark = VersionMark(statement.counter, _director_keys(targets))
            seen = self._record.statements.get(device)
            if seen is not None and seen.is_rollback(mark.version, mark.keys):
                raise TrustError(f"statement {mark.version} is older than {seen.version}, which was accepted before")
            if for_install:
                self._require_fresh()
                if statement.expires <= self._now():
                    raise Expired(f"statement {statement.counter} has expired: nothing is installed")
            self._write_record(RollbackRecord(self._record.roles, {**self._record.statements, device: mark}))
            return statement

    def proof(self) -> dict[str, bytes]:
        """The files with which `verify_manifest` and `verify_statement_offline` can repeat the verification without a
        network."""
        with self._lock:
            self._trusted_chain()
            assert self._proof is not None
            return {name: raw for name, raw in self._proof.items() if name != PLANNER_FILE}

    # Stored trust

    def _trusted_chain(self) -> TrustChain:
        """Result of the last refresh, in this process or in an earlier one; LinkError if there never was one."""
        if self._chain is None:
            self._proof, self._chain = self._load_proof()
        return self._chain

    def _load_proof(self) -> tuple[dict[str, bytes], TrustChain]:
        try:
            proof = _decode_proof(self._proof_file.read_bytes())
            chain = verify_chain(proof, self._bootstrap)
        except FileNotFoundError as error:
            raise LinkError("no metadata yet: refresh first") from error
        except (TrustError, OSError, ValueError) as error:
            raise LinkError(f"the stored metadata is spoiled ({error}): refresh first") from error
        try:
            self._refuse_rollback(_marks(chain))
        except TrustError as error:
            raise LinkError(f"the stored metadata is out of date ({error}): refresh first") from error
        return proof, chain

    def _refuse_rollback(self, marks: Mapping[str, VersionMark]) -> None:
        """TrustError on a rollback: of the root, whatever its keys, or of another role under the same keys."""
        for role, mark in marks.items():
            seen = self._record.roles.get(role)
            if seen is None:
                continue
            if seen.is_rollback(mark.version, mark.keys) or (role == Root.type and mark.version < seen.version):
                raise TrustError(f"{role} version {mark.version} is older than {seen.version}, which was seen before")

    def _without_older_planner(self, view: _RefreshResult) -> _RefreshResult:
        """Remove the planner from the view if it is older than what was seen: a problem of the planner's key must not
        block releases that the release key signed."""
        mark, seen = view.marks().get(PLANNER), self._record.roles.get(PLANNER)
        if mark is None or seen is None or not seen.is_rollback(mark.version, mark.keys):
            return view
        _log.warning("planner version %d is older than %d, which was seen: no recut", mark.version, seen.version)
        proof = {name: raw for name, raw in view.proof.items() if name != PLANNER_FILE}
        return replace(view, planner=None, proof=proof)

    def _require_fresh(self) -> None:
        """Raise unless the metadata was refreshed by this process (LinkError) and has not expired (Expired)."""
        if self._expires_at is None:
            raise LinkError("metadata was not refreshed since the start: refresh before installing")
        if self._expires_at <= self._now():
            raise Expired("metadata has expired: what runs is kept, nothing is installed")

    def _load_record(self) -> RollbackRecord:
        try:
            return msgspec.json.decode(self._record_file.read_bytes(), type=RollbackRecord)
        except FileNotFoundError:
            return RollbackRecord()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            # The record is written durably, so the disk itself must have failed. A device that can never update again
            # is worse than one that once takes the versions of its verified cache as the newest seen.
            _log.error("%s is spoiled (%s): starting a new record", self._record_file, error)
            return RollbackRecord()

    def _write_record(self, record: RollbackRecord) -> None:
        if record != self._record:
            write_durably(self._record_file, msgspec.json.encode(record, order="deterministic"))
            self._record = record

    # TUF

    def _refresh_tuf(self, fetch: Fetch) -> _RefreshResult:
        """Run TUF's client workflow with our cache; an unusable cache is deleted and rebuilt."""
        try:
            return self._run_tuf_client(fetch)
        except OSError as error:
            _log.warning("TUF cache %s: %s; starting it afresh", self._cache, error)
            remove(self._cache)
            return self._run_tuf_client(fetch)

    def _run_tuf_client(self, fetch: Fetch) -> _RefreshResult:
        make_folders(self._cache)
        for leftover in self._cache.glob("tmp*"):  # temporary files of python-tuf, left by a power cut
            leftover.unlink(missing_ok=True)
        fetcher = _Fetcher(fetch)
        try:
            updater = Updater(str(self._cache), "metadata/", fetcher=fetcher, config=_CONFIG, bootstrap=self._bootstrap)
            # TUF 5.1: one fixed time for the whole workflow. There is no public way to say which clock.
            updater._trusted_set.reference_time = datetime.fromtimestamp(self._now(), timezone.utc)
            updater.refresh()
            view = self._read_cache(self._has_planner(updater))
            newest = updater._trusted_set.root.version
            if view.root.version != newest:  # otherwise older keys would verify what newer ones should
                raise TrustError(f"{root_file(view.root.version + 1)}: not a root that may follow, of {newest} in all")
            return view
        except DownloadLengthMismatchError as error:
            raise TrustError(f"metadata larger than allowed: {error}") from error
        except DownloadError as error:
            raise (fetcher.failure or LinkError(f"fetching metadata: {error}")) from error
        except ExpiredMetadataError as error:
            raise Expired(f"metadata has expired, or this clock is wrong: {error}") from error
        except RepositoryError as error:
            raise TrustError(f"metadata: {error}") from error
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise TrustError(f"metadata that python-tuf cannot take: {error!r}") from error

    def _has_planner(self, updater: Updater) -> bool:
        """Update the planner's metadata; True if it verifies. A failure does not block releases that the release key
        signed."""
        try:
            updater.get_targetinfo(recut_path("0" * 64))
            return (self._cache / PLANNER_FILE).is_file() and PLANNER in updater._trusted_set
        except DownloadLengthMismatchError as error:
            _log.warning("the planner's metadata is larger than allowed (%s): no recut is installed", error)
        except DownloadHTTPError as error:
            _log.warning("the planner's metadata is not there (%s): no recut is installed", error)
        except DownloadError:
            raise
        except RepositoryError as error:
            _log.warning("the planner's metadata is not believed (%s): no recut is installed", error)
        return False

    def _read_cache(self, has_planner: bool) -> _RefreshResult:
        """Read the cache right after a successful refresh, which has just verified all of it."""
        files = (TARGETS_FILE, PLANNER_FILE) if has_planner else (TARGETS_FILE,)
        proof = {**self._cached_roots(), **{name: (self._cache / name).read_bytes() for name in files}}
        chain = verify_chain(proof, self._bootstrap)
        timestamp = _parse((self._cache / "timestamp.json").read_bytes(), Timestamp, chain.root, "timestamp.json")
        snapshot = _parse((self._cache / "snapshot.json").read_bytes(), Snapshot, chain.root, "snapshot.json")
        return _RefreshResult(chain.root, timestamp, snapshot, chain.targets, chain.planner, proof)

    def _cached_roots(self) -> dict[str, bytes]:
        """The cached roots from the bootstrap root on, as far as they verify: a damaged file after the newest root is
        ignored."""
        root = _parse(self._bootstrap, Root, None, "the bootstrap root")
        roots = {root_file(root.version): self._bootstrap}
        while True:
            name = root_file(root.version + 1)
            try:
                raw = (self._cache / "root_history" / name).read_bytes()
                root = _next_root(raw, root)
            except (OSError, TrustError):
                return roots
            roots[name] = raw


_CONFIG = UpdaterConfig(
    max_root_rotations=1_024,  # counted from the root in the image; each must be signed, so this bounds no attacker
    max_delegations=1,  # targets and its delegated roles; these delegate no further
    root_max_length=512_000,
    timestamp_max_length=16_384,
    snapshot_max_length=2_000_000,
    targets_max_length=LIMITS.metadata_bytes,
    prefix_targets_with_hash=False,
)


class _Fetcher(FetcherInterface):
    """Adapter from our `fetch` to python-tuf's fetcher interface. Enforces TUF's size limits and stores the cause of a
    failure."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch_bytes = fetch
        self.failure: EdgeError | None = None

    def _fetch(self, url: str) -> Iterator[bytes]:
        raise NotImplementedError("metadata is fetched whole, through download_bytes")

    def download_bytes(self, url: str, max_length: int) -> bytes:
        """Fetch `url`, at most `max_length` bytes."""
        try:
            raw = self._fetch_bytes(url, max_length)
        except FileNotFoundError as error:
            raise DownloadHTTPError(f"{url} is not there", 404) from error
        except EdgeError as error:
            self.failure = error
            raise DownloadError(str(error)) from error
        except OSError as error:
            raise DownloadError(str(error)) from error
        if len(raw) > max_length:
            raise DownloadLengthMismatchError(f"{url}: {len(raw)} bytes, at most {max_length}")
        return raw


def _fetch_manifest(release: str, chain: TrustChain, fetch: Fetch) -> bytes:
    """Fetch a manifest as the chain lists it (under the planner's name for a recut) and check its digest."""
    planner_targets = chain.planner.targets if chain.is_recut(release) and chain.planner else None
    path = target_path(release) if planner_targets is None else recut_path(release)
    target = (chain.targets.targets if planner_targets is None else planner_targets).get(path)
    if target is None:
        raise TrustError(f"release {release[:12]} is not one that the release key signed")
    if target.length > LIMITS.manifest_bytes:
        raise TrustError(f"manifest of release {release[:12]}: {target.length} bytes, at most {LIMITS.manifest_bytes}")
    try:
        raw = fetch(f"targets/{path}", target.length)
    except FileNotFoundError as error:
        raise LinkError(f"the manifest of release {release[:12]} is not there (yet)") from error
    _check_target(raw, release, target)
    return raw


def _fetch_fingerprint(signed: FingerprintFile, fetch: Fetch) -> bytes:
    """Fetch a fingerprint. Its digest is checked with the recut."""
    try:
        return fetch(f"targets/{fingerprint_path(signed.sha256)}", signed.bytes)
    except FileNotFoundError as error:
        raise LinkError(f"the anatomy {signed.sha256[:12]} is not there (yet)") from error


def _director_keys(targets: Targets) -> tuple[str, ...]:
    return tuple(sorted(targets.get_delegated_role(DIRECTOR).keyids))


def _encode_proof(proof: Proof) -> bytes:
    return msgspec.json.encode({name: raw.decode() for name, raw in proof.items()}, order="deterministic")


def _decode_proof(raw: bytes) -> dict[str, bytes]:
    return {name: text.encode() for name, text in msgspec.json.decode(raw, type=dict[str, str]).items()}


warm_up_structs(__name__)
