"""What a device believes: TUF metadata for releases, the director's signed statement for what this device shall run.

Promises: nothing is installed unless root, timestamp, snapshot, targets, manifest and statement verify, none is older
than the newest ever seen, and none has expired; what already runs may be kept after expiry. `LinkError` means try
again, `TrustError` means believe nothing. A power cut at any moment leaves a store that works: python-tuf's cache is
only a cache (it never fsyncs), and our own record and proof are written durably beside it.
Leaves to others: fetching (a callable), and the chunks, whose digests the manifest names.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
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
from tuf.api.metadata import Metadata, Root, Snapshot, Targets, Timestamp
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from edgesplit import names
from edgesplit.durable import make_folders, write_durably
from edgesplit.errors import EdgeError, Expired, LinkError, MalformedMessage, TrustError
from edgesplit.limits import LIMITS
from edgesplit.messages import decode
from edgesplit.release import Manifest, Signed, Statement, decode_manifest, release_digest

DIRECTOR = "director"
"""The delegated role whose key signs statements. It has no metadata file, and no say in what a release is."""
TARGETS_FILE = "targets.json"
SIGNATURES = 16
"""No statement needs more."""

Fetch = Callable[[str, int], bytes]
"""`fetch(path, max_bytes)` of "metadata/…" or "targets/…"; FileNotFoundError if there is none, LinkError on the way."""
Proof = Mapping[str, bytes]
"""Metadata files that prove a manifest without a network: `N.root.json` up to the newest root, and `targets.json`."""

_Role = TypeVar("_Role", Root, Timestamp, Snapshot, Targets)
_log = logging.getLogger("edgesplit.trust")


def target_path(release: str) -> str:
    """The TUF target of a release."""
    return f"releases/{release}.json"


def root_file(version: int) -> str:
    """The name of that version of the root."""
    return f"{version}.root.json"


# Without a network: pure functions over bytes


def verify_manifest(raw_manifest: bytes, proof: Proof, bootstrap_root: bytes) -> Manifest:
    """The manifest in these bytes, if the targets role of the root we trust vouches for exactly them.

    Expiry is not looked at: keeping what was installed is always allowed.
    """
    check_listed(raw_manifest, release_digest(raw_manifest), verify_chain(proof, bootstrap_root).targets)
    return decode_manifest(raw_manifest)


def verify_statement_offline(raw: bytes, device: str, proof: Proof, bootstrap_root: bytes) -> Statement:
    """The statement in `raw`, if the director vouches for it and it is for `device`. Neither expiry nor counter is
    looked at: it was accepted before, and is only kept."""
    return _verified_statement(raw, device, verify_chain(proof, bootstrap_root).targets)


@dataclass(frozen=True, slots=True)
class Chain:
    """The newest root and targets that the bootstrap root leads to."""

    root: Root
    targets: Targets


def verify_chain(proof: Proof, bootstrap_root: bytes) -> Chain:
    """Follow the roots in `proof` from the bootstrap on, then the targets role. TrustError where a link is missing."""
    root = _parse(bootstrap_root, Root, None, "the bootstrap root")
    while (raw := proof.get(root_file(root.version + 1))) is not None:
        root = _next_root(raw, root)
    if TARGETS_FILE not in proof:
        raise TrustError("the proof has no targets.json")
    return Chain(root, _parse(proof[TARGETS_FILE], Targets, root, TARGETS_FILE))


def _next_root(raw: bytes, root: Root) -> Root:
    """The root that follows `root`, signed by the keys of both."""
    newer = _parse(raw, Root, root, root_file(root.version + 1))
    if newer.version != root.version + 1:
        raise TrustError(f"root {root.version + 1} says it is version {newer.version}")
    return newer


def _parse(raw: bytes, kind: type[_Role], delegator: Root | None, what: str) -> _Role:
    """Metadata of that kind, signed as `delegator` demands (a root also as it demands itself)."""
    if len(raw) > LIMITS.metadata_bytes:
        raise TrustError(f"{what}: {len(raw)} bytes, at most {LIMITS.metadata_bytes}")
    try:
        metadata: Metadata[Any] = Metadata.from_bytes(raw)
        signed = metadata.signed
        if not isinstance(signed, kind):
            raise TrustError(f"{what}: not {kind.type} metadata")
        for judge in (delegator, signed if isinstance(signed, Root) else None):
            if judge is not None:
                judge.verify_delegate(kind.type, metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError, TypeError, KeyError) as error:
        raise TrustError(f"{what}: {error}") from error
    return signed


def check_listed(raw_manifest: bytes, release: str, targets: Targets) -> None:
    """These bytes are what `targets` calls that release, else TrustError."""
    target = targets.targets.get(target_path(release))
    if target is None:
        raise TrustError(f"release {release[:12]} is not one that the release key signed")
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
    proof: dict[str, bytes]

    @property
    def expires(self) -> float:
        """When the first of its parts expires, Unix seconds."""
        return min(role.expires.timestamp() for role in (self.root, self.timestamp, self.snapshot, self.targets))

    def marks(self) -> dict[str, Mark]:
        """The version of each role under the keys that signed it."""
        return _marks(self.root, self.root, self.timestamp, self.snapshot, self.targets)


def _marks(root: Root, *roles: Root | Timestamp | Snapshot | Targets) -> dict[str, Mark]:
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
            self._refuse_older(view.marks())
            self._write_record(Record({**self._record.roles, **view.marks()}, self._record.statements))
            if view.proof != self._proof:
                write_durably(self._proof_file, _encode_proof(view.proof))
            self._proof, self._chain = view.proof, Chain(view.root, view.targets)
            self._fresh_until = view.expires

    def manifest(self, release: str, fetch: Fetch) -> bytes:
        """The bytes of that release's manifest, verified; for installing, so the metadata must be fresh."""
        names.sha256_hex(release)
        with self._lock:
            self._require_fresh()
            targets = self._trusted().targets
        target = targets.targets.get(target_path(release))
        if target is not None and target.length > LIMITS.manifest_bytes:
            raise TrustError(
                f"manifest of release {release[:12]}: {target.length} bytes, at most {LIMITS.manifest_bytes}"
            )
        try:
            raw = fetch(f"targets/{target_path(release)}", target.length) if target is not None else b""
        except FileNotFoundError as error:
            raise LinkError(f"the manifest of release {release[:12]} is not there (yet)") from error
        check_listed(raw, release, targets)
        return raw

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
            return dict(self._proof)

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
            self._refuse_older(_marks(chain.root, chain.root, chain.targets))
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
            _remove(self._cache)
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
            return self._view()
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

    def _view(self) -> _View:
        """What the cache holds right after a successful refresh: all of it was just verified."""
        proof = {**self._cached_roots(), TARGETS_FILE: (self._cache / TARGETS_FILE).read_bytes()}
        chain = verify_chain(proof, self._bootstrap)
        timestamp = _parse((self._cache / "timestamp.json").read_bytes(), Timestamp, chain.root, "timestamp.json")
        snapshot = _parse((self._cache / "snapshot.json").read_bytes(), Snapshot, chain.root, "snapshot.json")
        return _View(chain.root, timestamp, snapshot, chain.targets, proof)

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
    max_root_rotations=64,
    max_delegations=4,
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


def _director_keys(targets: Targets) -> tuple[str, ...]:
    return tuple(sorted(targets.get_delegated_role(DIRECTOR).keyids))


def _encode_proof(proof: Proof) -> bytes:
    return msgspec.json.encode({name: raw.decode() for name, raw in proof.items()}, order="deterministic")


def _decode_proof(raw: bytes) -> dict[str, bytes]:
    return {name: text.encode() for name, text in msgspec.json.decode(raw, type=dict[str, str]).items()}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
