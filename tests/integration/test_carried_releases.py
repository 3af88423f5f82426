"""A bundle with a real controller and a real agent: deployed while the device has no network, brought to it, run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgesplit.controller_client.claims import ClaimRequest, create_claim
from edgesplit.errors import EdgeError, UsageError
from edgesplit_agent import main as agent_command
from edgesplit_cli.main import cli
from support.edgesplit_processes import Agent, Cloud, eventually, frame_input, frames

NOWHERE = ["--broker", "127.0.0.1:9"]


class ControllerWithDevices:
    """One controller; its operator and its devices type in this process, which has all loaded already."""

    def __init__(self, cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
        self.cloud, self._capsys = cloud, capsys

    def edgectl(self, *words: str) -> Any:
        """What it printed as JSON; its error is raised."""
        result = CliRunner().invoke(cli, ["--data", str(self.cloud.data), *words, "--json"], catch_exceptions=True)
        if isinstance(result.exception, EdgeError):
            raise result.exception
        assert result.exit_code == 0, (words, result.output, result.exception)
        return json.loads(result.stdout)

    def agent(self, *words: str, code: int = 0) -> str:
        """What the device's command said."""
        self._capsys.readouterr()
        assert agent_command.main(words) == code
        said = self._capsys.readouterr()
        return said.out if code == 0 else said.err

    def enrolled(self, name: str) -> Agent:
        """A device that has its identity, and was never on the broker."""
        claim = self.cloud.folder / f"{name}.claim.json"
        claim.write_text(create_claim(self.cloud.api, ClaimRequest(device=name, device_class="raspberrypi4")))
        agent = Agent(self.cloud, name, claim)
        self.cloud.agents.append(agent)
        self.agent("enrol", "--data", str(agent.data), "--claim", str(claim))
        return agent

    def running(self, agent: Agent) -> dict[str, str]:
        """Release by model; nothing before the agent answers."""
        self._capsys.readouterr()
        if agent_command.main(["status", "--data", str(agent.data)]) != 0:
            return {}
        status = json.loads(self._capsys.readouterr().out)
        return {one["model"]: one["release"] for one in status["models"]}

    def agrees(self, name: str, release: str) -> bool:
        """The controller was told that this runs."""
        models = self.cloud.api.get(f"/v1/devices/{name}").get("models") or []
        return any(model["release"] == release and model["state"] == "running" for model in models)


def test_an_offline_device_runs_releases_from_usb_bundles_and_the_controller_agrees_later(
    cloud: Cloud, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From `edgectl deploy` to an answer without a broker; another release while the agent runs; what is for another
    device changes nothing; then online, where nothing is left to be fetched. A bundle lasts as long as its metadata."""
    world = ControllerWithDevices(cloud, capsys)
    cloud.push_digits()
    agent = world.enrolled("cam-1")
    with pytest.raises(EdgeError, match="edgectl deploy"):
        world.edgectl("bundle", "--to", str(tmp_path / "x"), "--for", "cam-1")
    first = world.edgectl("deploy", "digits", "--to", "cam-1", "--partition", "device")["release"]
    with pytest.raises(EdgeError, match=r"timestamp ends.*--valid"):
        world.edgectl("bundle", "--to", str(tmp_path / "x"), "--for", "cam-1", "--valid", "14d")
    stick = tmp_path / "EDGESPLIT"
    told = world.edgectl("bundle", "--to", str(stick), "--for", "cam-1", "--valid", "3d")
    assert told["releases"][0]["release"] == first and told["limited_by"] == "timestamp"

    shown = json.loads(world.agent("bundle", "show", str(stick), "--data", str(agent.data), "--json"))
    assert shown["verified"].startswith("valid")
    assert "next start" in world.agent("bundle", "apply", str(stick), "--data", str(agent.data))
    normal = agent.process.argv
    agent.process.argv = [*normal, *NOWHERE]
    agent.process.start()
    eventually("the model is served", lambda: world.running(agent) == {"digits": first})
    frame, label = frames(1)[0]
    answer = agent.infer("digits", frame_input(frame))
    assert int(next(iter(answer.outputs.values())).argmax()) == label

    second = world.edgectl("deploy", "digits", "--to", "cam-1", "--partition", "cloud")["release"]
    newer, theirs = tmp_path / "newer.tar", tmp_path / "theirs"
    world.edgectl("bundle", "--to", str(newer), "--for", "cam-1")
    world.enrolled("cam-2")
    world.edgectl("deploy", "digits", "--to", "cam-2", "--partition", "device")
    world.edgectl("bundle", "--to", str(theirs), "--for", "cam-2")
    refused = world.agent("bundle", "apply", str(theirs), "--data", str(agent.data), code=UsageError.exit_code)
    assert "nothing for cam-1" in refused
    assert "applied" in world.agent("bundle", "apply", str(newer), "--data", str(agent.data))
    eventually("the newer one is served", lambda: world.running(agent) == {"digits": second})
    eventually("the wish is cleared away", lambda: not (agent.data / "bundle.json").exists())
    agent.process.stop()

    agent.process.argv = normal
    agent.start()
    eventually("the controller agrees", lambda: world.agrees("cam-1", second))
    assert json.loads(world.agent("status", "--data", str(agent.data)))["delivery"]["chunks"] == 0
