"""The model that the demo and the tests run on, cut after every layer, on frames it has never seen."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgesplit.input_spec import FRAME, parse_input_spec, prepare
from edgesplit_partitioner.onnx_format.model import prepare_model, with_input_layer
from edgesplit_partitioner.slicing import atoms, cut_slices
from support import REPOSITORY
from support import onnx_models as tiny

FOLDER = REPOSITORY / "examples" / "digits"
SPEC = "image/jpeg 128x128 q85 rgb nchw scale=1/255"


def test_digits_cut_after_every_layer_equal_the_whole(tmp_path: Path) -> None:
    """From a held-out JPEG, every prefix on the device and the rest beyond the link gives the whole's bits."""
    if not (FOLDER / "digits.onnx").exists():
        pytest.skip("examples/digits/digits.onnx is not there: train it with examples/digits/train.py")
    model = prepare_model((FOLDER / "digits.onnx").read_bytes())
    graph, spec = with_input_layer(model, parse_input_spec(SPEC))
    frame = sorted((FOLDER / "frames").glob("*.jpg"))[0].read_bytes()
    whole = tiny.run_whole(model.raw, {spec.tensor: prepare(spec, frame)})
    names = [layer.name for layer in graph.layers]
    for count in range(len(names) + 1):
        slices = cut_slices(model, graph, atoms(graph, [frozenset(names[:count])]), spec)
        feeds = {FRAME: np.frombuffer(frame, np.uint8)}
        live = tiny.run_chain(tmp_path / str(count), model, slices, feeds, spec)
        assert tiny.same_bits(live, whole), names[:count][-1:]


def test_digits_tflite_twin_is_right_on_the_same_frames() -> None:
    """The TFLite twin takes no frame for another digit than the ONNX model does, and the script makes that file."""
    sys.path.insert(0, str(FOLDER))
    try:
        from evaluate import mistakes
        from to_tflite import to_tflite
    finally:
        sys.path.remove(str(FOLDER))
    assert to_tflite(onnx.load(FOLDER / "digits.onnx")) == (FOLDER / "digits.tflite").read_bytes()
    assert mistakes(FOLDER / "digits.tflite", FOLDER / "frames") == mistakes(FOLDER / "digits.onnx", FOLDER / "frames")
