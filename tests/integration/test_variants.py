"""A model is pushed, compressed, shown, planned, deployed and asked; its version keeps its lineage over a restart and
the removal of its base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgesplit.release.lineage import Lineage
from edgesplit.release.manifest import decode_manifest
from support.edgesplit_processes import Cloud, eventually
from support.labelled_shapes import LabelledShapes, labelled_shapes

MOST_WRONG = 0.10


@pytest.fixture(scope="module")
def shapes() -> LabelledShapes:
    return labelled_shapes()


@pytest.fixture
def cloud(tmp_path: Path, shapes: LabelledShapes) -> Iterator[Cloud]:
    """A controller with the classifier pushed, and its samples in a folder."""
    running = Cloud(tmp_path)
    running.start()
    (tmp_path / "shapes.onnx").write_bytes(shapes.model)
    shapes.write_samples(tmp_path / "samples")
    running.edgectl("model", "push", str(tmp_path / "shapes.onnx"), "--name", "shapes")
    yield running
    running.stop()


def test_a_compressed_version_from_push_to_inference(cloud: Cloud, tmp_path: Path, shapes: LabelledShapes) -> None:
    """Base and evidence are told by `model show` and signed in the release; they outlive a restart and the base."""
    samples = str(tmp_path / "samples")
    compress = ["model", "compress", "shapes@1", "--method", "int8", "--samples", samples]

    made = cloud.json(*compress, "--keep-agreement", "95%", "--keep-accuracy", "6pp")

    assert made["model"] == "shapes@2" and made["created"]
    assert made["bytes"] < 0.6 * cloud.json("model", "show", "shapes@1")["bytes"]
    assert not cloud.json(*compress, "--keep-agreement", "95%", "--keep-accuracy", "6pp")["created"]
    shown = cloud.edgectl("model", "show", "shapes@2")
    assert "made from shapes@1 by int8" in shown and "of answers differ (90 % sure, 120 samples" in shown
    assert "accuracy" in shown and "variants: shapes@2" in cloud.edgectl("model", "show", "shapes@1")
    events = cloud.api.get("/v1/events")
    pushed = [event for event in events if event["action"] == "model.pushed" and event["subject"] == "shapes@2"]
    assert pushed[0]["detail"]["base"] == "shapes@1"

    assert "shapes@2" in cloud.edgectl("plan", "shapes@2", "--device", "raspberrypi4", "--link", "wifi")
    agent = cloud.agent("pi")
    deploy = ["deploy", "shapes@2", "--to", "pi", "--partition", "device"]
    cloud.edgectl(*deploy, "--gate", "accuracy>90%", "--gate", "agreement>95%", "--gate-after", "1h", "--wait", "60")
    eventually("the gates passed", lambda: cloud.json("rollout", "list")[0]["state"] == "finished")
    scores = [agent.infer("shapes", {"image": one[np.newaxis]}).outputs["scores"] for one in shapes.inputs[:60]]
    answers = [int(np.argmax(each)) for each in scores]
    wrong = sum(answer != label for answer, label in zip(answers, shapes.labels, strict=False))
    assert wrong <= MOST_WRONG * len(answers)
    failed = cloud.json("deploy", "shapes@1", "--to", "pi", "--partition", "device", "--gate", "accuracy>99.5%")
    eventually("the gate failed", lambda: cloud.json("rollout", "status", str(failed["rollout"]))["state"] == "failed")
    last = cloud.json("rollout", "status", str(failed["rollout"]))
    assert last["failures"][0]["kind"] == "gate accuracy>99.5%" and "it is 9" in last["failures"][0]["example"]
    (release,) = [one for one in cloud.api.get("/v1/releases") if one["model"] == "shapes@2"]
    eventually("it is back", lambda: cloud.api.get("/v1/devices/pi")["models"][0]["release"] == release["release"])
    signed = decode_manifest((cloud.data / "offload" / "releases" / release["release"] / "manifest.json").read_bytes())
    assert len(signed.golden) == 80 and all(isinstance(golden.label, int) for golden in signed.golden)
    assert isinstance(signed.lineage, Lineage) and signed.lineage.base == "shapes@1"
    assert signed.lineage.evidence.accuracy_variant is not None and signed.lineage.recipe["method"] == "int8"

    cloud.process.stop()
    cloud.start()
    assert cloud.json("model", "show", "shapes@2")["lineage"] == made["lineage"]
    gone = cloud.edgectl("model", "remove", "shapes@1")
    assert "removed shapes@1" in gone and "shapes@2 stood in for it, and stays" in gone
    assert "made from shapes@1 by int8" in cloud.edgectl("model", "show", "shapes")
    assert agent.infer("shapes", {"image": shapes.inputs[:1]}).outputs["scores"].shape == (1, 6)


def test_a_missed_gate_stores_nothing(cloud: Cloud, tmp_path: Path) -> None:
    """Too few samples, a variant that answers otherwise, and one that answers something else: which it is, and no
    version is there afterwards."""
    samples = str(tmp_path / "samples")
    gate = ["--samples", samples, "--keep-agreement"]
    few = cloud.edgectl("model", "compress", "shapes", "--method", "fp16", *gate, "99.9%", code=4)
    assert "samples" in few
    other = tmp_path / "other.onnx"
    other.write_bytes(labelled_shapes(1, seed=7).model)
    missed = cloud.edgectl("model", "push", str(other), "--variant-of", "shapes", *gate, "95%", code=4)
    assert "Nothing was stored" in missed
    cloud.edgectl("model", "push", str(other), "--variant-of", "shapes", "--samples", samples, code=2)
    assert [one["model"] for one in cloud.json("model", "list")] == ["shapes@1"]
