"""Measurement of every lossy codec on every tensor that may cross a cut: bytes, seconds on this machine, and accuracy
loss.

`measure_codecs` runs the model in child processes, as all profiling does. `with_codecs` merges its result into a
model's costs; without it a plan uses lossless codecs only.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from edgesplit.errors import UsageError
from edgesplit.input_spec import INPUT_LAYER, InputSpec
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import Slice, TensorSpec
from edgesplit_partitioner.costs.model import CodecCost, TensorCost
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
        loss = {"loss": chosen.loss, "confirmed_loss": confirmed.loss}
        measurements[codec] = CodecMeasurement(
            cost=_cost(record.bytes, record.encode_s, record.decode_s, **loss),
            packed=_cost(record.packed_bytes, record.packed_encode_s, record.packed_decode_s, **loss),
            chosen=chosen,
            confirmed=confirmed,
        )
    return measurements


def _cost(sizes: list[int], encode_s: list[float], decode_s: list[float], **loss: float) -> CodecCost:
    return CodecCost(
        bytes=round(statistics.median(sizes)),
        encode_s={MEASURED_TIER: statistics.median(encode_s)},
        decode_s={MEASURED_TIER: statistics.median(decode_s)},
        **loss,
    )
