"""Answers of models on samples: the base's are stored once, and each variant's are compared with them, in a confined
child process (`evaluation_child`)."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import InputSpec
from edgesplit.release.lineage import VariantEvidence
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Tensor
from edgesplit_partitioner.compression.evaluation_child import EvaluationJob, EvaluationResult, Outcome
from edgesplit_partitioner.compression.gate import weigh
from edgesplit_partitioner.ir.prepared_model import PreparedModel, whole_model_chunks, whole_model_slice
from edgesplit_partitioner.profiling.layers import Sample, feeds_for, write_sample
from edgesplit_partitioner.sandbox.child_process import ChildProcess
from edgesplit_partitioner.sandbox.limits import measurement_limits

CHILD: Final = "edgesplit_partitioner.compression.evaluation_child"
LIMIT_S: Final = 3600.0
"""Time limit of one evaluation, and of the processor seconds of all together on each core."""


class StoredSamples(msgspec.Struct, frozen=True):
    """Samples as files in a work folder, with the digest of their contents."""

    files: tuple[dict[str, str], ...]
    """Of each sample: file by input name."""
    digests: tuple[str, ...]
    labels: tuple[int | None, ...] = ()

    def digest(self, numbers: Iterable[int]) -> str:
        """SHA-256 of the samples with these numbers, in any order, with their labels."""
        lines = sorted(f"{self.digests[number]} {self.labels[number] if self.labels else ''}" for number in numbers)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_labels(samples: Sequence[Sample], labels: Sequence[int | None]) -> None:
    """UsageError where there are labels, but not one for each sample."""
    if labels and len(labels) != len(samples):
        raise UsageError(f"{len(labels)} labels for {len(samples)} samples")


def are_labelled(labels: Sequence[int | None], rule: AnswerRule) -> bool:
    """Whether accuracy can be measured: every sample has a label, and the answer is a class."""
    return bool(labels) and None not in labels and rule.kind == "class"


def store_samples(
    folder: Path, samples: Sequence[Sample], spec: InputSpec | None, labels: Sequence[int | None]
) -> StoredSamples:
    """Write the samples to files in the folder. Labels count only where all samples have one."""
    folder.mkdir(parents=True, exist_ok=True)
    files, digests = [], []
    for number, sample in enumerate(samples):
        feeds = feeds_for(sample, spec)
        files.append({name: f"{folder.name}/{file}" for name, file in write_sample(folder, number, feeds).items()})
        digests.append(_digest(feeds) if not isinstance(sample, bytes) else hashlib.sha256(sample).hexdigest())
    known = tuple(labels) if labels and None not in labels else ()
    return StoredSamples(tuple(files), tuple(digests), known)


class Evaluator:
    """Runs models on samples in a child process, which is killed on exit."""

    def __init__(self, folder: Path, base: PreparedModel, rule: AnswerRule, samples: StoredSamples) -> None:
        self._folder, self._rule, self._samples = folder, rule, samples
        self._base = base
        size = sum(len(chunk) for chunks in whole_model_chunks(base).values() for chunk in chunks)
        self._child = ChildProcess(CHILD, folder, limits=measurement_limits(size, folder, LIMIT_S))
        self._base_right: dict[int, bool | None] = {}
        self.base_run_s = 0.0
        """Median seconds of a run of the base on this machine; 0 before the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._child.stop()

    def evidence(self, numbers: Sequence[int], outcomes: Sequence[Outcome], delta: float) -> VariantEvidence:
        """The evidence in a variant's outcomes on the samples with these numbers."""
        labelled = bool(self._samples.labels)
        return weigh(
            [outcome.differs for outcome in outcomes],
            [bool(self._base_right[number]) for number in numbers] if labelled else (),
            [bool(outcome.right) for outcome in outcomes] if labelled else (),
            delta=delta,
            samples_digest=self._samples.digest(numbers),
        )

    def outcomes_of_file(self, file: Path, numbers: Sequence[int]) -> EvaluationResult:
        """A variant as a file with the base's inputs and outputs, on the samples with these numbers. ModelRefused where
        the runtime does not load or run it."""
        name = file.stem
        target = self._folder / name
        target.mkdir(exist_ok=True)
        (target / next(iter(whole_model_chunks(self._base)))).write_bytes(file.read_bytes())
        whole = msgspec.structs.replace(whole_model_slice(self._base), name=name, kernels="default")
        try:
            return self._against_base(whole, numbers, self._rule, self._samples)
        finally:
            shutil.rmtree(target)  # a search tries many

    def outcomes(
        self, model: PreparedModel, numbers: Sequence[int], rule: AnswerRule, samples: StoredSamples
    ) -> EvaluationResult:
        """A variant that was prepared, with its own inputs, on the samples with these numbers."""
        return self._against_base(self._written(model, "variant"), numbers, rule, samples)

    def _against_base(
        self, whole: Slice, numbers: Sequence[int], rule: AnswerRule, samples: StoredSamples
    ) -> EvaluationResult:
        self._run_base([number for number in numbers if number not in self._base_right])
        return self._ask(whole, numbers, rule, samples, self._rule)

    def _run_base(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        whole = self._written(self._base, "base")
        result = self._ask(whole, numbers, self._rule, self._samples, None)
        self._base_right |= {number: outcome.right for number, outcome in zip(numbers, result.outcomes, strict=True)}
        self.base_run_s = self.base_run_s or result.run_s

    def _ask(
        self, whole: Slice, numbers: Sequence[int], rule: AnswerRule, samples: StoredSamples, base: AnswerRule | None
    ) -> EvaluationResult:
        job = EvaluationJob(
            slice=whole,
            samples=tuple(samples.files[number] for number in numbers),
            numbers=tuple(numbers),
            rule=rule,
            base_rule=base,
            labels=tuple(samples.labels[number] for number in numbers) if samples.labels else (),
        )
        result = msgspec.json.decode(self._child.ask(msgspec.json.encode(job), LIMIT_S), type=EvaluationResult)
        if result.refused:
            raise ModelRefused(result.refused)
        return result

    def _written(self, model: PreparedModel, name: str) -> Slice:
        """The model as a slice whose files are in the folder of its name."""
        (self._folder / name).mkdir(exist_ok=True)
        for file, chunks in whole_model_chunks(model).items():
            with (self._folder / name / file).open("wb") as target:
                target.writelines(chunks)
        return msgspec.structs.replace(whole_model_slice(model), name=name)


def mean_error(outcomes: Sequence[Outcome]) -> float:
    """Mean output error of the samples."""
    return sum(outcome.error for outcome in outcomes) / max(len(outcomes), 1)


def _digest(feeds: Mapping[str, Tensor]) -> str:
    """SHA-256 of a sample that is tensors: names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(feeds):
        tensor = feeds[name]
        found.update(f"{name} {tensor.dtype.str} {tensor.shape}\n".encode())
        found.update(tensor.tobytes())
    return found.hexdigest()
