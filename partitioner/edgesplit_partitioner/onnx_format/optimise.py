"""Optimises an untrusted ONNX model with onnxruntime in a child process: a crash, a hang or too much memory there is
reported as ModelRefused and does not affect this process.

`optimise` (the parent's side) returns the BASIC-optimised, normalised model with the type of every tensor. The child is
`python -m edgesplit_partitioner.onnx_format.optimise TASK FOLDER MEMORY`: it reads and writes files in that folder, no
others.
"""

from __future__ import annotations

import mmap
import re
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
from edgesplit_partitioner.ir.chunking import Data
from edgesplit_partitioner.ir.tensor_types import ORT_DATATYPES, TensorType
from edgesplit_partitioner.onnx_format import archive, nodes, normalise
from edgesplit_partitioner.onnx_format.validate import MIN_EXTERNAL_BYTES
from edgesplit_partitioner.sandbox.child_process import ChildOutOfTime, run_child
from edgesplit_partitioner.sandbox.limits import out_of_memory, trial_limits

CHILD = "edgesplit_partitioner.onnx_format.optimise"
"""Module of the child process."""
TIMEOUT_S = 300.0
"""Seconds after which the child is killed."""
MAX_FOLDED_BYTES = 2**26
"""Limit on constant folding: a constant that would become larger than this and than the model stays a node, and a
folded model may have at most four times the sum of both. A few bytes that describe a shape must not become gigabytes.
"""

GIVEN_FILE, GIVEN_DATA_FILE, OPTIMISED_FILE, RESULT_FILE = "given.onnx", "given.bin", "optimised.onnx", "answer.json"
WEIGHTS_FILE = "weights.bin"
"""Data file with the large weights of the optimised model, where those of the given model were in data files."""
ALIGNMENT = 4096
"""Alignment of weights in a data file in bytes, so that they can be memory-mapped."""
TRIAL_FILLS = ("zeros", "ones")
"""Values that trial inputs are filled with. Some models reject zeros; a shape that differs between the two runs depends
on the data."""

REPEATING = frozenset({"Loop", "Scan"})
"""Operators that run a graph as often as their inputs say."""
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
"""Operators whose output lengths are values that they read, with the position of the first input that may hold such
values."""


class DeclaredTensor(msgspec.Struct, frozen=True):
    """Type and shape of a tensor as onnxruntime declares them. A length is -1 where it is unknown; the shape is None
    where not even the number of dimensions is known."""

    datatype: str
    shape: tuple[int, ...] | None


class RuntimeLacks(ModelRefused):
    """onnxruntime cannot run the model whatever its shapes are: an operator that it does not have, or not for a CPU, or
    a file newer than it reads."""


class TaskResult(msgspec.Struct, frozen=True):
    """Result of a task, which the child writes for the parent."""

    refused: str = ""
    """Why onnxruntime refuses the model; empty where it does not."""
    whatever_shapes: bool = False
    """The refusal is a `RuntimeLacks`: no shape of the inputs changes it."""
    declared: dict[str, DeclaredTensor] = {}
    """Declared type and shape of every tensor, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    """Shapes of a trial run, by tensor name."""


def optimise(
    model: onnx.ModelProto, data: Mapping[str, memoryview] | None = None
) -> tuple[onnx.ModelProto, dict[str, TensorType], Data]:
    """The optimised model, the type of each of its tensors (weights left out), and the contents of the data file
    `WEIGHTS` with its large weights; ModelRefused where onnxruntime cannot load or run the model.

    `data` are the given model's data files. Without any, the optimised model has no data file either.
    """
    size = model.ByteSize() + sum(map(len, (data or {}).values()))
    with tempfile.TemporaryDirectory(prefix="edgesplit-") as name:
        folder = Path(name)
        if data:
            _write_data(model, data, folder / GIVEN_DATA_FILE)
        (folder / GIVEN_FILE).write_bytes(model.SerializeToString())
        declared = _run_child("optimise", folder, size).declared
        optimised = onnx.load_model(str(folder / OPTIMISED_FILE), load_external_data=False)
        has_open_shapes = any(
            declaration.datatype and (declaration.shape is None or -1 in declaration.shape)
            for declaration in declared.values()
        )
        trials = _trial_shapes(folder, size) if has_open_shapes else []
        if not has_open_shapes and has_loop(optimised.graph):
            _check_end(folder, size)
        weights = _memory_map(folder / WEIGHTS_FILE) if (folder / WEIGHTS_FILE).exists() else b""
    return optimised, resolve_types(optimised.graph, declared, trials), weights


def check_runtime(model: onnx.ModelProto, data: Mapping[str, memoryview] | None = None) -> None:
    """RuntimeLacks where onnxruntime cannot run the model whatever its shapes are. Whatever else it refuses here, as a
    shape that is not settled yet, is left to `optimise`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    try:
        fold_constants(copy, data)
    except RuntimeLacks:
        raise
    except ModelRefused:
        return


def has_loop(graph: onnx.GraphProto) -> bool:
    """Whether one of its operators, or of the graphs inside them, repeats a graph as often as its inputs say."""
    return any(
        node.op_type in REPEATING
        or any(has_loop(inner) for field in node.attribute for inner in (field.g, *field.graphs))
        for node in graph.node
    )


def _check_end(folder: Path, size: int) -> None:
    """Run the optimised model once; ModelRefused where it does not come to an end. Other refusals do not count: the
    model may reject zeros."""
    try:
        _run_child(TRIAL_FILLS[0], folder, size)
    except ChildOutOfTime:
        raise
    except ModelRefused:
        return


def _memory_map(path: Path) -> mmap.mmap:
    """A file's bytes, memory-mapped: they stay readable after the file is deleted and can be evicted from memory."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def fold_constants(model: onnx.ModelProto, data: Mapping[str, memoryview] | None = None) -> onnx.ModelProto:
    """The model after constant folding, where an If with a constant condition keeps only its branch; ModelRefused where
    onnxruntime refuses the model. Its weights in data files stay in one, which is gone with the call."""
    with tempfile.TemporaryDirectory(prefix="edgesplit-") as name:
        folder = Path(name)
        if data:
            _write_data(model, data, folder / GIVEN_DATA_FILE)
        (folder / GIVEN_FILE).write_bytes(model.SerializeToString())
        _run_child("optimise", folder, model.ByteSize() + sum(map(len, (data or {}).values())))
        return onnx.load_model(str(folder / OPTIMISED_FILE), load_external_data=False)


def _write_data(model: onnx.ModelProto, data: Mapping[str, memoryview], target: Path) -> None:
    """Write all weights that lie in data files into the one file `target`, and make the model refer to it, in place."""
    offset = 0
    with target.open("wb") as file:
        for tensor in model.graph.initializer:
            if not archive.is_external(tensor):
                continue
            location, start, length = archive.external_location(tensor)
            content = data[location][start : None if length < 0 else start + length]
            padding = -offset % ALIGNMENT
            file.write(bytes(padding))
            file.write(content)
            archive.set_external_location(tensor, target.name, offset + padding, len(content))
            offset += padding + len(content)


def _trial_shapes(folder: Path, size: int) -> list[Mapping[str, tuple[int, ...]]]:
    """Every tensor's shape in each trial run that succeeded; ModelRefused where none did."""
    trials: list[Mapping[str, tuple[int, ...]]] = []
    refusals: list[str] = []
    for fill in TRIAL_FILLS:
        try:
            trials.append(_run_child(fill, folder, size).shapes)
        except ChildOutOfTime:  # another fill would take as long
            raise
        except ModelRefused as refusal:
            refusals.append(str(refusal))
    if not trials:
        raise ModelRefused(f"the shapes inside the model cannot be found: {refusals[0]}")
    return trials


def resolve_types(
    graph: onnx.GraphProto, declared: Mapping[str, DeclaredTensor], trials: list[Mapping[str, tuple[int, ...]]]
) -> dict[str, TensorType]:
    """The type of each tensor: the declared shape, completed from trial runs. A length stays -1 where the data may
    change it."""
    data_dependent = _depends_on_data(graph)
    return {
        name: _resolve_type(name, declaration, trials, name in data_dependent) for name, declaration in declared.items()
    }


def _resolve_type(
    name: str, declared: DeclaredTensor, trials: list[Mapping[str, tuple[int, ...]]], depends_on_data: bool
) -> TensorType:
    """The type of one tensor. `depends_on_data` is true where its lengths may depend on the data; ModelRefused where
    neither the declaration nor the trial runs give a shape."""
    # Trial runs only complete what onnxruntime could not declare: see the first return for a complete declaration.
    trial_shapes = [trial[name] for trial in trials if name in trial]
    if not declared.datatype or (declared.shape is not None and -1 not in declared.shape):
        shape = declared.shape or ()
        return TensorType(declared.datatype, shape, tuple(max(length, 0) for length in shape))
    if not trial_shapes or len({len(run) for run in trial_shapes}) > 1:
        raise ModelRefused(f"the shape of the tensor {name[:80]!r} cannot be found, not even by running the model")
    largest = tuple(max(lengths) for lengths in zip(*trial_shapes, strict=True))
    declared_shape = declared.shape if declared.shape is not None else (-1,) * len(largest)
    is_constant = [len(set(lengths)) == 1 and not depends_on_data for lengths in zip(*trial_shapes, strict=True)]
    shape = tuple(
        declared_length if declared_length >= 0 else (length if constant else -1)
        for declared_length, length, constant in zip(declared_shape, largest, is_constant, strict=True)
    )
    return TensorType(declared.datatype, shape, largest)


def _depends_on_data(graph: onnx.GraphProto) -> set[str]:
    """Tensors whose lengths may change with the input data, or that are computed from such tensors."""
    values = {value.name for value in graph.input}  # tensors whose values depend on the input data
    dynamic: set[str] = set()
    for node in graph.node:
        reads = nodes.inputs_of(node)
        is_sized_by_value = node.op_type in SIZED_BY and not values.isdisjoint(node.input[SIZED_BY[node.op_type] :])
        if is_sized_by_value or node.op_type in DATA_DEPENDENT or not dynamic.isdisjoint(reads):
            dynamic.update(nodes.outputs_of(node))
        # The Shape or Size of an input is fixed, and with it all that is computed from it, unless its lengths are
        # dynamic.
        if not values.isdisjoint(reads) and (node.op_type not in ("Shape", "Size") or not dynamic.isdisjoint(reads)):
            values.update(nodes.outputs_of(node))
    return dynamic


def _run_child(task: str, folder: Path, size: int) -> TaskResult:
    """Run one task in the child and return its result; ModelRefused when the child refuses the model, dies or hangs."""
    runtime, result = f"onnxruntime {onnxruntime.__version__}", folder / RESULT_FILE
    limits = trial_limits(size, folder)
    raw = run_child(CHILD, task, folder, limits=limits, limit_s=TIMEOUT_S, result=result, runtime=runtime)
    answer = msgspec.json.decode(raw, type=TaskResult)
    if answer.refused:
        raise (RuntimeLacks if answer.whatever_shapes else ModelRefused)(answer.refused)
    return answer


# The child's side.


def main(arguments: list[str]) -> None:
    """The child: run one task in one folder and write the result there."""
    task, folder = arguments[0], Path(arguments[1])
    try:
        answer = _optimise(folder) if task == "optimise" else _trial_run(folder, task)
    except MemoryError:
        answer = TaskResult(refused=out_of_memory())
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        lacking = operator_message(str(error)) or version_message(str(error))
        answer = TaskResult(refused=lacking or refusal_message(str(error)), whatever_shapes=bool(lacking))
    (folder / RESULT_FILE).write_bytes(msgspec.json.encode(answer))


def operator_message(text: str) -> str:
    """onnxruntime's error message about an operator that it does not have as a sentence about the model; empty for any
    other message."""
    unknown = re.search(r"No Op registered for (\S+) with domain_version of (\d+)", text)
    if unknown:
        operator = f"{unknown[1]!r} (operator set {unknown[2]})"
        return f"unknown operator {operator}: onnxruntime {onnxruntime.__version__} does not have it"
    custom = re.search(r"(\S+)\(-?\d+\) is not a registered function/op", text)
    if custom:
        return f"unknown operator {custom[1]!r}: onnxruntime {onnxruntime.__version__} has no operator of that domain"
    kernel = re.search(r"Could not find an implementation for (\S+) node with name '([^']*)'", text)
    if kernel:
        return (
            f"onnxruntime {onnxruntime.__version__} cannot run the operator {kernel[1]} (node {kernel[2]!r}) on a CPU"
        )
    return ""


def refusal_message(text: str) -> str:
    """onnxruntime's error message as a sentence about the model, without paths and source locations."""
    if unknown := operator_message(text):
        return unknown
    if "bad_alloc" in text:
        return "the model needs more memory than the limit for models"
    if too_new := version_message(text):
        return too_new
    text = re.sub(r"/onnxruntime_src/.*? was false\.", "", text)
    text = re.sub(r"/onnxruntime_src/\S+:\d+ [^()]*\((?:[^()]|\([^()]*\))*\)(?: const)?", "", text)
    plain = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from \S+ failed:\s*|/\S*/edgesplit-\S+", "", text)
    return f"onnxruntime refuses the model: {' '.join(plain.split())[:400]}"


def version_message(text: str) -> str:
    """onnxruntime's error message about a file that is newer than it reads, with how to lower the version; empty for
    any other message."""
    runtime = f"onnxruntime {onnxruntime.__version__}"
    if found := re.search(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)", text):
        return (
            f"the model's IR version {found[1]} is too new: {runtime} reads up to {found[2]}. Lower it and push again"
            f' (what only newer versions have is then refused by name): python -c "import onnx; m ='
            f" onnx.load('MODEL.onnx'); m.ir_version = {found[2]}; onnx.save(m, 'MODEL.onnx')\""
        )
    if found := re.search(r"Opset (\d+) is under development.*?(?:is )?till opset (\d+)", text, re.DOTALL):
        return (
            f"the model's operator set {found[1]} is too new: {runtime} reads up to {found[2]}. Export it with"
            f" opset_version={found[2]}, or convert it: onnx.version_converter.convert_version(model, {found[2]})"
        )
    return ""


def _session(path: Path, level: Any, save_as: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if save_as is not None:
        most = max(MAX_FOLDED_BYTES, _given_bytes(path.parent))
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(most))
        options.optimized_model_filepath = str(save_as)
        if (path.parent / GIVEN_DATA_FILE).exists():  # above 2 GB the saved model could not be one message either
            prefix = "session.optimized_model_external_initializers"
            options.add_session_config_entry(f"{prefix}_file_name", WEIGHTS_FILE)
            options.add_session_config_entry(f"{prefix}_min_size_in_bytes", str(MIN_EXTERNAL_BYTES))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _given_bytes(folder: Path) -> int:
    """Size of the given model with its data file, in bytes."""
    return sum((folder / name).stat().st_size for name in (GIVEN_FILE, GIVEN_DATA_FILE) if (folder / name).exists())


def _optimise(folder: Path) -> TaskResult:
    """Optimise, normalise and save the model in the folder; returns the declared type of every tensor."""
    saved = folder / "saved.onnx"
    given = onnx.load_model(str(folder / GIVEN_FILE), load_external_data=False)
    _session(folder / GIVEN_FILE, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC, saved)
    saved_bytes, limit = saved.stat().st_size, 4 * (_given_bytes(folder) + MAX_FOLDED_BYTES)
    if saved_bytes > limit:
        return TaskResult(refused=f"its operators on constants make a model of {saved_bytes / 2**20:.0f} MiB")
    model = onnx.load_model(str(saved), load_external_data=False)
    normalise.normalise_model(model, [output.name for output in given.graph.output])
    (folder / OPTIMISED_FILE).write_bytes(model.SerializeToString(deterministic=True))
    return TaskResult(declared=_declared(folder, model))


def _declared(folder: Path, model: onnx.ModelProto) -> dict[str, DeclaredTensor]:
    """The type and shape of every tensor, as declared by a session of which every tensor is an output."""
    session = _probe_session(folder, model)
    scalars = _scalars(model)
    declared: dict[str, DeclaredTensor] = {}
    for value in (*session.get_inputs(), *session.get_outputs()):
        kind = re.fullmatch(r"tensor\((\w+)\)", value.type)
        datatype = ORT_DATATYPES.get(kind[1], "") if kind else ""
        shape = tuple(length if isinstance(length, int) else -1 for length in value.shape)
        declared[value.name] = DeclaredTensor(datatype, shape if shape or value.name in scalars else None)
    return declared


def _probe_session(folder: Path, model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session on the optimised model with every tensor as an output, without further optimisation."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    inputs = {value.name for value in probe.graph.input}
    names = [name for node in probe.graph.node for name in nodes.outputs_of(node)]
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in inputs)
    path = folder / "probe.onnx"
    path.write_bytes(probe.SerializeToString())
    return _session(path, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)


def _scalars(model: onnx.ModelProto) -> set[str]:
    """Tensors known to have no dimensions. onnxruntime declares the same empty shape for tensors whose shape it does
    not know."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    tensors = ((value.name, value.type.tensor_type) for value in (*graph.input, *graph.value_info, *graph.output))
    return {name for name, kind in tensors if kind.HasField("shape") and not kind.shape.dim}


def _trial_run(folder: Path, fill: str) -> TaskResult:
    """Run the optimised model once on inputs filled with `fill`; returns the shape of every tensor."""
    model = onnx.load_model(str(folder / OPTIMISED_FILE), load_external_data=False)
    session = _probe_session(folder, model)
    make = np.zeros if fill == "zeros" else np.ones
    feeds = {}
    for graph_input in model.graph.input:
        tensor_type = graph_input.type.tensor_type
        shape = [length.dim_value for length in tensor_type.shape.dim]
        feeds[graph_input.name] = make(shape, onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type))
    names = [value.name for value in session.get_outputs()]
    values = zip(names, session.run(names, feeds), strict=True)
    given = {name: value.shape for name, value in feeds.items()}
    return TaskResult(shapes=given | {name: value.shape for name, value in values if isinstance(value, np.ndarray)})


if __name__ == "__main__":
    main(sys.argv[1:])
