"""Agents that change their own version in one process: the real update loop, shelf and launcher's decisions, with a
stand-in where wheels would be unpacked, and each `exec` a new `Machine`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from edgesplit.errors import ModelRefused
from edgesplit.plan import Plan
from edgesplit.release import manifest
from edgesplit.release.agent_release import AGENT_MODEL, Build, build_name, this_machine
from edgesplit.release.bundle_format import INDEX_FILE, BundleIndex, chunk_path, encode_index, statement_path
from edgesplit.release.manifest import Chunk, DesiredRelease, Manifest, Slice, SliceFile, Statement
from edgesplit.release_store import StoredRelease
from edgesplit_agent.self_update.launcher import LaunchContext, prepare_start
from edgesplit_agent.self_update.manager import VersionManager
from edgesplit_agent.self_update.version_store import VersionStore
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_agent.worker.host import Host
from support.device_storage import DAY, DEVICE, MODEL, Machine, Source, Tiny

INSTALLED_VERSION = "0.1.0"


class AgentRelease:
    """A release of the agent whose wheels are a few bytes; `unfit`: it says itself that it cannot run here."""

    def __init__(self, version: str, *, name: str = "", recut_of: str = "", unfit: bool = False) -> None:
        self.version, self.unfit = version, unfit
        wheels = [f"wheel of {version}".encode(), b"a wheel that stays"]
        self.chunks = {hashlib.sha256(data).hexdigest(): data for data in wheels}
        whole = b"".join(wheels)
        file = SliceFile(
            "wheels.tar", len(whole), hashlib.sha256(whole).hexdigest(),
            tuple(Chunk(digest, len(data)) for digest, data in self.chunks.items()),
        )  # fmt: skip
        slices = (Slice(name or build_name(version, this_machine()), "agent", (), (), (), (file,)),)
        self.raw = manifest.encode_manifest(
            Manifest(
                model=f"{AGENT_MODEL}@1", model_sha256="0" * 64, created="2025-06-15T00:00:00Z", input_spec=None,
                inputs=(),
                outputs=(), slices=slices, plans={}, recut_of=recut_of,
            )
        )  # fmt: skip
        self.digest = manifest.release_digest(self.raw)


class SelfUpdateHarness:
    """One device and its controller; `start` is what a supervisor does, the launcher first."""

    def __init__(self, folder: Path, data: Path | None = None, source: Source | None = None) -> None:
        self.source = source or Source(folder / "repository")
        self.data = data or folder / "device"
        self.model = Tiny(1)
        if source is None:
            self.source.add(self.model)
        self.agents: dict[str, AgentRelease] = {}
        self.again = 0
        """How often an agent asked to start anew."""
        self.installed = INSTALLED_VERSION
        self.launcher = True
        self.mutes: set[str] = set()
        """Releases whose agent never reaches the broker."""
        self.forgets: set[str] = set()
        """Releases whose agent does not serve the model any more."""

    def add(self, *made: AgentRelease) -> None:
        self.source.add(*made)  # type: ignore[arg-type]
        self.agents.update({one.digest: one for one in made})

    def add_known(self, other: SelfUpdateHarness) -> None:
        """What another harness of the same controller has."""
        self.agents.update(other.agents)

    def say(self, agent: AgentRelease | None, *, model: bool = True) -> bytes:
        """A newer statement than all before."""
        self.source.counter += 1
        releases = [DesiredRelease(MODEL, self.model.digest)] if model else []
        releases += [DesiredRelease(AGENT_MODEL, agent.digest)] if agent is not None else []
        self.source.retained = self.source.repository.sign_statement(
            Statement(
                device=DEVICE, releases=tuple(releases), counter=self.source.counter,
                expires=int(self.source.now + DAY),
            )
        )  # fmt: skip
        return self.source.retained

    def bundle(self, folder: Path, *releases: str) -> Path:
        """A release bundle with the newest statement and all that these releases consist of."""
        files, _ = self.source.repository.offline_files(releases)
        assert self.source.retained is not None
        files[statement_path(DEVICE)] = self.source.retained
        files.update({chunk_path(sha256): data for sha256, data in self.source.chunks.items()})
        index = BundleIndex(
            controller="controller", created=int(self.source.now), valid_until=int(self.source.now + DAY),
            limited_by="timestamp", devices={DEVICE: "pi4"}, releases=(),
        )  # fmt: skip
        files[INDEX_FILE] = encode_index(index)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return folder

    def install(self, shelf: VersionStore, release: str, build: Build, folder: Path, question: tuple[str, ...]) -> None:
        """As `put_together`, of one file."""
        if not shelf.damage(release):
            return
        if self.agents[release].unfit:
            raise ModelRefused(f"agent {build.version} cannot run here: it needs a newer launcher")
        part = shelf.new_part_folder(release)
        (part / "bin").mkdir()
        (part / "bin" / "python").write_bytes((folder / "wheels.tar").read_bytes())
        shelf.adopt(part, release, build.version)

    def start(self, *, online: bool = True, serve: bool = True) -> Machine:
        """The launcher, and the agent that it becomes."""
        told = None
        if self.launcher:
            versions = prepare_start(VersionStore(self.data), self.installed)
            told = LaunchContext(versions.running, bool(versions.trial), ("launcher",), 1)
        running = told.release if told is not None else ""

        def own_version(folder: DataFolder) -> VersionManager:
            return VersionManager(folder, told, self._restart, self.install)

        start = _refuse_to_load if running in self.forgets else None
        machine = Machine(self.data, self.source, start=start, own_version=own_version)
        return machine.boot(online=online and running not in self.mutes)

    def _restart(self) -> None:
        self.again += 1

    def runs(self, machine: Machine) -> str:
        """The release that this process is; empty for the installed version."""
        return machine.standing.running.get(AGENT_MODEL, "")

    def settle(self, machine: Machine, until: Callable[[Machine], bool] = lambda machine: False) -> Machine:
        """Until nothing is left to do, through every start that the agent asks for itself."""
        for _ in range(12):
            self.again = 0
            machine.settle(lambda now: self.again > 0 or until(now))
            if not self.again:
                return machine
            machine.stop()
            machine = self.start()
        raise AssertionError(f"it starts over and over: {VersionStore(self.data).read()}")


def _refuse_to_load(release: StoredRelease, plan: Plan) -> Host:
    raise ModelRefused("this version of the agent cannot load it")


def told(machine: Machine) -> tuple[str, str, str]:
    """What was reported last of the agent: what runs, the state, and why."""
    found = next(one for one in machine.reports[-1][1] if one.model == AGENT_MODEL)
    return found.release, found.state, found.detail
