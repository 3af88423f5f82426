"""Runs an untrusted TFLite model with LiteRT in a child process: a crash, a hang or too much memory there is reported
as ModelRefused and does not affect this process.

`try_model` (the parent's side) returns the shape of every tensor and the kernels that the model runs on. The child is
`python -m edgesplit_partitioner.tflite_format.trial_run FOLDER MEMORY`: it reads and writes files in that folder, no
others.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.release.manifest import Kernels
from edgesplit.runtime.tflite import import_litert, invoke, open_interpreter
from edgesplit_partitioner.sandbox.child_process import run_child
from edgesplit_partitioner.sandbox.limits import out_of_memory, trial_limits
from edgesplit_partitioner.tflite_format.flatbuffer import (
    CUSTOM_OPERATOR,
    EDGE_TPU_OPERATOR,
    STATEFUL_OPERATORS,
    Model,
    custom_name,
    ints,
    operator_name,
    pack,
    read_model,
)
from edgesplit_partitioner.tflite_format.graph import TfliteGraph, extract

CHILD = "edgesplit_partitioner.tflite_format.trial_run"
"""Module of the child process."""
TIMEOUT_S = 300.0
"""Seconds after which the child is killed."""
GIVEN_FILE, NORMALISED_FILE, BINDINGS_FILE, RESULT_FILE = "given.tflite", "plain.tflite", "asked.json", "answer.json"

Shape = tuple[int, ...]
"""Lengths of a tensor's dimensions."""


class TrialResult(msgspec.Struct, frozen=True):
    """Result of a trial run, which the child writes for the parent."""

    refused: str = ""
    """Why the model is refused; empty where it is not."""
    usage: str = ""
    """What is wrong with the caller's bindings; empty where they are valid."""
    kernels: Kernels = "default"
    """Kernels that the model runs on."""
    compiled: bool = False
    """True where the model was compiled for an Edge TPU: it cannot run here, and its shapes are those that the file
    declares."""
    declared: dict[str, Shape] = {}
    """Shapes after tensors were allocated, by tensor name."""
    runs: list[dict[str, Shape]] = []
    """Shapes after each trial run, by tensor name."""


def try_model(raw: bytes, bindings: Mapping[str, int]) -> TrialResult:
    """The shapes and the kernels of the model in `raw`. ModelRefused where it is no model, cannot run, crashes or
    hangs; UsageError where a binding is wrong."""
    import_litert()
    with tempfile.TemporaryDirectory(prefix="edgesplit-") as name:
        folder = Path(name)
        (folder / GIVEN_FILE).write_bytes(raw)
        (folder / BINDINGS_FILE).write_bytes(msgspec.json.encode(dict(bindings)))
        limits, result = trial_limits(len(raw), folder), folder / RESULT_FILE
        answer = run_child(CHILD, folder, limits=limits, limit_s=TIMEOUT_S, result=result, runtime="LiteRT")
    trial = msgspec.json.decode(answer, type=TrialResult)
    if trial.usage:
        raise UsageError(trial.usage)
    if trial.refused:
        raise ModelRefused(trial.refused)
    return trial


# The child's side.


def main(arguments: list[str]) -> None:
    """The child: run the model in the folder and write the result there."""
    folder = Path(arguments[0])
    try:
        answer = _trial_run(folder)
    except MemoryError:
        answer = TrialResult(refused=out_of_memory())
    except UsageError as error:
        answer = TrialResult(usage=str(error))
    except (ModelRefused, RuntimeError, ValueError) as error:
        answer = TrialResult(refused=refusal_message(str(error)))
    (folder / RESULT_FILE).write_bytes(msgspec.json.encode(answer))


def refusal_message(text: str) -> str:
    """LiteRT's error message as a sentence about the model."""
    unknown = re.search(r"Encountered unresolved custom op: (.+?)\.?\s*See instructions", text)
    if unknown:
        return f"unknown operator {unknown[1]!r}: LiteRT does not have this custom operator"
    missing = re.search(r"Didn't find op for builtin opcode '(\w+)' version '(\d+)'", text)
    if missing:
        return f"unknown operator {missing[1]!r} (version {missing[2]}): this LiteRT does not have it"
    return text


def _trial_run(folder: Path) -> TrialResult:
    """Check and run the model in the folder once with zeros and once with ones."""
    raw = (folder / GIVEN_FILE).read_bytes()
    bindings = msgspec.json.decode((folder / BINDINGS_FILE).read_bytes(), type=dict[str, int])
    graph = TfliteGraph(read_model(raw))
    custom = _refuse_operators(graph.model)
    shapes = _bind_shapes(graph, bindings)
    if EDGE_TPU_OPERATOR in custom:
        return TrialResult(compiled=True, declared=_declared_shapes(graph, shapes))
    path = folder / NORMALISED_FILE
    path.write_bytes(b"".join(pack(extract(graph, range(len(graph.main.operators)), graph.inputs, graph.outputs))))
    interpreter, _ = open_interpreter(path, kernels="plain", shapes=shapes)
    declared = _shapes(interpreter, graph)
    runs = []
    for fill in (np.zeros, np.ones):  # what differs between the two depends on the data
        _invoke(interpreter, fill)
        runs.append(_shapes(interpreter, graph))
    default_interpreter, kernels = open_interpreter(path, shapes=shapes)
    _invoke(default_interpreter, np.zeros)
    return TrialResult(kernels=kernels, declared=declared, runs=runs)


def _refuse_operators(model: Model) -> set[str]:
    """Names of the custom operators; ModelRefused where an operator keeps its state inside the interpreter."""
    custom = set()
    for graph in model.subgraphs:
        for operator in graph.operators or ():
            name = operator_name(model, operator)
            if name in STATEFUL_OPERATORS:
                raise ModelRefused(
                    f"the operator {name} keeps state inside the runtime, where no slice can follow it; export the"
                    " model with its state as inputs and outputs"
                )
            if name == CUSTOM_OPERATOR:
                custom.add(custom_name(model, operator))
    return custom


def _bind_shapes(graph: TfliteGraph, bindings: Mapping[str, int]) -> dict[str, Shape]:
    """Every input's shape. A free length is the one that the file declares unless a binding `INPUT:AXIS` gives it."""
    shapes: dict[str, Shape] = {}
    free: dict[str, int] = {}
    for name in graph.inputs:
        tensor = graph.main.tensors[graph.index[name]]
        lengths, signature = list(ints(tensor.shape)), ints(tensor.shapeSignature) or ints(tensor.shape)
        for axis, length in enumerate(signature):
            if length < 0 or lengths[axis] <= 0:
                label = f"{name}:{axis}"
                lengths[axis] = free[label] = bindings.get(label, lengths[axis])
        shapes[name] = tuple(lengths)
    unknown = set(bindings) - set(free)
    if unknown:
        available = f"its free dimensions are {', '.join(sorted(free))}" if free else "it has no free dimensions"
        raise UsageError(f"--bind {min(unknown)}: the model knows no such dimension; {available}")
    if any(not 1 <= length < 2**31 for length in bindings.values()):
        raise UsageError("--bind: a length is at least 1")
    missing = [label for label, length in free.items() if length < 1]
    if missing:
        options = " ".join(f"--bind {label}=LENGTH" for label in missing)
        raise ModelRefused(f"the inputs' shapes are not settled; give each length: {options}")
    return shapes


def _declared_shapes(graph: TfliteGraph, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    stated = {name: ints(graph.main.tensors[index].shape) for name, index in graph.index.items()}
    return {**stated, **shapes}


def _shapes(interpreter: Any, graph: TfliteGraph) -> dict[str, Shape]:
    """Shapes of the graph's own tensors; the interpreter lists scratch tensors after them."""
    known = {
        details["name"]: tuple(int(length) for length in details["shape"])
        for details in interpreter.get_tensor_details()
    }
    return {name: known[name] for name in graph.names if name in known}


def _invoke(interpreter: Any, fill: Any) -> None:
    feeds = {
        details["name"]: fill(tuple(details["shape"]), details["dtype"]) for details in interpreter.get_input_details()
    }
    invoke(interpreter, feeds)


if __name__ == "__main__":
    main(sys.argv[1:])
