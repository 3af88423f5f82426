"""A release that a foreign server finishes, through the product: deployed, exported, served elsewhere, answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest
import yaml

from edgesplit.input_spec import InputSpec, prepare
from edgesplit.release.manifest import decode_manifest
from edgesplit_cli.demo.reference_model import WholeModel
from support.edgesplit_processes import Agent, Cloud, eventually, frame_input, frames
from support.foreign_servers import TRITON, ForeignServerHere


@pytest.fixture(scope="module")
def whole(cloud: Cloud) -> WholeModel:
    """The digits model, pushed; the whole of it to compare with."""
    cloud.push_digits()
    return WholeModel(cloud.api.download("/v1/models/digits/optimised"))


@pytest.fixture(scope="module")
def device(cloud: Cloud, whole: WholeModel) -> Agent:
    """One emulated Raspberry Pi 4."""
    return cloud.agent("pi4")


@pytest.fixture()
def foreign() -> Iterator[ForeignServerHere]:
    """A server with Triton's manners and no model yet."""
    server = ForeignServerHere(TRITON)
    yield server
    server.stop()


def serve_repository(server: ForeignServerHere, folder: Path) -> list[str]:
    """Load what was exported; the models' names."""
    for home in sorted(folder.iterdir()):
        server.add(home.name, (home / "1" / "model.onnx").read_bytes())
    return list(server.sessions)


def helped(device: Agent, jpeg: bytes) -> object | None:
    answer = device.infer("digits", frame_input(jpeg))
    return None if answer.report.fallback or answer.report.row == "local" else answer


def test_a_release_is_finished_by_a_server_that_is_not_ours(
    cloud: Cloud, whole: WholeModel, device: Agent, foreign: ForeignServerHere, tmp_path: Path
) -> None:
    """Deployed with `--offload`, exported, served: bit for bit the whole model's answers, and the device's own offload
    server is not asked. All in the cloud means all but decoding pictures. The signed manifest names the server, so
    nobody between the release key and the device decides where tensors go."""
    address = f"triton://127.0.0.1:{foreign.port}"
    forced = ("--partition", "cloud", "--to", "pi4", "--wait", "60")
    made = cloud.json("deploy", "digits", *forced, "--offload", address)
    exported = cloud.json("export", "triton", "digits", "--out", str(tmp_path))

    names = serve_repository(foreign, tmp_path)

    manifest = decode_manifest((device.data / "releases" / made["release"] / "manifest.json").read_bytes())
    assert {plan.offload for plan in manifest.plans.values()} == {address}
    assert exported["release"] == made["release"] and [one["name"] for one in exported["models"]] == names
    assert names and all(name.startswith(made["release"]) for name in names)
    spec = msgspec.convert(cloud.api.get("/v1/models/digits")["input_spec"], InputSpec)
    for jpeg, _ in frames(4):
        answer = eventually("an answer with the foreign server's help", lambda j=jpeg: helped(device, j))
        assert np.array_equal(answer.outputs["probabilities"], whole.run(prepare(spec, jpeg)))
        assert answer.report.up_bytes > 1_000
    assert set(foreign.seen.models) <= set(names) and set(foreign.seen.codings) <= {"", "gzip"}


def test_export_writes_the_requested_format_and_rows(
    cloud: Cloud, whole: WholeModel, device: Agent, tmp_path: Path
) -> None:
    """KServe gets a manifest and the repository it points to. A row that sends pictures is ours alone; a model or a row
    that is not there says what is."""
    made = cloud.json("deploy", "digits", "--partition", "narrow1.conv", "--to", "pi4")
    out = tmp_path / "kserve"
    told = cloud.json("export", "kserve", "digits", "--out", str(out), "--storage", "s3://bucket/digits")
    service = yaml.safe_load((out / "inference-service.yaml").read_text())
    assert service["metadata"]["annotations"] == {"edgesplit/release": made["release"]}
    (model,) = told["models"]
    served = onnxruntime.InferenceSession(out / "models" / model["name"] / "1" / "model.onnx")
    assert served.get_outputs()[0].name == "probabilities"

    triton = ("export", "triton", "--out", str(tmp_path / "no"))
    assert "did you mean digits" in cloud.edgectl(*triton, "digit", code=2)
    assert "raspberrypi4 cut-10" in cloud.edgectl(*triton, made["release"][:12], "--row", "cut-99", code=2)
    cloud.edgectl("deploy", "digits", "--partition", "cloud", "--to", "pi4")
    assert "--offload URL" in cloud.edgectl(*triton, "digits", code=3)
    assert "triton://HOST" in cloud.edgectl("deploy", "digits", "--to", "pi4", "--offload", "gpu:8000", code=2)
    assert not (tmp_path / "no").exists()


def test_an_encrypted_release_is_exported_in_clear_only_with_its_option(
    cloud: Cloud, whole: WholeModel, device: Agent, tmp_path: Path
) -> None:
    """The audit log records that it was."""
    made = cloud.json("deploy", "digits", "--partition", "narrow1.conv", "--to", "pi4", "--encrypt")
    said = cloud.edgectl("export", "triton", "digits", "--out", str(tmp_path / "sealed"), code=2)
    assert "--decrypt" in said and not list(tmp_path.rglob("model.onnx"))
    told = cloud.json("export", "triton", "digits", "--out", str(tmp_path / "clear"), "--decrypt")
    (model,) = told["models"]
    assert onnxruntime.InferenceSession(tmp_path / "clear" / model["name"] / "1" / "model.onnx").get_inputs()
    events = [one for one in cloud.api.get("/v1/events") if one["action"] == "release.exported"]
    assert events[-1]["subject"] == made["release"] and events[-1]["detail"]["decrypted"] is True
