"""Trained TFLite models from outside, cut at random: the chain gives the whole's bits, and the reference answers.

What cannot be cut is refused for the reason that is true.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from edgesplit.errors import ModelRefused
from edgesplit.runtime import run_slices
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.loader import load_slices
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.slicing import atoms, cut_slices
from support import onnx_models, tflite_models
from support.reference_models import reference_file

SEED = 11
TOLERANCE = 1e-4
"""Of the largest absolute value of each floating-point output."""
STEPS = 2
"""Integer kernels differ by a step between processors."""

MODELS = {
    "models/mobilenet_v1_0.25_224_float": "mobilenet_v1_0.25_224_float.tflite__cat",
    "models/mobilenet_v1_0.75_192_quant": "mobilenet_v1_0.75_192_quant.tflite__cat",
    "models/resnet8_cifar10_float": "resnet8_cifar10_float.tflite__cifar0",
    "models/resnet8_cifar10_int8": "resnet8_cifar10_int8.tflite__cifar0",
    "models/dtln_1": "dtln_1_tflite__rand",
    "models/dtln_2": "dtln_2_tflite__rand",
    "models/gesture_mlp": "gesture_mlp.tflite__row0",
    "hostile/deeplabv3_xnnpack_refuses": "",
}
"""Stored tensors by model; deeplab, which LiteRT runs on plain kernels only, has none."""


@pytest.mark.parametrize("name", MODELS)
def test_cut_reference_model_answers_like_the_whole(tmp_path: Path, name: str) -> None:
    """Three tables of random cuts and one of every prefix: bit for bit the outputs of the file as it came."""
    raw = reference_file(f"{name}.tflite").read_bytes()
    model = prepare_model(raw)
    feeds = tflite_models.feeds_of(model)
    wanted = {}
    if MODELS[name]:
        with np.load(reference_file("ref", f"{MODELS[name]}.npz")) as stored:
            feeds = {key.removeprefix("in:"): stored[key] for key in stored.files if key.startswith("in:")}
            wanted = {key.removeprefix("out:"): stored[key] for key in stored.files if key.startswith("out:")}
    whole = tflite_models.run_whole(raw, feeds, tmp_path)
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    layers = [layer.name for layer in model.graph.layers]
    tables = [[onnx_models.closed_set(model.graph, rng) for _ in range(3)] for _ in range(3)]
    tables.append([frozenset(layers[:count]) for count in range(len(layers) + 1)])
    for number, sets in enumerate(tables):
        slices = cut_slices(model, model.graph, atoms(model.graph, sets), None)
        onnx_models.write_slices(tmp_path / str(number), slices)
        manifest = onnx_models.manifest_of(model, slices)
        programs = load_slices(manifest, lambda one, n=number: tmp_path / str(n) / one, DispatchingRuntime())
        live = run_slices(programs, [one.slice.name for one in slices], feeds)
        assert onnx_models.same_bits(live, whole), f"{name}: {sets}"
    assert set(wanted) <= set(whole)
    for output, values in wanted.items():
        apart = float(np.abs(whole[output].astype(np.float64) - values).max())
        allowed = TOLERANCE * max(float(np.abs(values).max()), 1e-30) if values.dtype.kind == "f" else STEPS
        assert apart <= allowed, output


def test_deeplab_runs_on_plain_kernels() -> None:
    """LiteRT's default delegate refuses the model: its slices say so, all of them."""
    model = prepare_model(reference_file("hostile", "deeplabv3_xnnpack_refuses.tflite").read_bytes())
    assert model.kernels == "plain"
    slices = cut_slices(model, model.graph, atoms(model.graph, []), None)
    assert [one.slice.kernels for one in slices] == ["plain"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("posenet_custom_op", "unknown operator 'PosenetDecoderOp'"),
        ("person_detect_bad_quant", "quantized_dimension must be in range"),
    ],
)
def test_hostile_models_are_refused_for_the_true_reason(name: str, reason: str) -> None:
    """What LiteRT cannot run is refused in its words."""
    with pytest.raises(ModelRefused, match=reason):
        prepare_model(reference_file("hostile", f"{name}.tflite").read_bytes())


def test_compiled_model_is_one_layer() -> None:
    """A file compiled for the Edge TPU is one layer, with its twin's inputs and outputs."""
    folder = reference_file("models")
    compiled = prepare_model((folder / "mobilenet_v1_0.75_192_quant_edgetpu.tflite").read_bytes())
    twin = prepare_model((folder / "mobilenet_v1_0.75_192_quant.tflite").read_bytes())
    assert len(compiled.graph.layers) == 1
    assert (compiled.inputs, compiled.outputs) == (twin.inputs, twin.outputs)
