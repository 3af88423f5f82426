"""A family from its models to an answer, through the product's own commands, with real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgesplit.errors import InfeasibleLimits
from edgesplit.oip.options import InferOptions
from edgesplit_cli.demo.reference_model import WholeModel
from support.edgesplit_processes import Agent, Cloud, eventually
from support.registry_harness import npz

COUNT = 24
CLASSES = 5
SIDE = 64


def a_net(width: int, seed: int) -> bytes:
    """Seeded convolutions of this width, and a classifier: wider ones take longer."""
    rng = np.random.default_rng(seed)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array((rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32), name)

    nodes = [
        onnx.helper.make_node("Conv", ["image", "w1"], ["a"], "conv1", kernel_shape=[3, 3]),
        onnx.helper.make_node("Relu", ["a"], ["b"], "relu"),
        onnx.helper.make_node("Conv", ["b", "w2"], ["c"], "conv2", kernel_shape=[3, 3]),
        onnx.helper.make_node("GlobalAveragePool", ["c"], ["d"], "pool"),
        onnx.helper.make_node("Flatten", ["d"], ["e"], "flatten"),
        onnx.helper.make_node("Gemm", ["e", "w3"], ["scores"], "classify"),
    ]
    graph = onnx.helper.make_graph(
        nodes, "net",
        [onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1, 3, SIDE, SIDE])],
        [onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, [1, CLASSES])],
        [weight("w1", width, 3, 3, 3), weight("w2", width, width, 3, 3), weight("w3", width, CLASSES)],
    )  # fmt: skip
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    raw: bytes = made.SerializeToString()
    return raw


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    """Noise of different strength, by which the classes differ."""
    rng = np.random.default_rng(5)
    return [(rng.standard_normal((1, 3, SIDE, SIDE)) * (1 + n)).astype(np.float32) for n in range(COUNT)]


@pytest.fixture(scope="module")
def family(cloud: Cloud, images: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> dict[str, WholeModel]:
    """`nets`: a small net and a large one, whose answers are the labels of five samples in six; the whole of both."""
    folder = tmp_path_factory.mktemp("family")
    for name, width, seed in (("small", 2, 1), ("large", 48, 2)):
        (folder / f"{name}.onnx").write_bytes(a_net(width, seed))
        cloud.edgectl("model", "push", str(folder / f"{name}.onnx"), "--name", name)
    whole = {name: WholeModel(cloud.api.download(f"/v1/models/{name}/optimised")) for name in ("small", "large")}
    samples = folder / "samples"
    samples.mkdir()
    labels = {}
    for number, image in enumerate(images):
        (samples / f"{number}.npz").write_bytes(npz(image=image))
        label = int(whole["large"].run(image).argmax())
        labels[f"{number}.npz"] = label if number % 6 else (label + 1) % CLASSES
    (samples / "labels.json").write_text(json.dumps(labels))
    made = cloud.json("family", "create", "nets", "--variant", "small", "--variant", "large", "--samples", str(samples))
    assert made["family"] == "nets@1" and made["samples"] == COUNT
    return whole


@pytest.fixture(scope="module")
def device(cloud: Cloud, family: dict[str, WholeModel]) -> Agent:
    """One emulated Raspberry Pi 4."""
    agent = cloud.agent("pi4")
    cloud.edgectl("deploy", "nets", "--to", "pi4", "--deadline", "2s", "--wait", "60")
    return agent


def test_the_family_is_listed_shown_and_planned(cloud: Cloud, family: dict[str, WholeModel], tmp_path: Path) -> None:
    """The plan chooses the large one and draws the frontier; a deadline that nothing meets is refused."""
    shown = {variant["name"]: variant for variant in cloud.json("family", "show", "nets")["variants"]}
    assert shown["large"]["accuracy"] == 20 / COUNT > shown["small"]["accuracy"]
    assert "nets@1" in cloud.edgectl("family", "list")
    picture = tmp_path / "frontier.svg"
    plan = cloud.json("plan", "nets", "--device", "raspberrypi4", "--deadline", "2s", "--plot", str(picture))
    assert plan["best"]["variant"] == "large" and plan["certificate"]["gap"] < 1e-9
    assert picture.read_bytes().startswith(b"<?xml")
    refused = cloud.edgectl("plan", "nets", "--device", "raspberrypi4", "--deadline", "0.001ms", code=4)
    assert "the fastest" in refused


def answer(device: Agent, image: np.ndarray, **options: Any) -> Any:
    return device.client.infer("nets", {"image": image}, deadline_s=10.0, options=InferOptions(**options))


def test_each_answer_is_its_variants_own(
    device: Agent, family: dict[str, WholeModel], images: list[np.ndarray]
) -> None:
    """Bit for bit what the named variant's whole model answers; the most accurate is in time."""
    for image in images[:4]:
        got = answer(device, image)
        assert got.report.variant == "large" and got.report.accuracy == 20 / COUNT
        assert np.array_equal(got.outputs["scores"], family[got.report.variant].run(image))


def test_a_floor_above_the_best_variant_is_refused(cloud: Cloud, device: Agent, images: list[np.ndarray]) -> None:
    """At the deployment with exit 4, and in a request; both name the best."""
    refused = cloud.edgectl("deploy", "nets", "--to", "pi4", "--least-accuracy", "95%", code=4)
    assert "the best, large, has 83.3%" in refused
    with pytest.raises(InfeasibleLimits, match=r"the best, large, has 83\.3%"):
        answer(device, images[0], least_accuracy=0.95)
    assert answer(device, images[0], least_accuracy=0.8).report.variant == "large"


def test_a_cascade_is_planned_and_released(cloud: Cloud, device: Agent, images: list[np.ndarray]) -> None:
    """On 24 samples at 20 %: the plan prices it and says what stays, the signed plan has it, and each answer is by the
    variant that it names; 2 % would take more samples, which is exit 4."""
    asked = ("nets", "--cascade", "--changed", "20%", "--certainty", "80%")
    refused = cloud.edgectl("plan", *asked[:3], "2%", "--device", "raspberrypi4", code=4)
    assert "24 samples are too few" in refused and "at least 114" in refused
    assert "--cascade too" in cloud.edgectl("plan", "nets", "--changed", "2%", "--device", "raspberrypi4", code=2)
    planned = cloud.json("plan", *asked, "--device", "raspberrypi4")["cascade"]
    assert planned["text"].endswith("at most 20 % of answers differ (80 % sure, 24 samples)")
    assert 0.0 <= planned["cascade"]["escalated"] < 1.0 and planned["gain_text"]
    deployed = cloud.json("deploy", *asked, "--to", "pi4", "--wait", "60")
    price = deployed["prices"]["raspberrypi4"]
    assert price["text"] == planned["text"] and price["alone"]["figures"]["seconds"] > 0 and price["gain_text"]
    signed = deployed["plans"][0]["cascade"]
    assert (signed["first"], signed["second"]) == ("small", "large")
    assert signed["threshold"] == planned["cascade"]["threshold"]


def test_without_a_link_the_best_local_variant_answers(
    cloud: Cloud, device: Agent, family: dict[str, WholeModel], images: list[np.ndarray]
) -> None:
    """The controller with its offload server is gone: each answer names its variant, which runs here, of the release
    that was there before."""
    before = answer(device, images[0]).report.release
    cloud.process.stop()
    try:
        for image in images[:4]:
            got = eventually("an answer", lambda image=image: answer(device, image))
            assert got.report.fallback or got.report.up_bytes == 0
            assert np.array_equal(got.outputs["scores"], family[got.report.variant].run(image))
            assert got.report.release == before
    finally:
        cloud.start()
