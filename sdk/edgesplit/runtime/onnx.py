"""Runs slices on onnxruntime.

`exact` runs the graph as it was cut: on one machine, with one thread count, a chain of slices gives the whole model's
bits. `fast` lets onnxruntime fuse further (25-30 % faster, 3e-7 off). Models are loaded by path, so that the weights
beside the graph are memory-mapped, not copied; decrypted ones are read in place from memory. Threads spin between
operators only where that was measured to be faster, because many sessions share one machine here. Where an accelerator
refuses a slice or fails in a run, the CPU runs it.
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
from edgesplit.runtime import Tensor, Tensors, check_signature, require_inputs
from edgesplit.runtime.onnx_external_data import external_weights, is_shareable, weight_array
from edgesplit.runtime.onnx_merge import CannotMerge, merge_graphs
from edgesplit.runtime.options import Optimise
from edgesplit.runtime.providers import CPU, PROVIDERS, Accelerators

GRAPH = "graph.onnx"
WEIGHTS = "weights.bin"
PLACEHOLDER = Path(__file__).parent / "in_memory"
"""Folder with an empty weights.bin: onnxruntime requires the file to exist, even if every weight in it was supplied
from memory."""


OpenSession = tuple[onnxruntime.InferenceSession, object]
"""A session, and the object that must stay alive as long as the session does."""


@dataclass(frozen=True)
class CpuFallback:
    """CPU fallback for a slice on an accelerator."""

    open: Callable[[], OpenSession]
    """Opens the slice's session on the CPU."""
    on_accelerator_failed: Callable[[Exception], None]
    """Called with the accelerator's error once the CPU has computed the answer."""


class OnnxRuntime:
    """Loads slices of format `onnx`, on available accelerators, otherwise on the CPU."""

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
        """`providers`: short names of accelerators (`edgesplit.runtime.providers`), in order of preference."""
        self.threads = threads
        self.optimise: Optimise = optimise
        self.spinning = spinning
        available_providers = onnxruntime.get_available_providers() if available is None else available
        self._accelerators = Accelerators(providers, available_providers)

    @property
    def notes(self) -> tuple[str, ...]:
        """Accelerators that are not used, and why."""
        return self._accelerators.notes

    def load(self, slice_: Slice, folder: SliceSource) -> OnnxProgram:
        """Load the slice whose files are in `folder`; ModelRefused where onnxruntime does not support it."""
        if slice_.format != "onnx":
            raise ModelRefused(f"slice {slice_.name} has format {slice_.format!r}, which is not onnxruntime's")
        # The accelerators first; the CPU if there are none, or if they refuse this slice.
        if self._accelerators.in_use:
            try:
                opened = self._open(slice_, folder, self._accelerators.in_use)
                return OnnxProgram(slice_, opened, self._cpu_fallback(slice_, folder))
            except ModelRefused as refusal:
                self._accelerators.on_refused(slice_.name, refusal)
        return OnnxProgram(slice_, self._open(slice_, folder, ()))

    def load_merged(self, parts: Sequence[tuple[Slice, SliceSource]], outputs: Collection[str]) -> OnnxProgram:
        """Load neighbouring slices as one session with these outputs, on the CPU; CannotMerge or ModelRefused where
        that fails.

        Each folder must have its slice's name, and all must be in one parent folder.
        """
        produced = {spec.name: spec for slice_, _ in parts for spec in slice_.outputs}
        inputs = {spec.name: spec for slice_, _ in parts for spec in slice_.inputs if spec.name not in produced}
        name = "+".join(slice_.name for slice_, _ in parts)
        whole = Slice(name, "onnx", (), tuple(inputs.values()), tuple(produced[output] for output in outputs))
        graph = merge_graphs({slice_.name: _read(source, GRAPH) for slice_, source in parts}, outputs)
        options = self.session_options()
        folders = {source.parent for _, source in parts if isinstance(source, Path)}
        memories = [
            (slice_.name, source.map_file(WEIGHTS)) for slice_, source in parts if isinstance(source, SliceInMemory)
        ]
        if len(folders) + bool(memories) != 1 or any(
            isinstance(source, Path) and source.name != slice_.name for slice_, source in parts
        ):
            raise CannotMerge("their files do not lie side by side")
        for folder in folders:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        weights_by_path = {f"{owner}/{WEIGHTS}": weights for owner, weights in memories if weights is not None}
        if weights_by_path:
            paths, weights = list(weights_by_path), list(weights_by_path.values())
            options.add_external_initializers_from_files_in_memory(paths, weights, [*map(len, weights)])
        try:
            return OnnxProgram(whole, (self._make_session(graph, options, [CPU]), weights_by_path))
        except Exception as error:
            raise CannotMerge(f"onnxruntime cannot load {name}: {error}") from error

    def _cpu_fallback(self, slice_: Slice, folder: SliceSource) -> CpuFallback:
        return CpuFallback(
            open=lambda: self._open(slice_, folder, ()),
            on_accelerator_failed=lambda why: self._accelerators.on_failed(slice_.name, why),
        )

    def _open(self, slice_: Slice, folder: SliceSource, accelerators: Sequence[str]) -> OpenSession:
        providers = [PROVIDERS[name] for name in accelerators] + [CPU]
        try:
            if isinstance(folder, SliceInMemory):
                return self._open_in_memory(folder, providers)
            return self._make_session(str(folder / GRAPH), self.session_options(), providers), None
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise ModelRefused(f"slice {slice_.name}: onnxruntime cannot load it: {error}") from error

    def _open_in_memory(self, memory: SliceInMemory, providers: list[str]) -> OpenSession:
        """Open a session on decrypted files. Returns it with the weights that it reads in place, which must stay alive
        as long as it does.

        Where weights cannot be read in place, the session gets a copy: optimisers read them while the graph is built,
        and numpy lacks some types.
        """
        graph, weights = memory.read(GRAPH), memory.map_file(WEIGHTS)
        if weights is None:
            return self._make_session(graph, self.session_options(), providers), None
        external = external_weights(graph)
        options = self.session_options()
        if self.optimise == "exact" and all(is_shareable(weight) for weight in external):
            values = [onnxruntime.OrtValue.ortvalue_from_numpy(weight_array(weight, weights)) for weight in external]
            for weight, value in zip(external, values, strict=True):
                options.add_initializer(weight.name, value)
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(PLACEHOLDER))
            return self._make_session(graph, options, providers), values
        options.add_external_initializers_from_files_in_memory([WEIGHTS], [weights], [len(weights)])
        return self._make_session(graph, options, providers), None

    @staticmethod
    def _make_session(
        model: str | bytes, options: onnxruntime.SessionOptions, providers: list[str]
    ) -> onnxruntime.InferenceSession:
        session = onnxruntime.InferenceSession(model, options, providers=providers)
        if session.get_providers()[0] != providers[0]:  # onnxruntime falls back to the CPU by itself
            raise RuntimeError(f"{providers[0]} cannot be used")
        session.disable_fallback()
        return session

    def session_options(self) -> onnxruntime.SessionOptions:
        """Session options of every slice; calibration uses the same ones."""
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
    """One slice in its own session; `run` may be called from several threads at once."""

    def __init__(self, slice_: Slice, opened: OpenSession, fallback: CpuFallback | None = None) -> None:
        """`fallback`: CPU fallback, if this session is on an accelerator."""
        self.slice = slice_
        session, _ = self._opened = opened  # with weights that it reads in place, which must not be freed before
        self._fallback = fallback
        self._inputs = tuple(tensor.name for tensor in session.get_inputs())
        self._outputs = tuple(tensor.name for tensor in session.get_outputs())
        check_signature(slice_, self._inputs, self._outputs)

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """Compute all outputs by name; InferenceFailed where an input is missing or onnxruntime fails."""
        require_inputs(self.slice, self._inputs, tensors)
        feeds = {name: np.asarray(tensors[name]) for name in self._inputs}
        try:
            values: Sequence[Any] = self._opened[0].run(self._outputs, feeds)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            values = self._run_on_cpu(feeds, error)
        return {name: np.asarray(value) for name, value in zip(self._outputs, values, strict=True)}

    def _run_on_cpu(self, feeds: dict[str, Tensor], error: Exception) -> Sequence[Any]:
        """Repeat a failed run on the CPU. InferenceFailed if this session is not on an accelerator, or if the CPU fails
        too."""
        if self._fallback is None:
            raise InferenceFailed(f"slice {self.slice.name}: {error}") from error
        try:
            opened = self._fallback.open()
            outputs: Sequence[Any] = opened[0].run(self._outputs, feeds)
        except Exception as twins:
            raise InferenceFailed(f"slice {self.slice.name}: {error}; on the CPU: {twins}") from twins
        self._fallback.on_accelerator_failed(error)
        self._opened, self._fallback = opened, None  # from now on this slice stays on the CPU
        return outputs
