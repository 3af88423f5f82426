"""What this machine needs: seconds of each layer, and bytes and codec seconds of each tensor between layers.

Both run the model in a child process, so that one that crashes or hangs the runtime is refused (ModelRefused) and
takes nothing with it. An ONNX graph runs as it stands (no further optimisation): its nodes are the layers' nodes.
"""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import tempfile
import threading
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
from edgesplit_partitioner.costs.model import CodecCost, TensorCost
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.model_loader import is_tflite
from edgesplit_partitioner.onnx_format import archive
from edgesplit_partitioner.profiling.layers_child import Job, TensorRecord, record_tensor
from edgesplit_partitioner.profiling.ort_profile import LayerTime, layer_times
from edgesplit_partitioner.sandbox.exit_status import check_not_interrupted

__all__ = ["LayerTime", "Samples", "measure_input", "measure_layers", "measure_samples", "stand_in_frame"]

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""
Sample = bytes | Mapping[str, npt.NDArray[np.generic]]
"""An encoded frame, or the model's inputs by name."""
ZSTD = "raw+zstd"
HERE = "cloud"
"""The tier whose seconds are this machine's."""
LIMIT_S = 900.0


class Prepared(Protocol):
    """A model whose bytes are ready to run: what `onnx_model.prepare_model` gives."""

    @property
    def parts_of_file(self) -> tuple[bytes, Mapping[str, archive.Data]]:
        """The optimised model's message, and its data files by name."""
        ...


@dataclass(frozen=True, slots=True)
class Samples:
    """What the tensors between layers weigh, as measured on sample inputs."""

    tensors: dict[str, TensorCost]
    """By name. Without samples only raw bytes: how noise compresses says nothing about pictures, so it is not tried."""
    frame_bytes: int
    """Of the encoded frame; 0 where applications give tensors."""
    count: int
    """How many samples there were."""
    basis: str
    """In a few words, for people."""


def measure_layers(
    model: Prepared | bytes,
    graph: LayerGraph,
    *,
    runs: int = 20,
    threads: int = 1,
    warmup: int = 3,
    inputs: Mapping[str, npt.NDArray[np.generic]] | None = None,
    progress: Progress | None = None,
) -> dict[str, LayerTime]:
    """Seconds of each layer on this machine: by onnxruntime's own profile; LiteRT has none, so TFLite layers are timed
    alone. The input layer, which is in no model file, is not among them: see `measure_input`. An input left out gets
    noise."""
    if runs < 1 or warmup < 0 or threads < 1:
        raise UsageError("measuring needs at least one run and one thread")
    raw, data = _parts(model)
    sample = inputs or {}
    if is_tflite(raw):
        return _measure_tflite_layers(
            raw, graph, Job(mode="layers", samples=(), runs=runs, warmup=warmup, threads=threads), sample, progress
        )
    proto = _parse(model)
    layer_of = _name_nodes(proto, graph)
    with _workplace({"model.onnx": proto.SerializeToString(), **data}) as folder:
        job = Job(mode="layers", runs=runs, warmup=warmup, threads=threads, samples=(_store(folder, 0, sample),))
        _run(folder, job, warmup + runs, progress)
        trace = msgspec.json.decode((folder / "profile.json").read_bytes())
    return layer_times(trace, layer_of, warmup)


def _measure_tflite_layers(
    raw: bytes,
    graph: LayerGraph,
    job: Job,
    inputs: Mapping[str, npt.NDArray[np.generic]],
    progress: Progress | None,
) -> dict[str, LayerTime]:
    """Each layer as a model of its own: LiteRT has no profile of its operators."""
    from edgesplit_partitioner.tflite_format import layer_timing

    files = layer_timing.measured_files(raw, graph, layers=True)
    names = {layer: f"layer-{place}.tflite" for place, layer in enumerate(files.layers)}
    with _workplace({layer_timing.MODEL: files.whole}) as folder:
        for layer, file in names.items():
            (folder / file).write_bytes(files.layers[layer])
        job = msgspec.structs.replace(job, samples=(_store(folder, 0, inputs),), layers=names)
        _run(folder, job, len(names), progress)
        seconds = msgspec.json.decode((folder / "seconds.json").read_bytes(), type=dict[str, list[float]])
    return {layer: LayerTime.of(values) for layer, values in seconds.items()}


def measure_input(spec: InputSpec, frames: Sequence[bytes] = (), *, runs: int = 20) -> LayerTime:
    """Seconds of the input layer on this machine: decode, resize, normalise. Without frames, a stand-in's."""
    chosen = frames or [stand_in_frame(spec)]
    prepare(spec, chosen[0])  # the first one loads the decoder
    seconds = []
    for step in range(max(runs, 1)):
        start = perf_counter()
        prepare(spec, chosen[step % len(chosen)])
        seconds.append(perf_counter() - start)
    return LayerTime.of(seconds)


def measure_samples(
    model: Prepared | bytes,
    graph: LayerGraph,
    *,
    spec: InputSpec | None = None,
    samples: Sequence[Sample] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Samples:
    """Bytes of every tensor that may cross a cut, raw and compressed (zstd level 1), with this machine's seconds for
    it: medians over the samples. `spec` is needed for samples that are frames. Without samples, declared sizes."""
    if not samples:
        declared = {name: TensorCost(bytes=tensor.bytes) for name, tensor in graph.tensors.items()}
        frame_bytes = declared[FRAME].bytes if FRAME in declared else 0
        return Samples(declared, frame_bytes, 0, "declared sizes: without samples compression is not priced")
    frames = [sample for sample in samples if isinstance(sample, bytes)]
    feeds = [feeds_of(sample, spec) for sample in samples]
    files, wanted = _exposed(model, graph)
    with _workplace(files) as folder:
        stored = tuple(_store(folder, position, tensors) for position, tensors in enumerate(feeds))
        _run(folder, Job(mode="tensors", samples=stored, tensors=wanted, seed=seed), len(stored), progress)
        records = msgspec.json.decode((folder / "tensors.json").read_bytes(), type=dict[str, TensorRecord])
    records.update(_records_of_inputs(graph, feeds, frames))
    tensors = {name: _cost(record) for name, record in records.items()}
    frame_bytes = tensors[FRAME].bytes if FRAME in tensors else 0
    return Samples(tensors, frame_bytes, len(samples), f"measured on {len(samples)} samples")


def stand_in_frame(spec: InputSpec, seed: int = 0) -> bytes:
    """A JPEG of the spec's size and quality that weighs about what photographs do. For timing the decoder only.

    Amplitudes fall as 1/f^1.4. Pictures' own fall as about 1/f (Field, J. Opt. Soc. Am. A 4, 1987), but random phases
    compress worse than edges do: with this exponent the sizes of ten photographs came out (at quality 85 and 128,
    224 and 480 pixels: 2.7, 2.1 and 1.9 bits per pixel).
    Sound: quiet noise, since nothing of its cost depends on what it says.
    """
    rng = np.random.default_rng(seed)
    if spec.is_sound:
        return rng.normal(0.0, 3000.0, spec.samples).clip(-32768, 32767).astype("<i2").tobytes()
    down, across = np.fft.fftfreq(spec.height)[:, None], np.fft.rfftfreq(spec.width)[None, :]
    amplitude = np.maximum(np.hypot(down, across), 1.0 / max(spec.width, spec.height)) ** -1.4
    planes = []
    for strength in (1.0, 0.2, 0.2):  # brightness varies more than colour
        turns = np.exp(2j * np.pi * rng.random(amplitude.shape))
        plane = np.fft.irfft2(amplitude * turns, s=(spec.height, spec.width))
        planes.append(128.0 + 50.0 * strength * plane / max(float(plane.std()), 1e-12))
    pixels = np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
    picture = Image.merge("YCbCr", [Image.fromarray(pixels[:, :, plane]) for plane in range(3)])
    file = io.BytesIO()
    picture.convert("L" if spec.colour == "gray" else "RGB").save(file, "JPEG", quality=spec.quality)
    return file.getvalue()


def _parse(model: Prepared | bytes) -> onnx.ModelProto:
    try:
        return onnx.load_model_from_string(_parts(model)[0])
    except Exception as error:  # protobuf's decoder raises several unrelated types
        raise ModelRefused(f"not an ONNX file: {str(error)[:200]}") from error


def _parts(model: Prepared | bytes) -> tuple[bytes, Mapping[str, archive.Data | memoryview]]:
    """The prepared model's message, and its data files; none for most models."""
    if isinstance(model, bytes):
        return archive.unpack(model) if archive.is_bundle(model) else (model, {})
    return model.parts_of_file


def _name_nodes(proto: onnx.ModelProto, graph: LayerGraph) -> dict[str, str]:
    """The layer of each node by the node's name; nodes get names of their own where theirs are missing or repeat."""
    nodes = proto.graph.node
    if len({node.name for node in nodes} - {""}) != len(nodes):
        for position, node in enumerate(nodes):
            node.name = f"node-{position}"
    try:
        return {nodes[position].name: layer.name for layer in graph.layers for position in layer.nodes}
    except IndexError as error:
        raise UsageError("this layer graph is not that of this model: it has more nodes") from error


def _exposed(
    model: Prepared | bytes, graph: LayerGraph
) -> tuple[dict[str, archive.Data | memoryview], tuple[str, ...]]:
    """The model's file, with every tensor that a layer writes among its outputs, and their names."""
    raw, data = _parts(model)
    if is_tflite(raw):
        from edgesplit_partitioner.tflite_format import layer_timing

        files = layer_timing.measured_files(raw, graph, layers=False)
        return {layer_timing.MODEL: files.whole}, files.tensors
    proto = _parse(model)
    wanted = _expose(proto, graph)
    return {"model.onnx": proto.SerializeToString(), **data}, wanted


def _expose(proto: onnx.ModelProto, graph: LayerGraph) -> tuple[str, ...]:
    """Make every tensor that a layer writes an output of the model; their names."""
    made = {name for node in proto.graph.node for name in node.output}
    wanted = tuple(name for layer in graph.layers for name in layer.writes if name in made)
    known = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in known)
    return wanted


def feeds_of(sample: Sample, spec: InputSpec | None) -> dict[str, npt.NDArray[np.generic]]:
    """The model's inputs for one sample; UsageError where a frame is no picture."""
    if not isinstance(sample, bytes):
        return dict(sample)
    if spec is None:
        raise UsageError("a sample is a frame, but the model has no input spec; give tensors, or push it with --input")
    return {spec.tensor: prepare(spec, sample)}


def _records_of_inputs(
    graph: LayerGraph, feeds: Sequence[Mapping[str, npt.NDArray[np.generic]]], frames: Sequence[bytes]
) -> dict[str, TensorRecord]:
    """Of the frame and of the tensors that applications or the input layer give."""
    given = {name: [feed[name].tobytes() for feed in feeds if name in feed] for name in graph.tensors}
    given[FRAME] = list(frames)
    return {name: _input_record(values) for name, values in given.items() if values}


def _input_record(values: Sequence[bytes]) -> TensorRecord:
    record = TensorRecord()
    for raw in values:
        record_tensor(record, raw)
    return record


def _cost(record: TensorRecord) -> TensorCost:
    """Medians over the samples."""
    codec = CodecCost(
        bytes=round(statistics.median(record.zstd_bytes)),
        encode_s={HERE: statistics.median(record.encode_s)},
        decode_s={HERE: statistics.median(record.decode_s)},
    )
    return TensorCost(bytes=round(statistics.median(record.raw_bytes)), codecs={ZSTD: codec})


@contextmanager
def _workplace(files: Mapping[str, archive.Data | memoryview]) -> Iterator[Path]:
    """A folder with these files in it, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="edgesplit-measure-") as name:
        for file, data in files.items():
            (Path(name) / file).write_bytes(data)
        yield Path(name)


def _store(folder: Path, position: int, tensors: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, str]:
    """The sample's tensors as files; file by input name."""
    files = {name: f"sample-{position}-{column}.npy" for column, name in enumerate(tensors)}
    for name, file in files.items():
        np.save(folder / file, tensors[name], allow_pickle=False)
    return files


def _run(folder: Path, job: Job, steps: int, progress: Progress | None) -> None:
    """Do the job in a child process; ModelRefused if the runtime refuses the model, crashes, or never ends;
    Interrupted if somebody ends it."""
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    run_child(folder, steps, progress)


def run_child(
    folder: Path, steps: int, progress: Progress | None, module: str = "edgesplit_partitioner.profiling.layers_child"
) -> None:
    """Do the job that lies in `folder`, a line per step; ModelRefused as `_run` says."""
    command = [sys.executable, "-m", module, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with (
        (folder / "errors").open("wb+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as child,
    ):
        clock = threading.Timer(LIMIT_S, child.kill)
        clock.start()
        try:
            assert child.stdout is not None
            for done, _ in enumerate(child.stdout, 1):
                if progress is not None:
                    progress(done, steps)
            status = child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            clock.cancel()
    if status:
        check_not_interrupted(status)
        raise ModelRefused(_why(status, (folder / "errors").read_text("utf-8", "replace")))


def _why(status: int, errors: str) -> str:
    """What to tell about a child that failed."""
    if status < 0:
        return f"running this model kills the runtime (signal {-status}), or it did not end within {LIMIT_S:.0f} s"
    lines = [line for line in errors.splitlines() if line.strip()]
    if "edgetpu-custom-op" in errors:
        return "compiled for an Edge TPU, and none is here: measure and plan the .tflite that it was compiled from"
    return f"the runtime cannot run this model: {lines[-1] if lines else f'exit status {status}'}"
