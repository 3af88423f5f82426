"""What a device trusts. Each test is an attack or a fault, and the one thing it must not achieve."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import DownloadHTTPError
from tuf.api.metadata import Metadata, Root
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from edgesplit.errors import EdgeError, LinkError, MalformedMessage, TrustError
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.remote_inference import BodyHead, InferenceJob
from edgesplit.release.manifest import Signature, Signed, Statement
from edgesplit.trust.identity import load_or_make_key
from edgesplit.trust.store import TrustStore
from edgesplit.trust.verification import target_path, verify_manifest, verify_statement_offline
from edgesplit_controller.tuf import key_folder
from edgesplit_controller.tuf.repository import Repository
from support.signed_repository import DAY, DEVICE, START, TrustHarness, refreshed, sample_release


@pytest.fixture()
def harness(tmp_path: Path) -> TrustHarness:
    return TrustHarness(tmp_path)


def flipped(raw: bytes, at: int, bit: int = 0) -> bytes:
    bad = bytearray(raw)
    bad[at] ^= 1 << bit
    return bytes(bad)


# The way it is meant


def test_signed_release_is_accepted(harness: TrustHarness) -> None:
    """Refresh, statement, manifest: what the repository signed is what the device gets, and verifies again offline."""
    digest = harness.add()
    store = refreshed(harness)

    raw_statement = harness.state(counter=7, digest=digest)
    statement = store.verify_statement(raw_statement, DEVICE, for_install=True)
    raw = store.manifest(statement.releases[0].release, harness.fetch)

    assert raw == sample_release()[0]
    assert verify_manifest(raw, store.proof(), harness.bootstrap).model == "tiny@1"
    assert verify_statement_offline(raw_statement, DEVICE, store.proof(), harness.bootstrap) == statement
    assert verify_manifest(raw, harness.repository.proof(digest), harness.bootstrap).model == "tiny@1"


def test_refresh_without_changes_fetches_two_small_files(harness: TrustHarness) -> None:
    """A warm refresh fetches the next root (there is none) and the timestamp, nothing else."""
    store = refreshed(harness)
    harness.fetched.clear()

    store.refresh(harness.fetch)

    assert harness.fetched == ["metadata/2.root.json", "metadata/timestamp.json"]


def test_restart_without_a_network_keeps_the_statement(harness: TrustHarness) -> None:
    """The stored statement is verified by the stored proof; nothing new is installed."""
    digest = harness.add()
    raw = harness.state(counter=7, digest=digest)
    refreshed(harness).verify_statement(raw, DEVICE, for_install=True)

    restarted = harness.store()

    assert restarted.verify_statement(raw, DEVICE, for_install=False).counter == 7
    assert restarted.proof().keys() == {"1.root.json", "targets.json"}
    for forbidden in (
        lambda: restarted.verify_statement(raw, DEVICE, for_install=True),
        lambda: restarted.manifest(digest, harness.fetch),
    ):
        with pytest.raises(LinkError, match="refresh"):
            forbidden()


def test_statement_is_verified_while_a_refresh_waits(harness: TrustHarness) -> None:
    """The thread that brings the metadata may also bring a statement: neither waits for the other."""
    store = refreshed(harness)
    raw = harness.state(counter=5)
    judged: list[int] = []

    def fetch(path: str, most: int) -> bytes:
        other = threading.Thread(
            target=lambda: judged.append(store.verify_statement(raw, DEVICE, for_install=True).counter)
        )
        other.start()
        other.join(10.0)
        return harness.fetch(path, most)

    store.refresh(fetch)
    assert judged == [5, 5]


def test_new_device_without_a_network_gets_a_link_error(harness: TrustHarness) -> None:
    """With no metadata yet the error is the link's, and a retry may succeed."""
    with pytest.raises(LinkError):
        harness.store().verify_statement(harness.state(counter=1), DEVICE, for_install=False)


def test_standard_tuf_client_finds_releases(harness: TrustHarness, tmp_path: Path) -> None:
    """The director's delegation has no metadata file, and no TUF client ever requests one."""
    path = target_path(harness.add())
    config = UpdaterConfig(prefix_targets_with_hash=False)
    updater = Updater(
        str(tmp_path / "plain"), "metadata/", fetcher=Plain(harness), config=config, bootstrap=harness.bootstrap
    )
    # a plain client has the real clock: let the metadata's be the same
    updater._trusted_set.reference_time = datetime.fromtimestamp(harness.now, timezone.utc)

    found = updater.get_targetinfo(path)

    assert found is not None and found.path == path
    assert updater.get_targetinfo(target_path("0" * 64)) is None
    assert not [path for path in harness.fetched if "director" in path]


class Plain(FetcherInterface):
    """What python-tuf asks of any transport."""

    def __init__(self, harness: TrustHarness) -> None:
        self._world = harness

    def _fetch(self, url: str) -> Any:
        try:
            return iter([self._world.fetch(url, 0)])
        except FileNotFoundError as error:
            raise DownloadHTTPError(url, 404) from error


# Statements


def test_statement_of_another_device_is_refused(harness: TrustHarness) -> None:
    """C2: a statement signed for one device is valid for no other."""
    store = refreshed(harness)
    with pytest.raises(TrustError, match="for device 'cam-2'"):
        store.verify_statement(harness.state("cam-2", counter=9), DEVICE, for_install=True)
    assert store.verify_statement(harness.state(counter=1), DEVICE, for_install=True).counter == 1


def test_replayed_older_statement_is_refused(harness: TrustHarness) -> None:
    """C3: what was signed before is not accepted again, not even after a restart; the newest may be repeated."""
    store = refreshed(harness)
    old, new = harness.state(counter=5), harness.state(counter=6)
    store.verify_statement(new, DEVICE, for_install=True)

    for device in (store, harness.store()):
        assert device.verify_statement(new, DEVICE, for_install=False).counter == 6
        with pytest.raises(TrustError, match="older than 6"):
            device.verify_statement(old, DEVICE, for_install=False)


def test_refused_statement_raises_no_counter(harness: TrustHarness) -> None:
    """A statement that is refused for another reason does not block the genuine one."""
    store = refreshed(harness)
    with pytest.raises(TrustError):
        store.verify_statement(harness.state(counter=99, lasts_s=-1), DEVICE, for_install=True)
    assert store.verify_statement(harness.state(counter=3), DEVICE, for_install=True).counter == 3


def test_every_flipped_bit_in_a_statement_is_refused(harness: TrustHarness) -> None:
    """Whatever bit changes on the way, the error is our own."""
    store = refreshed(harness)
    raw = harness.state(counter=5, digest="0" * 64)
    for at in range(len(raw)):
        with pytest.raises((TrustError, MalformedMessage)):
            store.verify_statement(flipped(raw, at, at % 8), DEVICE, for_install=False)


def test_truncated_statement_is_refused(harness: TrustHarness) -> None:
    """Each prefix of a good statement, and a good one with trailing bytes, is malformed."""
    store = refreshed(harness)
    raw = harness.state(counter=5)
    for bad in (*(raw[:length] for length in range(len(raw))), raw + b"\0", b"\0" * (LIMITS.message_bytes + 1)):
        with pytest.raises(MalformedMessage):
            store.verify_statement(bad, DEVICE, for_install=False)


def resigned(harness: TrustHarness, change: Callable[[Signed], Signed]) -> bytes:
    return messages.encode(change(messages.decode(harness.state(counter=5), Signed)))


def stranger(signed: Signed) -> Signed:
    signer = CryptoSigner.generate_ed25519()
    made = signer.sign(signed.payload)
    return Signed(signed.payload, (Signature(made.keyid, made.signature),))


def borrowed_id(signed: Signed) -> Signed:
    made = CryptoSigner.generate_ed25519().sign(signed.payload)
    return Signed(signed.payload, (Signature(signed.signatures[0].keyid, made.signature),))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda signed: Signed(signed.payload, ()), "not signed"),
        (stranger, "not the director's"),
        (borrowed_id, "bad signature"),
        (lambda signed: Signed(signed.payload, (Signature(signed.signatures[0].keyid, ""),)), "bad signature"),
        (lambda signed: Signed(signed.payload, (Signature(signed.signatures[0].keyid, "zz"),)), "bad signature"),
        (lambda signed: Signed(signed.payload, signed.signatures * 2), "repeat"),
        (lambda signed: Signed(signed.payload, tuple(Signature(str(n), "") for n in range(99))), "too many"),
        (lambda signed: Signed(signed.payload + b" ", signed.signatures), "bad signature"),
    ],
)
def test_only_the_directors_signature_counts(
    harness: TrustHarness, change: Callable[[Signed], Signed], why: str
) -> None:
    """C10: stripped, foreign, borrowed, empty and repeated signatures are refused, each with its own reason."""
    store = refreshed(harness)
    with pytest.raises(TrustError, match=why):
        store.verify_statement(resigned(harness, change), DEVICE, for_install=False)


def inference_job(device: str = DEVICE, lasts_s: float = 60.0) -> InferenceJob:
    return InferenceJob(
        device=device, id="0" * 16, session=1, number=1, process=1, model="m", deadline_s=1.0,
        expires=int(START + lasts_s), body=BodyHead.of(b"q", None),
    )  # fmt: skip


def test_only_the_director_has_a_device_run_an_inference(harness: TrustHarness) -> None:
    """Signed for this device, by fresh metadata, not expired; a changed byte, another device's job and a job of the
    planner are refused."""
    store, repository = refreshed(harness), harness.repository
    raw = repository.sign_inference_job(inference_job())
    assert store.verify_inference_job(raw, DEVICE) == inference_job()
    payload = messages.encode(inference_job())
    planner = [signer.sign(payload) for signer in repository.keys.signers("planner")]
    by_planner = Signed(payload, tuple(Signature(part.keyid, part.signature) for part in planner))
    changed = msgspec.structs.replace(
        messages.decode(raw, Signed), payload=messages.encode(msgspec.structs.replace(inference_job(), model="n"))
    )
    for forged in (
        messages.encode(by_planner), messages.encode(changed), messages.encode(Signed(payload, ())),
        repository.sign_inference_job(inference_job("cam-2")),
        repository.sign_inference_job(inference_job(lasts_s=-1.0)),
    ):  # fmt: skip
        with pytest.raises(TrustError):
            store.verify_inference_job(forged, DEVICE)
    with pytest.raises(LinkError, match="refresh"):
        harness.store().verify_inference_job(raw, DEVICE)


def test_a_statement_is_no_inference_and_an_inference_no_statement(harness: TrustHarness) -> None:
    """One key signs both: neither decodes as the other."""
    store = refreshed(harness)
    with pytest.raises(MalformedMessage):
        store.verify_inference_job(harness.state(counter=7), DEVICE)
    with pytest.raises(MalformedMessage):
        raw = harness.repository.sign_inference_job(inference_job())
        store.verify_statement(raw, DEVICE, for_install=True)


@pytest.mark.parametrize("role", ["root", "targets", "snapshot", "timestamp"])
def test_other_roles_cannot_sign_statements(harness: TrustHarness, role: str) -> None:
    """Neither a stolen snapshot or timestamp key, nor even the release key."""
    store = refreshed(harness)
    signer = CryptoSigner(load_or_make_key(harness.folder / "repository" / "keys" / f"{role}.pem"))

    def by_role(signed: Signed) -> Signed:
        made = signer.sign(signed.payload)
        return Signed(signed.payload, (Signature(made.keyid, made.signature),))

    with pytest.raises(TrustError, match="not the director's"):
        store.verify_statement(resigned(harness, by_role), DEVICE, for_install=False)


def test_expired_statement_is_kept_and_installs_nothing(harness: TrustHarness) -> None:
    """What runs by an expired statement keeps running; nothing new is installed by it."""
    store = refreshed(harness)
    raw = harness.state(counter=5, lasts_s=60)
    harness.now += 61
    with pytest.raises(TrustError, match="expired"):
        store.verify_statement(raw, DEVICE, for_install=True)
    assert store.verify_statement(raw, DEVICE, for_install=False).counter == 5


# Metadata that goes back


def lose(*names: str) -> Callable[[Path], None]:
    """A fault: these files of the device are gone."""

    def fault(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    return fault


@pytest.mark.parametrize(
    "fault",
    [
        lose("cache/timestamp.json"),
        lose("cache/snapshot.json"),
        lose("cache/timestamp.json", "cache/snapshot.json"),
        lose("cache/timestamp.json", "cache/snapshot.json", "cache/targets.json"),
        lose("cache"),
        lose("cache", "proof.json"),
    ],
)
def test_older_metadata_is_refused_without_the_cache(harness: TrustHarness, fault: Callable[[Path], None]) -> None:
    """A6: python-tuf forgets versions with its cache; our own record does not. The genuine repository is still
    accepted."""
    harness.add(1)
    old = harness.backup()
    harness.now += 60
    newer = harness.add(2)
    refreshed(harness)
    fault(harness.folder / DEVICE)

    present = harness.repository
    harness.repository = Repository(old, now=harness.clock)
    restarted = harness.store()
    with pytest.raises(TrustError):
        restarted.refresh(harness.fetch)
    with pytest.raises(LinkError):
        restarted.manifest(newer, harness.fetch)

    harness.repository = present
    restarted.refresh(harness.fetch)
    assert restarted.manifest(newer, harness.fetch) == sample_release(2)[0]


def test_planted_older_proof_is_refused(harness: TrustHarness) -> None:
    """Our own stored proof may not be older than our record either."""
    raw = harness.state(counter=1)
    refreshed(harness)
    old = (harness.folder / DEVICE / "proof.json").read_bytes()
    harness.now += 60
    harness.add()
    refreshed(harness)
    (harness.folder / DEVICE / "proof.json").write_bytes(old)

    with pytest.raises(LinkError, match="older"):
        harness.store().verify_statement(raw, DEVICE, for_install=False)


def test_restored_repository_is_accepted(harness: TrustHarness) -> None:
    """F4: yesterday's backup signs versions above all that devices have seen since, because versions follow the
    clock."""
    saved = harness.backup()
    for version in range(1, 4):
        harness.now += 10
        harness.add(version)
    store = refreshed(harness)

    harness.now += 10
    harness.restore(saved)
    digest = harness.add(9)
    store.refresh(harness.fetch)

    assert store.manifest(digest, harness.fetch) == sample_release(9)[0]


# Expiry and clocks


def test_expired_metadata_installs_nothing_new(harness: TrustHarness) -> None:
    """C5, C7: a frozen timestamp ends installing after its week; what was installed still verifies."""
    digest = harness.add()
    raw_statement = harness.state(counter=5, digest=digest, lasts_s=30 * DAY)
    store = refreshed(harness)
    raw = store.manifest(digest, harness.fetch)
    harness.now += 8 * DAY

    with pytest.raises(TrustError, match="expired"):
        store.refresh(harness.fetch)
    with pytest.raises(TrustError, match="expired"):
        store.manifest(digest, harness.fetch)
    with pytest.raises(TrustError, match="expired"):
        store.verify_statement(raw_statement, DEVICE, for_install=True)
    assert store.verify_statement(raw_statement, DEVICE, for_install=False).counter == 5
    assert verify_manifest(raw, store.proof(), harness.bootstrap).model == "tiny@1"

    assert harness.repository.refresh_timestamp()
    store.refresh(harness.fetch)
    assert store.manifest(digest, harness.fetch) == raw


@pytest.mark.parametrize("years", [-10, 10])
def test_wrong_clock_keeps_the_running_release(harness: TrustHarness, years: int) -> None:
    """C8: ten years off either way; with the clock right again, everything is as before."""
    raw = harness.state(counter=5)
    refreshed(harness).verify_statement(raw, DEVICE, for_install=True)
    harness.now = START + years * 365 * DAY

    device = harness.store()
    assert device.verify_statement(raw, DEVICE, for_install=False).counter == 5
    if years > 0:
        with pytest.raises(TrustError):
            device.refresh(harness.fetch)

    harness.now = START
    device.refresh(harness.fetch)
    assert device.verify_statement(raw, DEVICE, for_install=True).counter == 5


def test_controller_renews_metadata_past_half_its_life(harness: TrustHarness) -> None:
    """And only that."""
    assert not harness.repository.refresh_timestamp()
    store = refreshed(harness)
    for _ in range(200):
        harness.now += 3 * DAY
        harness.repository.refresh_timestamp()
        store.refresh(harness.fetch)


# Bytes that are not what was signed


@pytest.mark.parametrize("name", ["timestamp", "snapshot", "targets", "releases"])
def test_flipped_bits_in_transit_install_nothing(harness: TrustHarness, name: str) -> None:
    """Anywhere in metadata or manifest."""
    digest = harness.add()
    length = len(next(raw for raw in served(harness, digest) if raw[0].find(name) >= 0)[1])
    for at in range(0, length, 7):
        store = TrustStore(harness.folder / f"{name}-{at}", harness.bootstrap, now=harness.clock)
        harness.twist = lambda path, raw, at=at: flipped(raw, at, at % 7) if name in path else raw  # type: ignore[misc]
        with suppress(EdgeError):  # a bit of the unsigned envelope may differ; what is signed may not
            store.refresh(harness.fetch)
            assert store.manifest(digest, harness.fetch) == sample_release()[0]
            assert name == "timestamp"  # everything else is bound by a hash


def served(harness: TrustHarness, digest: str) -> list[tuple[str, bytes]]:
    """What a cold device fetches."""
    seen: list[tuple[str, bytes]] = []
    store = TrustStore(harness.folder / "probe", harness.bootstrap, now=harness.clock)

    def fetch(path: str, max_bytes: int) -> bytes:
        raw = harness.repository.read(path)
        seen.append((path, raw))
        return raw

    store.refresh(fetch)
    store.manifest(digest, fetch)
    return seen


def test_forged_next_root_is_refused(harness: TrustHarness) -> None:
    """A root signed by a foreign key, without a signature, or with a flipped bit is not followed."""
    good = Metadata[Root].from_bytes(harness.bootstrap)
    good.signed.version = 2
    good.sign(CryptoSigner(load_or_make_key(harness.folder / "repository" / "keys" / "root.pem")))
    raw = good.to_bytes()
    stranger_signed = Metadata(good.signed)
    stranger_signed.sign(CryptoSigner.generate_ed25519())
    for bad in (
        stranger_signed.to_bytes(),
        Metadata(good.signed).to_bytes(),
        raw.replace(b"2035", b"2036"),
        b"{}",
        b"",
    ):
        device = TrustStore(harness.folder / "fresh", harness.bootstrap, now=harness.clock)
        with pytest.raises(TrustError):
            device.refresh(with_root(harness, bad))
    device.refresh(with_root(harness, raw))
    assert "2.root.json" in device.proof()


def with_root(harness: TrustHarness, raw: bytes) -> Callable[[str, int], bytes]:
    return lambda path, most: raw if path == "metadata/2.root.json" else harness.fetch(path, most)


def test_unlisted_release_is_refused(harness: TrustHarness) -> None:
    """The manifest of a release that the release key never signed is not even requested."""
    store = refreshed(harness)
    harness.fetched.clear()
    with pytest.raises(TrustError, match="not one that the release key signed"):
        store.manifest("0" * 64, harness.fetch)
    with pytest.raises(MalformedMessage):
        store.manifest("../../etc/passwd", harness.fetch)
    assert harness.fetched == []


def test_manifest_of_another_release_is_refused(harness: TrustHarness) -> None:
    """C4: one signed manifest does not pass for another."""
    first, second = harness.add(1), harness.add(2)
    store = refreshed(harness)
    harness.twist = lambda path, raw: raw if second in path or "metadata" in path else sample_release(2)[0]
    with pytest.raises(TrustError):
        store.manifest(first, harness.fetch)


@pytest.mark.parametrize("name", ["timestamp", "snapshot", "targets.json", "2.root", "releases"])
def test_oversized_answers_are_refused(harness: TrustHarness, name: str) -> None:
    """B8: more bytes than allowed are refused, and the transport is given the bound beforehand."""
    digest = harness.add()
    store = harness.store()
    bounds: list[int] = []

    def fetch(path: str, most: int) -> bytes:
        if name in path:
            bounds.append(most)
            return b" " * (most + 1)
        return harness.fetch(path, most)

    with pytest.raises(TrustError):
        store.refresh(fetch)
        store.manifest(digest, fetch)
    assert 0 < bounds[0] <= LIMITS.metadata_bytes


def test_deep_and_huge_metadata_is_refused(harness: TrustHarness) -> None:
    """Excessive nesting and numbers are refused, not crashed on."""
    for bomb in (
        b"[" * 10_000,
        b'{"signed":' * 5_000,
        b'{"signed": ' + b"9" * 10_000 + b"}",
        b"\xff\xfe",
        b"null",
        b"[]",
    ):
        harness.twist = lambda path, raw, bomb=bomb: bomb if "timestamp" in path else raw  # type: ignore[misc]
        with pytest.raises(TrustError):
            harness.store().refresh(harness.fetch)


@pytest.mark.parametrize("failure", [LinkError("gone"), FileNotFoundError(), TimeoutError("slow"), ConnectionError()])
def test_link_failure_is_a_link_error(harness: TrustHarness, failure: Exception) -> None:
    """Whatever the link does, a retry may succeed. What was trusted stays."""
    digest = harness.add()
    store = refreshed(harness)
    harness.now += 60
    harness.add(2)

    def broken(path: str, most: int) -> bytes:
        if "snapshot" in path:
            raise failure
        return harness.fetch(path, most)

    with pytest.raises(LinkError):
        store.refresh(broken)
    assert store.manifest(digest, harness.fetch) == sample_release()[0]


# Spoiled disks


ROOTS = ("root.json", "root_history/1.root.json", "root_history/2.root.json")
CACHED = (*ROOTS, "timestamp.json", "snapshot.json", "targets.json")


def spoilings() -> list[tuple[str, Callable[[Path], None]]]:
    def random_bytes(path: Path) -> None:
        path.write_bytes(bytes(range(256)) * 3)

    return [
        ("missing", lambda path: path.unlink()),
        ("empty", lambda path: path.write_bytes(b"")),
        ("cut", lambda path: path.write_bytes(path.read_bytes()[:100])),
        ("random", random_bytes),
        ("a folder", lambda path: (path.unlink(), path.mkdir())),  # type: ignore[arg-type,return-value]
    ]


@pytest.mark.parametrize("file", CACHED)
@pytest.mark.parametrize(("how", "spoil"), spoilings())
def test_corrupt_tuf_cache_recovers(harness: TrustHarness, file: str, how: str, spoil: Callable[[Path], None]) -> None:
    """A5: any file of TUF's cache missing, empty, cut or random: the next refresh repairs it."""
    refreshed(harness)
    harness.now += 60
    digest = harness.add(2)
    path = harness.folder / DEVICE / "cache" / file
    if not path.exists():
        path.write_bytes(b"{}")
    spoil(path)

    store = refreshed(harness)

    assert store.manifest(digest, harness.fetch) == sample_release(2)[0]


@pytest.mark.parametrize("file", ["proof.json", "counters.json"])
@pytest.mark.parametrize(("how", "spoil"), spoilings()[:4])
def test_corrupt_trust_files_recover(harness: TrustHarness, file: str, how: str, spoil: Callable[[Path], None]) -> None:
    """Our own files are written durably; should the disk corrupt them all the same, a refresh repairs them."""
    refreshed(harness).verify_statement(harness.state(counter=5), DEVICE, for_install=True)
    spoil(harness.folder / DEVICE / file)

    assert refreshed(harness).verify_statement(harness.state(counter=6), DEVICE, for_install=True).counter == 6


def test_counters_are_durable_before_a_statement_is_accepted(
    harness: TrustHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement whose counter cannot be written is not accepted."""
    store = refreshed(harness)

    def full(path: Path, data: bytes, mode: int = 0o644) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgesplit.trust.store.write_durably", full)
    with pytest.raises(OSError, match="space"):
        store.verify_statement(harness.state(counter=5), DEVICE, for_install=True)


# Keys that change


def rotate(harness: TrustHarness, *roles: str) -> None:
    """Root version 2, in which these roles have new keys; the repository's key folder knows them too."""
    folder = harness.folder / "repository"
    root = Metadata[Root].from_bytes((folder / "metadata" / "1.root.json").read_bytes())
    table = msgspec.json.decode((folder / "keys" / "keys.json").read_bytes())
    for role in roles:
        root.signed.revoke_key(root.signed.roles[role].keyids[0], role)
        (folder / "keys" / f"{role}.pem").unlink()
        table.pop(role)
    (folder / "keys" / "keys.json").write_bytes(msgspec.json.encode(table))
    ring = key_folder.KeyFolder(folder / "keys")
    for role in roles:
        root.signed.add_key(ring.signers(role)[0].public_key, role)
    root.signed.version = 2
    root.sign(ring.signers("root")[0])
    (folder / "metadata" / "2.root.json").write_bytes(root.to_bytes())


def test_fast_forward_attack_is_recovered_by_new_keys(harness: TrustHarness) -> None:
    """C6: a thief of the online keys signs versions years ahead; a root with new keys resets the versions."""
    honest = harness.backup()
    harness.now = START + 9 * 365 * DAY
    harness.repository.refresh_timestamp()
    harness.now = START
    refreshed(harness)

    harness.restore(honest)
    with pytest.raises(TrustError):
        refreshed(harness)
    rotate(harness, "timestamp", "snapshot", "targets")
    digest = harness.add()

    store = refreshed(harness)
    assert store.proof().keys() == {"1.root.json", "2.root.json", "targets.json"}
    assert store.manifest(digest, harness.fetch) == sample_release()[0]


def test_withheld_root_does_not_bring_back_old_keys(harness: TrustHarness) -> None:
    """Once a device has seen root 2, a broker that hides it cannot make the device trust root 1's keys again."""
    backup = harness.backup()
    rotate(harness, "timestamp")
    harness.now += 60
    harness.add()
    refreshed(harness)
    shutil.rmtree(harness.folder / DEVICE / "cache")

    harness.repository = Repository(backup, now=harness.clock)
    with pytest.raises(TrustError, match="root version 1 is older than 2"):
        refreshed(harness)


def test_statements_and_metadata_have_disjoint_formats(harness: TrustHarness) -> None:
    """What the director signs is MessagePack, what TUF signs is JSON: no bytes are both."""
    payload = messages.decode(harness.state(counter=5), Signed).payload
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(payload)
    signed = Metadata.from_bytes(harness.repository.read("metadata/timestamp.json")).signed_bytes
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.decode(signed, type=Statement)
