"""Measurement of every lossy codec on every tensor that may cross a cut: bytes, seconds on this machine, and accuracy
loss.

`measure_codecs` runs the model in child processes, as all profiling does. `with_codecs` merges its result into a
model's costs; without it a plan uses lossless codecs only. `count_changes` compares answers on many samples that chose
nothing, for the few tensors that a plan would send by a lossy codec.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.errors import UsageError
from edgesplit.input_spec import INPUT_LAYER, InputSpec
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import Slice, TensorSpec
from edgesplit_partitioner.costs.model import ChangeCounts, CodecCost, TensorCost
from edgesplit_partitioner.ir.graph import Layer, LayerGraph
from edgesplit_partitioner.ir.prepared_model import Boundary, PreparedModel
from edgesplit_partitioner.profiling.codec_loss import CodecLoss, aggregate_loss, split_halves
from edgesplit_partitioner.profiling.codecs_child import JOB_FILE, RECORDS_FILE, CodecCase, CodecJob, CodecRecord
from edgesplit_partitioner.profiling.layers import MEASURED_TIER, Sample, feeds_for, run_steps, write_sample

BATCH_BYTES = 256 << 20
"""Weights of the slices that are on disk at once while tensors are measured."""
LIVE_BYTES = 1 << 30
"""Limit of the bytes of all samples' tensors that are on disk at once; samples beyond it are not used."""
CHILD = "edgesplit_partitioner.profiling.codecs_child"
"""Module of the child process."""


class CodecMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one base codec on one tensor."""

    cost: CodecCost
    """Cost in an uncompressed request."""
    packed: CodecCost
    """Cost in a compressed request."""
    chosen: CodecLoss
    """Loss over the half of the samples by which codecs are chosen."""
    confirmed: CodecLoss
    """Loss over the other half."""


class AnswerChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that lossy codecs change, each alone on its tensor."""

    tensors: dict[str, dict[str, int]] = {}
    """Samples whose answer changes, by tensor and base codec."""
    count: int = 0
    """Number of samples."""


@dataclass(frozen=True, slots=True)
class CodecMeasurements:
    """Measurements of every lossy codec on every tensor that may be sent by one."""

    tensors: dict[str, dict[str, CodecMeasurement]] = field(default_factory=dict)
    """By tensor and base codec."""
    count: int = 0
    """Number of samples that were used."""


def measure_codecs(
    model: PreparedModel,
    graph: LayerGraph,
    *,
    spec: InputSpec | None = None,
    samples: Sequence[Sample] = (),
    labels: Sequence[int | None] = (),
) -> CodecMeasurements:
    """Measure every lossy codec on every tensor between layers; empty with fewer than two samples, since one half must
    confirm. UsageError where labels and samples differ in number.

    `labels` are the classes of the samples, where they are known.
    """
    if labels and len(labels) != len(samples):
        raise UsageError(f"{len(labels)} labels for {len(samples)} samples")
    cases = _cases(model, graph)
    count = min(len(samples), _max_samples(model, cases))
    if count < 2 or not cases:
        return CodecMeasurements()
    feeds = [feeds_for(sample, spec) for sample in samples[:count]]
    with tempfile.TemporaryDirectory(prefix="edgesplit-codecs-") as path:
        folder = Path(path)
        saved_names = _saved_tensors(model, cases)
        job = CodecJob(count=count, keep=saved_names, answers=_output_names(model), labels=tuple(labels[:count]))
        _run_whole_model(folder, model, job, feeds)
        records: dict[str, dict[str, CodecRecord]] = {}
        for batch in _written_batches(folder, model, cases):
            (folder / JOB_FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(job, cases=batch)))
            run_steps(CHILD, folder)
            batch_records = msgspec.json.decode(
                (folder / RECORDS_FILE).read_bytes(), type=dict[str, dict[str, CodecRecord]]
            )
            records.update(batch_records)
    return CodecMeasurements(
        {path: _measurements(batch_records, count) for path, batch_records in records.items()}, count
    )


def count_changes(
    model: PreparedModel,
    graph: LayerGraph,
    tensors: Mapping[str, TensorCost],
    rule: AnswerRule,
    *,
    spec: InputSpec | None = None,
    samples: Sequence[Sample] = (),
) -> AnswerChanges:
    """On each of these tensors, with each lossy codec that its costs have: the number of samples whose answer the codec
    changes. The samples must have chosen nothing."""
    clips = {name: lossy_clips(cost) for name, cost in tensors.items()}
    cases = [case for case in _cases(model, graph) if clips.get(case.tensor)]
    counts = {case.tensor: dict.fromkeys(clips[case.tensor], 0) for case in cases}
    room = _max_samples(model, cases)
    for start in range(0, len(samples) if cases else 0, room):
        feeds = [feeds_for(sample, spec) for sample in samples[start : start + room]]
        with tempfile.TemporaryDirectory(prefix="edgesplit-codecs-") as path:
            folder = Path(path)
            answers = _output_names(model)
            job = CodecJob(count=len(feeds), keep=_saved_tensors(model, cases), answers=answers, answer=rule)
            _run_whole_model(folder, model, job, feeds)
            for batch in _written_batches(folder, model, cases):
                batch = tuple(msgspec.structs.replace(case, clips=clips[case.tensor]) for case in batch)
                (folder / JOB_FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(job, cases=batch)))
                run_steps(CHILD, folder)
                found = msgspec.json.decode((folder / RECORDS_FILE).read_bytes(), type=dict[str, dict[str, int]])
                for tensor, by_codec in found.items():
                    for codec, changed in by_codec.items():
                        counts[tensor][codec] += changed
    return AnswerChanges(tensors=counts, count=len(samples))


def lossy_clips(cost: TensorCost) -> dict[str, float]:
    """The lossy codecs of a tensor, each with its clip."""
    names = {name: boundary_codecs.split_codec_name(name)[0] for name in cost.codecs}
    return {base: cost.codecs[name].clip for name, base in names.items() if base in boundary_codecs.LOSSY}


def with_changes(tensors: Mapping[str, TensorCost], measured: AnswerChanges) -> dict[str, TensorCost]:
    """The tensors' costs with the answers that their codecs change on samples that chose nothing."""
    merged = dict(tensors)
    for name, by_codec in measured.tensors.items():
        if name not in merged:
            continue
        codecs = dict(merged[name].codecs)
        for codec, cost in codecs.items():
            changed = by_codec.get(boundary_codecs.split_codec_name(codec)[0])
            if changed is not None:
                counts = msgspec.structs.replace(
                    cost.changes or ChangeCounts(), confirmed=changed, confirming_samples=measured.count
                )
                codecs[codec] = msgspec.structs.replace(cost, changes=counts)
        merged[name] = msgspec.structs.replace(merged[name], codecs=codecs)
    return merged


def with_codecs(tensors: Mapping[str, TensorCost], measured: CodecMeasurements) -> dict[str, TensorCost]:
    """The tensors' costs with those of the lossy codecs added to the lossless ones."""
    merged = dict(tensors)
    for name, by_codec in measured.tensors.items():
        if name in merged:
            lossy = {codec: measurement.cost for codec, measurement in by_codec.items()}
            packed = {
                codec + boundary_codecs.ZSTD_SUFFIX: measurement.packed for codec, measurement in by_codec.items()
            }
            merged[name] = msgspec.structs.replace(merged[name], codecs={**merged[name].codecs, **lossy, **packed})
    return merged


@dataclass(frozen=True, slots=True)
class _PendingCase:
    """A tensor and the layers that depend on it, which are run again as one slice."""

    tensor: str
    members: tuple[Layer, ...]
    boundary: Boundary
    weight_bytes: int


def _cases(model: PreparedModel, graph: LayerGraph) -> list[_PendingCase]:
    """Every float tensor that a layer reads. A tensor is left out where the names of its scale and zero point are taken
    by other tensors."""
    read = dict.fromkeys(name for layer in model.graph.layers for name in layer.reads)
    return [
        _case(model, name)
        for name in read
        if boundary_codecs.lossy_codecs(model.types[name].datatype)
        and name in graph.tensors
        and not {boundary_codecs.scale_name(name), boundary_codecs.zero_point_name(name)} & graph.tensors.keys()
    ]


def _case(model: PreparedModel, tensor: str) -> _PendingCase:
    """The slice of all layers that depend on the tensor. Its inputs are tensors saved from the run of the whole model,
    its outputs the model's."""
    members: list[Layer] = []
    affected = {tensor}
    for layer in model.graph.layers:
        if not affected.isdisjoint(layer.reads):
            members.append(layer)
            affected.update(layer.writes)
    written = {name for layer in members for name in layer.writes}
    input_names = dict.fromkeys(name for layer in members for name in layer.reads if name not in written)
    outputs = tuple(output for output in model.outputs if output.name in written)
    boundary = Boundary(tuple(_spec(model, name) for name in input_names), outputs)
    return _PendingCase(tensor, tuple(members), boundary, sum(layer.weight_bytes for layer in members))


def _spec(model: PreparedModel, name: str) -> TensorSpec:
    return TensorSpec(name, model.types[name].datatype, model.types[name].shape)


def _output_names(model: PreparedModel) -> tuple[str, ...]:
    return tuple(output.name for output in model.outputs)


def _saved_tensors(model: PreparedModel, cases: Iterable[_PendingCase]) -> tuple[str, ...]:
    """Names of the tensors to save from the run of the whole model: inputs of the cases, and the model's outputs."""
    needed = dict.fromkeys(tensor.name for case in cases for tensor in case.boundary.inputs)
    return tuple(dict.fromkeys([*needed, *_output_names(model)]))


def _max_samples(model: PreparedModel, cases: Sequence[_PendingCase]) -> int:
    """Number of samples whose tensors fit into `LIVE_BYTES`; at least two."""
    sample_bytes = sum(model.types[name].bytes for name in _saved_tensors(model, cases))
    return max(2, LIVE_BYTES // max(sample_bytes, 1))


def _run_whole_model(
    folder: Path, model: PreparedModel, job: CodecJob, feeds: Sequence[Mapping[str, np.ndarray]]
) -> None:
    """Run the whole model on every sample, with all tensors to be saved as its outputs."""
    input_names = {tensor.name for tensor in model.inputs}
    wanted = tuple(_spec(model, name) for name in job.keep if name not in input_names)
    layers = tuple(layer for layer in model.graph.layers if layer.name != INPUT_LAYER or layer.nodes)
    whole = _write_slice(folder, model, "whole", layers, Boundary(tuple(model.inputs), wanted))
    files = tuple(write_sample(folder, number, feed) for number, feed in enumerate(feeds))
    (folder / JOB_FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(job, whole=whole, samples=files)))
    run_steps(CHILD, folder)


def _written_batches(
    folder: Path, model: PreparedModel, cases: Sequence[_PendingCase]
) -> Iterator[tuple[CodecCase, ...]]:
    """The cases with their slices written to disk, in batches whose weights fit into `BATCH_BYTES`; a batch's files are
    deleted after it."""
    batch: list[CodecCase] = []
    batch_bytes = 0
    for number, case in enumerate(cases):
        slice_ = _write_slice(folder, model, f"case-{number}", case.members, case.boundary)
        batch.append(CodecCase(case.tensor, slice_))
        batch_bytes += case.weight_bytes
        if batch_bytes >= BATCH_BYTES or number == len(cases) - 1:
            yield tuple(batch)
            for written_case in batch:
                for file in (folder / written_case.slice.name).iterdir():
                    file.unlink()
            batch, batch_bytes = [], 0


def _write_slice(folder: Path, model: PreparedModel, name: str, members: Sequence[Layer], boundary: Boundary) -> Slice:
    """Write a slice with these layers to the folder `folder / name`; returns its manifest entry."""
    (folder / name).mkdir()
    for file, chunks in model.slice_files(members, boundary, frozenset()).items():
        (folder / name / file).write_bytes(b"".join(chunks))
    layers = tuple(layer.name for layer in members)
    return Slice(name, model.format, layers, boundary.inputs, boundary.outputs, kernels=model.kernels)


def _measurements(records: Mapping[str, CodecRecord], count: int) -> dict[str, CodecMeasurement]:
    """Medians and losses of one tensor's codecs; codecs that do not shrink it are left out."""
    whole = records[boundary_codecs.RAW].losses
    measurements = {}
    for codec, record in records.items():
        chosen, confirmed = (aggregate_loss(record.losses, whole, positions) for positions in split_halves(count))
        # A codec may send as many bytes as raw for some sample: its guard fell back to raw, or scale and zero point
        # weigh more than what is saved. That holds for raw itself too.
        sizes = zip(record.bytes, records[boundary_codecs.RAW].bytes, strict=True)
        if chosen is None or confirmed is None or any(size >= raw_bytes for size, raw_bytes in sizes):
            continue
        # Every sample of this measurement chooses; answers are confirmed on others (`count_changes`).
        changes = ChangeCounts(chosen=sum(sample.changed for sample in record.losses), choosing_samples=count)
        loss = CodecCost(bytes=0, loss=chosen.loss, confirmed_loss=confirmed.loss, clip=record.clip, changes=changes)
        measurements[codec] = CodecMeasurement(
            cost=_with_sizes(loss, record.bytes, record.encode_s, record.decode_s),
            packed=_with_sizes(loss, record.packed_bytes, record.packed_encode_s, record.packed_decode_s),
            chosen=chosen,
            confirmed=confirmed,
        )
    return measurements


def _with_sizes(loss: CodecCost, sizes: list[int], encode_s: list[float], decode_s: list[float]) -> CodecCost:
    """A codec's loss with its sizes and seconds in one kind of request."""
    return msgspec.structs.replace(
        loss,
        bytes=round(statistics.median(sizes)),
        encode_s={MEASURED_TIER: statistics.median(encode_s)},
        decode_s={MEASURED_TIER: statistics.median(decode_s)},
    )
