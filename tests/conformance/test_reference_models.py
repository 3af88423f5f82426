"""Trained models from outside, cut at random: the chain gives the whole's bits, and the stored reference answers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from edgesplit_partitioner.onnx_format.model import prepare_model
from edgesplit_partitioner.slicing import atoms, cut_slices
from support import onnx_models as tiny
from support.reference_models import FOLDER, reference_file

SEED = 11
TOLERANCE = 1e-4
"""Of the largest absolute value of each output."""

MODELS = {
    "squeezenet_fp32": {},
    "yolox_nano": {},
    "ultraface_rfb_320": {},
    "mnist_cnn": {},
    "silero_vad_16k": {"batch": 1, "sequence": 576},
    "dtln_1": {},
    "dtln_2": {},
    "gesture_mlp": {"batch": 1},
}
"""Bindings by model."""


@pytest.mark.parametrize("name", MODELS)
def test_cut_reference_model_answers_like_the_whole(name: str, tmp_path: Path) -> None:
    """Three tables of random cuts: bit for bit the whole model's outputs, and the reference within 1e-4."""
    file = reference_file("models", f"{name}.onnx")
    model = prepare_model(file.read_bytes(), MODELS[name])
    reference = next(iter(sorted((FOLDER / "ref").glob(f"{name}[._]onnx__*.npz"))))
    with np.load(reference) as stored:
        feeds = {key.removeprefix("in:"): stored[key] for key in stored.files if key.startswith("in:")}
        wanted = {key.removeprefix("out:"): stored[key] for key in stored.files if key.startswith("out:")}
    whole = tiny.run_whole(model.raw, feeds)
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for number in range(3):
        sets = [tiny.closed_set(model.graph, rng) for _ in range(3)]
        slices = cut_slices(model, model.graph, atoms(model.graph, sets), None)
        live = tiny.run_chain(tmp_path / str(number), model, slices, feeds)
        assert tiny.same_bits(live, whole), f"{name}: {sets}"
    assert set(wanted) <= set(whole)
    for output, values in wanted.items():
        scale = max(float(np.abs(values).max()), 1e-30)
        assert float(np.abs(whole[output].astype(np.float64) - values).max()) <= TOLERANCE * scale, output


def test_a_model_inside_an_if_is_cut_once_its_rate_is_bound(tmp_path: Path) -> None:
    """Silero's 8 and 16 kHz networks are the branches of one If: bound to one rate, the other is gone, and what is left
    is cut bit for bit."""
    file = reference_file("hostile", "silero_vad_if.onnx")
    with np.load(FOLDER / "ref" / "silero_vad_if.onnx__noise.npz") as stored:
        feeds = {key.removeprefix("in:"): stored[key] for key in stored.files if key.startswith("in:")}
        wanted = {key.removeprefix("out:"): stored[key] for key in stored.files if key.startswith("out:")}
    length = feeds["input"].shape[1]
    bindings = {"input:0": 1, "input:1": length, "state:1": 1, "sr": int(feeds.pop("sr"))}
    model = prepare_model(file.read_bytes(), bindings)
    assert len(model.graph.layers) > 20
    whole = tiny.run_whole(model.raw, feeds)
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    sets = [tiny.closed_set(model.graph, rng) for _ in range(4)]
    slices = cut_slices(model, model.graph, atoms(model.graph, sets), None)
    assert tiny.same_bits(tiny.run_chain(tmp_path, model, slices, feeds), whole)
    for output, values in wanted.items():
        assert float(np.abs(whole[output] - values).max()) <= TOLERANCE * float(np.abs(values).max())
