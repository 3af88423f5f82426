"""Runs slices on LiteRT: `.tflite` files, on the installed interpreter (ai-edge-litert, otherwise the older
tflite-runtime).

On one machine, with one thread count, a chain of slices gives the whole model's bits. Where LiteRT's default delegate
(XNNPACK) refused the whole model, the manifest specifies `plain` kernels, and all of its slices run on those. Variables
that a model keeps between runs are zeroed before each run: an inference depends on its inputs alone, on any tier.
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
from edgesplit.runtime import Tensor, Tensors, check_signature, require_inputs

FILE = "model.tflite"
INTERPRETERS = ("ai_edge_litert.interpreter", "tflite_runtime.interpreter")
"""Tried in this order: the second is the one on old devices (Coral's libedgetpu requires old versions)."""
EDGE_TPU_LIBRARY = "libedgetpu.so.1"
"""Installed by the device's own packages."""
INSTALL = "LiteRT is not installed here: pip install 'edgesplit[tflite]'"


class LiteRtRuntime:
    """Loads slices of format `tflite` for the CPU."""

    name = "litert"

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def load(self, slice_: Slice, folder: SliceSource) -> TfliteProgram:
        """Load the slice whose file is in `folder`; ModelRefused where LiteRT is missing or does not support it."""
        if slice_.format != "tflite":
            raise ModelRefused(f"slice {slice_.name} has format {slice_.format!r}, which is not LiteRT's")
        try:
            path = folder.path(FILE) if isinstance(folder, SliceInMemory) else folder / FILE
            interpreter, _ = open_interpreter(path, threads=self.threads, kernels=slice_.kernels)
        except ModelRefused as refusal:
            raise ModelRefused(f"slice {slice_.name}: {refusal}") from refusal
        return TfliteProgram(slice_, interpreter)


def import_litert() -> Any:
    """The installed module with `Interpreter`; ModelRefused with installation instructions where there is none."""
    for name in INTERPRETERS:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ModelRefused(f"this is a TFLite model, and {INSTALL}")


def open_interpreter(
    path: Path, *, threads: int = 1, kernels: Kernels = "default", shapes: dict[str, tuple[int, ...]] | None = None
) -> tuple[Any, Kernels]:
    """Open an interpreter and allocate its tensors. Returns it with the kernels it runs on: plain ones where the
    default is refused.

    `shapes`: new shapes of inputs by name. ModelRefused contains the interpreter's own message.
    """
    module = import_litert()
    if kernels == "edgetpu":
        return _open_on_edge_tpu(module, path, threads), "edgetpu"
    if kernels == "default":
        try:
            return _allocate(module.Interpreter(model_path=str(path), num_threads=threads), shapes), "default"
        except (RuntimeError, ValueError):
            pass  # XNNPACK refuses some valid models: the plain kernels decide
    plain = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    try:
        interpreter = module.Interpreter(model_path=str(path), num_threads=threads, experimental_op_resolver_type=plain)
        return _allocate(interpreter, shapes), "plain"
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:400] or "it gives no reason (tensors larger than memory are a cause)"
        raise ModelRefused(f"LiteRT cannot load it: {reason}") from error


def _open_on_edge_tpu(module: Any, path: Path, threads: int) -> Any:
    """Open a compiled file on the Edge TPU; ModelRefused where there is none."""
    try:
        ctypes.CDLL(EDGE_TPU_LIBRARY)  # first by itself: a delegate that cannot be loaded fails again in its destructor
        delegate = module.load_delegate(EDGE_TPU_LIBRARY)
        interpreter = module.Interpreter(model_path=str(path), num_threads=threads, experimental_delegates=[delegate])
        return _allocate(interpreter, None)
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelRefused(f"no Edge TPU can run it here: {' '.join(str(error).split())[:200]}") from error


def edge_tpu_problem() -> str:
    """Why no Edge TPU can be used here; empty where one can. Libraries loaded by this check stay loaded."""
    try:
        module = import_litert()
        ctypes.CDLL(EDGE_TPU_LIBRARY)
        module.load_delegate(EDGE_TPU_LIBRARY)
    except (ModelRefused, OSError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


def _allocate(interpreter: Any, shapes: dict[str, tuple[int, ...]] | None) -> Any:
    for detail in interpreter.get_input_details():
        if shapes and detail["name"] in shapes:
            interpreter.resize_tensor_input(detail["index"], shapes[detail["name"]], strict=False)
    interpreter.allocate_tensors()
    return interpreter


def invoke(interpreter: Any, tensors: Tensors) -> dict[str, Tensor]:
    """Run once from a reset state; returns the outputs by name. Inputs whose shape differs from the previous run's are
    resized."""
    interpreter.reset_all_variables()  # state of a previous run must not influence this one
    inputs = interpreter.get_input_details()
    resized = [detail for detail in inputs if tuple(detail["shape"]) != np.shape(tensors[detail["name"]])]
    for detail in resized:
        interpreter.resize_tensor_input(detail["index"], np.shape(tensors[detail["name"]]), strict=False)
    if resized:
        interpreter.allocate_tensors()
    for detail in inputs:
        interpreter.set_tensor(detail["index"], np.asarray(tensors[detail["name"]]))
    interpreter.invoke()
    return {detail["name"]: interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()}


class TfliteProgram:
    """One slice in its own interpreter. Runs are serialised by a lock."""

    def __init__(self, slice_: Slice, interpreter: Any) -> None:
        self.slice = slice_
        self._interpreter = interpreter
        self._run_lock = threading.Lock()
        self._inputs = tuple(detail["name"] for detail in interpreter.get_input_details())
        check_signature(slice_, self._inputs, [detail["name"] for detail in interpreter.get_output_details()])

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        """Compute all outputs by name; InferenceFailed where an input is missing or LiteRT fails."""
        require_inputs(self.slice, self._inputs, tensors)
        with self._run_lock:
            try:
                return invoke(self._interpreter, tensors)
            except (RuntimeError, ValueError) as error:
                raise InferenceFailed(f"slice {self.slice.name}: {' '.join(str(error).split())[:400]}") from error
