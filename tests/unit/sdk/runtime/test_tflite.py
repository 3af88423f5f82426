"""The LiteRT runtime: what it accepts, what it refuses, and its error where LiteRT is missing."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgesplit.errors import InferenceFailed, ModelRefused
from edgesplit.release.manifest import Slice
from edgesplit.runtime import tflite
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit.runtime.tflite import LiteRtRuntime
from edgesplit_partitioner.ir.prepared_model import whole_model_slice
from support import tflite_models


@pytest.fixture
def whole(tmp_path: Path) -> Slice:
    """The chain model as one slice, its file in the test's folder."""
    model = tflite_models.prepared("chain")
    (tmp_path / tflite.FILE).write_bytes(model.raw)
    return whole_model_slice(model)


def test_missing_litert_error_says_what_to_install(
    whole: Slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without LiteRT refuses TFLite slices with advice, and goes on running others."""
    for name in tflite.INTERPRETERS:
        monkeypatch.setitem(sys.modules, name, None)  # its import fails
    with pytest.raises(ModelRefused, match=r"LiteRT is not installed here: pip install 'edgesplit\[tflite\]'"):
        DispatchingRuntime().load(whole, tmp_path)


def test_tflite_runtime_is_used_where_litert_is_missing(
    whole: Slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another module of the same interface runs the slice."""
    litert, tflite_runtime = tflite.INTERPRETERS
    monkeypatch.setitem(sys.modules, tflite_runtime, importlib.import_module(litert))
    monkeypatch.setitem(sys.modules, litert, None)  # its import fails
    assert LiteRtRuntime().load(whole, tmp_path).run(tflite_models.feeds_of(tflite_models.prepared("chain")))


def test_engines_refuse_slices_of_another_format(whole: Slice, tmp_path: Path) -> None:
    """By name; the engine that dispatches by format refuses what no engine runs."""
    with pytest.raises(ModelRefused, match="'tflite', which is not onnxruntime's"):
        OnnxRuntime().load(whole, tmp_path)
    with pytest.raises(ModelRefused, match="'onnx', which is not LiteRT's"):
        LiteRtRuntime().load(msgspec.structs.replace(whole, format="onnx"), tmp_path)
    with pytest.raises(ModelRefused, match="'input', which no engine"):
        DispatchingRuntime().load(msgspec.structs.replace(whole, format="input"), tmp_path)


def test_missing_and_wrong_inputs_are_inference_failures(whole: Slice, tmp_path: Path) -> None:
    """A missing input, or one of another type, fails that inference and no other."""
    program = LiteRtRuntime().load(whole, tmp_path)
    feeds = tflite_models.feeds_of(tflite_models.prepared("chain"))
    with pytest.raises(InferenceFailed, match="lacks its inputs"):
        program.run({})
    with pytest.raises(InferenceFailed, match="whole"):
        program.run({"image": feeds["image"].astype(np.int8)})
    assert program.run(feeds)["probabilities"].shape == (1, 10)


def test_corrupt_file_is_refused(whole: Slice, tmp_path: Path) -> None:
    """A file that LiteRT cannot read is refused."""
    (tmp_path / "model.tflite").write_bytes(b"\0" * 64)
    with pytest.raises(ModelRefused, match="LiteRT cannot load it"):
        LiteRtRuntime().load(whole, tmp_path)


def test_tensors_other_than_the_manifests_are_refused(whole: Slice, tmp_path: Path) -> None:
    """A file whose inputs are not those that were signed is refused."""
    with pytest.raises(ModelRefused, match="other tensors than its manifest says"):
        LiteRtRuntime().load(msgspec.structs.replace(whole, inputs=()), tmp_path)


def test_plain_kernels_run_on_request(whole: Slice, tmp_path: Path) -> None:
    """A slice of a model that the default delegate refuses runs without that delegate, even if the delegate would
    accept it."""
    feeds = tflite_models.feeds_of(tflite_models.prepared("chain"))
    plain = LiteRtRuntime().load(msgspec.structs.replace(whole, kernels="plain"), tmp_path).run(feeds)
    usual = LiteRtRuntime().load(whole, tmp_path).run(feeds)
    np.testing.assert_allclose(plain["probabilities"], usual["probabilities"], atol=1e-5)
    _, kernels = tflite.open_interpreter(tmp_path / "model.tflite", kernels="plain")
    assert kernels == "plain"


def test_concurrent_runs_get_their_own_answers(whole: Slice, tmp_path: Path) -> None:
    """One program called by several threads gives each its own answer."""
    program = LiteRtRuntime().load(whole, tmp_path)
    model = tflite_models.prepared("chain")
    feeds = [tflite_models.feeds_of(model, seed) for seed in range(4)]
    wanted = [program.run(feed)["probabilities"].tobytes() for feed in feeds]
    got: dict[int, set[bytes]] = {number: set() for number in range(4)}

    def ask(number: int) -> None:
        for _ in range(20):
            got[number].add(program.run(feeds[number])["probabilities"].tobytes())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: {answer} for number, answer in enumerate(wanted)}
