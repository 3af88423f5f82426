"""Trust store of a device: the files of its verified TUF metadata, and of the newest versions ever seen.

Nothing is installed unless root, timestamp, snapshot, targets, manifest and statement verify, none is older than the
newest ever seen, and none has expired; an installed release may be kept after expiry. `LinkError` means retry,
`TrustError` means reject. The store survives a power cut at any moment: python-tuf's cache is only a cache (it never
fsyncs), and our own record and proof are written durably beside it. The rules are in `trust.verification` and
`trust.metadata_set`; fetching is left to a callable; chunks are verified elsewhere by the digests in the manifest.

    <folder>/cache/         python-tuf's cache; deleted when it cannot be used
    <folder>/counters.json  `RollbackRecord`
    <folder>/proof.json     metadata files that prove what was accepted last
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from tuf.api.exceptions import (
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    RepositoryError,
)
from tuf.api.metadata import Root
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from edgesplit import identifiers
from edgesplit.atomic_files import make_folders, remove, write_durably
from edgesplit.errors import EdgeError, Expired, LinkError, TrustError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.remote_inference import InferenceJob
from edgesplit.release.manifest import FingerprintFile, Statement, decode_manifest
from edgesplit.trust import verification
from edgesplit.trust.metadata_set import RollbackRecord, TrustedMetadata
from edgesplit.trust.verification import BASE_FILE, FINGERPRINT_FILE, PLANNER_FILE, TARGETS_FILE, Proof, TrustChain

Fetch = Callable[[str, int], bytes]
"""`fetch(path, max_bytes)` of "metadata/…" or "targets/…"; FileNotFoundError if it does not exist, LinkError if the
transfer fails."""

_log = logging.getLogger(__name__)


class TrustStore:
    """The trusted metadata of one device, stored in `folder`. Thread-safe; one store per folder.

    `bootstrap_root` came with the claim or with the system image; it is the permanent trust anchor.
    """

    def __init__(self, folder: Path, bootstrap_root: bytes, *, now: Callable[[], float] = time.time) -> None:
        verification.parse_verified(bootstrap_root, Root, None, "the bootstrap root")
        self._cache = folder / "cache"
        self._record_file = folder / "counters.json"
        self._proof_file = folder / "proof.json"
        self._bootstrap = bootstrap_root
        self._now = now
        self._refresh_lock = threading.Lock()
        """Held during network access; `_lock` never is, so that a statement can be verified at the same time."""
        self._lock = threading.RLock()
        self._record = self._load_record()
        self._trusted: TrustedMetadata | None = None

    def refresh(self, fetch: Fetch) -> None:
        """Update the metadata. On TrustError or LinkError the previous trusted state remains."""
        with self._refresh_lock:
            refreshed = self._refresh_tuf(fetch)
            with self._lock:
                # Order matters for a power cut: the rollback record is durable before the proof, and both before they
                # are used, so that nothing older can be accepted after a restart.
                trusted, record = self._record.accept(refreshed)
                self._write_record(record)
                if self._trusted is None or trusted.proof != self._trusted.proof:
                    write_durably(self._proof_file, _encode_proof(trusted.proof))
                self._trusted = trusted

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
            trusted, now = self._stored_or_refreshed(), self._now()
            trusted.require_fresh(now)
            chain, proof = trusted.chain, trusted.proof_of(release, now)
        raw = _fetch_manifest(release, chain, fetch)
        if PLANNER_FILE in proof:
            recut = decode_manifest(raw)
            verification.require_base(recut)
            proof[BASE_FILE] = _fetch_manifest(recut.recut_of, TrustChain(chain.root, chain.targets), fetch)
            base = decode_manifest(proof[BASE_FILE])
            if base.fingerprint is not None:
                proof[FINGERPRINT_FILE] = _fetch_fingerprint(base.fingerprint, fetch)
        verification.verify_release(raw, proof, self._bootstrap)
        return raw, proof

    def verify_statement(self, raw: bytes, device: str, *, for_install: bool) -> Statement:
        """Verify a statement of the director: it must be for `device` and not older than the newest accepted one.

        With `for_install`, statement and metadata must not have expired; without, an expired one may be kept. The
        counter is on disk when this returns.
        """
        with self._lock:
            trusted, now = self._stored_or_refreshed(), self._now()
            statement, record = self._record.accept_statement(raw, device, trusted, now, for_install=for_install)
            self._write_record(record)
            return statement

    def verify_inference_job(self, raw: bytes, device: str) -> InferenceJob:
        """Verify a remote inference: signed by the director for `device`, by fresh metadata (LinkError or Expired where
        it is not), and not expired. That it runs once is for the caller to ensure."""
        with self._lock:
            trusted, now = self._stored_or_refreshed(), self._now()
            trusted.require_fresh(now)
            job = verification.verify_inference_job(raw, device, trusted.chain.targets)
            if job.expires <= now:
                raise Expired("the request expired before it was run, or this device's clock is ahead")
            return job

    def proof(self) -> dict[str, bytes]:
        """The files with which `verify_manifest` and `verify_statement_offline` can repeat the verification without a
        network."""
        with self._lock:
            return dict(self._stored_or_refreshed().without_planner().proof)

    # Stored trust

    def _stored_or_refreshed(self) -> TrustedMetadata:
        """Result of the last refresh, in this process or in an earlier one; LinkError if there never was one."""
        if self._trusted is None:
            self._trusted = self._load_proof()
        return self._trusted

    def _load_proof(self) -> TrustedMetadata:
        try:
            trusted = TrustedMetadata.from_proof(_decode_proof(self._proof_file.read_bytes()), self._bootstrap)
        except FileNotFoundError as error:
            raise LinkError("no metadata yet: refresh first") from error
        except (TrustError, OSError, ValueError) as error:
            raise LinkError(f"the stored metadata is corrupt ({error}): refresh first") from error
        try:
            self._record.refuse_rollback(trusted.marks)
        except TrustError as error:
            raise LinkError(f"the stored metadata is out of date ({error}): refresh first") from error
        return trusted

    def _load_record(self) -> RollbackRecord:
        try:
            return msgspec.json.decode(self._record_file.read_bytes(), type=RollbackRecord)
        except FileNotFoundError:
            return RollbackRecord()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            # The record is written durably, so the disk itself must have failed. A device that can never update again
            # is worse than one that once takes the versions of its verified cache as the newest seen.
            _log.error("%s is corrupt (%s): starting a new record", self._record_file, error)
            return RollbackRecord()

    def _write_record(self, record: RollbackRecord) -> None:
        if record != self._record:
            write_durably(self._record_file, msgspec.json.encode(record, order="deterministic"))
            self._record = record

    # TUF

    def _refresh_tuf(self, fetch: Fetch) -> TrustedMetadata:
        """Run TUF's client workflow with our cache; an unusable cache is deleted and rebuilt."""
        try:
            return self._run_tuf_client(fetch)
        except OSError as error:
            _log.warning("TUF cache %s: %s; starting it afresh", self._cache, error)
            remove(self._cache)
            return self._run_tuf_client(fetch)

    def _run_tuf_client(self, fetch: Fetch) -> TrustedMetadata:
        make_folders(self._cache)
        for leftover in self._cache.glob("tmp*"):  # temporary files of python-tuf, left by a power cut
            leftover.unlink(missing_ok=True)
        fetcher = _Fetcher(fetch)
        try:
            updater = Updater(str(self._cache), "metadata/", fetcher=fetcher, config=_CONFIG, bootstrap=self._bootstrap)
            # TUF 5.1: one fixed time for the whole workflow. There is no public way to say which clock.
            updater._trusted_set.reference_time = datetime.fromtimestamp(self._now(), timezone.utc)
            updater.refresh()
            refreshed = self._read_cache(self._has_planner(updater))
            newest, root = updater._trusted_set.root.version, refreshed.chain.root
            if root.version != newest:  # otherwise older keys would verify what newer ones should
                raise TrustError(
                    f"{verification.root_file(root.version + 1)}: not a root that may follow, of {newest} in all"
                )
            return refreshed
        except DownloadLengthMismatchError as error:
            raise TrustError(f"metadata larger than allowed: {error}") from error
        except DownloadError as error:
            raise (fetcher.failure or LinkError(f"fetching metadata: {error}")) from error
        except ExpiredMetadataError as error:
            raise Expired(f"metadata has expired, or this clock is wrong: {error}") from error
        except RepositoryError as error:
            raise TrustError(f"metadata: {error}") from error
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise TrustError(f"metadata that python-tuf cannot process: {error!r}") from error

    def _has_planner(self, updater: Updater) -> bool:
        """Update the planner's metadata; True if it verifies. A failure does not block releases that the release key
        signed."""
        try:
            updater.get_targetinfo(verification.recut_path("0" * 64))
            return (self._cache / PLANNER_FILE).is_file() and verification.PLANNER in updater._trusted_set
        except DownloadLengthMismatchError as error:
            _log.warning("the planner's metadata is larger than allowed (%s): no recut is installed", error)
        except DownloadHTTPError as error:
            _log.warning("the planner's metadata is missing (%s): no recut is installed", error)
        except DownloadError:
            raise
        except RepositoryError as error:
            _log.warning("the planner's metadata is not trusted (%s): no recut is installed", error)
        return False

    def _read_cache(self, has_planner: bool) -> TrustedMetadata:
        """Read the cache right after a successful refresh, which has just verified all of it."""
        files = (TARGETS_FILE, PLANNER_FILE) if has_planner else (TARGETS_FILE,)
        proof = {**self._cached_roots(), **{name: (self._cache / name).read_bytes() for name in files}}
        timestamp, snapshot = ((self._cache / f"{role}.json").read_bytes() for role in ("timestamp", "snapshot"))
        return TrustedMetadata.from_refresh(proof, timestamp, snapshot, self._bootstrap)

    def _cached_roots(self) -> dict[str, bytes]:
        """The cached roots from the bootstrap root on, as far as they verify: a damaged file after the newest root is
        ignored."""
        root = verification.parse_verified(self._bootstrap, Root, None, "the bootstrap root")
        roots = {verification.root_file(root.version): self._bootstrap}
        while True:
            name = verification.root_file(root.version + 1)
            try:
                raw = (self._cache / "root_history" / name).read_bytes()
                root = verification.next_root(raw, root)
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
    path, target = chain.listed_manifest(release)
    try:
        raw = fetch(f"targets/{path}", target.length)
    except FileNotFoundError as error:
        raise LinkError(f"the manifest of release {release[:12]} is not there (yet)") from error
    verification.check_target(raw, release, target)
    return raw


def _fetch_fingerprint(signed: FingerprintFile, fetch: Fetch) -> bytes:
    """Fetch a fingerprint. Its digest is checked with the recut."""
    try:
        return fetch(f"targets/{verification.fingerprint_path(signed.sha256)}", signed.bytes)
    except FileNotFoundError as error:
        raise LinkError(f"the fingerprint {signed.sha256[:12]} is not there (yet)") from error


def _encode_proof(proof: Proof) -> bytes:
    return msgspec.json.encode({name: raw.decode() for name, raw in proof.items()}, order="deterministic")


def _decode_proof(raw: bytes) -> dict[str, bytes]:
    return {name: text.encode() for name, text in msgspec.json.decode(raw, type=dict[str, str]).items()}
