"""Accelerators (onnxruntime's execution providers) by short names: the available ones of those requested, and their
failures.

The CPU is always last and always available. An accelerator that is missing, refuses a slice or fails in a run is
skipped, and `notes` reports it: inference continues on the CPU, slower.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from edgesplit.errors import UsageError

ACCELERATOR_GONE = "accelerator gone"
log = logging.getLogger(__name__)
CPU = "CPUExecutionProvider"
PROVIDERS: Mapping[str, str] = {
    "tensorrt": "TensorrtExecutionProvider", "cuda": "CUDAExecutionProvider", "openvino": "OpenVINOExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider", "cpu": CPU,
}  # fmt: skip
"""onnxruntime's provider names by short name."""
_MAX_ERROR_CHARS = 300


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the short names unchanged; UsageError for an unknown or repeated one."""
    for name in names:
        if name not in PROVIDERS:
            raise UsageError(f"no execution provider {name[:40]!r}; known: {', '.join(PROVIDERS)}")
    if len(set(names)) != len(names):
        raise UsageError(f"an execution provider twice: {', '.join(names)}")
    return tuple(names)


def select_available(wanted: Sequence[str], available: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the accelerators of `wanted` that are available, in order and up to the CPU, and notes on those that this
    build of onnxruntime lacks."""
    before_cpu = wanted[: wanted.index("cpu")] if "cpu" in wanted else wanted
    available_names = tuple(name for name in before_cpu if PROVIDERS.get(name) in available)
    missing = tuple(
        f"{name}: not in this build of onnxruntime; the CPU runs instead"
        for name in before_cpu
        if name not in available_names
    )
    # Accelerators listed after an available one are only alternatives to it: their absence is not reported.
    return available_names, missing if not available_names else missing[: before_cpu.index(available_names[0])]


class Accelerators:
    """The accelerators of one engine."""

    def __init__(self, wanted: Sequence[str], available: Collection[str]) -> None:
        self.in_use, self.notes = select_available(wanted, available)
        """Short names in order of preference; and messages for operators, empty where everything is as requested."""

    def on_refused(self, slice_name: str, error: Exception) -> None:
        """Record that the accelerator refused a slice, which then runs on the CPU."""
        self._add_note(f"{'+'.join(self.in_use)}: refuses slice {slice_name}, the CPU runs it: {_short(error)}")

    def on_failed(self, slice_name: str, error: Exception) -> None:
        """Record that the accelerator failed in a run that the CPU could do. It is not used any more."""
        what = f"{ACCELERATOR_GONE}, the CPU runs instead"
        self._add_note(f"{'+'.join(self.in_use)}: {what} (slice {slice_name}: {_short(error)})")
        self.in_use = ()

    def _add_note(self, text: str) -> None:
        log.warning("%s", text)
        if len(self.notes) < 8:
            self.notes = (*self.notes, text)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_ERROR_CHARS] or type(error).__name__
