"""A device's parts in one process, without threads, clocks or a network: the real updater, trust store, chunk store and
engine over a folder, a controller that is at hand, and a runtime that shows what was loaded.

Time stands still but for `Machine.settle`, which lets it jump to when there is something to do.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgesplit.errors import InferenceFailed, LinkError
from edgesplit.identifiers import ModelRef
from edgesplit.mqtt.messages import ModelState
from edgesplit.oip import protocol as oip
from edgesplit.plan import Plan, Row
from edgesplit.release import manifest
from edgesplit.release.manifest import (
    DesiredRelease,
    GoldenExample,
    Manifest,
    Slice,
    SliceFile,
    Statement,
    chunk_of,
)
from edgesplit.runtime import Tensor, Tensors
from edgesplit_agent.releases.chunk_store import ChunkStore
from edgesplit_agent.self_update.manager import VersionManager
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.state.slots import Current
from edgesplit_agent.telemetry.request_record import DeviceRunObserver
from edgesplit_agent.updates.actions import DeviceUpdateActions
from edgesplit_agent.updates.reconciler import Reconciler, Step
from edgesplit_agent.updates.trial_controller import OnActivated
from edgesplit_agent.worker.host import StartHost, in_process
from edgesplit_controller.tuf.repository import Repository
from support.agent_engine import INPUT, LINK, H, X, Y

DEVICE, MODEL = "cam-1", "tiny"
NOW = 1_750_000_000.0
DAY = 86_400.0
HEALTH_S = 10.0
MOST_STEPS = 400
"""More than any way from one release to another has."""


@contextmanager
def imaginary_disks() -> Iterator[Path]:
    """A folder for thousands of devices' disks, in memory where that is to be had. Syncing costs nothing there: what is
    synced is looked at in a recorder's log only. What these devices log is not kept."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2**27
    logging.disable(logging.CRITICAL)
    real, os.fsync = os.fsync, lambda descriptor: None
    real_sync, os.sync = os.sync, lambda: None
    try:
        with tempfile.TemporaryDirectory(prefix="edgesplit-power-", dir=memory if roomy else None) as folder:
            yield Path(folder)
    finally:
        os.fsync, os.sync = real, real_sync
        logging.disable(logging.NOTSET)


class Tiny:
    """A release of y = (x + 1) * factor in two slices, of which the first keeps its weights from version to version."""

    def __init__(self, version: int, *, factor: float = 2.0, golden: float | None = None, kind: str = "good") -> None:
        self.version = version
        files = {
            "a": {"graph.onnx": [f"add {kind} {version}".encode()], "weights.bin": [b"w" * 300, b"v" * 100]},
            "b": {"graph.onnx": [json.dumps({"factor": factor, "kind": kind, "version": version}).encode()]},
        }
        answer = (INPUT + 1) * np.float32(factor if golden is None else golden)
        request = b"".join(oip.encode_request(oip.InferRequest({"x": INPUT}, id=f"golden {version}"))[0])
        response = b"".join(oip.encode_response(oip.InferResponse(MODEL, {"y": answer}, id="golden"))[0])
        pieces = [piece for slice_ in files.values() for chunks in slice_.values() for piece in chunks]
        self.chunks = {chunk_of(data).sha256: data for data in (*pieces, request, response)}
        slices = tuple(
            Slice(name, "onnx", (name,), (ends[0],), (ends[1],), tuple(_file(*one) for one in files[name].items()))
            for name, ends in (("a", (X, H)), ("b", (H, Y)))
        )
        self.slices = slices
        row = Row(name="local", device=("a", "b"), device_s=0.05)
        plan = Plan(model=f"{MODEL}@{version}", device_class="pi4", rows=(row,), link=LINK)
        self.raw = manifest.encode_manifest(
            Manifest(
                model=f"{MODEL}@{version}", model_sha256="0" * 64, created="2025-06-15T00:00:00Z", input_spec=None,
                inputs=(X,), outputs=(Y,), slices=slices, plans={"pi4": plan},
                golden=(GoldenExample(chunk_of(request), chunk_of(response)),),
            )
        )  # fmt: skip
        self.digest = manifest.release_digest(self.raw)


def _file(name: str, pieces: Sequence[bytes]) -> SliceFile:
    whole = b"".join(pieces)
    return SliceFile(name, len(whole), chunk_of(whole).sha256, tuple(map(chunk_of, pieces)))  # type: ignore[arg-type]


class Died(BaseException):
    """The process ends here and now: nothing is tidied up, nobody is told."""


class Source:
    """A controller that is at hand: signs, and gives metadata and chunks."""

    def __init__(self, folder: Path) -> None:
        self.now = NOW
        self.repository = Repository(folder, now=lambda: self.now)
        self.root = self.repository.root_bytes
        self.chunks: dict[str, bytes] = {}
        self.files: set[str] = set()
        """SHA-256 of every file of every slice that was signed."""
        self.counter = int(NOW)
        self.retained: bytes | None = None
        """The statement that the broker repeats to whoever connects."""

    def add(self, *made: Tiny) -> None:
        for one in made:
            self.repository.add_release(one.raw)
            self.chunks.update(one.chunks)
            for slice_ in manifest.decode_manifest(one.raw).slices:
                self.files.update(file.sha256 for file in slice_.files)

    def say(self, *wanted: Tiny, lasts_s: float = DAY) -> bytes:
        """A newer statement than all before."""
        self.counter += 1
        releases = tuple(DesiredRelease(MODEL, one.digest) for one in wanted)
        expires = int(self.now + lasts_s)
        self.retained = self.repository.sign_statement(
            Statement(device=DEVICE, releases=releases, counter=self.counter, expires=expires)
        )
        return self.retained


class Bytes:
    """A runtime that keeps the digest of every file it was given."""

    name = "bytes"

    def __init__(self, loaded: list[str], moods: Mapping[int, str]) -> None:
        self._loaded, self._moods = loaded, moods

    def load(self, slice_: Slice, folder: Path) -> _Program:
        for file in slice_.files:
            self._loaded.append(hashlib.sha256((folder / file.name).read_bytes()).hexdigest())
        if slice_.name == "a":
            return _Program("x", "h", lambda x: x + np.float32(1))
        said = json.loads((folder / "graph.onnx").read_bytes())
        if self._moods.get(said["version"]) == "ends the process at load":
            raise Died
        return _Program("h", "y", lambda h: self._times(said, h))

    def _times(self, said: dict[str, Any], h: Tensor) -> Tensor:
        if self._moods.get(said["version"]) == "fails":
            raise InferenceFailed("the kernel failed")
        return h * np.float32(said["factor"])


class _Program:
    def __init__(self, source: str, target: str, of: Callable[[Tensor], Tensor]) -> None:
        self._source, self._target, self._of = source, target, of

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        return {self._target: self._of(tensors[self._source])}


class Machine:
    """One start of an agent on a folder. Every method may be the last one called: that is a power cut."""

    def __init__(
        self,
        folder: Path,
        source: Source,
        moods: Mapping[int, str] | None = None,
        start: StartHost | None = None,
        own_version: Callable[[DataFolder], VersionManager] = VersionManager,
        check_endpoint: Callable[[], None] = lambda: None,
        on_activated: OnActivated = lambda model, release, drift, golden: None,
    ) -> None:
        """`start` hosts releases in place of the runtime that shows what was loaded; `own_version`: what the agent's
        launcher told it."""
        self.source = source
        self.time = 0.0
        self.wall = lambda: source.now
        """The device's own clock."""
        self.loaded: list[str] = []
        self.sent: list[str] = []
        self.reports: list[tuple[int, tuple[ModelState, ...], str, str]] = []
        self.on_promise: Callable[[Any], None] = lambda what: None
        self.steps: list[Step] = []
        self.connected = False
        self.folder = DataFolder(folder)
        self.folder.acquire()
        me = Identity(device=DEVICE, device_class="pi4", broker="h:1", offload="", controller="",
                      tuf_root=source.root.decode())  # fmt: skip
        self.store = ChunkStore(self.folder.chunks, self.folder.releases)
        self.engine = Engine("pi4", None)
        self.engine.observe(DeviceRunObserver(lambda release, error: self.updater.on_device_run(release, error)))
        start = start or in_process(lambda plan: Bytes(self.loaded, {} if moods is None else moods))
        self.actions = DeviceUpdateActions(
            self.folder, me, self.engine, self.store, start, now=lambda: self.wall(),
            version_manager=own_version(self.folder), check_endpoint=check_endpoint, on_activated=on_activated,
        )  # fmt: skip
        self.updater = Reconciler(self.actions, clock=lambda: self.time, health_s=HEALTH_S)

    # What the network would do

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(fetch=self._fetch_metadata)

    @property
    def chunks(self) -> Any:
        return SimpleNamespace(fetch=self._fetch_chunks)

    def _fetch_metadata(self, path: str, max_bytes: int) -> bytes:
        return self.source.repository.read(path)

    def _fetch_chunks(
        self,
        release: str,
        missing: Mapping[str, int],
        listed: Sequence[str],
        keep: Callable[[Sequence[tuple[str, bytes]]], None],
        stop: Callable[[], bool],
    ) -> None:
        for sha256 in missing:
            if stop():
                return
            if sha256 not in self.source.chunks:
                raise LinkError(f"nobody has {sha256[:12]}")
            self.sent.append(sha256)
            keep([(sha256, self.source.chunks[sha256])])
            self.on_promise(("chunk", sha256))

    def report(
        self, counter: int, models: tuple[ModelState, ...], safe_mode: str, trouble: str, kept: tuple[ModelState, ...]
    ) -> None:
        self.reports.append((counter, models, safe_mode, trouble))

    # What a test does

    def boot(self, *, online: bool = True) -> Machine:
        want = self.actions.boot()
        self.folder.next_session(self.wall())
        self.actions.connect(self)  # type: ignore[arg-type]
        self.updater.begin(want)
        if online:
            self.connect_broker()
        return self

    def connect_broker(self) -> None:
        """The broker is there, and repeats what it retains."""
        self.connected = True
        self.updater.on_connection(True)
        if self.source.retained is not None:
            self.updater.on_statement(self.source.retained)

    def disconnect_broker(self) -> None:
        """The link is lost."""
        self.connected = False
        self.updater.on_connection(False)

    def offer(self, raw: bytes) -> Machine:
        self.updater.on_statement(raw)
        return self

    def step(self) -> Step | None:
        step = self.updater.run_step()
        if step is not None:
            self.steps.append(step)
            self.on_promise(("runs", self.running))
        return step

    def settle(self, until: Callable[[Machine], bool] = lambda self: False, hours: float = 1.0) -> Machine:
        """Take steps until that holds, or until nothing is left to do for hours."""
        end = self.time + hours * 3600
        for _ in range(MOST_STEPS):
            if until(self):
                return self
            if self.step() is None:
                wake = self.updater.wakes_at(self.time)
                if wake > end:
                    return self
                self.time = wake
        raise AssertionError(f"it never settles: {self.steps[-12:]}")

    def failed_requests(self, times: int = 1, x: Tensor = INPUT) -> list[Exception]:
        """Requests of an application, and what they failed with."""
        errors = []
        for _ in range(times):
            try:
                self.engine.infer(MODEL, {"x": x}, deadline_s=60)
            except Exception as error:
                errors.append(error)
        return errors

    @property
    def running(self) -> str:
        """The release that answers, empty if none does."""
        active = self.engine.serving.get(MODEL)
        return active.digest if active is not None else ""

    @property
    def state(self) -> ModelState:
        """What was reported last of the model."""
        return next(one for one in self.reports[-1][1] if one.model == ModelRef.parse(MODEL).name)

    @property
    def activation(self) -> Current:
        """The activation state on disk."""
        return self.folder.read_current() or Current()

    @property
    def standing(self) -> Any:
        return self.actions.installed()

    def strangers(self) -> set[str]:
        """Digests of files that were loaded and never signed: there must be none."""
        return set(self.loaded) - self.source.files

    def stop(self) -> None:
        """As at SIGTERM."""
        self.updater.stop()
        self.actions.on_stopped()
        self.off()

    def off(self) -> None:
        """Power fails: all that this process gives back is what the kernel would."""
        self.engine.stop()
        for active in self.engine.serving.values():
            active.host.close()
        if self.folder._lock_descriptor is not None:
            os.close(self.folder._lock_descriptor)
            self.folder._lock_descriptor = None
