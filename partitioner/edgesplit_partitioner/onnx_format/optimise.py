"""onnxruntime meets a stranger's model in a child process: a crash, a hang, a memory hog is an answer, not our end.

`optimise` (the parent's side) gives back the BASIC-optimised model, tidied, with the type of every tensor. The child
is `python -m edgesplit_partitioner.onnx_format.optimise TASK FOLDER MEMORY`: it reads and writes files in that folder,
no others.
"""

from __future__ import annotations

import mmap
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime

from edgesplit.errors import ModelRefused
from edgesplit_partitioner.ir.tensor_types import TensorType
from edgesplit_partitioner.onnx_format import archive, nodes, normalise
from edgesplit_partitioner.onnx_format.validate import EXTERNAL_BYTES
from edgesplit_partitioner.sandbox.exit_status import check_not_interrupted
from edgesplit_partitioner.sandbox.limits import confine

CHILD = (sys.executable, "-m", "edgesplit_partitioner.onnx_format.optimise")
TIMEOUT_S = 300.0
MEMORY_BYTES = 16 * 2**30
"""Address space of the child, beyond eight times the model: folding a constant may ask for anything."""
FOLDED_BYTES = 2**26
"""A constant that folding would make larger than this, and than the model, stays a node, and a folded model may be four
times both: a few bytes that name a shape must not become gigabytes."""

GIVEN, GIVEN_DATA, OPTIMISED, ANSWER = "given.onnx", "given.bin", "optimised.onnx", "answer.json"
WEIGHTS = "weights.bin"
"""Large weights of the optimised model, where those of the given one were in data files."""
ALIGNMENT = 4096
"""Of weights in a data file, so that they can be mapped."""
FILLS = ("zeros", "ones")
"""Trial inputs: some models reject zeros, and what differs between the two depends on the data."""

DATA_DEPENDENT = frozenset(
    {"NonZero", "NonMaxSuppression", "Unique", "Compress", "If", "Loop", "Scan", "SequenceMap", "Range", "Multinomial"}
)
"""Operators after which a length that is not known beforehand may change from input to input."""
SIZED_BY: Mapping[str, int] = {
    **dict.fromkeys(("ConstantOfShape", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"), 0),
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Slice", "Pad", "TopK", "OneHot", "Resize", "Upsample", "Split"), 1),
    **dict.fromkeys(("SplitToSequence", "Squeeze", "Unsqueeze", "CenterCropPad", "AffineGrid", "DFT", "STFT"), 1),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"), 1),
    **dict.fromkeys(("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"), 1),
    "MaxUnpool": 2,
}
"""Operators whose lengths are values that they read, and the first input that may hold such values."""

ORT_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float": "FP32",
    "double": "FP64",
}


class Seen(msgspec.Struct, frozen=True):
    """A tensor as onnxruntime declares it, lengths -1 where it cannot tell; shape None: not even how many there are."""

    datatype: str
    shape: tuple[int, ...] | None


class Answer(msgspec.Struct, frozen=True):
    """What the child found."""

    refused: str = ""
    declared: dict[str, Seen] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    """Of a trial run."""


def optimise(
    model: onnx.ModelProto, data: Mapping[str, memoryview] | None = None
) -> tuple[onnx.ModelProto, dict[str, TensorType], archive.Data]:
    """The optimised model, the type of each of its tensors (weights left out), and the data file that it has its large
    weights in, `WEIGHTS`; ModelRefused where it is none.

    `data` are the given model's data files. Where there are none, nothing is in a data file afterwards either.
    """
    size = model.ByteSize() + sum(map(len, (data or {}).values()))
    with tempfile.TemporaryDirectory(prefix="edgesplit-") as name:
        folder = Path(name)
        if data:
            _write_data(model, data, folder / GIVEN_DATA)
        (folder / GIVEN).write_bytes(model.SerializeToString())
        declared = _ask("optimise", folder, size).declared
        optimised = onnx.load_model(str(folder / OPTIMISED), load_external_data=False)
        unsure = any(seen.datatype and (seen.shape is None or -1 in seen.shape) for seen in declared.values())
        trials = _trials(folder, size) if unsure else []
        weights = _mapped(folder / WEIGHTS) if (folder / WEIGHTS).exists() else b""
    return optimised, settle(optimised.graph, declared, trials), weights


def _mapped(path: Path) -> mmap.mmap:
    """A file's bytes, mapped: they outlive its name, and take no memory that anything else needs."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with what its constants decide decided (an If keeps the one branch); ModelRefused where it is none."""
    with tempfile.TemporaryDirectory(prefix="edgesplit-") as name:
        folder = Path(name)
        (folder / GIVEN).write_bytes(model.SerializeToString())
        _ask("optimise", folder, model.ByteSize())
        return onnx.load_model(str(folder / OPTIMISED), load_external_data=False)


def _write_data(model: onnx.ModelProto, data: Mapping[str, memoryview], target: Path) -> None:
    """All weights that are in data files into one, of a name that we chose; the model points there, in place."""
    offset = 0
    with target.open("wb") as file:
        for tensor in model.graph.initializer:
            if not archive.is_external(tensor):
                continue
            location, start, length = archive.external(tensor)
            content = data[location][start : None if length < 0 else start + length]
            padding = -offset % ALIGNMENT
            file.write(bytes(padding))
            file.write(content)
            archive.point_to(tensor, target.name, offset + padding, len(content))
            offset += padding + len(content)


def _trials(folder: Path, size: int) -> list[Mapping[str, tuple[int, ...]]]:
    """Every tensor's shape in each trial run that came through; ModelRefused where none did."""
    trials: list[Mapping[str, tuple[int, ...]]] = []
    refusals: list[str] = []
    for fill in FILLS:
        try:
            trials.append(_ask(fill, folder, size).shapes)
        except ModelRefused as refusal:
            refusals.append(str(refusal))
    if not trials:
        raise ModelRefused(f"the shapes inside the model cannot be found: {refusals[0]}")
    return trials


def settle(
    graph: onnx.GraphProto, declared: Mapping[str, Seen], trials: list[Mapping[str, tuple[int, ...]]]
) -> dict[str, TensorType]:
    """Declared shapes, completed from trial runs; a length stays -1 where the data may change it."""
    moving = _depends_on_data(graph)
    return {name: _settle_one(name, seen, trials, name in moving) for name, seen in declared.items()}


def _settle_one(name: str, seen: Seen, trials: list[Mapping[str, tuple[int, ...]]], moving: bool) -> TensorType:
    runs = [trial[name] for trial in trials if name in trial]
    if not seen.datatype or (seen.shape is not None and -1 not in seen.shape):
        shape = seen.shape or ()
        return TensorType(seen.datatype, shape, tuple(max(length, 0) for length in shape))
    if not runs or len({len(run) for run in runs}) > 1:
        raise ModelRefused(f"the shape of the tensor {name[:80]!r} cannot be found, not even by running the model")
    largest = tuple(max(lengths) for lengths in zip(*runs, strict=True))
    known = seen.shape if seen.shape is not None else (-1,) * len(largest)
    same = [len(set(lengths)) == 1 and not moving for lengths in zip(*runs, strict=True)]
    shape = tuple(
        given if given >= 0 else (length if stays else -1)
        for given, length, stays in zip(known, largest, same, strict=True)
    )
    return TensorType(seen.datatype, shape, largest)


def _depends_on_data(graph: onnx.GraphProto) -> set[str]:
    """Tensors whose lengths may change with what is fed, or that are made of such."""
    values = {one.name for one in graph.input}  # that change with what is fed; a Shape of them need not
    moving: set[str] = set()
    for node in graph.node:
        reads = nodes.reads(node)
        sized = node.op_type in SIZED_BY and not values.isdisjoint(node.input[SIZED_BY[node.op_type] :])
        if sized or node.op_type in DATA_DEPENDENT or not moving.isdisjoint(reads):
            moving.update(nodes.writes(node))
        if not values.isdisjoint(reads) and (node.op_type not in ("Shape", "Size") or not moving.isdisjoint(reads)):
            values.update(nodes.writes(node))
    return moving


def _ask(task: str, folder: Path, size: int) -> Answer:
    """Run the child; ModelRefused when it refuses, dies or hangs."""
    command = [*CHILD, task, str(folder), str(MEMORY_BYTES + 8 * size)]
    (folder / ANSWER).unlink(missing_ok=True)
    try:
        child = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ModelRefused(f"onnxruntime was not done with the model after {TIMEOUT_S:.0f} s") from error
    check_not_interrupted(child.returncode)
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise ModelRefused(f"onnxruntime {onnxruntime.__version__} crashed on this model ({name})")
    if child.returncode or not (folder / ANSWER).exists():
        last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no word why"]
        raise ModelRefused(f"onnxruntime could not look at the model: {last[0][:200]}")
    answer = msgspec.json.decode((folder / ANSWER).read_bytes(), type=Answer)
    if answer.refused:
        raise ModelRefused(answer.refused)
    return answer


# The child's side.


def main(arguments: list[str]) -> None:
    """Do one task in one folder and write the answer there."""
    task, folder, memory = arguments[0], Path(arguments[1]), int(arguments[2])
    confine(memory)
    try:
        answer = _optimise(folder) if task == "optimise" else _try_run(folder, task)
    except MemoryError:
        answer = Answer(refused=f"the model needs more than {memory / 2**30:.0f} GiB of memory")
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        answer = Answer(refused=why_refused(str(error)))
    (folder / ANSWER).write_bytes(msgspec.json.encode(answer))


def why_refused(text: str) -> str:
    """onnxruntime's message as a sentence about the model."""
    unknown = re.search(r"No Op registered for (\S+) with domain_version of (\d+)", text)
    if unknown:
        operator = f"{unknown[1]!r} (operator set {unknown[2]})"
        return f"unknown operator {operator}: onnxruntime {onnxruntime.__version__} does not have it"
    foreign = re.search(r"(\S+)\(-?\d+\) is not a registered function/op", text)
    if foreign:
        return f"unknown operator {foreign[1]!r}: onnxruntime {onnxruntime.__version__} has no operator of that domain"
    kernel = re.search(r"Could not find an implementation for (\S+) node with name '([^']*)'", text)
    if kernel:
        return (
            f"onnxruntime {onnxruntime.__version__} cannot run the operator {kernel[1]} (node {kernel[2]!r}) on a CPU"
        )
    if "bad_alloc" in text:
        return "the model asks for more memory than a model may have here"
    text = re.sub(r"/onnxruntime_src/.*? was false\.", "", text)
    text = re.sub(r"/onnxruntime_src/\S+:\d+ [^()]*\((?:[^()]|\([^()]*\))*\)(?: const)?", "", text)
    plain = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from \S+ failed:\s*|/\S*/edgesplit-\S+", "", text)
    return f"onnxruntime refuses the model: {' '.join(plain.split())[:400]}"


def _session(path: Path, level: Any, save_as: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if save_as is not None:
        most = max(FOLDED_BYTES, _given_bytes(path.parent))
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(most))
        options.optimized_model_filepath = str(save_as)
        if (path.parent / GIVEN_DATA).exists():  # above 2 GB the saved model could not be one message either
            prefix = "session.optimized_model_external_initializers"
            options.add_session_config_entry(f"{prefix}_file_name", WEIGHTS)
            options.add_session_config_entry(f"{prefix}_min_size_in_bytes", str(EXTERNAL_BYTES))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _given_bytes(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in (GIVEN, GIVEN_DATA) if (folder / name).exists())


def _optimise(folder: Path) -> Answer:
    saved = folder / "saved.onnx"
    given = onnx.load_model(str(folder / GIVEN), load_external_data=False)
    _session(folder / GIVEN, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC, saved)
    made, most = saved.stat().st_size, 4 * (_given_bytes(folder) + FOLDED_BYTES)
    if made > most:
        return Answer(refused=f"its operators on constants make a model of {made / 2**20:.0f} MiB")
    model = onnx.load_model(str(saved), load_external_data=False)
    normalise.tidy(model, [one.name for one in given.graph.output])
    (folder / OPTIMISED).write_bytes(model.SerializeToString(deterministic=True))
    return Answer(declared=_declared(folder, model))


def _declared(folder: Path, model: onnx.ModelProto) -> dict[str, Seen]:
    """The types of all tensors, as a session with every one of them as an output states them."""
    session = _open_up(folder, model)
    scalars = _scalars(model)
    declared: dict[str, Seen] = {}
    for one in (*session.get_inputs(), *session.get_outputs()):
        kind = re.fullmatch(r"tensor\((\w+)\)", one.type)
        datatype = ORT_DATATYPES.get(kind[1], "") if kind else ""
        shape = tuple(length if isinstance(length, int) else -1 for length in one.shape)
        declared[one.name] = Seen(datatype, shape if shape or one.name in scalars else None)
    return declared


def _open_up(folder: Path, model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """The optimised model with every tensor as an output, not optimised again."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    inputs = {one.name for one in probe.graph.input}
    names = [name for node in probe.graph.node for name in nodes.writes(node)]
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in inputs)
    path = folder / "probe.onnx"
    path.write_bytes(probe.SerializeToString())
    return _session(path, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)


def _scalars(model: onnx.ModelProto) -> set[str]:
    """Tensors known to have no dimensions: onnxruntime says the same of those it knows nothing about."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    tensors = ((one.name, one.type.tensor_type) for one in (*graph.input, *graph.value_info, *graph.output))
    return {name for name, kind in tensors if kind.HasField("shape") and not kind.shape.dim}


def _try_run(folder: Path, fill: str) -> Answer:
    model = onnx.load_model(str(folder / OPTIMISED), load_external_data=False)
    session = _open_up(folder, model)
    make = np.zeros if fill == "zeros" else np.ones
    feeds = {}
    for one in model.graph.input:
        kind = one.type.tensor_type
        shape = [length.dim_value for length in kind.shape.dim]
        feeds[one.name] = make(shape, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    names = [one.name for one in session.get_outputs()]
    values = zip(names, session.run(names, feeds), strict=True)
    given = {name: value.shape for name, value in feeds.items()}
    return Answer(shapes=given | {name: value.shape for name, value in values if isinstance(value, np.ndarray)})


if __name__ == "__main__":
    main(sys.argv[1:])
