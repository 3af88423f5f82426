"""Proposals of input specs and output kinds: over the trained models, and what each hint of a file changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from edgesplit.answers.kind_text import parse_output_kind
from edgesplit.errors import UsageError
from edgesplit.input_spec import parse_input_spec
from edgesplit_partitioner.ir.coco_names import COCO_80, COCO_90
from edgesplit_partitioner.ir.hints import Hints, parse_names
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.onnx_format.model import OnnxModel
from edgesplit_partitioner.proposals import PRESETS, Proposal, preset, propose
from support import onnx_models as tiny
from support.reference_models import reference_file

TENSORS = ""
CROPPED_PIXELS = "rgb nhwc crop=0.875 uint8"
CAFFE = "bgr nchw crop=0.875 mean=104,117,123"
SLIM = "rgb nhwc crop=0.875 scale=1/127.5 mean=1"
TRUTH = {
    "dtln_1.onnx": TENSORS, "dtln_1.tflite": TENSORS, "dtln_2.onnx": TENSORS, "dtln_2.tflite": TENSORS,
    "gesture_mlp.onnx": TENSORS, "gesture_mlp.tflite": TENSORS, "silero_vad_16k.onnx": TENSORS,
    "mnist_cnn.onnx": "gray nchw", "resnet8_cifar10_float.tflite": "rgb nhwc",
    "resnet8_cifar10_int8.tflite": "rgb nhwc int8",
    "mobilenet_v1_0.25_128_quant.tflite": CROPPED_PIXELS, "mobilenet_v1_0.5_160_quant.tflite": CROPPED_PIXELS,
    "mobilenet_v1_0.75_192_quant.tflite": CROPPED_PIXELS, "mobilenet_v2_1.0_224_quant.tflite": CROPPED_PIXELS,
    "mobilenet_v1_0.75_192_quant_edgetpu.tflite": CROPPED_PIXELS, "mobilenet_v1_0.25_224_float.tflite": SLIM,
    "squeezenet_fp16.onnx": f"{CAFFE} fp16", "squeezenet_fp32.onnx": CAFFE,
    "ultraface_rfb_320.onnx": "rgb nchw mean=127 std=128", "yolox_nano.onnx": "bgr nchw letterbox-topleft",
}  # fmt: skip
"""What each of the trained models takes, by SOURCES.md beside them, apart from the camera's format and size."""
BINDINGS = {"silero_vad_16k.onnx": {"sequence": 576}}
KINDS = {"ultraface_rfb_320.onnx": "boxes:scores+boxes:0.7:0.3", "yolox_nano.onnx": "boxes:yolox"}


def as_taken(text: str) -> str:
    """A spec without the camera's format and size, which no model has."""
    return " ".join(text.split()[2:])


def test_four_of_five_proposals_are_right_and_the_others_ask(capsys: pytest.CaptureFixture[str]) -> None:
    """Over the trained models: a proposal that does not ask is right for every one, and at most a fifth asks."""
    folder = reference_file("models")
    table: list[tuple[str, Proposal]] = []
    for name in sorted(TRUTH):
        raw = Path(folder, name).read_bytes()
        table.append((name, propose(prepare_model(raw, BINDINGS.get(name, {})))))
    with capsys.disabled():
        print()
        for name, proposal in table:
            verdict = "asks" if proposal.question else "right" if as_taken(proposal.input) == TRUTH[name] else "WRONG"
            print(f"{verdict:6} {name:44} {proposal.input or 'tensors'} | {proposal.output or '-'}")

    asks = [name for name, proposal in table if proposal.question]
    assert [as_taken(proposal.input) for name, proposal in table if name not in asks] == [
        TRUTH[name] for name, _ in table if name not in asks
    ]
    assert len(asks) <= len(table) / 5
    for name, proposal in table:
        if name in KINDS:
            assert proposal.output == KINDS[name]


def picture_model(
    shape: tuple[int, ...] = (1, 3, 96, 96), outputs: tuple[tuple[int, ...], ...] = ((1, 7),), name: str = "x",
    datatype: int = TensorProto.FLOAT, **hints: object,
) -> OnnxModel:  # fmt: skip
    """A model of one input with outputs of these shapes, whose file says `hints`."""
    nodes = [
        helper.make_node("Cast", [name], ["c"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["c"], ["m"]),
    ]
    nodes += [helper.make_node("Expand", ["m", f"s{n}"], [f"e{n}"]) for n in range(len(outputs))]
    nodes += [helper.make_node("Reshape", [f"e{n}", f"s{n}"], [f"y{n}"]) for n in range(len(outputs))]
    shapes = [
        helper.make_tensor(f"s{n}", TensorProto.INT64, [len(output)], list(output)) for n, output in enumerate(outputs)
    ]
    values = [tiny.value(f"y{n}", output) for n, output in enumerate(outputs)]
    model = prepare_model(tiny.build(nodes, [tiny.value(name, shape, datatype)], values, shapes))
    assert isinstance(model, OnnxModel)
    return replace(model, hints=Hints(**hints)) if hints else model


@pytest.mark.parametrize(
    ("hints", "outputs", "words", "asks"),
    [
        ({}, ((1, 7),), "rgb nchw scale=1/255", True),
        ({"producer": "pytorch"}, ((1, 1000),), "mean=0.485,0.456,0.406", False),
        ({"producer": "tf2onnx"}, ((1, 1000),), "rgb nchw scale=1/255", True),
        ({"producer": "onnx-caffe2"}, ((1, 7),), "bgr nchw crop=0.875 mean=104,117,123", False),
        ({"metadata": {"stride": "32", "task": "x"}}, ((1, 7),), "rgb nchw letterbox scale=1/255", False),
        ({"metadata": {"Image.BitmapPixelFormat": "Bgr8", "Image.NominalPixelRange": "NominalRange_0_255"}},
         ((1, 7),), "640x480 bgr nchw", False),
        ({}, ((1, 84, 189),), "rgb nchw letterbox scale=1/255", False),
        ({}, ((1, 189, 85),), "bgr nchw letterbox-topleft", False),
    ],
)  # fmt: skip
def test_what_the_file_says_settles_the_scale(
    hints: dict[str, object], outputs: tuple[tuple[int, ...], ...], words: str, asks: bool
) -> None:
    """Exporter, metadata and the form of the outputs; without any of them it asks. Each is a spec that parses."""
    proposal = propose(picture_model(outputs=outputs, **hints))
    assert words in proposal.input and bool(proposal.question) == asks
    parse_input_spec(proposal.input)
    assert "1×3×96×96 float: looks like a picture" in proposal.reason


@pytest.mark.parametrize(
    ("name", "shape", "datatype", "reason"),
    [
        ("input_ids", (1, 16), TensorProto.INT64, "text as tokens"),
        ("features", (1, 40), TensorProto.FLOAT, "tensors"),
        ("x", (1, 3, 8, 8), TensorProto.FLOAT, "tensors"), ("x", (1, 64, 64, 5), TensorProto.FLOAT, "tensors"),
    ],
)  # fmt: skip
def test_what_is_no_picture_stays_tensors(name: str, shape: tuple[int, ...], datatype: int, reason: str) -> None:
    """Tokens, features and small or many-planed tensors: there is nothing to decode, and nothing is asked."""
    proposal = propose(picture_model(shape, name=name, datatype=datatype))
    assert (proposal.input, proposal.question) == ("", "")
    assert reason in proposal.reason


def test_sound_is_told_by_its_name_and_asks_for_its_rate() -> None:
    """No file says at how many Hz it was trained."""
    proposal = propose(picture_model((1, 16_000), name="audio"))
    assert proposal.input == "audio/pcm16 16k" and "Hz" in proposal.question


def test_names_are_the_files_own_or_those_of_coco() -> None:
    """Of Ultralytics' metadata; COCO's for detectors with 80 classes; none that do not fit in number."""
    detector = ((1, 84, 189),)
    assert propose(picture_model(outputs=detector)).names == COCO_80
    own = tuple(f"thing {n}" for n in range(7))
    assert propose(picture_model(producer="pytorch", names=own)).names == own
    assert propose(picture_model(producer="pytorch", names=own[:3])).names == ()
    assert (len(COCO_80), len(COCO_90), COCO_90[0], COCO_90[11], COCO_90[89]) == (80, 90, "person", "", "toothbrush")


def test_names_of_metadata_are_read_without_running_them() -> None:
    """A Python dictionary by its form, with any quotes; what is not whole is none."""
    assert parse_names("{0: 'person', 1: \"dog's bowl\"}") == ("person", "dog's bowl")
    assert parse_names("{0: 'person', 2: 'car'}") == ()
    assert parse_names("{0: __import__('os')}") == ()
    assert parse_names("cat\ndog\n") == ("cat", "dog")


@pytest.mark.parametrize(
    ("name", "outputs", "words", "kind"),
    [
        ("imagenet", ((1, 1000),), "crop=0.875 scale=1/255 mean=0.485,0.456,0.406", "labels"),
        ("yolo", ((1, 189, 85),), "bgr nchw letterbox-topleft", "boxes:yolox"),
        ("yolo", ((1, 84, 189),), "rgb nchw letterbox scale=1/255", "boxes:yolov8"),
        ("coco-ssd", ((1, 10, 4), (1, 10), (1, 10), (1,)), "rgb nchw scale=1/127.5 mean=1", "boxes:ssd"),
    ],
)  # fmt: skip
def test_presets_give_spec_and_kind(name: str, outputs: tuple[tuple[int, ...], ...], words: str, kind: str) -> None:
    """Whatever the file says; the generation of YOLO is that of the outputs. Both texts parse."""
    model = picture_model(outputs=outputs)
    proposal = preset(name, model)
    assert words in proposal.input and not proposal.question
    assert proposal.output == kind
    parse_input_spec(proposal.input)
    assert parse_output_kind(proposal.output, model.outputs).kind == kind.partition(":")[0]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_that_does_not_fit_is_refused(name: str) -> None:
    """A model without a picture, and a detector's preset of a classifier."""
    with pytest.raises(UsageError, match="0 inputs that look like a picture"):
        preset(name, picture_model((1, 40)))
    if name != "imagenet":
        with pytest.raises(UsageError, match="no boxes"):
            preset(name, picture_model())


def test_a_preset_leaves_pixels_of_8_bits_as_they_are() -> None:
    """A quantised classifier has the same crop and no scale."""
    proposal = preset("imagenet", picture_model((1, 96, 96, 3), ((1, 1000),), datatype=TensorProto.UINT8))
    assert proposal.input == "image/jpeg 640x480 rgb nhwc crop=0.875 uint8"
