"""Device halves for an Edge TPU: compiled per cut by `edgetpu_compiler`, each beside the slices it stands for.

The compiler is Google's and not in our hands: where it is on the PATH a TFLite model's device halves are compiled, and
`note` says so in the plan; where it is not, or refuses a half, that half runs on the CPU, and the note says that.
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
from edgesplit.release.manifest import Compiled
from edgesplit_partitioner.ir.chunking import plain_runs, slice_file
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.slicing import CutSlice, cut_slices

log = logging.getLogger(__name__)

COMPILER = "edgetpu_compiler"
RUNTIME = "libedgetpu"
"""What a device profile names as its runtime where the device has an Edge TPU."""
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class CompiledCut:
    """The device half of one cut, compiled, as the manifest lists it and with its file."""

    compiled: Compiled
    cut: CutSlice


def is_edge_tpu(profile: DeviceProfile) -> bool:
    """Whether devices of this profile have an Edge TPU."""
    return profile.fit is not None and profile.fit.runtime.startswith(RUNTIME)


def runs_on(profile: DeviceProfile, graph: LayerGraph, model_format: str) -> DeviceProfile:
    """The profile that predicts this model: an Edge TPU's own, or that of its host where it stays idle."""
    if not (is_edge_tpu(profile) and profile.host and _idle(graph, model_format)):
        return profile
    return msgspec.structs.replace(load_profile(profile.host), name=profile.name)


def note(profile: DeviceProfile, graph: LayerGraph, model_format: str) -> str:
    """What a plan says of how its device halves get onto the Edge TPU; nothing where the device has none."""
    if not is_edge_tpu(profile):
        return ""
    if why := _idle(graph, model_format):
        return f". Edge TPU idle: {why}; device slices run on the CPU, and are predicted as on a {profile.host}"
    return f". Edge TPU: device slices compiled per cut by {COMPILER}, CPU twins beside them"


def _idle(graph: LayerGraph, model_format: str) -> str:
    """Why nothing of the model can run on an Edge TPU; empty where it can."""
    if model_format != "tflite" or not any(tensor.datatype in ("INT8", "UINT8") for tensor in graph.tensors.values()):
        return "only int8 TFLite models can be compiled for it"
    return "" if shutil.which(COMPILER) else f"{COMPILER} is not on the PATH"


def compiled_cuts(
    model: PreparedModel,
    graph: LayerGraph,
    slices: Iterable[CutSlice],
    device_class: str,
    rows: Iterable[frozenset[str]],
) -> list[CompiledCut]:
    """The device halves of these rows (each the names of its device's slices), compiled; those that the compiler
    refuses are left out, and all of them where there is no compiler."""
    if model.format != "tflite" or shutil.which(COMPILER) is None:
        return []
    of_name = {one.slice.name: one.slice for one in slices if one.slice.format != "input"}
    order = {layer.name: place for place, layer in enumerate(graph.layers)}
    made: list[CompiledCut] = []
    for row in dict.fromkeys(rows):
        covers = tuple(name for name in of_name if name in row)
        layers = sorted((layer for name in covers for layer in of_name[name].layers), key=order.__getitem__)
        if not layers:
            continue
        half = cut_slices(model, without_input(graph), [layers], None)[0]
        raw = compiled_file(half.files["model.tflite"])
        if raw is not None:
            made.append(_described(half, raw, device_class, covers, len(made) + 1))
    return made


def compiled_file(raw: bytes) -> bytes | None:
    """The TFLite file compiled, or None where the compiler refuses it, or leaves all of it to the CPU."""
    from edgesplit_partitioner.tflite_format.flatbuffer import EDGE_TPU, custom_name, read_model  # LiteRT is an extra

    with tempfile.TemporaryDirectory(prefix="edgesplit-edgetpu-") as name:
        folder = Path(name)
        (folder / "half.tflite").write_bytes(raw)
        command = [shutil.which(COMPILER) or COMPILER, "-s", "-o", str(folder), str(folder / "half.tflite")]
        try:
            _run(command)
            compiled = (folder / "half_edgetpu.tflite").read_bytes()
            model = read_model(compiled)
        except (OSError, subprocess.SubprocessError, ModelRefused) as error:
            log.warning("%s compiles no Edge TPU half: %s", COMPILER, error)
            return None
    custom = {custom_name(model, one) for one in model.subgraphs[0].operators}
    return compiled if EDGE_TPU in custom else None


def _run(command: list[str]) -> None:
    """Run the compiler and read nothing of what it says; where it hangs, what it started ends with it."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        status = process.wait(TIMEOUT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, command)


def without_input(graph: LayerGraph) -> LayerGraph:
    """The graph that begins at the model's own tensors: nothing decodes pictures on an Edge TPU."""
    first = [layer for layer in graph.layers if layer.name == INPUT_LAYER and not layer.nodes]
    made = tuple(name for layer in first for name in layer.writes)
    read = {name for layer in first for name in layer.reads}
    return replace(
        graph,
        layers=tuple(layer for layer in graph.layers if layer not in first),
        inputs=(*made, *(name for name in graph.inputs if name not in read)),
    )


def _described(half: CutSlice, raw: bytes, device_class: str, covers: tuple[str, ...], number: int) -> CompiledCut:
    plain = re.sub(r"[^a-z0-9-]+", "-", device_class.lower()).strip("-")
    runs = plain_runs(raw)
    file = slice_file("model.tflite", runs)
    one = msgspec.structs.replace(half.slice, name=f"tpu{number:02d}-{plain}", files=(file,), kernels="edgetpu")
    return CompiledCut(Compiled(slice=one, device_class=device_class, covers=covers), CutSlice(one, {file.name: runs}))
