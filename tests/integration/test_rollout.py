"""Rollouts through the product's own commands: a controller, its broker and two emulated agents as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from edgesplit.errors import NotFound
from edgesplit_cli.demo.scenario import INPUT_SPEC
from support.edgesplit_processes import DIGITS, Agent, Cloud, eventually, frame_input, frames


@pytest.fixture(scope="module")
def fleet(cloud: Cloud) -> Iterator[list[Agent]]:
    """Two emulated devices that run the digits model, whole, in the cloud."""
    cloud.push_digits()
    agents = [cloud.agent("cam-1"), cloud.agent("cam-2")]
    cloud.edgectl("deploy", "digits", "--partition", "cloud", "--to", "all", "--wait", "90")
    yield agents


def runs(cloud: Cloud, name: str) -> str:
    """The release that a device says it runs, found healthy."""
    models = cloud.api.get(f"/v1/devices/{name}")["models"]
    return next((one["release"] for one in models if one["state"] == "running"), "")


def ended(cloud: Cloud, number: int, code: int) -> dict[str, Any]:
    """Watch a rollout until it ends, by the command that scripts use; the last that it said."""
    command = [sys.executable, "-m", "edgesplit_cli.main", "--data", str(cloud.data), "rollout", "status", str(number)]
    done = subprocess.run([*command, "--watch", "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, f"{done.returncode}: {done.stdout[-2_000:]} {done.stderr}"
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def test_a_canary_runs_first_and_the_rest_follow_when_approved(cloud: Cloud, fleet: list[Agent]) -> None:
    """One device changes; nothing happens to the other until an operator approves; then it follows, and `status
    --watch` ends with 0. A rollback takes both back, and ends with 13."""
    before = runs(cloud, "cam-1")
    made = cloud.json(
        "deploy", "digits", "--partition", "device", "--to", "all", "--canary", "1", "--approve-stage", "2"
    )
    number, release = made["rollout"], made["release"]
    assert release != before

    def waits() -> dict[str, Any] | None:
        shown = cloud.api.get(f"/v1/rollouts/{number}")
        return shown if shown["state"] == "waiting" else None

    shown = eventually("the rollout waits for approval", waits)
    assert [stage["states"] for stage in shown["stages"]] == [{"succeeded": 1}, {"queued": 1}]
    assert sorted([runs(cloud, "cam-1"), runs(cloud, "cam-2")]) == sorted([before, release])
    assert f"edgectl rollout approve {number}" in shown["waits_for"]

    cloud.edgectl("rollout", "approve", str(number))

    assert ended(cloud, number, 0)["states"]["succeeded"] == 2
    assert {runs(cloud, "cam-1"), runs(cloud, "cam-2")} == {release}
    cloud.edgectl("rollout", "rollback", str(number))
    assert ended(cloud, number, 13)["states"]["rolled back"] == 2
    assert {runs(cloud, "cam-1"), runs(cloud, "cam-2")} == {before}
    answer = fleet[0].infer("digits", frame_input(frames(1)[0][0]))
    assert answer.outputs["probabilities"].shape == (1, 10)


def test_a_first_release_that_is_rolled_back_leaves_the_devices(cloud: Cloud, fleet: list[Agent]) -> None:
    """A second model comes and goes again: both agents run nothing of it, their requests for it are refused, and the
    model that they ran before answers on."""
    cloud.edgectl("model", "push", str(DIGITS / "digits.onnx"), "--name", "guest", "--input", INPUT_SPEC)
    made = cloud.json("deploy", "guest", "--partition", "device", "--to", "all", "--wait", "90")
    jpeg = frames(1)[0][0]
    assert fleet[0].infer("guest", frame_input(jpeg)).outputs["probabilities"].shape == (1, 10)

    shown = cloud.edgectl("rollout", "rollback", str(made["rollout"]))

    assert "rolling back" in shown or "rolled back" in shown
    last = ended(cloud, made["rollout"], 13)
    assert last["states"]["rolled back"] == 2 and "2 of 2 devices are back to what they ran before" in last["reason"]
    for agent in fleet:
        device = cloud.api.get(f"/v1/devices/{agent.name}")
        assert [one["model"] for one in device["models"]] == ["digits"]
        assert [one["model"] for one in device["desired"]] == ["digits@1"] or "guest" not in str(device["desired"])
        with pytest.raises(NotFound):
            agent.infer("guest", frame_input(jpeg))
        assert agent.infer("digits", frame_input(jpeg)).outputs["probabilities"].shape == (1, 10)
    refused = cloud.edgectl("rollout", "rollback", str(made["rollout"]), code=2)
    assert "deploy its release again" in refused


def test_a_device_that_is_off_does_not_delay_a_rollout(cloud: Cloud, fleet: list[Agent]) -> None:
    """Its process is killed: the other runs the release, and a newer deployment goes out at once. The device runs the
    newest when it is back, and has never heard of the one between."""
    off, on = fleet
    off.process.kill()
    made = deploy(cloud, "device")
    path = f"/v1/rollouts/{made['rollout']}"
    eventually(f"{on.name} runs it", lambda: cloud.api.get(path)["states"]["succeeded"] == 1)
    assert cloud.api.get(path)["states"]["assigned"] == 1 and runs(cloud, on.name) == made["release"]

    newer = deploy(cloud, "auto")
    assert newer["supersedes"] == [{"rollout": made["rollout"], "devices": 1}]
    off.start()

    eventually("the newer one has ended", lambda: cloud.api.get(f"/v1/rollouts/{newer['rollout']}")["ended"])
    assert {runs(cloud, off.name), runs(cloud, on.name)} == {newer["release"]}
    older = eventually("the older one has ended", lambda: (one := cloud.api.get(path))["ended"] and one)
    assert older["state"] == "finished" and older["superseded_by"] == newer["rollout"]


def test_a_failed_gate_rolls_the_canary_back(cloud: Cloud, fleet: list[Agent]) -> None:
    """The canary runs the release well, but not as fast as was asked for (no device is): once it has answered a few
    requests it goes back by our word, the other is never told, and the rollout has failed, with the figure."""
    before = runs(cloud, "cam-1")
    assert before == runs(cloud, "cam-2")
    gate = ("--canary", "1", "--gate", "p95<1us", "--gate-after", "3 requests / 1h")
    made = cloud.json("deploy", "digits", "--partition", "device", "--to", "all", *gate)
    path = f"/v1/rollouts/{made['rollout']}"

    def on_trial() -> Agent | None:
        there = [one for one in cloud.api.get(f"{path}/devices") if one["ran_at"]]
        return next((agent for agent in fleet if there and agent.name == there[0]["device"]), None)

    canary = eventually("the canary runs it", on_trial)
    for jpeg, _ in frames(4):
        canary.infer("digits", frame_input(jpeg))

    last = ended(cloud, made["rollout"], 11)
    assert last["states"]["rolled back"] == 1 and last["states"]["skipped"] == 1
    assert last["failures"][0]["kind"] == "gate p95<1us" and " us" in last["failures"][0]["example"]
    assert runs(cloud, "cam-1") == runs(cloud, "cam-2") == before


def deploy(cloud: Cloud, partition: str) -> Any:
    """A plain deployment to both."""
    return cloud.api.post("/v1/deployments", {"model": "digits", "partition": partition, "to": ["all"]})


def test_commands_refuse_what_does_not_apply(cloud: Cloud, fleet: list[Agent]) -> None:
    """With the reason, and the codes of a wrong call; nothing is made of an expression with a typo."""
    newest = cloud.api.get("/v1/rollouts")[-1]
    assert "cannot be paused: it is" in cloud.edgectl("rollout", "pause", str(newest["id"]), code=2)
    refused = cloud.edgectl("deploy", "digits", "--to", "kind=lab and", code=2)
    assert "kind=lab and\n" in refused and " " * 16 + "^" in refused
    assert cloud.api.get("/v1/rollouts")[-1]["id"] == newest["id"]
    table = cloud.edgectl("rollout", "list")
    assert "digits@1" in table and newest["state"] in table
    assert "█" in cloud.edgectl("rollout", "status")
