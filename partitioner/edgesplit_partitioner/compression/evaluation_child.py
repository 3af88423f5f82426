"""The child process that answers samples: `python -m edgesplit_partitioner.compression.evaluation_child FOLDER`.

Each line on standard input is an `EvaluationJob`, answered by a line, an `EvaluationResult`. The base's outputs are
stored as files and every variant's are compared with them here, so that neither leaves the process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import answers_differ, is_right
from edgesplit.errors import EdgeError
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Tensor, Tensors
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.options import EngineOptions
from edgesplit_partitioner.sandbox.child_process import child_main
from edgesplit_partitioner.sandbox.limits import out_of_memory


class EvaluationJob(msgspec.Struct, frozen=True, kw_only=True):
    """A model to run on samples, whose files lie in the folder of its slice's name."""

    slice: Slice
    samples: tuple[dict[str, str], ...]
    """File of each input, by its name."""
    numbers: tuple[int, ...]
    """Number of each sample, by which the base's outputs are stored and found."""
    rule: AnswerRule
    base_rule: AnswerRule | None = None
    """None: this is the base, whose outputs are stored."""
    labels: tuple[int | None, ...] = ()


class Outcome(msgspec.Struct, frozen=True):
    """One sample's answer, compared with the base's."""

    differs: bool = False
    right: bool | None = None
    """Whether it is the label; None without one."""
    error: float = 0.0
    """Largest difference of an output, relative to its largest absolute value."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of each sample, in the job's order."""

    refused: str = ""
    outcomes: tuple[Outcome, ...] = ()
    run_s: float = 0.0
    """Median seconds of a run on one thread of this machine."""


def main(folder: Path) -> None:
    """Evaluate until standard input ends."""
    for line in sys.stdin.buffer:
        try:
            result = _evaluate(folder, msgspec.json.decode(line, type=EvaluationJob))
        except EdgeError as error:
            result = EvaluationResult(refused=str(error))
        except MemoryError:
            result = EvaluationResult(refused=out_of_memory())
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


def _evaluate(folder: Path, job: EvaluationJob) -> EvaluationResult:
    # As devices run it: fused further by the runtime, on one thread.
    runtime = DispatchingRuntime(setup=EngineOptions(threads=1, optimise="fast"))
    program = runtime.load(job.slice, folder / job.slice.name)
    outcomes, seconds = [], []
    for position, (number, files) in enumerate(zip(job.numbers, job.samples, strict=True)):
        sample = {name: np.load(folder / file, allow_pickle=False) for name, file in files.items()}
        start = perf_counter()
        outputs = program.run(sample)
        seconds.append(perf_counter() - start)
        label = job.labels[position] if job.labels else None
        outcomes.append(_outcome(folder, job, number, outputs, label))
    return EvaluationResult(outcomes=tuple(outcomes), run_s=float(np.median(seconds)) if seconds else 0.0)


def _outcome(folder: Path, job: EvaluationJob, number: int, outputs: Tensors, label: int | None) -> Outcome:
    """Store the base's outputs; compare a variant's with them."""
    right = None if label is None else is_right(job.rule, outputs, label)
    rule = job.base_rule or job.rule
    files = [folder / f"base-{number}-{position}.npy" for position in range(len(rule.outputs))]
    if job.base_rule is None:
        for name, file in zip(rule.outputs, files, strict=True):
            np.save(file, outputs[name], allow_pickle=False)
        return Outcome(right=right)
    base = {name: np.load(file, allow_pickle=False) for name, file in zip(rule.outputs, files, strict=True)}
    pairs = [(outputs[name], base[other]) for name, other in zip(job.rule.outputs, rule.outputs, strict=False)]
    differs = answers_differ(rule, base, outputs, their_rule=job.rule)
    return Outcome(differs=differs, right=right, error=_relative_error(pairs))


def _relative_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of a pair relative to the largest absolute value of its second; 1 where they cannot be
    compared."""
    worst = 0.0
    for ours, theirs in pairs:
        if ours.shape != theirs.shape:
            return 1.0
        largest = float(np.abs(theirs.astype(np.float64)).max(initial=0.0))
        difference = float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max(initial=0.0))
        if not np.isfinite(difference):
            return 1.0
        worst = max(worst, difference / largest if largest else float(difference > 0))
    return min(worst, 1.0)


if __name__ == "__main__":
    child_main(main)
