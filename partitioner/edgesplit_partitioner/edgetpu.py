"""Device halves for an Edge TPU, compiled per cut by `edgetpu_compiler` and added beside the slices that they replace.

The compiler is Google's closed program: where it is on the PATH, a TFLite model's device halves are compiled; where it
is not, or refuses a half, that half runs on the CPU. `note` is the sentence in the plan that states which.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from edgesplit.device_profile import DeviceProfile, load_profile
from edgesplit.errors import ModelRefused
from edgesplit.input_spec import INPUT_LAYER
from edgesplit.release.manifest import CompiledSlice
from edgesplit_partitioner.ir.chunking import slice_file, split_into_chunks
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.sandbox.child_process import child_environment, confined_command
from edgesplit_partitioner.sandbox.limits import measurement_limits
from edgesplit_partitioner.slicing import CutSlice, cut_slices

log = logging.getLogger(__name__)

COMPILER = "edgetpu_compiler"
PROGRAM = "edgesplit_partitioner.sandbox.program"
"""Module of the confined child process that becomes the compiler."""
RUNTIME = "libedgetpu"
"""Start of the runtime in the profile of a device with an Edge TPU."""
TIMEOUT_S = 300.0
"""The compiler is killed after this time, and the half runs on the CPU."""


@dataclass(frozen=True, slots=True)
class CompiledCut:
    """The compiled device half of one cut."""

    compiled: CompiledSlice
    """As the manifest lists it."""
    cut: CutSlice
    """As a slice with its file."""


def is_edge_tpu(profile: DeviceProfile) -> bool:
    """Whether devices of this profile have an Edge TPU."""
    return profile.fit is not None and profile.fit.runtime.startswith(RUNTIME)


def effective_profile(profile: DeviceProfile, graph: LayerGraph, model_format: str) -> DeviceProfile:
    """The profile that predicts this model's times: the Edge TPU's, or its host's where the Edge TPU stays idle."""
    if not (is_edge_tpu(profile) and profile.host and _idle_reason(graph, model_format)):
        return profile
    return msgspec.structs.replace(load_profile(profile.host), name=profile.name)


def compilation_note(profile: DeviceProfile, graph: LayerGraph, model_format: str) -> str:
    """The sentence of a plan on whether its device halves run on the Edge TPU; empty where the device has none."""
    if not is_edge_tpu(profile):
        return ""
    if reason := _idle_reason(graph, model_format):
        return f". Edge TPU idle: {reason}; device slices run on the CPU, and are predicted as on a {profile.host}"
    return f". Edge TPU: device slices compiled per cut by {COMPILER}, CPU twins beside them"


def _idle_reason(graph: LayerGraph, model_format: str) -> str:
    """Why nothing of the model can run on an Edge TPU; empty where something can."""
    if model_format != "tflite":
        return "only int8 TFLite models can be compiled for it, and this one is ONNX: export it as TFLite"
    if not any(work.is_int8 for layer in graph.layers for work in layer.work):
        return (
            "only int8 TFLite models can be compiled for it, and this one computes in float: `edgectl model compress"
            " NAME --method int8` makes a version that can"
        )
    return "" if shutil.which(COMPILER) else f"{COMPILER} is not on the PATH"


def compiled_cuts(
    model: PreparedModel,
    graph: LayerGraph,
    slices: Iterable[CutSlice],
    device_class: str,
    rows: Iterable[frozenset[str]],
) -> list[CompiledCut]:
    """The device halves of these rows (each the names of its device's slices), compiled.

    Those that the compiler refuses are left out, and all of them where there is no compiler.
    """
    if model.format != "tflite" or shutil.which(COMPILER) is None:
        return []
    of_name = {cut.slice.name: cut.slice for cut in slices if cut.slice.format != "input"}
    order = {layer.name: place for place, layer in enumerate(graph.layers)}
    cuts: list[CompiledCut] = []
    for row in dict.fromkeys(rows):
        covers = tuple(name for name in of_name if name in row)
        layers = sorted((layer for name in covers for layer in of_name[name].layers), key=order.__getitem__)
        if not layers:
            continue
        half = cut_slices(model, without_input(graph), [layers], None)[0]
        raw = compiled_file(half.files["model.tflite"])
        if raw is not None:
            cuts.append(_compiled_cut(half, raw, device_class, covers, len(cuts) + 1))
    return cuts


def compiled_file(raw: bytes, timeout_s: float = TIMEOUT_S) -> bytes | None:
    """The TFLite file compiled, or None where the compiler refuses it, or leaves all of it to the CPU."""
    from edgesplit_partitioner.tflite_format.flatbuffer import (  # LiteRT is an extra
        EDGE_TPU_OPERATOR,
        custom_name,
        read_model,
    )

    with tempfile.TemporaryDirectory(prefix="edgesplit-edgetpu-") as name:
        folder = Path(name)
        (folder / "half.tflite").write_bytes(raw)
        program = os.path.abspath(shutil.which(COMPILER) or COMPILER)
        limits = measurement_limits(len(raw), folder, timeout_s)
        arguments = (program, "-s", "-o", folder, folder / "half.tflite")
        try:
            _run(confined_command([os.path.dirname(program)], limits, PROGRAM, *arguments), folder, timeout_s)
            compiled = (folder / "half_edgetpu.tflite").read_bytes()
            model = read_model(compiled)
        except (OSError, subprocess.SubprocessError, ModelRefused) as error:
            log.warning("%s compiles no Edge TPU half: %s", COMPILER, error)
            return None
    custom = {custom_name(model, operator) for operator in model.subgraphs[0].operators}
    return compiled if EDGE_TPU_OPERATOR in custom else None


def _run(command: list[str], folder: Path, timeout_s: float) -> None:
    """Run the compiler without its output. On a timeout its whole process group is killed.

    Raises TimeoutExpired, or CalledProcessError for an exit status other than 0.
    """
    devnull = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=devnull, stdout=devnull, stderr=devnull, start_new_session=True, cwd=folder,
        env=child_environment(),
    )  # fmt: skip
    try:
        status = process.wait(timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, command)


def without_input(graph: LayerGraph) -> LayerGraph:
    """The graph without its input layer, so it begins at the model's own tensors: an Edge TPU decodes no images."""
    first = [layer for layer in graph.layers if layer.name == INPUT_LAYER and not layer.nodes]
    made = tuple(name for layer in first for name in layer.writes)
    read = {name for layer in first for name in layer.reads}
    return replace(
        graph,
        layers=tuple(layer for layer in graph.layers if layer not in first),
        inputs=(*made, *(name for name in graph.inputs if name not in read)),
    )


def _compiled_cut(half: CutSlice, raw: bytes, device_class: str, covers: tuple[str, ...], number: int) -> CompiledCut:
    """The compiled file `raw` as a slice for one device class that replaces the slices `covers`."""
    class_name = re.sub(r"[^a-z0-9-]+", "-", device_class.lower()).strip("-")
    runs = split_into_chunks(raw)
    file = slice_file("model.tflite", runs)
    slice_ = msgspec.structs.replace(half.slice, name=f"tpu{number:02d}-{class_name}", files=(file,), kernels="edgetpu")
    compiled = CompiledSlice(slice=slice_, device_class=device_class, covers=covers)
    return CompiledCut(compiled, CutSlice(slice_, {file.name: runs}))
