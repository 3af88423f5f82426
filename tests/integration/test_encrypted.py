"""Encrypted releases through the product: one stream for a group, ciphertext on every disk, keys for who runs it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import numpy as np
import onnx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from edgesplit.client.connection import Connection
from edgesplit.crypto.key_wrapping import load_encryption_key, sign_encryption_key, unwrap
from edgesplit.crypto.slice_encryption import decrypt_slice, needed_keys
from edgesplit.errors import TrustError
from edgesplit.input_spec import InputSpec, prepare
from edgesplit.mqtt.messages import decode
from edgesplit.oip.protocol import remote_name
from edgesplit.release.manifest import Manifest, Signed, Statement, decode_manifest
from edgesplit.trust.identity import certificate_request
from edgesplit_agent.control.enrolment import credentials
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_cli.demo.reference_model import WholeModel
from edgesplit_cli.demo.scenario import INPUT_SPEC
from support.controller_process import Device, Up
from support.edgesplit_processes import DIGITS, Agent, Cloud, eventually, frame_input, frames

MARK_BYTES = 48


@dataclass(frozen=True)
class Deployed:
    """Two cameras of a group that run an encrypted model, and what the whole model answers."""

    cloud: Cloud
    cameras: dict[str, Agent]
    release: str
    marks: tuple[bytes, ...]
    """Bytes of the model's weights."""
    frame: bytes
    expected: np.ndarray

    def answers(self, name: str) -> bool:
        """That camera answers as the whole model does."""
        answer = self.cameras[name].infer("digits", frame_input(self.frame))
        return np.array_equal(answer.outputs["probabilities"], self.expected)

    def leaks(self, folder: Path) -> list[str]:
        """Files under a folder that hold any of the model's weights in clear."""
        return [str(path) for path, data in contents(folder) if any(mark in data for mark in self.marks)]


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file under a folder where processes are at work: one that goes meanwhile is gone."""
    for home, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield Path(home, name), Path(home, name).read_bytes()


def camera(cloud: Cloud, name: str, *claim_options: str, group: str = "cams") -> Agent:
    """Claim a device for a group, and start it."""
    claim = cloud.folder / f"{name}.claim.json"
    words = ("--profile", "raspberrypi4", "--link", "wifi", "--group", group, "--out", str(claim), *claim_options)
    claim.unlink(missing_ok=True)
    cloud.edgectl("device", "claim", name, *words)
    agent = Agent(cloud, name, claim)
    cloud.agents.append(agent)
    agent.start()
    return agent


def marks_of(model: bytes) -> tuple[bytes, ...]:
    """A piece from the middle of each larger weight."""
    raws = [onnx.numpy_helper.to_array(one).tobytes() for one in onnx.load_model_from_string(model).graph.initializer]
    return tuple(raw[len(raw) // 2 :][:MARK_BYTES] for raw in raws if len(raw) > 4 * MARK_BYTES)


@pytest.fixture(scope="module")
def world(cloud: Cloud) -> Iterator[Deployed]:
    cloud.push_digits()
    cameras = {name: camera(cloud, name) for name in ("cam-1", "cam-2")}
    layers = [layer["name"] for layer in cloud.json("model", "show", "digits")["layers"]]
    cut = layers[len(layers) // 2]
    made = cloud.json("deploy", "digits", "--partition", cut, "--to", "group=cams", "--encrypt", "--wait", "120")
    assert made["encrypted"] is True
    model = cloud.api.download("/v1/models/digits/optimised")
    spec = msgspec.convert(cloud.api.get("/v1/models/digits")["input_spec"], InputSpec)
    frame = frames(1)[0][0]
    expected = WholeModel(model).run(prepare(spec, frame))
    yield Deployed(cloud, cameras, made["release"], marks_of(model), frame, expected)


def manifest_of(world: Deployed) -> Manifest:
    return decode_manifest((world.cloud.data / "offload/releases" / world.release / "manifest.json").read_bytes())


def wrapped_for(data: Path) -> bytes:
    """The keys in the statement that an agent has on its disk."""
    signed = decode(DataFolder(data).read_current().statement, Signed)
    (wanted,) = msgspec.msgpack.decode(signed.payload, type=Statement).releases
    return wanted.keys


def cloud_answers(world: Deployed, name: str) -> bool:
    """That camera answered with the cloud's half."""
    answer = world.cameras[name].infer("digits", frame_input(world.frame))
    assert np.array_equal(answer.outputs["probabilities"], world.expected)
    return not answer.report.fallback and answer.report.row != "local"


def test_a_group_runs_one_encrypted_stream_with_keys_wrapped_to_each_device(world: Deployed) -> None:
    """Both cameras hold the same ciphertext, opened by keys wrapped to each alone; both halves answer to the bit."""
    files = [
        {path.relative_to(agent.data): path.read_bytes() for path in (agent.data / "releases").rglob("slices/*/*")}
        for agent in world.cameras.values()
    ]
    assert files[0] == files[1] and files[0]
    assert len({wrapped_for(agent.data) for agent in world.cameras.values()}) == 2
    for name in world.cameras:
        eventually(f"{name} with the cloud's help", lambda n=name: cloud_answers(world, n))
    (shown,) = [one for one in world.cloud.json("deployments") if one["release"] == world.release]
    assert shown["encrypt"] is True
    assert "encrypted" in world.cloud.edgectl("deployments")


def test_an_enrolled_device_without_keys_used_the_far_half(world: Deployed) -> None:
    """The far half of an encrypted release answers only the devices that were given keys of it. Another one is told
    that there is no such release, and its list of models has nothing of it."""
    stranger = camera(world.cloud, "stranger", group="others")
    server = urlsplit(world.cloud.addresses["offload_url"])

    def ask(agent: Agent, method: str, path: str) -> tuple[int, str]:
        context = credentials(DataFolder(agent.data)).client_context()
        with closing(Connection(server.hostname or "", server.port or 0, context)) as connection:
            body = [b"{}"] if method == "POST" else []
            reply = connection.exchange(method, path, deadline=monotonic() + 60.0, body=body)
            return reply.status, bytes(reply.body).decode()

    (plan,) = manifest_of(world).plans.values()
    row = next(row.name for row in plan.rows if not row.is_local)
    model = f"/v2/models/{quote(remote_name(world.release, 'raspberrypi4', row))}"
    for agent, status, listed in ((world.cameras["cam-1"], 200, True), (stranger, 404, False)):
        assert ask(agent, "GET", model)[0] == status
        assert (world.release in ask(agent, "POST", "/v2/repository/index")[1]) is listed


def test_no_disk_of_device_or_offload_server_holds_a_weight_in_clear(world: Deployed) -> None:
    """Not under the agents' data, not under the offload server's, not in their logs; the search finds what is there."""
    assert len(world.marks) > 3
    assert world.leaks(world.cloud.data / "blobs"), "the model as it was pushed is the controller's own"
    for agent in world.cameras.values():
        assert world.leaks(agent.data) == []
    assert world.leaks(world.cloud.data / "offload") == []
    keys = world.cloud.data / "offload/releases" / world.release / "keys.json"
    assert keys.stat().st_mode & 0o777 == 0o600
    for agent in world.cameras.values():
        assert (agent.data / "identity/encryption.pem").stat().st_mode & 0o777 == 0o600


def test_an_eavesdropper_cannot_decrypt_the_stream(world: Deployed, tmp_path: Path) -> None:
    """A device of another group, enrolled and listening, has the manifest and every chunk, and even the keys that were
    wrapped for others: nothing opens."""
    cloud = world.cloud
    body = {"device": "guest", "device_class": "raspberrypi4", "group": "doors"}
    stranger = Device(Up(cloud.data), cloud.api.post("/v1/devices/claims", body), tmp_path / "guest")
    stranger.connect()
    try:
        stranger.trust.refresh(stranger.fetch)
        manifest = decode_manifest(stranger.trust.manifest(world.release, stranger.fetch))
        chunks = stranger.chunks(world.release, list(manifest.chunk_sizes()))
    finally:
        stranger.session.stop()
    assert not any(mark in data for mark in world.marks for data in chunks.values())
    for agent in world.cameras.values():
        kept = (agent.data / "releases" / world.release / "keys.wrapped").read_bytes()
        for wrapped in (wrapped_for(agent.data), kept):
            for name in ("guest", agent.name):
                with pytest.raises(TrustError):
                    unwrap(wrapped, stranger.encryption_key, name, world.release)
    for one in manifest.all_slices:
        if one.files:
            with pytest.raises(TrustError, match="was not given its content key"):
                decrypt_slice(one, lambda file: io.BytesIO(b"".join(chunks[c.sha256] for c in file.chunks)), {})


def test_a_device_gets_the_keys_of_what_it_runs_and_no_others(world: Deployed) -> None:
    """Its slices' and the golden inputs', by the plan of its class; nothing in them is another slice's."""
    manifest = manifest_of(world)
    agent = world.cameras["cam-1"]
    own = load_encryption_key(agent.data / "identity/encryption.pem")
    keys = unwrap(wrapped_for(agent.data), own, "cam-1", world.release)
    plan = manifest.plans["raspberrypi4"]
    assert keys.keys() == needed_keys(manifest, {name for row in plan.rows for name in row.device}).keys()


def test_a_restart_without_network_decrypts_the_stored_release(world: Deployed) -> None:
    """Controller and agent are killed; the agent alone starts again, unwraps, decrypts into memory and answers."""
    agent = world.cameras["cam-1"]
    world.cloud.process.kill()
    agent.process.kill()
    agent.process.start()
    eventually("an answer without any network", lambda: world.answers("cam-1"))
    assert world.leaks(agent.data) == []
    world.cloud.start()
    eventually("cam-1 is online again", lambda: world.cloud.json("device", "show", "cam-1")["state"] == "online")


def states(cloud: Cloud, name: str) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = cloud.api.get(f"/v1/devices/{name}").get("models") or []
    return models


def test_a_lost_encryption_key_is_reported_and_a_new_claim_brings_new_wrapped_keys(world: Deployed) -> None:
    """The card's X25519 key is gone: the operator reads what to do. Claimed anew with --replace, the same name runs the
    same ciphertext by keys wrapped to its new key; nothing is wrapped to the old one any more."""
    cloud, agent = world.cloud, world.cameras["cam-2"]
    key_file = agent.data / "identity/encryption.pem"
    old, before = load_encryption_key(key_file), wrapped_for(agent.data)
    agent.process.stop()
    key_file.unlink()
    agent.start()
    told = eventually(
        "the trouble", lambda: [one["detail"] for one in states(cloud, "cam-2") if one["state"] == "failed"]
    )
    assert "edgectl device claim NAME --replace" in told[0] and "encryption.pem" in told[0]
    agent.process.stop()
    shutil.rmtree(agent.data / "identity")

    again = world.cameras["cam-2"] = camera(cloud, "cam-2", "--replace")
    eventually("cam-2 runs it", lambda: any(
        one["state"] == "running" and one["release"] == world.release for one in states(cloud, "cam-2")
    ))  # fmt: skip
    assert world.answers("cam-2") and world.leaks(again.data) == []
    after = wrapped_for(again.data)
    assert after != before
    assert unwrap(after, load_encryption_key(key_file), "cam-2", world.release)
    with pytest.raises(TrustError):
        unwrap(after, old, "cam-2", world.release)


def test_a_tflite_model_is_decrypted_in_memory_too(world: Deployed) -> None:
    """LiteRT maps the memory file; the file's bytes lie on neither disk."""
    cloud, model = world.cloud, (DIGITS / "digits.tflite").read_bytes()
    spec = INPUT_SPEC.replace("nchw", "nhwc")
    cloud.edgectl("model", "push", str(DIGITS / "digits.tflite"), "--name", "lite", "--input", spec)
    agent = camera(cloud, "cam-7", group="lite")
    cloud.edgectl("deploy", "lite", "--partition", "device", "--to", "group=lite", "--encrypt", "--wait", "120")
    answer = agent.infer("lite", frame_input(world.frame))
    assert int(answer.outputs["probabilities"].argmax()) == int(world.expected.argmax())
    marks = [model[at : at + MARK_BYTES] for at in range(len(model) // 4, len(model), len(model) // 8)]
    marks = [mark for mark in marks if len(set(mark)) > MARK_BYTES // 4]
    assert len(marks) > 2
    lite = replace(world, marks=tuple(marks))
    assert lite.leaks(cloud.data / "blobs")
    assert lite.leaks(agent.data) == [] and lite.leaks(cloud.data / "offload") == []


def test_an_encryption_key_with_a_foreign_signature_is_not_enrolled(world: Deployed, tmp_path: Path) -> None:
    """The claim is not used up by it: its owner enrols afterwards."""
    up = Up(world.cloud.data)
    claim = world.cloud.api.post("/v1/devices/claims", {"device": "cam-6", "device_class": "raspberrypi4"})
    own, thief = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    csr = certificate_request(own, "cam-6").decode()
    for signer, key in ((thief, X25519PrivateKey.generate()), (own, None)):
        public, signature = sign_encryption_key(key or X25519PrivateKey.generate(), signer, csr)
        body = {
            "token": claim["token"], "csr_pem": csr, "encryption_signature": b64encode(signature).decode(),
            "encryption_key": b64encode(public if key else public[:31]).decode(),
        }  # fmt: skip
        status, answer = up.call("POST", "/v1/enrol", body, token=None)
        assert status in (400, 401) and "encryption key" in answer["error"]
    assert up.call("POST", "/v1/enrol", {**body, "encryption_key": "!"}, token=None)[0] == 400
    Device(up, claim, tmp_path / "cam-6")


def test_a_revoked_device_gets_no_further_keys(world: Deployed) -> None:
    """Its statement is gone, and a deployment that meant it is refused."""
    cloud = world.cloud
    extra = camera(cloud, "cam-9", group="spare")
    cloud.edgectl("deploy", "digits", "--partition", "device", "--to", "cam-9", "--encrypt", "--wait", "120")
    assert wrapped_for(extra.data)
    cloud.edgectl("device", "revoke", "cam-9", "--yes")
    extra.process.stop()
    cloud.edgectl("deploy", "digits", "--partition", "device", "--to", "cam-9", "--encrypt", code=2)


def test_a_device_that_enrolled_without_a_key_is_named(world: Deployed, tmp_path: Path) -> None:
    """Nothing can be encrypted for it, and the operator is told before anything is planned; in clear it is served."""
    body = {"device": "old-one", "device_class": "raspberrypi4", "group": "old"}
    claim = world.cloud.api.post("/v1/devices/claims", body)
    Device(Up(world.cloud.data), claim, tmp_path / "old", encrypted=False)
    said = world.cloud.edgectl("deploy", "digits", "--to", "old-one", "--encrypt", code=2)
    assert "old-one" in said and "--replace" in said
    world.cloud.edgectl("deploy", "digits", "--to", "old-one")


def test_the_plain_release_of_a_model_shares_nothing_with_its_encrypted_one(world: Deployed) -> None:
    """Encrypted again it is the same release, chunk for chunk; in clear it shares no slice with that. This test is
    the last: it puts the model in clear on the disks that the others search."""
    camera(world.cloud, "cam-8", group="spare")
    deploy = ("deploy", "digits", "--to", "cam-8", "--partition")
    made = [world.cloud.json(*deploy, "device", *more)["release"] for more in (("--encrypt",), ())]
    cut = world.cloud.json("deployments")[0]["partition"]
    assert world.cloud.json(*deploy, cut, "--encrypt")["release"] == world.release
    home = world.cloud.data / "offload/releases"
    sealed, clear = (decode_manifest((home / one / "manifest.json").read_bytes()) for one in made)
    assert sealed.is_encrypted and not clear.is_encrypted
    assert not set(sealed.chunk_sizes()) & set(clear.chunk_sizes())
    assert all(one.encryption is not None for one in sealed.golden) and sealed.golden
