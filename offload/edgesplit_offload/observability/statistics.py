"""Statistics per model in the format of Triton's statistics extension; of one process, or summed over several."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from edgesplit.observability.phases import DECODE, ENCODE, QUEUE, RUN
from edgesplit.observability.registry import FLUSH_PENDING, MAX_PENDING
from edgesplit_offload.models.repository import VERSION

ModelStatistics = dict[str, Any]
_PHASES = {"queue": QUEUE, "compute_input": DECODE, "compute_infer": RUN, "compute_output": ENCODE}
_KINDS = ("success", "fail", *_PHASES, "cache_hit", "cache_miss")


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
        self._by_model: dict[str, ModelStatistics] = {}
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
                _add(statistics["inference_stats"][name], seconds, len(requests))
            if together:
                statistics["execution_count"] += len(requests)
                batch = _batch_entry(statistics["batch_stats"], together)
                for name in ("compute_input", "compute_infer", "compute_output"):
                    _add(batch[name], phase_s[name], len(requests))

    def record_failure(self, model: str, took_s: float) -> None:
        """Record a request that was answered with an error."""
        with self._lock:
            _add(self._entry(model)["inference_stats"]["fail"], took_s)

    def snapshot(self) -> list[ModelStatistics]:
        """The statistics of every model, as copies."""
        with self._lock:
            self._flush()
            return cast("list[ModelStatistics]", _deep_copy(list(self._by_model.values())))

    def _entry(self, model: str) -> ModelStatistics:
        statistics = self._by_model.get(model)
        if statistics is None:
            statistics = self._by_model[model] = _empty_statistics(model)
        return statistics


def sum_processes(processes: Iterable[Sequence[ModelStatistics]]) -> list[ModelStatistics]:
    """The statistics of several processes summed by model."""
    together: dict[str, ModelStatistics] = {}
    for model in (model for process in processes for model in process):
        known = together.get(model["name"])
        together[model["name"]] = model if known is None else _add_statistics(known, model)
    return list(together.values())


def of_models(models: Iterable[str], counted: Sequence[ModelStatistics]) -> dict[str, list[ModelStatistics]]:
    """The statistics extension's answer for these models; all zero for a model without requests."""
    by_name = {model["name"]: model for model in counted}
    return {"model_stats": [by_name.get(name) or _empty_statistics(name) for name in models]}


def _empty_statistics(model: str) -> ModelStatistics:
    counts: ModelStatistics = {"last_inference": 0, "inference_count": 0, "execution_count": 0}
    stats = {kind: _empty_duration() for kind in _KINDS}
    return {
        "name": model,
        "version": VERSION,
        **counts,
        "inference_stats": stats,
        "batch_stats": [],
        "memory_usage": [],
    }


def _empty_duration() -> dict[str, int]:
    return {"count": 0, "ns": 0}


def _add(entry: dict[str, int], seconds: float, times: int = 1) -> None:
    entry["count"] += times
    entry["ns"] += int(seconds * 1e9)


def _batch_entry(batches: list[ModelStatistics], size: int) -> ModelStatistics:
    for batch in batches:
        if batch["batch_size"] == size:
            return batch
    kinds = {name: _empty_duration() for name in ("compute_input", "compute_infer", "compute_output")}
    batches.append({"batch_size": size, **kinds})
    batches.sort(key=lambda batch: batch["batch_size"])
    return next(batch for batch in batches if batch["batch_size"] == size)


def _add_statistics(total: ModelStatistics, other: ModelStatistics) -> ModelStatistics:
    """Add `other` to `total` in place; returns `total`."""
    total["inference_count"] += other["inference_count"]
    total["execution_count"] += other["execution_count"]
    total["last_inference"] = max(total["last_inference"], other["last_inference"])
    _add_entries(total["inference_stats"], other["inference_stats"])
    for batch in other["batch_stats"]:
        own = _batch_entry(total["batch_stats"], batch["batch_size"])
        _add_entries(own, {name: entry for name, entry in batch.items() if name != "batch_size"})
    return total


def _add_entries(total: ModelStatistics, other: ModelStatistics) -> None:
    for name, entry in other.items():
        total[name]["count"] += entry["count"]
        total[name]["ns"] += entry["ns"]


def _deep_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _deep_copy(item) for key, item in value.items()}
    return [_deep_copy(item) for item in value] if isinstance(value, list) else value
