"""`edgectl infer` on devices elsewhere: through the API, a real broker and real agents, beside hostile ones."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgesplit.errors import LinkError, NotFound, UsageError
from edgesplit.input_spec import FRAME
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.remote_inference import CancelJob
from edgesplit.mqtt.session import Session
from edgesplit_agent.serving.http_endpoint import read_status
from edgesplit_controller.pki.authority import Authority
from support.controller_process import Device, Up, enrolled
from support.edgesplit_processes import DIGITS, PATIENCE_S, Agent, Cloud, eventually, frame_input, frames
from support.remote_inferences import answer, listen, next_request, received, reply

FRAME_FILE = DIGITS / "frames" / "000.jpg"
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def agent(cloud: Cloud) -> Agent:
    """An emulated device that runs the digits model."""
    cloud.push_digits()
    made = cloud.agent("pi4")
    cloud.edgectl("deploy", "digits", "--partition", "device", "--to", "pi4", "--wait", "60")
    return made


@pytest.fixture()
def device(cloud: Cloud, tmp_path: Path) -> Iterator[Device]:
    """A device made of the SDK, whose answers a test writes; its agent's address is nowhere."""
    yield from connected(cloud, tmp_path, "fake")


@pytest.fixture()
def thief(cloud: Cloud, tmp_path: Path) -> Iterator[Device]:
    """Another one, which is hostile."""
    yield from connected(cloud, tmp_path, "thief")


def connected(cloud: Cloud, folder: Path, role: str) -> Iterator[Device]:
    """A device of its own for each test. One that replaced another of its name would lose its connection when the
    controller ends the other's session, on a busy machine after it said that it is online."""
    name = f"{role}-{next(NUMBERS)}"
    made = enrolled(Up(cloud.data), name, folder)
    eventually(f"{name} is online", lambda: cloud.api.get(f"/v1/devices/{name}")["state"] == "online")
    listen(made)
    yield made
    made.session.stop()


def asking(cloud: Cloud, name: str, *words: str) -> subprocess.Popen[str]:
    """`edgectl infer` on a device, running; Ctrl-C ends it, also where the tests run in the background of a shell that
    ignores it."""
    command = [
        "env",
        "--default-signal=INT",
        *cloud._edgectl(),
        "infer",
        "digits",
        str(FRAME_FILE),
        "--device",
        name,
        "--deadline",
        "50",
        *words,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def test_a_device_elsewhere_answers_as_it_does_locally(cloud: Cloud, agent: Agent) -> None:
    """The same numbers and the same statistics; the audit log says who, where, what and how much, and no content."""
    local = agent.infer("digits", frame_input(FRAME_FILE.read_bytes()))
    for model in ("digits", "digits@1"):
        shown = json.loads(cloud.edgectl(
            "infer", model, str(FRAME_FILE), "--device", "pi4", "--via", "controller", "--deadline", "20", "--json"
        ))  # fmt: skip
        assert np.allclose(shown["outputs"]["probabilities"]["values"], local.outputs["probabilities"].reshape(-1))
        assert shown["report"]["row"] == "local" and shown["report"]["emulated"]
        assert shown["phases"]["device"] > 0
    lines = [line for line in cloud.api.get("/v1/audit") if line["what"].endswith("/infer")]
    asked, done = lines[-2:]
    assert (asked["outcome"], done["outcome"], done["operator"]) == ("asked", "done", "operator")
    assert done["subject"] == "pi4 digits@1"
    assert done["detail"]["request_bytes"] > FRAME_FILE.stat().st_size and done["detail"]["answer_bytes"] > 40
    assert done["detail"].keys() == {"request_bytes", "answer_bytes"}


def test_the_command_chooses_the_way_and_says_which(cloud: Cloud, agent: Agent, device: Device) -> None:
    """The agent on this machine directly; a device whose reported address is not its agent's through the controller."""
    code, _, err = ended(asking(cloud, "pi4"))
    assert code == 0 and f"asked at {agent.url}" in err
    process = asking(cloud, device.name)
    job = received(device)
    reply(device, job, *answer(job, 7.0))
    code, out, err = ended(process)
    assert (code, "7 7 7 7" in out) == (0, True) and "through the controller" in err
    assert "does not run on this machine" in cloud.edgectl(
        "infer", "digits", str(FRAME_FILE), "--device", device.name, "--via", "direct", code=2
    )


def test_an_error_on_the_device_has_its_kind(cloud: Cloud, agent: Agent) -> None:
    """What a local request would have raised."""
    with pytest.raises(NotFound, match="pi4: no model nothing runs here; these do: digits"):
        cloud.api.infer("pi4", "nothing", {FRAME: b"x"}, deadline_s=20)
    with pytest.raises(UsageError, match="unknown input"):
        cloud.api.infer("pi4", "digits", {FRAME: b"x", "more": b"y"}, deadline_s=20)


def test_a_request_that_is_too_large_is_refused_with_what_to_do(cloud: Cloud, agent: Agent, tmp_path: Path) -> None:
    """By the client before it is sent, and by the API for any other client."""
    large = tmp_path / "large.npz"
    np.savez(large, frame=np.zeros(LIMITS.remote_inference_bytes, np.uint8))
    told = cloud.edgectl("infer", "digits", str(large), "--device", "pi4", "--via", "controller", code=2)
    assert "Send the picture as JPEG" in told
    up, path = Up(cloud.data), "/v1/devices/pi4/infer?model=digits"
    status, told = up.call("POST", path, bytes(LIMITS.remote_inference_bytes + 1))
    assert status == 400 and "run `edgectl infer` on the device itself" in told["error"]
    assert up.call("POST", path, bytes(3 * LIMITS.remote_inference_bytes))[0] == 413
    assert up.call("POST", f"{path}&deadline_s=61", b"x")[0] == 400


def test_a_replayed_request_is_not_run_again(cloud: Cloud, agent: Agent) -> None:
    """With a controller's own certificate: the recorded messages of a request, sent again, change no counter."""
    recorded: list[tuple[str, bytes]] = []
    credentials = Authority(cloud.data / "keys").issue_client("controller.9")
    host, port = cloud.addresses["mqtt_host"], cloud.addresses["mqtt_port"]
    session = Session(
        host, port, "controller.9", credentials.client_context(),
        on_message=lambda topic, payload, _: recorded.append((topic, payload)),
    )  # fmt: skip
    session.subscribe([messages.topic("pi4", "infer"), messages.infer_reply_topic("pi4", "+")], qos=1)
    session.start()
    assert session.wait_connected(PATIENCE_S)
    requests = messages.topic("pi4", "infer")

    def infer() -> int:
        cloud.api.infer("pi4", "digits", frame_input(FRAME_FILE.read_bytes()), deadline_s=20)
        return int(read_status(agent.url)["models"][0]["counters"]["requests"])

    eventually("the recorder hears", lambda: infer() and recorded)
    recorded.clear()
    before = infer()
    eventually("all of it", lambda: any(b"answer_head" in payload for _, payload in recorded))
    for topic, payload in [entry for entry in recorded if entry[0] == requests]:
        session.publish(topic, payload, qos=1, wait_s=10)
    assert infer() == before + 1
    session.stop()


def test_a_hostile_device_cannot_answer_for_another(cloud: Cloud, agent: Agent, device: Device, thief: Device) -> None:
    """Under the other's name the broker refuses it; under its own name the controller ignores it."""
    process = asking(cloud, device.name, "--json")
    job = received(device)
    with pytest.raises(LinkError):
        reply(thief, job, *answer(job, 6.0), as_=device.name)
    reply(thief, job, *answer(job, 6.0))
    assert messages.topic(device.name, "infer") not in thief.came
    reply(device, job, *answer(job, 7.0))
    code, out, _ = ended(process)
    assert code == 0 and json.loads(out)["outputs"]["y"]["values"] == [7.0] * 4


def test_a_caller_that_leaves_cancels_the_request(cloud: Cloud, agent: Agent, device: Device) -> None:
    """Ctrl-C in the middle: the device is told to stop, and the audit log says so."""
    process = asking(cloud, device.name)
    job = received(device)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    while not isinstance(message := next_request(device), CancelJob):
        pass
    assert message.id == job.id

    def cancelled() -> bool:
        newest = cloud.api.get("/v1/audit")[-4:]
        return any(entry["detail"].get("error") == "cancelled" and entry["outcome"] == "failed" for entry in newest)

    eventually("the audit log says so", cancelled)


def test_a_device_killed_amid_a_request_is_an_error_at_once(cloud: Cloud, agent: Agent) -> None:
    """Not the deadline: the device is called offline, and that it may have run."""
    lost = cloud.agent("lost")
    cloud.edgectl("deploy", "digits", "--partition", "device", "--to", "lost", "--wait", "60")
    assert lost.process.pid is not None
    os.kill(lost.process.pid, signal.SIGSTOP)
    process = asking(cloud, "lost", "--via", "controller")
    eventually("it is asked", lambda: any(
        line["subject"] == "lost digits" for line in cloud.api.get("/v1/audit")
    ))  # fmt: skip
    lost.process.kill()
    code, _, err = ended(process)
    assert code in (2, 5) and "lost is offline since" in err


def test_a_device_that_is_off_is_called_offline_everywhere(cloud: Cloud, agent: Agent, device: Device) -> None:
    """`infer`, `logs`, `deploy`, `deploy --wait`, `rollout status` and `rollback` say so, and since when."""
    device.vanish()
    name = device.name
    eventually("it is gone", lambda: cloud.api.get(f"/v1/devices/{name}")["state"] == "offline")
    told = cloud.edgectl("infer", "digits", str(FRAME_FILE), "--device", name, code=2)
    assert f"{name} is offline since 20" in told and "last seen" in told
    assert f"{name} is offline since 20" in cloud.edgectl("device", "logs", name, code=2)
    told = cloud.edgectl("deploy", "digits", "--partition", "device", "--to", name)
    assert f"offline, until it returns: {name} (last seen" in told
    told = cloud.edgectl(
        "deploy", "digits", "--partition", "device", "--to", name, "--to", "pi4", "--wait", "5", code=8
    )
    assert "1 of 2 devices run it, 1 offline" in told and f"offline, until it returns: {name} (last seen" in told
    rollout: dict[str, Any] = cloud.json("rollout", "list")[-1]
    assert rollout["offline"] == 1 and f"offline, until it returns: {name}" in rollout["waits_for"]
    assert f"offline, until it returns: {name}" in cloud.edgectl("rollout", "rollback", str(rollout["id"]))


def test_a_device_whose_policy_forbids_it_refuses(cloud: Cloud, agent: Agent) -> None:
    """Its own applications are served all the same."""
    private = cloud.agent("private", "raspberrypi4", "--no-remote-inference")
    cloud.edgectl("deploy", "digits", "--partition", "device", "--to", "private", "--wait", "60")
    told = cloud.edgectl("infer", "digits", str(FRAME_FILE), "--device", "private", "--via", "controller", code=2)
    assert "private: this device runs nothing for operators elsewhere" in told
    assert private.infer("digits", frame_input(frames(1)[0][0])).outputs["probabilities"].shape == (1, 10)


def test_a_controller_killed_amid_a_request_is_a_link_error(cloud: Cloud, agent: Agent, device: Device) -> None:
    """The caller hears that it may have run; an answer that comes later belongs to nothing, and the next request is
    answered once controller and broker are back."""
    process = asking(cloud, device.name)
    job = received(device)
    cloud.process.kill()
    code, _, err = ended(process)
    assert code == 5 and ("may have run" in err or "does not answer" in err)
    cloud.start()
    eventually("the device is back", lambda: device.session.wait_connected(1.0))
    reply(device, job, *answer(job, 7.0))
    frame = frame_input(FRAME_FILE.read_bytes())
    answered = eventually("an answer", lambda: cloud.api.infer("pi4", "digits", frame, deadline_s=10))
    assert answered.outputs["probabilities"].shape == (1, 10)
