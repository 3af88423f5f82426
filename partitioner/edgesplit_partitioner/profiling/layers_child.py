"""Child process that profiles layers and tensors: `python -m edgesplit_partitioner.profiling.layers_child FOLDER`.

A model can crash or hang the runtime; only this process is affected then. The folder holds `job.json` (a
`ProfilingJob`), `model.onnx` or `model.tflite`, and the inputs as .npy files. Results are written to `profile.json`
(onnxruntime's own), `seconds.json` (TFLite) or `tensors.json`.

Each finished step is one line on standard output. An error is one line on standard error and exit status 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from edgesplit.release.manifest import TensorSpec
from edgesplit_partitioner.ir.tensor_types import ORT_DATATYPES, noise
from edgesplit_partitioner.sandbox.child_process import child_main

ZSTD_LEVEL = 1
"""Compression level of requests."""
REPEATS = 3
"""Runs of which `timed` takes the median."""

Array = npt.NDArray[np.generic]
T = TypeVar("T")


class ProfilingJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process has to measure."""

    mode: Literal["layers", "tensors"]
    """`layers`: seconds per layer; `tensors`: size and codec seconds per tensor."""
    samples: tuple[dict[str, str], ...]
    """Per sample: file by input name. Inputs that are not listed get random values."""
    runs: int = 1
    warmup: int = 0
    threads: int = 1
    tensors: tuple[str, ...] = ()
    """Outputs of the model file to measure."""
    layers: dict[str, str] = {}
    """TFLite only: the file of each layer, by layer."""
    seed: int = 0
    """Seed of random inputs."""


class TensorRecord(msgspec.Struct, kw_only=True):
    """Measurements of one tensor, one value per sample: sizes, and seconds to compress and decompress."""

    raw_bytes: list[int] = []
    zstd_bytes: list[int] = []
    encode_s: list[float] = []
    decode_s: list[float] = []


def main(folder: Path) -> None:
    """Run the job in the folder."""
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=ProfilingJob)
    session = _open_session(folder, job)
    samples = [_load_feeds(session, folder, sample, job.seed) for sample in job.samples]
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


def _open_session(folder: Path, job: ProfilingJob) -> Any:
    """A session that runs the graph without optimisation, so that its nodes are those of the layer graph."""
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


def _load_feeds(session: Any, folder: Path, sample: Mapping[str, str], seed: int) -> dict[str, Array]:
    """Every input of the model: from its file, or random."""
    feeds: dict[str, Array] = {name: np.load(folder / file, allow_pickle=False) for name, file in sample.items()}
    return feeds | noise(
        [_spec(entry.name, entry.type, entry.shape) for entry in session.get_inputs() if entry.name not in sample], seed
    )


def _spec(name: str, kind: str, shape: list[int | str | None]) -> TensorSpec:
    """An input as a session describes it; a length known only at run time is -1."""
    lengths = tuple(length if isinstance(length, int) else -1 for length in shape)
    return TensorSpec(name, ORT_DATATYPES[kind.removeprefix("tensor(").removesuffix(")")], lengths)


def _measure_tensors(session: Any, job: ProfilingJob, samples: list[dict[str, Array]]) -> dict[str, TensorRecord]:
    """Run each sample and record every tensor of the job."""
    records = {name: TensorRecord() for name in job.tensors}
    for step, feeds in enumerate(samples):
        for name, value in zip(job.tensors, session.run(list(job.tensors), feeds), strict=True):
            record_tensor(records[name], np.ascontiguousarray(value).tobytes())
        print(step + 1, flush=True)
    return records


def record_tensor(record: TensorRecord, raw: bytes) -> None:
    """Add one sample of a tensor to the record: its size, raw and compressed, and the seconds of compression on this
    machine."""
    packed, encode_s = timed(lambda: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw))
    _, decode_s = timed(lambda: zstandard.ZstdDecompressor().decompress(packed))
    record.raw_bytes.append(len(raw))
    record.zstd_bytes.append(len(packed))
    record.encode_s.append(encode_s)
    record.decode_s.append(decode_s)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of `work`, and the median of its seconds over `REPEATS` calls."""
    seconds = []
    while True:
        start = perf_counter()
        result = work()
        seconds.append(perf_counter() - start)
        if len(seconds) == REPEATS:
            return result, statistics.median(seconds)


if __name__ == "__main__":
    child_main(main)
