"""Sums the metrics of all serving processes, although processes come and go.

The last counters of a process stay in the sums when it is late or has ended, so that no sum ever falls: Prometheus
would take that for a restart of the whole server. What a killed process counted since its last answer is lost. Gauges
count only for processes that answered this time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from edgesplit.errors import MalformedMessage
from edgesplit.observability.metrics import FAMILY_BY_NAME
from edgesplit.observability.registry import Series, decode_series, encode_series, merge_series

log = logging.getLogger(__name__)

MAX_PROCESSES = 64
"""Processes whose counters are kept one by one; those of older ones are merged into one sum."""


def metrics_answer(process: str, series: list[Series]) -> list[Any]:
    """A process's answer, under an id that no other process ever had."""
    return [process, encode_series(series)]


class MetricTotals:
    """Metric sums of one server's processes. Not thread-safe."""

    def __init__(self, remembered: int = MAX_PROCESSES) -> None:
        self._max_processes = remembered
        self._counters: OrderedDict[str, list[Series]] = OrderedDict()
        self._merged: list[Series] = []

    def update(self, answers: Iterable[list[Any]]) -> list[Series]:
        """The sums, updated with these answers."""
        gauges = []
        for process, raw in answers:
            try:
                series = decode_series(raw)
            except MalformedMessage as error:
                log.error("a serving process reported invalid metrics: %s", error)
                continue
            gauges.append([sample for sample in series if _is_gauge(sample)])
            self._counters[process] = [sample for sample in series if not _is_gauge(sample)]
            self._counters.move_to_end(process)
        while len(self._counters) > self._max_processes:
            _, oldest = self._counters.popitem(last=False)
            self._merged = merge_series([self._merged, oldest])
        return merge_series([self._merged, *self._counters.values(), *gauges])


def _is_gauge(sample: Series) -> bool:
    return FAMILY_BY_NAME[sample.family].kind == "gauge"
