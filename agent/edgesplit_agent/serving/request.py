"""A request on its way through the agent, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from edgesplit.oip.options import NONE, Wishes
from edgesplit.oip.report import Report
from edgesplit.plan import Row
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.offload.target import Cloud
from edgesplit_agent.releases.loaded_release import ActiveRelease
from edgesplit_agent.serving.queue_policy import Place
from edgesplit_agent.serving.request_trace import Course


@dataclass(frozen=True)
class Answer:
    """What a request gets."""

    outputs: Mapping[str, Tensor]
    report: Report


@dataclass(eq=False)
class Request:
    """One request. It keeps the release that it began with."""

    id: str
    model: str
    release: ActiveRelease
    inputs: Mapping[str, Tensor]
    deadline: float
    """Of perf_counter."""
    cloud: Cloud
    """The offload server that its release names."""
    wishes: Wishes = NONE
    began: float = field(default_factory=perf_counter)
    timing: Timing = field(default_factory=Timing)
    course: Course = field(default_factory=Course)
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        self.place = Place(self.model, self.wishes, self.deadline)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - perf_counter()


@dataclass(frozen=True)
class Expected:
    """What the plan promised for the row that was chosen."""

    row: Row
    latency_s: float
    remote_s: float
    """Link and cloud together: how long the cloud should be away."""
    cause: str = ""
    """Why it is not the row that was chosen first."""
    race_cost: float | None = None
    """What sending it costs, where the device would have answered alone: its own work is no extra cost then."""
    early_s: float | None = None
    """Seconds after sending at which the device should begin to finish it, where that can be paid for."""
