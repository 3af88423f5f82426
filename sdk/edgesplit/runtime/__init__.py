"""Runtimes behind one interface: `load` a slice's folder, `run` it on named tensors. One engine, one file.

`onnx.py` runs slices on onnxruntime; `emulated.py` wraps any runtime and waits until a device profile's predicted
time has passed. Execution of a row (several slices over one set of live tensors) is `execute`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from edgesplit.crypto.slice_encryption import SliceSource
from edgesplit.release.manifest import Slice

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Tensor = npt.NDArray[np.generic]
else:
    Tensor = Any
Tensors = Mapping[str, Tensor]


class Program(Protocol):
    """A slice that is loaded and can run, from any thread."""

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """All outputs of the slice by name; InferenceFailed if the runtime cannot."""
        ...


class Runtime(Protocol):
    """An engine that runs slices."""

    name: str

    def load(self, slice_: Slice, folder: SliceSource) -> Program:
        """The slice, ready to run; `folder` holds its files. ModelRefused if this engine cannot take it."""
        ...


@dataclass(slots=True)
class Timing:
    """What a run of slices took."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By slice."""
    late: int = 0
    """Emulated slices for which this host was slower than the profile."""

    @property
    def total_s(self) -> float:
        """Seconds of all slices."""
        return sum(self.seconds.values())


def execute(
    programs: Mapping[str, Program], order: Iterable[str], tensors: Tensors, timing: Timing | None = None
) -> dict[str, Tensor]:
    """Run the named slices in order over one set of live tensors; returns that set, inputs included."""
    live = dict(tensors)
    for name in order:
        start = perf_counter()
        live.update(programs[name].run(live))
        if timing is not None:
            timing.seconds[name] = perf_counter() - start
            timing.late += int(getattr(programs[name], "last_was_late", False))
    return live
