"""What a controller keeps from one start to the next, as processes: options, and addresses that devices hold."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgesplit.controller_client.client import ControllerClient
from edgesplit_cli.demo.run import free_port
from edgesplit_controller.dashboard.assets import is_built
from support.edgesplit_processes import ONE_THREAD, Cloud, eventually


class Start:
    """`edgectl up` on a data folder, on a terminal."""

    def __init__(self, data: Path, *words: str) -> None:
        argv = [sys.executable, "-m", "edgesplit_cli.main", "--data", str(data), "up", *words]
        self.terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            argv, stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, **ONE_THREAD}, text=True
        )
        os.close(theirs)

    def ready(self) -> str:
        """What it prints until it is ready."""
        text = ""
        while "Ctrl-C stops it" not in text:
            assert select.select([self.terminal], [], [], 60)[0], text
            try:
                text += os.read(self.terminal, 65_536).decode()
            except OSError:  # it has ended
                _, problem = self.process.communicate(timeout=30)
                raise AssertionError(f"{text}{problem}") from None
        return text.replace("\r\n", "\n")

    def refused(self) -> str:
        """What it says where it does not start; its exit code is that of wrong usage."""
        _, problem = self.process.communicate(timeout=60)
        assert self.process.returncode == 2, problem
        return problem

    def stop(self) -> None:
        """As Ctrl-C does."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        os.close(self.terminal)


def test_a_start_without_options_is_the_start_before(tmp_path: Path) -> None:
    """Ports and names hold, so that an enrolled device finds the controller; a start that would strand it is refused,
    names it, and changes nothing; --force starts all the same."""
    cloud = Cloud(tmp_path)
    ports = [str(free_port()) for _ in range(3)]
    options = ("--api-port", ports[0], "--mqtt-port", ports[1], "--offload-port", ports[2], "--host", "localhost")
    first = Start(cloud.data, *options)
    text = first.ready()
    assert f"ready at https://localhost:{ports[0]}" in text
    assert f"settings:   api-port {ports[0]}, host localhost" in text
    agent = cloud.agent("cam-1")
    first.stop()

    second = Start(cloud.data)
    assert f"ready at https://localhost:{ports[0]}" in second.ready()
    eventually("cam-1 is back", lambda: cloud.api.get("/v1/devices/cam-1")["state"] == "online")
    second.stop()

    other = str(free_port())
    problem = Start(cloud.data, "--mqtt-port", other).refused()
    assert "cam-1: the broker mqtts://localhost:" in problem and f"--mqtt-port {ports[1]}" in problem
    assert other not in cloud.edgectl("config", "show")
    third = Start(cloud.data, "--mqtt-port", other, "--force")
    assert f"mqtts://localhost:{other}" in third.ready()
    third.stop()
    agent.process.stop()


def test_up_prints_the_dashboards_address_with_a_code_that_works_once(tmp_path: Path) -> None:
    """On a terminal. The code opens a session of the folder's owner."""
    if not is_built():
        pytest.skip("the dashboard is not built here: make dashboard")
    start = Start(tmp_path, "--api-port", "0", "--mqtt-port", "0", "--no-offload")
    found = re.search(r"dashboard:  (https://\S+)/#login=(edgesplit_code_\w+) \(signs in once", start.ready())
    assert found is not None
    api = ControllerClient.connect(tmp_path)
    assert found[1] == api.url
    assert api.post("/v1/session", {"code": found[2]})["operator"] == "operator"
    start.stop()


def test_a_log_never_holds_a_login_code(tmp_path: Path) -> None:
    """Output that is no terminal may be read by others: it has the command that makes a code, and no code."""
    cloud = Cloud(tmp_path, "--no-offload")
    cloud.start()
    log = eventually("it is ready", lambda: (text := cloud.process.log.read_text()) and "Ctrl-C" in text and text)
    cloud.stop()
    assert "edgesplit_code_" not in log
    assert "`edgectl dashboard` prints an address that signs in once" in log or not is_built()
