"""Queue policy: which request uses the device's processor next, and which is dropped when there is no room.

Decisions only: no lock, no clock. Between models the processor is shared by seconds used (start-time fair queueing,
Goyal et al. 1996: a model that was idle has saved nothing up, and one that floods waits behind the others). Within a
model the earliest deadline goes first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from edgesplit.errors import Busy, Dropped
from edgesplit.oip.options import InferOptions


@dataclass(eq=False)
class QueueEntry:
    """A request's entry in the queue, from its admission to its answer."""

    model: str
    options: InferOptions
    deadline: float
    number: int = 0
    """Order of arrival."""
    has_begun: bool = False
    """The request has started, or needs no processor: from then on it is finished, not dropped."""
    is_dropped: bool = False
    is_background: bool = False
    """The request has the processor only while no other waits for it."""

    def is_same_stream(self, other: QueueEntry) -> bool:
        """Whether both are frames of one stream; only those may replace each other."""
        return (self.model, self.options.stream) == (other.model, other.options.stream)


TOTAL_ROOM_FACTOR = 2
"""All models together have room for this many times what each has: one that floods leaves the others their room."""


def entry_to_drop(new: QueueEntry, admitted: Collection[QueueEntry], room: int) -> QueueEntry | None:
    """The entry to be dropped for `new`, or None where there is room; raises Busy or Dropped if `new` itself is
    refused.

    `room` is the limit of requests in flight per model.
    """
    droppable = [entry for entry in admitted if entry.is_same_stream(new) and not (entry.has_begun or entry.is_dropped)]
    queue = new.options.queue
    has_room = len(admitted) < TOTAL_ROOM_FACTOR * room and sum(entry.model == new.model for entry in admitted) < room
    # Room is bounded per model and for all models; `queue` is the stream's own bound on its waiting frames.
    if has_room and (queue is None or len(droppable) < queue):
        return None
    if new.options.drop == "none":
        raise Busy(f"{len(admitted)} requests run or wait already")
    # Only a frame whose application chose to lose the oldest can be replaced; anything else refuses the new one.
    replaceable = [entry for entry in droppable if entry.options.drop == "oldest"]
    if new.options.drop == "newest" or not replaceable:
        raise Dropped(
            f"no room for this frame: {len(droppable)} of its stream wait, {len(admitted)} requests run or wait"
        )
    return min(replaceable, key=lambda entry: entry.number)


@dataclass
class FairShares:
    """Virtual time of start-time fair queueing: processor seconds used, by model."""

    used: dict[str, float] = field(default_factory=dict)
    """Finish tag by model: the virtual time at which its last use ended."""
    now: float = 0.0
    """Virtual time: start tag of the latest use."""

    def next(self, waiting: Iterable[QueueEntry]) -> QueueEntry | None:
        """The entry that is next, or None if none waits."""
        return min(
            waiting,
            key=lambda entry: (entry.is_background, self._start(entry.model), entry.deadline, entry.number),
            default=None,
        )

    def begin(self, model: str) -> None:
        """`model` has the processor from now on."""
        self.now = self._start(model)
        # Finish tags in the past equal the default of `_start`: dropping them keeps the table small.
        self.used = {name: used for name, used in self.used.items() if used > self.now}

    def end(self, model: str, seconds: float) -> None:
        """`model` used the processor for so many seconds."""
        self.used[model] = self._start(model) + seconds

    def _start(self, model: str) -> float:
        """Start tag of the model's next use: not before the current virtual time, so that idling earns no credit."""
        return max(self.now, self.used.get(model, 0.0))
