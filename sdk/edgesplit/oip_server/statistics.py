"""Counters per model in the format of Triton's statistics extension."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import time
from typing import Any

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass
class _Counts:
    succeeded: int = 0
    success_s: float = 0.0
    failed: int = 0
    fail_s: float = 0.0
    part_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    last_ms: int = 0


class ModelStatistics:
    """Counters by model and version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], _Counts] = {}

    def succeeded(self, model: str, version: str, seconds: float, parts: Mapping[str, float]) -> None:
        """Count one successful request of `seconds`, with the seconds of each of `PARTS` that are known."""
        with self._lock:
            counts = self._counts.setdefault((model, version), _Counts())
            counts.succeeded += 1
            counts.success_s += seconds
            counts.last_ms = int(time() * 1000)
            for part, spent_s in parts.items():
                counts.part_s[part] += spent_s

    def failed(self, model: str, version: str, seconds: float) -> None:
        """Count one request that was answered with an error."""
        with self._lock:
            counts = self._counts.setdefault((model, version), _Counts())
            counts.failed += 1
            counts.fail_s += seconds

    def to_dict(self, model: str, version: str) -> dict[str, Any]:
        """The model's entry in the answer to a statistics call; all zero before its first request."""
        with self._lock:
            counts = self._counts.get((model, version), _Counts())
            count = counts.succeeded
            parts = {part: _duration(count, spent_s) for part, spent_s in counts.part_s.items()}
            ends = {"success": _duration(count, counts.success_s), "fail": _duration(counts.failed, counts.fail_s)}
            return {
                "name": model,
                "version": version,
                "last_inference": counts.last_ms,
                "inference_count": count,
                "execution_count": count,
                "inference_stats": {**ends, **parts, "cache_hit": _duration(0, 0), "cache_miss": _duration(0, 0)},
                "batch_stats": [],
                "memory_usage": [],
            }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * 1e9)}
