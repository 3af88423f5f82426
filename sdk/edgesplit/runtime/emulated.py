"""The emulated runtime: runs the real slice on another engine, then waits until a profile's predicted time is over.

Answers are the inner engine's, to the bit; only time is emulated. Where this host is slower than the profile the run is
marked late (`Program.last_was_late`, per thread). Nothing here pretends to a device's memory or power.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from time import perf_counter, sleep

from edgesplit.crypto.slice_encryption import SliceSource
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Program, Runtime, Tensor, Tensors

TOLERANCE_S = 0.0005
"""A run that overshoots by less than this is the host's timer, not a host that is too slow."""


class EmulatedRuntime:
    """Wraps `inner`; `slice_s` are a plan's seconds by slice. All runtimes of one device share one `processor`."""

    def __init__(self, inner: Runtime, slice_s: Mapping[str, float], processor: threading.Lock | None = None) -> None:
        self.name = f"emulated+{inner.name}"
        self._inner = inner
        self._slice_s = slice_s
        self._processor = processor or threading.Lock()

    def load(self, slice_: Slice, folder: SliceSource) -> EmulatedProgram:
        """The slice on the inner engine, with its predicted time; one the plan does not price takes what it takes."""
        return self.wrap(slice_.name, self._inner.load(slice_, folder))

    def wrap(self, name: str, program: Program) -> EmulatedProgram:
        """A program loaded elsewhere (the input slice has no engine), timed as that slice."""
        return EmulatedProgram(program, self._slice_s.get(name, 0.0), self._processor)


class EmulatedProgram:
    """A slice that takes as long as the device would."""

    def __init__(self, inner: Program, seconds: float, processor: threading.Lock) -> None:
        self._inner = inner
        self._seconds = seconds
        self._processor = processor
        self._last = threading.local()

    @property
    def last_was_late(self) -> bool:
        """Whether this thread's latest run took the host longer than the device would have needed."""
        return bool(getattr(self._last, "late", False))

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """The inner program's outputs, once the predicted time is over. One at a time: a device has one processor."""
        with self._processor:
            start = perf_counter()
            outputs = self._inner.run(tensors)
            self._last.late = wait_out(start, self._seconds)
        return outputs


def wait_out(start: float, seconds: float) -> bool:
    """Wait until `seconds` after `start` (of perf_counter); True if that moment had passed already."""
    left = start + seconds - perf_counter()
    if left > 0:
        sleep(left)
    return seconds > 0 and left < -TOLERANCE_S
