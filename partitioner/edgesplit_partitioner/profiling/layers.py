"""Profiling on this machine: seconds of each layer, and bytes and codec seconds of each tensor between layers.

The model runs in a child process, so that a model that crashes or hangs the runtime is refused (ModelRefused) and does
no harm to this process. An ONNX graph runs without further optimisation, so that its nodes are the layers' nodes.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
from PIL import Image

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import FRAME, InputSpec, prepare
from edgesplit.picture_formats import RAW, encode_picture, encode_raw
from edgesplit_partitioner.costs.model import ZSTD, CodecCost, TensorCost
from edgesplit_partitioner.ir.chunking import Data
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.model_loader import is_tflite
from edgesplit_partitioner.onnx_format import archive
from edgesplit_partitioner.profiling.layers_child import ProfilingJob, TensorRecord, record_tensor
from edgesplit_partitioner.profiling.ort_profile import LayerTime, layer_times
from edgesplit_partitioner.sandbox.child_process import ChildFailed, run_child
from edgesplit_partitioner.sandbox.limits import folder_bytes, measurement_limits

__all__ = ["LayerTime", "TensorMeasurements", "measure_input", "measure_layers", "measure_samples", "synthetic_frame"]

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""
Sample = bytes | Mapping[str, npt.NDArray[np.generic]]
"""An encoded frame, or the model's inputs by name."""
MEASURED_TIER = "cloud"
"""The tier whose seconds are measured on this machine."""
CHILD = "edgesplit_partitioner.profiling.layers_child"
"""Module of the child process."""
TIMEOUT_S = 900.0
"""Timeout of a child process."""


class RunnableModel(Protocol):
    """A model whose bytes are ready to run; every `ir.prepared_model.PreparedModel` is one."""

    @property
    def message_and_data(self) -> tuple[bytes, Mapping[str, Data]]:
        """The optimised model's message, and its external data files by name."""
        ...


@dataclass(frozen=True, slots=True)
class TensorMeasurements:
    """Sizes of the tensors between layers, as measured on sample inputs."""

    tensors: dict[str, TensorCost]
    """By name. Without samples raw bytes only: noise compresses differently from real inputs, so compression is not
    measured on it."""
    frame_bytes: int
    """Bytes of the encoded frame (median); 0 where applications send tensors."""
    count: int
    """Number of samples."""
    basis: str
    """Source of the sizes, for display."""


def measure_layers(
    model: RunnableModel | bytes,
    graph: LayerGraph,
    *,
    runs: int = 20,
    threads: int = 1,
    warmup: int = 3,
    inputs: Mapping[str, npt.NDArray[np.generic]] | None = None,
    progress: Progress | None = None,
) -> dict[str, LayerTime]:
    """Median and 95th percentile of each layer's seconds on this machine, from onnxruntime's own profile; TFLite layers
    are timed one by one, because LiteRT has no profile. The input layer, which is in no model file, is not included:
    see `measure_input`. Inputs that are not given get random values. UsageError for numbers of runs or threads below 1;
    ModelRefused where the model cannot run."""
    if runs < 1 or warmup < 0 or threads < 1:
        raise UsageError("measuring needs at least one run and one thread")
    raw, data = _message_and_data(model)
    sample = inputs or {}
    job = ProfilingJob(mode="layers", samples=(), runs=runs, warmup=warmup, threads=threads)
    if is_tflite(raw):
        return _measure_tflite_layers(raw, graph, job, sample, progress)
    proto = _parse(model)
    layer_of = _name_nodes(proto, graph)
    with _work_folder({"model.onnx": proto.SerializeToString(), **data}) as folder:
        job = msgspec.structs.replace(job, samples=(write_sample(folder, 0, sample),))
        _run_job(folder, job, warmup + runs, progress)
        events = msgspec.json.decode((folder / "profile.json").read_bytes())
    return layer_times(events, layer_of, warmup)


def _measure_tflite_layers(
    raw: bytes,
    graph: LayerGraph,
    job: ProfilingJob,
    inputs: Mapping[str, npt.NDArray[np.generic]],
    progress: Progress | None,
) -> dict[str, LayerTime]:
    """Times each layer as a model of its own: LiteRT has no profile of its operators."""
    from edgesplit_partitioner.tflite_format import layer_timing

    files = layer_timing.timing_files(raw, graph, layers=True)
    names = {layer: f"layer-{position}.tflite" for position, layer in enumerate(files.layers)}
    with _work_folder({layer_timing.MODEL_FILE: files.whole}) as folder:
        for layer, file in names.items():
            (folder / file).write_bytes(files.layers[layer])
        job = msgspec.structs.replace(job, samples=(write_sample(folder, 0, inputs),), layers=names)
        _run_job(folder, job, len(names), progress)
        seconds = msgspec.json.decode((folder / "seconds.json").read_bytes(), type=dict[str, list[float]])
    return {layer: LayerTime.from_seconds(values) for layer, values in seconds.items()}


def measure_input(spec: InputSpec, frames: Sequence[bytes] = (), *, runs: int = 20) -> LayerTime:
    """Seconds of the input layer on this machine: decode, resize, normalise. A synthetic frame is used if none is
    given."""
    chosen = frames or [synthetic_frame(spec)]
    prepare(spec, chosen[0])  # the first one loads the decoder
    seconds = []
    for step in range(max(runs, 1)):
        start = perf_counter()
        prepare(spec, chosen[step % len(chosen)])
        seconds.append(perf_counter() - start)
    return LayerTime.from_seconds(seconds)


def measure_samples(
    model: RunnableModel | bytes,
    graph: LayerGraph,
    *,
    spec: InputSpec | None = None,
    samples: Sequence[Sample] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> TensorMeasurements:
    """Bytes of every tensor that may cross a cut, raw and compressed (zstd level 1), with this machine's codec seconds:
    medians over the samples. `spec` is needed for samples that are frames. Without samples, declared sizes."""
    if not samples:
        declared = {name: TensorCost(bytes=tensor.bytes) for name, tensor in graph.tensors.items()}
        frame_bytes = declared[FRAME].bytes if FRAME in declared else 0
        return TensorMeasurements(declared, frame_bytes, 0, "declared sizes: without samples compression is not priced")
    frames = [sample for sample in samples if isinstance(sample, bytes)]
    feeds = [feeds_for(sample, spec) for sample in samples]
    files, exposed = _with_exposed_tensors(model, graph)
    with _work_folder(files) as folder:
        stored = tuple(write_sample(folder, number, tensors) for number, tensors in enumerate(feeds))
        job = ProfilingJob(mode="tensors", samples=stored, tensors=exposed, seed=seed)
        _run_job(folder, job, len(stored), progress)
        records = msgspec.json.decode((folder / "tensors.json").read_bytes(), type=dict[str, TensorRecord])
    records.update(_records_of_inputs(graph, feeds, frames))
    tensors = {name: _cost(record) for name, record in records.items()}
    frame_bytes = tensors[FRAME].bytes if FRAME in tensors else 0
    return TensorMeasurements(tensors, frame_bytes, len(samples), f"measured on {len(samples)} samples")


def synthetic_frame(spec: InputSpec, seed: int = 0) -> bytes:
    """A synthetic picture of the spec's format, size and quality that weighs about as much as photographs do; random
    noise where the input is sound, whose cost does not depend on its contents. For timing the decoder only.

    Amplitudes fall as 1/f^1.4. Amplitudes of natural images fall as about 1/f (Field, J. Opt. Soc. Am. A 4, 1987), but
    random phases compress worse than edges do: with this exponent the sizes of ten photographs were matched (at quality
    85 and 128, 224 and 480 pixels: 2.7, 2.1 and 1.9 bits per pixel).
    """
    rng = np.random.default_rng(seed)
    if spec.is_sound:
        return rng.normal(0.0, 3000.0, spec.samples).clip(-32768, 32767).astype("<i2").tobytes()
    down, across = np.fft.fftfreq(spec.height)[:, None], np.fft.rfftfreq(spec.width)[None, :]
    amplitude = np.maximum(np.hypot(down, across), 1.0 / max(spec.width, spec.height)) ** -1.4
    planes = []
    for strength in (1.0, 0.2, 0.2):  # brightness varies more than colour
        phases = np.exp(2j * np.pi * rng.random(amplitude.shape))
        plane = np.fft.irfft2(amplitude * phases, s=(spec.height, spec.width))
        planes.append(128.0 + 50.0 * strength * plane / max(float(plane.std()), 1e-12))
    pixels = np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
    picture = Image.merge("YCbCr", [Image.fromarray(pixels[:, :, plane]) for plane in range(3)])
    if spec.media == RAW:
        return encode_raw(spec.pixels, np.asarray(picture.convert("RGB")))
    return encode_picture(spec.media, picture.convert("L" if spec.colour == "gray" else "RGB"), spec.quality)


def _parse(model: RunnableModel | bytes) -> onnx.ModelProto:
    try:
        return onnx.load_model_from_string(_message_and_data(model)[0])
    except Exception as error:  # protobuf's decoder raises several unrelated types
        raise ModelRefused(f"not an ONNX file: {str(error)[:200]}") from error


def _message_and_data(model: RunnableModel | bytes) -> tuple[bytes, Mapping[str, Data | memoryview]]:
    """The model's message, and its external data files by name, of which most models have none."""
    if isinstance(model, bytes):
        return archive.unpack(model) if archive.is_archive(model) else (model, {})
    return model.message_and_data


def _name_nodes(proto: onnx.ModelProto, graph: LayerGraph) -> dict[str, str]:
    """The layer of each node, by the node's name. Nodes are renamed where names are missing or repeated. UsageError for
    a layer graph of another model."""
    nodes = proto.graph.node
    if len({node.name for node in nodes} - {""}) != len(nodes):
        for position, node in enumerate(nodes):
            node.name = f"node-{position}"
    try:
        return {nodes[position].name: layer.name for layer in graph.layers for position in layer.nodes}
    except IndexError as error:
        raise UsageError("this layer graph is not that of this model: it has more nodes") from error


def _with_exposed_tensors(
    model: RunnableModel | bytes, graph: LayerGraph
) -> tuple[dict[str, Data | memoryview], tuple[str, ...]]:
    """The model's files, with every tensor that a layer writes added to its outputs, and the names of these tensors."""
    raw, data = _message_and_data(model)
    if is_tflite(raw):
        from edgesplit_partitioner.tflite_format import layer_timing

        files = layer_timing.timing_files(raw, graph, layers=False)
        return {layer_timing.MODEL_FILE: files.whole}, files.tensors
    proto = _parse(model)
    written = {name for node in proto.graph.node for name in node.output}
    wanted = tuple(name for layer in graph.layers for name in layer.writes if name in written)
    outputs = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in outputs)
    return {"model.onnx": proto.SerializeToString(), **data}, wanted


def feeds_for(sample: Sample, spec: InputSpec | None) -> dict[str, npt.NDArray[np.generic]]:
    """The model's inputs for one sample; UsageError for a frame that cannot be decoded, or without an input spec."""
    if not isinstance(sample, bytes):
        return dict(sample)
    if spec is None:
        raise UsageError("a sample is a frame, but the model has no input spec; give tensors, or push it with --input")
    return {spec.tensor: prepare(spec, sample)}


def _records_of_inputs(
    graph: LayerGraph, feeds: Sequence[Mapping[str, npt.NDArray[np.generic]]], frames: Sequence[bytes]
) -> dict[str, TensorRecord]:
    """Records of the frame and of the tensors that applications or the input layer provide."""
    values_by_name = {name: [feed[name].tobytes() for feed in feeds if name in feed] for name in graph.tensors}
    values_by_name[FRAME] = list(frames)
    records = {name: TensorRecord() for name, values in values_by_name.items() if values}
    for name, record in records.items():
        for raw in values_by_name[name]:
            record_tensor(record, raw)
    return records


def _cost(record: TensorRecord) -> TensorCost:
    """Medians over the samples."""
    codec = CodecCost(
        bytes=round(statistics.median(record.zstd_bytes)),
        encode_s={MEASURED_TIER: statistics.median(record.encode_s)},
        decode_s={MEASURED_TIER: statistics.median(record.decode_s)},
    )
    return TensorCost(bytes=round(statistics.median(record.raw_bytes)), codecs={ZSTD: codec})


@contextmanager
def _work_folder(files: Mapping[str, Data | memoryview]) -> Iterator[Path]:
    """A temporary folder with these files; deleted on exit."""
    with tempfile.TemporaryDirectory(prefix="edgesplit-measure-") as name:
        for file, data in files.items():
            (Path(name) / file).write_bytes(data)
        yield Path(name)


def write_sample(folder: Path, position: int, tensors: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, str]:
    """Write the sample's tensors to files; returns the file by input name."""
    files = {name: f"sample-{position}-{column}.npy" for column, name in enumerate(tensors)}
    for name, file in files.items():
        np.save(folder / file, tensors[name], allow_pickle=False)
    return files


def _run_job(folder: Path, job: ProfilingJob, steps: int, progress: Progress | None) -> None:
    """Run the job in a child process, see `run_steps`."""
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    run_steps(CHILD, folder, steps, progress)


def run_steps(module: str, folder: Path, steps: int = 0, progress: Progress | None = None) -> None:
    """Run `module` as a child process on the job in `folder`; it prints a line per step. ModelRefused if the runtime
    refuses the model, crashes or exceeds `TIMEOUT_S`; Interrupted if the process was ended by a signal from outside."""
    done = itertools.count(1)
    on_step = (lambda _: progress(next(done), steps)) if progress is not None else (lambda _: None)
    try:
        limits = measurement_limits(folder_bytes(folder), folder, TIMEOUT_S)
        run_child(module, folder, limits=limits, limit_s=TIMEOUT_S, on_line=on_step)
    except ChildFailed as error:
        if "edgetpu-custom-op" not in error.errors:
            raise
        raise ModelRefused(
            "compiled for an Edge TPU, and none is here: measure and plan the .tflite that it was compiled from"
        ) from error
