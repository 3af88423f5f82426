"""Proposals: the input spec and the output kind that a model most likely has, by its shapes, names and metadata.

Shapes tell pictures, tokens and sound apart; how pixels were scaled in training they do not tell. Where the file's
exporter, its metadata or the form of its outputs settle that, the proposal can be taken; where they do not, it asks.
Proposed are the conventions of:

    Caffe            BGR less 104, 117, 123 (the mean of ImageNet)
    torchvision      (RGB/255 - mean) / std of ImageNet, of PyTorch exports with 1,000 classes
    TensorFlow-slim  RGB/127.5 - 1, of TFLite files with 1,001 classes
    YOLOX            BGR, 0 to 255, letterbox at the top left
    Ultralytics      RGB/255, letterbox in the middle
    UltraFace        (RGB - 127) / 128
    Windows ML       what the metadata `Image.*` says
    8-bit inputs     pixels as they are
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import msgspec

from edgesplit.answers.kind_text import fits_layout, likely_kind
from edgesplit.errors import UsageError
from edgesplit.input_spec import InputSpec
from edgesplit.release.manifest import TensorSpec
from edgesplit_partitioner.ir.coco_names import COCO_80, COCO_90
from edgesplit_partitioner.ir.hints import Hints
from edgesplit_partitioner.ir.pictures import picture_spec
from edgesplit_partitioner.ir.prepared_model import PreparedModel

CAMERA = "640x480"
"""Size of the frames that a proposal assumes, for plans."""
CROP = "crop=0.875"
CAFFE = "mean=104,117,123"
IMAGENET = "scale=1/255 mean=0.485,0.456,0.406 std=0.229,0.224,0.225"
UNIT = "scale=1/255"
SLIM = "scale=1/127.5 mean=1"
ULTRAFACE = "mean=127 std=128"
PRESETS = ("imagenet", "yolo", "coco-ssd")
TOKENS = ("input_ids", "attention_mask", "token_type_ids", "tokens", "position_ids")
SOUND_WORDS = ("audio", "wav", "sound", "pcm", "speech")
WINDOWS_RANGES = {"NominalRange_0_255": "", "Normalized_0_1": UNIT, "Normalized_1_1": SLIM}
"""Words by the metadata `Image.NominalPixelRange`."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model most likely takes and gives."""

    input: str = ""
    """Text of the input spec; empty: the model takes tensors."""
    output: str = ""
    """Text of the output kind; empty where the outputs are just tensors."""
    names: tuple[str, ...] = ()
    """Names of the classes, where they are known."""
    reason: str
    """What was seen, in a sentence without its stop."""
    question: str = ""
    """What the file does not tell; such a proposal is not taken by itself."""


@dataclass(frozen=True, slots=True)
class _Convention:
    """Words of an input spec, and why."""

    colour: str
    words: str
    reason: str
    question: str = ""
    kind: str = ""
    """The output kind with its own numbers; empty: as the outputs look."""
    names: tuple[str, ...] = ()


def propose(model: PreparedModel) -> Proposal:
    """The proposal for a model."""
    pictures = [(spec, found) for spec in model.inputs if (found := picture_spec(spec)) is not None]
    outputs, names = model.outputs, _names(model)
    kind = likely_kind(outputs, is_picture=bool(pictures))
    if len(pictures) == 1:
        tensor, spec = pictures[0]
        convention = _convention(spec, outputs, model.hints)
        colour = spec.colour if spec.colour == "gray" else convention.colour
        return Proposal(
            input=_text(spec, colour, convention.words), output=convention.kind or kind,
            names=convention.names or (names if kind else ()),
            reason=f"{_shape(tensor)}: looks like a picture; {convention.reason}", question=convention.question,
        )  # fmt: skip
    if pictures:
        return Proposal(output=kind, reason="several inputs look like pictures, so it takes tensors")
    return _without_picture(model.inputs, kind if names else "", names)


def preset(name: str, model: PreparedModel) -> Proposal:
    """The proposal by a preset: `imagenet`, `yolo` (whose generation the outputs tell) or `coco-ssd`. UsageError where
    the model is none."""
    if name not in PRESETS:
        raise UsageError(f"no preset is called {name[:40]!r}: give one of {', '.join(PRESETS)}")
    pictures = [(spec, found) for spec in model.inputs if (found := picture_spec(spec)) is not None]
    if len(pictures) != 1:
        raise UsageError(f"--preset {name}: the model has {len(pictures)} inputs that look like a picture, not one")
    tensor, spec = pictures[0]
    layouts = {"yolo": ("yolox", "yolov8"), "coco-ssd": ("ssd",), "imagenet": ()}[name]
    layout = next((layout for layout in layouts if fits_layout(layout, model.outputs)), "")
    if layouts and not layout:
        raise UsageError(f"--preset {name}: the model's outputs are no boxes of {' or '.join(layouts)}")
    convention = {"imagenet": _IMAGENET, "yolox": _YOLOX, "yolov8": _ULTRALYTICS, "ssd": _SSD}[layout or name]
    kind = f"boxes:{layout}" if layout else likely_kind(model.outputs, is_picture=False)
    return Proposal(
        input=_text(spec, "gray" if spec.colour == "gray" else convention.colour, convention.words), output=kind,
        names=_names(model) if kind else (), reason=f"{_shape(tensor)}: --preset {name}; {convention.reason}",
    )  # fmt: skip


_IMAGENET = _Convention("rgb", f"{CROP} {IMAGENET}", "scaled as torchvision's classifiers of ImageNet")
_YOLOX = _Convention("bgr", "letterbox-topleft", "boxes of YOLOX, which takes BGR from 0 to 255")
_ULTRALYTICS = _Convention("rgb", f"letterbox {UNIT}", "boxes as Ultralytics exports them, whose models take RGB/255")
_SSD = _Convention("rgb", SLIM, "boxes of TensorFlow's SSD")
_RULES: tuple[tuple[Callable[[Sequence[TensorSpec], Hints], bool], _Convention], ...] = (
    (lambda outputs, _: fits_layout("yolox", outputs), _YOLOX),
    (lambda outputs, _: fits_layout("yolov8", outputs), _ULTRALYTICS),
    (lambda _, hints: {"stride", "task"} <= hints.metadata.keys(), _ULTRALYTICS),
    (lambda outputs, _: fits_layout("ssd", outputs), _SSD),
    (
        lambda outputs, _: fits_layout("scores+boxes", outputs) and any(spec.shape[2] == 2 for spec in outputs),
        _Convention(
            "rgb",
            ULTRAFACE,
            "faces as UltraFace gives them, which takes (RGB - 127) / 128",
            kind="boxes:scores+boxes:0.7:0.3",
            names=("face",),
        ),
    ),
    (
        lambda _, hints: "caffe" in hints.producer,
        _Convention("bgr", f"{CROP} {CAFFE}", "exported from Caffe, whose models take BGR less the mean"),
    ),
    (
        lambda outputs, hints: hints.producer == "tflite" and _classes(outputs) == 1001,
        _Convention(
            "rgb", f"{CROP} {SLIM}", "1,001 classes, as TensorFlow-slim's classifiers, which take RGB/127.5 - 1"
        ),
    ),
    (lambda outputs, hints: hints.producer.startswith("pytorch") and _classes(outputs) == 1000, _IMAGENET),
)
"""Conventions, the surest first, each with what tells it."""


def _convention(spec: InputSpec, outputs: Sequence[TensorSpec], hints: Hints) -> _Convention:
    """How the model most likely takes its picture."""
    if not spec.is_float:
        found = next((convention for fits, convention in _RULES[:3] if fits(outputs, hints)), None)
        crop = CROP if _classes(outputs) in (1000, 1001) else ""
        fit = next((word for word in found.words.split() if "letterbox" in word), "") if found else crop
        return _Convention(found.colour if found else "rgb", fit, "8-bit numbers, which are the pixels")
    if (known := WINDOWS_RANGES.get(hints.metadata.get("Image.NominalPixelRange", ""))) is not None:
        colour = "bgr" if "Bgr" in hints.metadata.get("Image.BitmapPixelFormat", "") else "rgb"
        return _Convention(colour, known, "with metadata of Windows ML")
    for fits, convention in _RULES:
        if fits(outputs, hints):
            return convention
    question = (
        "how were pixels scaled in training? The file does not say: give --preset imagenet|yolo|coco-ssd, or --input"
        " with scale=, mean= and std= (none of them: 0 to 255)"
    )
    return _Convention("rgb", UNIT, "how its pixels are scaled is not known", question)


def _without_picture(inputs: Sequence[TensorSpec], kind: str, names: tuple[str, ...]) -> Proposal:
    if any(spec.name.lower() in TOKENS for spec in inputs):
        return Proposal(output=kind, names=names, reason="text as tokens, which are sent as tensors")
    rows = [spec for spec in inputs if spec.datatype == "FP32" and spec.shape and max(spec.shape) == prod(spec.shape)]
    sounds = [spec for spec in rows if any(word in spec.name.lower() for word in SOUND_WORDS)]
    if len(sounds) == 1 and len(inputs) == 1:
        return Proposal(
            input="audio/pcm16 16k", output=kind, names=names,
            reason=f"{_shape(sounds[0])}: by its name looks like sound",
            question="at how many Hz was it trained? Give --input 'audio/pcm16 16k' or another rate",
        )  # fmt: skip
    listed = ", ".join(f"{spec.name} {_shape(spec)}" for spec in inputs)
    return Proposal(output=kind, names=names, reason=f"no input looks like a picture or sound ({listed}): tensors")


def _text(spec: InputSpec, colour: str, words: str) -> str:
    own = [] if spec.datatype == "FP32" else [spec.datatype.lower()]
    numbers = [word for word in words.split() if spec.is_float or not word.startswith(("scale=", "mean=", "std="))]
    if colour == "gray":
        numbers = [word for word in numbers if word.count(",") == 0]
    return " ".join(["image/jpeg", CAMERA, colour, spec.layout, *numbers, *own])


def _names(model: PreparedModel) -> tuple[str, ...]:
    """Names of the classes: the file's own, or COCO's where there are as many."""
    if fits_layout("ssd", model.outputs):
        return model.hints.names or COCO_90
    number = _classes(model.outputs)
    if model.hints.names and number in (0, len(model.hints.names)):
        return model.hints.names
    return COCO_80 if number == len(COCO_80) and not model.hints.names and _is_boxes(model.outputs) else ()


def _is_boxes(outputs: Sequence[TensorSpec]) -> bool:
    return any(fits_layout(layout, outputs) for layout in ("yolox", "yolov8", "scores+boxes"))


def _classes(outputs: Sequence[TensorSpec]) -> int:
    """Number of classes that the outputs have; 0 where it is not known."""
    if fits_layout("yolox", outputs):
        return next(spec.shape[2] - 5 for spec in outputs if len(spec.shape) == 3)
    if fits_layout("yolov8", outputs):
        return next(spec.shape[1] - 4 for spec in outputs if len(spec.shape) == 3)
    if len(outputs) != 1:
        return 0
    return prod(outputs[0].shape) if prod(outputs[0].shape) == max(outputs[0].shape, default=0) else 0


def _shape(spec: TensorSpec) -> str:
    words = {"FP32": "float", "FP16": "float16"}
    return f"{'×'.join(map(str, spec.shape)) or 'scalar'} {words.get(spec.datatype, spec.datatype.lower())}"
