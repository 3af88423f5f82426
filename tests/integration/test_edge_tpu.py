"""A float TFLite model reaches an Edge TPU: int8 version, compiled cuts, their CPU twins; real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgesplit.input_spec import InputSpec, prepare
from edgesplit.release.manifest import decode_manifest
from edgesplit_partitioner.edgetpu import COMPILER
from edgesplit_partitioner.tflite_format.flatbuffer import EDGE_TPU_OPERATOR
from support import tflite_models
from support.edgesplit_processes import DIGITS, Cloud, frame_input, frames

INPUT = "image/jpeg 128x128 q90 rgb nhwc scale=1/255"
CORAL = ["--device", "coral-usb-rpi4", "--link", "wifi"]
MOST_WRONG = 0.15


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A controller with a compiler on its PATH: Google's where it is installed, else a stand-in that makes a file for
    the Edge TPU of whatever it is given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "compiled").write_bytes(tflite_models.custom(EDGE_TPU_OPERATOR))
    program = folder / COMPILER
    program.write_text(f'#!/bin/sh\n# -s -o FOLDER FILE\ncp "{folder}/compiled" "$3/half_edgetpu.tflite"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{folder}")
    running = Cloud(tmp_path)
    running.start()
    yield running
    running.stop()


def test_a_float_tflite_model_reaches_an_edge_tpu(cloud: Cloud, tmp_path: Path) -> None:
    """The plan of the float version says what to do. The int8 one is planned for the Edge TPU, its release carries
    compiled device halves, and a device without the accelerator answers by their CPU twins: the version's own answers,
    most of them right."""
    cloud.edgectl("model", "push", str(DIGITS / "digits.tflite"), "--name", "digits", "--input", INPUT)
    assert "edgectl model compress NAME --method int8" in str(cloud.json("plan", "digits@1", *CORAL))

    made = cloud.json(
        "model", "compress", "digits@1", "--method", "int8", "--samples", str(DIGITS / "frames"),
        "--keep-agreement", "90%",
    )  # fmt: skip

    assert made["model"] == "digits@2" and made["lineage"]["recipe"]["format"] == "tflite"
    planned = str(cloud.json("plan", "digits@2", *CORAL))
    assert f"compiled per cut by {COMPILER}" in planned and "Edge TPU idle" not in planned
    device = cloud.agent("coral", "coral-usb-rpi4")
    cloud.edgectl("deploy", "digits@2", "--partition", "device", "--to", "coral", "--wait", "120")
    (release,) = cloud.api.get("/v1/releases")
    signed = decode_manifest((cloud.data / "offload" / "releases" / release["release"] / "manifest.json").read_bytes())
    (compiled,) = signed.compiled
    assert compiled.device_class == "coral-usb-rpi4" and compiled.slice.kernels == "edgetpu"

    spec = msgspec.convert(cloud.api.get("/v1/models/digits@2")["input_spec"], InputSpec)
    raw = cloud.api.download("/v1/models/digits@2/file")
    seen = frames(40)
    wrong = 0
    for jpeg, label in seen:
        answer = device.infer("digits", frame_input(jpeg))
        expected = tflite_models.run_whole(raw, {"image": prepare(spec, jpeg)}, tmp_path)["probabilities"]
        assert answer.report.row == "local"
        assert np.array_equal(answer.outputs["probabilities"], expected)
        wrong += int(np.argmax(expected)) != label
    assert wrong <= MOST_WRONG * len(seen)
