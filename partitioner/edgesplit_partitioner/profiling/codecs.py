"""What every codec costs on every tensor that may cross a cut: bytes, seconds here, and what it does to the answers.

`measure_codecs` runs in child processes, as all measuring does. What it gives belongs into a model's costs
(`with_codecs`); without it a plan knows lossless ways of sending only.
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
from edgesplit_partitioner.profiling.codec_loss import CodecLoss, halves, summed_up
from edgesplit_partitioner.profiling.codecs_child import JOB, RECORDS, Case, CodecRecord, Job
from edgesplit_partitioner.profiling.layers import HERE, Progress, Sample, feeds_of, run_child

BATCH_BYTES = 256 << 20
"""Weights that lie in files at once while tensors are tried."""
LIVE_BYTES = 1 << 30
"""Of all samples' tensors that lie in files at once; more samples are not used."""
MODULE = "edgesplit_partitioner.profiling.codecs_child"


class CodecMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """One base codec on one tensor."""

    cost: CodecCost
    packed: CodecCost
    """The same in a compressed request."""
    chosen: CodecLoss
    """By the half of the samples that choices are made by."""
    confirmed: CodecLoss
    """By the other half."""


@dataclass(frozen=True, slots=True)
class CodecMeasures:
    """Every lossy codec on every tensor that may travel by one."""

    tensors: dict[str, dict[str, CodecMeasure]] = field(default_factory=dict)
    """By tensor and base codec."""
    count: int = 0
    """Samples that were used."""


def measure_codecs(
    model: PreparedModel,
    graph: LayerGraph,
    *,
    spec: InputSpec | None = None,
    samples: Sequence[Sample] = (),
    labels: Sequence[int | None] = (),
    progress: Progress | None = None,
) -> CodecMeasures:
    """Every lossy codec on every tensor between layers; none without two samples at least: one half must confirm.

    `labels` are the classes of the samples, where they are known.
    """
    if labels and len(labels) != len(samples):
        raise UsageError(f"{len(labels)} labels for {len(samples)} samples")
    cases = _cases(model, graph)
    count = min(len(samples), _affordable(model, cases))
    if count < 2 or not cases:
        return CodecMeasures()
    feeds = [feeds_of(sample, spec) for sample in samples[:count]]
    steps = count + len(cases)
    with tempfile.TemporaryDirectory(prefix="edgesplit-codecs-") as name:
        folder = Path(name)
        keep = _kept(model, cases)
        job = Job(count=count, keep=keep, answers=_answers(model), labels=tuple(labels[:count]))
        _run_whole(folder, model, job, feeds, _from(progress, 0, steps))
        records: dict[str, dict[str, CodecRecord]] = {}
        for batch in _batches(folder, model, cases):
            (folder / JOB).write_bytes(msgspec.json.encode(msgspec.structs.replace(job, cases=batch)))
            run_child(folder, len(batch), _from(progress, count + len(records), steps), module=MODULE)
            found = msgspec.json.decode((folder / RECORDS).read_bytes(), type=dict[str, dict[str, CodecRecord]])
            records.update(found)
    return CodecMeasures({name: _measures(found, count) for name, found in records.items()}, count)


def with_codecs(tensors: Mapping[str, TensorCost], measured: CodecMeasures) -> dict[str, TensorCost]:
    """The tensors' costs with those of the lossy codecs beside the lossless ones."""
    found = dict(tensors)
    for name, by_codec in measured.tensors.items():
        if name in found:
            lossy = {codec: one.cost for codec, one in by_codec.items()}
            packed = {codec + boundary_codecs.ZSTD: one.packed for codec, one in by_codec.items()}
            found[name] = msgspec.structs.replace(found[name], codecs={**found[name].codecs, **lossy, **packed})
    return found


@dataclass(frozen=True, slots=True)
class _Case:
    """A tensor and the layers that depend on it, as a slice to be."""

    tensor: str
    members: tuple[Layer, ...]
    boundary: Boundary
    weight_bytes: int


def _cases(model: PreparedModel, graph: LayerGraph) -> list[_Case]:
    """Every float tensor that a layer reads. One whose companions' names are taken already travels raw or by none."""
    read = dict.fromkeys(name for layer in model.graph.layers for name in layer.reads)
    return [
        _case(model, name)
        for name in read
        if boundary_codecs.lossy_codecs(model.types[name].datatype)
        and name in graph.tensors
        and not {boundary_codecs.scale_name(name), boundary_codecs.zero_point_name(name)} & graph.tensors.keys()
    ]


def _case(model: PreparedModel, tensor: str) -> _Case:
    """What depends on the tensor: its inputs are live tensors of the whole, its outputs answers."""
    members: list[Layer] = []
    spoilt = {tensor}
    for layer in model.graph.layers:
        if not spoilt.isdisjoint(layer.reads):
            members.append(layer)
            spoilt.update(layer.writes)
    made = {name for layer in members for name in layer.writes}
    taken = dict.fromkeys(name for layer in members for name in layer.reads if name not in made)
    outputs = tuple(one for one in model.outputs if one.name in made)
    boundary = Boundary(tuple(_spec(model, name) for name in taken), outputs)
    return _Case(tensor, tuple(members), boundary, sum(layer.weight_bytes for layer in members))


def _spec(model: PreparedModel, name: str) -> TensorSpec:
    return TensorSpec(name, model.types[name].datatype, model.types[name].shape)


def _answers(model: PreparedModel) -> tuple[str, ...]:
    return tuple(one.name for one in model.outputs)


def _kept(model: PreparedModel, cases: Iterable[_Case]) -> tuple[str, ...]:
    needed = dict.fromkeys(one.name for case in cases for one in case.boundary.inputs)
    return tuple(dict.fromkeys([*needed, *_answers(model)]))


def _affordable(model: PreparedModel, cases: Sequence[_Case]) -> int:
    """So many samples' tensors may lie in files at once; two at least."""
    one = sum(model.types[name].bytes for name in _kept(model, cases))
    return max(2, LIVE_BYTES // max(one, 1))


def _run_whole(
    folder: Path, model: PreparedModel, job: Job, feeds: Sequence[Mapping[str, np.ndarray]], progress: Progress | None
) -> None:
    """The whole model on every sample, with all tensors that are needed as its outputs."""
    given = {one.name for one in model.inputs}
    wanted = tuple(_spec(model, name) for name in job.keep if name not in given)
    layers = tuple(layer for layer in model.graph.layers if layer.name != INPUT_LAYER or layer.nodes)
    whole = _written(folder, model, "whole", layers, Boundary(tuple(model.inputs), wanted))
    files = []
    for number, feed in enumerate(feeds):
        files.append({name: f"input-{number}-{place}.npy" for place, name in enumerate(feed)})
        for name, file in files[-1].items():
            np.save(folder / file, feed[name], allow_pickle=False)
    described = msgspec.structs.replace(job, whole=whole, samples=tuple(files))
    (folder / JOB).write_bytes(msgspec.json.encode(described))
    run_child(folder, len(feeds), progress, module=MODULE)


def _batches(folder: Path, model: PreparedModel, cases: Sequence[_Case]) -> Iterator[tuple[Case, ...]]:
    """The cases with their slices written, so many at a time that their weights fit."""
    batch: list[Case] = []
    taken = 0
    for number, case in enumerate(cases):
        written = _written(folder, model, f"case-{number}", case.members, case.boundary)
        batch.append(Case(case.tensor, written))
        taken += case.weight_bytes
        if taken >= BATCH_BYTES or number == len(cases) - 1:
            yield tuple(batch)
            for one in batch:
                for file in (folder / one.slice.name).iterdir():
                    file.unlink()
            batch, taken = [], 0


def _written(folder: Path, model: PreparedModel, name: str, members: Sequence[Layer], boundary: Boundary) -> Slice:
    """A slice with these layers, its files in a folder of its name."""
    (folder / name).mkdir()
    for file, runs in model.slice_files(members, boundary, frozenset()).items():
        (folder / name / file).write_bytes(b"".join(runs))
    layers = tuple(layer.name for layer in members)
    return Slice(name, model.format, layers, boundary.inputs, boundary.outputs, kernels=model.kernels)


def _measures(records: Mapping[str, CodecRecord], count: int) -> dict[str, CodecMeasure]:
    """Medians and losses of one tensor's codecs."""
    whole = records[boundary_codecs.RAW].losses
    found = {}
    for codec, record in records.items():
        chosen, confirmed = (summed_up(record.losses, whole, positions) for positions in halves(count))
        if (
            codec == boundary_codecs.RAW
            or chosen is None
            or confirmed is None
            or _saves_nothing(record, records[boundary_codecs.RAW])
        ):
            continue
        loss = {"loss": chosen.loss, "confirmed_loss": confirmed.loss}
        found[codec] = CodecMeasure(
            cost=_cost(record.bytes, record.encode_s, record.decode_s, **loss),
            packed=_cost(record.packed_bytes, record.packed_encode_s, record.packed_decode_s, **loss),
            chosen=chosen,
            confirmed=confirmed,
        )
    return found


def _saves_nothing(record: CodecRecord, raw: CodecRecord) -> bool:
    """The guard sent it raw for some sample, or companions weigh more than what is saved."""
    return any(mine >= theirs for mine, theirs in zip(record.bytes, raw.bytes, strict=True))


def _cost(sizes: list[int], encode_s: list[float], decode_s: list[float], **loss: float) -> CodecCost:
    return CodecCost(
        bytes=round(statistics.median(sizes)),
        encode_s={HERE: statistics.median(encode_s)},
        decode_s={HERE: statistics.median(decode_s)},
        **loss,
    )


def _from(progress: Progress | None, done: int, steps: int) -> Progress | None:
    """Counts on from `done`."""
    return None if progress is None else lambda step, _: progress(done + step, steps)
