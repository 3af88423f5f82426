"""What one process has counted, ready to be shown, or to be sent to another process and summed there.

Counting is noting: what came is added up when somebody asks, and else every `NOTED` times, all at once, which costs a
request a fraction of what it would one by one; a server has that done when an answer is on its way (`add_up_if_due`).
The number of series is bounded, whatever labels come: beyond
`MOST_SERIES` of a family, further ones are counted together under `(other)`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from edgesplit.errors import MalformedMessage
from edgesplit.msgspec_warmup import settle
from edgesplit.observability.histogram import Histogram
from edgesplit.observability.metrics import BY_NAME, Family

log = logging.getLogger(__name__)

MOST_SERIES = 512
"""Of one family."""
OTHER = "(other)"
NOTED = 64
"""Records that may wait to be added up..."""
MOST_NOTED = 4 * NOTED
"""...and so many, where nobody says when there is time for it."""
Entry = tuple[Family, tuple[str, ...], float]
"""What to count: of which family, with which labels, and by how much (a histogram: the value observed)."""
Form = tuple[tuple[Family, tuple[str, ...]], ...]
"""What is counted each time that something happens, without the numbers."""


class Series(msgspec.Struct, frozen=True, array_like=True):
    """One number, or one histogram, with its labels."""

    family: str
    labels: tuple[str, ...] = ()
    value: float = 0.0
    """Of a histogram: the sum of what was observed."""
    counts: tuple[int, ...] = ()
    """Of a histogram: by bucket, not cumulative."""


class Ledger:
    """Counters and histograms. Thread-safe."""

    def __init__(self, most_series: int = MOST_SERIES) -> None:
        self._most = most_series
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        self._series_of: dict[str, int] = {}
        self._noted: deque[Iterable[Entry]] = deque()
        self._alike: deque[tuple[Form, Sequence[float]]] = deque()

    def count(self, family: Family, *labels: str, by: float = 1.0) -> None:
        """One counter goes up."""
        self.record(((family, labels, by),))

    def observe(self, family: Family, *labels: str, value: float) -> None:
        """One value more in a histogram."""
        self.record(((family, labels, value),))

    def record(self, entries: Iterable[Entry]) -> None:
        """All these at once: nobody sees some of them without the others. They may be read later, by any thread."""
        self._noted.append(entries)
        self._add_up_beyond(MOST_NOTED)

    def record_alike(self, form: Form, values: Sequence[float]) -> None:
        """The same for what happens again and again: one value for each part of its form, which is added up together
        with all that have the same one."""
        self._alike.append((form, values))
        self._add_up_beyond(MOST_NOTED)

    def add_up_if_due(self) -> None:
        """There is time for it now."""
        self._add_up_beyond(NOTED)

    def _add_up_beyond(self, count: int) -> None:
        if len(self._noted) + len(self._alike) >= count:
            with self._lock:
                self._add_up()

    def _add_up(self) -> None:
        """Everything noted so far. Holds the lock."""
        forms: dict[int, tuple[Form, list[Sequence[float]]]] = {}
        while self._alike:
            form, values = self._alike.popleft()
            forms.setdefault(id(form), (form, []))[1].append(values)
        for form, many in forms.values():
            try:
                self._add_alike(form, many)
            except Exception:  # whoever counts next, or reads, is not to blame
                log.exception("something could not be counted")
        while self._noted:
            entries = self._noted.popleft()
            try:
                for family, labels, value in entries:
                    self._add(family, labels, value)
            except Exception:  # whoever counts next, or reads, is not to blame here either
                log.exception("something could not be counted")

    def _add_alike(self, form: Form, many: Sequence[Sequence[float]]) -> None:
        for (family, labels), column in zip(form, zip(*many, strict=True), strict=True):
            if family.kind == "histogram":
                self._histogram(family, labels).observe_all(column)
            else:
                self._add(family, labels, sum(column))

    def _add(self, family: Family, labels: tuple[str, ...], value: float) -> None:
        key = (family.name, labels)
        if family.kind == "histogram":
            (self._histograms.get(key) or self._histogram(family, labels)).observe(value)
            return
        if key not in self._counters:
            key = self._key(family, labels, self._counters)
        self._counters[key] = self._counters.get(key, 0.0) + value

    def histogram(self, family: Family, *labels: str) -> Histogram:
        """A copy of that histogram as it is now; an empty one where nothing was observed."""
        with self._lock:
            self._add_up()
            found = self._histograms.get((family.name, labels))
            return Histogram(found.bounds, list(found.counts), found.total) if found else Histogram(family.bounds)

    def series(self) -> list[Series]:
        """Everything counted so far, at one moment."""
        with self._lock:
            self._add_up()
            counters = [Series(name, labels, value) for (name, labels), value in self._counters.items()]
            histograms = [
                Series(name, labels, one.total, tuple(one.counts)) for (name, labels), one in self._histograms.items()
            ]
        return counters + histograms

    def _histogram(self, family: Family, labels: tuple[str, ...]) -> Histogram:
        key = self._key(family, labels, self._histograms)
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = Histogram(family.bounds)
        return found

    def _key(
        self, family: Family, labels: tuple[str, ...], known: Mapping[tuple[str, tuple[str, ...]], object]
    ) -> tuple[str, tuple[str, ...]]:
        key = (family.name, labels)
        if key in known:
            return key
        count = self._series_of.get(family.name, 0)
        if count >= self._most:
            return (family.name, (OTHER,) * len(family.labels))
        self._series_of[family.name] = count + 1
        return key


def gauge(family: Family, value: float, *labels: str) -> Series:
    """A reading, taken when somebody asks."""
    return Series(family.name, labels, float(value))


def summed(processes: Iterable[Sequence[Series]]) -> list[Series]:
    """What several processes have counted together; gauges as their family says."""
    together: dict[tuple[str, tuple[str, ...]], Series] = {}
    for one in (one for process in processes for one in process):
        key = (one.family, one.labels)
        there = together.get(key)
        together[key] = one if there is None else _joined(there, one)
    return list(together.values())


def _joined(one: Series, other: Series) -> Series:
    family = BY_NAME[one.family]
    if family.across == "max":
        return Series(one.family, one.labels, max(one.value, other.value))
    counts = tuple(mine + theirs for mine, theirs in zip(one.counts, other.counts, strict=True))
    return Series(one.family, one.labels, one.value + other.value, counts)


def packed(series: Sequence[Series]) -> bytes:
    """As another process of ours reads them."""
    return msgspec.msgpack.encode(series)


def unpacked(raw: bytes) -> list[Series]:
    """What a process of ours packed; MalformedMessage where it is anything else."""
    try:
        series = msgspec.msgpack.decode(raw, type=list[Series])
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise MalformedMessage(f"counted metrics: {error}") from error
    for one in series:
        family = BY_NAME.get(one.family)
        buckets = len(family.bounds) + 1 if family is not None and family.kind == "histogram" else 0
        if family is None or len(one.labels) != len(family.labels) or len(one.counts) != buckets:
            raise MalformedMessage(f"counted metrics: {one.family[:80]!r} is not as this version counts it")
    return series


settle(__name__)
