"""Answers read by their output kind: labels and boxes equal the references, masks and embeddings by hand."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from PIL import Image

from edgesplit.answers.kind_text import likely_kind, parse_output_kind
from edgesplit.answers.reading import mask_on_picture, read_boxes, read_embedding, read_labels, read_mask
from edgesplit.errors import InferenceFailed, UsageError
from edgesplit.input_spec import parse_input_spec, prepare
from edgesplit.output_kind import OutputKind
from edgesplit.release.manifest import TensorSpec
from support.reference_models import reference_file

LABELS = OutputKind(kind="labels", outputs=("y",), names=("background", "cat", "", "dog"))


def outputs_of(reference: str) -> tuple[dict[str, np.ndarray], list[TensorSpec]]:
    """The stored outputs of a trained model, by name, with their specifications."""
    with np.load(reference_file("ref", f"{reference}.npz")) as arrays:
        outputs = {name[4:]: arrays[name] for name in arrays.files if name.startswith("out:")}
    return outputs, [TensorSpec(name, "FP32", value.shape) for name, value in outputs.items()]


@pytest.mark.parametrize(
    ("model", "reference", "picture", "kind", "words", "tensor"),
    [
        ("yolox_nano.onnx", "yolox_nano.onnx__kite_and_cold", "photos/kite_and_cold.jpg", "boxes:yolox",
         "bgr letterbox-topleft", (416, 416)),
        ("yolox_nano.onnx", "yolox_nano.onnx__000000000724", "coco/000000000724.jpg", "boxes:yolox",
         "bgr letterbox-topleft", (416, 416)),
        ("ultraface_rfb_320.onnx", "ultraface_rfb_320.onnx__face", "photos/face.jpg", "boxes:scores+boxes:0.7:0.3",
         "mean=127 std=128", (320, 240)),
    ],
)  # fmt: skip
def test_boxes_are_those_of_the_reference(
    model: str, reference: str, picture: str, kind: str, words: str, tensor: tuple[int, int]
) -> None:
    """Class, score and place in the photo of each, as the models' own post-processing found them."""
    outputs, specs = outputs_of(reference)
    expected = json.loads(reference_file("expected.json").read_text())["models"][f"models/{model}"]["samples"]
    wanted = next(sample["detections"] for sample in expected if sample["input"] == f"inputs/{picture}")
    spec = msgspec.structs.replace(
        parse_input_spec(f"image/jpeg 640x480 {words}"), tensor="x", tensor_width=tensor[0], tensor_height=tensor[1]
    )
    with Image.open(reference_file("inputs", picture)) as photo:
        size = photo.size

    found = read_boxes(parse_output_kind(kind, specs), outputs, size, spec)

    assert [(box.index, round(box.score, 3)) for box in found] == [(box["cls"], box["score"]) for box in wanted]
    places = [(box.left, box.top, box.right, box.bottom) for box in found]
    np.testing.assert_allclose(places, [box["box"] for box in wanted], atol=0.06)


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        ("squeezenet_fp32.onnx", "n01440764"), ("squeezenet_fp16.onnx", "n01819313"),
        ("mobilenet_v1_0.25_224_float.tflite", "n01819313"), ("mobilenet_v1_0.75_192_quant.tflite", "n01440764"),
    ],
)  # fmt: skip
def test_labels_are_those_of_the_reference(model: str, reference: str) -> None:
    """The likeliest class, by its name among the 1,001 labels, and its probability; of 8-bit outputs, too."""
    outputs, specs = outputs_of(f"{model}__{reference}")
    names = reference_file("labels", "imagenet_labels_1001.txt").read_text().splitlines()
    expected = json.loads(reference_file("expected.json").read_text())["models"][f"models/{model}"]
    offset = 1 - expected["index_offset"]
    wanted = next(sample for sample in expected["samples"] if reference in sample["input"])

    best, *_ = read_labels(parse_output_kind("labels", specs, names[offset:]), outputs)

    assert (best.index, best.name) == (wanted["top1_index"], names[wanted["top1_class"] + 1])
    scale = 256 if "quant" in model and wanted["top1_value"] > 1 else 1
    assert best.score == pytest.approx(wanted["top1_value"] / scale, abs=1e-3)


def test_labels_have_names_where_they_are_known() -> None:
    """The likeliest first; a class without a name is its index; logits become probabilities."""
    logits = {"y": np.log(np.array([[0.1, 0.5, 0.1, 0.3]], np.float32)) + 3}
    assert [str(label) for label in read_labels(LABELS, logits, most=3)] == ["cat 0.50", "dog 0.30", "background 0.10"]
    assert read_labels(LABELS, {"y": np.array([0.0, 0, 1, 0])})[0].name == "2"
    with pytest.raises(InferenceFailed, match="not finite"):
        read_labels(LABELS, {"y": np.array([[1.0, np.nan, 0, 0]])})
    with pytest.raises(UsageError, match="gives no boxes"):
        read_boxes(LABELS, logits)


def test_a_box_is_told_with_its_name_and_place() -> None:
    """As a person reads it; of two that overlap, the better one, by the kind's own measure of overlap."""
    outputs = {
        "scores": np.array([[[0, 0.93], [0, 0.8], [0, 0.2]]], np.float32),
        "boxes": np.array([[[0.1, 0.1, 0.5, 0.5], [0.1, 0.1, 0.5, 0.4], [0.6, 0.6, 0.9, 0.9]]], np.float32),
    }
    spec = msgspec.structs.replace(parse_input_spec("image/jpeg 8x8"), tensor="x", tensor_width=10, tensor_height=10)
    kind = OutputKind(kind="boxes", outputs=("scores", "boxes"), layout="scores+boxes", threshold=0.35, names=("cat",))
    assert [str(box) for box in read_boxes(kind, outputs, (200, 100), spec)] == ["cat 0.93 at 20,10,100,50"]
    assert len(read_boxes(msgspec.structs.replace(kind, overlap=0.9), outputs, (200, 100), spec)) == 2
    assert read_boxes(kind, outputs)[0].right == pytest.approx(0.5)


@pytest.mark.parametrize("planes_last", [False, True])
def test_a_mask_is_the_likeliest_class_of_each_pixel(planes_last: bool) -> None:
    """Classes before or behind rows and columns; one plane is above a half or not; whole numbers are classes."""
    kind = OutputKind(kind="mask", outputs=("y",))
    scores = np.random.default_rng(7).random((1, 3, 20, 24), np.float32)
    given = scores.transpose(0, 2, 3, 1) if planes_last else scores
    np.testing.assert_array_equal(read_mask(kind, {"y": given}), scores[0].argmax(axis=0))
    np.testing.assert_array_equal(read_mask(kind, {"y": scores[:, :1]}), scores[0, 0] >= 0.5)
    whole = (scores[:, 0] * 9).astype(np.int64)
    np.testing.assert_array_equal(read_mask(kind, {"y": whole}), whole[0])


@pytest.mark.parametrize("fit", ["", "letterbox", "letterbox-topleft", "crop=0.5"])
def test_a_mask_lies_on_the_picture_as_the_picture_in_the_tensor(fit: str) -> None:
    """Each pixel has the class of its place, to a pixel of the mask; what a crop cuts off has none."""
    spec = parse_input_spec(f"image/raw 120x60 gray8 gray uint8 nhwc {fit}".strip())
    spec = msgspec.structs.replace(spec, tensor="x", tensor_width=64, tensor_height=64)
    picture = np.zeros((60, 120), np.uint8)
    picture[20:40, 40:80] = 255
    seen = (prepare(spec, picture.tobytes())[0, :, :, 0] > 127).astype(np.int32)
    placed = mask_on_picture(seen, (120, 60), spec)
    shown = placed >= 0
    assert placed.shape == (60, 120)
    assert np.mean(placed[shown] != (picture > 0)[shown]) < 0.06
    assert shown.all() == (fit != "crop=0.5")


def test_an_embedding_has_length_one() -> None:
    """Whatever the output's scale and shape; a vector without a direction is an error."""
    kind = OutputKind(kind="embedding", outputs=("y",))
    vector = read_embedding(kind, {"y": np.array([[[3.0, 4.0]]], np.float32)})
    np.testing.assert_allclose(vector, [0.6, 0.8], rtol=1e-6)
    for broken in (np.zeros(3), np.array([1.0, np.inf])):
        with pytest.raises(InferenceFailed, match="no direction"):
            read_embedding(kind, {"y": broken})


SCORES, VECTOR = TensorSpec("s", "FP32", (1, 10)), TensorSpec("embedding", "FP32", (1, 128))
PLANES = TensorSpec("m", "FP32", (1, 21, 64, 64))


@pytest.mark.parametrize(
    ("text", "outputs", "written"),
    [
        ("labels", [SCORES], "labels:s"), ("mask", [PLANES, SCORES], "mask:m"),
        ("embedding:embedding", [SCORES, VECTOR], "embedding:embedding"),
        ("boxes:yolox", [TensorSpec("b", "FP32", (1, 21, 7))], "boxes:yolox:0.35"),
        ("boxes:yolox:0.6:0.4", [TensorSpec("b", "FP32", (1, 21, 7))], "boxes:yolox:0.6:0.4"),
    ],
)  # fmt: skip
def test_a_kind_is_written_as_it_is_read(text: str, outputs: list[TensorSpec], written: str) -> None:
    """With the output and the numbers that were left out; what is written is read as the same."""
    kind = parse_output_kind(text, outputs)
    assert kind.to_text() == written
    assert parse_output_kind(written, outputs) == kind
    assert msgspec.json.decode(msgspec.json.encode(kind), type=OutputKind) == kind


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tags", "give labels, boxes:LAYOUT"), ("labels:z", "'z' has not one number for each class"),
        ("boxes:yolo9", "no layout"), ("boxes:yolox:a", "not a number"), ("boxes:yolox:2", "needs one output"),
        ("mask", "no output can be a mask"), ("embedding:z", "several outputs can be it, or 'z' cannot"),
        ("boxes:yolox:0.1:0.2:0.3", "two numbers at most"),
    ],
)  # fmt: skip
def test_a_kind_that_does_not_fit_is_refused(text: str, why: str) -> None:
    """The error says what the model has, or what to type."""
    with pytest.raises(UsageError, match=why):
        parse_output_kind(text, [SCORES])


def test_fields_that_do_not_belong_together_are_refused() -> None:
    """Also in what a manifest says."""
    for broken in ({"kind": "labels", "layout": "yolox"}, {"kind": "boxes"}, {"kind": "mask", "threshold": 2.0}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"outputs": ["y"], **broken}, OutputKind)


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        ([SCORES], "labels"), ([VECTOR], "embedding"), ([PLANES], "mask"), ([PLANES, SCORES], ""),
        ([TensorSpec("b", "FP32", (1, 84, 8400))], "boxes:yolov8"),
        ([TensorSpec("b", "FP32", (1, 8400, 85))], "boxes:yolox"),
        ([TensorSpec("h", "FP32", (1, 5, 7))], ""),
    ],
)  # fmt: skip
def test_the_kind_that_outputs_look_like(outputs: list[TensorSpec], kind: str) -> None:
    """By their shapes and names; nothing where it is not known. 84 values of a cell are not 84 cells."""
    assert likely_kind(outputs, is_picture=True) == kind
