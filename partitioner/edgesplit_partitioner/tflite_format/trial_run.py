"""LiteRT meets a stranger's model in a child process: a crash, a hang, a memory hog is an answer, not our end.

`try_model` (the parent's side) gives the shape of every tensor and the kernels that the model runs on. The child is
`python -m edgesplit_partitioner.tflite_format.trial_run FOLDER MEMORY`: it reads and writes files in that folder, no
others.
"""

from __future__ import annotations

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

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.release.manifest import Kernels
from edgesplit.runtime.tflite import invoke, litert, open_interpreter
from edgesplit_partitioner.sandbox.exit_status import check_not_interrupted
from edgesplit_partitioner.sandbox.limits import confine
from edgesplit_partitioner.tflite_format.flatbuffer import (
    CUSTOM,
    EDGE_TPU,
    KEEPS_STATE,
    Model,
    custom_name,
    ints,
    operator_name,
    pack,
    read_model,
)
from edgesplit_partitioner.tflite_format.graph import TfliteGraph, part

CHILD = (sys.executable, "-m", "edgesplit_partitioner.tflite_format.trial_run")
TIMEOUT_S = 300.0
MEMORY_BYTES = 16 * 2**30
"""Address space of the child, beyond eight times the model."""
GIVEN, PLAIN, ASKED, ANSWER = "given.tflite", "plain.tflite", "asked.json", "answer.json"

Shape = tuple[int, ...]


class Trial(msgspec.Struct, frozen=True):
    """What the child found."""

    refused: str = ""
    usage: str = ""
    """What the caller asked wrongly."""
    kernels: Kernels = "default"
    compiled: bool = False
    """For an Edge TPU: it cannot run here, and its shapes are what the file says."""
    declared: dict[str, Shape] = {}
    """Shapes once memory was laid out, by tensor name."""
    runs: list[dict[str, Shape]] = []
    """Shapes after each trial run."""


def try_model(raw: bytes, bindings: Mapping[str, int]) -> Trial:
    """The shapes and the kernels of the model in `raw`; ModelRefused where it is none, cannot run, crashes or hangs."""
    litert()
    with tempfile.TemporaryDirectory(prefix="edgesplit-") as name:
        folder = Path(name)
        (folder / GIVEN).write_bytes(raw)
        (folder / ASKED).write_bytes(msgspec.json.encode(dict(bindings)))
        answer = _ask(folder, MEMORY_BYTES + 8 * len(raw))
    if answer.usage:
        raise UsageError(answer.usage)
    if answer.refused:
        raise ModelRefused(answer.refused)
    return answer


def _ask(folder: Path, memory: int) -> Trial:
    command = [*CHILD, str(folder), str(memory)]
    try:
        child = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ModelRefused(f"LiteRT was not done with the model after {TIMEOUT_S:.0f} s") from error
    check_not_interrupted(child.returncode)
    if child.returncode < 0:
        raise ModelRefused(f"LiteRT crashed on this model ({signal.Signals(-child.returncode).name})")
    if child.returncode or not (folder / ANSWER).exists():
        last = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no word why"]
        raise ModelRefused(f"LiteRT could not look at the model: {last[0][:200]}")
    return msgspec.json.decode((folder / ANSWER).read_bytes(), type=Trial)


# The child's side.


def main(arguments: list[str]) -> None:
    """Look at the model in the folder and write the answer there."""
    folder, memory = Path(arguments[0]), int(arguments[1])
    confine(memory)
    try:
        answer = _look(folder)
    except MemoryError:
        answer = Trial(refused=f"the model needs more than {memory / 2**30:.0f} GiB of memory")
    except UsageError as error:
        answer = Trial(usage=str(error))
    except (ModelRefused, RuntimeError, ValueError) as error:
        answer = Trial(refused=why_refused(str(error)))
    (folder / ANSWER).write_bytes(msgspec.json.encode(answer))


def why_refused(text: str) -> str:
    """LiteRT's message as a sentence about the model."""
    unknown = re.search(r"Encountered unresolved custom op: (.+?)\.?\s*See instructions", text)
    if unknown:
        return f"unknown operator {unknown[1]!r}: LiteRT does not have this custom operator"
    missing = re.search(r"Didn't find op for builtin opcode '(\w+)' version '(\d+)'", text)
    if missing:
        return f"unknown operator {missing[1]!r} (version {missing[2]}): this LiteRT does not have it"
    return text


def _look(folder: Path) -> Trial:
    raw = (folder / GIVEN).read_bytes()
    asked = msgspec.json.decode((folder / ASKED).read_bytes(), type=dict[str, int])
    graph = TfliteGraph(read_model(raw))
    custom = _refuse_operators(graph.model)
    shapes = _bound(graph, asked)
    if EDGE_TPU in custom:
        return Trial(compiled=True, declared=_file_shapes(graph, shapes))
    path = folder / PLAIN
    path.write_bytes(b"".join(pack(part(graph, range(len(graph.main.operators)), graph.inputs, graph.outputs))))
    interpreter, _ = open_interpreter(path, kernels="plain", shapes=shapes)
    declared = _shapes(interpreter, graph)
    runs = []
    for make in (np.zeros, np.ones):  # what differs between the two depends on the data
        _invoke(interpreter, make)
        runs.append(_shapes(interpreter, graph))
    usual, kernels = open_interpreter(path, shapes=shapes)
    _invoke(usual, np.zeros)
    return Trial(kernels=kernels, declared=declared, runs=runs)


def _refuse_operators(model: Model) -> set[str]:
    """Names of the custom operators; ModelRefused where something keeps its state out of the tensors' sight."""
    custom = set()
    for graph in model.subgraphs:
        for operator in graph.operators or ():
            name = operator_name(model, operator)
            if name in KEEPS_STATE:
                raise ModelRefused(
                    f"the operator {name} keeps state inside the runtime, where no slice can follow it; export the"
                    " model with its state as inputs and outputs"
                )
            if name == CUSTOM:
                custom.add(custom_name(model, operator))
    return custom


def _bound(graph: TfliteGraph, asked: Mapping[str, int]) -> dict[str, Shape]:
    """Every input's shape. A free length is what the file runs with unless it is asked for by `INPUT:AXIS`."""
    shapes: dict[str, Shape] = {}
    free: dict[str, int] = {}
    for name in graph.inputs:
        tensor = graph.main.tensors[graph.index[name]]
        lengths, signature = list(ints(tensor.shape)), ints(tensor.shapeSignature) or ints(tensor.shape)
        for axis, length in enumerate(signature):
            if length < 0 or lengths[axis] <= 0:
                place = f"{name}:{axis}"
                lengths[axis] = free[place] = asked.get(place, lengths[axis])
        shapes[name] = tuple(lengths)
    unknown = set(asked) - set(free)
    if unknown:
        choice = f"its free dimensions are {', '.join(sorted(free))}" if free else "it has no free dimensions"
        raise UsageError(f"--bind {min(unknown)}: the model knows no such dimension; {choice}")
    if any(not 1 <= length < 2**31 for length in asked.values()):
        raise UsageError("--bind: a length is at least 1")
    missing = [place for place, length in free.items() if length < 1]
    if missing:
        words = " ".join(f"--bind {place}=LENGTH" for place in missing)
        raise ModelRefused(f"the inputs' shapes are not settled; give each length: {words}")
    return shapes


def _file_shapes(graph: TfliteGraph, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    stated = {name: ints(graph.main.tensors[index].shape) for name, index in graph.index.items()}
    return {**stated, **shapes}


def _shapes(interpreter: Any, graph: TfliteGraph) -> dict[str, Shape]:
    """Of the graph's own tensors: the interpreter lists scratch tensors behind them."""
    known = {one["name"]: tuple(int(length) for length in one["shape"]) for one in interpreter.get_tensor_details()}
    return {name: known[name] for name in graph.names if name in known}


def _invoke(interpreter: Any, make: Any) -> None:
    feeds = {one["name"]: make(tuple(one["shape"]), one["dtype"]) for one in interpreter.get_input_details()}
    invoke(interpreter, feeds)


if __name__ == "__main__":
    main(sys.argv[1:])
