"""Content keys: wrapping per device class, lost secrets, and statements that carry the keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from edgesplit.crypto.key_wrapping import public_bytes, sign_encryption_key, unwrap
from edgesplit.errors import EdgeError, MalformedMessage, UsageError
from edgesplit.limits import LIMITS
from edgesplit.plan import Plan
from edgesplit.release.manifest import CompiledSlice, Manifest, Statement, decode_manifest, encode_manifest
from edgesplit.trust.identity import certificate_request, load_or_make_key
from edgesplit_controller.errors import Conflict, Unauthenticated
from edgesplit_controller.fleet.devices import ClaimRequest, Devices
from edgesplit_controller.model_registry.golden import GoldenPair
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.releases.content_keys import ContentKeys, check_key_ownership, load_or_make_content_keys
from edgesplit_controller.releases.director import Director
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Device, Model, ReleaseRow
from edgesplit_partitioner.slicing import CutSlice
from support.immediate_deployment import deploy
from support.signed_repository import sample_release
from support.slice_chunks import chunk_bytes

KEYS = ContentKeys(b"s" * 32)
OWN = X25519PrivateKey.generate()
PAIRS = [GoldenPair(b"a picture", b"its answer"), GoldenPair(b"another", b"and its answer")]
DIGEST = "ab" * 32


def plain_release() -> tuple[Manifest, list[CutSlice]]:
    """The sample release with a class that runs `head` alone, and one with an accelerator."""
    raw, chunks = sample_release()
    manifest = decode_manifest(raw)
    cut = [
        CutSlice(slice_, {file.name: [chunks[part.sha256] for part in file.chunks] for file in slice_.files})
        for slice_ in manifest.slices
    ]
    (both,) = manifest.plans.values()
    head_only = msgspec.structs.replace(both, device_class="tiny", rows=both.rows[:1])
    tpu = CutSlice(msgspec.structs.replace(cut[0].slice, name="tpu01"), cut[0].runs)
    compiled = CompiledSlice(tpu.slice, "coral", ("head",))
    coral = msgspec.structs.replace(head_only, device_class="coral")
    plans: dict[str, Plan] = {"pi4": both, "tiny": head_only, "coral": coral}
    return msgspec.structs.replace(manifest, plans=plans, compiled=(compiled,)), [*cut, tpu]


PLAIN, CUT = plain_release()
SEALED, CONTENTS, SEALED_PAIRS = KEYS.seal(PLAIN, CUT, PAIRS)


def device(device_class: str, name: str = "cam-1") -> Device:
    return Device(name=name, device_class=device_class, encryption_key=public_bytes(OWN))


def openable_by(device_class: str) -> set[str]:
    """What a device of that class can open."""
    keys = unwrap(KEYS.wrap_for_device(device(device_class), DIGEST, SEALED), OWN, "cam-1", DIGEST)
    names = [*(slice_.name for slice_ in SEALED.all_slices), "golden"]
    seals = [*(slice_.encryption for slice_ in SEALED.all_slices), SEALED.golden[0].encryption]
    assert len(set(keys)) == len(keys)
    return {name for name, seal in zip(names, seals, strict=True) if seal is not None and seal.key_id in keys}


def test_an_encrypted_release_is_encrypted_completely_and_valid() -> None:
    """Device slices, cloud slices, compiled ones and golden inputs; chunks match the manifest."""
    manifest = decode_manifest(encode_manifest(SEALED))
    assert all(part.encryption is not None for part in (*manifest.all_slices, *manifest.golden))
    chunks = chunk_bytes(CONTENTS)
    assert chunks.keys() == manifest.chunk_sizes().keys()
    clear = [data for part in CUT for data in part.files.values()] + [
        body for pair in PAIRS for body in (pair.request,)
    ]
    kept = b"".join([*chunks.values(), *(body for pair in SEALED_PAIRS for body in (pair.request, pair.response))])
    assert not any(data[:9] in kept for data in clear)
    assert KEYS.seal(PLAIN, CUT, PAIRS)[0] == SEALED


def test_each_device_class_gets_the_keys_of_its_slices_only() -> None:
    """A slice that only the cloud runs stays closed to a device, a compiled one to classes without the accelerator."""
    assert openable_by("pi4") == {"head", "tail", "golden"}
    assert openable_by("tiny") == {"head", "golden"}
    assert openable_by("coral") == {"head", "tpu01", "golden"}
    assert KEYS.wrap_for_device(device("unplanned"), DIGEST, SEALED) == b""
    assert KEYS.wrap_for_device(device("pi4"), DIGEST, PLAIN) == b""
    tail = SEALED.slice("tail").encryption
    assert tail is not None and set(KEYS.remote_keys(SEALED)) == {tail.key_id}


def test_a_device_without_an_encryption_key_is_named() -> None:
    """No content key can be wrapped for it, and the error has advice."""
    with pytest.raises(Conflict, match=r"cam-7.*--replace"):
        KEYS.wrap_for_device(Device(name="cam-7", device_class="pi4", encryption_key=b""), DIGEST, SEALED)


def test_a_regenerated_secret_is_detected_before_keys_are_wrapped(tmp_path: Path) -> None:
    """With the original secret back, the release opens again."""
    path = tmp_path / "content.key"
    first = load_or_make_content_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    sealed, _, _ = first.seal(PLAIN, CUT, PAIRS)
    backup = path.read_bytes()
    path.unlink()
    with pytest.raises(Conflict, match="restore it"):
        load_or_make_content_keys(path).wrap_for_device(device("pi4"), DIGEST, sealed)
    path.write_bytes(backup)
    assert load_or_make_content_keys(path).wrap_for_device(device("pi4"), DIGEST, sealed)
    path.write_bytes(backup[:-1])
    with pytest.raises(UsageError, match="corrupt"):
        load_or_make_content_keys(path)
    assert path.read_bytes() == backup[:-1]


def test_the_encryption_key_must_be_signed_by_the_requests_key(tmp_path: Path) -> None:
    """A key signed by another key, and an invalid request, are refused with the matching status."""
    own, thief = (load_or_make_key(tmp_path / name) for name in ("own", "thief"))
    csr = certificate_request(own, "cam-1").decode()
    public, signature = sign_encryption_key(OWN, own, csr)
    check_key_ownership(csr, public, signature)
    with pytest.raises(Unauthenticated):
        check_key_ownership(csr, public, sign_encryption_key(OWN, thief, csr)[1])
    with pytest.raises(MalformedMessage):
        check_key_ownership(csr, b"short", signature)
    with pytest.raises(UsageError):
        check_key_ownership("no request", public, signature)


# Statements


class DirectorHarness:
    """A director whose key wrapping each test sets."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder, self.now = folder, 1_000_000.0
        self.database = Database(database_url)
        self.devices = Devices(self.database, stale_after_s=10.0, now=lambda: self.now)
        self.authority = Authority(folder / "keys")
        self.signed: list[Statement] = []
        self.wrap: Callable[[Device, str], bytes] = lambda one, digest: one.encryption_key + digest[:4].encode()
        self.signature = b"signed"
        self.director = Director(
            self.database, self._sign, statement_s=1_000, now=lambda: self.now, wrap=lambda *told: self.wrap(*told)
        )
        with self.database.write() as session:
            session.add(
                Model(
                    name="m", version=1, sha256="", optimised_sha256="", bytes=0, input_text="", bindings={}, shown={},
                    created=0.0,
                )
            )  # fmt: skip
            session.flush()
            session.add(ReleaseRow(digest=DIGEST, model_id=1, created=0.0, options={}))

    def _sign(self, statement: Statement) -> bytes:
        self.signed.append(statement)
        return self.signature

    def enrol(self, name: str, key: bytes, hardware: str = "first", *, replace: bool = False) -> None:
        token, _ = self.devices.claim(ClaimRequest(device=name, device_class="pi4", replace=replace))
        csr = certificate_request(load_or_make_key(self.folder / f"{name}-{hardware}.key"), name)
        self.certificate = self.devices.enrol(token, csr, self.authority.sign_request, key).certificate

    def deploy(self, *names: str) -> None:
        deploy(self.database, self.director, DIGEST, "m@1", names)

    @property
    def keys(self) -> bytes:
        """In the newest statement."""
        return self.signed[-1].releases[0].keys


@pytest.fixture
def bench(tmp_path: Path, database_url: str) -> DirectorHarness:
    return DirectorHarness(tmp_path, database_url)


def test_statements_and_renewals_carry_wrapped_keys(bench: DirectorHarness) -> None:
    """Keys are wrapped at each signing, so that a renewed or repeated statement is complete."""
    bench.enrol("cam-1", b"1" * 32)
    bench.enrol("cam-2", b"2" * 32)
    bench.deploy("cam-1", "cam-2")
    assert [statement.releases[0].keys[:1] for statement in bench.signed] == [b"1", b"2"]
    bench.now += 600
    assert bench.director.renew() == ["cam-1", "cam-2"]
    assert [statement.releases[0].keys[:1] for statement in bench.signed[2:]] == [b"1", b"2"]


def test_replaced_hardware_gets_newly_wrapped_keys(bench: DirectorHarness) -> None:
    """As soon as the replacement enrols, under a higher counter; never again for the old hardware's key."""
    bench.enrol("cam-1", b"1" * 32)
    bench.deploy("cam-1")
    before = bench.signed[-1].counter
    bench.enrol("cam-1", b"N" * 32, "second", replace=True)
    assert bench.director.rewrap_keys("cam-1") is True
    assert bench.keys.startswith(b"N" * 32) and bench.signed[-1].counter > before
    bench.now += 600
    bench.director.renew()
    assert bench.keys.startswith(b"N" * 32)


def test_a_revoked_device_gets_no_content_keys(bench: DirectorHarness) -> None:
    """Neither by renewal nor by a deployment; its key is deleted."""
    bench.enrol("cam-1", b"1" * 32)
    bench.deploy("cam-1")
    bench.devices.revoke("cam-1")
    said = len(bench.signed)
    bench.now += 600
    assert bench.director.renew() == [] and bench.director.rewrap_keys("cam-1") is False
    with pytest.raises(Conflict):
        bench.deploy("cam-1")
    assert len(bench.signed) == said
    assert bench.devices.get("cam-1").encryption_key == b""


def test_a_renewed_certificate_keeps_the_encryption_key(bench: DirectorHarness) -> None:
    """Keys are wrapped for it under the new certificate as under the old."""
    bench.enrol("cam-1", b"1" * 32)
    bench.deploy("cam-1")
    csr = certificate_request(load_or_make_key(bench.folder / "next.key"), "cam-1")
    old = x509.load_pem_x509_certificate(bench.certificate)
    assert bench.devices.renew(old, csr, bench.authority.sign_request).certificate != bench.certificate
    assert bench.devices.get("cam-1").encryption_key == b"1" * 32
    bench.now += 600
    bench.director.renew()
    assert bench.keys.startswith(b"1" * 32)


def test_statements_without_keys_are_not_reissued_at_enrolment(bench: DirectorHarness) -> None:
    """A device that enrols again and runs nothing encrypted keeps its statement; an unknown device has none."""
    bench.wrap = lambda one, digest: b""
    bench.enrol("cam-1", b"1" * 32)
    bench.deploy("cam-1")
    said = len(bench.signed)
    assert bench.director.rewrap_keys("cam-1") is False and bench.director.rewrap_keys("nobody") is False
    assert len(bench.signed) == said


def test_missing_content_keys_do_not_block_other_renewals(bench: DirectorHarness) -> None:
    """A lost secret fails a deployment; a renewal only leaves the keys out, because devices have stored theirs."""
    bench.enrol("cam-1", b"1" * 32)
    bench.enrol("cam-2", b"2" * 32)
    bench.deploy("cam-1", "cam-2")

    def lost(one: Device, digest: str) -> bytes:
        if one.name == "cam-1":
            raise EdgeError("lost")
        return b"good"

    bench.wrap = lost
    bench.now += 600
    assert bench.director.renew() == ["cam-1", "cam-2"]
    assert [statement.releases[0].keys for statement in bench.signed[-2:]] == [b"", b"good"]
    with pytest.raises(EdgeError, match="lost"):
        bench.deploy("cam-1")


def test_an_oversized_statement_is_refused_without_effect(bench: DirectorHarness) -> None:
    """The error has advice; the device's statement is unchanged."""
    bench.enrol("cam-1", b"1" * 32)
    bench.deploy("cam-1")
    before = bench.devices.get("cam-1").counter
    bench.signature = bytes(LIMITS.message_bytes + 1)
    with pytest.raises(Conflict, match="fewer"):
        bench.deploy("cam-1")
    assert bench.devices.get("cam-1").counter == before and bench.devices.get("cam-1").statement == b"signed"
