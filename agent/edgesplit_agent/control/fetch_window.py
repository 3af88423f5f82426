"""Which chunks to ask for now: a pure account of what is wanted, asked for and come, with the clock handed in.

As much is kept on its way as the link holds twice over (the most bytes per second seen, times the least delay seen:
Cardwell et al., BBR, ACM Queue 2016), so a long link is filled and a slow one is not flooded. Chunks that others asked
for count as come; while such a stream flows nothing is asked, so that a group is fed by one stream and who was late
asks for the gaps when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from edgesplit.limits import LIMITS

FIRST_BYTES = 2 * LIMITS.chunk_bytes
"""On their way before anything is known of the link."""
MOST_BYTES = 128 * LIMITS.chunk_bytes
"""On their way at most: what comes is in memory until it is on disk."""
GAIN = 2.0
"""So many times what the link holds."""
LEAST_DELAY_S = 0.03
"""A link that answers sooner is counted as if it took so long: there the time goes into threads, which take turns."""
SAMPLES = 32
"""Chunks over which the best rate is remembered."""
FIRST_PATIENCE_S = 20.0
"""For an answer from a link of which nothing is known."""
LONGEST_PATIENCE_S = 60.0
PATIENCE = 4.0
"""So many times as long as what is on its way should take, before it counts as lost."""
OVERTAKEN = 2.0
"""So many windows that came after it was asked for, and it did not: lost."""
SILENCES = 4
"""So often nothing came at all, each time asked again: then the link counts as gone."""
KNOWN_FOR = 2
"""Silences until what was known of the link is forgotten: one is most often the end of a window that was lost."""
HEAR_S = 10.0
LEAST_HEARD = 8
"""What others ask for comes at their pace: chunks are listened for that this link takes within `HEAR_S`, or so many."""
HOLD_S = 0.3
"""How long after a chunk that others asked for nothing is asked."""
WATCH_S = 60.0
LEAST_BYTES_PER_S = 2_000.0
"""What comes more slowly than this over `WATCH_S` is not worth waiting for: a link that drips, or one that stalls us
on purpose (TUF: slow retrieval)."""


@dataclass(slots=True)
class _Asked:
    at: float
    come_before: int
    """Bytes that had come when it was asked for."""


@dataclass(slots=True)
class Window:
    """What is still to come of one release. Times are of a monotonic clock."""

    wanted: Mapping[str, int]
    """Size by digest, in the order in which they are asked for."""
    began: float
    cap_bytes_per_s: float = float("inf")
    """Ask for no more than this: over any ten seconds at most a twentieth more, or one chunk where that is more."""
    jitter: float = 0.0
    """In [0, 1): stretches the hold, so that the devices of a group do not all ask at once."""
    listen_first_s: float = 0.0
    """Ask nothing before: a stream for others may flow already."""
    come: int = 0
    """Bytes."""
    doubled: int = 0
    """Times a chunk was asked for again."""
    _left: deque[str] = field(default_factory=deque)
    _gone: set[str] = field(default_factory=set)
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _flying: int = 0
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _delay_s: float = float("inf")
    _last: float = 0.0
    """When something came last, or was asked for after nothing was on its way."""
    _silences: int = 0
    _held_until: float = 0.0
    _spent: float = 0.0
    """When the bytes asked for so far are paid for, under the cap."""
    _watched: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._left = deque(self.wanted)
        self._last = self._spent = self.began
        self._held_until = self.began + self.listen_first_s
        self._watched.append((self.began, 0))

    @property
    def done(self) -> bool:
        """Everything has come."""
        return len(self._gone) == len(self.wanted)

    @property
    def bytes_per_s(self) -> float:
        """The best rate of late, 0 while unknown."""
        return max(self._rates, default=0.0)

    @property
    def room(self) -> float:
        """Bytes that may be on their way at once."""
        known = GAIN * self.bytes_per_s * max(self._delay_s, LEAST_DELAY_S) if self._rates else 0.0
        return min(max(known, FIRST_BYTES), MOST_BYTES)

    def worth_hearing(self, most: int) -> int:
        """Chunks to listen for at once, at most `most`: what is published for others fills a slow link's queue at the
        broker, and what was asked for waits behind it."""
        if not self._rates:
            return most
        return min(most, max(LEAST_HEARD, int(self.bytes_per_s * HEAR_S / LIMITS.chunk_bytes)))

    def ahead(self, most: int) -> list[str]:
        """The next chunks that have not come, in order: what is worth listening for."""
        listed = list(self._asked)
        for sha256 in self._left:
            if len(listed) >= most:
                break
            if sha256 not in self._gone and sha256 not in self._asked:
                listed.append(sha256)
        return listed[:most]

    def ask(self, now: float, heard: Container[str] | None = None) -> tuple[str, ...]:
        """The chunks to be asked for now, at most `LIMITS.window_chunks`, and only such as are listened for (`heard`;
        None: all). What was lost comes first."""
        if now < self._held_until:
            return ()
        self._take_back_lost(now)
        chosen: list[str] = []
        while self._left and len(chosen) < LIMITS.window_chunks:
            sha256 = self._left[0]
            if sha256 in self._gone or sha256 in self._asked:
                self._left.popleft()
                continue
            size = self.wanted[sha256]
            if heard is not None and sha256 not in heard:
                break
            if (self._flying and self._flying + size > self.room) or now < self._spent:
                break
            self._left.popleft()
            if not self._flying:
                self._last = now
            chosen.append(sha256)
            self._asked[sha256] = _Asked(now, self.come)
            self._flying += size
            self._spent = max(self._spent, now - self._catch_up_s) + size / self.cap_bytes_per_s
        return tuple(chosen)

    def arrived(self, sha256: str, now: float) -> bool:
        """A chunk came, whole and right. False for one that is not wanted (any more)."""
        if sha256 not in self.wanted or sha256 in self._gone:
            return False
        self._gone.add(sha256)
        asked = self._asked.pop(sha256, None)
        self.come += self.wanted[sha256]
        self._last, self._silences = now, 0
        if asked is None:
            self._held_until = now + HOLD_S * (1 + self.jitter)
            return True
        self._flying -= self.wanted[sha256]
        took_s = max(now - asked.at, 1e-6)
        self._delay_s = min(self._delay_s, took_s)
        self._rates.append((self.come - asked.come_before) / took_s)
        return True

    def next_look(self, now: float) -> float:
        """When time alone changes what `ask` says."""
        moments = [self._last + self._patience_s, self._watched[0][0] + WATCH_S]
        if self._held_until > now:
            moments.append(self._held_until)
        if self._left and self._spent > now:
            moments.append(self._spent)
        return min(moments)

    def trouble(self, now: float) -> str:
        """Why there is no use in going on; empty while there is."""
        if self._silences >= SILENCES:
            return f"nothing came, asked {SILENCES} times"
        self._watched.append((now, self.come))
        while now - self._watched[0][0] > WATCH_S and len(self._watched) > 1:
            since, come = self._watched.popleft()
            rate = (self.come - come) / (now - since)
            if rate < min(LEAST_BYTES_PER_S, self.cap_bytes_per_s / 2):
                return f"only {rate:.0f} bytes per second came in the last {WATCH_S:.0f} s"
        return ""

    @property
    def _catch_up_s(self) -> float:
        """For how long what could have been asked for, and was not, may be made up for: with a whole chunk ahead of its
        price half a second's worth together, a twentieth of ten seconds."""
        return min(0.25, max(0.0, 0.5 - LIMITS.chunk_bytes / self.cap_bytes_per_s))

    @property
    def _patience_s(self) -> float:
        """How long what is on its way may take until the next of it comes."""
        if not self._rates:
            return FIRST_PATIENCE_S * 2.0 ** max(0, self._silences - KNOWN_FOR)
        expected_s = self._delay_s + self._flying / self.bytes_per_s
        return min(LONGEST_PATIENCE_S, max(1.0, PATIENCE * expected_s) * 2.0**self._silences)

    def _take_back_lost(self, now: float) -> None:
        """What others have overtaken by far is asked for again; everything is, where nothing came for too long."""
        overtaken = []
        for sha256, asked in self._asked.items():  # in the order in which they were asked for
            if self.come - asked.come_before < OVERTAKEN * self.room:
                break
            overtaken.append(sha256)
        for sha256 in reversed(overtaken):
            del self._asked[sha256]
            self._flying -= self.wanted[sha256]
            self._left.appendleft(sha256)
        self.doubled += len(overtaken)
        if not self._asked or now < self._last + self._patience_s:
            return
        self.doubled += len(self._asked)
        self._left.extendleft(reversed(self._asked))
        self._asked.clear()
        self._flying, self._last = 0, now
        self._silences += 1
        if self._silences >= KNOWN_FOR:
            self._rates.clear()
            self._delay_s = float("inf")
