"""Child process that measures codecs: `python -m edgesplit_partitioner.profiling.codecs_child FOLDER`.

First the whole model runs on every sample and its tensors between layers are saved as files. Then, tensor by tensor,
the layers that depend on it run again on what each codec makes of it, all else unchanged: the result is exact, and the
layers before the tensor run only once. Where the job says what an answer is, only changed answers are counted. The
folder holds `codec-job.json` (a `CodecJob`), the inputs and the slices' folders; results are written to
`codec-records.json`. An error is one line on standard error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import answers_differ
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Program, Tensor
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit_partitioner.profiling.clip_range import choose_clip
from edgesplit_partitioner.profiling.codec_loss import SampleLoss, sample_loss, split_halves
from edgesplit_partitioner.profiling.layers_child import ZSTD_LEVEL, timed
from edgesplit_partitioner.sandbox.child_process import child_main

JOB_FILE, RECORDS_FILE = "codec-job.json", "codec-records.json"


class CodecCase(msgspec.Struct, frozen=True):
    """One tensor, and the slice of all layers that depend on it, whose files are in a folder of the slice's name."""

    tensor: str
    slice: Slice
    clips: dict[str, float] = {}
    """The codecs whose changed answers are counted, each with its clip."""


class CodecJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process has to run."""

    whole: Slice | None = None
    """The whole model with all needed tensors as outputs; None where their files exist already."""
    samples: tuple[dict[str, str], ...] = ()
    """Per sample: file by input name."""
    count: int = 0
    """Number of samples."""
    keep: tuple[str, ...] = ()
    """Tensors to save as files, inputs and the model's outputs among them."""
    answers: tuple[str, ...] = ()
    """Names of the model's outputs."""
    labels: tuple[int | None, ...] = ()
    """Class of each sample, where known; empty without labels."""
    cases: tuple[CodecCase, ...] = ()
    answer: AnswerRule | None = None
    """What an answer is, where changed answers are counted instead of measuring codecs."""


class CodecRecord(msgspec.Struct, kw_only=True):
    """Measurements of one codec on one tensor, one value per sample. `packed`: in a compressed request."""

    bytes: list[int] = []
    packed_bytes: list[int] = []
    encode_s: list[float] = []
    packed_encode_s: list[float] = []
    decode_s: list[float] = []
    packed_decode_s: list[float] = []
    losses: list[SampleLoss] = []
    clip: float = 1.0


def main(folder: Path) -> None:
    """Run the job in the folder."""
    job = msgspec.json.decode((folder / JOB_FILE).read_bytes(), type=CodecJob)
    engine = DispatchingRuntime(threads=1)
    if job.whole is not None:
        _save_tensors(folder, job, engine.load(job.whole, folder / job.whole.name))
    records: dict[str, dict[str, Any]] = {}
    for case in job.cases:
        program = engine.load(case.slice, folder / case.slice.name)
        if job.answer is None:
            records[case.tensor] = _measure_case(folder, job, case, program)
        else:
            records[case.tensor] = _count_changes(folder, job, case, program, job.answer)
    (folder / RECORDS_FILE).write_bytes(msgspec.json.encode(records))


def _save_tensors(folder: Path, job: CodecJob, whole: Program) -> None:
    """Run the whole model and save every tensor of `keep`, for every sample."""
    for number, files in enumerate(job.samples):
        tensors: dict[str, Tensor] = {name: np.load(folder / file, allow_pickle=False) for name, file in files.items()}
        tensors.update(whole.run(tensors))
        for position, name in enumerate(job.keep):
            np.save(folder / f"live-{number}-{position}.npy", tensors[name], allow_pickle=False)


def _measure_case(folder: Path, job: CodecJob, case: CodecCase, program: Program) -> dict[str, CodecRecord]:
    """Measure every codec that may carry the tensor. `raw` is among them: its losses are the model's own errors."""
    spec = next(tensor for tensor in case.slice.inputs if tensor.name == case.tensor)
    records = {codec: CodecRecord() for codec in (boundary_codecs.RAW, *boundary_codecs.lossy_codecs(spec.datatype))}
    choosing, _ = split_halves(job.count)
    records[boundary_codecs.INT4].clip = choose_clip(
        _load_tensors(folder, job, number, [case.tensor])[case.tensor] for number in choosing
    )
    for number in range(job.count):
        feeds = _load_tensors(folder, job, number, [tensor.name for tensor in case.slice.inputs])
        answers = _load_tensors(folder, job, number, job.answers)
        wanted = {name: answers[name] for name in job.answers}
        for codec, record in records.items():
            decoded = _record_codec(record, case.tensor, feeds[case.tensor], codec)
            got = wanted if codec == boundary_codecs.RAW else {**wanted, **program.run({**feeds, case.tensor: decoded})}
            label = job.labels[number] if job.labels else None
            record.losses.append(sample_loss({name: got[name] for name in wanted}, wanted, label))
    return records


def _count_changes(folder: Path, job: CodecJob, case: CodecCase, program: Program, rule: AnswerRule) -> dict[str, int]:
    """By codec: the number of samples whose answer it changes."""
    changed = dict.fromkeys(case.clips, 0)
    for number in range(job.count):
        feeds = _load_tensors(folder, job, number, [tensor.name for tensor in case.slice.inputs])
        wanted = _load_tensors(folder, job, number, job.answers)
        tensor = feeds[case.tensor]
        for codec, clip in case.clips.items():
            sent = boundary_codecs.encode(case.tensor, tensor, codec, clip)
            decoded = boundary_codecs.decode_like(case.tensor, sent, tensor, codec)
            got = {**wanted, **program.run({**feeds, case.tensor: decoded})}
            changed[codec] += answers_differ(rule, got, wanted)
    return changed


def _load_tensors(folder: Path, job: CodecJob, number: int, names: Sequence[str]) -> dict[str, Tensor]:
    """Saved tensors of one sample, memory-mapped from their files."""
    position_of = {name: position for position, name in enumerate(job.keep)}
    return {
        name: np.asarray(np.load(folder / f"live-{number}-{position_of[name]}.npy", mmap_mode="r", allow_pickle=False))
        for name in names
    }


def _record_codec(record: CodecRecord, name: str, tensor: Tensor, codec: str) -> Tensor:
    """The tensor as the receiver decodes it; sizes and seconds are added to the record."""
    value = np.array(tensor)  # copied out of its memory-mapped file, so that reading the file is not timed
    sent, encode_s = timed(lambda: boundary_codecs.encode(name, value, codec, record.clip))
    decoded, decode_s = timed(lambda: boundary_codecs.decode_like(name, sent, value, codec))
    plain = _tensor_bytes(sent)
    packed, pack_s = timed(lambda: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(plain))
    _, unpack_s = timed(lambda: zstandard.ZstdDecompressor().decompress(packed))
    overhead_bytes = boundary_codecs.wire_bytes(name, sent) - len(plain)
    record.bytes.append(len(plain) + overhead_bytes)
    record.packed_bytes.append(len(packed) + overhead_bytes)
    record.encode_s.append(encode_s)
    record.packed_encode_s.append(encode_s + pack_s)
    record.decode_s.append(decode_s)
    record.packed_decode_s.append(decode_s + unpack_s)
    return decoded


def _tensor_bytes(sent: Mapping[str, Tensor]) -> bytes:
    """The tensors' bytes, concatenated."""
    return b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in sent.values())


if __name__ == "__main__":
    child_main(main)
