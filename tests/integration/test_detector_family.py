"""A family of detectors from its models to an answer by its cascade, through the product's own commands, with real
processes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest

from edgesplit.answers.answer_rule import rule_of_boxes
from edgesplit.answers.comparison import answers_differ
from edgesplit.answers.detections import RULE, to_detections
from edgesplit.input_spec import FRAME, parse_input_spec, prepare
from edgesplit.lazy_import import Tensor
from support.detectors import INPUT, LARGE, SMALL, SURE, Picture, draw_pictures, large_detector, small_detector
from support.edgesplit_processes import Agent, Cloud, eventually

COUNT = 60
ASKED = ("dets", "--cascade", "--changed", "8%", "--certainty", "80%")


class Detector:
    """A whole model, run here."""

    def __init__(self, raw: bytes, rule: str, output: str, side: int) -> None:
        self._session = onnxruntime.InferenceSession(raw)
        self._rule, self._output, self._side = rule_of_boxes(rule, (output,)), output, side

    def see(self, picture: Picture) -> dict[str, Tensor]:
        """The boxes that it sees, as the family gives them."""
        spec = parse_input_spec(INPUT)
        sized = msgspec.structs.replace(spec, tensor="image", tensor_width=self._side, tensor_height=self._side)
        outputs = self._session.run([self._output], {"image": prepare(sized, picture.jpeg)})
        return to_detections(self._rule, {self._output: outputs[0]})


@pytest.fixture(scope="module")
def pictures() -> list[Picture]:
    """The first `COUNT` make the family."""
    return draw_pictures(COUNT + 20, seed=41)


@pytest.fixture(scope="module")
def detectors(cloud: Cloud, pictures: list[Picture], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Detector]:
    """`dets`, of a small and a large detector, with what the pictures show beside them."""
    folder = tmp_path_factory.mktemp("detectors")
    raw = {"near": small_detector(with_score=True), "far": large_detector()}
    samples = folder / "samples"
    samples.mkdir()
    for name, model in raw.items():
        (folder / f"{name}.onnx").write_bytes(model)
        cloud.edgectl("model", "push", str(folder / f"{name}.onnx"), "--name", name, "--input", INPUT)
    for number, picture in enumerate(pictures[:COUNT]):
        (samples / f"{number}.jpg").write_bytes(picture.jpeg)
        boxes = [{"box": box, "label": label} for box, label in picture.boxes]
        (samples / f"{number}.json").write_text(json.dumps(boxes))
    variants = ("--variant", "near", "--variant", "far", "--answer", SMALL, "--answer", f"far={LARGE}")
    refused = cloud.edgectl("family", "create", "dets", *variants[:4], "--samples", str(samples), code=2)
    assert "are not one classification" in refused and "boxes:LAYOUT" in refused
    made = cloud.json("family", "create", "dets", *variants, "--samples", str(samples))
    assert made["samples"] == COUNT and not made["reference"] and made["variants"][1]["right"] == COUNT
    for number in range(COUNT):
        (samples / f"{number}.json").unlink()
    told = cloud.edgectl("family", "create", "blind", *variants, "--samples", str(samples))
    assert "no labels" in told and "as far does" in told
    return {
        "near": Detector(raw["near"], SMALL, "dets", 64), "far": Detector(raw["far"], LARGE, "output0", 128),
    }  # fmt: skip


@pytest.fixture(scope="module")
def device(cloud: Cloud, detectors: dict[str, Detector]) -> Agent:
    """One emulated Raspberry Pi 4, which the cascade is deployed to."""
    agent = cloud.agent("pi4")
    deployed = cloud.json("deploy", *ASKED, "--to", "pi4", "--wait", "60")
    assert deployed["plans"][0]["cascade"]["score"] == "boxes"
    return agent


def answer(device: Agent, picture: Picture, **options: Any) -> Any:
    frame = np.frombuffer(picture.jpeg, np.uint8)
    return device.client.infer("dets", {FRAME: frame}, deadline_s=10.0, **options)


def test_the_cascade_is_planned_by_boxes_or_by_an_output(cloud: Cloud, detectors: dict[str, Detector]) -> None:
    """In words too; a family without labels keeps no floor, and says so."""
    text = cloud.edgectl("plan", *ASKED, "--device", "raspberrypi4", "--explain")
    assert "near, then far where the least margin of a box is below" in text and f"80 % sure, {COUNT} samples" in text
    by_output = cloud.json("plan", *ASKED, "--score", f"output:{SURE}", "--device", "raspberrypi4")["cascade"]
    assert (by_output["cascade"]["score"], by_output["cascade"]["score_output"]) == ("output", SURE)
    wrong = cloud.edgectl("plan", *ASKED, "--score", "margin", "--device", "raspberrypi4", code=2)
    assert "no score margin" in wrong
    blind = cloud.edgectl("plan", "blind", "--device", "raspberrypi4", "--explain")
    assert "agreement" in blind and "accuracy is not known" in blind
    floor = cloud.edgectl("plan", "blind", "--least-accuracy", "70%", "--device", "raspberrypi4", code=2)
    assert "have no labels" in floor


def test_each_answer_is_its_variants_own_boxes(
    cloud: Cloud, device: Agent, detectors: dict[str, Detector], pictures: list[Picture]
) -> None:
    """In one form, whoever answers: sure frames here, unsure ones by the large detector beyond the link."""
    asked, sent = {"near": 0, "far": 0}, 0
    threshold = cloud.json("plan", *ASKED, "--device", "raspberrypi4")["cascade"]["cascade"]["threshold"]
    for picture in pictures:
        got = answer(device, picture)
        assert set(got.outputs) == {"boxes"} and got.outputs["boxes"].shape[::2] == (1, 6)
        assert not answers_differ(RULE, got.outputs, detectors[got.report.variant].see(picture))
        assert got.report.escalated == (got.report.score < threshold) == (got.report.variant == "far")
        asked[got.report.variant] += 1
        sent += got.report.up_bytes > 0
    assert asked["near"] > len(pictures) / 2 and asked["far"] >= sent > 0


def test_without_a_link_an_unsure_answer_is_marked(
    cloud: Cloud, device: Agent, detectors: dict[str, Detector], pictures: list[Picture]
) -> None:
    """The controller with its offload server is gone: the small detector's boxes, or the large one's from here."""
    cloud.process.stop()
    try:
        for picture in pictures[:10]:
            got = eventually("an answer", lambda picture=picture: answer(device, picture))
            assert not answers_differ(RULE, got.outputs, detectors[got.report.variant].see(picture))
            assert got.report.variant == "far" or not got.report.escalated
    finally:
        cloud.start()
