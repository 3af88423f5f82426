"""An agent process that replaces its own version, and the controller that states versions to it."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from edgesplit import Client
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import ModelState
from edgesplit.release import manifest
from edgesplit.release.agent_release import AGENT_MODEL, build_name, this_machine
from edgesplit.release.manifest import Chunk, DesiredRelease, Manifest, Slice, SliceFile
from edgesplit.trust.identity import encode_document
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_controller.releases.agent_releases import chunk_runs
from support.agent_engine import EXPECTED, INPUT, eventually
from support.small_controller import DEVICE, Release, SmallController, agent_environment
from support.wheels import these_sources

SUPERVISOR = 'while [ -e "$0" ]; do "$@"; done'


class BuiltAgentRelease:
    """A release of the agent: wheels of these sources, or of another tree, under a version number of its own."""

    def __init__(
        self,
        folder: Path,
        version: str,
        change: Callable[[str, bytes], bytes] = lambda name, data: data,
        tree: Path | None = None,
    ) -> None:
        content = these_sources(version, change, tree)
        part = folder / f"{version}.tar"
        part.write_bytes(content)
        pieces = [content[at : at + size] for at, size in chunk_runs(part, version)]
        self.chunks = {hashlib.sha256(data).hexdigest(): data for data in pieces}
        chunks = tuple(Chunk(hashlib.sha256(data).hexdigest(), len(data)) for data in pieces)
        file = SliceFile("wheels.tar", len(content), hashlib.sha256(content).hexdigest(), chunks)
        slices = (Slice(build_name(version, this_machine()), "agent", (), (), (), (file,)),)
        self.raw = manifest.encode_manifest(
            Manifest(
                model=f"{AGENT_MODEL}@1", model_sha256="0" * 64, created="2025-06-15T00:00:00Z", input_spec=None,
                inputs=(),
                outputs=(), slices=slices, plans={},
            )
        )  # fmt: skip
        self.digest = manifest.release_digest(self.raw)


class SupervisedAgent:
    """`edgesplit-agent launch`, started again whenever it ends. A `with` statement ends it, and prints the end of its
    log if the block fails."""

    def __init__(self, controller: SmallController, folder: Path) -> None:
        self.controller = controller
        self.data = folder / DEVICE
        self.claim = folder / "claim.json"
        self.claim.write_bytes(encode_document(controller.claim()))
        self.log = folder / "agent.log"
        self.flag = folder / "supervise"
        self.shell: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            print(self.log.read_text()[-6_000:])
        self.stop(signal.SIGKILL)

    def start(self, *extra: str, tree: Path | None = None) -> None:
        """Start the installed version: this one, or the one in another source tree."""
        self.flag.touch()
        agent = [sys.executable, "-m", "edgesplit_agent.main", "launch", "--data", str(self.data)]
        agent += ["--claim", str(self.claim), "--port", "0", "--health-seconds", "0.2", *extra]
        rooms = [str(tree / room) for room in ("sdk", "agent", "offload")] if tree else []
        with self.log.open("ab") as log:
            self.shell = subprocess.Popen(
                ["sh", "-c", SUPERVISOR, str(self.flag), *agent],
                stdout=log, stderr=log, env=agent_environment(*rooms), start_new_session=True,
            )  # fmt: skip

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.flag.unlink(missing_ok=True)
        if self.shell is not None:
            os.killpg(self.shell.pid, number)
            self.shell.wait(60)
            self.shell = None

    def reported(self) -> ModelState:
        """What it reported last of its own version."""
        models = self.controller.reported_models()
        own = [model for model in models if model.model == AGENT_MODEL]
        return own[0] if own else ModelState(AGENT_MODEL, "", "", "fetching")

    def is_running(self, version: BuiltAgentRelease) -> bool:
        """It reports that this version was found healthy."""
        reported = self.reported()
        return (reported.release, reported.state) == (version.digest, "running")

    def has_rolled_back(self, to: BuiltAgentRelease, from_: BuiltAgentRelease) -> bool:
        """It runs the one version again, while the other is desired."""
        reported = self.reported()
        return (reported.release, reported.desired_release, reported.state) == (to.digest, from_.digest, "rolled back")

    def version(self) -> str:
        """The version in its newest birth message."""
        birth = self.controller.last(messages.Birth)
        return birth.agent_version if birth is not None else ""

    def is_serving(self) -> bool:
        """Applications are answered, by the model that was there all along."""
        folder = DataFolder(self.data)

        def is_listening() -> bool:  # the address is written after the first report, and may be an earlier agent's
            address = folder.read_address()
            return address is not None and Client(address.url).ready()

        eventually("the agent has written its address, and listens there", is_listening, 60)
        address = folder.read_address()
        assert address is not None
        with Client(address.url) as client:
            return bool((client.infer("tiny", {"x": INPUT}, deadline_s=30).outputs["y"] == EXPECTED).all())


class AgentReleasingController(SmallController):
    """A controller that states a version of the agent besides a model."""

    def deploy_version(self, version: BuiltAgentRelease, model: Release) -> None:
        """State that version of the agent and that model, which was deployed before."""
        self.releases[version.digest] = version
        if version.digest not in self.repository.releases():
            self.repository.add_release(version.raw)
        self.state(DesiredRelease(AGENT_MODEL, version.digest), DesiredRelease("tiny", model.digest))
