"""The child process that codecs are measured in: `python -m edgesplit_partitioner.profiling.codecs_child FOLDER`.

First the whole model runs on every sample and leaves the tensors between its layers behind as files. Then, tensor by
tensor, what reads it runs again from what each codec makes of it, all else as it was: exact, and the layers before it
run only once. The folder holds `codec-job.json` (a `Job`), the inputs and the slices' folders; answers go to
`codec-records.json`. Each finished step is one line on standard output; an error is one line on standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import Slice
from edgesplit.runtime import Program, Tensor
from edgesplit.runtime.dispatch import EngineByFormat
from edgesplit_partitioner.profiling.codec_loss import SampleLoss, compared
from edgesplit_partitioner.profiling.layers_child import ZSTD_LEVEL, timed

JOB, RECORDS = "codec-job.json", "codec-records.json"


class Case(msgspec.Struct, frozen=True):
    """One tensor: the slice with all that depends on it, in a folder of that slice's name."""

    tensor: str
    slice: Slice


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    whole: Slice | None = None
    """Gives all tensors that cases need, or that are answers; None where their files are there already."""
    samples: tuple[dict[str, str], ...] = ()
    """Per sample: file by input name."""
    count: int = 0
    """Of samples."""
    keep: tuple[str, ...] = ()
    """Tensors to leave behind as files, the inputs and answers among them."""
    answers: tuple[str, ...] = ()
    labels: tuple[int | None, ...] = ()
    cases: tuple[Case, ...] = ()


class CodecRecord(msgspec.Struct, kw_only=True):
    """One codec on one tensor over all samples. `packed`: in a compressed request."""

    bytes: list[int] = []
    packed_bytes: list[int] = []
    encode_s: list[float] = []
    packed_encode_s: list[float] = []
    decode_s: list[float] = []
    packed_decode_s: list[float] = []
    losses: list[SampleLoss] = []


def main(folder: Path) -> None:
    """Do the folder's job."""
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)
    engine = EngineByFormat(threads=1)
    if job.whole is not None:
        _leave_behind(folder, job, engine.load(job.whole, folder / job.whole.name))
    records: dict[str, dict[str, CodecRecord]] = {}
    for case in job.cases:
        program = engine.load(case.slice, folder / case.slice.name)
        records[case.tensor] = _measured(folder, job, case, program)
        print(case.tensor, flush=True)
    (folder / RECORDS).write_bytes(msgspec.json.encode(records))


def _leave_behind(folder: Path, job: Job, whole: Program) -> None:
    """Every tensor of `keep`, of every sample."""
    for number, files in enumerate(job.samples):
        live: dict[str, Tensor] = {name: np.load(folder / file, allow_pickle=False) for name, file in files.items()}
        live.update(whole.run(live))
        for place, name in enumerate(job.keep):
            np.save(folder / f"live-{number}-{place}.npy", live[name], allow_pickle=False)
        print(number, flush=True)


def _measured(folder: Path, job: Job, case: Case, program: Program) -> dict[str, CodecRecord]:
    """Every codec that may carry the tensor, `raw` among them: its losses are the model's own mistakes."""
    spec = next(one for one in case.slice.inputs if one.name == case.tensor)
    records = {codec: CodecRecord() for codec in (boundary_codecs.RAW, *boundary_codecs.lossy_codecs(spec.datatype))}
    for number in range(job.count):
        feeds = _kept(folder, job, number, [one.name for one in case.slice.inputs])
        answers = _kept(folder, job, number, job.answers)
        wanted = {name: answers[name] for name in job.answers}
        for codec, record in records.items():
            tensor = _recorded(record, case.tensor, feeds[case.tensor], codec)
            got = wanted if codec == boundary_codecs.RAW else {**wanted, **program.run({**feeds, case.tensor: tensor})}
            label = job.labels[number] if job.labels else None
            record.losses.append(compared({name: got[name] for name in wanted}, wanted, label))
    return records


def _kept(folder: Path, job: Job, number: int, names: Sequence[str]) -> dict[str, Tensor]:
    """What was left behind, mapped from its files."""
    place = {name: position for position, name in enumerate(job.keep)}
    return {
        name: np.asarray(np.load(folder / f"live-{number}-{place[name]}.npy", mmap_mode="r", allow_pickle=False))
        for name in names
    }


def _recorded(record: CodecRecord, name: str, tensor: Tensor, codec: str) -> Tensor:
    """The tensor as the other side has it, its sizes and seconds added to the record."""
    value = np.array(tensor)  # out of its file, so that reading that is not timed
    sent, encode_s = timed(lambda: boundary_codecs.encode(name, value, codec))
    back, decode_s = timed(lambda: boundary_codecs.decoded(name, sent, value))
    plain = _joined(sent)
    packed, pack_s = timed(lambda: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(plain))
    _, unpack_s = timed(lambda: zstandard.ZstdDecompressor().decompress(packed))
    beside = boundary_codecs.wire_bytes(name, sent) - len(plain)
    record.bytes.append(len(plain) + beside)
    record.packed_bytes.append(len(packed) + beside)
    record.encode_s.append(encode_s)
    record.packed_encode_s.append(encode_s + pack_s)
    record.decode_s.append(decode_s)
    record.packed_decode_s.append(decode_s + unpack_s)
    return back


def _joined(sent: Mapping[str, Tensor]) -> bytes:
    return b"".join(np.ascontiguousarray(one).tobytes() for one in sent.values())


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:  # the parent translates: this process only has its exit status and one line
        print(" ".join(str(error).split())[:2000], file=sys.stderr)
        sys.exit(1)
