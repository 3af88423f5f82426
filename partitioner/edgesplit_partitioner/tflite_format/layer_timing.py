"""Times the layers of a TFLite model. LiteRT has no profile of its operators, so each layer is cut out and timed alone.

The first half runs in the parent process and makes the files for the child; the second runs in the child
(`profiling.layers_child`), where `TfliteSession` takes the place of an onnxruntime session. Layers are timed on the
tensors that they read in one run of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.release.manifest import Kernels
from edgesplit.runtime.tflite import invoke, open_interpreter
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.tflite_format.flatbuffer import pack, read_model
from edgesplit_partitioner.tflite_format.graph import TfliteGraph, extract

MODEL_FILE = "model.tflite"
"""Name of the model's file in the child's folder."""

Array = npt.NDArray[np.generic]
"""A tensor of any datatype."""


@dataclass(frozen=True, slots=True)
class TimingFiles:
    """The model files that a child needs to time a model."""

    whole: bytes
    """The whole model with every tensor that a layer writes among its outputs."""
    tensors: tuple[str, ...]
    """Names of the tensors that the layers write."""
    layers: dict[str, bytes]
    """Each layer as a model of its own, by the layer's name."""


def timing_files(raw: bytes, graph: LayerGraph, *, layers: bool) -> TimingFiles:
    """The model files for timing the prepared model in `raw`, whose layers are those of `graph`; with `layers` false
    the layers' own files are left out. UsageError where the graph is not that of this model."""
    source = TfliteGraph(read_model(raw))
    positions = range(len(source.main.operators))
    own_layers = [layer for layer in graph.layers if layer.nodes]
    if any(position not in positions for layer in own_layers for position in layer.nodes):
        raise UsageError("this layer graph is not that of this model: it has more operators")
    written = tuple(name for layer in own_layers for name in layer.writes)
    whole = extract(source, positions, source.inputs, list(dict.fromkeys((*source.outputs, *written))))
    cut = {layer.name: b"".join(pack(extract(source, layer.nodes, layer.reads, layer.writes))) for layer in own_layers}
    return TimingFiles(b"".join(pack(whole)), written, cut if layers else {})


# The child's side.


@dataclass(frozen=True, slots=True)
class SessionInput:
    """An input's name, type and shape, as an onnxruntime session describes it."""

    name: str
    type: str
    shape: tuple[int, ...]


class TfliteSession:
    """A model on LiteRT with the interface of an onnxruntime session."""

    def __init__(self, path: Path, threads: int) -> None:
        self._threads = threads
        self._kernels: Kernels
        self._whole, self._kernels = open_interpreter(path, threads=threads)

    def get_inputs(self) -> list[SessionInput]:
        """Name, type and shape of each input."""
        return [_input(details) for details in self._whole.get_input_details()]

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs of these names, or all of them where `names` is None or empty."""
        outputs = invoke(self._whole, feeds)
        return [outputs[name] for name in (names or outputs)]

    def layer_seconds(
        self, files: Mapping[str, Path], feeds: Mapping[str, Array], warmup: int, runs: int
    ) -> dict[str, list[float]]:
        """Seconds of each run of each layer, by layer, on the tensors that it reads in one run of the whole model;
        prints a line with the number of layers done after each."""
        live = {**feeds, **invoke(self._whole, feeds)}
        seconds = {}
        for done, (name, path) in enumerate(files.items(), 1):
            interpreter, _ = open_interpreter(path, threads=self._threads, kernels=self._kernels)
            seconds[name] = _time_invocations(interpreter, live, warmup, runs)
            print(done, flush=True)
        return seconds


def _input(details: Any) -> SessionInput:
    shape = tuple(int(length) for length in details["shape"])
    return SessionInput(details["name"], f"tensor({np.dtype(details['dtype']).name})", shape)


def _time_invocations(interpreter: Any, live: Mapping[str, Array], warmup: int, runs: int) -> list[float]:
    """Seconds of each invocation alone: between the layers of one slice nothing is copied, so that copying the inputs
    does not count."""
    for _ in range(max(warmup, 1)):
        invoke(interpreter, live)
    seconds = []
    for _ in range(runs):
        start = perf_counter()
        interpreter.invoke()
        seconds.append(perf_counter() - start)
    return seconds


def open_session(folder: Path, threads: int) -> TfliteSession:
    """The model in the folder; RuntimeError with LiteRT's message where it cannot be opened."""
    try:
        return TfliteSession(folder / MODEL_FILE, threads)
    except ModelRefused as refusal:
        raise RuntimeError(str(refusal)) from refusal
