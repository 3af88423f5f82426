"""Runtimes behind one interface: `load` a slice, then `run` it on named tensors. Each engine has one module.

`onnx.py` runs slices on onnxruntime, `tflite.py` on LiteRT; `emulated.py` wraps any runtime and waits until the time
predicted by a device profile has passed. `run_slices` executes the slices of a row over one set of tensors. May import
the SDK's root modules, `edgesplit.crypto` and `edgesplit.release`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from edgesplit.crypto.slice_encryption import SliceSource
from edgesplit.errors import InferenceFailed, ModelRefused
from edgesplit.lazy_import import Tensor as Tensor
from edgesplit.release.manifest import Slice

Tensors = Mapping[str, Tensor]


class Program(Protocol):
    """A loaded slice, which can run from any thread."""

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """Compute all outputs of the slice by name; InferenceFailed where the runtime fails."""
        ...


class Runtime(Protocol):
    """An engine that loads slices."""

    name: str

    def load(self, slice_: Slice, folder: SliceSource) -> Program:
        """Load a slice, whose files are in `folder`. ModelRefused where this engine does not support it."""
        ...


@dataclass(slots=True)
class Timing:
    """Run times of a sequence of slices."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by slice name."""
    overruns: int = 0
    """Number of emulated runs for which this host was slower than the emulated device."""

    @property
    def total_s(self) -> float:
        """Seconds of all slices."""
        return sum(self.seconds.values())


def check_signature(slice_: Slice, inputs: Collection[str], outputs: Collection[str]) -> None:
    """ModelRefused unless the engine's inputs and outputs of the slice's file are those of its manifest entry."""
    if set(inputs) != {spec.name for spec in slice_.inputs} or not {spec.name for spec in slice_.outputs} <= set(
        outputs
    ):
        raise ModelRefused(f"slice {slice_.name}: its file takes or gives other tensors than its manifest says")


def require_inputs(slice_: Slice, inputs: Iterable[str], tensors: Tensors) -> None:
    """InferenceFailed where an input is missing."""
    if missing := [name for name in inputs if name not in tensors]:
        raise InferenceFailed(f"slice {slice_.name} lacks its inputs {missing}")


def run_slices(
    programs: Mapping[str, Program], order: Iterable[str], tensors: Tensors, timing: Timing | None = None
) -> dict[str, Tensor]:
    """Run the named slices in order. Returns all tensors: `tensors` and the outputs of every slice."""
    values = dict(tensors)
    for name in order:
        start = perf_counter()
        values.update(programs[name].run(values))
        if timing is not None:
            timing.seconds[name] = perf_counter() - start
            timing.overruns += int(getattr(programs[name], "last_was_late", False))
    return values
