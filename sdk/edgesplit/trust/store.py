"""What a device believes: TUF metadata for releases, the director's signed statement for what this device shall run.

A release is what the targets role signed; or what the planner, a role delegated by targets, signed as another cut of
such a release, and only if it is that (`edgesplit.release.recut`).

Promises: nothing is installed unless root, timestamp, snapshot, targets, manifest and statement verify, none is older
than the newest ever seen, and none has expired; what already runs may be kept after expiry. `LinkError` means try
again, `TrustError` means believe nothing. A power cut at any moment leaves a store that works: python-tuf's cache is
only a cache (it never fsyncs), and our own record and proof are written durably beside it.
Leaves to others: fetching (a callable), and the chunks, whose digests the manifest names.
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
from edgesplit.msgspec_warmup import settle
from edgesplit.release.fingerprint import Anatomy, decode_anatomy
from edgesplit.release.manifest import AnatomyFile, Manifest, Signed, Statement, decode_manifest, release_digest
from edgesplit.release.recut import check_recut

DIRECTOR = "director"
"""The delegated role whose key signs statements. It has no metadata file, and no say in what a release is."""
PLANNER = "planner"
"""The delegated role that may sign another cut of a release, and nothing else. Its targets are `recuts/…`."""
TARGETS_FILE, PLANNER_FILE = "targets.json", "planner.json"
BASE_FILE, ANATOMY_FILE = "base.json", "anatomy.json"
"""Beside a recut: the manifest of the release that it is a cut of, and that one's anatomy."""
SIGNATURES = 16
"""No statement needs more."""

Fetch = Callable[[str, int], bytes]
"""`fetch(path, max_bytes)` of "metadata/…" or "targets/…"; FileNotFoundError if there is none, LinkError on the way."""
Proof = Mapping[str, bytes]
"""Metadata files that prove a manifest without a network: `N.root.json` up to the newest root, and `targets.json`; of a
recut also `planner.json`, `base.json`, and `anatomy.json` where its base has one."""

_Role = TypeVar("_Role", Root, Timestamp, Snapshot, Targets)
_log = logging.getLogger("edgesplit.trust.store")


def target_path(release: str) -> str:
    """The TUF target of a release."""
    return f"releases/{release}.json"


def recut_path(release: str) -> str:
    """The planner's target of a recut."""
    return f"recuts/{release}.json"


def anatomy_path(sha256: str) -> str:
    """Where an anatomy lies beside the targets. It is no target: the base's manifest names it by its digest."""
    return f"anatomies/{sha256}.json"


def root_file(version: int) -> str:
    """The name of that version of the root."""
    return f"{version}.root.json"


# Without a network: pure functions over bytes


@dataclass(frozen=True, slots=True)
class Verified:
    """A manifest that is believed, and what it is measured by where it is a recut."""

    manifest: Manifest
    base: Manifest | None = None
    anatomy: Anatomy | None = None


def verify_manifest(raw_manifest: bytes, proof: Proof, bootstrap_root: bytes) -> Manifest:
    """The manifest in these bytes, if it is to be believed; see `verify_release`."""
    return verify_release(raw_manifest, proof, bootstrap_root).manifest


def verify_release(raw_manifest: bytes, proof: Proof, bootstrap_root: bytes) -> Verified:
    """The manifest in these bytes, if the targets role of the root we trust vouches for exactly them, or the planner
    does and they are another cut of a release that the targets role vouches for.

    Expiry is not looked at: keeping what was installed is always allowed.
    """
    chain = verify_chain(proof, bootstrap_root)
    release = release_digest(raw_manifest)
    if not chain.is_recut(release):
        check_listed(raw_manifest, release, chain.targets)
        manifest = decode_manifest(raw_manifest)
        if manifest.recut_of:
            raise TrustError(f"release {release[:12]} calls itself a recut, which is the planner's to sign")
        return Verified(manifest)
    assert chain.planner is not None
    _check_target(raw_manifest, release, chain.planner.targets[recut_path(release)])
    return _verified_recut(decode_manifest(raw_manifest), proof, chain.targets)


def _verified_recut(recut: Manifest, proof: Proof, targets: Targets) -> Verified:
    """The recut with its base, which the release key signed and whose limits it keeps."""
    _require_base(recut)
    raw_base = proof.get(BASE_FILE)
    if raw_base is None:
        raise TrustError("the proof has no manifest of the release that this is a recut of")
    check_listed(raw_base, recut.recut_of, targets)
    base, anatomy = decode_manifest(raw_base), None
    if base.anatomy is not None:
        if ANATOMY_FILE not in proof:
            raise TrustError("the proof has no anatomy of the model that this is a recut of")
        anatomy = decode_anatomy(proof[ANATOMY_FILE], base.anatomy)
    check_recut(recut, base, anatomy)
    return Verified(recut, base, anatomy)


def verify_statement_offline(raw: bytes, device: str, proof: Proof, bootstrap_root: bytes) -> Statement:
    """The statement in `raw`, if the director vouches for it and it is for `device`. Neither expiry nor counter is
    looked at: it was accepted before, and is only kept."""
    return _verified_statement(raw, device, verify_chain(proof, bootstrap_root).targets)


def _require_base(recut: Manifest) -> None:
    if not recut.recut_of:
        raise TrustError("the planner signed what names no release that it is a recut of: that needs the release key")


@dataclass(frozen=True, slots=True)
class Chain:
    """The newest root and targets that the bootstrap root leads to, and the planner's targets where they are there."""

    root: Root
    targets: Targets
    planner: Targets | None = None

    def is_recut(self, release: str) -> bool:
        """Is it the planner that vouches for that release? What the targets role lists is never the planner's."""
        listed = self.planner is not None and recut_path(release) in self.planner.targets
        return listed and target_path(release) not in self.targets.targets


def verify_chain(proof: Proof, bootstrap_root: bytes) -> Chain:
    """Follow the roots in `proof` from the bootstrap on, then the targets role, then the planner where it is in the
    proof. TrustError where a link is missing."""
    root = _parse(bootstrap_root, Root, None, "the bootstrap root")
    while (raw := proof.get(root_file(root.version + 1))) is not None:
        root = _next_root(raw, root)
    if TARGETS_FILE not in proof:
        raise TrustError("the proof has no targets.json")
    targets = _parse(proof[TARGETS_FILE], Targets, root, TARGETS_FILE)
    planner = _parse(proof[PLANNER_FILE], Targets, targets, PLANNER_FILE, PLANNER) if PLANNER_FILE in proof else None
    return Chain(root, targets, planner)


def _next_root(raw: bytes, root: Root) -> Root:
    """The root that follows `root`, signed by the keys of both."""
    newer = _parse(raw, Root, root, root_file(root.version + 1))
    if newer.version != root.version + 1:
        raise TrustError(f"root {root.version + 1} says it is version {newer.version}")
    return newer


def _parse(
    raw: bytes, kind: type[_Role], delegator: Root | Targets | None, what: str, role: str | None = None
) -> _Role:
    """Metadata of that kind, signed as `delegator` demands of the role (a root also as it demands itself)."""
    if len(raw) > LIMITS.metadata_bytes:
        raise TrustError(f"{what}: {len(raw)} bytes, at most {LIMITS.metadata_bytes}")
    try:
        metadata: Metadata[Any] = Metadata.from_bytes(raw)
        signed = metadata.signed
        if not isinstance(signed, kind):
            raise TrustError(f"{what}: not {kind.type} metadata")
        _refuse_twins(signed, what)
        for judge in (delegator, signed if isinstance(signed, Root) else None):
            if judge is not None:
                judge.verify_delegate(role or kind.type, metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError, TypeError, KeyError) as error:
        raise TrustError(f"{what}: {error}") from error
    return signed


def _refuse_twins(signed: Root | Timestamp | Snapshot | Targets, what: str) -> None:
    """A key has one name: under two it would count twice, and one holder would reach a threshold of two (TUF 4.2)."""
    delegated = signed.delegations.keys if isinstance(signed, Targets) and signed.delegations else {}
    named = signed.keys if isinstance(signed, Root) else delegated
    different = {msgspec.json.encode(key.keyval, order="deterministic") for key in named.values()}
    if len(different) != len(named):
        raise TrustError(f"{what}: one key under two names")


def check_listed(raw_manifest: bytes, release: str, targets: Targets) -> None:
    """These bytes are what `targets` calls that release, else TrustError."""
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


def _verified_statement(raw: bytes, device: str, targets: Targets) -> Statement:
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
    """Enough of the director's keys signed exactly these bytes."""
    director = targets.delegations.roles.get(DIRECTOR) if targets.delegations and targets.delegations.roles else None
    if director is None:
        raise TrustError("the targets metadata names no director")
    by_key = {one.keyid: Signature(one.keyid, one.sig) for one in signed.signatures}
    if len(by_key) != len(signed.signatures) or len(by_key) > SIGNATURES:
        raise TrustError("statement: its signatures repeat a key, or are too many")
    if not by_key:
        raise TrustError("statement: it is not signed")
    if not by_key.keys() & set(director.keyids):
        raise TrustError("statement: signed by a key that is not the director's")
    if any(one.sig != one.sig.lower() for one in signed.signatures):
        raise TrustError("statement: bad signature: not in lower-case hex")  # one signature, one spelling
    try:
        targets.verify_delegate(DIRECTOR, signed.payload, by_key)
    except (RepositoryError, ValueError) as error:
        raise TrustError(f"statement: bad signature: {error}") from error


# With a network: a store that remembers


class Mark(msgspec.Struct, frozen=True):
    """The highest version seen of something, and the keys that were trusted to sign it then.

    Another set of keys starts a new count: so an operator recovers from a thief who counted to the end (TUF 5.3.11).
    """

    version: int
    keys: tuple[str, ...]

    def forbids(self, version: int, keys: Collection[str]) -> bool:
        """Is this version older than what we saw signed by the same keys?"""
        return set(keys) == set(self.keys) and version < self.version


class Record(msgspec.Struct, frozen=True):
    """What must never go backwards, whatever becomes of TUF's cache."""

    roles: dict[str, Mark] = {}
    statements: dict[str, Mark] = {}
    """By device."""


@dataclass(frozen=True, slots=True)
class _View:
    """What one refresh has verified."""

    root: Root
    timestamp: Timestamp
    snapshot: Snapshot
    targets: Targets
    planner: Targets | None
    """None where there is none, or none to be believed: then only recuts are not installed."""
    proof: dict[str, bytes]

    @property
    def expires(self) -> float:
        """When the first of its parts expires, Unix seconds; the planner's own is looked at for recuts alone."""
        return min(role.expires.timestamp() for role in (self.root, self.timestamp, self.snapshot, self.targets))

    def marks(self) -> dict[str, Mark]:
        """The version of each role under the keys that signed it."""
        chain = Chain(self.root, self.targets, self.planner)
        return {**_marks(chain), **_marks_of(self.root, self.timestamp, self.snapshot)}


def _marks(chain: Chain) -> dict[str, Mark]:
    marks = _marks_of(chain.root, chain.root, chain.targets)
    if chain.planner is None:
        return marks
    keys = chain.targets.get_delegated_role(PLANNER).keyids
    return {**marks, PLANNER: Mark(chain.planner.version, tuple(sorted(keys)))}


def _marks_of(root: Root, *roles: Root | Timestamp | Snapshot | Targets) -> dict[str, Mark]:
    keys = {role.type: tuple(sorted(root.get_delegated_role(role.type).keyids)) for role in roles}
    return {role.type: Mark(role.version, keys[role.type]) for role in roles}


class TrustStore:
    """The trusted metadata of one device, kept in `folder`. Thread-safe; one store per folder.

    `bootstrap_root` came with the claim, or with the image: it is trusted because of how it came, and for ever.
    """

    def __init__(self, folder: Path, bootstrap_root: bytes, *, now: Callable[[], float] = time.time) -> None:
        _parse(bootstrap_root, Root, None, "the bootstrap root")
        self._cache = folder / "cache"
        self._record_file = folder / "counters.json"
        self._proof_file = folder / "proof.json"
        self._bootstrap = bootstrap_root
        self._now = now
        self._refreshing = threading.Lock()
        """Held while the network is awaited; `_lock` never is, so that a message can be judged meanwhile."""
        self._lock = threading.RLock()
        self._record = self._load_record()
        self._proof: dict[str, bytes] | None = None
        self._chain: Chain | None = None
        self._fresh_until: float | None = None

    def refresh(self, fetch: Fetch) -> None:
        """Bring the metadata up to date. TrustError or LinkError leave what was trusted before."""
        with self._refreshing:
            view = self._updated(fetch)
            self._accept(view)

    def _accept(self, view: _View) -> None:
        """Believe a view from now on, if nothing in it is older than what was seen; on disk when this returns."""
        with self._lock:
            view = self._without_older_planner(view)
            self._refuse_older(view.marks())
            self._write_record(Record({**self._record.roles, **view.marks()}, self._record.statements))
            if view.proof != self._proof:
                write_durably(self._proof_file, _encode_proof(view.proof))
            self._proof, self._chain = view.proof, Chain(view.root, view.targets, view.planner)
            self._fresh_until = view.expires

    def manifest(self, release: str, fetch: Fetch) -> bytes:
        """The bytes of that release's manifest, verified; for installing, so the metadata must be fresh."""
        return self.proven(release, fetch)[0]

    def proven(self, release: str, fetch: Fetch) -> tuple[bytes, dict[str, bytes]]:
        """The same, and the proof with which `verify_release` believes it from now on without a network.

        Of a recut its base is fetched too, and all is compared before anything is returned.
        """
        identifiers.sha256_hex(release)
        with self._lock:
            self._require_fresh()
            chain = self._trusted()
            proof = self.proof()
            if chain.is_recut(release):
                proof[PLANNER_FILE] = self._planner_file(chain)
        raw = _fetched(release, chain, fetch)
        if PLANNER_FILE in proof:
            recut = decode_manifest(raw)
            _require_base(recut)
            proof[BASE_FILE] = _fetched(recut.recut_of, Chain(chain.root, chain.targets), fetch)
            base = decode_manifest(proof[BASE_FILE])
            if base.anatomy is not None:
                proof[ANATOMY_FILE] = _fetched_anatomy(base.anatomy, fetch)
        verify_release(raw, proof, self._bootstrap)
        return raw, proof

    def _planner_file(self, chain: Chain) -> bytes:
        """The planner's metadata, which must be as fresh as the rest."""
        assert chain.planner is not None and self._proof is not None
        if chain.planner.expires.timestamp() <= self._now():
            raise TrustError("the planner's metadata has expired: what runs is kept, no recut is installed")
        return self._proof[PLANNER_FILE]

    def statement(self, raw: bytes, device: str, *, install: bool) -> Statement:
        """The director's statement in `raw`, if it is for `device` and not older than the newest accepted.

        With `install`, statement and metadata must not have expired; without, an expired one may be kept.
        The counter is on disk when this returns.
        """
        with self._lock:
            targets = self._trusted().targets
            statement = _verified_statement(raw, device, targets)
            mark = Mark(statement.counter, _director_keys(targets))
            seen = self._record.statements.get(device)
            if seen is not None and seen.forbids(mark.version, mark.keys):
                raise TrustError(f"statement {mark.version} is older than {seen.version}, which was accepted before")
            if install:
                self._require_fresh()
                if statement.expires <= self._now():
                    raise Expired(f"statement {statement.counter} has expired: nothing is installed")
            self._write_record(Record(self._record.roles, {**self._record.statements, device: mark}))
            return statement

    def proof(self) -> dict[str, bytes]:
        """What lets `verify_manifest` and `verify_statement_offline` repeat the verification without a network."""
        with self._lock:
            self._trusted()
            assert self._proof is not None
            return {name: raw for name, raw in self._proof.items() if name != PLANNER_FILE}

    # Trust that is held

    def _trusted(self) -> Chain:
        """What the last refresh verified, of this process or of one before it; LinkError if there never was one."""
        if self._chain is None:
            self._proof, self._chain = self._load_proof()
        return self._chain

    def _load_proof(self) -> tuple[dict[str, bytes], Chain]:
        try:
            proof = _decode_proof(self._proof_file.read_bytes())
            chain = verify_chain(proof, self._bootstrap)
        except FileNotFoundError as error:
            raise LinkError("no metadata yet: refresh first") from error
        except (TrustError, OSError, ValueError) as error:
            raise LinkError(f"the stored metadata is spoiled ({error}): refresh first") from error
        try:
            self._refuse_older(_marks(chain))
        except TrustError as error:
            raise LinkError(f"the stored metadata is out of date ({error}): refresh first") from error
        return proof, chain

    def _refuse_older(self, marks: Mapping[str, Mark]) -> None:
        """Nothing goes back: the root never, whatever its keys; another role not under the keys it had."""
        for role, mark in marks.items():
            seen = self._record.roles.get(role)
            if seen is None:
                continue
            if seen.forbids(mark.version, mark.keys) or (role == Root.type and mark.version < seen.version):
                raise TrustError(f"{role} version {mark.version} is older than {seen.version}, which was seen before")

    def _without_older_planner(self, view: _View) -> _View:
        """The view without the planner if that is older than what was seen: whatever becomes of the planner's key, the
        release key is heard."""
        mark, seen = view.marks().get(PLANNER), self._record.roles.get(PLANNER)
        if mark is None or seen is None or not seen.forbids(mark.version, mark.keys):
            return view
        _log.warning("planner version %d is older than %d, which was seen: no recut", mark.version, seen.version)
        proof = {name: raw for name, raw in view.proof.items() if name != PLANNER_FILE}
        return replace(view, planner=None, proof=proof)

    def _require_fresh(self) -> None:
        """What is to be installed must be vouched for today."""
        if self._fresh_until is None:
            raise LinkError("metadata was not refreshed since the start: refresh before installing")
        if self._fresh_until <= self._now():
            raise Expired("metadata has expired: what runs is kept, nothing is installed")

    def _load_record(self) -> Record:
        try:
            return msgspec.json.decode(self._record_file.read_bytes(), type=Record)
        except FileNotFoundError:
            return Record()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            # It is written durably, so the disk itself must have failed. A device that never updates again is worse
            # than one that trusts its verified cache for the versions once more.
            _log.error("%s is spoiled (%s): starting a new record", self._record_file, error)
            return Record()

    def _write_record(self, record: Record) -> None:
        if record != self._record:
            write_durably(self._record_file, msgspec.json.encode(record, order="deterministic"))
            self._record = record

    # TUF

    def _updated(self, fetch: Fetch) -> _View:
        """One client workflow of TUF over our cache; a cache that cannot be used is thrown away and made anew."""
        try:
            return self._update(fetch)
        except OSError as error:
            _log.warning("TUF cache %s: %s; starting it afresh", self._cache, error)
            remove(self._cache)
            return self._update(fetch)

    def _update(self, fetch: Fetch) -> _View:
        make_folders(self._cache)
        for cut_off in self._cache.glob("tmp*"):  # python-tuf's, which a power cut left there
            cut_off.unlink(missing_ok=True)
        fetcher = _Fetcher(fetch)
        try:
            updater = Updater(str(self._cache), "metadata/", fetcher=fetcher, config=_CONFIG, bootstrap=self._bootstrap)
            # TUF 5.1: one fixed time for the whole workflow. There is no public way to say which clock.
            updater._trusted_set.reference_time = datetime.fromtimestamp(self._now(), timezone.utc)
            updater.refresh()
            view = self._view(self._has_planner(updater))
            newest = updater._trusted_set.root.version
            if view.root.version != newest:  # else older keys would judge what newer ones were to
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
        """Bring the planner's metadata up to date. One that cannot be believed is no reason to refuse releases."""
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

    def _view(self, has_planner: bool) -> _View:
        """What the cache holds right after a successful refresh: all of it was just verified."""
        files = (TARGETS_FILE, PLANNER_FILE) if has_planner else (TARGETS_FILE,)
        proof = {**self._cached_roots(), **{name: (self._cache / name).read_bytes() for name in files}}
        chain = verify_chain(proof, self._bootstrap)
        timestamp = _parse((self._cache / "timestamp.json").read_bytes(), Timestamp, chain.root, "timestamp.json")
        snapshot = _parse((self._cache / "snapshot.json").read_bytes(), Snapshot, chain.root, "snapshot.json")
        return _View(chain.root, timestamp, snapshot, chain.targets, chain.planner, proof)

    def _cached_roots(self) -> dict[str, bytes]:
        """The roots from the bootstrap on, as far as they verify: a spoiled file beyond the newest is no root."""
        root = _parse(self._bootstrap, Root, None, "the bootstrap root")
        found = {root_file(root.version): self._bootstrap}
        while True:
            name = root_file(root.version + 1)
            try:
                raw = (self._cache / "root_history" / name).read_bytes()
                root = _next_root(raw, root)
            except (OSError, TrustError):
                return found
            found[name] = raw


_CONFIG = UpdaterConfig(
    max_root_rotations=1_024,  # counted from the root in the image; each must be signed, so this bounds no attacker
    max_delegations=1,  # targets and what it delegates; nobody delegates further
    root_max_length=512_000,
    timestamp_max_length=16_384,
    snapshot_max_length=2_000_000,
    targets_max_length=LIMITS.metadata_bytes,
    prefix_targets_with_hash=False,
)


class _Fetcher(FetcherInterface):
    """TUF's view of our `fetch`. Never more bytes than TUF allows; the cause of a failure is kept."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch_bytes = fetch
        self.failure: EdgeError | None = None

    def _fetch(self, url: str) -> Iterator[bytes]:
        raise NotImplementedError("metadata is fetched whole, through download_bytes")

    def download_bytes(self, url: str, max_length: int) -> bytes:
        """The file at `url`, at most `max_length` bytes."""
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


def _fetched(release: str, chain: Chain, fetch: Fetch) -> bytes:
    """The manifest of that release as the chain lists it, the recut's under the planner's name."""
    by_planner = chain.planner.targets if chain.is_recut(release) and chain.planner else None
    path = target_path(release) if by_planner is None else recut_path(release)
    target = (chain.targets.targets if by_planner is None else by_planner).get(path)
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


def _fetched_anatomy(signed: AnatomyFile, fetch: Fetch) -> bytes:
    """The anatomy's bytes; whether they are those that were signed is looked at with the recut."""
    try:
        return fetch(f"targets/{anatomy_path(signed.sha256)}", signed.bytes)
    except FileNotFoundError as error:
        raise LinkError(f"the anatomy {signed.sha256[:12]} is not there (yet)") from error


def _director_keys(targets: Targets) -> tuple[str, ...]:
    return tuple(sorted(targets.get_delegated_role(DIRECTOR).keyids))


def _encode_proof(proof: Proof) -> bytes:
    return msgspec.json.encode({name: raw.decode() for name, raw in proof.items()}, order="deterministic")


def _decode_proof(raw: bytes) -> dict[str, bytes]:
    return {name: text.encode() for name, text in msgspec.json.decode(raw, type=dict[str, str]).items()}


settle(__name__)
