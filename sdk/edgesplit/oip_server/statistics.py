"""Counters per model in the format of Triton's statistics extension."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from time import time
from typing import Any

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
_DURATIONS = ("success", "fail", *PARTS, "cache_hit", "cache_miss")
StatisticsEntry = dict[str, Any]
"""A model's entry in the answer to a statistics call."""


def empty_statistics(model: str, version: str) -> StatisticsEntry:
    """The entry of a model without requests."""
    return {
        "name": model, "version": version, "last_inference": 0, "inference_count": 0, "execution_count": 0,
        "inference_stats": {name: {"count": 0, "ns": 0} for name in _DURATIONS}, "batch_stats": [], "memory_usage": [],
    }  # fmt: skip


def add_duration(entry: dict[str, int], seconds: float, times: int = 1) -> None:
    """Add `seconds`, which `times` requests took together."""
    entry["count"] += times
    entry["ns"] += int(seconds * 1e9)


class ModelStatistics:
    """Counters by model and version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str], StatisticsEntry] = {}

    def succeeded(self, model: str, version: str, seconds: float, parts: Mapping[str, float]) -> None:
        """Count one successful request of `seconds`, with the seconds of each of `PARTS` that are known."""
        with self._lock:
            entry = self._entry(model, version)
            entry["inference_count"] += 1
            entry["execution_count"] += 1
            entry["last_inference"] = int(time() * 1e3)
            for name, spent_s in {"success": seconds, **dict.fromkeys(PARTS, 0.0), **parts}.items():
                add_duration(entry["inference_stats"][name], spent_s)

    def failed(self, model: str, version: str, seconds: float) -> None:
        """Count one request that was answered with an error."""
        with self._lock:
            add_duration(self._entry(model, version)["inference_stats"]["fail"], seconds)

    def to_dict(self, model: str, version: str) -> StatisticsEntry:
        """The model's entry in the answer to a statistics call; all zero before its first request."""
        with self._lock:
            entry = self._entries.get((model, version)) or empty_statistics(model, version)
            return {**entry, "inference_stats": {name: {**spent} for name, spent in entry["inference_stats"].items()}}

    def _entry(self, model: str, version: str) -> StatisticsEntry:
        entry = self._entries.get((model, version))
        if entry is None:
            entry = self._entries[model, version] = empty_statistics(model, version)
        return entry
