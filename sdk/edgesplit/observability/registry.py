"""Metric registry: the counters and histograms of one process, to be exposed, or sent to another process and summed
there.

Recording only queues the values. They are added up when the registry is read, otherwise in batches of `FLUSH_PENDING`,
which costs a request a fraction of adding them up one by one; a server triggers this after it has sent a response
(`flush_if_due`). The number of series is bounded, whatever labels are recorded: beyond `MAX_SERIES` of a family,
further series are counted together under `(other)`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from edgesplit.decoding import decode_msgpack
from edgesplit.errors import MalformedMessage
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.observability.histogram import Histogram
from edgesplit.observability.metrics import FAMILY_BY_NAME, MetricFamily

log = logging.getLogger(__name__)

MAX_SERIES = 512
"""Maximum number of series of one family."""
OTHER_LABEL = "(other)"
FLUSH_PENDING = 64
"""Number of pending records from which `flush_if_due` adds them up."""
MAX_PENDING = 4 * FLUSH_PENDING
"""Number of pending records from which recording itself adds them up, if `flush_if_due` was not called in time."""
Entry = tuple[MetricFamily, tuple[str, ...], float]
"""One record: the family, its label values, and the increment (for a histogram: the observed value)."""
RecordTemplate = tuple[tuple[MetricFamily, tuple[str, ...]], ...]
"""Families and label values of a group of records that occurs again and again, without the numbers."""


class Series(msgspec.Struct, frozen=True, array_like=True):
    """One number, or one histogram, with its labels."""

    family: str
    labels: tuple[str, ...] = ()
    value: float = 0.0
    """For a histogram: the sum of the observed values."""
    counts: tuple[int, ...] = ()
    """For a histogram: counts by bucket, not cumulative."""


class MetricRegistry:
    """Counters and histograms of one process. Thread-safe."""

    def __init__(self, max_series: int = MAX_SERIES) -> None:
        self._max_series = max_series
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, tuple[str, ...]], float] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        self._series_of: dict[str, int] = {}
        self._pending: deque[Iterable[Entry]] = deque()
        self._pending_batches: deque[tuple[RecordTemplate, Sequence[float]]] = deque()

    def count(self, family: MetricFamily, *labels: str, by: float = 1.0) -> None:
        """Increment a counter."""
        self.record(((family, labels, by),))

    def observe(self, family: MetricFamily, *labels: str, value: float) -> None:
        """Record one value in a histogram."""
        self.record(((family, labels, value),))

    def record(self, entries: Iterable[Entry]) -> None:
        """Record several entries atomically: a reader gets either all or none of them. They may be added up later, on
        any thread."""
        self._pending.append(entries)
        self._flush_beyond(MAX_PENDING)

    def record_batch(self, template: RecordTemplate, values: Sequence[float]) -> None:
        """Record one value for each part of `template`. All pending records with the same object are added up
        together."""
        self._pending_batches.append((template, values))
        self._flush_beyond(MAX_PENDING)

    def flush_if_due(self) -> None:
        """Add up pending records if there are enough of them. To be called when there is time for it."""
        self._flush_beyond(FLUSH_PENDING)

    def _flush_beyond(self, count: int) -> None:
        if len(self._pending) + len(self._pending_batches) >= count:
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        """Add up all pending records. The caller holds the lock."""
        # Batches first: records with the same template (by identity) are transposed into one column per series, so that
        # a histogram takes a whole column at once.
        forms: dict[int, tuple[RecordTemplate, list[Sequence[float]]]] = {}
        while self._pending_batches:
            form, values = self._pending_batches.popleft()
            forms.setdefault(id(form), (form, []))[1].append(values)
        for form, rows in forms.values():
            try:
                self._add_batch(form, rows)
            except Exception:  # must not fail the thread that happens to flush
                log.exception("a metric could not be recorded")
        while self._pending:
            entries = self._pending.popleft()
            try:
                for family, labels, value in entries:
                    self._add(family, labels, value)
            except Exception:  # must not fail the thread that happens to flush
                log.exception("a metric could not be recorded")

    def _add_batch(self, template: RecordTemplate, rows: Sequence[Sequence[float]]) -> None:
        for (family, labels), column in zip(template, zip(*rows, strict=True), strict=True):
            if family.kind == "histogram":
                self._histogram(family, labels).observe_all(column)
            else:
                self._add(family, labels, sum(column))

    def _add(self, family: MetricFamily, labels: tuple[str, ...], value: float) -> None:
        key = (family.name, labels)
        if family.kind == "histogram":
            (self._histograms.get(key) or self._histogram(family, labels)).observe(value)
            return
        if key not in self._counters:
            key = self._key(family, labels, self._counters)
        self._counters[key] = self._counters.get(key, 0.0) + value

    def histogram(self, family: MetricFamily, *labels: str) -> Histogram:
        """A copy of the histogram as it is now; an empty one where nothing was recorded."""
        with self._lock:
            self._flush()
            histogram = self._histograms.get((family.name, labels))
            return (
                Histogram(histogram.bounds, list(histogram.counts), histogram.total)
                if histogram
                else Histogram(family.bounds)
            )

    def series(self) -> list[Series]:
        """Everything recorded so far, as one consistent snapshot."""
        with self._lock:
            self._flush()
            counters = [Series(name, labels, value) for (name, labels), value in self._counters.items()]
            histograms = [
                Series(name, labels, histogram.total, tuple(histogram.counts))
                for (name, labels), histogram in self._histograms.items()
            ]
        return counters + histograms

    def _histogram(self, family: MetricFamily, labels: tuple[str, ...]) -> Histogram:
        key = self._key(family, labels, self._histograms)
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = Histogram(family.bounds)
        return histogram

    def _key(
        self, family: MetricFamily, labels: tuple[str, ...], known: Mapping[tuple[str, tuple[str, ...]], object]
    ) -> tuple[str, tuple[str, ...]]:
        key = (family.name, labels)
        if key in known:
            return key
        # A new series: counted against the family's bound, or merged into the overflow series once that is reached.
        count = self._series_of.get(family.name, 0)
        if count >= self._max_series:
            return (family.name, (OTHER_LABEL,) * len(family.labels))
        self._series_of[family.name] = count + 1
        return key


def gauge_series(family: MetricFamily, value: float, *labels: str) -> Series:
    """A gauge's series, read at the time of a scrape."""
    return Series(family.name, labels, float(value))


def merge_series(processes: Iterable[Sequence[Series]]) -> list[Series]:
    """Merge the series of several processes: sums, or the family's own aggregation for gauges."""
    merged: dict[tuple[str, tuple[str, ...]], Series] = {}
    for sample in (sample for process in processes for sample in process):
        key = (sample.family, sample.labels)
        existing = merged.get(key)
        merged[key] = sample if existing is None else _merge(existing, sample)
    return list(merged.values())


def _merge(first: Series, second: Series) -> Series:
    family = FAMILY_BY_NAME[first.family]
    if family.aggregation == "max":
        return Series(first.family, first.labels, max(first.value, second.value))
    counts = tuple(mine + theirs for mine, theirs in zip(first.counts, second.counts, strict=True))
    return Series(first.family, first.labels, first.value + second.value, counts)


def encode_series(series: Sequence[Series]) -> bytes:
    """Encode series for another process of edgesplit."""
    return msgspec.msgpack.encode(series)


def decode_series(raw: bytes) -> list[Series]:
    """Decode series of another process; MalformedMessage where they do not match this version's metric families."""
    series = decode_msgpack(raw, list[Series], "metrics of another process")
    for sample in series:
        family = FAMILY_BY_NAME.get(sample.family)
        buckets = len(family.bounds) + 1 if family is not None and family.kind == "histogram" else 0
        if family is None or len(sample.labels) != len(family.labels) or len(sample.counts) != buckets:
            raise MalformedMessage(
                f"metrics of another process: {sample.family[:80]!r} is unknown to this version, or differs"
            )
    return series


warm_up_structs(__name__)
