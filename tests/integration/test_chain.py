"""From a model file to a split answer, through the product's own commands, with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgesplit.input_spec import InputSpec, prepare
from edgesplit.release.boundary_codecs import LOSSY
from edgesplit.release.manifest import decode_manifest
from edgesplit_cli.demo.reference_model import WholeModel
from edgesplit_cli.demo.scenario import INPUT_SPEC
from support.edgesplit_processes import DIGITS, Agent, Cloud, eventually, frame_input, frames, write_frames


@pytest.fixture(scope="module")
def digits(cloud: Cloud) -> WholeModel:
    """The digits model, pushed; the whole of it to compare with."""
    cloud.push_digits()
    return WholeModel(cloud.api.download("/v1/models/digits/optimised"))


@pytest.fixture(scope="module")
def device(cloud: Cloud, digits: WholeModel) -> Agent:
    """One emulated Raspberry Pi 4."""
    return cloud.agent("pi4")


def whole_answers(cloud: Cloud, digits: WholeModel, count: int) -> list[tuple[bytes, np.ndarray]]:
    """Frames with what the whole model answers."""
    spec = msgspec.convert(cloud.api.get("/v1/models/digits")["input_spec"], InputSpec)
    return [(jpeg, digits.run(prepare(spec, jpeg))) for jpeg, _ in frames(count)]


def layer_names(cloud: Cloud) -> list[str]:
    return [layer["name"] for layer in cloud.json("model", "show", "digits")["layers"]]


def test_a_forced_cut_answers_exactly_as_the_whole_model(cloud: Cloud, digits: WholeModel, device: Agent) -> None:
    """One device, one forced cut inside the model, signed slices over MQTT: bit for bit the whole model's answer."""
    layers = layer_names(cloud)
    cut_after = layers[len(layers) // 3]
    cloud.edgectl("deploy", "digits", "--partition", cut_after, "--to", "pi4", "--wait", "60")

    for jpeg, expected in whole_answers(cloud, digits, 8):
        answer = eventually("an answer with the cloud's help", lambda j=jpeg: _helped(device, j))
        assert np.array_equal(answer.outputs["probabilities"], expected)
        assert answer.report.split_after == cut_after
        assert answer.report.up_bytes > 0
        assert answer.report.emulated


def _helped(device: Agent, jpeg: bytes) -> object | None:
    answer = device.infer("digits", frame_input(jpeg))
    return None if answer.report.fallback or answer.report.row == "local" else answer


@pytest.mark.parametrize("partition", ["device", "cloud", "auto"])
def test_each_partition_gives_the_same_answer(cloud: Cloud, digits: WholeModel, device: Agent, partition: str) -> None:
    """Where the layers run changes the time an answer takes, never the answer."""
    cloud.edgectl("deploy", "digits", "--partition", partition, "--to", "pi4", "--wait", "60")

    for jpeg, expected in whole_answers(cloud, digits, 4):
        answer = device.infer("digits", frame_input(jpeg))
        assert np.array_equal(answer.outputs["probabilities"], expected)
        if partition == "device":
            assert answer.report.row == "local"


def test_the_device_list_shows_who_runs_what(cloud: Cloud, digits: WholeModel, device: Agent) -> None:
    """Online, its model, the cut in use and the latency: as the agent reported them."""
    cloud.edgectl("deploy", "digits", "--partition", "device", "--to", "pi4", "--wait", "60")
    device.infer("digits", frame_input(frames(1)[0][0]))

    def seen() -> bool:
        shown = cloud.json("device", "show", "pi4")
        windows = (shown.get("telemetry") or {}).get("models") or []
        return shown["state"] == "online" and any(one["row"] == "local" and one["latency_p50_s"] > 0 for one in windows)

    eventually("telemetry of the local row", seen)
    assert "pi4" in cloud.edgectl("device", "list")


def test_without_the_offload_server_the_device_finishes_alone(cloud: Cloud, digits: WholeModel, device: Agent) -> None:
    """The offload server is gone mid-stream: every request is still answered, and as the whole model answers."""
    cloud.edgectl("deploy", "digits", "--partition", "cloud", "--to", "pi4", "--wait", "60")
    expected = whole_answers(cloud, digits, 6)
    eventually("an answer with the cloud's help", lambda: _helped(device, expected[0][0]))
    claim = cloud.folder / "lonely.claim.json"
    cloud.edgectl("device", "claim", "lonely", "--profile", "raspberrypi4", "--out", str(claim))
    lonely = Agent(cloud, "lonely", claim, "--offload", "127.0.0.1:9")
    cloud.agents.append(lonely)
    lonely.start()
    cloud.edgectl("deploy", "digits", "--partition", "cloud", "--to", "lonely", "--wait", "60")

    answers = [lonely.infer("digits", frame_input(jpeg)) for jpeg, _ in expected]

    assert all(np.array_equal(a.outputs["probabilities"], e) for a, (_, e) in zip(answers, expected, strict=True))
    assert answers[0].report.fallback or answers[0].report.row == "local"


def test_a_killed_device_is_shown_offline_and_comes_back(cloud: Cloud, digits: WholeModel, device: Agent) -> None:
    """SIGKILL: the broker's last will says so; after a restart the same identity is online with what it had."""
    cloud.edgectl("deploy", "digits", "--partition", "auto", "--to", "pi4", "--wait", "60")

    device.process.kill()

    eventually("pi4 is shown as gone", lambda: cloud.json("device", "show", "pi4")["state"] != "online")
    device.start()
    assert device.infer("digits", frame_input(frames(1)[0][0])).outputs["probabilities"].shape == (1, 10)


def test_a_restarted_controller_has_its_state_and_a_device_without_network_serves_its_release(
    cloud: Cloud, digits: WholeModel, device: Agent
) -> None:
    """The controller is killed; the device restarts alone and answers; the controller restarts and knows all of it."""
    cloud.edgectl("deploy", "digits", "--partition", "auto", "--to", "pi4", "--wait", "60")
    before = cloud.json("model", "list"), cloud.json("deployments")
    jpeg, expected = whole_answers(cloud, digits, 1)[0]

    cloud.process.kill()
    device.process.kill()
    device.process.start()
    answer = eventually("an answer without any network", lambda: device.infer("digits", frame_input(jpeg)))
    assert np.array_equal(answer.outputs["probabilities"], expected)

    cloud.start()
    assert (cloud.json("model", "list"), cloud.json("deployments")) == before
    eventually("pi4 is online again", lambda: cloud.json("device", "show", "pi4")["state"] == "online")


def test_an_allowed_accuracy_loss_sends_eight_bit_tensors_and_keeps_answers(
    cloud: Cloud, digits: WholeModel, device: Agent, tmp_path: Path
) -> None:
    """Codecs measured on samples, chosen and confirmed, signed into the row, run on both sides: fewer bytes, same
    digits, and the plan says what it may lose."""
    # Every codec runs on every tensor of every sample, for a second each: half as many as would be taken of the folder.
    cloud.edgectl("profile", "digits", "--samples", str(write_frames(tmp_path / "samples", 16)), "--lossless")
    shown = frames(20)

    def deployed(*options: str) -> tuple[dict[str, Any], list[Any]]:
        forced = ("--partition", "narrow1.conv", "--to", "pi4", "--wait", "60")
        (plan,) = cloud.json("deploy", "digits", *forced, *options)["plans"]
        helped = [eventually("the cloud's help", lambda j=jpeg: _helped(device, j)) for jpeg, _ in shown]
        return plan["rows"][0], helped

    raw, lossless = deployed()
    row, lossy = deployed("--allow-loss", "2%")

    assert not set(raw.get("codecs", {}).values()) & set(LOSSY) and "loss" not in raw
    assert set(row["codecs"].values()) & set(LOSSY)
    assert 0 < row["loss"] <= 0.02 and 0 <= row["confirmed_loss"] <= 0.02
    sent, sent_lossy = ([one.report.up_bytes for one in answers] for answers in (lossless, lossy))
    assert all(few < many for few, many in zip(sent_lossy, sent, strict=True))
    right, right_lossy = (
        sum(int(one.outputs["probabilities"].argmax()) == label for one, (_, label) in zip(answers, shown, strict=True))
        for answers in (lossless, lossy)
    )
    assert abs(right - right_lossy) <= 1 and right >= 18
    assert {one.report.row for one in lossy} == {row["name"]}


def test_a_recut_is_installed_without_fetching_weights_again(cloud: Cloud, digits: WholeModel, device: Agent) -> None:
    """`deploy --recut`: the planner's signature is enough for another cut of what was released. The device fetches
    graphs (and the golden inputs) and no weight, and answers exactly as before."""
    layers = layer_names(cloud)
    forced = ("--to", "pi4", "--wait", "60")
    base = cloud.json("deploy", "digits", "--partition", layers[1], *forced)
    before = delivered(device)

    recut = cloud.json("deploy", "digits", "--partition", layers[-3], *forced, "--recut")

    assert (base["signed_by"], recut["signed_by"]) == ("targets", "planner")
    assert recut["release"] != base["release"] and recut["recut_of"] == base["release"]
    listed = {one["release"]: one for one in cloud.api.get("/v1/releases")}
    assert listed[recut["release"]]["recut_of"] == base["release"]
    manifest = decode_manifest((device.data / "releases" / recut["release"] / "manifest.json").read_bytes())
    sizes = manifest.chunk_sizes()
    graphs = {one.sha256 for piece in manifest.slices for file in piece.files[:1] for one in file.chunks}
    golden = sum(pair.request.bytes + pair.response.bytes for pair in manifest.golden)
    assert 0 < delivered(device) - before <= sum(sizes[one] for one in graphs) + golden < sum(sizes.values()) / 2
    for jpeg, expected in whole_answers(cloud, digits, 4):
        answer = eventually("an answer with the cloud's help", lambda j=jpeg: _helped(device, j))
        assert np.array_equal(answer.outputs["probabilities"], expected)
        assert (answer.report.split_after, answer.report.release) == (layers[-3], recut["release"])


def delivered(device: Agent) -> int:
    """Bytes of chunks that the device fetched so far."""
    argv = [sys.executable, "-m", "edgesplit_agent.main", "status", "--data", str(device.data)]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    return int(json.loads(told)["delivery"]["chunk_bytes"])


def test_a_recut_of_an_unreleased_model_is_refused_with_what_it_needs(
    cloud: Cloud, digits: WholeModel, device: Agent
) -> None:
    """The first release of a model is the release key's."""
    cloud.edgectl("model", "push", str(DIGITS / "digits.onnx"), "--name", "fresh", "--input", INPUT_SPEC)
    said = cloud.edgectl("deploy", "fresh", "--to", "pi4", "--recut", code=2)
    assert "first release of a model needs the release key" in said
