"""Metrics as Prometheus reads them: the text format 0.0.4, written by prometheus_client.

Only what is shown passes through that library. Counting does not: the same histograms go into telemetry and are summed
over processes, and they cost less by a factor of several (docs/decisions/0024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from edgesplit.errors import UsageError
from edgesplit.http1.server import Request, Response
from edgesplit.observability.metrics import FAMILIES, Family
from edgesplit.observability.registry import Series

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def rendered(series: Sequence[Series], constant: Mapping[str, str] | None = None) -> bytes:
    """The page; `constant` labels stand on every sample. UsageError where prometheus_client is missing."""
    try:
        from prometheus_client import generate_latest
    except ImportError as error:
        raise UsageError("metrics need prometheus_client: pip install prometheus_client") from error
    return generate_latest(_Collected(series, constant or {}))


def metrics_response(series: Sequence[Series], constant: Mapping[str, str] | None = None) -> Response:
    """The page as an answer."""
    return Response(200, {"content-type": CONTENT_TYPE}, [rendered(series, constant)])


def is_scrape(request: Request) -> bool:
    """Does somebody ask for the page?"""
    return request.path == PATH and request.method in ("GET", "HEAD")


class _Collected:
    """What prometheus_client calls a collector, over series that were taken already."""

    def __init__(self, series: Sequence[Series], constant: Mapping[str, str]) -> None:
        self._constant = constant
        self._by_family: dict[str, list[Series]] = {}
        for one in series:
            self._by_family.setdefault(one.family, []).append(one)

    def collect(self) -> Iterator[Metric]:
        """The families that have something to show, in their order; then what this process takes of the machine."""
        from prometheus_client import ProcessCollector
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for family in FAMILIES:
            found = self._by_family.get(family.name)
            if not found:
                continue
            names = (*family.labels, *self._constant)
            if family.kind == "histogram":
                histogram = HistogramMetricFamily(family.name, family.help, labels=names)
                for one in sorted(found, key=_labels):
                    histogram.add_metric(self._values(one), _cumulative(family, one.counts), one.value)
                yield histogram
                continue
            make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            numbers = make(family.name, family.help, labels=names)
            for one in sorted(found, key=_labels):
                numbers.add_metric(self._values(one), one.value)
            yield numbers
        yield from ProcessCollector(registry=None).collect()

    def _values(self, one: Series) -> list[str]:
        return [*one.labels, *self._constant.values()]


def _labels(one: Series) -> tuple[str, ...]:
    return one.labels


def _cumulative(family: Family, counts: Iterable[int]) -> list[tuple[str, float]]:
    names = [*(f"{bound:g}" for bound in family.bounds), "+Inf"]
    return [(name, float(upto)) for name, upto in zip(names, accumulate(counts), strict=True)]
