"""The child process that checking happens in: `python -m edgesplit_partitioner.split_check.child FOLDER MEMORY`.

A model can crash or hang the runtime; here it takes only this process with it, and one boundary. The folder holds the
inputs (`samples.json`, .npy files). Each line on standard input is a `Job`: the name of a folder beside them, with
slices in it; each is answered by one line, a `Found`. The job `whole` comes first and leaves the whole's answers
behind as files; every other is compared with those.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edgesplit.errors import EdgeError, ModelRefused
from edgesplit.input_spec import InputSpec
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Program, Runtime, Tensor, Tensors, execute
from edgesplit.runtime.dispatch import EngineByFormat
from edgesplit.runtime.input_decoder import InputProgram
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit.runtime.options import Optimise
from edgesplit_partitioner.onnx_format.optimise import why_refused
from edgesplit_partitioner.sandbox.limits import confine

EXACT: Optimise = "exact"
MODES: Mapping[str, tuple[Optimise, ...]] = {"onnx": ("exact", "fast")}
"""By slice format: as they were cut, and with all of the runtime's optimisation. Other engines have one mode."""
WHOLE = "whole"
SAMPLES = "samples.json"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Slices that lie in one folder, each in a folder of its own, in the order in which they run."""

    folder: str
    slices: tuple[Slice, ...]
    spec: InputSpec | None = None
    outputs: tuple[str, ...]
    """To compare, or to keep."""


class Difference(msgspec.Struct, frozen=True):
    """How far answers are from those of the whole."""

    same: bool
    """Bit for bit."""
    error: float | None = 0.0
    """The largest difference, relative to the output's largest absolute value, over all outputs and samples.
    None where they cannot be compared: shapes differ, or one is a number and the other is not."""
    worst: str = ""
    """The output that it was found in."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a job."""

    refused: str = ""
    """Why the runtime did not load or run the slices; empty if it did."""
    modes: dict[str, Difference] = {}
    """By mode: cut against whole. For the whole itself: against a second run of it (`exact`), and what the runtime's
    own optimisation changes (`fast`). No `fast` where the engine has one mode."""


def difference(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Difference:
    """How far `got` is from `wanted`, whose names count."""
    worst = Difference(True)
    for name, right in wanted.items():
        left = got.get(name)
        if left is None or left.shape != right.shape or left.dtype != right.dtype:
            return Difference(False, None, name)
        if left.tobytes() != right.tobytes():
            worst = joined(worst, Difference(False, relative_error(left, right), name))
    return worst


def relative_error(left: Tensor, right: Tensor) -> float | None:
    """The largest difference as a part of the largest finite absolute value of `right`; None: not to be compared."""
    one, other = left.astype(np.float64), right.astype(np.float64)
    finite = np.isfinite(other)
    alike = (one == other) | (np.isnan(one) & np.isnan(other))
    if not np.isfinite(one[finite]).all() or not alike[~finite].all():
        return None
    apart = float(np.abs(one[finite] - other[finite]).max(initial=0.0))
    largest = float(np.abs(other[finite]).max(initial=0.0))
    if not apart:
        return 0.0
    return apart / largest if largest else None


def joined(one: Difference, other: Difference) -> Difference:
    """The worse of the two; the first of equals."""
    return max(one, other, key=lambda found: (not found.same, found.error is None, found.error or 0.0))


def engine(format_: str, mode: Optimise) -> Runtime:
    """What runs slices of this format, on one thread, as the offload server and the agent do."""
    return OnnxRuntime(threads=1, optimise=mode) if format_ == "onnx" else EngineByFormat(threads=1)


def do(folder: Path, job: Job, samples: Sequence[Tensors]) -> Found:
    """Load the job's slices, run every sample, compare."""
    modes: dict[str, Difference] = {}
    try:
        format_ = next((one.format for one in job.slices if one.format != "input"), "onnx")
        for mode in MODES.get(format_, (EXACT,)):
            programs = {one.name: _program(folder / job.folder, one, job.spec, mode) for one in job.slices}
            for number, sample in enumerate(samples):
                found = _one_run(folder, job, programs, sample, f"{mode}-{number}", f"exact-{number}")
                modes[mode] = joined(modes[mode], found) if mode in modes else found
    except MemoryError:
        return Found(refused="it needs more memory than a model may have here")
    except EdgeError as error:
        return Found(refused=_plain(str(error)))
    return Found(modes=modes)


def _plain(text: str) -> str:
    """A refusal, without what the runtime says about itself."""
    head, mark, rest = text.partition("[ONNXRuntimeError]")
    return why_refused(mark + rest) if mark else head


def _one_run(
    folder: Path, job: Job, programs: Mapping[str, Program], sample: Tensors, mine: str, exact: str
) -> Difference:
    """One sample in one mode. The whole keeps its answers and is compared with its own exact ones."""
    answers = {name: execute(programs, programs, sample)[name] for name in job.outputs}
    if job.folder != WHOLE:
        return difference(answers, _kept(folder, mine, job.outputs))
    _keep(folder, mine, answers)
    if mine == exact:
        again = execute(programs, programs, sample)
        return difference({name: again[name] for name in job.outputs}, answers)
    return difference(answers, _kept(folder, exact, job.outputs))


def _program(folder: Path, one: Slice, spec: InputSpec | None, mode: Optimise) -> Program:
    if one.format != "input":
        return engine(one.format, mode).load(one, folder / one.name)
    if spec is None:
        raise ModelRefused("the input layer has no input spec")
    return InputProgram(spec)


def _keep(folder: Path, run: str, answers: Mapping[str, Tensor]) -> None:
    for place, value in enumerate(answers.values()):
        np.save(folder / f"{run}-{place}.npy", value, allow_pickle=False)


def _kept(folder: Path, run: str, outputs: Sequence[str]) -> dict[str, Tensor]:
    return {name: np.load(folder / f"{run}-{place}.npy", allow_pickle=False) for place, name in enumerate(outputs)}


def store_samples(folder: Path, samples: Sequence[Tensors]) -> None:
    """The inputs as files, for every child."""
    listed: list[dict[str, str]] = []
    for number, sample in enumerate(samples):
        files = {name: f"sample-{number}-{place}.npy" for place, name in enumerate(sample)}
        for name, file in files.items():
            np.save(folder / file, sample[name], allow_pickle=False)
        listed.append(files)
    (folder / SAMPLES).write_bytes(msgspec.json.encode(listed))


def load_samples(folder: Path) -> list[Tensors]:
    """What `store_samples` left."""
    listed = msgspec.json.decode((folder / SAMPLES).read_bytes(), type=list[dict[str, str]])
    return [{name: np.load(folder / file, allow_pickle=False) for name, file in files.items()} for files in listed]


def main(folder: Path, memory_bytes: int) -> None:
    """Answer jobs until standard input ends."""
    confine(memory_bytes)
    samples = load_samples(folder)
    for line in sys.stdin.buffer:
        found = do(folder, msgspec.json.decode(line, type=Job), samples)
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
