"""A request inside the agent, its prediction and its answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from edgesplit.oip.options import NONE, InferOptions
from edgesplit.oip.report import Report
from edgesplit.plan import Plan, Row
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.offload.target import OffloadTarget
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.queue_policy import QueueEntry
from edgesplit_agent.serving.request_trace import RequestTrace


@dataclass(frozen=True)
class Answer:
    """Outputs of a request, and the report of how they were made."""

    outputs: Mapping[str, Tensor]
    report: Report


@dataclass(frozen=True)
class Computed:
    """What the device has computed for a request, so that it is not computed again."""

    slices: frozenset[str]
    live: Mapping[str, Tensor]
    """The request's inputs, and what the slices made."""


@dataclass(eq=False)
class Request:
    """One request. It keeps the release with which it began."""

    id: str
    model: str
    release: LoadedRelease
    inputs: Mapping[str, Tensor]
    deadline: float
    """A perf_counter time."""
    target: OffloadTarget
    """The offload target that its release names."""
    options: InferOptions = NONE
    began: float = field(default_factory=perf_counter)
    timing: Timing = field(default_factory=Timing)
    trace: RequestTrace = field(default_factory=RequestTrace)
    queue_entry: QueueEntry = field(init=False)
    device_runs: deque[Exception | None] = field(default_factory=deque)
    """Results of the runs of its slices on this device that were not recorded yet: None, or the error."""
    has_device_times: bool = False
    """Whether the device's part succeeded, so that `timing` may be learnt from."""
    is_recorded: bool = False
    """Whether its record was made: runs that end later have to be recorded apart."""
    is_background: bool = False
    """Whether requests of applications have precedence over it."""
    variant_plan: Plan | None = None
    """The plan with only the rows of the variant that a cascade asks now; None: all of the release's rows may answer.
    """
    computed: Computed | None = None
    """Behind an early exit: what was computed up to it, from where the rows of the release go on."""

    def __post_init__(self) -> None:
        self.queue_entry = QueueEntry(self.model, self.options, self.deadline, is_background=self.is_background)

    def take_device_runs(self) -> tuple[Exception | None, ...]:
        """The results of runs not recorded yet; each is returned once, to whichever thread asks first."""
        runs: list[Exception | None] = []
        try:
            while True:
                runs.append(self.device_runs.popleft())
        except IndexError:
            return tuple(runs)

    @property
    def plan(self) -> Plan:
        """The plan whose rows may answer it now."""
        return self.release.plan if self.variant_plan is None else self.variant_plan

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - perf_counter()

    @property
    def allowed_s(self) -> float:
        """Seconds until the answer should be there: a family's plan may ask for it before the request's deadline."""
        planned_s = self.release.plan.deadline_s
        return min(self.left_s, self.began + planned_s - perf_counter()) if planned_s else self.left_s


@dataclass(frozen=True)
class Prediction:
    """What the plan predicts for the chosen row."""

    row: Row
    latency_s: float
    remote_s: float
    """Seconds of link and server together: how long the offload should take."""
    cause: str = ""
    """Why this is not the row that was chosen first; empty if it is."""
    race_cost: float | None = None
    """Cost of sending, in a race where the device would have answered alone: its own work is then no extra cost. Else
    None."""
    early_s: float | None = None
    """Seconds after sending at which an early hedge should start, if its cost is allowed."""
    reason: str = ""
    """Why this row was chosen, for people."""
    finish: Row | None = None
    """The local row by which the device finishes if the offload target does not answer; None where it cannot."""


def served_name(reference: str) -> str:
    """The name in `name` or `name@version`, by which a model is served."""
    return reference.partition("@")[0]
