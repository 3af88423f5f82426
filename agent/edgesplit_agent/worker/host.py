"""Hosts: where a release's slices run. One interface, implemented in this process and by a worker process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgesplit.errors import InferenceFailed, ModelRefused
from edgesplit.plan import Plan
from edgesplit.release.manifest import device_slices
from edgesplit.release_store import StoredRelease
from edgesplit.runtime import Program, Runtime, Tensor, Tensors, Timing, run_slices
from edgesplit.runtime.emulated import EmulatedRuntime
from edgesplit.runtime.loader import load_slices
from edgesplit_agent.worker.direct.broker import ReleaseLanes


class WorkerLost(InferenceFailed):
    """The worker process ended, or was killed, before it answered. Its supervisor starts another one."""


@dataclass(frozen=True, slots=True)
class SliceRun:
    """Slices to run, in order, over these tensors."""

    order: Sequence[str]
    tensors: Tensors
    deadline: float = math.inf
    """Deadline (perf_counter) after which the caller waits no longer."""
    expected_s: float | None = None
    """Previous duration in seconds; None where these slices never ran here."""
    predicted_s: float = 0.0
    """Duration that the plan predicts, in seconds; 0: none."""


class Host(Protocol):
    """Runs the slices of one release, from any thread."""

    @property
    def slices(self) -> frozenset[str]:
        """Names of the slices that can run here."""
        ...

    @property
    def emulated(self) -> bool:
        """Whether the times are those of another, emulated device."""
        ...

    @property
    def in_time(self) -> bool:
        """Whether `run` returns by the deadline whatever the model does."""
        ...

    @property
    def lanes(self) -> ReleaseLanes | None:
        """Direct access of applications to the worker; None where there is none."""

    def run(self, job: SliceRun, timing: Timing) -> dict[str, Tensor]:
        """The job's tensors and every output of its slices that is needed outside of it.

        Raises InferenceFailed, WorkerLost, DeadlineExceeded; UsageError where the application's input is at fault.
        """
        ...

    def status(self) -> dict[str, Any]:
        """State of the host for the status page."""
        ...

    def close(self) -> None:
        """End the worker, if there is one."""


StartHost = Callable[[StoredRelease, Plan], Host]
"""Loads what a plan's device runs of a release, checking each file's digest. Raises TrustError, ModelRefused."""


@dataclass(frozen=True, slots=True)
class NeededSlices:
    """The slices that a device loads of a release."""

    rows: frozenset[str]
    """Slices of the plan's rows: all of them must load."""
    optional: frozenset[str]
    """Slices compiled for an accelerator that may be absent: their uncompiled equivalents run instead."""

    @classmethod
    def of(cls, release: StoredRelease, plan: Plan) -> NeededSlices:
        """The slices needed by the plan's rows and those compiled for its device class."""
        rows = frozenset(name for row in plan.rows for name in row.device)
        return cls(rows, frozenset(device_slices(plan, release.manifest) - rows))


class InProcess:
    """Runs slices in the agent's own process: a model that crashes takes the agent with it."""

    in_time = False
    lanes = None

    def __init__(self, programs: Mapping[str, Program], *, emulated: bool = False, notes: Iterable[str] = ()) -> None:
        self.emulated = emulated
        self.programs = programs
        self._notes = tuple(notes)

    @property
    def slices(self) -> frozenset[str]:
        """Names of the loaded slices."""
        return frozenset(self.programs)

    def run(self, job: SliceRun, timing: Timing) -> dict[str, Tensor]:
        """All available tensors. A run cannot be interrupted here: the caller waits until it ends."""
        return run_slices(self.programs, job.order, job.tensors, timing)

    def status(self) -> dict[str, Any]:
        """Isolation and notes for the status page."""
        return {"isolation": "none", "notes": list(self._notes)}

    def close(self) -> None:
        """Does nothing: no process belongs to this host."""


def in_process(make_runtime: Callable[[Plan], Runtime]) -> StartHost:
    """A `StartHost` that loads releases into this process, on the runtime that `make_runtime` returns for the plan."""

    def start(release: StoredRelease, plan: Plan) -> Host:
        runtime, needed = make_runtime(plan), NeededSlices.of(release, plan)
        programs = load_slices(release.manifest, release.slice_folder, runtime, only=needed.rows)
        refused = []
        for name in needed.optional:
            try:
                programs.update(load_slices(release.manifest, release.slice_folder, runtime, only=[name]))
            except ModelRefused as refusal:
                refused.append(str(refusal))
        if isinstance(runtime, EmulatedRuntime):
            for slice_ in release.manifest.slices:
                if slice_.name in programs and slice_.format == "input":
                    programs[slice_.name] = runtime.wrap(slice_.name, programs[slice_.name])
        return InProcess(programs, emulated=isinstance(runtime, EmulatedRuntime), notes=refused)

    return start
