"""Statistics per model in the format of Triton's statistics extension; of one process, or summed over several."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from edgesplit.observability.phases import DECODE, ENCODE, QUEUE, RUN
from edgesplit.observability.registry import FLUSH_PENDING, MAX_PENDING
from edgesplit.oip_server.statistics import StatisticsEntry, add_duration, empty_statistics
from edgesplit_offload.models.repository import VERSION

_PHASES = {"queue": QUEUE, "compute_input": DECODE, "compute_infer": RUN, "compute_output": ENCODE}


class _Answered(NamedTuple):
    """One answered request."""

    model: str
    seconds: Mapping[str, float]
    took_s: float
    together: int
    leads: bool
    at: float


class StatisticsRecorder:
    """Statistics of this process since it started. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_model: dict[str, StatisticsEntry] = {}
        self._recorded: deque[_Answered] = deque()

    def record_answer(
        self, model: str, seconds: Mapping[str, float], took_s: float, batch_size: int, counts_run: bool
    ) -> None:
        """Record an answered request. `seconds` by phase; `counts_run` is true for one request of each run, with which
        the run is counted."""
        self._recorded.append(_Answered(model, seconds, took_s, batch_size, counts_run, time.time()))
        if len(self._recorded) >= MAX_PENDING:
            with self._lock:
                self._flush()

    def flush_if_due(self) -> None:
        """Aggregate if enough requests were recorded. Called after an answer was sent, when no request waits for it."""
        if len(self._recorded) >= FLUSH_PENDING:
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        """Aggregate all recorded requests, grouped by model and batch size. The caller holds the lock."""
        groups: dict[tuple[str, int], list[_Answered]] = {}
        while self._recorded:
            request = self._recorded.popleft()
            groups.setdefault((request.model, request.together if request.leads else 0), []).append(request)
        for (model, together), requests in groups.items():
            statistics = self._entry(model)
            statistics["inference_count"] += len(requests)
            statistics["last_inference"] = max(statistics["last_inference"], int(requests[-1].at * 1e3))
            phase_s = {
                name: sum(request.seconds.get(phase, 0.0) for request in requests) for name, phase in _PHASES.items()
            }
            for name, seconds in {"success": sum(request.took_s for request in requests), **phase_s}.items():
                add_duration(statistics["inference_stats"][name], seconds, len(requests))
            if together:
                statistics["execution_count"] += len(requests)
                batch = _batch_entry(statistics["batch_stats"], together)
                for name in ("compute_input", "compute_infer", "compute_output"):
                    add_duration(batch[name], phase_s[name], len(requests))

    def record_failure(self, model: str, took_s: float) -> None:
        """Record a request that was answered with an error."""
        with self._lock:
            add_duration(self._entry(model)["inference_stats"]["fail"], took_s)

    def snapshot(self) -> list[StatisticsEntry]:
        """The statistics of every model, as copies."""
        with self._lock:
            self._flush()
            return cast("list[StatisticsEntry]", _deep_copy(list(self._by_model.values())))

    def _entry(self, model: str) -> StatisticsEntry:
        statistics = self._by_model.get(model)
        if statistics is None:
            statistics = self._by_model[model] = empty_statistics(model, VERSION)
        return statistics


def sum_processes(processes: Iterable[Sequence[StatisticsEntry]]) -> list[StatisticsEntry]:
    """The statistics of several processes summed by model."""
    together: dict[str, StatisticsEntry] = {}
    for model in (model for process in processes for model in process):
        known = together.get(model["name"])
        together[model["name"]] = model if known is None else _add_statistics(known, model)
    return list(together.values())


def of_models(models: Iterable[str], counted: Sequence[StatisticsEntry]) -> dict[str, list[StatisticsEntry]]:
    """The statistics extension's answer for these models; all zero for a model without requests."""
    by_name = {model["name"]: model for model in counted}
    return {"model_stats": [by_name.get(name) or empty_statistics(name, VERSION) for name in models]}


def _batch_entry(batches: list[StatisticsEntry], size: int) -> StatisticsEntry:
    for batch in batches:
        if batch["batch_size"] == size:
            return batch
    kinds = {name: {"count": 0, "ns": 0} for name in ("compute_input", "compute_infer", "compute_output")}
    batches.append({"batch_size": size, **kinds})
    batches.sort(key=lambda batch: batch["batch_size"])
    return next(batch for batch in batches if batch["batch_size"] == size)


def _add_statistics(total: StatisticsEntry, other: StatisticsEntry) -> StatisticsEntry:
    """Add `other` to `total` in place; returns `total`."""
    total["inference_count"] += other["inference_count"]
    total["execution_count"] += other["execution_count"]
    total["last_inference"] = max(total["last_inference"], other["last_inference"])
    _add_entries(total["inference_stats"], other["inference_stats"])
    for batch in other["batch_stats"]:
        own = _batch_entry(total["batch_stats"], batch["batch_size"])
        _add_entries(own, {name: entry for name, entry in batch.items() if name != "batch_size"})
    return total


def _add_entries(total: StatisticsEntry, other: StatisticsEntry) -> None:
    for name, entry in other.items():
        total[name]["count"] += entry["count"]
        total[name]["ns"] += entry["ns"]


def _deep_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _deep_copy(item) for key, item in value.items()}
    return [_deep_copy(item) for item in value] if isinstance(value, list) else value
