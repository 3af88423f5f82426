"""Slices on onnxruntime.

`exact` runs the graph as it was cut: on one machine, with one thread count, a chain of slices gives the whole model's
bits. `fast` lets onnxruntime fuse further (25-30 % faster, 3e-7 off). Models are loaded by path, so that the weights
beside the graph are mapped, not copied; decrypted ones are read in place from memory. Threads spin between operators
only where that was measured to pay: many sessions share one machine here. Where an accelerator refuses a slice or fails
in a run, the CPU runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import InferenceFailed, ModelRefused
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Tensor, Tensors
from edgesplit.runtime.onnx_external_data import shareable, weights_outside
from edgesplit.runtime.onnx_merge import CannotMerge, merged
from edgesplit.runtime.options import Optimise
from edgesplit.runtime.providers import CPU, PROVIDERS, Accelerators

GRAPH = "graph.onnx"
WEIGHTS = "weights.bin"
PLACEHOLDER = Path(__file__).parent / "in_memory"
"""An empty weights.bin: onnxruntime wants to see such a file, also where it was given every weight that is in it."""


Opened = tuple[onnxruntime.InferenceSession, object]
"""A session, and what must live as long as it does."""


@dataclass(frozen=True)
class Twin:
    """A slice on the CPU, for one that is on an accelerator."""

    open: Callable[[], Opened]
    gone: Callable[[Exception], None]
    """Told what the accelerator failed with, once the twin has answered."""


class OnnxRuntime:
    """Loads slices of format `onnx`, for accelerators that are there, else for the CPU."""

    name = "onnxruntime"

    def __init__(
        self,
        threads: int = 1,
        optimise: Optimise = "exact",
        *,
        spinning: bool = False,
        providers: Sequence[str] = (),
        available: Collection[str] | None = None,
    ) -> None:
        """`providers`: accelerators by their short names (`onnx_providers`), in the order in which they are tried."""
        self.threads = threads
        self.optimise: Optimise = optimise
        self.spinning = spinning
        there = onnxruntime.get_available_providers() if available is None else available
        self._accelerators = Accelerators(providers, there)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which accelerator is not used, and why."""
        return self._accelerators.notes

    def load(self, slice_: Slice, folder: SliceSource) -> OnnxProgram:
        """The slice whose files lie in `folder`, ready to run; ModelRefused if onnxruntime cannot take it."""
        if slice_.format != "onnx":
            raise ModelRefused(f"slice {slice_.name} has format {slice_.format!r}, which is not onnxruntime's")
        if self._accelerators.in_use:
            try:
                opened = self._open(slice_, folder, self._accelerators.in_use)
                return OnnxProgram(slice_, opened, self._twin(slice_, folder))
            except ModelRefused as refusal:
                self._accelerators.refused(slice_.name, refusal)
        return OnnxProgram(slice_, self._open(slice_, folder, ()))

    def load_merged(self, parts: Sequence[tuple[Slice, SliceSource]], outputs: Collection[str]) -> OnnxProgram:
        """Neighbouring slices as one session that gives `outputs`; CannotMerge, ModelRefused. For the CPU.

        Folders must be called as their slices are, and lie side by side.
        """
        given = {spec.name: spec for one, _ in parts for spec in one.outputs}
        takes = {spec.name: spec for one, _ in parts for spec in one.inputs if spec.name not in given}
        name = "+".join(one.name for one, _ in parts)
        whole = Slice(name, "onnx", (), tuple(takes.values()), tuple(given[one] for one in outputs))
        graph = merged({one.name: _read(source, GRAPH) for one, source in parts}, outputs)
        options = self.options()
        folders = {source.parent for _, source in parts if isinstance(source, Path)}
        memories = [(one.name, source.mapped(WEIGHTS)) for one, source in parts if isinstance(source, SliceInMemory)]
        if len(folders) + bool(memories) != 1 or any(
            isinstance(source, Path) and source.name != one.name for one, source in parts
        ):
            raise CannotMerge("their files do not lie side by side")
        for folder in folders:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        held = {f"{slice_}/{WEIGHTS}": weights for slice_, weights in memories if weights is not None}
        if held:
            sizes = [len(one) for one in held.values()]
            options.add_external_initializers_from_files_in_memory(list(held), list(held.values()), sizes)
        try:
            return OnnxProgram(whole, (self._session(graph, options, [CPU]), held))
        except Exception as error:
            raise CannotMerge(f"onnxruntime cannot load {name}: {error}") from error

    def _twin(self, slice_: Slice, folder: SliceSource) -> Twin:
        return Twin(
            open=lambda: self._open(slice_, folder, ()), gone=lambda why: self._accelerators.gone(slice_.name, why)
        )

    def _open(self, slice_: Slice, folder: SliceSource, accelerators: Sequence[str]) -> Opened:
        providers = [PROVIDERS[name] for name in accelerators] + [CPU]
        try:
            if isinstance(folder, SliceInMemory):
                return self._open_in_memory(folder, providers)
            return self._session(str(folder / GRAPH), self.options(), providers), None
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise ModelRefused(f"slice {slice_.name}: onnxruntime cannot load it: {error}") from error

    def _open_in_memory(self, memory: SliceInMemory, providers: list[str]) -> Opened:
        """A session, and the weights that it reads in place, which must live as long as it does.

        Where weights cannot be read in place it gets a copy: optimisers want to read them while the graph is built,
        and some types have no twin in numpy.
        """
        graph, weights = memory.read(GRAPH), memory.mapped(WEIGHTS)
        if weights is None:
            return self._session(graph, self.options(), providers), None
        outside = weights_outside(graph)
        options = self.options()
        if self.optimise == "exact" and all(shareable(one) for one in outside):
            values = [onnxruntime.OrtValue.ortvalue_from_numpy(one.array(weights)) for one in outside]
            for one, value in zip(outside, values, strict=True):
                options.add_initializer(one.name, value)
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(PLACEHOLDER))
            return self._session(graph, options, providers), values
        options.add_external_initializers_from_files_in_memory([WEIGHTS], [weights], [len(weights)])
        return self._session(graph, options, providers), None

    @staticmethod
    def _session(
        model: str | bytes, options: onnxruntime.SessionOptions, providers: list[str]
    ) -> onnxruntime.InferenceSession:
        session = onnxruntime.InferenceSession(model, options, providers=providers)
        if session.get_providers()[0] != providers[0]:  # onnxruntime itself falls back, and says so on a terminal only
            raise RuntimeError(f"{providers[0]} cannot be used")
        session.disable_fallback()
        return session

    def options(self) -> onnxruntime.SessionOptions:
        """How every slice's session is opened; calibration opens its own the same way."""
        levels = onnxruntime.GraphOptimizationLevel
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if self.optimise == "fast" else levels.ORT_DISABLE_ALL
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(self.spinning)))
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        return options


def _read(source: SliceSource, file: str) -> bytes:
    return source.read(file) if isinstance(source, SliceInMemory) else (source / file).read_bytes()


class OnnxProgram:
    """One slice in a session of its own; may run in several threads at once."""

    def __init__(self, slice_: Slice, opened: Opened, twin: Twin | None = None) -> None:
        """`twin`, where this one is on an accelerator."""
        self.slice = slice_
        session, _ = self._opened = opened  # with weights that it reads in place, which must not be freed before
        self._twin = twin
        self._inputs = tuple(one.name for one in session.get_inputs())
        self._outputs = tuple(one.name for one in session.get_outputs())
        if set(self._inputs) != {one.name for one in slice_.inputs} or not {
            one.name for one in slice_.outputs
        }.issubset(self._outputs):
            raise ModelRefused(f"slice {slice_.name}: its file takes or gives other tensors than its manifest says")

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """All outputs by name; InferenceFailed where an input is missing or onnxruntime fails."""
        missing = [name for name in self._inputs if name not in tensors]
        if missing:
            raise InferenceFailed(f"slice {self.slice.name} lacks its inputs {missing}")
        feeds = {name: np.asarray(tensors[name]) for name in self._inputs}
        try:
            values: Sequence[Any] = self._opened[0].run(self._outputs, feeds)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            values = self._again(feeds, error)
        return {name: np.asarray(value) for name, value in zip(self._outputs, values, strict=True)}

    def _again(self, feeds: dict[str, Tensor], error: Exception) -> Sequence[Any]:
        """On the CPU, if it was an accelerator that failed and the CPU does not fail too."""
        if self._twin is None:
            raise InferenceFailed(f"slice {self.slice.name}: {error}") from error
        try:
            opened = self._twin.open()
            values: Sequence[Any] = opened[0].run(self._outputs, feeds)
        except Exception as twins:
            raise InferenceFailed(f"slice {self.slice.name}: {error}; on the CPU: {twins}") from twins
        self._twin.gone(error)
        self._opened, self._twin = opened, None
        return values
