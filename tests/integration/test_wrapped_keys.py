"""Content keys that are not for this agent: the running model keeps running, and the reported state says why."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from edgesplit.crypto.key_file import write_keys
from edgesplit.crypto.key_wrapping import public_bytes, wrap
from edgesplit.crypto.slice_encryption import ContentKey, encrypt_golden, encrypt_slice, needed_keys
from edgesplit.http1.server import Request, Response
from edgesplit.release import manifest
from edgesplit.release.manifest import DesiredRelease, GoldenExample
from edgesplit.trust.identity import EnrolmentRequest, decode_document
from support.agent_engine import EXPECTED, eventually
from support.small_controller import DEVICE, AgentProcess, SmallController, TinyRelease, chunk_of

SECRET = b"s" * 32
SEED = 20_260_722


class EncryptedRelease(TinyRelease):
    """The tiny release, every slice and the golden pair encrypted."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        plain = manifest.decode_manifest(self.raw)
        slices, chunks = [], {}
        for slice_ in plain.slices:
            sealed, files = encrypt_slice(slice_, {"graph.onnx": [self.chunks[slice_.files[0].sha256]]}, SECRET)
            slices.append(sealed)
            chunks.update({chunk_of(data).sha256: data for runs in files.values() for data in runs})
        pair = plain.golden[0]
        seal, bodies = encrypt_golden([self.chunks[pair.request.sha256], self.chunks[pair.response.sha256]], SECRET)
        chunks.update({chunk_of(body).sha256: body for body in bodies})
        golden = (GoldenExample(chunk_of(bodies[0]), chunk_of(bodies[1]), seal),)
        self.manifest = msgspec.structs.replace(plain, slices=tuple(slices), golden=golden)
        self.chunks, self.raw = chunks, manifest.encode_manifest(self.manifest)
        self.digest = manifest.release_digest(self.raw)
        ids = needed_keys(self.manifest, ["a", "b"])
        self.keys = {key_id: ContentKey.from_key_id(SECRET, key_id).secret for key_id in ids}


class KeyedController(SmallController):
    """A controller that also states wrapped content keys, good or bad."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.device_key = b""

    def _enrol(self, request: Request) -> Response:
        self.device_key = decode_document(bytes(request.body), EnrolmentRequest).encryption_key
        return super()._enrol(request)

    def deploy_with_keys(self, release: EncryptedRelease, wrapped: bytes) -> None:
        """Release it, and state it with these wrapped keys."""
        self.releases[release.digest] = release
        self.repository.add_release(release.raw)
        write_keys(self.store_remote_half(release), release.keys)
        self.state(DesiredRelease("tiny", release.digest, keys=wrapped))


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedController]:
    with KeyedController(tmp_path_factory.mktemp("controller")) as running:
        yield running


@pytest.fixture
def agent(controller: KeyedController, tmp_path: Path) -> Iterator[AgentProcess]:
    controller.received.clear()
    with AgentProcess(controller, tmp_path) as process:
        yield process


def failure(controller: SmallController, counter: int) -> str:
    """Detail of the failed model that the device reports under that statement; empty where it reports none."""
    reported = controller.reported()
    if reported is None or reported.statement_counter != counter:
        return ""
    return next((model.detail for model in reported.models if model.state == "failed"), "")


def bad_keys(release: EncryptedRelease, device_key: bytes) -> dict[str, tuple[bytes, str]]:
    """Wrapped keys that must not count, with what the reported detail says of each."""
    good = wrap(release.keys, device_key, DEVICE, release.digest)
    ids = list(release.keys)
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    at = rng.randrange(len(good))
    swapped = dict(zip(ids, [release.keys[key_id] for key_id in [*ids[1:], ids[0]]], strict=True))
    elsewhere = public_bytes(X25519PrivateKey.generate())
    return {
        "none at all": (b"", "no content keys came"),
        "another device's": (wrap(release.keys, elsewhere, DEVICE, release.digest), "not wrapped for this device"),
        "for another name": (wrap(release.keys, device_key, "cam-2", release.digest), "not wrapped for this device"),
        "of another release": (wrap(release.keys, device_key, DEVICE, "0" * 64), "not wrapped for this device"),
        "cut short": (good[:-1], "not wrapped for this device"),
        "one bit flipped": (good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :], "not wrapped for this device"),
        "one missing": (
            wrap({key: release.keys[key] for key in ids[1:]}, device_key, DEVICE, release.digest), "1 of 3 content keys"
        ),
        "swapped": (wrap(swapped, device_key, DEVICE, release.digest), "3 of 3 content keys"),
        "of another installation": (
            wrap(dict.fromkeys(ids, b"x" * 32), device_key, DEVICE, release.digest), "3 of 3 content keys"
        ),
    }  # fmt: skip


def test_bad_wrapped_keys_are_reported_and_change_nothing(controller: KeyedController, agent: AgentProcess) -> None:
    """Each kind of bad keys: no chunk is fetched for them, the model before goes on answering, the reported state says
    why; and good keys in the next statement make it run."""
    before = TinyRelease(1)
    controller.deploy(before)
    agent.start()
    eventually("the model before runs", lambda: agent.is_running(before), 60)
    release = EncryptedRelease(2)
    for name, (wrapped, why) in bad_keys(release, controller.device_key).items():
        controller.chunks_sent.clear()
        controller.deploy_with_keys(release, wrapped)
        eventually(f"keys {name} are reported", lambda: failure(controller, controller.counter), 60)
        assert why in failure(controller, controller.counter), name
        assert not set(controller.chunks_sent) & set(release.chunks), name
        answer = agent.infer()
        assert np.array_equal(answer.outputs["y"], EXPECTED) and answer.report.release == before.digest

    controller.deploy_with_keys(release, wrap(release.keys, controller.device_key, DEVICE, release.digest))
    eventually("it runs with its keys", lambda: agent.is_running(release), 60)
    answer = agent.infer()
    assert np.array_equal(answer.outputs["y"], EXPECTED) and answer.report.release == release.digest


def test_running_release_is_decrypted_after_a_restart_although_a_newer_statement_names_another(
    controller: KeyedController, agent: AgentProcess
) -> None:
    """The newest statement on disk speaks of a release that never came: after a restart without network what ran before
    is opened by the keys kept beside it; nothing of it lies on the disk in clear."""
    release, never = EncryptedRelease(3), EncryptedRelease(4)
    agent.start()
    controller.deploy_with_keys(release, wrap(release.keys, controller.device_key, DEVICE, release.digest))
    eventually("it runs", lambda: agent.is_running(release), 60)
    controller.deploy_with_keys(never, b"")
    eventually("the newer one is refused", lambda: failure(controller, controller.counter), 60)
    agent.end(signal.SIGKILL)

    agent.extra = ("--broker", "127.0.0.1:9", "--offload", "127.0.0.1:9")
    agent.start()
    answer = agent.infer()
    assert np.array_equal(answer.outputs["y"], EXPECTED) and answer.report.release == release.digest
    clear = graphs(TinyRelease(3))
    assert agent.end() == 0
    files = [path for path in agent.data.rglob("*") if path.is_file()]
    assert files and not any(graph in path.read_bytes() for path in files for graph in clear)


def graphs(release: TinyRelease) -> list[bytes]:
    """The slices' files in clear."""
    return [release.chunks[slice_.files[0].sha256] for slice_ in manifest.decode_manifest(release.raw).slices]


Spoil = Callable[[Path], Any]


@pytest.mark.parametrize(
    "spoil", [lambda path: path.unlink(), lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"x" * 300)]
)
def test_spoiled_keys_file_is_restored_from_the_statement(
    controller: KeyedController, agent: AgentProcess, spoil: Spoil
) -> None:
    """The file that keeps the wrapped keys is lost or spoiled: the statement still has them, and it is written anew."""
    release = EncryptedRelease(5)
    agent.start()
    controller.deploy_with_keys(release, wrap(release.keys, controller.device_key, DEVICE, release.digest))
    eventually("it runs", lambda: agent.is_running(release), 60)
    agent.end(signal.SIGKILL)
    kept = agent.data / "releases" / release.digest / "keys.wrapped"
    good = kept.read_bytes()
    spoil(kept)
    agent.start()
    assert np.array_equal(agent.infer().outputs["y"], EXPECTED)
    assert kept.read_bytes() == good
    assert agent.end() == 0
