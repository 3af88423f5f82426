"""Every file that a command writes is read by every command that takes one.

`WRITTEN` and `READ` name the kind of file behind each option that takes a path; an option that is in neither fails a
test. `PAIRS` says for each writer and reader of a kind where the two are run: here, or in the test that is named.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from edgesplit.device_profile import DeviceProfile, load_profile
from edgesplit.errors import UsageError
from edgesplit_cli.local.model import read_npz, write_npz
from edgesplit_cli.main import cli
from edgesplit_partitioner.calibration import calibrate, operator_grid
from edgesplit_partitioner.calibration.child import BatchTimes
from edgesplit_partitioner.calibration.fits import CalibrationTimes, fit_points
from edgesplit_partitioner.calibration.networks import calibration_networks
from support import onnx_models as tiny

TESTS = Path(__file__).parents[2]
WRITTEN = {
    "calibrate --out": "profile",
    "plan --json": "plan",
    "profile --json": "costs",
    "infer --out": "tensors",
    "operator add --out": "credentials",
    "operator rotate --out": "credentials",
    "device claim --out": "claim",
    "audit export --out": "audit log",
    "backup file": "backup",
    "backup --new-recipient": "backup key",
    "bundle --to": "release bundle",
    "kit build --to": "kit",
    "keys init --folder": "signing keys",
    "keys rotate --folder": "signing keys",
    "offload credentials --out": "offload credentials",
}
"""Kind of file by the option that names it; --json: what stands on standard output."""
READ = {
    "plan --device": "profile",
    "plan --tier": "profile",
    "calibrate --base": "profile",
    "profiles name": "profile",
    "check --plan": "plan",
    "plan what": "costs",
    "infer source": "tensors",
    "plan --samples": "tensors",
    "check --samples": "tensors",
    "profile --samples": "tensors",
    "login file": "credentials",
    "--credentials": "credentials",
    "flash --claim": "claim",
    "edgesplit-agent run --claim": "claim",
    "audit verify file": "audit log",
    "restore file": "backup",
    "restore --key": "backup key",
    "edgesplit-agent bundle apply": "release bundle",
    "kit check folder": "kit",
    "flash --kit": "kit",
    "agent push kits": "kit",
    "keys sign --sign-with": "signing keys",
    "deploy --sign-with": "signing keys",
    "offload serve --cert": "offload credentials",
    "offload serve --key": "offload credentials",
    "offload serve --ca": "offload credentials",
    "offload serve --revoked": "offload credentials",
}
"""Kind of file by the option or argument that takes one."""
FOR_OTHERS = {
    "plan --plot", "demo --json", "demo --picture", "demo --folder", "device logs --out", "export triton --out",
    "export kserve --out", "up --out", "sim --folder", "infer --draw",
}  # fmt: skip
"""Written for people and other programs: no command of edgesplit takes it."""
FROM_OTHERS = {
    "model push file", "model push --labels",
    "model push --samples", "model compress --samples", "family create --samples",
    "plan --trace", "adopt --batch", "adopt --key", "adopt --coral-deb", "adopt --interpreter",
    "adopt --wheelhouse", "agent push --wheelhouse", "bundle --wheelhouse", "flash --image",
    "flash --wifi-password-file", "flash --ssh-key", "flash --wheelhouse", "flash --interpreter", "flash --coral-deb",
    "flash --bsp", "flash --batch", "kit build --wheelhouse", "kit build --interpreter", "offload serve --releases",
    "offload serve --root", "up --installed-at",
}  # fmt: skip
"""Read from people and other programs, or from a controller's folder: no command of edgesplit writes it to a path."""

OPERATORS = "integration/test_written_files.py::test_credentials_audit_log_and_backup_are_read_by_every_command"
CLAIMS = "integration/test_flash.py::test_a_device_comes_online_with_the_claim_on_its_card"
CARRIED = (
    "integration/test_carried_releases.py"
    "::test_an_offline_device_runs_releases_from_usb_bundles_and_the_controller_agrees_later"
)
SIGNED = "integration/test_keys.py::test_enrolled_devices_follow_a_root_key_that_moves_offline"
ROTATED = "integration/test_keys.py::test_the_root_is_rotated_by_two_of_three_keys_and_devices_follow"


@functools.cache
def calibrated() -> DeviceProfile:
    """A profile that is as large as a real calibration: every point of the grid was measured."""

    def seconds(work: Any) -> float:
        return 3e-7 + float(work.flops) / 4e10 + float(work.bytes_moved) / 1.5e10

    times = CalibrationTimes()
    points = {place: seconds(operator_grid.point_work(point)) for place, point in enumerate(operator_grid.grid())}
    times.add(BatchTimes(batches=2, whole=False, empty_s=4e-6, tensor_s=5e-7, seconds=points))
    import onnx

    whole = {
        place: 4e-6 + sum(map(seconds, operator_grid.model_work(onnx.load_model_from_string(raw))))
        for place, raw in enumerate(calibration_networks())
    }
    times.add(BatchTimes(batches=2, whole=True, empty_s=4e-6, tensor_s=5e-7, seconds=whole))
    fit = fit_points(times, machine="made up", runtime="onnxruntime", today="2026-11-22")
    return calibrate.to_profile("here", fit, times, load_profile("generic-x86"), 1)


def edgectl(*words: object) -> str:
    """The command's output; its error is raised."""
    done = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny.chain())
    return path


@pytest.fixture(params=["here.yaml", "here.yml", "here.json"])
def profile_file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `edgectl calibrate --out` writes, the measurement itself being made up."""
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **__: calibrated())
    path = tmp_path / str(request.param)
    edgectl("calibrate", "--name", "here", "--out", path)
    return path


def test_a_calibrated_profile_is_read_by_every_command(model_file: Path, profile_file: Path, tmp_path: Path) -> None:
    """`plan --device ./here.yaml` refused what `calibrate --out here.yaml` had written."""
    words = ("--data", tmp_path / "none", "plan", model_file, "--device", profile_file)
    planned = json.loads(edgectl(*words, "--tier", f"edge={profile_file}@100mbit/2ms", "--json"))
    assert planned["device_class"] == "here" and "device profile here" in planned["basis"]["edge"]
    assert json.loads(edgectl("profiles", profile_file, "--json"))["name"] == "here"
    edgectl("calibrate", "--name", "there", "--base", profile_file, "--out", tmp_path / "there.yaml")


def test_a_plan_is_read_by_check(model_file: Path, tmp_path: Path) -> None:
    """The rows of its table are checked."""
    planned = tmp_path / "plan.json"
    planned.write_text(edgectl("plan", model_file, "--device", "raspberrypi4", "--json"))
    assert json.loads(edgectl("check", model_file, "--plan", planned, "--json"))["is_safe"]


def test_outputs_of_infer_are_read_as_samples(model_file: Path, tmp_path: Path) -> None:
    """Whatever the tensors are called: `np.savez` has parameters of its own, of which numpy 1 made an array."""
    file = tmp_path / "out.npz"
    tensors = {"file": np.zeros((1, 2), np.float32), "allow_pickle": np.arange(3), "a/b": np.float32(1.5) * np.ones(1)}
    write_npz(file, tensors)
    found = read_npz(file)
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], value) for name, value in tensors.items())

    name, shape = tiny_input(model_file)
    write_npz(file, {name: np.full(shape, 0.5, np.float32)})
    assert json.loads(edgectl("check", model_file, "--samples", file, "--json"))["is_safe"]
    edgectl("plan", model_file, "--device", "raspberrypi4", "--samples", file)


def test_outputs_under_another_ending_were_read_as_a_picture(model_file: Path, tmp_path: Path) -> None:
    """A name that `infer` would not read again is refused before the request."""
    with pytest.raises(UsageError, match=r"ends with \.npz, not 'out\.npy'"):
        edgectl("infer", "tiny", model_file, "--out", tmp_path / "out.npy")


def tiny_input(model_file: Path) -> tuple[str, list[int]]:
    """Name and shape of the model's input."""
    import onnx

    value = onnx.load(model_file).graph.input[0]
    return value.name, [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]


HERE: dict[str, Callable[..., None]] = {
    "profile": test_a_calibrated_profile_is_read_by_every_command,
    "plan": test_a_plan_is_read_by_check,
    "tensors": test_outputs_of_infer_are_read_as_samples,
}
"""Kinds whose writers and readers need no controller."""
ELSEWHERE = {
    "costs": OPERATORS,
    "credentials": OPERATORS,
    "audit log": OPERATORS,
    "backup": OPERATORS,
    "backup key": OPERATORS,
    "claim": CLAIMS,
    "release bundle": CARRIED,
    "signing keys": SIGNED,
    "kit": "unit/provisioning/kit",
    "offload credentials": "integration/test_offload_serve.py",
}
"""The test, or the tests, that run the other pairs."""


def test_every_kind_of_file_has_a_writer_a_reader_and_a_test() -> None:
    """No kind is only written or only read, and each test that is named is there."""
    assert set(WRITTEN.values()) == set(READ.values()) == HERE.keys() | ELSEWHERE.keys()
    for place in (*ELSEWHERE.values(), ROTATED):
        file, _, name = place.partition("::")
        assert (TESTS / file).exists(), place
        if name:
            functions = ast.walk(ast.parse((TESTS / file).read_text("utf-8")))
            assert name in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, place


def test_every_option_that_takes_a_path_is_known_to_be_written_or_read() -> None:
    """A new one belongs into `WRITTEN`, `READ` or the two lists beside them, and its pairs are then tested."""
    known = WRITTEN.keys() | READ.keys() | FOR_OTHERS | FROM_OTHERS
    assert [option for option in path_options(cli, ()) if option not in known] == []


def path_options(command: click.Command, names: tuple[str, ...]) -> Iterator[str]:
    """Every option and argument that takes a path, by command."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from path_options(found, (*names, name))
        return
    for parameter in command.params:
        if isinstance(parameter.type, click.Path):
            option = next((text for text in parameter.opts if text.startswith("--")), parameter.opts[0])
            yield " ".join((*names, option))
