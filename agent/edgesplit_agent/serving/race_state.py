"""A request whose rest is with the cloud, and perhaps with the device too: who runs, who arrives, when to look up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Literal

from edgesplit.errors import EdgeError
from edgesplit.offload_client.pool import Ask, Call, RemoteAnswer, RemoteFailure
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.serving.request import Expected, Request


@dataclass(frozen=True)
class TailDone:
    """The device has finished alone."""

    live: Mapping[str, Tensor]
    timing: Timing


@dataclass(frozen=True)
class TailFailed:
    """It could not."""

    error: EdgeError


Arrival = RemoteAnswer | RemoteFailure | TailDone | TailFailed


@dataclass(frozen=True)
class Encoded:
    """A body ready to send, and what making it took."""

    asked: Ask
    seconds: float


@dataclass(eq=False)
class Race:
    """Moments are of perf_counter; one that has passed, or will not come, is infinite."""

    request: Request
    expected: Expected
    live: Mapping[str, Tensor]
    encoded: Encoded
    end: float
    """Nobody is waited for beyond this."""
    tail: list[str] | None
    """The slices that finish it here; None where the device cannot."""
    call: Call = field(default_factory=Call)
    failure: RemoteFailure | None = None
    """Why the cloud is out of it."""
    tail_state: Literal["ready", "running", "failed", "none"] = "ready"
    tail_error: EdgeError | None = None
    hedged: bool = False
    """Its tail was begun while the cloud might still have answered."""
    by_plan: bool = False
    """It was begun when the plan for this request said so, the cloud being neither late nor gone."""
    over: bool = False
    """There is a winner, or none will be waited for: the tail stops where it is."""
    doubt_at: float = inf
    by_choice: float = inf
    by_need: float = inf
    overdue_at: float = inf
    began: float = field(default_factory=perf_counter)
    alone_from: float = 0.0
    """When the device began to finish it."""
    tail_s: float = 0.0
    """Of the slices that did, if it won."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wasted: Timing | None = None
    _arrivals: queue.SimpleQueue[Arrival] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        if self.tail is None:
            self.tail_state = "none"

    @property
    def waited_s(self) -> float:
        """Since the cloud was asked."""
        return perf_counter() - self.began

    @property
    def cause(self) -> str:
        """Why the device finished alone, if it did."""
        return self.failure.cause if self.failure is not None else "timeout"

    @property
    def is_outrun(self) -> bool:
        """The device, if it was first, was so as planned: nobody failed, and nobody was late."""
        return self.by_plan and self.failure is None and self.doubt_at != inf

    @property
    def is_lost(self) -> bool:
        """Nobody is left who could still arrive."""
        return self.failure is not None and self.tail_state in ("failed", "none")

    @property
    def next_moment(self) -> float:
        """When to look up though nobody has arrived."""
        return min(self.end, self.doubt_at, self.by_choice, self.by_need, self.overdue_at)

    def put(self, arrival: Arrival) -> None:
        """A runner has arrived, or has given up."""
        self._arrivals.put(arrival)

    def next(self) -> Arrival | None:
        """The next to arrive, or None where none does before the next moment."""
        try:
            return self._arrivals.get(timeout=max(0.0, self.next_moment - perf_counter()))
        except queue.Empty:
            return None
