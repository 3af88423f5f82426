"""Models of every form from push to answer, through the product's own commands, with real processes: TFLite files,
and ONNX with its weights beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from edgesplit.input_spec import InputSpec, prepare
from support import onnx_models, tflite_models
from support.edgesplit_processes import DIGITS, Agent, Cloud, eventually, frame_input, frames

DIGITS_INPUT = "image/jpeg 128x128 q90 rgb nhwc scale=1/255"


@pytest.fixture(scope="module")
def device(cloud: Cloud) -> Agent:
    """One emulated Raspberry Pi 4."""
    return cloud.agent("pi4")


@pytest.fixture(scope="module")
def small(cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised model, pushed as `small`."""
    file = tmp_path_factory.mktemp("small") / "quantised.tflite"
    file.write_bytes(tflite_models.quantised())
    cloud.edgectl("model", "push", str(file), "--name", "small")
    return file


def helped(device: Agent, model: str, inputs: dict[str, object]) -> object | None:
    """An answer that the cloud had a part in."""
    answer = device.infer(model, inputs)
    return None if answer.report.fallback or answer.report.row == "local" else answer


def test_digits_twin_answers_exactly_as_the_whole(cloud: Cloud, device: Agent, tmp_path: Path) -> None:
    """digits.tflite, cut at two places and left to the planner: bit for bit what LiteRT answers for the whole."""
    cloud.edgectl("model", "push", str(DIGITS / "digits.tflite"), "--name", "twin", "--input", DIGITS_INPUT)
    shown = cloud.json("model", "show", "twin")
    spec = msgspec.convert(cloud.api.get("/v1/models/twin")["input_spec"], InputSpec)
    layers = [layer["name"] for layer in shown["layers"]]
    raw = (DIGITS / "digits.tflite").read_bytes()
    wanted = [
        (jpeg, tflite_models.run_whole(raw, {"image": prepare(spec, jpeg)}, tmp_path)["probabilities"])
        for jpeg, _ in frames(4)
    ]

    for cut_after in (layers[6], layers[len(layers) // 2]):
        cloud.edgectl("deploy", "twin", "--partition", cut_after, "--to", "pi4", "--wait", "120")
        for jpeg, expected in wanted:
            answer = eventually(
                "an answer with the cloud's help", lambda j=jpeg: helped(device, "twin", frame_input(j))
            )
            assert answer.report.split_after == cut_after
            assert np.array_equal(answer.outputs["probabilities"], expected)
    cloud.edgectl("deploy", "twin", "--partition", "auto", "--to", "pi4", "--wait", "120")
    for jpeg, expected in wanted:
        assert np.array_equal(device.infer("twin", frame_input(jpeg)).outputs["probabilities"], expected)


def test_int8_tensors_are_sent_unchanged(cloud: Cloud, device: Agent, small: Path, tmp_path: Path) -> None:
    """A quantised model, cut between its int8 layers: a byte per element goes up, and the answer is the whole's."""
    layers = [layer["name"] for layer in cloud.json("model", "show", "small")["layers"]]
    feeds = tflite_models.feeds_of(tflite_models.prepared("quantised"))
    whole = tflite_models.run_whole(small.read_bytes(), feeds, tmp_path)
    cloud.edgectl("deploy", "small", "--partition", layers[1], "--to", "pi4", "--wait", "120")

    answer = eventually("an answer with the cloud's help", lambda: helped(device, "small", dict(feeds)))
    assert answer.report.split_after == layers[1]
    assert np.array_equal(answer.outputs["y"], whole["y"])


def test_a_refused_file_says_why(cloud: Cloud, tmp_path: Path) -> None:
    """A model with an operator that LiteRT does not have is refused at the push, by that operator's name."""
    file = tmp_path / "strange.tflite"
    file.write_bytes(tflite_models.custom("TakeOver"))
    assert "unknown operator 'TakeOver'" in cloud.edgectl("model", "push", str(file), "--name", "strange", code=3)


def test_a_model_folder_with_external_weights_is_pushed_and_runs(cloud: Cloud, device: Agent, tmp_path: Path) -> None:
    """An ONNX model in two files, pushed as its folder, is cut and answers as the one-file model does."""
    model = onnx.load_model_from_string(onnx_models.chain())
    onnx.save_model(model, str(tmp_path / "m.onnx"), save_as_external_data=True, location="m.data", size_threshold=0)
    cloud.edgectl("model", "push", str(tmp_path), "--name", "parted")
    layers = [layer["name"] for layer in cloud.json("model", "show", "parted")["layers"]]
    one_file = onnx_models.prepared("chain")
    feeds = onnx_models.feeds_of(one_file)
    whole = onnx_models.run_whole(one_file.raw, feeds)
    cloud.edgectl("deploy", "parted", "--partition", layers[1], "--to", "pi4", "--wait", "120")

    answer = eventually("an answer with the cloud's help", lambda: helped(device, "parted", dict(feeds)))
    assert np.array_equal(answer.outputs["probabilities"], whole["probabilities"])


@pytest.mark.usefixtures("small")
def test_a_device_with_an_edge_tpu_falls_back_to_the_twins(cloud: Cloud) -> None:
    """Without Google's compiler the plan says so, and an emulated Coral device answers from its CPU slices."""
    coral = cloud.agent("coral", "coral-usb-rpi4")
    assert "edgetpu_compiler is not on the PATH" in str(cloud.json("plan", "small", "--device", "coral-usb-rpi4"))
    cloud.edgectl("deploy", "small", "--partition", "device", "--to", "coral", "--wait", "120")
    feeds = tflite_models.feeds_of(tflite_models.prepared("quantised"))
    assert coral.infer("small", dict(feeds)).outputs["y"].shape == (1, 6, 6, 4)
