"""A model is pushed with what its outputs are, deployed and asked by the product's own commands: boxes and labels are
those of the reference, at every cut, and the outputs stay as they were."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from edgesplit.client.client import Client
from edgesplit.input_spec import InputSpec, prepare
from support.edgesplit_processes import DIGITS, Agent, Cloud, frames
from support.reference_models import reference_file

SHAPES = [f"shape {number}" for number in range(10)]


@pytest.fixture(scope="module")
def device(cloud: Cloud) -> Agent:
    """One emulated Raspberry Pi 4."""
    return cloud.agent("pi4")


@pytest.mark.parametrize("partition", ["device", "cloud"])
def test_a_detector_answers_with_boxes_wherever_it_runs(
    partition: str, cloud: Cloud, device: Agent, tmp_path: Path
) -> None:
    """YOLOX by its preset: `edgectl infer` tells the reference's boxes in pixels of the photo, and draws them."""
    photo = reference_file("inputs", "photos", "kite_and_cold.jpg")
    expected = json.loads(reference_file("expected.json").read_text())["models"]["models/yolox_nano.onnx"]
    wanted = next(each["detections"] for each in expected["samples"] if each["input"].endswith("kite_and_cold.jpg"))
    model = str(reference_file("models", "yolox_nano.onnx"))
    pushed = cloud.edgectl("model", "push", model, "--name", "yolox", "--preset", "yolo")
    assert "--output boxes:yolox:0.35, 80 names" in " ".join(pushed.split())
    cloud.edgectl("deploy", "yolox", "--partition", partition, "--fallback", "none", "--to", "pi4", "--wait", "120")

    drawing = tmp_path / "out.png"
    asked = ["infer", "yolox", str(photo), "--device", "pi4", "--deadline", "60"]
    text = cloud.edgectl(*asked, "--draw", str(drawing))
    found = cloud.json(*asked)["boxes"]

    assert "kite 0.87 at 591,75,673,155" in text
    assert [(box["index"], round(box["score"], 3)) for box in found] == [(box["cls"], box["score"]) for box in wanted]
    places = [[box[side] for side in ("left", "top", "right", "bottom")] for box in found]
    np.testing.assert_allclose(places, [box["box"] for box in wanted], atol=0.06)
    with Image.open(photo) as before, Image.open(drawing) as after:
        assert after.size == before.size
        changed = np.abs(np.asarray(after.convert("RGB"), int) - np.asarray(before, int)).max(axis=2) > 60
    assert 0 < changed.mean() < 0.1
    left, top = (round(value) for value in wanted[0]["box"][:2])
    assert changed[top - 3 : top + 4, left + 10 : left + 60].any()


def test_a_classifier_of_png_takes_pixels_and_answers_with_names(cloud: Cloud, device: Agent, tmp_path: Path) -> None:
    """Through the client, with an array; its outputs are bit for bit what the whole model gives for the same pixels."""
    names = tmp_path / "names.txt"
    names.write_text("\n".join(SHAPES))
    spec_text = "image/png 128x128 rgb nchw scale=1/255"
    push = ["model", "push", str(DIGITS / "digits.onnx"), "--name", "pixels", "--input", spec_text]
    cloud.edgectl(*push, "--labels", str(names))
    cloud.edgectl("deploy", "pixels", "--to", "pi4", "--wait", "120")
    spec = msgspec.convert(cloud.api.get("/v1/models/pixels")["input_spec"], InputSpec)
    jpeg, _ = frames(1)[0]
    with Image.open(io.BytesIO(jpeg)) as picture:
        pixels = np.asarray(picture.convert("RGB"))

    with Client(device.url) as client:
        answer = client.infer("pixels", pixels, deadline_s=30)
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, "PNG")
        same = client.infer("pixels", {"frame": png.getvalue()}, deadline_s=30)

        import onnxruntime

        session = onnxruntime.InferenceSession(str(DIGITS / "digits.onnx"))
        (output,) = session.run(None, {session.get_inputs()[0].name: prepare(spec, png.getvalue())})
        ((name, value),) = answer.outputs.items()
        np.testing.assert_allclose(value, output, atol=1e-5)
        np.testing.assert_array_equal(value, same.outputs[name])
        best = answer.labels[0]
        assert (best.name, best.index) == (SHAPES[int(output.argmax())], int(output.argmax()))
        assert client.metadata("pixels")["edgesplit"]["output_kind"]["names"] == SHAPES
