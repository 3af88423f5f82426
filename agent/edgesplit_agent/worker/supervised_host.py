"""A release in a worker process that is replaced whenever it is lost.

One thread starts the worker, watches it and starts the next. Requests that a worker took with it fail at once with
`WorkerLost`; whoever asks again waits for the next one as long as it may. The first start decides whether the release
can be loaded at all: twice lost while loading is a refusal.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import msgspec

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, ModelRefused
from edgesplit.plan import Plan
from edgesplit.release.manifest import Slice
from edgesplit.release_store import Release
from edgesplit.runtime import Tensor, Timing
from edgesplit.runtime.options import Setup
from edgesplit.runtime.providers import GONE
from edgesplit_agent.worker.dataflow import Flow, flow_of
from edgesplit_agent.worker.direct_broker import LaneNotes, LaneOrder
from edgesplit_agent.worker.host import Job, Needed, WorkerLost
from edgesplit_agent.worker.ipc import Open, Opened
from edgesplit_agent.worker.process import Worker
from edgesplit_agent.worker.session_merging import merges_of
from edgesplit_agent.worker.tensor_allocator import TensorRoom
from edgesplit_agent.worker.watchdog_policy import Bounds, restart_after_s

log = logging.getLogger(__name__)
TRIES = 2
"""Of the first load: what is lost once may have been the machine's doing."""
MERGED_PART = 4
"""Merged sessions may hold this part of a worker's memory."""
LEFT_OUT = 2
"""After so many workers lost in a row, the next one uses no accelerator..."""
ACCELERATOR_PAUSE_S = 600.0
"""...and after this time it is tried again, as is one that failed in a run."""
Slices = dict[str, tuple[Slice, SliceSource | None]]
AGAIN = "made room for one that tries its accelerator again"
Lost = Callable[[str, Exception], None]
"""Told, by release, of each worker that was lost."""


@dataclass
class Condition:
    """What is known of a release's workers."""

    starts: int = 0
    lost: int = 0
    in_a_row: int = 0
    """Lost since one last answered."""
    why: str = ""
    """The last one was lost."""
    notes: tuple[str, ...] = ()
    opened: Opened | None = None
    cpu_since: float = 0.0
    """When (of perf_counter) the accelerators were left out; 0: they are not."""


@dataclass
class _Keeper:
    """Starts, watches and replaces the worker: all that its thread holds on to."""

    release: Release
    plan: Plan
    setup: Setup
    slice_s: Mapping[str, float] | None
    bounds: Bounds
    lost: Lost
    room: TensorRoom
    now: Condition = field(default_factory=Condition)
    worker: Worker | None = None
    refused: EdgeError | None = None
    """Why nothing is loaded, where the first start failed."""
    closed: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def keep(self) -> None:
        """The thread's work, until it is closed."""
        try:
            if self._first():
                while not self.closed.is_set():
                    self._watch()
                    self._next()
        except Exception as error:  # of ours: without a thread nobody would be answered any more
            log.exception("the worker of release %s is not kept any more", self.release.digest[:12])
            self._say(refused=EdgeError(f"its worker is not kept any more: {error}"))
        finally:
            self._say(worker=None)

    def _first(self) -> bool:
        for left in reversed(range(TRIES)):
            try:
                self._say(worker=self._started())
                return True
            except WorkerLost as error:
                if not left:
                    self._say(refused=ModelRefused(f"release {self.release.digest[:12]} cannot be loaded: {error}"))
                    return False
            except (EdgeError, OSError) as error:
                self._say(refused=error if isinstance(error, EdgeError) else EdgeError(str(error)))
                return False
        return False

    def _watch(self) -> None:
        worker = self.worker
        assert worker is not None
        while worker.look():
            if self.closed.is_set():
                worker.kill("its release is not needed any more")
            elif self._tries_accelerators_again(worker):
                worker.kill(AGAIN)
        self._say(worker=None)
        worker.dispose()
        if worker.why.startswith(AGAIN):
            self.now.in_a_row = 0
        elif not self.closed.is_set():
            self._note_loss(worker.why)

    def _tries_accelerators_again(self, worker: Worker) -> bool:
        """Whether this worker gives way to one that may find them back. It is idle then."""
        if not self.now.cpu_since and any(GONE in note for note in worker.notes):
            self.now.cpu_since = perf_counter()
        since = self.now.cpu_since
        return bool(since) and worker.is_idle and perf_counter() - since >= ACCELERATOR_PAUSE_S

    def _next(self) -> None:
        """Another worker, as soon as may be."""
        while not self.closed.wait(restart_after_s(self.now.in_a_row)):
            try:
                self._say(worker=self._started())
                return
            except (EdgeError, OSError) as error:
                self._note_loss(str(error))

    def _note_loss(self, why: str) -> None:
        self.now.lost += 1
        self.now.in_a_row += 1
        self.now.why = why
        log.error("worker of release %s %s (%d in a row)", self.release.digest[:12], why, self.now.in_a_row)
        try:
            self.lost(self.release.digest, WorkerLost(f"the model's worker process {why}"))
        except Exception:
            log.exception("nobody could be told of a lost worker")

    def _started(self) -> Worker:
        """A worker with everything open. The files are verified now, those of encrypted slices opened in memory."""
        manifest, needed = self.release.manifest, Needed.of(self.release, self.plan)
        slices: Slices = {}
        worker, setup = None, self._setup_now()
        try:
            for one in manifest.every_slice:
                if one.name in needed.rows | needed.optional:
                    slices[one.name] = (one, self._source(one))
            worker = Worker(f"worker of {self.release.digest[:12]}", self.bounds, self.room)
            self.now.starts += 1
            opened = self._open(worker, slices, needed, setup)
        except BaseException:
            if worker is not None:
                worker.kill("could not begin")
                while worker.look():
                    pass
                worker.dispose()
            raise
        finally:
            for _, source in slices.values():
                if isinstance(source, SliceInMemory):
                    source.close()
        self.now.opened, self.now.notes = opened, opened.notes
        self.now.cpu_since = perf_counter() if setup != self.setup else 0.0
        if self.now.cpu_since:
            self.now.notes = (f"{GONE}: workers that used {', '.join(self.setup.providers)} were lost", *opened.notes)
        for why in (*opened.refused.values(), *opened.notes):
            log.warning("release %s: %s", self.release.digest[:12], why)
        return worker

    def _source(self, one: Slice) -> SliceSource | None:
        return None if one.format == "input" else self.release.slice_folder(one.name)

    def _open(self, worker: Worker, slices: Slices, needed: Needed, setup: Setup) -> Opened:
        worker.load(slices)
        opened = worker.open(self._ask(needed, setup), self._file_bytes(slices))
        if not needed.rows <= set(opened.slices) <= set(slices):
            raise WorkerLost("the model's worker process spoke nonsense: it opened other slices than it was given")
        return opened

    def _ask(self, needed: Needed, setup: Setup) -> Open:
        manifest = self.release.manifest
        most = self.bounds.memory_bytes // MERGED_PART
        return Open(
            setup=setup,
            optional=tuple(needed.optional),
            input_spec=manifest.input_spec,
            slice_s=None if self.slice_s is None else dict(self.slice_s),
            memory_bytes=self.bounds.memory_bytes,
            merges=merges_of(manifest, self.plan, most) if setup.merge else (),
            shares=dict(self.plan.slice_s) if setup.merge else {},
        )

    def _file_bytes(self, names: Iterable[str]) -> int:
        return sum(self.release.manifest.slice(name).bytes for name in names)

    def use(self, worker: Worker, setup: Setup) -> None:
        """Another setup, from now on. ModelRefused, and then nothing is open; WorkerLost."""
        needed = Needed.of(self.release, self.plan)
        opened = worker.reopen(self._ask(needed, setup), self._file_bytes(needed.rows | needed.optional))
        self.now.opened, self.now.notes, self.setup = opened, opened.notes, setup

    def _setup_now(self) -> Setup:
        """Without accelerators, where workers that used them were lost."""
        if not self.setup.providers or self.now.in_a_row < LEFT_OUT:
            return self.setup
        log.error("release %s: %s with %s, the CPU runs it for a while", self.release.digest[:12], GONE, self.setup)
        return msgspec.structs.replace(self.setup, providers=())

    def _say(self, **what: Any) -> None:
        with self.changed:
            for name, value in what.items():
                setattr(self, name, value)
            self.changed.notify_all()

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of how it runs."""
        worker = self.worker
        return (worker.notes if worker is not None else ()) or self.now.notes

    def close(self) -> None:
        """Nobody will ask again."""
        self.closed.set()
        worker = self.worker
        if worker is not None:
            worker.kill("its release is not needed any more")


class Hosted:
    """Implements `Host`. When nothing refers to it any more, its worker ends."""

    in_time = True

    def __init__(
        self,
        release: Release,
        plan: Plan,
        setup: Setup,
        bounds: Bounds,
        *,
        slice_s: Mapping[str, float] | None = None,
        processor: threading.Lock | None = None,
        lost: Lost = lambda release, error: None,
    ) -> None:
        """Loads it: ModelRefused, TrustError, or EdgeError where no process can be had now. `slice_s`: emulated, each
        slice takes so long, and all releases of the device share one `processor`."""
        self._keeper = _Keeper(release, plan, setup, slice_s, bounds, lost, TensorRoom(bounds.memory_bytes))
        self._processor = processor if slice_s is not None else None
        self._flows: dict[tuple[str, ...], Flow] = {}
        self._thread = threading.Thread(target=self._keeper.keep, name=f"worker of {release.digest[:12]}", daemon=True)
        self.close = weakref.finalize(self, self._keeper.close)
        self._thread.start()
        try:
            self._ready(None)
        except BaseException:
            self.close()
            raise

    @property
    def slices(self) -> frozenset[str]:
        """What could be loaded."""
        opened = self._keeper.now.opened
        return frozenset(opened.slices if opened is not None else ())

    @property
    def emulated(self) -> bool:
        """Whether its times are those of another device."""
        return self._keeper.slice_s is not None

    def run(self, job: Job, timing: Timing) -> dict[str, Tensor]:
        """As `Host.run`. DeadlineExceeded where the next worker is not there in time."""
        order = tuple(job.order)
        flow = self._flows.get(order)
        if flow is None:
            flow = self._flows[order] = flow_of(self._keeper.release.manifest, order)
        worker = self._ready(job.until)
        if self._processor is None:
            live = worker.run(job, flow, timing)
        else:
            with self._turn(self._processor, job.until):
                live = worker.run(job, flow, timing)
        self._keeper.now.in_a_row = 0
        return live

    @staticmethod
    @contextmanager
    def _turn(processor: threading.Lock, until: float) -> Iterator[None]:
        """An emulated device's one processor, that all its releases share."""
        if not processor.acquire(timeout=min(max(0.0, until - perf_counter()), threading.TIMEOUT_MAX)):
            raise DeadlineExceeded("the device's processor was not free before the deadline")
        try:
            yield
        finally:
            processor.release()

    @property
    def setup(self) -> Setup:
        """How its engines are set up."""
        return self._keeper.setup

    def use(self, setup: Setup) -> None:
        """Set them up otherwise for all that runs on this release. ModelRefused and WorkerLost, and then another setup
        must be used."""
        self._keeper.use(self._ready(None), setup)

    def open_lane(self, order: LaneOrder, descriptor: int, *, shared: bool) -> None:
        """An application may ask the worker that lives now. Busy where none can be had; UsageError."""
        keeper = self._keeper
        worker = keeper.worker
        if worker is None or worker.is_over:
            raise Busy("no worker process is ready")

        def told(notes: LaneNotes) -> None:
            if notes.answers:
                keeper.now.in_a_row = 0
            order.told(notes)

        worker.lanes.open(replace(order, told=told), descriptor, shared=shared)

    def end_lanes(self) -> None:
        """Nothing that has not begun is answered by a lane any more."""
        worker = self._keeper.worker
        if worker is not None:
            worker.lanes.end()

    def note_lanes(self, predicted_s: float, scale: float) -> None:
        """What came of lanes is told now; what their answers say of plan and power."""
        worker = self._keeper.worker
        if worker is not None:
            worker.lanes.tell(predicted_s, scale)
            worker.lanes.note()

    @property
    def merged(self) -> int:
        """Sessions that do several slices at once."""
        opened = self._keeper.now.opened
        return opened.merged if opened is not None else 0

    def status(self) -> dict[str, Any]:
        """How many workers there were, why the last one was lost, and what it runs on."""
        keeper = self._keeper
        worker = keeper.worker
        return {
            "isolation": "process",
            "pid": worker.pid if worker is not None else 0,
            "starts": keeper.now.starts,
            "lost": keeper.now.lost,
            "lost_in_a_row": keeper.now.in_a_row,
            "last_lost": keeper.now.why,
            "setup": str(keeper.setup),
            "notes": list(keeper.notes),
            "tensor_bytes": keeper.room.held_bytes,
            "lanes": worker.lanes.count if worker is not None else 0,
        }

    def _ready(self, until: float | None) -> Worker:
        """The worker that lives, as soon as there is one."""
        keeper = self._keeper
        worker = keeper.worker
        if worker is not None and not worker.is_over:
            return worker
        with keeper.changed:
            while keeper.worker is None or keeper.worker.is_over:
                if keeper.refused is not None:
                    raise keeper.refused
                if keeper.closed.is_set():
                    raise WorkerLost("the release is not served here any more")
                left_s = None if until is None else until - perf_counter()
                if left_s is not None and left_s <= 0:
                    why = f": the last one {keeper.now.why}" if keeper.now.why else ""
                    raise DeadlineExceeded(f"no worker process was ready before the deadline{why}")
                keeper.changed.wait(None if left_s is None else min(left_s, threading.TIMEOUT_MAX))
            return keeper.worker
