"""Emulated runtime: runs the real slice on another engine, then waits until the time predicted by a device profile has
passed.

Outputs are the inner engine's, bit for bit; only time is emulated. Where this host is slower than the profile, the run
is marked as an overrun (`EmulatedProgram.last_was_late`, per thread). A device's memory and power are not emulated.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from time import perf_counter, sleep

from edgesplit.crypto.slice_encryption import SliceSource
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Program, Runtime, Tensor, Tensors

TOLERANCE_S = 0.0005
"""Overruns smaller than this are attributed to the host's timer."""


class EmulatedRuntime:
    """Wraps `inner`; `slice_s` are a plan's seconds by slice. All runtimes of one device share the lock `processor`."""

    def __init__(self, inner: Runtime, slice_s: Mapping[str, float], processor: threading.Lock | None = None) -> None:
        self.name = f"emulated+{inner.name}"
        self._inner = inner
        self._slice_s = slice_s
        self._processor = processor or threading.Lock()

    def load(self, slice_: Slice, folder: SliceSource) -> EmulatedProgram:
        """Load the slice on the inner engine, with its predicted time; a slice without a prediction takes its actual
        time."""
        return self.wrap(slice_.name, self._inner.load(slice_, folder))

    def wrap(self, name: str, program: Program) -> EmulatedProgram:
        """Emulate the time of slice `name` for a program that was loaded elsewhere (the input slice has no engine)."""
        return EmulatedProgram(program, self._slice_s.get(name, 0.0), self._processor)


class EmulatedProgram:
    """A slice that takes as long as it would on the emulated device."""

    def __init__(self, inner: Program, seconds: float, processor: threading.Lock) -> None:
        self._inner = inner
        self._seconds = seconds
        self._processor = processor
        self._last_run = threading.local()

    @property
    def last_was_late(self) -> bool:
        """True if this thread's latest run took longer than the emulated device would have needed."""
        return bool(getattr(self._last_run, "late", False))

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """The inner program's outputs, returned once the predicted time has passed. One run at a time: a device has one
        processor."""
        with self._processor:
            start = perf_counter()
            outputs = self._inner.run(tensors)
            self._last_run.late = sleep_until_elapsed(start, self._seconds)
        return outputs


def sleep_until_elapsed(start: float, seconds: float) -> bool:
    """Sleep until `seconds` after `start` (of perf_counter); True if that time had passed already."""
    remaining = start + seconds - perf_counter()
    if remaining > 0:
        sleep(remaining)
    return seconds > 0 and remaining < -TOLERANCE_S
