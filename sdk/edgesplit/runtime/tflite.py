"""Slices on LiteRT: `.tflite` files, on the interpreter that is installed (ai-edge-litert, else older tflite-runtime).

On one machine, with one thread count, a chain of slices gives the whole model's bits. Where LiteRT's default delegate
(XNNPACK) refused the whole model the manifest says `plain` kernels, and all of its slices run on those. What a file
keeps to itself between runs is zeroed before each: an inference depends on its inputs alone, on whichever tier.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from pathlib import Path
from typing import Any

import numpy as np

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.errors import InferenceFailed, ModelRefused
from edgesplit.release.manifest import Kernels, Slice
from edgesplit.runtime import Tensor, Tensors

FILE = "model.tflite"
INTERPRETERS = ("ai_edge_litert.interpreter", "tflite_runtime.interpreter")
"""Tried in this order: the second is what old devices have (Coral's libedgetpu pairs with old versions)."""
EDGE_TPU_LIBRARY = "libedgetpu.so.1"
"""Of the device's own packages."""
INSTALL = "LiteRT is not installed here: pip install 'edgesplit[tflite]'"


class LiteRtRuntime:
    """Loads slices of format `tflite` for the CPU."""

    name = "litert"

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def load(self, slice_: Slice, folder: SliceSource) -> TfliteProgram:
        """The slice whose file lies in `folder`, ready to run; ModelRefused if LiteRT is missing or cannot take it."""
        if slice_.format != "tflite":
            raise ModelRefused(f"slice {slice_.name} has format {slice_.format!r}, which is not LiteRT's")
        try:
            path = folder.path(FILE) if isinstance(folder, SliceInMemory) else folder / FILE
            interpreter, _ = open_interpreter(path, threads=self.threads, kernels=slice_.kernels)
        except ModelRefused as refusal:
            raise ModelRefused(f"slice {slice_.name}: {refusal}") from refusal
        return TfliteProgram(slice_, interpreter)


def litert() -> Any:
    """The module with `Interpreter`; ModelRefused says what to install where there is none."""
    for name in INTERPRETERS:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ModelRefused(f"this is a TFLite model, and {INSTALL}")


def open_interpreter(
    path: Path, *, threads: int = 1, kernels: Kernels = "default", shapes: dict[str, tuple[int, ...]] | None = None
) -> tuple[Any, Kernels]:
    """An interpreter whose tensors are allocated, and the kernels it runs on: plain ones where the default is refused.

    `shapes` are inputs to be resized first, by name. ModelRefused with the interpreter's own words.
    """
    module = litert()
    if kernels == "edgetpu":
        return _on_edge_tpu(module, path, threads), "edgetpu"
    if kernels == "default":
        try:
            return _allocated(module.Interpreter(model_path=str(path), num_threads=threads), shapes), "default"
        except (RuntimeError, ValueError):
            pass  # XNNPACK refuses some valid models: the plain kernels have the last word
    plain = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    try:
        made = module.Interpreter(model_path=str(path), num_threads=threads, experimental_op_resolver_type=plain)
        return _allocated(made, shapes), "plain"
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:400] or "it does not say why (tensors larger than memory are a cause)"
        raise ModelRefused(f"LiteRT cannot load it: {why}") from error


def _on_edge_tpu(module: Any, path: Path, threads: int) -> Any:
    """A compiled file on the Edge TPU; ModelRefused where there is none."""
    try:
        ctypes.CDLL(EDGE_TPU_LIBRARY)  # first alone: a delegate that is not there fails once more when it is freed
        delegate = module.load_delegate(EDGE_TPU_LIBRARY)
        made = module.Interpreter(model_path=str(path), num_threads=threads, experimental_delegates=[delegate])
        return _allocated(made, None)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelRefused(f"no Edge TPU runs it here: {' '.join(str(error).split())[:200]}") from error


def edge_tpu_trouble() -> str:
    """Why no Edge TPU can be used here; empty where one can. What is loaded stays loaded."""
    try:
        module = litert()
        ctypes.CDLL(EDGE_TPU_LIBRARY)
        module.load_delegate(EDGE_TPU_LIBRARY)
    except (ModelRefused, OSError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


def _allocated(interpreter: Any, shapes: dict[str, tuple[int, ...]] | None) -> Any:
    for one in interpreter.get_input_details():
        if shapes and one["name"] in shapes:
            interpreter.resize_tensor_input(one["index"], shapes[one["name"]], strict=False)
    interpreter.allocate_tensors()
    return interpreter


def invoke(interpreter: Any, tensors: Tensors) -> dict[str, Tensor]:
    """One run from a fresh state: the outputs by name. An input whose shape differs from the last run's is resized."""
    interpreter.reset_all_variables()
    inputs = interpreter.get_input_details()
    resized = [one for one in inputs if tuple(one["shape"]) != np.shape(tensors[one["name"]])]
    for one in resized:
        interpreter.resize_tensor_input(one["index"], np.shape(tensors[one["name"]]), strict=False)
    if resized:
        interpreter.allocate_tensors()
    for one in inputs:
        interpreter.set_tensor(one["index"], np.asarray(tensors[one["name"]]))
    interpreter.invoke()
    return {one["name"]: interpreter.get_tensor(one["index"]) for one in interpreter.get_output_details()}


class TfliteProgram:
    """One slice in an interpreter of its own; threads take turns."""

    def __init__(self, slice_: Slice, interpreter: Any) -> None:
        self.slice = slice_
        self._interpreter = interpreter
        self._turn = threading.Lock()
        self._inputs = tuple(one["name"] for one in interpreter.get_input_details())
        outputs = {one["name"] for one in interpreter.get_output_details()}
        if set(self._inputs) != {one.name for one in slice_.inputs} or not {
            one.name for one in slice_.outputs
        }.issubset(outputs):
            raise ModelRefused(f"slice {slice_.name}: its file takes or gives other tensors than its manifest says")

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """All outputs by name; InferenceFailed where an input is missing or LiteRT fails."""
        missing = [name for name in self._inputs if name not in tensors]
        if missing:
            raise InferenceFailed(f"slice {self.slice.name} lacks its inputs {missing}")
        with self._turn:
            try:
                return invoke(self._interpreter, tensors)
            except (RuntimeError, ValueError) as error:
                raise InferenceFailed(f"slice {self.slice.name}: {' '.join(str(error).split())[:400]}") from error
