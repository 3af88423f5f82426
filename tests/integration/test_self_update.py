"""An agent replaces itself, as processes: real mosquitto, TUF metadata and TLS, real wheels, real environments.

The versions are these sources under other numbers, some of them with a fault. Whoever supervises the agent is a loop in
a shell: the least that any device has.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgesplit import Client
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import ModelState
from edgesplit.release import manifest
from edgesplit.release.agent_release import AGENT_MODEL, build_name, this_machine
from edgesplit.release.manifest import Chunk, DesiredRelease, Manifest, Slice, SliceFile, Statement
from edgesplit.trust.identity import encode_claim
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_controller.releases.agent_releases import chunk_runs
from integration.test_agent import DEVICE, Made, SmallController
from support.agent_engine import EXPECTED, INPUT, eventually
from support.wheels import these_sources

BEGIN = b"def _run(options: argparse.Namespace) -> int:\n"
SUPERVISOR = 'while [ -e "$0" ]; do "$@"; done'


def ends(name: str, data: bytes) -> bytes:
    """A version that passes for one, and ends as soon as it runs."""
    return _begins(name, data, b"    raise SystemExit(9)\n")


def deaf(name: str, data: bytes) -> bytes:
    """A version that looks for the broker where there is none."""
    return _begins(name, data, b"    options.broker = '127.0.0.1:9'\n")


def _begins(name: str, data: bytes, line: bytes) -> bytes:
    if name != "edgesplit_agent/main.py":
        return data
    assert BEGIN in data
    return data.replace(BEGIN, BEGIN + line)


class Version:
    """A release of the agent, as `Made` is one of a model."""

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


class Device:
    """`edgesplit-agent launch`, started again whenever it ends."""

    def __init__(self, controller: SmallController, folder: Path) -> None:
        self.controller = controller
        self.data = folder / DEVICE
        self.claim = folder / "claim.json"
        self.claim.write_bytes(encode_claim(controller.claim()))
        self.log = folder / "agent.log"
        self.going = folder / "going"
        self.shell: subprocess.Popen[bytes] | None = None

    def start(self, *extra: str, tree: Path | None = None) -> None:
        """Start the installed version: this one, or the one in another source tree."""
        self.going.touch()
        agent = [sys.executable, "-m", "edgesplit_agent.main", "launch", "--data", str(self.data)]
        agent += ["--claim", str(self.claim), "--port", "0", "--health-seconds", "0.2", *extra]
        rooms = [str(tree / room) for room in ("sdk", "agent", "offload")] if tree else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*rooms, *filter(None, sys.path)])}
        with self.log.open("ab") as log:
            self.shell = subprocess.Popen(
                ["sh", "-c", SUPERVISOR, str(self.going), *agent],
                stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.going.unlink(missing_ok=True)
        if self.shell is not None:
            os.killpg(self.shell.pid, number)
            self.shell.wait(60)
            self.shell = None

    def told(self) -> ModelState:
        """What it reported last of its own version."""
        said = self.controller.reported()
        mine = [one for one in said.models if one.model == AGENT_MODEL] if said is not None else []
        return mine[0] if mine else ModelState(AGENT_MODEL, "", "", "fetching")

    def runs(self, version: Version) -> bool:
        """It says that it was found healthy."""
        told = self.told()
        return (told.release, told.state) == (version.digest, "running")

    def is_back(self, on: Version, from_: Version) -> bool:
        """It runs that version again, after it was told to run the other."""
        told = self.told()
        return (told.release, told.desired_release, told.state) == (on.digest, from_.digest, "rolled back")

    def version(self) -> str:
        """Of the agent that was born last."""
        birth = self.controller.last(messages.Birth)
        return birth.agent_version if birth is not None else ""

    def answers(self) -> bool:
        """Applications are answered, by the model that was there all along."""
        folder = DataFolder(self.data)
        eventually(
            "the agent says where it is", lambda: folder.read_address() is not None, 60
        )  # after its first report
        here = folder.read_address()
        assert here is not None
        with Client(here.url) as client:
            return bool((client.infer("tiny", {"x": INPUT}, deadline_s=30).outputs["y"] == EXPECTED).all())


class Controller(SmallController):
    """One that tells devices a version besides a model."""

    def say(self, version: Version, model: Made) -> None:
        self.made[version.digest] = version  # type: ignore[assignment]
        if version.digest not in self.repository.releases():
            self.repository.add_release(version.raw)
        self.counter = max(self.counter + 1, int(time.time()))
        self.statement = self.repository.sign_statement(
            Statement(
                device=DEVICE,
                releases=(DesiredRelease(AGENT_MODEL, version.digest), DesiredRelease("tiny", model.digest)),
                counter=self.counter, expires=int(time.time()) + 3600,
            )
        )  # fmt: skip
        self.delivery.publish_statements([DEVICE])


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    if shutil.which("mosquitto") is None and not Path("/usr/sbin/mosquitto").exists():
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    made = Controller(tmp_path / "controller")
    made.start()
    yield made
    made.stop()


def test_an_agent_replaces_itself_and_comes_back_from_what_fails(controller: Controller, tmp_path: Path) -> None:
    """The installed version installs the next one, which serves the same model under the same identity and is
    committed. A version that ends at each start, and one that never reaches the broker, give way to it again by
    themselves, and say why."""
    good = Version(tmp_path, "7.1.0")
    device, model = Device(controller, tmp_path), Made(1)
    controller.deploy(model)
    device.start()
    try:
        eventually("the model runs", lambda: _runs(controller, model), 90)
        certificate = DataFolder(device.data).certificate_file.read_bytes()

        controller.say(good, model)
        eventually(
            "the next version is committed",
            lambda: device.runs(good),
            120,
        )
        assert device.version() == "7.1.0+device" and device.answers()
        assert DataFolder(device.data).certificate_file.read_bytes() == certificate

        deadly = Version(tmp_path, "7.2.0", ends)
        controller.say(deadly, model)
        eventually("it is back", lambda: device.is_back(good, deadly), 120)
        assert "3 starts in a row" in device.told().detail
        assert device.version() == "7.1.0+device" and device.answers()

        device.stop()
        device.start("--trial-seconds", "1")
        silent = Version(tmp_path, "7.3.0", deaf)
        controller.say(silent, model)
        eventually("it is back once more", lambda: device.is_back(good, silent), 120)
        assert device.told().detail == "it did not reach the broker within 1 s"
        assert device.version() == "7.1.0+device" and device.answers() and controller.enrolments == 1
    except BaseException:
        print(device.log.read_text()[-6_000:])
        raise
    finally:
        device.stop(signal.SIGKILL)


def _runs(controller: SmallController, model: Made) -> bool:
    said = controller.reported()
    return said is not None and any((one.release, one.state) == (model.digest, "running") for one in said.models)
