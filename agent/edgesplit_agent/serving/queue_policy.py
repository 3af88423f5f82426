"""Who may use the device's processor next, and who gives way where there is no room. Decisions only: no lock, no clock.

Between models turns are shared by the seconds used (start-time fair queueing: a model that was idle has saved nothing
up, and one that floods waits behind the others). Within a model the earliest deadline goes first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from edgesplit.errors import Busy, Dropped
from edgesplit.oip.options import Wishes


@dataclass(eq=False)
class Place:
    """A request's place in the queue, from its arrival to its answer."""

    model: str
    wishes: Wishes
    deadline: float
    number: int = 0
    """By arrival."""
    has_begun: bool = False
    """Its turn came, or it needs none: from then on it is finished, not dropped."""
    is_dropped: bool = False

    def is_of_the_stream_of(self, other: Place) -> bool:
        """Frames of one stream; only they may take one another's place."""
        return (self.model, self.wishes.stream) == (other.model, other.wishes.stream)


MODELS = 2
"""Together they have room for so many times what each of them has: one that floods leaves the others theirs."""


def giving_way(new: Place, here: Collection[Place], room: int) -> Place | None:
    """The place that is given up for `new`, or None where there is room; Busy or Dropped where `new` is what goes.

    `room` is each model's: requests that run, wait or are away.
    """
    waiting = [one for one in here if one.is_of_the_stream_of(new) and not (one.has_begun or one.is_dropped)]
    queue = new.wishes.queue
    has_room = len(here) < MODELS * room and sum(one.model == new.model for one in here) < room
    if has_room and (queue is None or len(waiting) < queue):
        return None
    if new.wishes.drop == "none":
        raise Busy(f"{len(here)} requests run or wait already")
    willing = [one for one in waiting if one.wishes.drop == "oldest"]
    if new.wishes.drop == "newest" or not willing:
        raise Dropped(f"no room for this frame: {len(waiting)} of its stream wait, {len(here)} requests run or wait")
    return min(willing, key=lambda one: one.number)


@dataclass
class Shares:
    """Seconds of the processor by model, as fair queueing counts them."""

    used: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    """Where the turn that was given last began."""

    def next(self, waiting: Iterable[Place]) -> Place | None:
        """Whose turn it is."""
        return min(waiting, key=lambda one: (self._start(one.model), one.deadline, one.number), default=None)

    def begin(self, model: str) -> None:
        """`model` has the processor from now on."""
        self.now = self._start(model)
        self.used = {name: used for name, used in self.used.items() if used > self.now}

    def end(self, model: str, seconds: float) -> None:
        """It had it so long."""
        self.used[model] = self._start(model) + seconds

    def _start(self, model: str) -> float:
        return max(self.now, self.used.get(model, 0.0))
