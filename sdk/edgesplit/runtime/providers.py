"""Accelerators of onnxruntime by short names: which of those wanted can be tried here, and what became of them.

The CPU is always last and always there. An accelerator that is missing, refuses a slice or fails in a run is left out,
and `notes` says so: answers go on, slower.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from edgesplit.errors import UsageError

GONE = "accelerator gone"
log = logging.getLogger(__name__)
CPU = "CPUExecutionProvider"
PROVIDERS: Mapping[str, str] = {
    "tensorrt": "TensorrtExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
    "cpu": CPU,
}
"""onnxruntime's own names."""
_LONGEST = 300


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """These names, in order; UsageError for one that is unknown or said twice."""
    for name in names:
        if name not in PROVIDERS:
            raise UsageError(f"no execution provider {name[:40]!r}; known: {', '.join(PROVIDERS)}")
    if len(set(names)) != len(names):
        raise UsageError(f"an execution provider twice: {', '.join(names)}")
    return tuple(names)


def sift(wanted: Sequence[str], available: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The accelerators among `wanted` to try, in order and up to the CPU, and notes on those that this build of
    onnxruntime lacks."""
    before_cpu = wanted[: wanted.index("cpu")] if "cpu" in wanted else wanted
    there = tuple(name for name in before_cpu if PROVIDERS.get(name) in available)
    missing = tuple(
        f"{name}: not in this build of onnxruntime; the CPU runs instead" for name in before_cpu if name not in there
    )
    # What stands behind an accelerator that is there is a second choice, and its absence no news.
    return there, missing if not there else missing[: before_cpu.index(there[0])]


class Accelerators:
    """Those of one engine."""

    def __init__(self, wanted: Sequence[str], available: Collection[str]) -> None:
        self._use, self._notes = sift(wanted, available)

    @property
    def in_use(self) -> tuple[str, ...]:
        """Short names, first choice first."""
        return self._use

    @property
    def notes(self) -> tuple[str, ...]:
        """For people; empty where everything is as wanted."""
        return self._notes

    def refused(self, slice_name: str, why: Exception) -> None:
        """It does not load a slice, which runs on the CPU then."""
        self._note(f"{'+'.join(self._use)}: refuses slice {slice_name}, the CPU runs it: {_short(why)}")

    def gone(self, slice_name: str, why: Exception) -> None:
        """It failed in a run where the CPU did not: it is out of it."""
        self._note(f"{'+'.join(self._use)}: {GONE}, the CPU runs instead (slice {slice_name}: {_short(why)})")
        self._use = ()

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        if len(self._notes) < 8:
            self._notes = (*self._notes, text)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__
