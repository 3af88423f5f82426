"""An agent replaces itself, as processes: real mosquitto, TUF metadata and TLS, real wheels, real environments.

The versions are these sources under other numbers, some of them with a fault. The supervisor is a loop in a shell: the
least that any device has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgesplit_agent.state.data_folder import DataFolder
from support.agent_engine import eventually
from support.small_controller import TinyRelease
from support.supervised_agent import AgentReleasingController, BuiltAgentRelease, SupervisedAgent

BEGIN = b"def _run(options: argparse.Namespace) -> int:\n"


def exiting(name: str, data: bytes) -> bytes:
    """Changes the sources into a version that passes its checks, and exits as soon as it runs."""
    return _insert_at_start(name, data, b"    raise SystemExit(9)\n")


def unreachable(name: str, data: bytes) -> bytes:
    """Changes the sources into a version that looks for the broker where there is none."""
    return _insert_at_start(name, data, b"    options.broker = '127.0.0.1:9'\n")


def _insert_at_start(name: str, data: bytes, line: bytes) -> bytes:
    if name != "edgesplit_agent/main.py":
        return data
    assert BEGIN in data
    return data.replace(BEGIN, BEGIN + line)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[AgentReleasingController]:
    with AgentReleasingController(tmp_path / "controller") as running:
        yield running


def test_an_agent_updates_itself_and_rolls_back_from_versions_that_fail(
    controller: AgentReleasingController, tmp_path: Path
) -> None:
    """The installed version installs the next one, which serves the same model under the same identity and is
    committed. A version that exits at each start, and one that never reaches the broker, are rolled back to it, and the
    reported state says why."""
    good = BuiltAgentRelease(tmp_path, "7.1.0")
    model = TinyRelease(1)
    controller.deploy(model)
    with SupervisedAgent(controller, tmp_path) as agent:
        agent.start()
        eventually("the model runs", lambda: controller.has_reported_running(model), 90)
        certificate = DataFolder(agent.data).certificate_file.read_bytes()

        controller.deploy_version(good, model)
        eventually("the next version is committed", lambda: agent.is_running(good), 120)
        assert agent.version() == "7.1.0+device" and agent.is_serving()
        assert DataFolder(agent.data).certificate_file.read_bytes() == certificate

        failing = BuiltAgentRelease(tmp_path, "7.2.0", exiting)
        controller.deploy_version(failing, model)
        eventually("it has rolled back", lambda: agent.has_rolled_back(good, failing), 120)
        assert "3 starts in a row" in agent.reported().detail
        assert agent.version() == "7.1.0+device" and agent.is_serving()

        agent.stop()
        agent.start("--trial-seconds", "1")
        silent = BuiltAgentRelease(tmp_path, "7.3.0", unreachable)
        controller.deploy_version(silent, model)
        eventually("it has rolled back once more", lambda: agent.has_rolled_back(good, silent), 120)
        assert agent.reported().detail == "it did not reach the broker within 1 s"
        assert agent.version() == "7.1.0+device" and agent.is_serving() and controller.enrolments == 1
