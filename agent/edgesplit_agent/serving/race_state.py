"""State of one race between the offload target and the local tail: participants, arrivals and timers."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Literal

from edgesplit.errors import EdgeError
from edgesplit.offload_client.pool import CancellableCall, OffloadAnswer, OffloadFailure, OffloadRequest
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.serving.request import Prediction, Request


@dataclass(frozen=True)
class TailDone:
    """The device has finished the request locally."""

    live: Mapping[str, Tensor]
    timing: Timing


@dataclass(frozen=True)
class TailFailed:
    """The device could not finish the request locally."""

    error: EdgeError


Arrival = OffloadAnswer | OffloadFailure | TailDone | TailFailed
"""A participant's final message to the race."""


@dataclass(frozen=True)
class Encoded:
    """A request body ready to send, and the seconds it took to encode."""

    request: OffloadRequest
    seconds: float


@dataclass(eq=False)
class RaceState:
    """State of one offloaded request, from sending to its answer.

    Times are perf_counter values; a timer that has fired, or will not fire, is infinite. The requesting thread alone
    changes the timers and `tail_state`; the offload thread and the tail thread only `put` arrivals and read `is_over`.
    """

    request: Request
    prediction: Prediction
    live: Mapping[str, Tensor]
    encoded: Encoded
    give_up_at: float
    """No participant is waited for beyond this time."""
    tail: list[str] | None
    """The slices that finish the request locally; None where the device cannot."""
    call: CancellableCall = field(default_factory=CancellableCall)
    failure: OffloadFailure | None = None
    """Why the offload failed; None while it has not."""
    tail_state: Literal["ready", "running", "failed", "none"] = "ready"
    """`none`: no local tail is possible; `ready`: it may start; then `running`, and `failed` if it failed."""
    tail_error: EdgeError | None = None
    hedged: bool = False
    """The tail was started while the target might still have answered."""
    is_planned_hedge: bool = False
    """The tail was started at the early-hedge time planned for this request, while the target was neither late nor
    failed."""
    is_over: bool = False
    """A participant has won or none is waited for any more: the tail stops before its next slice."""
    slow_at: float = inf
    """Timer: the target is slow from then on."""
    optional_hedge_at: float = inf
    """Timer: the tail may start if the hedge budget allows it."""
    forced_hedge_at: float = inf
    """Timer: the tail must start to meet the deadline."""
    overdue_at: float = inf
    """Timer: the target may be dead from then on."""
    holds_until: float = 0.0
    """Until then an answer of the device waits for the target's, which would be more accurate."""
    held_answer: TailDone | None = None
    """The device's answer that waits."""
    deliver_held_at: float = inf
    """Timer: it is delivered."""
    began: float = field(default_factory=perf_counter)
    tail_started_at: float = 0.0
    """Time at which the tail was started."""
    tail_s: float = 0.0
    """Seconds of the tail's slices, if it won."""
    _arrivals: queue.SimpleQueue[Arrival] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        if self.tail is None:  # nothing to fall back to
            self.tail_state = "none"

    @property
    def waited_s(self) -> float:
        """Seconds since the request was sent."""
        return perf_counter() - self.began

    @property
    def cause(self) -> str:
        """Why the device finished the request, if it did: the offload's failure, else `timeout`."""
        return self.failure.cause if self.failure is not None else "timeout"

    @property
    def lost_as_planned(self) -> bool:
        """Whether a win of the device is as planned: the target neither failed nor was late."""
        return self.is_planned_hedge and self.failure is None and self.slow_at != inf

    @property
    def is_lost(self) -> bool:
        """Whether no participant is left that could still answer."""
        return self.failure is not None and self.tail_state in ("failed", "none")

    @property
    def next_timer_at(self) -> float:
        """Earliest time at which a timer fires."""
        hedges_at = min(self.optional_hedge_at, self.forced_hedge_at, self.deliver_held_at)
        return min(self.give_up_at, self.slow_at, self.overdue_at, hedges_at)

    def put(self, arrival: Arrival) -> None:
        """Deliver an arrival; called from the participants' threads."""
        self._arrivals.put(arrival)

    def next(self) -> Arrival | None:
        """The next arrival, or None when a timer fires first."""
        try:
            return self._arrivals.get(timeout=max(0.0, self.next_timer_at - perf_counter()))
        except queue.Empty:
            return None
