"""What each model was asked so far, in the words of Triton's statistics extension; of one process, or summed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from edgesplit.observability.phases import DECODE, ENCODE, QUEUE, RUN
from edgesplit.observability.registry import MOST_NOTED, NOTED
from edgesplit_offload.models.repository import VERSION

Told = dict[str, Any]
_PHASES = {"queue": QUEUE, "compute_input": DECODE, "compute_infer": RUN, "compute_output": ENCODE}
_KINDS = ("success", "fail", *_PHASES, "cache_hit", "cache_miss")


class _Answered(NamedTuple):
    """One request that was."""

    model: str
    seconds: Mapping[str, float]
    took_s: float
    together: int
    leads: bool
    at: float


class Counts:
    """Of this process, since it began. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, Told] = {}
        self._noted: deque[_Answered] = deque()

    def answered(self, model: str, seconds: Mapping[str, float], took_s: float, together: int, leads: bool) -> None:
        """One request was. `seconds` by phase; `leads`: its run was not counted yet by another that shared it."""
        self._noted.append(_Answered(model, seconds, took_s, together, leads, time.time()))
        if len(self._noted) >= MOST_NOTED:
            with self._lock:
                self._add_up()

    def add_up_if_due(self) -> None:
        """There is time for it now: an answer is on its way."""
        if len(self._noted) >= NOTED:
            with self._lock:
                self._add_up()

    def _add_up(self) -> None:
        """Everything noted so far, those alike together. Holds the lock."""
        alike: dict[tuple[str, int], list[_Answered]] = {}
        while self._noted:
            one = self._noted.popleft()
            alike.setdefault((one.model, one.together if one.leads else 0), []).append(one)
        for (model, together), many in alike.items():
            told = self._told(model)
            told["inference_count"] += len(many)
            told["last_inference"] = max(told["last_inference"], int(many[-1].at * 1e3))
            took = {name: sum(one.seconds.get(phase, 0.0) for one in many) for name, phase in _PHASES.items()}
            for name, seconds in {"success": sum(one.took_s for one in many), **took}.items():
                _add(told["inference_stats"][name], seconds, len(many))
            if together:
                told["execution_count"] += len(many)
                batch = _of_size(told["batch_stats"], together)
                for name in ("compute_input", "compute_infer", "compute_output"):
                    _add(batch[name], took[name], len(many))

    def failed(self, model: str, took_s: float) -> None:
        """One was not answered."""
        with self._lock:
            _add(self._told(model)["inference_stats"]["fail"], took_s)

    def told(self) -> list[Told]:
        """Every model's, sharing nothing with what is counted on."""
        with self._lock:
            self._add_up()
            return cast("list[Told]", _copied(list(self._of.values())))

    def _told(self, model: str) -> Told:
        told = self._of.get(model)
        if told is None:
            told = self._of[model] = _none(model)
        return told


def summed(processes: Iterable[Sequence[Told]]) -> list[Told]:
    """What several processes counted, together, by model."""
    together: dict[str, Told] = {}
    for one in (one for process in processes for one in process):
        there = together.get(one["name"])
        together[one["name"]] = one if there is None else _sum(there, one)
    return list(together.values())


def of_models(models: Iterable[str], counted: Sequence[Told]) -> dict[str, list[Told]]:
    """The statistics extension's answer on these models; what was not asked yet has counts of zero."""
    by_name = {one["name"]: one for one in counted}
    return {"model_stats": [by_name.get(name) or _none(name) for name in models]}


def _none(model: str) -> Told:
    counts: Told = {"last_inference": 0, "inference_count": 0, "execution_count": 0}
    stats = {kind: _nothing() for kind in _KINDS}
    return {
        "name": model,
        "version": VERSION,
        **counts,
        "inference_stats": stats,
        "batch_stats": [],
        "memory_usage": [],
    }


def _nothing() -> dict[str, int]:
    return {"count": 0, "ns": 0}


def _add(entry: dict[str, int], seconds: float, times: int = 1) -> None:
    entry["count"] += times
    entry["ns"] += int(seconds * 1e9)


def _of_size(batches: list[Told], size: int) -> Told:
    for one in batches:
        if one["batch_size"] == size:
            return one
    kinds = {name: _nothing() for name in ("compute_input", "compute_infer", "compute_output")}
    batches.append({"batch_size": size, **kinds})
    batches.sort(key=lambda one: one["batch_size"])
    return next(one for one in batches if one["batch_size"] == size)


def _sum(one: Told, other: Told) -> Told:
    """Both, in the place of the first."""
    one["inference_count"] += other["inference_count"]
    one["execution_count"] += other["execution_count"]
    one["last_inference"] = max(one["last_inference"], other["last_inference"])
    _sum_entries(one["inference_stats"], other["inference_stats"])
    for batch in other["batch_stats"]:
        mine = _of_size(one["batch_stats"], batch["batch_size"])
        _sum_entries(mine, {name: entry for name, entry in batch.items() if name != "batch_size"})
    return one


def _sum_entries(one: Told, other: Told) -> None:
    for name, entry in other.items():
        one[name]["count"] += entry["count"]
        one[name]["ns"] += entry["ns"]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value
