"""Slices on onnxruntime.

`exact` runs the graph as it was cut: on one machine, with one thread count, a chain of slices gives the whole model's
bits. `fast` lets onnxruntime fuse further (25-30 % faster, 3e-7 off). Models are loaded by path, so that the weights
beside the graph are mapped, not copied; decrypted ones are read in place from memory. Threads never spin between
operators: many sessions share one machine here.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import onnxruntime

from edgesplit.errors import InferenceFailed, ModelRefused
from edgesplit.release import Slice
from edgesplit.runtime import Tensor, Tensors
from edgesplit.runtime.onnx_weights import shareable, weights_outside
from edgesplit.sealed import SliceInMemory, SliceSource

GRAPH = "graph.onnx"
WEIGHTS = "weights.bin"
Optimise = Literal["exact", "fast"]


class OnnxRuntime:
    """Loads slices of format `onnx` for the CPU."""

    name = "onnxruntime"

    def __init__(self, threads: int = 1, optimise: Optimise = "exact") -> None:
        self.threads = threads
        self.optimise: Optimise = optimise

    def load(self, slice_: Slice, folder: SliceSource) -> OnnxProgram:
        """The slice whose files lie in `folder`, ready to run; ModelRefused if onnxruntime cannot take it."""
        if slice_.format != "onnx":
            raise ModelRefused(f"slice {slice_.name} has format {slice_.format!r}, which is not onnxruntime's")
        options, kept = self.options(), None
        try:
            if isinstance(folder, SliceInMemory):
                graph = folder.read(GRAPH)
                kept = self._weights(graph, folder, options)
                session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
            else:
                session = onnxruntime.InferenceSession(str(folder / GRAPH), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise ModelRefused(f"slice {slice_.name}: onnxruntime cannot load it: {error}") from error
        return OnnxProgram(slice_, session, kept)

    def _weights(self, graph: bytes, memory: SliceInMemory, options: onnxruntime.SessionOptions) -> Any:
        """Give a session the weights that lie beside the graph in memory; what must live as long as the session.

        Shared where that is possible: nothing is copied but what the engine packs anew. Optimisers want to read
        weights while the graph is built, and some types have no twin in numpy: those get a copy.
        """
        mapped = memory.mapped(WEIGHTS)
        if mapped is None:
            return None
        outside = weights_outside(graph)
        if self.optimise == "exact" and all(shareable(one) for one in outside):
            values = [onnxruntime.OrtValue.ortvalue_from_numpy(one.array(mapped)) for one in outside]
            for one, value in zip(outside, values, strict=True):
                options.add_initializer(one.name, value)
            return values
        options.add_external_initializers_from_files_in_memory([WEIGHTS], [mapped], [len(mapped)])
        return None

    def options(self) -> onnxruntime.SessionOptions:
        """How every slice's session is opened; calibration opens its own the same way."""
        levels = onnxruntime.GraphOptimizationLevel
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if self.optimise == "fast" else levels.ORT_DISABLE_ALL
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        return options


class OnnxProgram:
    """One slice in a session of its own; may run in several threads at once."""

    def __init__(self, slice_: Slice, session: onnxruntime.InferenceSession, kept: object = None) -> None:
        self.slice = slice_
        self._session = session
        self._kept = kept  # weights that the session reads in place: without them it would read freed memory
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
            values = self._session.run(self._outputs, feeds)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise InferenceFailed(f"slice {self.slice.name}: {error}") from error
        return {name: np.asarray(value) for name, value in zip(self._outputs, values, strict=True)}
