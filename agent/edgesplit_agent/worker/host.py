"""Where a release's slices run: one interface, in this process or in a worker's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from edgesplit.errors import InferenceFailed, ModelRefused
from edgesplit.plan import Plan
from edgesplit.release.manifest import device_slices
from edgesplit.release_store import Release
from edgesplit.runtime import Program, Runtime, Tensor, Tensors, Timing, execute
from edgesplit.runtime.emulated import EmulatedRuntime
from edgesplit.runtime.loader import load_slices
from edgesplit_agent.worker.direct_broker import LaneOrder


class WorkerLost(InferenceFailed):
    """The process that ran the model has ended, or was ended, before it answered. Another one is on its way."""


@dataclass(frozen=True, slots=True)
class Job:
    """Slices to run, in order, over these tensors."""

    order: Sequence[str]
    tensors: Tensors
    until: float = math.inf
    """Of perf_counter: who asks waits no longer."""
    expected_s: float | None = None
    """What it took before, or None where it never ran."""
    predicted_s: float = 0.0
    """What the plan says it takes; 0: nothing."""


class Host(Protocol):
    """Runs the slices of one release, from any thread."""

    @property
    def slices(self) -> frozenset[str]:
        """What can run here."""
        ...

    @property
    def emulated(self) -> bool:
        """Whether its times are those of another device."""
        ...

    @property
    def in_time(self) -> bool:
        """Whether `run` keeps to its job's time whatever the model does."""
        ...

    def run(self, job: Job, timing: Timing) -> dict[str, Tensor]:
        """The tensors of the job and all that anybody may need of what its slices gave. InferenceFailed, WorkerLost,
        DeadlineExceeded; UsageError where the application's input is at fault."""
        ...

    def status(self) -> dict[str, Any]:
        """How it is, for people."""
        ...

    def close(self) -> None:
        """End what runs for it."""
        ...


@runtime_checkable
class Laned(Protocol):
    """A host whose worker applications may ask themselves."""

    def open_lane(self, order: LaneOrder, descriptor: int, *, shared: bool) -> None:
        """Over that socket. Busy where none can be had; UsageError where it is no such socket."""
        ...

    def end_lanes(self) -> None:
        """Nothing that has not begun is answered by a lane any more."""
        ...

    def note_lanes(self, predicted_s: float, scale: float) -> None:
        """What came of lanes is told now; what their answers say from now on of plan and power."""
        ...


StartHost = Callable[[Release, Plan], Host]
"""Loads what a plan's device runs of a release. Each file's digest is checked then. TrustError, ModelRefused."""


@dataclass(frozen=True, slots=True)
class Needed:
    """What a device loads of a release."""

    rows: frozenset[str]
    """Slices of the plan's rows: all of them, or nothing is answered."""
    optional: frozenset[str]
    """Compiled for an accelerator, which may not be here: their twins run instead."""

    @classmethod
    def of(cls, release: Release, plan: Plan) -> Needed:
        """By its rows, and what was compiled for its class."""
        rows = frozenset(name for row in plan.rows for name in row.device)
        return cls(rows, frozenset(device_slices(plan, release.manifest) - rows))


class InProcess:
    """Slices in the agent's own process: a model that crashes takes the agent with it."""

    in_time = False

    def __init__(self, programs: Mapping[str, Program], *, emulated: bool = False, notes: Iterable[str] = ()) -> None:
        self.emulated = emulated
        self.programs = programs
        self._notes = tuple(notes)

    @property
    def slices(self) -> frozenset[str]:
        """What can run here."""
        return frozenset(self.programs)

    def run(self, job: Job, timing: Timing) -> dict[str, Tensor]:
        """All live tensors. Nothing here can be cut off: who asks waits until it is over."""
        return execute(self.programs, job.order, job.tensors, timing)

    def status(self) -> dict[str, Any]:
        """What of it people should know."""
        return {"isolation": "none", "notes": list(self._notes)}

    def close(self) -> None:
        """Nothing runs by itself."""


def in_process(make_runtime: Callable[[Plan], Runtime]) -> StartHost:
    """Load releases into this process, on that runtime."""

    def start(release: Release, plan: Plan) -> Host:
        runtime, needed = make_runtime(plan), Needed.of(release, plan)
        programs = load_slices(release.manifest, release.slice_folder, runtime, only=needed.rows)
        refused = []
        for name in needed.optional:
            try:
                programs.update(load_slices(release.manifest, release.slice_folder, runtime, only=[name]))
            except ModelRefused as refusal:
                refused.append(str(refusal))
        if isinstance(runtime, EmulatedRuntime):
            for one in release.manifest.slices:
                if one.name in programs and one.format == "input":
                    programs[one.name] = runtime.wrap(one.name, programs[one.name])
        return InProcess(programs, emulated=isinstance(runtime, EmulatedRuntime), notes=refused)

    return start
