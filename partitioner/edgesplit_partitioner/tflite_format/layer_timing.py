"""Measuring TFLite models. LiteRT has no profile of its operators: each layer is cut out and timed alone.

The first half is the parent's (which files the child gets), the second the child's (`measured_run`): `TfliteSession`
answers what an onnxruntime session is asked there. On what the layers read in one run of the whole they are timed.
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
from edgesplit_partitioner.tflite_format.graph import TfliteGraph, part

MODEL = "model.tflite"
_KINDS = {"float32": "float", "float64": "double"}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class MeasuredFiles:
    """What a child is given to measure a model."""

    whole: bytes
    """With every tensor that a layer writes among its outputs."""
    tensors: tuple[str, ...]
    """Those tensors."""
    layers: dict[str, bytes]
    """Each layer as a model of its own."""


def measured_files(raw: bytes, graph: LayerGraph, *, layers: bool) -> MeasuredFiles:
    """The model in `raw` (a prepared one) taken apart as `graph` says; `layers`: into its layers too."""
    found = TfliteGraph(read_model(raw))
    places = range(len(found.main.operators))
    owned = [layer for layer in graph.layers if layer.nodes]
    if any(place not in places for layer in owned for place in layer.nodes):
        raise UsageError("this layer graph is not that of this model: it has more operators")
    wanted = tuple(name for layer in owned for name in layer.writes)
    whole = part(found, places, found.inputs, list(dict.fromkeys((*found.outputs, *wanted))))
    cut = {layer.name: b"".join(pack(part(found, layer.nodes, layer.reads, layer.writes))) for layer in owned}
    return MeasuredFiles(b"".join(pack(whole)), wanted, cut if layers else {})


# The child's side.


@dataclass(frozen=True, slots=True)
class Input:
    """An input as onnxruntime describes one."""

    name: str
    type: str
    shape: tuple[int, ...]


class TfliteSession:
    """A model on LiteRT, asked like an onnxruntime session."""

    def __init__(self, path: Path, threads: int) -> None:
        self._threads = threads
        self._kernels: Kernels
        self._whole, self._kernels = open_interpreter(path, threads=threads)

    def get_inputs(self) -> list[Input]:
        """Name, type and shape of each."""
        return [_input(one) for one in self._whole.get_input_details()]

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs of these names, or all of them."""
        found = invoke(self._whole, feeds)
        return [found[name] for name in (names or found)]

    def layer_seconds(
        self, files: Mapping[str, Path], feeds: Mapping[str, Array], warmup: int, runs: int
    ) -> dict[str, list[float]]:
        """Seconds of each run of each layer, on what it reads in one run of the whole; a line for each when done."""
        live = {**feeds, **invoke(self._whole, feeds)}
        seconds = {}
        for done, (name, path) in enumerate(files.items(), 1):
            interpreter, _ = open_interpreter(path, threads=self._threads, kernels=self._kernels)
            seconds[name] = _timed(interpreter, live, warmup, runs)
            print(done, flush=True)
        return seconds


def _input(details: Any) -> Input:
    kind = np.dtype(details["dtype"]).name
    return Input(details["name"], f"tensor({_KINDS.get(kind, kind)})", tuple(int(one) for one in details["shape"]))


def _timed(interpreter: Any, live: Mapping[str, Array], warmup: int, runs: int) -> list[float]:
    """Seconds of the invocation alone: between the layers of one slice nothing is copied."""
    for _ in range(max(warmup, 1)):
        invoke(interpreter, live)
    seconds = []
    for _ in range(runs):
        start = perf_counter()
        interpreter.invoke()
        seconds.append(perf_counter() - start)
    return seconds


def open_session(folder: Path, threads: int) -> TfliteSession:
    """The model in the folder; RuntimeError with LiteRT's words where it cannot be opened."""
    try:
        return TfliteSession(folder / MODEL, threads)
    except ModelRefused as refusal:
        raise RuntimeError(str(refusal)) from refusal
