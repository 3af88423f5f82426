"""A real controller, broker, offload server and agents as processes, for tests. Nothing here is a mock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edgesplit.client.client import Client
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import EdgeError
from edgesplit.input_spec import FRAME
from edgesplit_cli.demo.processes import DemoProcess
from edgesplit_cli.demo.run import free_port
from edgesplit_cli.demo.scenario import INPUT_SPEC
from support import REPOSITORY

DIGITS = REPOSITORY / "examples" / "digits"
PATIENCE_S = 60.0
T = TypeVar("T")
SHARED = ("keys", "tuf", "offload", "broker")
"""What controller processes share beside database and object store: keys, signed metadata, lists."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_TICK = threading.Event()


def eventually(what: str, holds: Callable[[], T | None], seconds: float = PATIENCE_S) -> T:
    """Wait until `holds` gives something true and return it; an AssertionError names what never came."""
    until = monotonic() + seconds
    last: Exception | None = None
    while monotonic() < until:
        try:
            if found := holds():
                return found
        except (EdgeError, OSError, KeyError) as error:
            last = error
        _TICK.wait(0.05)
    raise AssertionError(f"never came: {what}" + (f" (last: {last})" if last else ""))


class Cloud:
    """`edgectl up` on a data folder."""

    def __init__(self, folder: Path, *extra: str) -> None:
        self.folder = folder
        self.data = folder / "cloud"
        self.agents: list[Agent] = []
        ports = ["--api-port", "0", "--mqtt-port", "0", "--offload-port", "0"]
        folder.mkdir(parents=True, exist_ok=True)
        self.process = DemoProcess("up", [*self._edgectl(), "up", *ports, *extra], folder / "up.log", ONE_THREAD)

    def start(self) -> None:
        """Start it and wait until the API answers."""
        (self.data / "controller.json").unlink(missing_ok=True)
        self.process.start()
        eventually("the controller answers", self._answers)

    def _answers(self) -> bool:
        if not self.process.is_running:
            raise AssertionError(f"`edgectl up` ended: {self.process.log_tail()}")
        return bool(ControllerClient.connect(self.data).get("/v1/health"))

    def stop(self) -> None:
        """Stop the agents and the controller."""
        for agent in self.agents:
            agent.process.stop()
        self.process.stop()

    @property
    def api(self) -> ControllerClient:
        """The HTTP API."""
        return ControllerClient.connect(self.data)

    @property
    def addresses(self) -> dict[str, Any]:
        """What `up` wrote about itself."""
        found: dict[str, Any] = json.loads((self.data / "controller.json").read_text())
        return found

    def _edgectl(self) -> list[str]:
        return [sys.executable, "-m", "edgesplit_cli.main", "--data", str(self.data)]

    def edgectl(self, *words: str, code: int = 0, timeout: float = 180.0) -> str:
        """Run a command; its output. Fails the test unless it ends with `code`."""
        done = subprocess.run([*self._edgectl(), *words], capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == code, (
            f"edgectl {' '.join(words)} ended with {done.returncode}: {done.stdout}{done.stderr}"
        )
        return done.stdout if code == 0 else done.stderr

    def json(self, *words: str) -> Any:
        """Run a command with --json; what it printed."""
        return json.loads(self.edgectl(*words, "--json"))

    def push_digits(self) -> None:
        """The digits model with its input spec."""
        self.edgectl("model", "push", str(DIGITS / "digits.onnx"), "--name", "digits", "--input", INPUT_SPEC)

    def agent(self, name: str, profile: str = "raspberrypi4", *extra: str, link: str = "wifi") -> Agent:
        """Claim, enrol and start an emulated device; waits until it is online."""
        claim = self.folder / f"{name}.claim.json"
        self.edgectl("device", "claim", name, "--profile", profile, "--link", link, "--out", str(claim))
        agent = Agent(self, name, claim, *extra)
        self.agents.append(agent)
        agent.start()
        return agent


class FurtherProcess(Cloud):
    """`edgectl up --join` on a data folder of its own, in which only keys, metadata and lists are the first one's."""

    def __init__(self, first: Cloud, folder: Path, *extra: str) -> None:
        super().__init__(folder)
        self.first = first
        self.data.mkdir(parents=True)
        for name in SHARED:
            (self.data / name).symlink_to(first.data / name)
        self.port = free_port()
        at = first.addresses
        command = [*self._edgectl(), "up", "--join", "--api-port", str(self.port), *extra]
        command += ["--broker", f"mqtts://{at['mqtt_host']}:{at['mqtt_port']}", "--offload-url", at["offload_url"]]
        self.process = DemoProcess("further", command, folder / "up.log", ONE_THREAD)

    def start(self) -> None:
        self.process.start()
        addresses = {**self.first.addresses, "api_url": f"https://127.0.0.1:{self.port}"}
        eventually("it has its certificate", (self.data / "ca.pem").exists)
        (self.data / "controller.json").write_text(json.dumps(addresses))  # for this test's calls
        (self.data / "operator.token").write_bytes((self.first.data / "operator.token").read_bytes())
        eventually("the further process answers", self._answers)


class Agent:
    """An agent process."""

    def __init__(self, cloud: Cloud, name: str, claim: Path, *extra: str) -> None:
        self.cloud = cloud
        self.name = name
        self.port = free_port()
        self.data = cloud.folder / "devices" / name
        argv = [sys.executable, "-m", "edgesplit_agent.main", "run", "--data", str(self.data), "--claim", str(claim)]
        argv += ["--port", str(self.port), "--emulate", "--health-seconds", "0.5"]
        argv += ["--die-with-parent", str(os.getpid()), *extra]
        self.process = DemoProcess(name, argv, cloud.folder / f"{name}.log", ONE_THREAD)
        self.client = Client(self.url)

    @property
    def url(self) -> str:
        """Of the local endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until the controller sees it online."""
        self.process.start()
        eventually(
            f"{self.name} is online", lambda: self.cloud.api.get(f"/v1/devices/{self.name}")["state"] == "online"
        )

    def infer(self, model: str, inputs: dict[str, Any], deadline_s: float = 20.0) -> Any:
        """One answer."""
        return self.client.infer(model, inputs, deadline_s=deadline_s)


def frames(count: int) -> list[tuple[bytes, int]]:
    """Held-out frames with their labels, spread over the set."""
    labels: dict[str, int] = json.loads((DIGITS / "frames" / "labels.json").read_text())
    names = sorted(labels)[:: max(1, len(labels) // count)][:count]
    return [((DIGITS / "frames" / name).read_bytes(), labels[name]) for name in names]


def write_frames(folder: Path, count: int) -> Path:
    """A folder of held-out frames with their labels."""
    folder.mkdir()
    shown = frames(count)
    for number, (jpeg, _) in enumerate(shown):
        (folder / f"{number:03}.jpg").write_bytes(jpeg)
    (folder / "labels.json").write_text(json.dumps({f"{n:03}.jpg": label for n, (_, label) in enumerate(shown)}))
    return folder


def frame_input(jpeg: bytes) -> dict[str, Any]:
    """A frame as the model's input."""
    return {FRAME: jpeg}


def relative_error(got: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """Largest difference, in parts of the reference's largest value."""
    return float(
        np.abs(got.astype(np.float64) - wanted.astype(np.float64)).max() / max(1e-12, float(np.abs(wanted).max()))
    )
