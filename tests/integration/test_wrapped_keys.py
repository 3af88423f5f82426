"""What an agent makes of content keys that are not its own: what runs keeps running, and the operator reads why."""

from __future__ import annotations

import random
import shutil
import signal
import time
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
from edgesplit.release.manifest import DesiredRelease, GoldenExample, Statement
from edgesplit.release_store import write_release
from edgesplit.trust.identity import EnrolmentRequest, decode_document
from integration.test_agent import DEVICE, Made, Process, SmallController, chunk
from support.agent_engine import EXPECTED, eventually

SECRET = b"s" * 32
SEED = 20_260_722


class Encrypted(Made):
    """The tiny release, every slice and the golden pair encrypted."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        plain = manifest.decode_manifest(self.raw)
        slices, chunks = [], {}
        for one in plain.slices:
            sealed, files = encrypt_slice(one, {"graph.onnx": [self.chunks[one.files[0].sha256]]}, SECRET)
            slices.append(sealed)
            chunks.update({chunk(data).sha256: data for runs in files.values() for data in runs})
        pair = plain.golden[0]
        seal, bodies = encrypt_golden([self.chunks[pair.request.sha256], self.chunks[pair.response.sha256]], SECRET)
        chunks.update({chunk(body).sha256: body for body in bodies})
        golden = (GoldenExample(chunk(bodies[0]), chunk(bodies[1]), seal),)
        self.manifest = msgspec.structs.replace(plain, slices=tuple(slices), golden=golden)
        self.chunks, self.raw = chunks, manifest.encode_manifest(self.manifest)
        self.digest = manifest.release_digest(self.raw)
        ids = needed_keys(self.manifest, ["a", "b"])
        self.keys = {key_id: ContentKey.from_key_id(SECRET, key_id).secret for key_id in ids}


class KeyedController(SmallController):
    """Hands out content keys too, good or bad."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.device_key = b""

    def _enrol(self, request: Request) -> Response:
        self.device_key = decode_document(bytes(request.body), EnrolmentRequest).encryption_key
        return super()._enrol(request)

    def give(self, made: Encrypted, wrapped: bytes) -> None:
        """Release it, and state it with these wrapped keys."""
        self.made[made.digest] = made
        self.repository.add_release(made.raw)
        home = write_release(
            self.folder / "offload", made.digest, made.raw, self.repository.proof(made.digest),
            made.chunks.__getitem__, bootstrap_root=self.repository.root_bytes,
        ).folder  # fmt: skip
        write_keys(home, made.keys)
        self.counter = max(self.counter + 1, int(time.time()))
        wanted = (DesiredRelease("tiny", made.digest, keys=wrapped),)
        self.statement = self.repository.sign_statement(
            Statement(device=DEVICE, releases=wanted, counter=self.counter, expires=int(time.time()) + 3600)
        )
        self.delivery.publish_statements([DEVICE])


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedController]:
    if shutil.which("mosquitto") is None and not Path("/usr/sbin/mosquitto").exists():
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    made = KeyedController(tmp_path_factory.mktemp("controller"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def agent(controller: KeyedController, tmp_path: Path) -> Iterator[Process]:
    process = Process(controller, tmp_path)
    controller.heard.clear()
    yield process
    if process.child is not None:
        process.end(signal.SIGKILL)


def trouble(controller: SmallController, counter: int) -> str:
    """What the device says is wrong with its model under that statement; empty while nothing is."""
    said = controller.reported()
    if said is None or said.statement_counter != counter:
        return ""
    return next((one.detail for one in said.models if one.state == "failed"), "")


def bad_keys(made: Encrypted, device_key: bytes) -> dict[str, tuple[bytes, str]]:
    """Wrapped keys that must not count, with what is said of each."""
    good = wrap(made.keys, device_key, DEVICE, made.digest)
    ids = list(made.keys)
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    at = rng.randrange(len(good))
    swapped = dict(zip(ids, [made.keys[one] for one in [*ids[1:], ids[0]]], strict=True))
    elsewhere = public_bytes(X25519PrivateKey.generate())
    return {
        "none at all": (b"", "no content keys came"),
        "another device's": (wrap(made.keys, elsewhere, DEVICE, made.digest), "not wrapped for this device"),
        "for another name": (wrap(made.keys, device_key, "cam-2", made.digest), "not wrapped for this device"),
        "of another release": (wrap(made.keys, device_key, DEVICE, "0" * 64), "not wrapped for this device"),
        "cut short": (good[:-1], "not wrapped for this device"),
        "one bit flipped": (good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :], "not wrapped for this device"),
        "one missing": (
            wrap({key: made.keys[key] for key in ids[1:]}, device_key, DEVICE, made.digest), "1 of 3 content keys"
        ),
        "swapped": (wrap(swapped, device_key, DEVICE, made.digest), "3 of 3 content keys"),
        "of another installation": (
            wrap(dict.fromkeys(ids, b"x" * 32), device_key, DEVICE, made.digest), "3 of 3 content keys"
        ),
    }  # fmt: skip


def test_bad_keys_are_told_and_change_nothing(controller: KeyedController, agent: Process) -> None:
    """Each kind of bad keys: no chunk is fetched for them, the model before goes on answering, the operator reads why;
    and good keys in the next statement make it run."""
    before = Made(1)
    controller.deploy(before)
    agent.start()
    eventually("the model before runs", lambda: agent.runs(before), 60)
    made = Encrypted(2)
    for name, (wrapped, why) in bad_keys(made, controller.device_key).items():
        controller.chunks_sent.clear()
        controller.give(made, wrapped)
        eventually(f"keys {name} are told", lambda: trouble(controller, controller.counter), 60)
        assert why in trouble(controller, controller.counter), name
        assert not set(controller.chunks_sent) & set(made.chunks), name
        answer = agent.infer()
        assert np.array_equal(answer.outputs["y"], EXPECTED) and answer.report.release == before.digest

    controller.give(made, wrap(made.keys, controller.device_key, DEVICE, made.digest))
    eventually("it runs with its keys", lambda: agent.runs(made), 60)
    answer = agent.infer()
    assert np.array_equal(answer.outputs["y"], EXPECTED) and answer.report.release == made.digest


def test_what_runs_opens_again_although_a_newer_statement_wants_another(
    controller: KeyedController, agent: Process
) -> None:
    """The newest statement on disk speaks of a release that never came: after a restart without network what ran before
    is opened by the keys kept beside it; nothing of it lies on the disk in clear."""
    made, never = Encrypted(3), Encrypted(4)
    agent.start()
    controller.give(made, wrap(made.keys, controller.device_key, DEVICE, made.digest))
    eventually("it runs", lambda: agent.runs(made), 60)
    controller.give(never, b"")
    eventually("the newer one is refused", lambda: trouble(controller, controller.counter), 60)
    agent.end(signal.SIGKILL)

    agent.extra = ("--broker", "127.0.0.1:9", "--offload", "127.0.0.1:9")
    agent.start()
    answer = agent.infer()
    assert np.array_equal(answer.outputs["y"], EXPECTED) and answer.report.release == made.digest
    clear = graphs(Made(3))
    assert agent.end() == 0
    files = [path for path in agent.data.rglob("*") if path.is_file()]
    assert files and not any(graph in path.read_bytes() for path in files for graph in clear)


def graphs(made: Made) -> list[bytes]:
    """The slices' files in clear."""
    return [made.chunks[one.files[0].sha256] for one in manifest.decode_manifest(made.raw).slices]


Spoil = Callable[[Path], Any]


@pytest.mark.parametrize(
    "spoil", [lambda path: path.unlink(), lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"x" * 300)]
)
def test_spoiled_keys_beside_a_release_are_mended_from_the_statement(
    controller: KeyedController, agent: Process, spoil: Spoil
) -> None:
    """The file that keeps the wrapped keys is lost or spoiled: the statement still has them, and it is written anew."""
    made = Encrypted(5)
    agent.start()
    controller.give(made, wrap(made.keys, controller.device_key, DEVICE, made.digest))
    eventually("it runs", lambda: agent.runs(made), 60)
    agent.end(signal.SIGKILL)
    kept = agent.data / "releases" / made.digest / "keys.wrapped"
    good = kept.read_bytes()
    spoil(kept)
    agent.start()
    assert np.array_equal(agent.infer().outputs["y"], EXPECTED)
    assert kept.read_bytes() == good
    assert agent.end() == 0
