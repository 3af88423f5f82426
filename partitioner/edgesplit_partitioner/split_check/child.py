"""The child process in which cuts are run and compared: `python -m edgesplit_partitioner.split_check.child FOLDER
MEMORY`.

A model can crash or hang the runtime; here that ends only this process, and fails one boundary. The folder holds the
inputs (`samples.json`, .npy files). Each line on standard input is a `CheckJob`, which names a folder of slices beside
them; each is answered by one line, a `CheckResult`. The job `whole` comes first and stores the whole model's outputs as
files; the outputs of every other job are compared with those.
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
from edgesplit.runtime import Program, Runtime, Tensor, Tensors, run_slices
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.input_decoder import InputProgram
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit.runtime.options import Optimise
from edgesplit_partitioner.ir.prepared_model import WHOLE
from edgesplit_partitioner.onnx_format.optimise import refusal_message

EXACT: Optimise = "exact"
"""The mode in which slices are run as they were cut, without further optimisation."""
MODES: Mapping[str, tuple[Optimise, ...]] = {"onnx": ("exact", "fast")}
"""Modes to run, by slice format: `exact` as the slices were cut, `fast` with all of the runtime's optimisation. Formats
that are not listed have only the exact mode."""
SAMPLES = "samples.json"
"""Name of the file that lists the inputs' files."""


class CheckJob(msgspec.Struct, frozen=True, kw_only=True):
    """Slices to run: each lies in a folder of its own inside the job's folder, in the order in which they run."""

    folder: str
    """Name of the job's folder."""
    slices: tuple[Slice, ...]
    spec: InputSpec | None = None
    """Input spec of the input layer, where the slices have one."""
    outputs: tuple[str, ...]
    """Names of the outputs to compare, or, for the whole model, to store."""


class Difference(msgspec.Struct, frozen=True):
    """How far the outputs are from those of the whole model."""

    same: bool
    """True where they are equal bit for bit."""
    error: float | None = 0.0
    """The largest difference, relative to the output's largest absolute value, over all outputs and samples. None where
    they cannot be compared: shapes differ, or a value is a number on one side only."""
    worst: str = ""
    """Name of the output with the largest difference."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one boundary check, run in the child process."""

    refused: str = ""
    """Why the runtime did not load or run the slices; empty if it did."""
    modes: dict[str, Difference] = {}
    """Difference by mode: cut against whole. For the whole model: against a second run of it (`exact`), and the change
    by the runtime's own optimisation (`fast`). No `fast` where the engine has one mode."""


def difference(actual_tensors: Mapping[str, Tensor], expected_tensors: Mapping[str, Tensor]) -> Difference:
    """The difference of the actual tensors from the expected ones, over the names that are expected."""
    worst = Difference(True)
    for name, expected in expected_tensors.items():
        actual = actual_tensors.get(name)
        if actual is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
            return Difference(False, None, name)
        if actual.tobytes() != expected.tobytes():
            worst = worse(worst, Difference(False, relative_error(actual, expected), name))
    return worst


def relative_error(left: Tensor, right: Tensor) -> float | None:
    """The largest difference as a ratio of the largest finite absolute value of `right`; None where they cannot be
    compared."""
    actual, expected = left.astype(np.float64), right.astype(np.float64)
    finite = np.isfinite(expected)
    equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    if not np.isfinite(actual[finite]).all() or not equal[~finite].all():
        return None
    largest_difference = float(np.abs(actual[finite] - expected[finite]).max(initial=0.0))
    largest = float(np.abs(expected[finite]).max(initial=0.0))
    if not largest_difference:
        return 0.0
    return largest_difference / largest if largest else None


def worse(first: Difference, second: Difference) -> Difference:
    """The worse of the two; the first where they are equal."""
    return max(first, second, key=lambda found: (not found.same, found.error is None, found.error or 0.0))


def make_runtime(format_: str, mode: Optimise) -> Runtime:
    """The runtime for slices of this format, on one thread, as the offload server and the agent use it."""
    return OnnxRuntime(threads=1, optimise=mode) if format_ == "onnx" else DispatchingRuntime(threads=1)


def run_job(folder: Path, job: CheckJob, samples: Sequence[Tensors]) -> CheckResult:
    """Load the job's slices, run every sample in every mode, and compare the outputs; a refusal is returned, not
    raised."""
    modes: dict[str, Difference] = {}
    try:
        format_ = next((entry.format for entry in job.slices if entry.format != "input"), "onnx")
        for mode in MODES.get(format_, (EXACT,)):
            programs = {entry.name: _load_program(folder / job.folder, entry, job.spec, mode) for entry in job.slices}
            for number, sample in enumerate(samples):
                run_difference = _run_sample(folder, job, programs, sample, f"{mode}-{number}", f"exact-{number}")
                modes[mode] = worse(modes[mode], run_difference) if mode in modes else run_difference
    except MemoryError:
        return CheckResult(refused="it needs more memory than the limit for models")
    except EdgeError as error:
        return CheckResult(refused=_refusal(str(error)))
    return CheckResult(modes=modes)


def _refusal(text: str) -> str:
    """A refusal as a sentence about the model, without what the runtime reports about itself."""
    head, mark, rest = text.partition("[ONNXRuntimeError]")
    return refusal_message(mark + rest) if mark else head


def _run_sample(
    folder: Path, job: CheckJob, programs: Mapping[str, Program], sample: Tensors, run: str, exact_run: str
) -> Difference:
    """Run one sample in one mode and compare. The whole model's outputs are stored, and compared with those of its own
    exact mode."""
    outputs = {name: run_slices(programs, programs, sample)[name] for name in job.outputs}
    if job.folder != WHOLE:
        return difference(outputs, _load_outputs(folder, run, job.outputs))
    _store_outputs(folder, run, outputs)
    if run == exact_run:
        again = run_slices(programs, programs, sample)
        return difference({name: again[name] for name in job.outputs}, outputs)
    return difference(outputs, _load_outputs(folder, exact_run, job.outputs))


def _load_program(folder: Path, entry: Slice, spec: InputSpec | None, mode: Optimise) -> Program:
    if entry.format != "input":
        return make_runtime(entry.format, mode).load(entry, folder / entry.name)
    if spec is None:
        raise ModelRefused("the input layer has no input spec")
    return InputProgram(spec)


def _store_outputs(folder: Path, run: str, answers: Mapping[str, Tensor]) -> None:
    for place, value in enumerate(answers.values()):
        np.save(folder / f"{run}-{place}.npy", value, allow_pickle=False)


def _load_outputs(folder: Path, run: str, outputs: Sequence[str]) -> dict[str, Tensor]:
    return {name: np.load(folder / f"{run}-{place}.npy", allow_pickle=False) for place, name in enumerate(outputs)}


def store_samples(folder: Path, samples: Sequence[Tensors]) -> None:
    """Write the inputs to files in the folder, for all children."""
    file_names: list[dict[str, str]] = []
    for number, sample in enumerate(samples):
        files = {name: f"sample-{number}-{position}.npy" for position, name in enumerate(sample)}
        for name, file in files.items():
            np.save(folder / file, sample[name], allow_pickle=False)
        file_names.append(files)
    (folder / SAMPLES).write_bytes(msgspec.json.encode(file_names))


def load_samples(folder: Path) -> list[Tensors]:
    """Read the inputs that `store_samples` wrote."""
    file_names = msgspec.json.decode((folder / SAMPLES).read_bytes(), type=list[dict[str, str]])
    return [{name: np.load(folder / file, allow_pickle=False) for name, file in files.items()} for files in file_names]


def main(folder: Path) -> None:
    """The child: run jobs from standard input until it ends."""
    samples = load_samples(folder)
    for line in sys.stdin.buffer:
        result = run_job(folder, msgspec.json.decode(line, type=CheckJob), samples)
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
