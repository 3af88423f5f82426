"""The child process that measuring happens in: `python -m edgesplit_partitioner.profiling.layers_child FOLDER`.

A model can crash or hang the runtime; here it takes only this process with it. The folder holds `job.json` (a `Job`),
`model.onnx` or `model.tflite`, and the inputs as .npy files; the answer goes to `profile.json` (onnxruntime's own),
`seconds.json` (TFLite) or `tensors.json`.
Each finished step is one line on standard output. An error is one line on standard error and exit status 1.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

ZSTD_LEVEL = 1
REPEATS = 3
DTYPES = {"float": "float32", "double": "float64", "bool": "bool", "float16": "float16"}

Array = npt.NDArray[np.generic]
T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    mode: Literal["layers", "tensors"]
    samples: tuple[dict[str, str], ...]
    """Per sample: file by input name. An input that is not there gets noise."""
    runs: int = 1
    warmup: int = 0
    threads: int = 1
    tensors: tuple[str, ...] = ()
    """Outputs of the model file to measure."""
    layers: dict[str, str] = {}
    """TFLite: each layer's own file, by layer."""
    seed: int = 0


class TensorRecord(msgspec.Struct, kw_only=True):
    """One tensor over all samples: sizes, and seconds to compress and decompress."""

    raw_bytes: list[int] = []
    zstd_bytes: list[int] = []
    encode_s: list[float] = []
    decode_s: list[float] = []


def main(folder: Path) -> None:
    """Do the folder's job."""
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=Job)
    session = _open(folder, job)
    samples = [_feeds(session, folder, sample, job.seed) for sample in job.samples]
    if job.layers:
        files = {layer: folder / file for layer, file in job.layers.items()}
        seconds = session.layer_seconds(files, samples[0], job.warmup, job.runs)
        (folder / "seconds.json").write_bytes(msgspec.json.encode(seconds))
    elif job.mode == "layers":
        for step in range(job.warmup + job.runs):
            session.run(None, samples[step % len(samples)])
            print(step + 1, flush=True)
        Path(session.end_profiling()).replace(folder / "profile.json")
    else:
        records = _measure_tensors(session, job, samples)
        (folder / "tensors.json").write_bytes(msgspec.json.encode(records))


def _open(folder: Path, job: Job) -> Any:
    """A session that runs the graph as it stands, so that its nodes are those that the caller knows."""
    if (folder / "model.tflite").exists():
        from edgesplit_partitioner.tflite_format.layer_timing import open_session

        return open_session(folder, job.threads)
    import onnxruntime  # only in the child: the parent shares this module for its formats

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = job.threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    options.enable_profiling = job.mode == "layers"
    options.profile_file_prefix = str(folder / "onnxruntime")
    return onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def _feeds(session: Any, folder: Path, sample: Mapping[str, str], seed: int) -> dict[str, Array]:
    """Every input of the model: from its file, or noise."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for entry in session.get_inputs():
        if entry.name in sample:
            feeds[entry.name] = np.load(folder / sample[entry.name], allow_pickle=False)
        else:
            feeds[entry.name] = _noise(entry.type, entry.shape, rng)
    return feeds


def _noise(kind: str, shape: list[int | str | None], rng: np.random.Generator) -> Array:
    """Values between 0 and 1, ones for whole numbers; a length known only at run time is 1."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    dtype = np.dtype(DTYPES.get(name, name))
    lengths = [length if isinstance(length, int) and length > 0 else 1 for length in shape]
    values: Array = rng.random(lengths).astype(dtype) if dtype.kind == "f" else np.ones(lengths, dtype)
    return values


def _measure_tensors(session: Any, job: Job, samples: list[dict[str, Array]]) -> dict[str, TensorRecord]:
    """Run each sample and compress every tensor asked for."""
    records = {name: TensorRecord() for name in job.tensors}
    for step, feeds in enumerate(samples):
        for name, value in zip(job.tensors, session.run(list(job.tensors), feeds), strict=True):
            record_tensor(records[name], np.ascontiguousarray(value).tobytes())
        print(step + 1, flush=True)
    return records


def record_tensor(record: TensorRecord, raw: bytes) -> None:
    """Add one tensor of one sample: its size, and what compressing it takes here."""
    packed, encode_s = timed(lambda: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw))
    _, decode_s = timed(lambda: zstandard.ZstdDecompressor().decompress(packed))
    record.raw_bytes.append(len(raw))
    record.zstd_bytes.append(len(packed))
    record.encode_s.append(encode_s)
    record.decode_s.append(decode_s)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` gives, and the median of its seconds."""
    seconds = []
    while True:
        start = perf_counter()
        result = work()
        seconds.append(perf_counter() - start)
        if len(seconds) == REPEATS:
            return result, statistics.median(seconds)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:  # the parent translates: this process only has its exit status and one line
        print(" ".join(str(error).split())[:2000], file=sys.stderr)
        sys.exit(1)
