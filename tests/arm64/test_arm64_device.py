"""The agent on real arm64 programs: installed from a flashed card without a network, enrolled, split, answering.

Nothing on the device's side is of this machine: Python, numpy, onnxruntime, LiteRT and OpenSSL are arm64's, run by
qemu-user. Controller, broker and offload server are this machine's own processes. What it takes is printed, and says
nothing about a device: the processor is emulated.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from arm64.conftest import taking
from arm64.device import DATA, USER, Device
from arm64.emulator import Emulator
from arm64.image import boot_partition, make_image
from arm64.raspberry import BOOKWORM, MOUNT
from arm64.root import make_root
from edgesplit.input_spec import InputSpec, prepare
from edgesplit_agent.releases.loaded_release import RELATIVE_TOLERANCE
from edgesplit_cli.demo.reference_model import WholeModel
from edgesplit_cli.demo.scenario import INPUT_SPEC
from support import tflite_models
from support.edgesplit_processes import DIGITS, Cloud, eventually, frame_input, frames, relative_error

pytestmark = pytest.mark.usefixtures("arm64_requested")
NAME = "arm64"
LONG_S = 300.0
Answer = npt.NDArray[Any]


@pytest.fixture(scope="module")
def image(emulator: Emulator, arm64_cache: Path) -> Path:
    """Raspberry Pi OS Bookworm's stand-in."""
    with taking("image (from the cache, or made with its root)"):
        return make_image(BOOKWORM, emulator, arm64_cache).disk


@pytest.fixture(scope="module")
def card(image: Path, cloud: Cloud, scratch: Path) -> Path:
    """A card that `edgectl flash` wrote of it for a Raspberry Pi 4."""
    written = scratch / "card.img"
    with taking("edgectl flash (a kit for Python 3.11 on aarch64, written and read back)"):
        cloud.edgectl(
            "flash", "--device", "raspberrypi4", "--image", str(image), "--to", str(written),
            "--hostname", NAME, "--group", "arm", "--with", "tflite", "--yes", timeout=600,
        )  # fmt: skip
    return written


@pytest.fixture(scope="module")
def device(emulator: Emulator, arm64_cache: Path, card: Path, cloud: Cloud, scratch: Path) -> Iterator[Device]:
    """The device that was started with that card: its first boot is done, its agent is online."""
    root = make_root(BOOKWORM.recipe, emulator, arm64_cache)
    made = Device(root, card, emulator, scratch)
    try:
        with taking("first boot: the agent is installed from the card"):
            made.first_boot()
        with taking("the agent starts, enrols and is online"):
            made.start()
            eventually("the device is online", lambda: is_online(cloud, made), LONG_S)
        yield made
    finally:
        made.stop()


def is_online(cloud: Cloud, device: Device) -> bool:
    assert device.running, f"the agent ended: {device.log_tail()}"
    return bool(cloud.api.get(f"/v1/devices/{NAME}")["state"] == "online")


def test_programs_run_on_arm64(device: Device) -> None:
    """What runs there is arm64, in a system of its own: nothing of this machine's is seen or used."""
    assert device.run("uname", "-m").stdout.strip() == "aarch64"
    python = "/opt/edgesplit-agent/current/bin/python"
    done = device.run(python, "-c", "import onnxruntime.capi as c, platform; print(platform.machine(), c.__file__)")
    assert done.stdout.startswith("aarch64 /opt/edgesplit-agent/"), done.stderr


def test_no_secret_stays_on_the_boot_partition(device: Device) -> None:
    """The claim is gone from the boot partition, and its token with it; the agent's user alone can read its keys."""
    boot = device.root / MOUNT.lstrip("/")
    assert not (boot / "edgesplit" / "claim.json").exists()
    assert not [file for file in boot.rglob("*.json") if b'"token"' in file.read_bytes()]
    done = device.run("stat", "-c", "%U %a", DATA)
    assert done.stdout.split() == [USER, "700"]


def test_onnxruntime_answers_as_the_whole_model(cloud: Cloud, device: Device, tmp_path: Path) -> None:
    """digits.onnx cut in the middle: the device half on arm64, the far half on this machine, the whole model's answer
    within what the product promises; then all of it on the device."""
    cloud.push_digits()
    whole = WholeModel(cloud.api.download("/v1/models/digits/optimised"))
    wanted = [(jpeg, whole.run(prepare(spec_of(cloud, "digits"), jpeg))) for jpeg, _ in frames(6)]

    check_cut_and_alone(cloud, device, "digits", wanted)


def test_litert_answers_as_the_whole_model(cloud: Cloud, device: Device, tmp_path: Path) -> None:
    """The same with digits.tflite, whose slices LiteRT runs on both sides."""
    spec = INPUT_SPEC.replace("nchw", "nhwc")
    cloud.edgectl("model", "push", str(DIGITS / "digits.tflite"), "--name", "lite", "--input", spec)
    raw = (DIGITS / "digits.tflite").read_bytes()

    def answer(jpeg: bytes) -> Answer:
        image = prepare(spec_of(cloud, "lite"), jpeg)
        return tflite_models.run_whole(raw, {"image": image}, tmp_path)["probabilities"]

    check_cut_and_alone(cloud, device, "lite", [(jpeg, answer(jpeg)) for jpeg, _ in frames(6)])


def test_the_telemetry_of_onnxruntime_is_off(device: Device) -> None:
    """onnxruntime's own telemetry is off: it neither looks for a place for its identifier nor names its service."""
    log = device.log.read_text(errors="replace")
    assert "activated digits" in log
    assert "telemetry_1ds" not in log


def test_installing_again_changes_nothing(device: Device, card: Path) -> None:
    """The installer run a second time on a device that is online finds everything there, and it stays online."""
    before = (device.root / "opt/edgesplit-agent/current").readlink()
    with taking("install.sh a second time"):
        done = device.run("sh", f"{MOUNT}/edgesplit/install.sh", "--no-service")
    assert done.returncode == 0, done.stderr
    assert (device.root / "opt/edgesplit-agent/current").readlink() == before
    assert device.running
    listed = subprocess.run(["mdir", "-b", "-i", boot_partition(card), "::edgesplit"], capture_output=True, check=True)
    assert b"install.sh" in listed.stdout.lower()


def spec_of(cloud: Cloud, model: str) -> InputSpec:
    return msgspec.convert(cloud.api.get(f"/v1/models/{model}")["input_spec"], InputSpec)


def check_cut_and_alone(cloud: Cloud, device: Device, model: str, wanted: list[tuple[bytes, Answer]]) -> None:
    """Deploy it cut after a layer in its first half, then whole on the device; compare every answer."""
    layers = [layer["name"] for layer in cloud.json("model", "show", model)["layers"]]
    after = layers[len(layers) // 3]
    for partition in (after, "device"):
        with taking(f"{model} is deployed and activated, cut: {partition}"):
            cloud.edgectl("deploy", model, "--partition", partition, "--to", NAME, "--wait", "300", timeout=400)
        for jpeg, expected in wanted:
            answer = eventually(
                f"an answer of {model}, cut: {partition}",
                lambda j=jpeg, alone=partition == "device": answered(device, model, j, alone=alone),
                LONG_S,
            )
            got = answer.outputs["probabilities"]
            assert got.shape == expected.shape
            assert relative_error(got, expected) < RELATIVE_TOLERANCE
            assert int(np.argmax(got)) == int(np.argmax(expected))
            assert not answer.report.emulated  # its times are its own; that a qemu ran it, it cannot know
            if partition == after:
                assert answer.report.split_after == after
                assert answer.report.up_bytes > 0


def answered(device: Device, model: str, jpeg: bytes, *, alone: bool) -> Any:
    """An answer that the cloud had a part in, or that the device gave by its plan alone."""
    answer = device.client.infer(model, frame_input(jpeg), deadline_s=60.0)
    local = answer.report.row == "local"
    return answer if not answer.report.fallback and local == alone else None
