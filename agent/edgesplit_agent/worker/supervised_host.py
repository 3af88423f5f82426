"""A host whose worker process is supervised: replaced whenever it is lost.

One thread starts the worker, watches it and starts the next. Requests that a lost worker was running fail at once with
`WorkerLost`; later ones wait for the next worker up to their deadline. The first start decides whether the release can
be loaded at all: two losses while loading are a refusal. See docs/decisions/0020-workers.md.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import DeadlineExceeded, EdgeError, ModelRefused
from edgesplit.plan import Plan
from edgesplit.release.manifest import Slice
from edgesplit.release_store import StoredRelease
from edgesplit.runtime import Tensor, Timing
from edgesplit.runtime.options import EngineOptions
from edgesplit.runtime.providers import ACCELERATOR_GONE
from edgesplit_agent.worker.dataflow import Dataflow, dataflow_of
from edgesplit_agent.worker.direct.broker import LaneBroker, ReleaseLanes
from edgesplit_agent.worker.host import NeededSlices, SliceRun, WorkerLost
from edgesplit_agent.worker.ipc import Opened, OpenSlices
from edgesplit_agent.worker.process import Worker
from edgesplit_agent.worker.session_merging import merges_of
from edgesplit_agent.worker.tensor_allocator import TensorAllocator
from edgesplit_agent.worker.watchdog_policy import Bounds, restart_after_s

log = logging.getLogger(__name__)
FIRST_START_ATTEMPTS = 2
"""Attempts at the first start: a single loss may have been the machine's fault."""
MERGED_MEMORY_DIVISOR = 4
"""Merged sessions may hold this fraction (one divided by it) of a worker's memory limit."""
MAX_ACCELERATOR_LOSSES = 2
"""After this many losses in a row the next worker uses no accelerator."""
ACCELERATOR_PAUSE_S = 600.0
"""Seconds after which an accelerator that was given up, or failed in a run, is tried again."""
SliceSources = dict[str, tuple[Slice, SliceSource | None]]
RETRIES_ACCELERATOR = "was replaced by one that tries its accelerator again"
"""End reason of a worker that is replaced to try its accelerator again."""
OnWorkerLost = Callable[[str, Exception], None]
"""Callback for each lost worker: release digest and error."""


@dataclass
class WorkerHistory:
    """History of a release's workers."""

    starts: int = 0
    lost: int = 0
    losses_in_a_row: int = 0
    """Losses since a worker last answered."""
    last_loss: str = ""
    """Why the last one was lost."""
    notes: tuple[str, ...] = ()
    opened: Opened | None = None
    accelerators_off_since: float = 0.0
    """Time (perf_counter) at which the accelerators were given up; 0: they are in use."""


@dataclass
class _WorkerSupervisor:
    """Starts, watches and replaces the worker. It holds everything that its thread needs, and no reference to the host,
    so that an unused host can be garbage-collected."""

    release: StoredRelease
    plan: Plan
    setup: EngineOptions
    slice_s: Mapping[str, float] | None
    bounds: Bounds
    on_lost: OnWorkerLost
    allocator: TensorAllocator
    history: WorkerHistory = field(default_factory=WorkerHistory)
    worker: Worker | None = None
    refused: EdgeError | None = None
    """Why nothing is loaded, if the first start failed."""
    closed: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def supervise(self) -> None:
        """Body of the supervising thread, until `close`."""
        try:
            if self._start_first():
                while not self.closed.is_set():
                    self._watch()
                    self._start_next()
        except Exception as error:  # a fault of this module: report it, or requests would wait for a worker for ever
            log.exception("the supervision of the worker of release %s failed", self.release.digest[:12])
            self._publish(refused=EdgeError(f"the supervision of its worker failed: {error}"))
        finally:
            self._publish(worker=None)

    def _start_first(self) -> bool:
        """Start the first worker; False where the release is refused."""
        for attempts_left in reversed(range(FIRST_START_ATTEMPTS)):
            try:
                self._publish(worker=self._start_worker())
                return True
            except WorkerLost as error:  # the only failure worth another attempt: the others are the release's
                if not attempts_left:
                    self._publish(refused=ModelRefused(f"release {self.release.digest[:12]} cannot be loaded: {error}"))
                    return False
            except (EdgeError, OSError) as error:
                self._publish(refused=error if isinstance(error, EdgeError) else EdgeError(str(error)))
                return False
        return False

    def _watch(self) -> None:
        """Watch the worker until it has ended, and record why."""
        worker = self.worker
        assert worker is not None
        while worker.check():
            if self.closed.is_set():
                worker.kill("its release is not needed any more")
            elif self._should_retry_accelerators(worker):
                worker.kill(RETRIES_ACCELERATOR)
        # Unpublish before closing its descriptors, so that no new request can pick it up.
        self._publish(worker=None)
        worker.dispose()
        # A worker that was replaced on purpose is no loss.
        if worker.end_reason.startswith(RETRIES_ACCELERATOR):
            self.history.losses_in_a_row = 0
        elif not self.closed.is_set():
            self._note_loss(worker.end_reason)

    def _should_retry_accelerators(self, worker: Worker) -> bool:
        """Whether this worker, idle now, should be replaced to try the accelerators again."""
        # An accelerator that failed in a run left the work to the CPU: the worker itself lives and says so in its
        # notes.
        if not self.history.accelerators_off_since and any(ACCELERATOR_GONE in note for note in worker.notes):
            self.history.accelerators_off_since = perf_counter()
        since = self.history.accelerators_off_since
        return bool(since) and worker.is_idle and perf_counter() - since >= ACCELERATOR_PAUSE_S

    def _start_next(self) -> None:
        """Start the next worker, with a back-off after repeated losses."""
        while not self.closed.wait(restart_after_s(self.history.losses_in_a_row)):
            try:
                self._publish(worker=self._start_worker())
                return
            except (EdgeError, OSError) as error:
                self._note_loss(str(error))

    def _note_loss(self, why: str) -> None:
        self.history.lost += 1
        self.history.losses_in_a_row += 1
        self.history.last_loss = why
        log.error("worker of release %s %s (%d in a row)", self.release.digest[:12], why, self.history.losses_in_a_row)
        try:
            self.on_lost(self.release.digest, WorkerLost(f"the model's worker process {why}"))
        except Exception:
            log.exception("the callback for a lost worker failed")

    def _start_worker(self) -> Worker:
        """A worker with all slices open. The files are verified now; encrypted slices are decrypted into memory."""
        manifest, needed = self.release.manifest, NeededSlices.of(self.release, self.plan)
        slices: SliceSources = {}
        worker, setup = None, self._effective_setup()
        try:
            for slice_ in manifest.all_slices:
                if slice_.name in needed.rows | needed.optional:
                    slices[slice_.name] = (slice_, self._source(slice_))
            worker = Worker(f"worker of {self.release.digest[:12]}", self.bounds, self.allocator)
            self.history.starts += 1
            opened = self._open(worker, slices, needed, setup)
        except BaseException:  # nothing else watches this worker yet: end it here
            if worker is not None:
                worker.kill("could not be started")
                while worker.check():
                    pass
                worker.dispose()
            raise
        finally:  # decrypted slices stay in memory no longer than loading takes
            for _, source in slices.values():
                if isinstance(source, SliceInMemory):
                    source.close()
        self.history.opened, self.history.notes = opened, opened.notes
        self.history.accelerators_off_since = perf_counter() if setup != self.setup else 0.0
        if self.history.accelerators_off_since:
            loss = f"{ACCELERATOR_GONE}: workers that used {', '.join(self.setup.providers)} were lost"
            self.history.notes = (loss, *opened.notes)
        for note in (*opened.refused.values(), *opened.notes):
            log.warning("release %s: %s", self.release.digest[:12], note)
        return worker

    def _source(self, slice_: Slice) -> SliceSource | None:
        return None if slice_.format == "input" else self.release.slice_folder(slice_.name)

    def _open(self, worker: Worker, slices: SliceSources, needed: NeededSlices, setup: EngineOptions) -> Opened:
        worker.load(slices)
        opened = worker.open(self._open_message(needed, setup), self._file_bytes(slices))
        # The worker's claim is checked: every slice of the plan's rows is open, and none that it was not given.
        if not needed.rows <= set(opened.slices) <= set(slices):
            raise WorkerLost(
                "the model's worker process violated the protocol: it opened other slices than it was given"
            )
        return opened

    def _open_message(self, needed: NeededSlices, setup: EngineOptions) -> OpenSlices:
        manifest = self.release.manifest
        max_bytes = self.bounds.memory_bytes // MERGED_MEMORY_DIVISOR
        decoders = {slice_: manifest.input_spec_of(slice_) for slice_ in manifest.slices if slice_.format == "input"}
        return OpenSlices(
            setup=setup, optional=tuple(needed.optional),
            input_specs={slice_.name: spec for slice_, spec in decoders.items() if spec is not None},
            slice_s=None if self.slice_s is None else dict(self.slice_s), memory_bytes=self.bounds.memory_bytes,
            merges=merges_of(manifest, self.plan, max_bytes) if setup.merge else (),
            shares=dict(self.plan.slice_s) if setup.merge else {},
        )  # fmt: skip

    def _file_bytes(self, names: Iterable[str]) -> int:
        return sum(self.release.manifest.slice(name).bytes for name in names)

    def reconfigure(self, worker: Worker, setup: EngineOptions) -> None:
        """Open the slices with another setup. ModelRefused (nothing is open then); WorkerLost."""
        needed = NeededSlices.of(self.release, self.plan)
        opened = worker.reopen(self._open_message(needed, setup), self._file_bytes(needed.rows | needed.optional))
        self.history.opened, self.history.notes, self.setup = opened, opened.notes, setup

    def _effective_setup(self) -> EngineOptions:
        """The configured setup, without accelerators after repeated losses with them."""
        if not self.setup.providers or self.history.losses_in_a_row < MAX_ACCELERATOR_LOSSES:
            return self.setup
        release = self.release.digest[:12]
        log.error("release %s: %s with %s, the CPU runs it for a while", release, ACCELERATOR_GONE, self.setup)
        return msgspec.structs.replace(self.setup, providers=())

    def _publish(self, **fields: Any) -> None:
        """Set fields and wake the threads that wait for a worker."""
        with self.changed:
            for name, value in fields.items():
                setattr(self, name, value)
            self.changed.notify_all()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for operators about how the release runs."""
        worker = self.worker
        return (worker.notes if worker is not None else ()) or self.history.notes

    def on_answered(self) -> None:
        """The worker has answered: later losses are counted anew."""
        self.history.losses_in_a_row = 0

    def current_lanes(self) -> LaneBroker | None:
        """The lanes of the current worker."""
        worker = self.worker
        return worker.lanes if worker is not None and not worker.has_ended else None

    def close(self) -> None:
        """Stop supervising and kill the worker."""
        self.closed.set()
        worker = self.worker
        if worker is not None:
            worker.kill("its release is not needed any more")


class SupervisedHost:
    """A `Host` in a supervised worker process, which ends when nothing refers to the host any more."""

    in_time = True

    def __init__(
        self,
        release: StoredRelease,
        plan: Plan,
        setup: EngineOptions,
        bounds: Bounds,
        *,
        slice_s: Mapping[str, float] | None = None,
        processor: threading.Lock | None = None,
        on_lost: OnWorkerLost = lambda release, error: None,
    ) -> None:
        """Load the release: ModelRefused, TrustError, or EdgeError where no process can be started now.

        `slice_s`: emulated device, on which each slice takes so many seconds and all releases share one `processor`.
        """
        self._supervisor = _WorkerSupervisor(
            release, plan, setup, slice_s, bounds, on_lost, TensorAllocator(bounds.memory_bytes)
        )
        self._processor = processor if slice_s is not None else None
        supervisor = self._supervisor  # the lanes refer to it, not to the host
        self.lanes = ReleaseLanes(supervisor.current_lanes, supervisor.on_answered)
        self._dataflows: dict[tuple[str, ...], Dataflow] = {}
        self._thread = threading.Thread(
            target=self._supervisor.supervise, name=f"worker of {release.digest[:12]}", daemon=True
        )
        # The thread refers to the supervisor only, so the host can be collected, and its worker ends with it.
        self.close = weakref.finalize(self, self._supervisor.close)
        self._thread.start()
        try:
            self._await_worker(None)
        except BaseException:
            self.close()
            raise

    @property
    def slices(self) -> frozenset[str]:
        """Names of the slices that could be loaded."""
        opened = self._supervisor.history.opened
        return frozenset(opened.slices if opened is not None else ())

    @property
    def emulated(self) -> bool:
        """Whether the times are those of an emulated device."""
        return self._supervisor.slice_s is not None

    def run(self, job: SliceRun, timing: Timing) -> dict[str, Tensor]:
        """Run the job; see `Host.run`. DeadlineExceeded where no worker is ready in time."""
        order = tuple(job.order)
        dataflow = self._dataflows.get(order)
        if dataflow is None:
            dataflow = self._dataflows[order] = dataflow_of(self._supervisor.release.manifest, order)
        worker = self._await_worker(job.deadline)
        if self._processor is None:  # a real device: the engine's queue is the only one
            live = worker.run(job, dataflow, timing)
        else:
            with self._hold_processor(self._processor, job.deadline):
                live = worker.run(job, dataflow, timing)
        self._supervisor.on_answered()
        return live

    @staticmethod
    @contextmanager
    def _hold_processor(processor: threading.Lock, until: float) -> Iterator[None]:
        """Context manager: the single processor of an emulated device, shared by its releases."""
        if not processor.acquire(timeout=min(max(0.0, until - perf_counter()), threading.TIMEOUT_MAX)):
            raise DeadlineExceeded("the device's processor was not free before the deadline")
        try:
            yield
        finally:
            processor.release()

    @property
    def setup(self) -> EngineOptions:
        """The engine options in use."""
        return self._supervisor.setup

    def reconfigure(self, setup: EngineOptions) -> None:
        """Change the engine options for everything that runs on this release.

        After ModelRefused or WorkerLost nothing is open, and other options must be set.
        """
        self._supervisor.reconfigure(self._await_worker(None), setup)

    @property
    def merged(self) -> int:
        """Number of merged sessions."""
        opened = self._supervisor.history.opened
        return opened.merged if opened is not None else 0

    def status(self) -> dict[str, Any]:
        """Numbers of starts and losses, reason of the last loss, and engine options."""
        supervisor = self._supervisor
        worker = supervisor.worker
        return {
            "isolation": "process", "pid": worker.pid if worker is not None else 0, "starts": supervisor.history.starts,
            "lost": supervisor.history.lost, "lost_in_a_row": supervisor.history.losses_in_a_row,
            "last_lost": supervisor.history.last_loss, "setup": str(supervisor.setup), "notes": list(supervisor.notes),
            "tensor_bytes": supervisor.allocator.held_bytes, "lanes": self.lanes.count,
        }  # fmt: skip

    def _await_worker(self, deadline: float | None) -> Worker:
        """The current worker, waiting for the next one if need be; `deadline` None: without one."""
        supervisor = self._supervisor
        worker = supervisor.worker
        if worker is not None and not worker.has_ended:
            return worker
        with supervisor.changed:
            while supervisor.worker is None or supervisor.worker.has_ended:
                if supervisor.refused is not None:
                    raise supervisor.refused
                if supervisor.closed.is_set():
                    raise WorkerLost("the release is not served here any more")
                left_s = None if deadline is None else deadline - perf_counter()
                if left_s is not None and left_s <= 0:
                    reason = f": the last one {supervisor.history.last_loss}" if supervisor.history.last_loss else ""
                    raise DeadlineExceeded(f"no worker process was ready before the deadline{reason}")
                supervisor.changed.wait(None if left_s is None else min(left_s, threading.TIMEOUT_MAX))
            return supervisor.worker
