"""Slices on onnxruntime, and the input slice: what they refuse, and that both modes answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgesplit.errors import InferenceFailed, ModelRefused, UsageError
from edgesplit.input_spec import FRAME, parse_input_spec
from edgesplit.release.manifest import Slice, TensorSpec
from edgesplit.runtime.input_decoder import InputProgram
from edgesplit.runtime.loader import load_slices
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit_partitioner.slicing import atoms, cut_slices
from support import onnx_models as tiny


@pytest.fixture
def whole(tmp_path: Path) -> Slice:
    """The chain model as one slice, its files in `tmp_path`."""
    model = tiny.prepared("chain")
    one = cut_slices(model, model.graph, atoms(model.graph, []), None)[0]
    for name, data in one.files.items():
        (tmp_path / name).write_bytes(data)
    return one.slice


def test_fast_mode_is_close_to_exact_mode(whole: Slice, tmp_path: Path) -> None:
    """`fast` may differ in the last bits, on several threads too; `exact` is bit-identical on repetition."""
    feeds = tiny.feeds_of(tiny.prepared("chain"))
    exact = OnnxRuntime().load(whole, tmp_path)
    first: tiny.Array = exact.run(feeds)["probabilities"]
    assert first.tobytes() == exact.run(feeds)["probabilities"].tobytes()
    fast: tiny.Array = OnnxRuntime(threads=2, optimise="fast").load(whole, tmp_path).run(feeds)["probabilities"]
    np.testing.assert_allclose(fast, first, rtol=1e-4, atol=1e-6)


def test_missing_and_wrong_inputs_fail_by_name(whole: Slice, tmp_path: Path) -> None:
    """A missing input, a wrong shape and a wrong type are failed inferences that name the slice."""
    program = OnnxRuntime().load(whole, tmp_path)
    with pytest.raises(InferenceFailed, match="image"):
        program.run({})
    with pytest.raises(InferenceFailed, match=whole.name):
        program.run({"image": np.zeros((1, 3, 8, 8), np.float32)})
    with pytest.raises(InferenceFailed, match=whole.name):
        program.run({"image": np.zeros((1, 3, 16, 16), np.float64)})


@pytest.mark.parametrize("file", ["graph.onnx", "weights.bin"])
def test_damaged_files_are_refused(whole: Slice, tmp_path: Path, file: str) -> None:
    """A graph or weights file that is cut short is refused at load."""
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelRefused, match=whole.name):
        OnnxRuntime().load(whole, tmp_path)


def test_file_of_another_slice_is_refused(whole: Slice, tmp_path: Path) -> None:
    """A graph whose tensors are not those of the manifest is not run under its name."""
    other = msgspec.structs.replace(whole, outputs=(TensorSpec("elsewhere", "FP32", (1, 10)),))
    with pytest.raises(ModelRefused, match="other tensors"):
        OnnxRuntime().load(other, tmp_path)


def test_input_slice_needs_its_spec(tmp_path: Path) -> None:
    """A release without an input spec cannot have an input slice."""
    one = Slice("input", "input", ("input",), (TensorSpec(FRAME, "UINT8", (-1,)),), (TensorSpec("x", "FP32", (1,)),))
    manifest = msgspec.structs.replace(tiny.manifest_of(tiny.prepared("chain"), []), slices=(one,))
    with pytest.raises(ModelRefused, match="input spec"):
        load_slices(manifest, lambda name: tmp_path, OnnxRuntime())


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {FRAME: np.zeros(4, np.float32)},
        {FRAME: np.zeros((2, 2), np.uint8)},
        {FRAME: np.zeros(0, np.uint8)},
        {FRAME: np.frombuffer(b"\xff\xd8\xff\xe0 no picture", np.uint8)},
    ],
)
def test_malformed_picture_is_refused(tensors: dict[str, tiny.Array]) -> None:
    """Missing, mistyped, empty and damaged frames are the caller's fault."""
    spec = msgspec.structs.replace(parse_input_spec("image/jpeg 8x8"), tensor="x", tensor_width=8, tensor_height=8)
    with pytest.raises(UsageError):
        InputProgram(spec).run(tensors)


def test_engine_telemetry_is_off(whole: Slice, tmp_path: Path) -> None:
    """onnxruntime creates no identifier of this machine: its own telemetry is disabled before it is loaded."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "slice.json").write_bytes(msgspec.json.encode(whole))
    script = (
        "import pathlib, sys, msgspec\n"
        "from edgesplit.release.manifest import Slice\n"
        "from edgesplit.runtime.onnx import OnnxRuntime\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "OnnxRuntime().load(msgspec.json.decode((folder / 'slice.json').read_bytes(), type=Slice), folder)\n"
    )
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ORT_", "XDG_"))}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env={**kept, "HOME": str(home)}, check=True)
    assert not list(home.rglob("*"))
