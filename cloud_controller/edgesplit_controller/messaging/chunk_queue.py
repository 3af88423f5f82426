"""Chunks that were asked for and are not sent yet: when each is due, and whether all are sent it or who asked alone.

What is published on a chunk's own topic goes to everybody who listens, also to those whose copy is still on its way
through a slow link. So where many fetch, all are sent a chunk at most every `REPEAT_S`, unless at least half of
them asked for it together; whoever asks in between is sent a copy of its own. No threads, no clock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

GATHER_S = 0.05
"""How long a chunk waits for further devices to ask for it, while more than one device fetches its release..."""
MORE_S = 0.01
"""...and so much longer for each device beyond `FEW`: what is published goes to all of them, also to who has it."""
FEW = 8
LONGEST_GATHER_S = 1.0
RECENT_S = 2.0
"""A device that asked within this time still fetches."""
CROWD = 32
REPEAT_S = 10.0
"""Where more than `CROWD` fetch a release all are sent a chunk at most so often; fewer share what one of them
missed."""
WAITING_CHUNKS = 4_096
WAITING_CHUNKS_PER_DEVICE = 256
"""Twice what an agent has on its way; more are dropped, and the rest of the queue is for others."""


@dataclass(frozen=True, slots=True)
class Due:
    """A chunk whose time has come."""

    chunk: str
    to: tuple[str, ...] = ()
    """Devices that are sent a copy of their own; empty: everybody who listens is sent one."""


@dataclass(slots=True)
class _Waiting:
    due: float
    release: str
    askers: dict[str, bool]
    """Devices, and whether a copy of its own is good for each: older agents listen for those to all only."""


@dataclass(slots=True)
class _Fetching:
    """The devices that fetch one release, each with when it asked last."""

    asked: dict[str, float] = field(default_factory=dict)
    looked: float = float("-inf")

    def count(self, device: str, now: float) -> int:
        """How many there are, now that this one has asked."""
        self.asked[device] = now
        if now - self.looked >= GATHER_S:
            self.looked = now
            for gone in [name for name, at in self.asked.items() if now - at > RECENT_S]:
                del self.asked[gone]
        return len(self.asked)


@dataclass(slots=True)
class ChunkQueue:
    """All that wait."""

    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _of: Counter[str] = field(default_factory=Counter)
    """Chunks that each device waits for."""
    _fetching: dict[str, _Fetching] = field(default_factory=dict)
    _to_all: dict[str, float] = field(default_factory=dict)
    """When all were sent a chunk last, for those of the last `REPEAT_S`, the oldest first."""

    def ask(self, device: str, release: str, chunks: Sequence[str], now: float, *, own: bool = False) -> int:
        """Queue what this device asks for; how many found no room. `own`: a copy of its own is good, too.

        A lone device is answered at once. A device that asks while others fetch the same release waits `gather_s`
        for them; a chunk just sent is sent again, for who asks now may not have been listening then.
        """
        due = now + gather_s(self._fetching.setdefault(release, _Fetching()).count(device, now))
        refused = 0
        for chunk in chunks:
            there = self._waiting.get(chunk)
            if there is not None and device in there.askers:
                continue
            if self._of[device] >= WAITING_CHUNKS_PER_DEVICE or (there is None and len(self) >= WAITING_CHUNKS):
                refused += 1
                continue
            if there is None:
                there = self._waiting[chunk] = _Waiting(due, release, {})
            there.askers[device] = own
            self._of[device] += 1
        return refused

    def take(self, now: float) -> list[Due]:
        """The chunks whose time has come, first asked first."""
        while self._to_all and now - (oldest := next(iter(self._to_all.items())))[1] >= REPEAT_S:
            del self._to_all[oldest[0]]
        ready = [chunk for chunk, one in self._waiting.items() if one.due <= now]
        return [self._decided(chunk, self._waiting.pop(chunk), now) for chunk in ready]

    def __len__(self) -> int:
        return len(self._waiting)

    def next_due(self) -> float | None:
        """When `take` has something to give; None while nothing waits."""
        return min((one.due for one in self._waiting.values()), default=None)

    def _decided(self, chunk: str, one: _Waiting, now: float) -> Due:
        self._of.subtract(one.askers.keys())
        for device in one.askers:
            if not self._of[device]:
                del self._of[device]
        fetching = len(self._fetching[one.release].asked)
        are_few = fetching > CROWD and 2 * len(one.askers) < fetching
        if chunk in self._to_all and all(one.askers.values()) and are_few:
            return Due(chunk, tuple(one.askers))
        self._to_all.pop(chunk, None)
        self._to_all[chunk] = now
        return Due(chunk)


def gather_s(fetching: int) -> float:
    """How long a chunk waits while so many devices fetch its release."""
    return 0.0 if fetching == 1 else min(LONGEST_GATHER_S, GATHER_S + MORE_S * max(0, fetching - FEW))
