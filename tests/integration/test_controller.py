"""The controller as a process with its real broker, seen from outside: by HTTPS, and by a device over MQTT."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgesplit.mqtt import messages
from edgesplit.release.agent_release import AGENT_MODEL, Target, build_for
from edgesplit.release.manifest import Manifest, decode_manifest
from edgesplit.trust.identity import certificate_request, load_or_make_key
from support.controller_process import PATIENCE_S, Device, Up, enrolled, eventually, tiny_model
from support.wheels import archive, small_agent


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A controller with the tiny model pushed."""
    running = Up(tmp_path_factory.mktemp("controller") / "data")
    assert running.start() == "ready"
    running.ok("POST", "/v1/models?name=tiny", tiny_model())
    yield running
    if running.process is not None and running.process.poll() is None:
        running.end()


def test_a_deployed_release_is_verified_and_fetched_over_mqtt(up: Up, tmp_path: Path) -> None:
    """Claim, enrolment, statement, metadata, manifest and every chunk: what a device gets leads back to its claim."""
    device = enrolled(up, "pi-one", tmp_path, link="lte")

    made = up.ok("POST", "/v1/deployments", {"model": "tiny", "partition": "conv1", "to": ["pi-one"]})

    statement = device.statement()
    assert [(one.model, one.release) for one in statement.releases] == [("tiny", made["release"])]
    raw = device.trust.manifest(made["release"], device.fetch)
    manifest: Manifest = decode_manifest(raw)
    assert manifest.model == "tiny@1" and list(manifest.plans) == ["raspberrypi4"]
    assert {row.split_after for row in manifest.plans["raspberrypi4"].rows} == {"conv1", "classify"}
    chunks = device.chunks(made["release"], list(manifest.chunk_list()))
    assert all(hashlib.sha256(data).hexdigest() == name for name, data in chunks.items())
    assert (up.data / "offload" / "releases" / made["release"] / "manifest.json").read_bytes() == raw
    device.session.stop()


def test_deploying_the_same_again_is_the_same_release_under_a_higher_counter(up: Up, tmp_path: Path) -> None:
    """Nothing changed, so nothing is fetched: the digest stays, the statement is newer."""
    device = enrolled(up, "pi-again", tmp_path)
    first = up.ok("POST", "/v1/deployments", {"model": "tiny", "partition": "device", "to": ["pi-again"]})
    before = device.statement()

    second = up.ok("POST", "/v1/deployments", {"model": "tiny", "partition": "device", "to": ["pi-again"]})

    assert second["release"] == first["release"] and second["deployment"] > first["deployment"]
    assert device.statement().counter > before.counter
    device.session.stop()


def test_one_release_serves_a_group_of_different_devices(up: Up, tmp_path: Path) -> None:
    """A plan per device class in one signed unit; the statement of each device names it."""
    pi = enrolled(up, "pi-group", tmp_path, group="cameras")
    nano_claim = {"device": "nano-group", "device_class": "jetson-nano", "group": "cameras", "link": "3g"}
    nano = Device(up, up.ok("POST", "/v1/devices/claims", nano_claim), tmp_path / "nano")
    nano.connect()

    limits = {"keep_raw_input": True}
    made = up.ok("POST", "/v1/deployments", {"model": "tiny", "to": ["group=cameras"], "limits": limits})

    assert made["devices"] == ["nano-group", "pi-group"]
    assert {plan["device_class"] for plan in made["plans"]} == {"jetson-nano", "raspberrypi4"}
    assert all("image" in plan["private_tensors"] for plan in made["plans"])
    assert all(plan["required_local_layers"] for plan in made["plans"])
    for device in (pi, nano):
        assert device.statement().releases[0].release == made["release"]
        device.session.stop()


def test_a_version_of_the_agent_is_pushed_signed_and_stated(up: Up, tmp_path: Path) -> None:
    """Its wheels come as they are in a kit, the release names them by their chunks, and the device gets every byte by
    a chain of signatures; it is listed apart from models, and goes out as a rollout."""
    device = enrolled(up, "pi-agent", tmp_path)
    content = archive(small_agent("9.1.0"))
    pushed = up.ok("POST", "/v1/agents?version=9.1.0&python=3.11&machine=aarch64", content)
    assert pushed["created"] and pushed["builds"][0]["sha256"] == hashlib.sha256(content).hexdigest()

    made = up.ok("POST", "/v1/agents/deployments", {"version": "9.1.0", "to": ["pi-agent"]})

    assert [(one.model, one.release) for one in device.statement().releases] == [(AGENT_MODEL, made["release"])]
    manifest = decode_manifest(device.trust.manifest(made["release"], device.fetch))
    file = build_for(manifest, Target("3.11", "aarch64")).slice.files[0]
    chunks = device.chunks(made["release"], list(manifest.chunk_list()))
    assert b"".join(chunks[one.sha256] for one in file.chunks) == content
    assert up.ok("GET", f"/v1/rollouts/{made['rollout']}")["model"] == made["model"]
    assert AGENT_MODEL not in {one["name"] for one in up.ok("GET", "/v1/models")}
    assert [one["version"] for one in up.ok("GET", "/v1/agents")] == ["9.1.0"] and up.ok("GET", "/v1/releases")
    status, why = up.call("POST", "/v1/deployments", {"model": AGENT_MODEL, "to": ["pi-agent"]})
    assert status == 400 and "edgectl agent" in why["error"]
    device.session.stop()


def test_a_device_is_online_only_while_its_session_lives(up: Up, tmp_path: Path) -> None:
    """Birth and telemetry make it online; when its connection breaks, the broker's word makes it offline at once."""
    device = enrolled(up, "pi-mortal", tmp_path)
    window = messages.TelemetryWindow(
        model="tiny", release="r", row="local", requests=3, latency_p50_s=0.01, latency_p95_s=0.02
    )
    said = messages.Telemetry(
        session=1, sequence=1, emulated=True, up_bytes_per_s=1e6, rtt_s=0.01, remote_usable=True, models=(window,)
    )

    def shown() -> Any:
        return up.ok("GET", "/v1/devices/pi-mortal")

    eventually("it is online", lambda: shown()["state"] == "online")
    device.say("telemetry", said)
    eventually("its telemetry", lambda: (shown()["telemetry"] or {}).get("models"))
    assert shown()["emulated"] and up.ok("GET", "/v1/telemetry/pi-mortal")[0]["models"][0]["row"] == "local"

    device.vanish()

    eventually("it is offline", lambda: shown()["state"] == "offline")


def test_malformed_messages_of_a_device_are_dropped_and_the_controller_goes_on(up: Up, tmp_path: Path) -> None:
    """Garbage on each topic a device may write, and the controller goes on answering it."""
    device = enrolled(up, "pi-rude", tmp_path)
    for kind in ("birth", "reported", "telemetry", "fetch"):
        for garbage in (b"\xff" * 1_000, b"\x93\x01", b"\x81\xa4type\xa5birth", os.urandom(64)):
            device.session.publish(messages.topic("pi-rude", kind), garbage, qos=1, wait_s=10)

    strange = messages.FetchChunks.from_indexes("0" * 64, [1])
    device.say("fetch", strange)

    with pytest.raises(FileNotFoundError):
        device.fetch("targets/../../keys/ca.key", 1_000)
    device.trust.refresh(device.fetch)
    device.session.stop()


def test_a_claim_enrols_one_key_once(up: Up, tmp_path: Path) -> None:
    """The same key may ask again, for the answer may have been lost; another key may not."""
    claim = up.ok("POST", "/v1/devices/claims", {"device": "pi-claim", "device_class": "raspberrypi4"})
    device = Device(up, claim, tmp_path / "right")

    again = up.call("POST", "/v1/enrol", {"token": claim["token"], "csr_pem": device.csr}, token=None)
    thief = certificate_request(load_or_make_key(tmp_path / "thief.key"), "pi-claim").decode()
    stolen = up.call("POST", "/v1/enrol", {"token": claim["token"], "csr_pem": thief}, token=None)
    guessed = up.call("POST", "/v1/enrol", {"token": "guess", "csr_pem": thief}, token=None)

    assert again[0] == 200 and again[1]["device"] == "pi-claim"
    assert stolen[0] == guessed[0] == 401 and stolen[1] == guessed[1]
    assert "token" not in json.dumps(up.ok("GET", "/v1/events"))


def test_a_revoked_device_is_forgotten(up: Up, tmp_path: Path) -> None:
    """It is cut off, and it is no target any more."""
    device = enrolled(up, "pi-revoked", tmp_path)
    up.ok("POST", "/v1/deployments", {"model": "tiny", "partition": "device", "to": ["pi-revoked"]})
    device.statement()

    device.vanish_on_loss()
    up.ok("DELETE", "/v1/devices/pi-revoked")

    eventually("the end of the session", lambda: not device.session.connected)
    assert up.ok("GET", "/v1/devices/pi-revoked")["state"] == "revoked"
    status, answer = up.call("POST", "/v1/deployments", {"model": "tiny", "to": ["pi-revoked"]})
    assert status == 404 and answer["kind"] == "NotFound"
    device.session.stop()


REFUSED = [
    ("GET", "/v1/models/tyni", None, 404, "did you mean tiny?"),
    ("GET", "/v1/models/tiny@7", None, 404, "tiny@1"),
    ("GET", "/v1/models/TINY", None, 400, "not a model name"),
    ("POST", "/v1/models?name=cut", tiny_model()[:900], 422, ""),
    ("POST", "/v1/models?name=text", b"hello", 422, "not a model"),
    ("POST", "/v1/models?name=tiny&input=image/gif", tiny_model(), 400, "image/jpeg"),
    ("POST", "/v1/models?name=tiny&bind=batch", tiny_model(), 400, "DIMENSION=LENGTH"),
    ("POST", "/v1/plans", {"model": "tiny", "device": "raspberypi4"}, 404, "did you mean raspberrypi4"),
    ("POST", "/v1/plans", {"model": "tiny", "device": "/etc/passwd.yaml"}, 404, "device profile"),
    ("POST", "/v1/plans", {"model": "tiny", "device": "raspberrypi4", "partition": "conv9"}, 400, "conv"),
    ("POST", "/v1/plans", {"model": "tiny", "device": "raspberrypi4", "link": "fast"}, 400, ""),
    ("POST", "/v1/plans", {"model": "tiny", "device": "raspberrypi4", "colour": 1}, 400, "colour"),
    ("POST", "/v1/deployments", {"model": "tiny", "to": []}, 400, "no target"),
    ("POST", "/v1/deployments", {"model": "tiny", "to": ["group=none"]}, 404, "group"),
    ("POST", "/v1/devices/claims", {"device": "Pi", "device_class": "raspberrypi4"}, 400, "not a device name"),
    ("POST", "/v1/devices/claims", {"device": "pi", "device_class": "zx81"}, 404, "device profile"),
    ("POST", "/v1/models/tiny/samples", {"samples": [{"frame": "AAAA"}]}, 400, "takes tensors"),
    ("POST", "/v1/devices/claims", b"x" * 1_100_000, 413, "longer than"),
    ("GET", "/v1/nothing", None, 404, "Not Found"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "text"), REFUSED, ids=lambda one: str(one)[:40])
def test_invalid_api_requests_are_refused_with_the_reason(
    up: Up, method: str, path: str, body: Any, status: int, text: str
) -> None:
    """Each refusal has its status, its kind, and a text that helps."""
    got, answer = up.call(method, path, body)
    assert (got, text in answer["error"]) == (status, True), answer
    assert answer["kind"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/devices", "/v1/events", "/v1/deployments", "/v1/devices/x"])
def test_the_api_answers_401_without_the_operators_token(up: Up, path: str) -> None:
    """No token, or a wrong one: 401, and health alone answers."""
    assert up.call("GET", path, token=None)[0] == 401
    assert up.call("GET", path, token="wrong")[0] == 401
    assert up.call("GET", "/v1/health", token=None)[0] == 200


def test_pushing_the_same_again_gives_the_same_version(up: Up) -> None:
    """A model is named by its content: only other bytes are another version."""
    again = up.ok("POST", "/v1/models?name=tiny", tiny_model())
    other = up.ok("POST", "/v1/models?name=other", tiny_model(seed=1))
    changed = up.ok("POST", "/v1/models?name=other", tiny_model(seed=2))

    assert (again["model"], again["created"]) == ("tiny@1", False)
    assert (other["model"], changed["model"]) == ("other@1", "other@2")
    assert up.ok("GET", "/v1/models/other")["model"] == "other@2"


def test_a_plan_shows_its_candidates_and_costs(up: Up) -> None:
    """Measured here, predicted there: all-local and all-remote stand beside the best."""
    made = up.ok("POST", "/v1/plans", {"model": "tiny", "device": "raspberrypi4", "link": "8mbit/40ms"})
    costs = up.ok("GET", "/v1/models/tiny/costs?device=raspberrypi4")

    assert {"local", "remote"} <= {one["name"] for one in made["candidates"]}
    assert made["certificate"]["lower_bound"] <= made["seconds"]
    assert costs["format"] == "edgesplit.costs/1" and costs["tiers"] == ["device", "cloud"]


def test_a_second_controller_on_the_same_folder_is_refused(up: Up) -> None:
    """One clear line, and the first goes on."""
    other = Up(up.data)
    said = other.start()
    assert said.startswith(f"UsageError: a controller runs on {up.data} already")
    assert other.process is not None and other.process.wait(PATIENCE_S) == 2
    assert up.call("GET", "/v1/health")[0] == 200


def test_a_taken_port_and_a_folder_that_cannot_be_written_are_one_line_each(up: Up, tmp_path: Path) -> None:
    """What stands in the way is named, with what to do."""
    port = int(up.addresses["api_url"].rpartition(":")[2])
    taken = Up(tmp_path / "data").start(f"api_port={port}")
    assert f"port {port} on 127.0.0.1 is taken by another program; choose another with --api-port" in taken
    (tmp_path / "file").write_text("")
    assert "cannot write in" in Up(tmp_path / "file").start()


def test_a_restarted_broker_is_given_every_desired_state_again(up: Up, tmp_path: Path) -> None:
    """SIGKILL of mosquitto: it is started again, and a deployment made meanwhile reaches the device."""
    device = enrolled(up, "pi-broker", tmp_path)
    pid_file = up.data / "broker" / "mosquitto.pid"
    killed = int(pid_file.read_text())

    os.kill(killed, signal.SIGKILL)
    made = up.ok("POST", "/v1/deployments", {"model": "tiny", "partition": "device", "to": ["pi-broker"]})

    assert device.statement().releases[0].release == made["release"]
    assert int(pid_file.read_text()) != killed
    device.session.stop()


def test_a_controller_to_which_an_agent_was_pushed_last_did_not_start_again(up: Up) -> None:
    """It looked for the file of the newest model in the table, and versions of the agent have none."""
    up.ok("POST", "/v1/agents?version=9.2.0&python=3.11&machine=aarch64", archive(small_agent("9.2.0")))
    assert up.end() == 0
    assert up.start() == "ready"


def test_a_controller_restarted_after_sigkill_has_its_whole_state(up: Up, tmp_path: Path) -> None:
    """Models, releases, devices, keys and ports are there; a device that reconnects is told the same, and may fetch."""
    device = enrolled(up, "pi-after", tmp_path)
    made = up.ok("POST", "/v1/deployments", {"model": "tiny", "partition": "cloud", "to": ["pi-after"]})
    before = device.statement()
    paths = ("/v1/models", "/v1/deployments", "/v1/releases")
    kept = [up.ok("GET", path) for path in paths]
    told = up.addresses

    up.end(signal.SIGKILL)
    assert up.start() == "ready"

    assert [up.ok("GET", path) for path in paths] == kept
    assert {name: up.addresses[name] for name in told if name != "pid"} == {k: v for k, v in told.items() if k != "pid"}
    assert device.session.wait_connected(PATIENCE_S)
    after = device.statement()
    assert after == before and after.releases[0].release == made["release"]
    assert up.ok("GET", "/v1/devices/pi-after")["desired"][0]["release"] == made["release"]
    device.session.stop()
    assert up.end() == 0 and not (up.data / "controller.json").exists()
