"""The trained reference models with real inputs, for the other benchmarks. A model that is missing is reported with the
reason.

Inputs are prepared as each model was trained (../shared/models/SOURCES.md). A model of pictures is listed twice: with
tensors as inputs, and with JPEG frames of its own input size at quality 85, the least that a camera could send.
"""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image
from record import models_folder

from edgesplit.input_spec import InputSpec, parse_input_spec, prepare
from edgesplit_partitioner.ir.graph import LayerGraph
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format.model import with_input_layer
from edgesplit_partitioner.profiling.layers import Sample
from edgesplit_partitioner.profiling.slices import measure_whole_slices
from edgesplit_partitioner.slicing import cut_slices

REPOSITORY = Path(__file__).parents[1]
QUALITY = 85
"""JPEG quality of the frames."""
PICTURES = ("inputs/imagenet", "inputs/photos", "inputs/coco", "inputs/faces")
KINDS = {".jpg", ".jpeg", ".bmp", ".png"}
HOPS = 400
"""Blocks of sound that pass before samples are taken, so that states are those of a running stream."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trained model with samples. `labels` are the classes of the samples, where they are known."""

    name: str
    given: str
    """How the samples are given: `tensors` or `jpeg`."""
    model: PreparedModel = field(repr=False)
    graph: LayerGraph = field(repr=False)
    spec: InputSpec | None
    samples: Sequence[Sample] = field(repr=False)
    labels: Sequence[int | None] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A model that cannot be measured here, and the reason."""

    name: str
    why: str
    needs_hardware: bool = False
    """It runs on an accelerator only, which this machine lacks: no target names it here."""


def left_out(skipped: Iterable[Skipped], only: Sequence[str] = ()) -> tuple[str, ...]:
    """What a target over all models was not measured on: models that are missing or failed, and those that were not
    asked for, where `only` some were."""
    missing = tuple(f"{model.name} ({model.why})" for model in skipped if not model.needs_hardware)
    return missing + ((f"models other than {', '.join(only)} (not asked for)",) if only else ())


Source = Callable[[Path, int], Iterator[tuple[Sample, int | None]]]
"""Returns samples of a model with their labels, from the folder of reference models."""


@dataclass(frozen=True, slots=True)
class _Entry:
    file: str
    samples: Source
    input_text: str = ""
    """The input spec where the samples are frames; empty otherwise."""
    bindings: Mapping[str, int] = field(default_factory=dict)


def load_models(
    count: int, only: Sequence[str] = (), *, tflite: bool = False, counts: Mapping[str, int] | None = None
) -> Iterator[TrainedModel | Skipped]:
    """Every known ONNX model, and with `tflite` every TFLite model, with at most `count` samples each, or as many as
    `counts` says of it."""
    for entry in (*_ONNX_MODELS, *(_TFLITE_MODELS if tflite else ())):
        path = REPOSITORY / entry.file if entry.file.startswith("examples/") else models_folder() / entry.file
        name, given = path.name.removesuffix(".onnx"), "jpeg" if entry.input_text else "tensors"
        if only and name not in only:
            continue
        if not path.is_file():
            yield Skipped(name, f"{path.name} is not in {path.parent}")
            continue
        try:
            yield _loaded(entry, path, name, given, (counts or {}).get(name, count))
        except AcceleratorMissing as error:
            yield Skipped(name, str(error), needs_hardware=True)
        except Exception as error:  # whatever a model or its inputs lack: said, and the others go on
            yield Skipped(f"{name} ({given})", f"{type(error).__name__}: {error}")


def model_names() -> list[tuple[str, str]]:
    """Every known model, ONNX and TFLite, with how its samples are given."""
    return [
        (Path(entry.file).name.removesuffix(".onnx"), "jpeg" if entry.input_text else "tensors")
        for entry in (*_ONNX_MODELS, *_TFLITE_MODELS)
    ]


class AcceleratorMissing(Exception):
    """The model runs on an accelerator only, and this machine has none."""


def _loaded(entry: _Entry, path: Path, name: str, given: str, count: int) -> TrainedModel:
    model = prepare_model(path.read_bytes(), entry.bindings)
    if model.kernels == "edgetpu":
        raise AcceleratorMissing("it runs on an Edge TPU only, and none is here")
    graph, spec = model.graph, None
    if entry.input_text:
        graph, spec = with_input_layer(model, parse_input_spec(entry.input_text))
    pairs = list(entry.samples(models_folder(), count))
    if spec is not None:
        for sample, _ in pairs[:1]:
            assert isinstance(sample, bytes)
            prepare(spec, sample)
    samples, labels = [sample for sample, _ in pairs], [label for _, label in pairs]
    return TrainedModel(name, given, model, graph, spec, samples, labels if None not in labels else ())


def _pictures(root: Path) -> list[Path]:
    """Paths of real pictures, those of ImageNet's classes first."""
    found = [sorted(path for path in (root / place).iterdir() if path.suffix.lower() in KINDS) for place in PICTURES]
    return [path for group in found for path in group]


def _pixels(path: Path, width: int, height: int) -> Image.Image:
    """The middle of the picture, scaled to the model's size."""
    picture = Image.open(path).convert("RGB")
    scale = max(width / picture.width, height / picture.height) / 0.875
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BILINEAR)
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))


def _frames(width: int, height: int) -> Source:
    def source(root: Path, count: int) -> Iterator[tuple[Sample, int | None]]:
        for path in _pictures(root)[:count]:
            file = io.BytesIO()
            _pixels(path, width, height).save(file, "JPEG", quality=QUALITY)
            yield file.getvalue(), None

    return source


def _tensors(name: str, width: int, height: int, text: str, dtype: type[Any] = np.float32) -> Source:
    """Source of the same pictures as tensors, by the same input spec but without JPEG encoding."""
    spec = parse_input_spec(f"image/jpeg {width}x{height} {text}")

    def source(root: Path, count: int) -> Iterator[tuple[Sample, int | None]]:
        for path in _pictures(root)[:count]:
            pixels = np.asarray(_pixels(path, width, height), np.float32)
            planes = pixels[:, :, ::-1] if spec.colour == "bgr" else pixels
            values = (planes * np.float32(spec.scale) - np.asarray(spec.mean)) / np.asarray(spec.std)
            values = values.transpose(2, 0, 1) if spec.layout == "nchw" else values
            yield {name: np.ascontiguousarray(values[None].astype(dtype))}, None

    return source


def _digits(_: Path, count: int) -> Iterator[tuple[Sample, int | None]]:
    place = REPOSITORY / "examples" / "digits" / "frames"
    labels: dict[str, int] = json.loads((place / "labels.json").read_text())
    names = sorted(labels)
    for name in names[:: max(1, len(names) // count)][:count]:
        yield (place / name).read_bytes(), labels[name]


def _mnist(root: Path, count: int) -> Iterator[tuple[Sample, int | None]]:
    with np.load(root / "inputs" / "mnist_50.npz", allow_pickle=False) as stored:
        for image, label in list(zip(stored["images"], stored["labels"], strict=True))[:count]:
            yield {"Input3": image.astype(np.float32)[None, None]}, int(label)


def _cifar(name: str, shift: int, dtype: type[Any]) -> Source:
    """Source of CIFAR pictures, with `shift` subtracted from the pixels."""

    def source(root: Path, count: int) -> Iterator[tuple[Sample, int | None]]:
        with np.load(root / "inputs" / "cifar10_50.npz", allow_pickle=False) as stored:
            for image, label in list(zip(stored["images"], stored["labels"], strict=True))[:count]:
                yield {name: (image.astype(np.int16) - shift).astype(dtype)[None]}, int(label)

    return source


def _cifar_frames(root: Path, count: int) -> Iterator[tuple[Sample, int | None]]:
    with np.load(root / "inputs" / "cifar10_50.npz", allow_pickle=False) as stored:
        for image, label in list(zip(stored["images"], stored["labels"], strict=True))[:count]:
            file = io.BytesIO()
            Image.fromarray(image).save(file, "JPEG", quality=QUALITY)
            yield file.getvalue(), int(label)


def _gestures(root: Path, count: int, name: str = "input") -> Iterator[tuple[Sample, int | None]]:
    with np.load(root / "inputs" / "gesture_300.npz", allow_pickle=False) as stored:
        pairs = list(zip(stored["x"], stored["labels"], strict=True))
        for row, label in pairs[:: len(pairs) // count][:count]:
            yield {name: row[None]}, int(label)


def _sound(root: Path) -> np.ndarray[Any, Any]:
    with wave.open(str(root / "inputs" / "audio" / "silero_test.wav")) as file:
        raw = np.frombuffer(file.readframes(file.getnframes()), np.int16).reshape(-1, file.getnchannels())
    return raw[:, 0].astype(np.float32) / np.float32(32768)


def _session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _noise_suppressor(root: Path, count: int, second: bool) -> Iterator[tuple[Sample, int | None]]:
    """DTLN on speech, block by block: the inputs of its first or of its second model, with the states at that block."""
    sound = _sound(root)
    first_model, second_model = (_session(root / "models" / f"dtln_{part}.onnx") for part in (1, 2))
    first_state = second_state = np.zeros((1, 2, 128, 2), np.float32)
    for hop in range(HOPS + 16 * count):
        block = sound[hop * 128 : hop * 128 + 512]
        spectrum = np.fft.rfft(block)
        feeds = {"input_2": np.abs(spectrum).reshape(1, 1, -1).astype(np.float32), "input_3": first_state}
        mask, first_state = first_model.run(None, feeds)
        masked = np.fft.irfft(spectrum * mask.reshape(-1)).reshape(1, 1, -1).astype(np.float32)
        more = {"input_4": masked, "input_5": second_state}
        _, second_state = second_model.run(None, more)
        if hop >= HOPS and (hop - HOPS) % 16 == 0:
            yield (more if second else feeds), None


def _speech(root: Path, count: int) -> Iterator[tuple[Sample, int | None]]:
    """Silero VAD: 512 samples with 64 of context before them, and the state at that block."""
    sound, session = _sound(root), _session(root / "models" / "silero_vad_16k.onnx")
    state = np.zeros((2, 1, 128), np.float32)
    for hop in range(HOPS + 4 * count):
        block = sound[hop * 512 + 448 : hop * 512 + 1024][None]
        feeds = {"input": block, "state": state, "sr": np.array(16000, np.int64)}
        _, state = session.run(None, feeds)
        if hop >= HOPS and (hop - HOPS) % 4 == 0:
            yield feeds, None


_MOBILENET = "nhwc mean=127.5 std=127.5"
_SQUEEZENET = "bgr mean=104,117,123"
_ULTRAFACE = "rgb mean=127 std=128"
_ONNX_MODELS = (
    _Entry("models/squeezenet_fp32.onnx", _tensors("data_0", 224, 224, _SQUEEZENET)),
    _Entry("models/squeezenet_fp32.onnx", _frames(224, 224), f"image/jpeg 224x224 q{QUALITY} {_SQUEEZENET}"),
    _Entry("models/squeezenet_fp16.onnx", _tensors("data_0", 224, 224, _SQUEEZENET, np.float16)),
    _Entry("models/mnist_cnn.onnx", _mnist),
    _Entry("models/yolox_nano.onnx", _tensors("images", 416, 416, "bgr")),
    _Entry("models/yolox_nano.onnx", _frames(416, 416), f"image/jpeg 416x416 q{QUALITY} bgr"),
    _Entry("models/ultraface_rfb_320.onnx", _tensors("input", 320, 240, _ULTRAFACE)),
    _Entry("models/ultraface_rfb_320.onnx", _frames(320, 240), f"image/jpeg 320x240 q{QUALITY} {_ULTRAFACE}"),
    _Entry("models/silero_vad_16k.onnx", _speech, bindings={"batch": 1, "sequence": 576}),
    _Entry("models/dtln_1.onnx", lambda root, count: _noise_suppressor(root, count, False)),
    _Entry("models/dtln_2.onnx", lambda root, count: _noise_suppressor(root, count, True)),
    _Entry("models/gesture_mlp.onnx", _gestures, bindings={"batch": 1}),
    _Entry("examples/digits/digits.onnx", _digits, f"image/jpeg 128x128 q{QUALITY} scale=1/255"),
)
"""The ONNX models; the last is the project's own: handwriting in camera-like frames."""
_TFLITE_MODELS = (
    _Entry("models/gesture_mlp.tflite", lambda root, count: _gestures(root, count, "input_1")),
    _Entry("models/dtln_1.tflite", lambda root, count: _noise_suppressor(root, count, False)),
    _Entry("models/dtln_2.tflite", lambda root, count: _noise_suppressor(root, count, True)),
    _Entry("models/resnet8_cifar10_float.tflite", _cifar("input_1", 0, np.float32)),
    _Entry("models/resnet8_cifar10_float.tflite", _cifar_frames, f"image/jpeg 32x32 q{QUALITY} nhwc"),
    _Entry("models/resnet8_cifar10_int8.tflite", _cifar("input_1_int8", 128, np.int8)),
    _Entry("models/mobilenet_v1_0.25_224_float.tflite", _tensors("input", 224, 224, _MOBILENET)),
    _Entry(
        "models/mobilenet_v1_0.25_224_float.tflite", _frames(224, 224), f"image/jpeg 224x224 q{QUALITY} {_MOBILENET}"
    ),
    _Entry("models/mobilenet_v1_0.75_192_quant.tflite", _tensors("input", 192, 192, "nhwc", np.uint8)),
    _Entry("models/mobilenet_v1_0.75_192_quant.tflite", _frames(192, 192), f"image/jpeg 192x192 q{QUALITY} nhwc uint8"),
    _Entry("models/mobilenet_v1_0.75_192_quant_edgetpu.tflite", _tensors("input", 192, 192, "nhwc", np.uint8)),
)
"""The models that run on LiteRT; the last one is reported as skipped where there is no Edge TPU."""


def scale_to_whole(model: TrainedModel, layers_s: Mapping[str, float], runs: int, rounds: int = 1) -> dict[str, float]:
    """The layers' seconds scaled so that they sum to the whole model's time: in small models, profiled operators take
    up to three times as long as they do without a profiler.

    The least of several rounds counts, since other load on the machine only adds time.
    """
    slices = cut_slices(model.model, model.model.graph, [tuple(layers_s)], None)
    factors = [measure_whole_slices(slices, layers_s, runs=runs).factor or 1.0 for _ in range(rounds)]
    return {name: min(factors) * seconds for name, seconds in layers_s.items()}
