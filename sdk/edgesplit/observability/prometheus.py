"""Prometheus exposition: series in the text format 0.0.4, written by prometheus_client.

That library is used for the output only. Counting is done in `edgesplit.observability.registry`: its histograms are
also sent in telemetry and summed over processes, and cost less by a factor of several (docs/decisions/0024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from edgesplit.errors import UsageError
from edgesplit.http1.server import Request, Response
from edgesplit.observability.metrics import FAMILIES, MetricFamily
from edgesplit.observability.registry import Series

if TYPE_CHECKING:
    from prometheus_client.core import Metric

METRICS_PATH = "/metrics"
"""HTTP path of the metrics page."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(series: Sequence[Series], constant: Mapping[str, str] | None = None) -> bytes:
    """Render the metrics page; `constant` labels are added to every sample. UsageError where prometheus_client is not
    installed."""
    try:
        from prometheus_client import generate_latest
    except ImportError as error:
        raise UsageError("metrics need prometheus_client: pip install prometheus_client") from error
    return generate_latest(_SeriesCollector(series, constant or {}))


def metrics_response(series: Sequence[Series], constant: Mapping[str, str] | None = None) -> Response:
    """The metrics page as an HTTP response."""
    return Response(200, {"content-type": CONTENT_TYPE}, [render_metrics(series, constant)])


def is_scrape(request: Request) -> bool:
    """True if the request is for the metrics page."""
    return request.path == METRICS_PATH and request.method in ("GET", "HEAD")


class _SeriesCollector:
    """A prometheus_client collector over series that have already been read."""

    def __init__(self, series: Sequence[Series], constant: Mapping[str, str]) -> None:
        self._constant = constant
        self._by_family: dict[str, list[Series]] = {}
        for sample in series:
            self._by_family.setdefault(sample.family, []).append(sample)

    def collect(self) -> Iterator[Metric]:
        """The metric families that have samples, in their defined order; then the metrics of this process (memory, CPU,
        files)."""
        from prometheus_client import ProcessCollector
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for family in FAMILIES:
            family_series = self._by_family.get(family.name)
            if not family_series:
                continue
            names = (*family.labels, *self._constant)
            if family.kind == "histogram":
                histogram = HistogramMetricFamily(family.name, family.help, labels=names)
                for sample in sorted(family_series, key=_labels_of):
                    buckets = _cumulative_buckets(family, sample.counts)
                    histogram.add_metric(self._label_values(sample), buckets, sample.value)
                yield histogram
                continue
            make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            numbers = make(family.name, family.help, labels=names)
            for sample in sorted(family_series, key=_labels_of):
                numbers.add_metric(self._label_values(sample), sample.value)
            yield numbers
        yield from ProcessCollector(registry=None).collect()

    def _label_values(self, sample: Series) -> list[str]:
        return [*sample.labels, *self._constant.values()]


def _labels_of(sample: Series) -> tuple[str, ...]:
    return sample.labels


def _cumulative_buckets(family: MetricFamily, counts: Iterable[int]) -> list[tuple[str, float]]:
    names = [*(f"{bound:g}" for bound in family.bounds), "+Inf"]
    return [(name, float(cumulative)) for name, cumulative in zip(names, accumulate(counts), strict=True)]
