"""What travels when only a part is new, counted by a real agent over a real broker: cuts, and a retrained head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgesplit.release.manifest import Manifest, decode_manifest
from edgesplit_cli.demo.scenario import INPUT_SPEC
from support.edgesplit_processes import DIGITS, Agent, Cloud, eventually


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """A controller of this module's own."""
    cloud = Cloud(tmp_path_factory.mktemp("delta"))
    cloud.start()
    yield cloud
    cloud.stop()


def deployed(cloud: Cloud, device: Agent, model: str, partition: str) -> tuple[Manifest, int]:
    """The manifest of that deployment once the device runs it, and the bytes of chunks that it fetched for it."""
    before = fetched_bytes(device)
    made = cloud.json("deploy", model, "--partition", partition, "--to", device.name, "--wait", "90")
    raw = (cloud.data / "offload" / "releases" / made["release"] / "manifest.json").read_bytes()
    return decode_manifest(raw), fetched_bytes(device) - before


def fetched_bytes(device: Agent) -> int:
    argv = ["status", "--data", str(device.data)]
    status: dict[str, Any] = json.loads(_agent(argv))
    return int(status["delivery"]["chunk_bytes"])


def _agent(argv: list[str]) -> str:
    import subprocess
    import sys

    command = [sys.executable, "-m", "edgesplit_agent.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def graph_bytes(manifest: Manifest) -> int:
    return sum(file.bytes for one in manifest.slices for file in one.files if file.name == "graph.onnx")


def golden_bytes(manifest: Manifest) -> int:
    return sum(manifest.golden_chunk_sizes().values())


def with_new_head(folder: Path) -> Path:
    """The digits model with other weights in its last layer."""
    model = onnx.load(str(DIGITS / "digits.onnx"))
    (head,) = [one for one in model.graph.initializer if one.name == "classify.weight"]
    head.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(head) * np.float32(1.01), head.name))
    (folder / "digits.onnx").write_bytes(model.SerializeToString())
    return folder / "digits.onnx"


def test_a_recut_sends_only_graphs_and_a_new_head_only_its_weights(own: Cloud, tmp_path: Path) -> None:
    """A second plan for a model: graph bytes, no weights. A version with another last layer: that layer's weights."""
    own.push_digits()
    layers = [layer["name"] for layer in own.json("model", "show", "digits")["layers"]]
    device = own.agent("pi-delta")
    whole, first = deployed(own, device, "digits", "device")
    weights = sum(whole.chunk_sizes().values()) - graph_bytes(whole)
    assert first == sum(whole.chunk_list().values())

    cut, second = deployed(own, device, "digits", layers[len(layers) // 2])

    assert len(cut.slices) > len(whole.slices)
    assert 0 < second <= graph_bytes(cut) + golden_bytes(cut) < weights / 2
    print(f"first {first} bytes; another cut {second}, graphs {graph_bytes(cut)}, golden {golden_bytes(cut)}")

    own.edgectl("model", "push", str(with_new_head(tmp_path)), "--name", "digits", "--input", INPUT_SPEC)
    retrained, third = deployed(own, device, "digits@2", layers[len(layers) // 2])

    new = {sha256: size for sha256, size in retrained.chunk_sizes().items() if sha256 not in cut.chunk_sizes()}
    head = 96 * 10 * 4 + 10 * 4
    assert sum(new.values()) <= head + 128, "only the layer that was retrained is new"
    assert third <= sum(new.values()) + golden_bytes(retrained)
    print(f"a new head: {third} bytes, of which golden {golden_bytes(retrained)}")
    eventually("the old release is gone", lambda: len(list((device.data / "releases").iterdir())) == 1)
